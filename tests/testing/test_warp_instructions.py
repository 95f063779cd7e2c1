"""Shuffles, votes and reductions across the lanes of a warp."""

import functools
import itertools
import operator

import numpy as np
import pytest
from ptx_kernels import integers, results, run, signed

from gcnzc.testing.faults import Fault, UnsupportedInstruction

STORE = "add.s64 %d1, %out, %at4; st.global.b32 [%d1], {};"


@pytest.mark.parametrize(
    ("mode", "offset", "clamp", "source"),
    [
        ("bfly", 1, 31, lambda lane: lane ^ 1),
        ("bfly", 16, 31, lambda lane: lane ^ 16),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("idx", 5, 31, lambda lane: 5),
        # segments of 8 lanes: the clamp has their mask in bits 8 to 12
        ("idx", 5, (24 << 8) | 31, lambda lane: lane // 8 * 8 + 5),
        ("down", 3, (24 << 8) | 31, lambda lane: lane + 3 if lane % 8 + 3 < 8 else lane),
        ("up", 3, 24 << 8, lambda lane: lane - 3 if lane % 8 >= 3 else lane),
        ("bfly", 8, (24 << 8) | 31, lambda lane: lane if lane % 16 < 8 else lane ^ 8),
    ],
)
def test_shuffles(mode, offset, clamp, source):
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %tid, {offset}, {clamp}, -1;"
    expected = [thread - thread % 32 + source(thread % 32) for thread in range(64)]
    assert results(body + STORE.format("%r1")) == expected
    # the predicate is false in lanes whose source is out of range; they read their own value
    if (mode, offset) == ("down", 3) and clamp == 31:
        valid = results(body + "selp.b32 %r2, 1, 0, %p1;" + STORE.format("%r2"))
        assert valid == [int(thread % 32 < 29) for thread in range(64)]


def test_votes():
    odd = "and.b32 %r1, %tid, 1; setp.eq.s32 %p1, %r1, 1; setp.ge.u32 %p2, %tid, 32;"
    ballot = results(odd + "vote.sync.ballot.b32 %r2, %p1, -1;" + STORE.format("%r2"))
    assert ballot == [signed(0xAAAAAAAA, 32)] * 64
    for mode, of_odd, of_second in (("any", 1, [0, 1]), ("all", 0, [0, 1]), ("uni", 0, [1, 1])):
        text = odd + f"vote.sync.{mode}.pred %p3, %p{{}}, -1; selp.b32 %r2, 1, 0, %p3;"
        assert results(text.format(1) + STORE.format("%r2")) == [of_odd] * 64
        expected = [of_second[0]] * 32 + [of_second[1]] * 32
        assert results(text.format(2) + STORE.format("%r2")) == expected
    negated = results(odd + "vote.sync.ballot.b32 %r2, !%p2, -1;" + STORE.format("%r2"))
    assert negated == [-1] * 32 + [0] * 32


def test_instructions_across_the_active_lanes_of_a_branch():
    body = f"""
        mov.u32 %r1, 0; mov.u32 %r2, 0; and.b32 %r3, %tid, 31; setp.ge.u32 %p1, %r3, 8;
        @%p1 bra $END;
        activemask.b32 %r1;
        setp.gt.u32 %p2, %r3, 3; vote.sync.ballot.b32 %r4, %p2, 0xff;
        redux.sync.add.u32 %r5, %r3, 0xff; shl.b32 %r5, %r5, 8; or.b32 %r2, %r4, %r5;
    $END:
        shl.b32 %r2, %r2, 8; or.b32 %r1, %r1, %r2;
        {STORE.format("%r1")}
    """
    inside = 0xFF | 0xF0 << 8 | 28 << 16
    assert results(body) == ([inside] * 8 + [0] * 24) * 2


REDUCTIONS = {"add": operator.add, "min": min, "max": max}
REDUCTIONS |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
FORMS = [*itertools.product(("add", "min", "max"), ("s32", "u32"))]
FORMS += itertools.product(("and", "or", "xor"), ("b32",))


@pytest.mark.parametrize(("operation", "kind"), FORMS)
def test_reductions(operation, kind):
    values = integers(kind, 32)
    source, out = np.array(values, np.uint32), np.zeros(32, np.uint32)
    body = f"""
        add.s64 %d1, %source, %at4; ld.global.b32 %r1, [%d1];
        redux.sync.{operation}.{kind} %r2, %r1, 0xffffffff; {STORE.format("%r2")}
    """
    run(body, {"source": source, "out": out})
    exact = [signed(v, 32) for v in values] if kind == "s32" else values
    total = functools.reduce(REDUCTIONS[operation], exact)
    assert out.tolist() == [total & 0xFFFFFFFF] * 32


def test_lanes_wait_for_others_whose_code_is_behind_the_instruction():
    body = f"""
        setp.gt.u32 %p1, %tid, 2;
        mov.u32 %r2, %tid;
        @%p1 bra RARE;
        JOIN:
        shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;
        {STORE.format("%r1")}
        bra DONE;
        RARE:
        add.u32 %r2, %r2, 100;
        bra JOIN;
        DONE:
    """
    sent = [lane + 100 * (lane > 2) for lane in range(32)]
    assert results(body)[:32] == [sent[lane ^ 1] for lane in range(32)]
    # lanes that never come
    with pytest.raises(Fault, match=r"the member mask 0xffffffff differs .* 0x00000007"):
        results(body.replace("bra JOIN", "bar.sync 0; bra DONE"))
    # lanes that have exited
    with pytest.raises(Fault, match=r"shuffle from a lane .* first in thread 2 of block 0"):
        results(body.replace("bra JOIN", "bra DONE"))


LANE = "and.b32 %r3, %tid, 31; setp.lt.u32 %p1, %r3, 16; and.b32 %r4, %tid, 1;"
ODD = "setp.eq.u32 %p2, %r4, 1;"


def test_lanes_that_have_exited_may_be_in_the_member_mask():
    exit_upper = LANE + ODD + "@!%p1 ret;"
    for instruction, expected in (
        ("vote.sync.ballot.b32 %r5, %p2, -1;", [0xAAAA] * 16),
        ("vote.sync.all.pred %p3, %p1, -1; selp.b32 %r5, 1, 0, %p3;", [1] * 16),
        ("redux.sync.add.u32 %r5, %r3, -1;", [sum(range(16))] * 16),
        ("shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1;", [lane ^ 1 for lane in range(16)]),
    ):
        found = results(exit_upper + instruction + STORE.format("%r5"))
        assert found == (expected + [-7] * 16) * 2, instruction
    with pytest.raises(Fault, match="shuffle from a lane that does not execute it"):
        results(exit_upper + "shfl.sync.bfly.b32 %r5, %r3, 16, 31, -1;")
    # the mask must have all lanes that execute
    with pytest.raises(Fault, match=r"the member mask 0xffff00ff differs .* 0x0000ffff"):
        results(exit_upper + "vote.sync.ballot.b32 %r5, %p2, 0xffff00ff;")


def test_the_member_mask_must_name_the_lanes_that_execute():
    with pytest.raises(Fault, match=r"the member mask 0x0000ffff differs .* 0xffffffff"):
        results("shfl.sync.bfly.b32 %r1, %tid, 1, 31, 0xffff;")
    body = "setp.lt.u32 %p1, %tid, 8; @%p1 vote.sync.any.pred %p2, %p1, -1;"
    with pytest.raises(Fault, match=r"the member mask 0xffffffff differs .* 0x000000ff"):
        results(body)


def test_an_undefined_vote_is_a_fault():
    with pytest.raises(Fault, match="undefined value as a vote"):
        results("vote.sync.any.pred %p2, %p1, -1;")
    with pytest.raises(Fault, match="undefined value as an operand of a reduction"):
        results("redux.sync.add.u32 %r2, %r1, -1;")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("min", -7.5), ("max", 6.0), ("max.abs", 7.5), ("min.abs", 0.25), ("max.NaN", np.nan)],
)
def test_reductions_of_floating_point(operation, expected):
    values = np.full(32, 0.25, np.float32)
    values[[3, 9, 30]] = -7.5, 6.0, np.nan
    out = np.zeros(32, np.float32)
    body = f"""
        add.s64 %d1, %source, %at4; ld.global.b32 %r1, [%d1];
        redux.sync.{operation}.f32 %r2, %r1, 0xffffffff; {STORE.format("%r2")}
    """
    run(body, {"source": values, "out": out})
    np.testing.assert_array_equal(out, np.full(32, expected, np.float32))


def test_reductions_of_other_types_are_rejected():
    for form in ("add.f32", "max.NaN.u32", "and.u32", "max.ftz.f32"):
        with pytest.raises(UnsupportedInstruction, match="redux"):
            run(f"redux.sync.{form} %r2, %r1, -1;")
