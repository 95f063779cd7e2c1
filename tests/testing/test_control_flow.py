"""Threads diverge, reconverge, loop, exit, and wait at barriers."""

import numpy as np
import pytest
from ptx_kernels import results, run

from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault

STORE = "add.s64 %d1, %out, %at4; st.global.b32 [%d1], {};"


def test_lanes_take_different_branches_and_reconverge():
    body = f"""
        and.b32 %r1, %tid, 3;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 bra $A;
        setp.eq.s32 %p2, %r1, 1;
        @%p2 bra $B;
        mov.u32 %r2, 30;
        bra.uni $END;
    $A: mov.u32 %r2, 10;
        bra $END;
    $B: mov.u32 %r2, 20;
    $END:
        activemask.b32 %r3;
        setp.eq.b32 %p3, %r3, -1;
        @!%p3 mov.u32 %r2, 99;
        {STORE.format("%r2")}
    """
    assert results(body) == [10, 20, 30, 30] * 16


def test_each_lane_loops_as_often_as_it_asks_for():
    body = f"""
        mov.u32 %r1, 0; mov.u32 %r2, 0;
    $LOOP:
        setp.ge.u32 %p1, %r1, %tid;
        @%p1 bra $END;
        add.s32 %r1, %r1, 1;
        add.s32 %r2, %r2, %r1;
        bra $LOOP;
    $END:
        {STORE.format("%r2")}
    """
    assert results(body) == [n * (n + 1) // 2 for n in range(64)]


def test_blocks_know_their_place_in_a_grid_of_three_axes():
    out = np.zeros((4, 3, 2, 32, 4), np.int32)
    body = """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r4, %laneid;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nctaid.y;
        mad.lo.s32 %r7, %r3, %r6, %r2; mad.lo.s32 %r7, %r7, %r5, %r1;
        mad.lo.s32 %r7, %r7, 32, %tid; mul.wide.u32 %d1, %r7, 16; add.s64 %d1, %d1, %out;
        st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};
    """
    run(body, {"out": out}, grid=(2, 3, 4))
    z, y, x, lane = np.indices((4, 3, 2, 32))
    assert (out == np.stack([x, y, z, lane], -1)).all()


def test_a_batch_of_blocks_gives_the_same_as_one_block_at_a_time():
    body = f"mad.lo.s32 %r1, %id, 3, 1; {STORE.format('%r1')}"
    for batch in (32, 100, 10**5):
        found = results(body, 32, grid=(9,), executor=Executor(batch_threads=batch))
        assert found == [3 * n + 1 for n in range(9 * 32)]


EXCHANGE = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %tid, 2; add.s32 %r3, %r1, %r2;
    st.shared.b32 [%r3], %id;
    {barrier}
    xor.b32 %r4, %r2, 252; add.s32 %r4, %r4, %r1;
    ld.shared.b32 %r5, [%r4];
    add.s64 %d1, %out, %at4; st.global.b32 [%d1], %r5;
"""
SHARED = ".extern .shared .align 16 .b8 smem[];"


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync.aligned 1;", "bar.cta.sync 3;"])
def test_warps_exchange_values_across_a_barrier(barrier):
    body = EXCHANGE.format(barrier=barrier)
    found = results(body, grid=(3,), shared=256, declarations=SHARED)
    assert np.reshape(found, (3, 64)).tolist() == [
        list(range(64 * b + 63, 64 * b - 1, -1)) for b in range(3)
    ]


def test_a_missing_barrier_is_a_fault():
    with pytest.raises(Fault, match=r"race in shared memory .* another warp's write"):
        results(EXCHANGE.format(barrier=""), shared=256, declarations=SHARED)


def test_a_barrier_in_one_branch_is_a_fault():
    body = "setp.lt.u32 %p1, %tid, 32; @%p1 bra $END; bar.sync 0; $END:"
    waits = "in block 0, 32 of 64 threads wait at it, the first is thread 32"
    with pytest.raises(Fault, match=f"not all threads of a block reach the same barrier: {waits}"):
        results(body)
    results("setp.lt.u32 %p1, %block, 1; @%p1 bra $END; bar.sync 0; $END:", grid=(2,))


def test_threads_that_exit_before_a_barrier_are_a_fault():
    with pytest.raises(Fault, match="not all threads of a block reach"):
        results("setp.lt.u32 %p1, %tid, 32; @%p1 ret; bar.sync 0;")


def test_a_program_that_does_not_end_is_a_fault():
    place = "this one is next in 64 of 64 threads, first in thread 0 of block 0"
    reason = f"the launch does not end within 5000 instructions; {place}"
    with pytest.raises(Fault, match=rf"k, .*: `bra \$LOOP`\n{reason}"):
        results("$LOOP: bra $LOOP;", executor=Executor(max_instructions=5000))


def test_an_undefined_predicate_must_not_decide_a_branch():
    with pytest.raises(Fault, match=r"`@%p1 bra \$END`\nundefined value as the predicate"):
        results("@%p1 bra $END; $END:")
    with pytest.raises(Fault, match="undefined value as a guard predicate"):
        results("@%p1 mov.u32 %r1, 0;")


def test_executed_instructions_of_threads_are_counted():
    # 32 lanes execute mov and setp, 16 of them add, and all bra and ret
    body = "mov.u32 %r1, 0; setp.lt.u32 %p1, %tid, 16; @%p1 bra $A; add.s32 %r1, %r1, 1; $A:"
    assert results("", 32) == [-7] * 32
    counts = []
    for text in ("", body):
        executor = Executor()
        results(text, 32, executor=executor)
        counts.append(executor.thread_instructions)
    assert counts[1] - counts[0] == 32 * 3 + 16
    assert executor.launches == ["k"]
    assert executor.seconds > 0
