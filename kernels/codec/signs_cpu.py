"""Encode and decode signs on CPUs, with numba.

The functions `*_numba` have the arguments of `encode_signs`, `update_error_signs`, `mean_of_signs`
and `decode_signs` in `gcnzc.kernels.codec.signs`, which check them. A kernel processes a vector in
chunks of up to 4096 elements, each within one block.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs_reference import Scale
from gcnzc.kernels.threads import parallel_for

WORD = 32  # elements whose bits fill a word of 4 bytes


LANES = 8  # independent partial sums


CHUNK = 4096  # elements of a chunk, at most: 16 KiB of float32, which stay in the first-level cache


# fewest elements for a thread
GRAIN_ELEMENTS = 1 << 17


def encode_numba(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
    threads: int | None = None,
) -> None:
    """Encode float32 vectors; see `encode_signs`.

    Scales may differ from those of `encode_signs_reference` by a relative error of 1e-6.
    """
    memory = _locate(layout, rows)
    sums = np.empty(memory[0])
    counts = np.empty(len(sums), np.int64)
    squares = scale == "rms"
    words, scales, geometry = memory[1:]
    vectors = _to_numpy(values, error, active)
    _run(_encode, memory, *vectors, words, sums, counts, squares, threads=threads)
    args = sums, counts, scales, squares, geometry
    parallel_for(
        _write_scales,
        layout.num_parts * layout.blocks_per_part,
        *args,
        threads=threads,
        grain_size=1 << 13,
    )


def update_error_numba(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    threads: int | None = None,
) -> None:
    """Update float32 errors; see `update_error_signs`."""
    memory = _locate(layout, rows)
    _run(_update_error, memory, *_to_numpy(values, error, active), memory[2], threads=threads)


def mean_numba(rows: Tensor, layout: BlockLayout, out: Tensor, threads: int | None = None) -> None:
    """Decode the mean of rows into a float32 vector; see `mean_of_signs`."""
    memory, inverse_count = _locate(layout, rows), np.float32(1 / len(rows))
    _run(
        _mean, memory, *memory[1:3], out.detach().numpy(), len(rows), inverse_count, threads=threads
    )


def decode_numba(
    rows: Tensor,
    layout: BlockLayout,
    active: Tensor | None,
    out: Tensor,
    threads: int | None = None,
) -> None:
    """Decode rows into a float32 vector; see `decode_signs`."""
    memory, flags = _locate(layout, rows), _NO_FLAGS if active is None else active.numpy()
    _run(_decode, memory, *memory[1:3], flags, out.detach().numpy(), threads=threads)


_Memory = tuple[int, Any, Any, tuple[int, ...]]


def _run(kernel: Any, memory: _Memory, *args: Any, threads: int | None) -> None:
    num_chunks, geometry = memory[0], memory[3]
    grain_size = max(1, GRAIN_ELEMENTS // min(CHUNK, geometry[2]))
    parallel_for(kernel, num_chunks, *args, geometry, threads=threads, grain_size=grain_size)


def _locate(layout: BlockLayout, rows: Tensor) -> _Memory:
    """Return how the rows are laid out in memory.

    Returns:
        The number of chunks; the memory of all rows as uint32 and as float32, in one dimension, so
        that the kernels are compiled once for rows of any stride; and the lengths that locate a
        chunk, followed by a row's stride and code length in words.
    """
    stride, blocks = rows.stride(0), layout.blocks_per_part
    chunks = -(-layout.block_elements // CHUNK)
    lengths = layout.num_elements, layout.part_elements, layout.block_elements, blocks, chunks
    num_bytes = (len(rows) - 1) * stride + layout.row_bytes
    flat = rows.as_strided((num_bytes,), (1,)).numpy()
    geometry = *lengths, stride // 4, layout.part_elements // WORD
    num_chunks = layout.num_parts * blocks * chunks
    return num_chunks, flat.view(np.uint32), flat.view(np.float32), geometry


# empty arrays stand for None, so that each kernel is compiled once
_NO_VALUES, _NO_FLAGS = np.empty(0, np.float32), np.empty(0, np.bool_)


def _to_numpy(values: Tensor, error: Tensor | None, active: Tensor | None) -> tuple[Any, Any, Any]:
    return (
        values.detach().numpy(),
        _NO_VALUES if error is None else error.detach().numpy(),
        _NO_FLAGS if active is None else active.numpy(),
    )


# Intrinsics for 32 elements at once. LLVM compiles vector comparisons, and the packing of their
# results into a word, to a few instructions, but does not vectorize a loop of the same operations.

_FLOATS = ir.VectorType(ir.FloatType(), WORD)


_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


_INDICES = ir.VectorType(ir.IntType(32), LANES)


_BYTES = ir.VectorType(ir.IntType(8), WORD)


_BITS = ir.VectorType(ir.IntType(1), WORD)


_INT32 = ir.IntType(32)


# `Any`, because numba's type annotations would require callers to pass the typing context
_intrinsic: Any = intrinsic


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _make_encoder(has_error, squares):
    @_intrinsic
    def encode(_typing, _values, _error, _active, _sums):
        def codegen(_context, builder, _signature, args):
            values, error, active_word, sums = args
            y = builder.load(_pointer(builder, values, _FLOATS), align=4)
            if has_error:
                y = builder.fadd(y, builder.load(_pointer(builder, error, _FLOATS), align=4))
            active_word = builder.bitcast(active_word, _BITS)
            signs = builder.and_(
                builder.fcmp_ordered(">=", y, ir.Constant(_FLOATS, None)), active_word
            )
            # select instead of multiply, so that a NaN that is not active has no effect
            y = builder.select(active_word, y, ir.Constant(_FLOATS, None))
            sums_pointer, lane_sums = _pointer(builder, sums, _DOUBLES), None
            for begin in range(0, WORD, LANES):
                lanes = ir.Constant(_INDICES, list(range(begin, begin + LANES)))
                y_wide = builder.fpext(builder.shuffle_vector(y, y, lanes), _DOUBLES)
                term = builder.fmul(y_wide, y_wide) if squares else _absolute(builder, y_wide)
                lane_sums = term if lane_sums is None else builder.fadd(lane_sums, term)
            total = builder.fadd(builder.load(sums_pointer, align=8), lane_sums)
            builder.store(total, sums_pointer, align=8)
            return builder.bitcast(signs, _INT32)

        address = types.int64
        return types.uint32(address, address, types.uint32, address), codegen

    return encode


def _absolute(builder, x):
    kind = ir.FunctionType(x.type, [x.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fabs.v{LANES}f64")
    return builder.call(function, [x])


# Each returns a word whose bit i is 1 if element i is active and at least 0. Element i is the i-th
# value at the first address, plus the i-th error at the second if there is one; it is active if bit
# i of `active_word` is 1. The squares or absolute values of the active elements are added to the 8
# float64 partial sums at the last address, element i to partial sum i % 8.
_encode_squares = _make_encoder(has_error=False, squares=True)


_encode_absolutes = _make_encoder(has_error=False, squares=False)


_encode_error_squares = _make_encoder(has_error=True, squares=True)


_encode_error_absolutes = _make_encoder(has_error=True, squares=False)


@_intrinsic
def _flags_word(_typing, _flags):
    """Pack 32 bytes at an address into a word with a bit for each that is not 0."""

    def codegen(_context, builder, _signature, args):
        flags = builder.load(_pointer(builder, args[0], _BYTES), align=1)
        return builder.bitcast(
            builder.icmp_unsigned("!=", flags, ir.Constant(_BYTES, None)), _INT32
        )

    return types.uint32(types.int64), codegen


@_intrinsic
def _count_bits(_typing, _word):
    def codegen(_context, builder, _signature, args):
        return builder.zext(builder.ctpop(args[0]), ir.IntType(64))

    return types.int64(types.uint32), codegen


def _make_decoder(adding):
    @_intrinsic
    def decode(_typing, _out, _word, _scale):
        def codegen(context, builder, _signature, args):
            out, word, scale = args
            first_lane = builder.insert_element(
                ir.Constant(_FLOATS, ir.Undefined), scale, _INT32(0)
            )
            lanes = ir.Constant(ir.VectorType(_INT32, WORD), [0] * WORD)
            scales = builder.shuffle_vector(first_lane, first_lane, lanes)
            signed = builder.select(builder.bitcast(word, _BITS), scales, builder.fneg(scales))
            pointer = _pointer(builder, out, _FLOATS)
            if adding:
                signed = builder.fadd(builder.load(pointer, align=4), signed)
            builder.store(signed, pointer, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint32, types.float32), codegen

    return decode


# Write 32 floats to an address, or add them there: the scale where the word's bit is 1, and its
# negative where the bit is 0.
_decode_word = _make_decoder(adding=False)


_add_word = _make_decoder(adding=True)


@njit(nogil=True, cache=True, error_model="numpy")
def _chunk(chunk_index, geometry):
    """Locate a chunk.

    Returns:
        The index of its part, which is also that of its row in an encoded vector; the index of its
        block in the part; its first element in the part and in the vector; its number of elements
        in the part, and how many of them are in the vector.
    """
    num_elements, part, block, blocks, chunks, _, _ = geometry
    part_index, remainder = divmod(chunk_index, blocks * chunks)
    block_index, chunk = divmod(remainder, chunks)
    first = block_index * block + chunk * CHUNK
    length = max(0, min(CHUNK, block - chunk * CHUNK, part - first))
    begin = part_index * part + first
    count = max(0, min(length, num_elements - begin))
    return part_index, block_index, first, begin, length, count


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(values, error, active, words, sums, counts, squares, geometry, begin, end):
    stride, lanes = geometry[5], np.empty(LANES)
    # the last elements of a vector, padded to a word
    last, last_active = np.zeros((2, WORD), np.float32), np.zeros(WORD, np.bool_)
    has_error, has_active = len(error) > 0, len(active) > 0
    last_addresses = last[0].ctypes.data, last[1].ctypes.data, last_active.ctypes.data
    for chunk_index in range(begin, end):
        row, _, first, offset, length, count = _chunk(chunk_index, geometry)
        out_words = words[row * stride + first // WORD :][: length // WORD]
        lanes[:] = 0
        lanes_at = lanes.ctypes.data
        values_at, error_at = values.ctypes.data + 4 * offset, error.ctypes.data + 4 * offset
        whole, kind = count // WORD, (has_error, squares)
        if has_active:
            active_at = active.ctypes.data + offset
            num_active = 0
            for i in range(whole):
                flags = _flags_word(active_at + WORD * i)
                num_active += _count_bits(flags)
                byte = 4 * WORD * i
                out_words[i] = _encode_word(
                    values_at + byte, error_at + byte, flags, lanes_at, kind
                )
        else:
            num_active = whole * WORD
            flags = np.uint32(0xFFFFFFFF)
            for i in range(whole):
                byte = 4 * WORD * i
                out_words[i] = _encode_word(
                    values_at + byte, error_at + byte, flags, lanes_at, kind
                )
        out_words[whole:] = 0
        if count % WORD:
            for i in range(count % WORD):
                k = offset + whole * WORD + i
                last[0, i] = values[k]
                last[1, i] = error[k] if has_error else np.float32(0)
                last_active[i] = active[k] if has_active else True
            flags = _flags_word(last_addresses[2])
            num_active += _count_bits(flags)
            out_words[whole] = _encode_word(
                last_addresses[0], last_addresses[1], flags, lanes_at, kind
            )
        sums[chunk_index] = _sum_lanes(lanes)
        counts[chunk_index] = num_active


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _encode_word(values, error, active_word, sums, kind):
    has_error, squares = kind
    if has_error:
        if squares:
            return _encode_error_squares(values, error, active_word, sums)
        return _encode_error_absolutes(values, error, active_word, sums)
    if squares:
        return _encode_squares(values, error, active_word, sums)
    return _encode_absolutes(values, error, active_word, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_lanes(lanes):
    # pairwise, so that additions do not depend on each other
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def _write_scales(sums, counts, scales, squares, geometry, begin, end):
    blocks, chunks, stride, code_words = geometry[3:]
    for block in range(begin, end):
        total, count = 0.0, 0
        for chunk_index in range(block * chunks, (block + 1) * chunks):
            total += sums[chunk_index]
            count += counts[chunk_index]
        mean = total / max(count, 1)
        row, block_index = divmod(block, blocks)
        scales[row * stride + code_words + block_index] = np.sqrt(mean) if squares else mean


@njit(nogil=True, cache=True, error_model="numpy")
def _update_error(values, error, active, scales, geometry, begin, end):
    stride, code_words = geometry[5:]
    for chunk_index in range(begin, end):
        row, block_index, _, offset, _, count = _chunk(chunk_index, geometry)
        scale = scales[row * stride + code_words + block_index]
        residual = error[offset : offset + count]
        _subtract_signed(values[offset : offset + count], residual, scale)
        if len(active):
            _zero_inactive(residual, active[offset : offset + count])


# The next two functions take slices and loop over all of their elements. With indices into the
# whole vector, numba would check for negative ones, which prevents vectorization.


@njit(nogil=True, cache=True, error_model="numpy")
def _subtract_signed(values, error, scale):
    for i in range(len(error)):
        y = values[i] + error[i]
        error[i] = y - (scale if y >= 0 else -scale)


@njit(nogil=True, cache=True, error_model="numpy")
def _zero_inactive(x, active):
    for i in range(len(x)):
        x[i] = x[i] if active[i] else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _mean(words, scales, out, num_rows, inverse_count, geometry, begin, end):
    stride, code_words = geometry[5:]
    for chunk_index in range(begin, end):
        _, block_index, first, offset, _, count = _chunk(chunk_index, geometry)
        out[offset : offset + count] = 0
        for row in range(num_rows):
            scale = scales[row * stride + code_words + block_index] * inverse_count
            word = row * stride + first // WORD
            whole = count // WORD
            for i in range(whole):
                _add_word(out.ctypes.data + 4 * (offset + WORD * i), words[word + i], scale)
            for i in range(whole * WORD, count):
                bit = words[word + whole] >> np.uint32(i % WORD) & np.uint32(1)
                out[offset + i] += scale if bit else -scale


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(words, scales, active, out, geometry, begin, end):
    stride, code_words = geometry[5:]
    for chunk_index in range(begin, end):
        row, block_index, first, offset, _, count = _chunk(chunk_index, geometry)
        scale = scales[row * stride + code_words + block_index]
        word = row * stride + first // WORD
        whole = count // WORD
        for i in range(whole):
            _decode_word(out.ctypes.data + 4 * (offset + WORD * i), words[word + i], scale)
        for i in range(whole * WORD, count):
            bit = words[word + whole] >> np.uint32(i % WORD) & np.uint32(1)
            out[offset + i] = scale if bit else -scale
        if len(active):
            _zero_inactive(out[offset : offset + count], active[offset : offset + count])
