"""Atomic operations on global and shared memory."""

import numpy as np
import pytest
from ptx_kernels import integers, run, signed

from gcnzc.testing.faults import Fault

SHARED = ".shared .align 16 .b8 smem[16];"
FUNCTIONS = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}
FORMS = [
    *(("add", kind) for kind in ("s32", "u32", "u64")),
    *((name, kind) for name in ("min", "max") for kind in ("s32", "u32", "s64", "u64")),
    *((name, kind) for name in ("and", "or", "xor", "exch") for kind in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize(("name", "kind"), FORMS)
def test_lanes_operate_one_after_another(name, kind):
    bits = int(kind[1:])
    values, dtype = integers(kind, 64), np.dtype(f"u{bits // 8}")
    source, out = np.array(values, dtype), np.zeros(64, dtype)
    total = np.array([3, 5], dtype)
    # each lane of even or odd number has its own total
    body = f"""
        .reg .b{bits} %x, %y; add.s64 %d1, %source, %at{bits // 8}; ld.global.b{bits} %x, [%d1];
        and.b32 %r1, %tid, 1; mul.wide.u32 %d2, %r1, {bits // 8}; add.s64 %d2, %d2, %total;
        atom.global.gpu.relaxed.{name}.{kind} %y, [%d2], %x;
        add.s64 %d3, %out, %at{bits // 8}; st.global.b{bits} [%d3], %y;
    """
    executor = run(body, {"source": source, "out": out, "total": total}, threads=64)
    of = (lambda v: signed(v, bits)) if kind[0] == "s" else int
    current, expected = [3, 5], []
    for thread, value in enumerate(values):
        expected.append(current[thread % 2])
        current[thread % 2] = FUNCTIONS[name](of(current[thread % 2]), of(value)) % 2**bits
    assert out.tolist() == expected
    assert total.tolist() == current
    assert executor.counters["atomic", "total"].warp_instructions == 2


def test_compare_and_swap():
    out, total = np.zeros(32, np.int32), np.array([3], np.int32)
    # lane n replaces n by n + 1, so all lanes from 3 on succeed
    body = """
        add.s32 %r1, %tid, 1; atom.global.cas.b32 %r2, [%total], %tid, %r1;
        add.s64 %d1, %out, %at4; st.global.b32 [%d1], %r2;
    """
    run(body, {"out": out, "total": total})
    assert out.tolist() == [3, 3, 3, *range(3, 32)]
    assert total.tolist() == [32]


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_sums_of_floating_point(kind, dtype):
    total, source = np.zeros(1, dtype), np.arange(64, dtype=dtype) / 4
    size = total.itemsize
    body = f"""
        .reg .b{8 * size} %x; add.s64 %d1, %source, %at{size}; ld.global.b{8 * size} %x, [%d1];
        red.global.add.{kind} [%total], %x;
    """
    run(body, {"total": total, "source": source}, grid=(2,))
    assert total[0] == source.sum()


def test_sums_of_float32_flush_subnormal_numbers_in_global_memory_only():
    tiny, negative = 0x00000100, 0x80000200  # about 3.6e-43, and -7.2e-43
    out = np.zeros(2, np.uint32)
    body = f"""
        setp.eq.s32 %p1, %tid, 0; mov.u32 %r1, smem; @%p1 st.shared.b32 [%r1], 0; bar.sync 0;
        mov.b32 %r2, {tiny}; @%p1 red.shared.add.f32 [%r1], %r2;
        @%p1 red.global.add.f32 [%total], %r2; @%p1 red.global.add.f32 [%total+4], %r2;
        bar.sync 0; ld.shared.b32 %r3, [%r1]; @%p1 st.global.b32 [%out], %r3;
    """
    total = np.array([0, negative], np.uint32)
    run(body, {"out": out, "total": total}, declarations=SHARED)
    assert out[0] == tiny
    assert total.tolist() == [0, 0]


def test_atomic_operations_in_shared_memory():
    out = np.zeros(2, np.int32)
    body = """
        mov.u32 %r1, smem; setp.eq.s32 %p1, %tid, 0; @%p1 st.shared.b32 [%r1], 0;
        bar.sync 0;
        atom.shared.add.u32 %r2, [%r1], 2; red.shared.max.u32 [%r1], 1;
        bar.sync 0;
        ld.shared.b32 %r3, [%r1]; mul.wide.u32 %d1, %block, 4; add.s64 %d1, %d1, %out;
        @%p1 st.global.b32 [%d1], %r3;
    """
    run(body, {"out": out}, grid=(2,), threads=64, declarations=SHARED)
    assert out.tolist() == [128, 128]
    with pytest.raises(Fault, match="race in shared memory"):
        run(body.replace("bar.sync 0;", "", 1), {"out": out}, threads=64, declarations=SHARED)


def test_undefined_operands_of_atomic_operations_are_faults():
    with pytest.raises(Fault, match="undefined value as an operand of an atomic operation"):
        run("red.global.add.u32 [%total], %r9;", {"total": np.zeros(1, np.int32)})
    with pytest.raises(Fault, match="undefined value as the operand in shared memory"):
        run("mov.u32 %r1, smem; red.shared.add.u32 [%r1], 1;", declarations=SHARED)
