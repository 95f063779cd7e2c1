"""Loads and stores reach what they should, and an access of anything else is a fault."""

import numpy as np
import pytest
from ptx_kernels import run, text_of

from gcnzc.testing.decoder import load_program
from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault
from gcnzc.testing.global_memory import GlobalMemory

SHARED = ".extern .shared .align 16 .b8 smem[];"


@pytest.mark.parametrize(
    ("bits", "count"),
    [(bits, count) for bits in (8, 16, 32, 64) for count in (1, 2, 4) if bits * count <= 128],
)
def test_vectors_of_words_are_copied(bits, count):
    source = np.random.default_rng(0).integers(0, 255, 32 * count * bits // 8, dtype=np.uint8)
    out = np.zeros_like(source)
    registers = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}[bits]
    names = ", ".join(f"{registers}{10 + n}" for n in range(count))
    vector = f".v{count}" if count > 1 else ""
    size = count * bits // 8
    body = f"""
        mul.wide.u32 %d1, %tid, {size}; add.s64 %d2, %d1, %source; add.s64 %d3, %d1, %out;
        ld.global{vector}.b{bits} {{ {names} }}, [ %d2 + 0 ];
        st.global{vector}.b{bits} [%d3], {{ {names} }};
    """
    run(body, {"source": source, "out": out})
    assert (out == source).all()


def test_a_narrow_load_is_extended_by_its_type():
    source, out = np.array([200] * 32, np.uint8), np.zeros(64, np.int32)
    body = """
        add.s64 %d1, %source, %at1; add.s64 %d2, %out, %at8;
        ld.global.s8 %r1, [%d1]; ld.global.u8 %r2, [%d1]; st.global.v2.b32 [%d2], {%r1, %r2};
    """
    run(body, {"source": source, "out": out})
    assert out.tolist() == [-56, 200] * 32


def test_parameters_are_read_as_their_types():
    ptx = """
        .visible .entry k(.param .u64 .ptr .global .align 1 k_0, .param .u32 k_1, .param .f32 k_2)
        { .reg .b64 %d<3>; .reg .b32 %r<3>; ld.param.b64 %d1, [k_0]; ld.param.b32 %r1, [k_1];
          ld.param.b32 %r2, [k_2]; st.global.v2.b32 [%d1], {%r1, %r2}; ret; }
    """
    out, memory = np.zeros(2, np.int32), GlobalMemory()
    address = memory.map("out", out.ctypes.data, out.nbytes)
    arguments = [("u64", address), ("s32", -3), ("f32", 1.5)]
    Executor(allowed_races=["out"]).launch(load_program(ptx), (1,), 32, arguments, memory)
    assert out[0] == -3
    assert out[1:].view(np.float32)[0] == 1.5
    with pytest.raises(ValueError, match="k has 3 parameters, not 1\n\nhint: "):
        Executor().launch(load_program(ptx), (1,), 32, arguments[:1], memory)
    with pytest.raises(ValueError, match="a block cannot have 33 threads\n\nhint: "):
        Executor().launch(load_program(ptx), (1,), 33, arguments, memory)


# -- faults in global memory


def loads_at(offset, size=4):
    kind, register = {4: ("b32", "%r1"), 16: ("v4.b32", "{%r1, %r2, %r3, %r4}")}[size]
    return f"add.s64 %d1, %source, %at{size}; ld.global.{kind} {register}, [%d1+{offset}];"


def test_one_byte_after_or_before_an_argument_is_a_fault():
    source = np.zeros(32, np.int32)
    run(loads_at(0), {"source": source})
    with pytest.raises(
        Fault, match=r"4 B at 0x\w+ by thread 31 of block 0: out of bounds of source"
    ):
        run(loads_at(4), {"source": source})
    with pytest.raises(Fault, match=r"thread 0 of block 0: out of bounds.*128 bytes: offset -4"):
        run(loads_at(-4), {"source": source})
    # the last vector begins in the argument, and ends after it
    with pytest.raises(Fault, match=r"16 B .*thread 31 .*which has 508 bytes: offset 496"):
        run(loads_at(0, 16), {"source": np.zeros(127, np.int32)})
    with pytest.raises(Fault, match="out of bounds of source"):
        run(loads_at(0), {"source": source[:0]})


