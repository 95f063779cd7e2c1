"""PTX is parsed, and what is not implemented is rejected by name before anything is executed."""

import pytest
from ptx_kernels import text_of

from gcnzc.testing.decoder import load_program
from gcnzc.testing.faults import UnsupportedInstruction
from gcnzc.testing.program import parse


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.b32 %r1, %r2",
        "cp.async.bulk.shared::cluster.global [%r1], [%d1], 16, [%r2]",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4}",
        "add.sat.s32 %r1, %r2, %r3",
        "addc.s32 %r1, %r2, %r3",
        "add.s128 %r1, %r2, %r3",
        "mul.s32 %r1, %r2, %r3",
        "add.s32 %r1, %r2",
        "add.s32 %r1, %r2, %nothing",
        "add.s64 %d1, %d2, %r1",
        "mov.u32 %r1, %clock",
        "ld.local.b32 %r1, [%d1]",
        "ld.b32 %r1, [%d1]",
        "ld.global.v2.b32 {%r1, %r2, %r3}, [%d1]",
        "ld.global.mystery.b32 %r1, [%d1]",
        "ld.global.b32 %r1, [%d1 * 2]",
        "ld.param.b32 %r1, [unknown]",
        "cvt.rn.e4m3x2.f32 %h1, %r1, %r2",
        "cvt.rn.s32.f32 %r1, %r2",
        "cvt.rzi.f32.s32 %r1, %r2",
        "shfl.bfly.b32 %r1, %r2, 1, 31",
        "shfl.sync.sideways.b32 %r1, %r2, 1, 31, -1",
        "vote.sync.some.pred %p1, %p2, -1",
        "redux.sync.add.f32 %r1, %r2, -1",
        "redux.sync.mul.u32 %r1, %r2, -1",
        "atom.global.mul.u32 %r1, [%d1], %r2",
        "atom.global.cas.b32 %r1, [%d1], %r2",
        "bar.arrive 0, 64",
        "bar.sync 0, 64",
        "bra $nowhere",
        "call.uni (%r1), function, (%r2)",
        "shf.l.b32 %r1, %r2, %r3, %r4",
        "setp.less.s32 %p1, %r1, %r2",
        "setp.lt.nand.s32 %p1, %r1, %r2, %p2",
        "setp.lt.f16x2 %p1|%p2, %r1, %r2",
        "setp.lt.bf16x2 %p1|%p2, %r1, %r2",
        "cvt.rn.satfinite.f16x2.f32 %r1, %r2, %r3",
        "cvt.rn.satfinite.bf16x2.f32 %r1, %r2, %r3",
        "add.rn.ftz.bf16 %h1, %h2, %h3",
        "fma.rn.ftz.bf16x2 %r1, %r2, %r3, %r4",
        "ex2.approx.bf16 %h1, %h2",
        "mul.f32.bf16 %r1, %h2, %r3",
        "add.rz.f32.bf16 %r1, %h2, %r3",
        "fma.rn.f32.f32 %r1, %r2, %r3, %r4",
        "ld.shared.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%r9]",
        "st.shared.v4.b64 [%r9], {%d1, %d2, %d3, %d4}",
        "ld.global.v8.b64 {%d1, %d2, %d3, %d4, %d5, %d6, %d7, %d8}, [%d9]",
        "@%missing add.s32 %r1, %r2, %r3",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1}, [%r2]",
    ],
)
def test_instructions_that_are_not_implemented_are_rejected(instruction):
    with pytest.raises(UnsupportedInstruction) as raised:
        load_program(text_of(f"{instruction};"))
    assert str(raised.value).startswith(f"k: the PTX executor does not implement `{instruction}`")
    assert "\n\nhint: " in str(raised.value)


@pytest.mark.parametrize("text", ["", ".version 8.7", ".visible .func f() { ret; }"])
def test_a_text_without_a_kernel_is_rejected(text):
    local = ".visible .entry mine() { .local .align 4 .b8 __local_depot0[28]; ret; }"
    with pytest.raises(UnsupportedInstruction, match=r"mine: .*local memory, such as of tl.sin"):
        parse(local)
    with pytest.raises(UnsupportedInstruction, match=r"there is no \.entry"):
        parse(text)


def test_declarations_that_are_not_implemented_are_rejected():
    for text in (".reg .b128 %q1;", ".local .align 4 .b8 stack[16];", ".branchtargets $A;"):
        with pytest.raises(UnsupportedInstruction):
            load_program(text_of(text))


def test_the_parts_of_a_kernel():
    kernel = parse("""
        // a comment with ; and { in it
        .visible .entry name(.param .u64 name_param_0, .param .u32 name_param_1) .reqntid 128
        {
            .reg .pred %p<2>; .reg .b32 %r<3>;
            .loc 1 20 3
            /* mov.u32 %r1, 1; */
            .pragma "nounroll";
        $L__BB0_1: @!%p1 ld.global.v2.b32 { %r1, %r2 }, [ %r2 + 8 ];
            ret;
        }
        .file 1 "/folder/kernel.py"
    """)
    assert kernel.name == "name"
    assert kernel.symbols.parameters == ["name_param_0", "name_param_1"]
    assert list(kernel.symbols.registers) == ["%p0", "%p1", "%r0", "%r1", "%r2"]
    load, end = kernel.instructions
    assert load.opcode == ("ld", "global", "v2", "b32")
    assert load.operands == ("{ %r1, %r2 }", "[ %r2 + 8 ]")
    assert (load.guard, load.is_negated, load.source) == ("%p1", True, "kernel.py:20")
    assert kernel.labels == {"$L__BB0_1": 0}
    assert end.name == "ret"


def test_registers_of_an_inner_scope_hide_those_outside():
    kernel = parse("""
        .visible .entry name() {
            .reg .b32 %a, %b;
            mov.b32 %a, 1;
            { .reg .b32 %a; mov.b32 %a, 2; mov.b32 %b, %a; }
            mov.b32 %b, %a;
        }
    """)
    first, inner, copied, last = (i.operands for i in kernel.instructions)
    assert first[0] == last[1] == "%a"
    assert inner[0] == copied[1] != "%a"
    assert copied[0] == last[0] == "%b"
