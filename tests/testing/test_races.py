"""Races between warps in shared memory, and between blocks in global memory."""

import tracemalloc

import numpy as np
import pytest
from ptx_kernels import run

from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault
from gcnzc.testing.races import Access, AccessHistory

SHARED = ".shared .align 16 .b8 smem[512];"
PREPARE = "mov.u32 %r1, smem; mad.lo.s32 %r2, %tid, 4, %r1; mov.u32 %r3, %warpid;"


def in_block(body, races=None, threads=64):
    execute = lambda: run(PREPARE + body, threads=threads, declarations=SHARED)  # noqa: E731
    if races is None:
        execute()
        return
    with pytest.raises(Fault, match=f"race in shared memory.*another warp's {races}"):
        execute()


def test_two_warps_that_write_the_same_byte_race():
    in_block("st.shared.b32 [%r1], %r3;", "write of this instruction")
    in_block("st.shared.b32 [%r1], %r3;", threads=32)
    in_block(
        "st.shared.b32 [%r2], 1; xor.b32 %r4, %r2, 128; st.shared.b32 [%r4], 2;", "write before"
    )
    in_block("st.shared.b32 [%r2], 1; bar.sync 0; xor.b32 %r4, %r2, 128; st.shared.b32 [%r4], 2;")


def test_several_warps_may_write_equal_values_between_barriers():
    by_warp = "setp.eq.s32 %p1, %r3, 0; setp.eq.s32 %p2, %r3, 1; setp.eq.s32 %p3, %r3, 2;"
    equal = by_warp + "st.shared.b32 [%r1], 258;"
    in_block(equal)
    in_block(equal + "st.shared.b32 [%r1], 258; st.shared.b8 [%r1+1], 1;")
    in_block(equal + "bar.sync 0; ld.shared.b32 %r5, [%r1];")
    # another value later, by one of the warps or by a third one, also of a part of the word
    for warp in ("%p1", "%p2", "%p3"):
        in_block(equal + f"@{warp} st.shared.b32 [%r1], 259;", "write before", threads=96)
        in_block(equal + f"@{warp} st.shared.b8 [%r1+1], 2;", "write before", threads=96)
        in_block(equal + f"bar.sync 0; @{warp} st.shared.b32 [%r1], 259;", threads=96)
    # a read is not ordered with the writes of other warps, nor is an atomic operation
    in_block(equal + "@%p1 ld.shared.b32 %r5, [%r1];", "write before")
    in_block(equal + "@%p2 ld.shared.b32 %r5, [%r1];", "write before")
    in_block(equal + "@%p2 red.shared.add.u32 [%r1], 1;", "write before")
    # the first write of a warp differs, and the last one is equal
    differs = "@%p1 st.shared.b32 [%r1], 1; @%p2 st.shared.b32 [%r1], 2;"
    in_block(by_warp + differs + "@%p2 st.shared.b32 [%r1], 1;", "write before")
    # one byte of four differs
    for other, races in ((258, None), (2, "write before"), (257, "write before")):
        one = f"@%p1 st.shared.b32 [%r1], 258; @%p2 st.shared.b32 [%r1], {other};"
        in_block(by_warp + one, races)


def test_a_lane_that_writes_another_value_in_the_same_instruction_races():
    for warp in (0, 1):
        for lane in (0, 31):
            # whichever value remains
            odd = f"setp.eq.s32 %p1, %tid, {32 * warp + lane}; selp.b32 %r5, 7, 8, %p1;"
            in_block(odd + "st.shared.b32 [%r1], %r5;", "write of this instruction")
            in_block(odd + "st.shared.b32 [%r1], %r5;", threads=32)


def test_a_write_and_a_read_of_different_warps_race_in_both_orders():
    swap = "xor.b32 %r4, %r2, 128;"
    fill = "st.shared.b32 [%r2], 1; bar.sync 0;" + swap
    in_block(fill + "ld.shared.b32 %r5, [%r2]; st.shared.b32 [%r4], 1;", "read before")
    in_block(fill + "st.shared.b32 [%r2], 1; ld.shared.b32 %r5, [%r4];", "write before")
    in_block(fill + "ld.shared.b32 %r5, [%r2]; bar.sync 0; st.shared.b32 [%r4], 1;")
    in_block(fill + "ld.shared.b32 %r5, [%r2]; st.shared.b32 [%r2], 1;")


def test_an_atomic_and_another_access_race():
    fill = "setp.eq.s32 %p1, %r3, 0; @%p1 st.shared.b32 [%r1], 1; bar.sync 0;"
    in_block(fill + "red.shared.add.u32 [%r1], 1; red.shared.add.u32 [%r1], 1;")
    in_block(
        fill + "red.shared.add.u32 [%r1], 1; ld.shared.b32 %r5, [%r1];", "atomic access before"
    )
    in_block(fill + "ld.shared.b32 %r5, [%r1]; red.shared.add.u32 [%r1], 1;", "read before")


# -- global memory