def test_a_write_to_read_only_memory_is_a_fault(tmp_path):
    np.arange(32, dtype=np.int32).tofile(tmp_path / "x")
    source = np.memmap(tmp_path / "x", np.int32, "r")
    out = np.zeros(32, np.int32)
    run(loads_at(0), {"source": source})
    store = "mul.wide.u32 %d1, %tid, 4; add.s64 %d1, %source, %d1; st.global.b32 [%d1], %tid;"
    with pytest.raises(Fault, match=r"4 B .*thread 0 of block 0: write to source, which is read-"):
        run(store, {"source": source})
    atomic = "atom.global.add.u32 %r5, [%source], 1;"
    with pytest.raises(Fault, match="write to source, which is read-only memory"):
        run(atomic, {"source": source})
    run(store, {"source": out})
    assert out.tolist() == list(range(32))


def test_a_misaligned_access_is_a_fault():
    with pytest.raises(Fault, match="address is not a multiple of 4"):
        run(loads_at(2), {"source": np.zeros(40, np.int32)})
    with pytest.raises(Fault, match="address is not a multiple of 16"):
        run(loads_at(8, 16), {"source": np.zeros(200, np.int32)})


def test_an_address_of_no_argument_is_a_fault():
    with pytest.raises(Fault, match="address belongs to no argument"):
        run("mov.u64 %d1, 0; ld.global.b32 %r1, [%d1];", {"source": np.zeros(4)})
    with pytest.raises(Fault, match="address belongs to no argument"):
        run("mov.u64 %d1, 0x7000000000000000; ld.global.b32 %r1, [%d1];", {"source": np.zeros(4)})


def test_addresses_that_are_stored_in_memory_reach_the_memory_that_is_named():
    target, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    pointer = np.array([target.ctypes.data], np.uint64)
    body = """
        ld.global.b64 %d1, [%pointer]; add.s64 %d1, %d1, %at4; ld.global.b32 %r1, [%d1{offset}];
        add.s64 %d2, %out, %at4; st.global.b32 [%d2], %r1;
    """
    program = load_program(text_of(body.format(offset=""), ["pointer", "out"]))
    memory = GlobalMemory()
    arguments = [
        ("u64", memory.map(name, array.ctypes.data, array.nbytes))
        for name, array in (("pointer", pointer), ("out", out))
    ]
    with pytest.raises(Fault, match="address belongs to no argument"):
        Executor().launch(program, (1,), 32, arguments, memory)
    memory.map_at_host_address("first half", target.ctypes.data, 80)
    memory.map_at_host_address("target", target.ctypes.data, target.nbytes)
    executor = Executor()
    executor.launch(program, (1,), 32, arguments, memory)
    assert (out == target).all()
    assert executor.counters["load", "first half/target"].lanes == 32
    beyond = load_program(text_of(body.format(offset="+4"), ["pointer", "out"]))
    with pytest.raises(Fault, match="out of bounds"):
        Executor().launch(beyond, (1,), 32, arguments, memory)


# -- shared memory


def test_shared_memory_out_of_bounds_or_misaligned_is_a_fault():
    body = "mov.u32 %r1, smem; mad.lo.s32 %r1, %tid, 4, %r1; st.shared.b32 [%r1+{}], 0;"
    run(body.format(0), shared=128, declarations=SHARED)
    with pytest.raises(
        Fault, match="out of bounds of shared memory, which has 128 bytes: offset 128"
    ):
        run(body.format(4), shared=128, declarations=SHARED)
    with pytest.raises(Fault, match="shared address is not a multiple of 4"):
        run(body.format(1), shared=128, declarations=SHARED)