def between_blocks(body, races=None, arrays=None, **options):
    arrays = arrays or {"out": np.zeros(128, np.int32)}
    executor = Executor(**options)
    if races is None:
        run(body, arrays, grid=(4,), executor=executor)
        return
    with pytest.raises(Fault, match=f"race in out at offset .*another block's {races}"):
        run(body, arrays, grid=(4,), executor=executor)


@pytest.mark.parametrize("batch", [32, 1000])
def test_blocks_that_write_the_same_byte_race(batch):
    own = "add.s64 %d1, %out, %at4;"
    between_blocks(own + "st.global.b32 [%d1], %tid;", batch_threads=batch)
    between_blocks("st.global.b32 [%out], 1;", "write", batch_threads=batch)
    # block 0 writes what the others read
    guard = (
        "setp.eq.s32 %p1, %block, 0; @%p1 st.global.b32 [%d1], 1; @!%p1 ld.global.b32 %r1, [%out];"
    )
    between_blocks(own + guard, "write before", batch_threads=batch)
    guard = (
        "setp.eq.s32 %p1, %block, 3; @!%p1 ld.global.b32 %r1, [%out]; @%p1 st.global.b32 [%out], 1;"
    )
    between_blocks(own + guard, "read before", batch_threads=batch)
    between_blocks("ld.global.b32 %r1, [%out];", batch_threads=batch)


def test_atomic_operations_of_blocks_do_not_race_with_each_other():
    between_blocks("red.global.add.u32 [%out], 1;")
    between_blocks("red.global.add.u32 [%out], 1; ld.relaxed.gpu.global.b32 %r1, [%out];")
    between_blocks(
        "red.global.add.u32 [%out], 1; ld.global.b32 %r1, [%out];", "atomic access before"
    )


def test_loads_do_not_race_with_each_other():
    weak, atomic = "ld.global.b32 %r1, [%out];", "ld.{}.global.b32 %r2, [%out];"
    for order in ("relaxed.gpu", "acquire.gpu", "volatile"):
        between_blocks(weak + atomic.format(order))
        between_blocks(atomic.format(order) + weak)
        last = "setp.eq.s32 %p1, %block, 3; @%p1 st{}.global.b32 [%out], 1;"
        between_blocks(atomic.format(order) + last.format(""), "atomic read before")
        between_blocks(atomic.format(order) + last.format(".relaxed.gpu"))
        between_blocks(weak + last.format(".relaxed.gpu"), "read before")
    in_block("st.shared.b32 [%r1], 1; bar.sync 0; ld.volatile.shared.b32 %r5, [%r1]; "
             "ld.shared.b32 %r6, [%r1];")  # fmt: skip


@pytest.mark.parametrize("parts", [8, 4])
def test_vectors_of_32_bytes_are_recorded_where_they_are(parts):
    memory = np.zeros(256, np.uint8)
    # the vector begins at a multiple of 32 B, and its memory at one of 16 B only
    begin = (16 - memory.ctypes.data) % 32
    registers = ", ".join(f"%{'r' if parts == 8 else 'd'}{n}" for n in range(1, parts + 1))
    load = f"ld.global.v{parts}.b{256 // parts} {{{registers}}}, [%out+16];"
    for offset in (0, 12, 16, 44, 48):
        body = f"""
            setp.eq.s32 %p1, %block, 0; setp.eq.s32 %p2, %block, 3;
            @%p1 {load} @%p2 st.global.b32 [%out+{offset}], 1;
        """
        races = "read before" if 16 <= offset < 48 else None
        between_blocks(body, races, {"out": memory[begin : begin + 128]})


def test_races_in_named_arguments_are_allowed():
    between_blocks("st.global.b32 [%out], 1;", allowed_races=["out"])
    between_blocks("st.global.b32 [%out], 1;", detect_races=False)


def records(num_bytes, places, kind=Access.READ, size=16):
    """A history of accesses by owner 1, and the most bytes that recording them takes."""
    tracemalloc.start()
    history = AccessHistory(num_bytes, np.int32)
    index = np.array(places, np.int64) // size
    one = np.ones_like(index, np.int32)
    assert history.record(kind, index, size, one, one, one + 9) is None
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return history, most


def test_records_of_large_memory_are_found_again():
    whole = 100 * 2**20
    random = np.random.default_rng(1)
    touched = random.choice(whole // 16, 6000, replace=False) * 16
    # pages that are allocated later keep the earlier records
    history, _ = records(whole, touched[:3000], Access.WRITE)
    ones = np.ones(3000, np.int32)
    assert history.record(Access.WRITE, touched[3000:] // 16, 16, ones, ones, ones + 9) is None
    two = np.full(1, 2, np.int32)
    written = set(touched.tolist())
    for place in touched[::30].tolist():
        # the bytes at the ends of the word, and their neighbours
        for byte in (place - 1, place, place + 15, place + 16):
            found = history.record(Access.READ, np.array([byte]), 1, two, two - 1, two + 9)
            is_race = found == (0, "write before this instruction")
            assert is_race == (byte // 16 * 16 in written), byte