def test_matrices_are_loaded_and_stored_as_by_eight_lanes():
    # element (row, column) of matrix m is 100 m + 10 row + column; 8 rows of 8 elements of 2 B
    matrices = np.array(
        [[[100 * m + 10 * r + c for c in range(8)] for r in range(8)] for m in range(2)]
    )
    source, out = matrices.astype(np.uint16), np.zeros((32, 2, 2), np.uint16)
    fill = """
        mov.u32 %r1, smem; mad.lo.s32 %r2, %tid, 8, %r1;
        add.s64 %d1, %source, %at8; ld.global.b64 %d2, [%d1]; st.shared.b64 [%r2], %d2;
        bar.sync 0; and.b32 %r3, %tid, 15; mad.lo.s32 %r3, %r3, 16, %r1;
    """
    load = "ldmatrix.sync.aligned.m8n8.x2{}.shared.b16 {{%r5, %r6}}, [%r3];"
    keep = "add.s64 %d3, %out, %at8; st.global.v2.b32 [%d3], {%r5, %r6};"
    lane = np.arange(32)
    for modifier, transposes in (("", False), (".trans", True)):
        arrays = {"source": source, "out": out}
        run(fill + load.format(modifier) + keep, arrays, shared=256, declarations=SHARED)
        for m in range(2):
            matrix = matrices[m].T if transposes else matrices[m]
            for half in range(2):
                expected = matrix[lane // 4, 2 * (lane % 4) + half]
                assert (out[:, m, half] == expected).all()
    store = """
        bar.sync 0; stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r6, %r5}; bar.sync 0;
        ld.shared.b64 %d2, [%r2]; add.s64 %d3, %out, %at8; st.global.b64 [%d3], %d2;
    """
    run(
        fill + load.format("") + store,
        {"source": source, "out": out},
        shared=256,
        declarations=SHARED,
    )
    assert (out.reshape(2, 8, 8) == matrices[::-1]).all()
    part = "setp.lt.u32 %p1, %tid, 16; @%p1 " + load.format("")
    with pytest.raises(Fault, match="ldmatrix by a part of a warp"):
        run(fill + part, {"source": source, "out": out}, shared=256, declarations=SHARED)


def test_rows_of_matrices_must_be_aligned():
    rows = "mov.u32 %r1, smem; and.b32 %r3, %tid, 7; mad.lo.s32 %r3, %r3, 16, %r1;"
    shift = "setp.eq.u32 %p1, %tid, {}; selp.b32 %r4, {}, 0, %p1; add.s32 %r3, %r3, %r4;"
    load = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r3];"
    store = "mov.b32 %r5, 0; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r5};"
    for instruction, used in ((load, 16), (store, 8)):
        for lane, offset in ((0, 8), (used - 1, 2), (used, 2)):
            body = rows + shift.format(lane, offset) + instruction
            if lane < used:
                message = f"16 B at .* by thread {lane} of block 0: .*not a multiple of 16"
                with pytest.raises(Fault, match=message):
                    run(body, shared=256, declarations=SHARED)
            else:
                # the address of this lane is not used
                run(body, shared=256, declarations=SHARED)


# -- undefined values

OUT = "add.s64 %d9, %out, %at4; st.global.b32 [%d9], {};"


def undefined(body, **options):
    out = np.zeros(64, np.int32)
    with pytest.raises(Fault, match="undefined value as") as raised:
        run(body, {"out": out}, threads=64, **options)
    return str(raised.value)


def test_an_undefined_register_must_not_be_stored():
    message = undefined(OUT.format("%r1"))
    assert "`st.global.b32 [%d9], %r1`\nundefined value as a stored value, in 64 of 64" in message
    # in one branch only
    text = "setp.ne.s32 %p1, %tid, 41; @%p1 mov.u32 %r1, 5; add.s32 %r2, %r1, 1;"
    assert "in 1 of 64 threads, first in thread 41 of block 0" in undefined(
        text + OUT.format("%r2")
    )


def test_undefined_values_spread_through_arithmetic():
    for text in (
        "add.s32 %r2, %r1, 1;",
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        "mov.b64 %d1, {%r1, %r1}; mov.b64 {%r2, %r3}, %d1;",
        "and.b32 %r2, %r1, 3;",
        "cvt.u16.u32 %h1, %r1; cvt.u32.u16 %r2, %h1;",
        "setp.eq.s32 %p1, %r1, 0; selp.b32 %r2, 1, 2, %p1;",
        "setp.ge.u32 %p1, %tid, 0; selp.b32 %r2, %r1, 2, %p1;",
    ):
        undefined(text + OUT.format("%r2"))


def test_an_undefined_value_that_has_no_effect_is_allowed():
    for text in (
        # of a value that is not selected, multiplied by no bits, or not needed to decide
        "setp.ge.u32 %p1, %tid, 0; selp.b32 %r2, 7, %r1, %p1;",
        "and.b32 %r2, %r1, 0; add.s32 %r2, %r2, 7;",
        "setp.lt.u32 %p1, %tid, 0; setp.eq.s32 %p2, %r1, 0; and.pred %p3, %p1, %p2;"
        "selp.b32 %r2, 1, 7, %p3;",
        "setp.ge.u32 %p1, %tid, 0; setp.eq.s32 %p2, %r1, 0; or.pred %p3, %p2, %p1;"
        "selp.b32 %r2, 7, 1, %p3;",
        "add.s32 %r3, %r1, 1; mov.u32 %r2, 7;",
    ):
        out = np.zeros(32, np.int32)
        run(text + OUT.format("%r2"), {"out": out})
        assert out.tolist() == [7] * 32


def test_the_halves_of_a_register_are_defined_apart():
    sums = "add.f32x2 %d2, %d1, %d1; fma.rn.f32x2 %d2, %d2, %d1, %d2;"
    for half, unpack in ((0, "mov.b64 {%r2, _}, %d2;"), (1, "mov.b64 {_, %r2}, %d2;")):
        one = ["{%r5, %r1}", "{%r1, %r5}"]
        body = f"mov.b32 %r5, 0x3f800000; mov.b64 %d1, {one[half]}; {sums}" + unpack
        out = np.zeros(32, np.float32)
        run(body + OUT.format("%r2"), {"out": out})
        assert out.tolist() == [4.0] * 32
        # the other half, and both together
        other = f"mov.b32 %r5, 0; mov.b64 %d1, {one[1 - half]}; {sums}" + unpack
        undefined(other + OUT.format("%r2"))
        undefined(body + "add.s64 %d9, %out, %at8; st.global.b64 [%d9], %d2;")
        # in some threads only
        part = f"setp.lt.u32 %p1, %tid, 16; @%p1 mov.b64 %d2, {one[1 - half]};"
        undefined(body + part + unpack + OUT.format("%r2"))
        assert not run(body + part.replace("%r1", "%r5") + unpack, {"out": out}).counters
        # a register that is written as a whole is defined as a whole
        whole = f"mov.b64 %d1, {one[half]}; mov.b64 %d1, 0; mov.b64 {{%r2, %r3}}, %d1;"
        run(f"mov.b32 %r5, 0; {whole} add.s32 %r2, %r2, %r3;" + OUT.format("%r2"), {"out": out})
        assert out.tolist() == [0.0] * 32


def test_undefined_shared_memory_must_not_be_stored():
    address = "mov.u32 %r1, smem; mad.lo.s32 %r2, %tid, 4, %r1;"
    undefined(address + "ld.shared.b32 %r3, [%r2];" + OUT.format("%r3"), shared=256,
              declarations=SHARED)  # fmt: skip
    # one of four bytes is undefined
    write = address + "st.shared.b8 [%r2], 1; st.shared.b16 [%r2+2], 1; ld.shared.b32 %r3, [%r2];"
    undefined(write + OUT.format("%r3"), shared=256, declarations=SHARED)
    out, full = np.zeros(32, np.int32), write.replace("ld.", "st.shared.b8 [%r2+1], 2; ld.")
    run(full + OUT.format("%r3"), {"out": out}, shared=128, declarations=SHARED)
    assert out.tolist() == [0x00010201] * 32
