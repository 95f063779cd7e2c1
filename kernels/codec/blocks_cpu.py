"""Encode and decode blocks of low-precision codes on CPUs, with numba.

A kernel processes a vector in pieces of up to 512 elements, each of a single block.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, uint64
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.blocks_reference import store_scales
from gcnzc.kernels.codec.number_formats import (
    NUMBER_FORMATS,
    PIECE,
    NumberFormat,
    SeedAndStep,
    flat_views,
    piece_geometry,
)
from gcnzc.kernels.philox import philox4x32, split_key
from gcnzc.kernels.threads import parallel_for

GRAIN_ELEMENTS = 1 << 15  # fewest elements for a thread


# Indices are unsigned in all loops: numba checks the sign of signed indices in every iteration,
# which prevents LLVM from vectorizing the loop.
@njit(nogil=True, cache=True)
def _piece(index, geometry):
    """Return a piece's part, its first element in the part, and its number of elements.

    The number is a multiple of 32, or 0.
    """
    part, blocks, block, pieces, piece = geometry
    b = index // pieces
    first = b % blocks * block + index % pieces * piece
    last = min(first + piece, (b % blocks + 1) * block, part)
    return b // blocks, first, max(0, last - first)


@njit(nogil=True, cache=True)
def _load_sums(values, error, active, first, count, y):
    """Load `count` elements of y into a buffer, with 0 past the end of the vector."""
    num_inside = max(0, min(count, len(values) - first))
    for k in range(num_inside):
        y[uint64(k)] = values[uint64(first + k)]
    for k in range(num_inside, count):
        y[uint64(k)] = 0
    if len(error):
        for k in range(num_inside):
            y[uint64(k)] += error[uint64(first + k)]
    if len(active):
        for k in range(num_inside):
            is_active = active[uint64(first + k)] != 0
            y[uint64(k)] = y[uint64(k)] if is_active else np.float32(0)


@njit(nogil=True, cache=True)
def _store_piece(piece, active, first, count, out):
    """Write `count` elements to `out`, up to its end, with 0 where not active."""
    num_inside = max(0, min(count, len(out) - first))
    if len(active):
        for k in range(num_inside):
            is_active = active[uint64(first + k)] != 0
            out[uint64(first + k)] = piece[uint64(k)] if is_active else np.float32(0)
    else:
        for k in range(num_inside):
            out[uint64(first + k)] = piece[uint64(k)]


@njit(nogil=True, cache=True)
def _random_uniform_numba(first, count, words, uniform):
    """Write `count` random numbers in [0, 1) from element `first` on, a multiple of 4."""
    step_low, step_high, key_0, key_1 = words
    for c in range(count // 4):
        counter = uint64(first // 4 + c)
        low, high = counter & uint64(0xFFFFFFFF), counter >> uint64(32)
        w0, w1, w2, w3 = philox4x32(low, high, step_low, step_high, key_0, key_1)
        uniform[uint64(4 * c)] = np.int32(w0 >> uint64(8))
        uniform[uint64(4 * c + 1)] = np.int32(w1 >> uint64(8))
        uniform[uint64(4 * c + 2)] = np.int32(w2 >> uint64(8))
        uniform[uint64(4 * c + 3)] = np.int32(w3 >> uint64(8))
    for k in range(count):
        uniform[uint64(k)] *= np.float32(2.0**-24)


@njit(nogil=True, cache=True)
def _decode_piece(codes, table, offset, count, scale, bits, decoded):
    """Decode `count` codes that begin at byte `offset`."""
    if bits == 8:
        for k in range(count):
            decoded[uint64(k)] = table[codes[uint64(offset + k)]] * scale
    elif bits == 4:
        for b in range(count // 2):
            byte = codes[uint64(offset + b)]
            decoded[uint64(2 * b)] = table[byte & 15] * scale
            decoded[uint64(2 * b + 1)] = table[byte >> 4] * scale
    else:
        for b in range(count // 4):
            byte = codes[uint64(offset + b)]
            decoded[uint64(4 * b)] = table[byte & 3] * scale
            decoded[uint64(4 * b + 1)] = table[byte >> 2 & 3] * scale
            decoded[uint64(4 * b + 2)] = table[byte >> 4 & 3] * scale
            decoded[uint64(4 * b + 3)] = table[byte >> 6] * scale


@njit(nogil=True, cache=True)
def _round_to_codes(y, scale, count, constants, uniform, code):
    """Write the codes of `count` elements; rounds to nearest if `uniform` is empty."""
    ints, ties_up, steps_per_unit, min_normal, rest_scale = constants
    dropped_bits, mask, shift, max_code, zero_below, sign = ints
    bits = y.view(np.int32)
    for k in range(count):
        y[uint64(k)] /= scale
    is_stochastic = len(uniform) > 0
    limits = uniform if is_stochastic else y
    for k in range(count):
        magnitude = bits[uint64(k)] & np.int32(0x7FFFFFFF)
        size = abs(y[uint64(k)])
        # the lower code, and the distance from its number as a fraction of the step to the next
        steps = min(size, min_normal) * steps_per_unit
        low = np.int32(steps)
        share = steps - np.float32(low)
        is_normal = size >= min_normal
        low = np.int32((magnitude >> dropped_bits) - shift) if is_normal else low
        share = np.float32(magnitude & mask) * rest_scale if is_normal else share
        odd = (low & np.int32(1)) == np.int32(1)
        nearer = (share > np.float32(0.5)) | ((share == np.float32(0.5)) & (odd | ties_up))
        up = (limits[uint64(k)] < share) if is_stochastic else nearer
        rounded = np.int32(min(low + np.int32(up), max_code))
        negated = np.int32(zero_below + sign * rounded)
        is_negative = (bits[uint64(k)] < np.int32(0)) & (rounded > np.int32(0))
        code[uint64(k)] = negated if is_negative else rounded


@njit(nogil=True, cache=True)
def _largest_magnitude(bits, count):
    largest = np.int32(0)
    for k in range(count):
        largest = max(largest, bits[uint64(k)] & np.int32(0x7FFFFFFF))
    return largest


@njit(nogil=True, cache=True)
def _largest_numba(values, error, active, largest, geometry, begin, end):
    """Write the bits of the largest |y| of each piece; the bits of NaN are the largest."""
    y = np.empty(PIECE, np.float32)
    bits = y.view(np.int32)
    for index in range(begin, end):
        j, i, count = _piece(index, geometry)
        _load_sums(values, error, active, j * geometry[0] + i, count, y)
        largest[index] = _largest_magnitude(bits, count)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_numba(
    values, error, active, codes, scales, geometry, row_layout, constants, is_stochastic, words,
    offset, begin, end,
):  # fmt: skip
    stride, first_scale, bits = row_layout
    y = np.empty(PIECE, np.float32)
    uniform = np.empty(PIECE if is_stochastic else 0, np.float32)
    code = np.empty(PIECE, np.uint8)
    for index in range(begin, end):
        j, i, count = _piece(index, geometry)
        scale = scales[j * stride // 4 + first_scale + i // geometry[2]]
        if scale > 0:
            _load_sums(values, error, active, j * geometry[0] + i, count, y)
            if is_stochastic:
                _random_uniform_numba(offset + j * geometry[0] + i, count, words, uniform)
            _round_to_codes(y, scale, count, constants, uniform, code)
        else:
            # the scale is 0 or NaN
            code[:count] = 0
        if bits == 8:
            first = j * stride + i
            for k in range(count):
                codes[uint64(first + k)] = code[uint64(k)]
        elif bits == 4:
            first = j * stride + i // 2
            for b in range(count // 2):
                codes[uint64(first + b)] = code[uint64(2 * b)] | code[uint64(2 * b + 1)] << 4
        else:
            first = j * stride + i // 4
            for b in range(count // 4):
                low_half = code[uint64(4 * b)] | code[uint64(4 * b + 1)] << 2
                high_half = code[uint64(4 * b + 2)] | code[uint64(4 * b + 3)] << 2
                codes[uint64(first + b)] = low_half | high_half << 4


@njit(nogil=True, cache=True)
def _update_error_numba(
    values, error, active, codes, scales, table, geometry, row_layout, begin, end
):
    stride, first_scale, bits = row_layout
    y, decoded = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    for index in range(begin, end):
        j, i, count = _piece(index, geometry)
        scale = scales[j * stride // 4 + first_scale + i // geometry[2]]
        _load_sums(values, error, active, j * geometry[0] + i, count, y)
        _decode_piece(codes, table, j * stride + i * bits // 8, count, scale, bits, decoded)
        for k in range(count):
            y[uint64(k)] -= decoded[uint64(k)]
        _store_piece(y, active, j * geometry[0] + i, count, error)


@njit(nogil=True, cache=True)
def _mean_numba(
    codes, scales, table, active, out, geometry, row_layout, num_rows, inverse_count, begin, end
):
    stride, first_scale, bits = row_layout
    decoded, total = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    for index in range(begin, end):
        _, i, count = _piece(index, geometry)
        total[:] = 0
        for w in range(num_rows):
            scale = scales[w * stride // 4 + first_scale + i // geometry[2]]
            _decode_piece(codes, table, w * stride + i * bits // 8, count, scale, bits, decoded)
            for k in range(count):
                total[uint64(k)] += decoded[uint64(k)]
        for k in range(count):
            total[uint64(k)] *= inverse_count
        _store_piece(total, active, i, count, out)


@njit(nogil=True, cache=True)
def _decode_numba(codes, scales, table, active, out, geometry, row_layout, begin, end):
    stride, first_scale, bits = row_layout
    decoded = np.empty(PIECE, np.float32)
    for index in range(begin, end):
        j, i, count = _piece(index, geometry)
        scale = scales[j * stride // 4 + first_scale + i // geometry[2]]
        _decode_piece(codes, table, j * stride + i * bits // 8, count, scale, bits, decoded)
        _store_piece(decoded, active, j * geometry[0] + i, count, out)


def _run_on_pieces(
    kernel: Callable[..., None], layout: BlockLayout, *args: Any, threads: int | None = None
) -> None:
    """Run a kernel on the pieces of all parts, divided among threads."""
    _, blocks, block, pieces, piece = piece_geometry(layout)
    grain_size = max(1, GRAIN_ELEMENTS // min(block, piece))
    parallel_for(
        kernel, layout.num_parts * blocks * pieces, *args, threads=threads, grain_size=grain_size
    )


def _to_numpy(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors as numpy arrays for numba, empty where a tensor is None."""
    none = torch.empty(0)
    return [(none if tensor is None else tensor.detach()).numpy() for tensor in tensors]


def _active_to_numpy(active: Tensor | None) -> Any:
    return np.empty(0, np.uint8) if active is None else active.view(torch.uint8).numpy()


def _format_constants(number_format: NumberFormat) -> tuple[Any, ...]:
    """Return the constants of a format for `_round_to_codes`, as 32-bit numbers."""
    dropped_bits = 23 - number_format.mantissa_bits
    # the code of a negative number is zero_below + sign * (code of the positive number)
    bits = number_format.bits
    zero_below, sign = (1 << bits, -1) if number_format.is_integer else (1 << (bits - 1), 1)
    shift, max_code = number_format.exponent_shift, number_format.max_code
    ints = (dropped_bits, (1 << dropped_bits) - 1, shift, max_code, zero_below, sign)
    floats = (number_format.steps_per_unit, number_format.min_normal, 1 / (1 << dropped_bits))
    return tuple(map(np.int32, ints)), number_format.ties_up, *map(np.float32, floats)


def encode_blocks_numba(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
    seed_and_step: SeedAndStep | None = None,
    offset: int = 0,
    *,
    threads: int | None = None,
) -> None:
    """`encode_blocks_reference` on the CPU, for contiguous float32."""
    vectors, geometry = (
        (*_to_numpy(values, error), _active_to_numpy(active)),
        piece_geometry(layout),
    )
    largest = torch.empty(layout.num_parts, layout.blocks_per_part, geometry[3], dtype=torch.int32)
    _run_on_pieces(
        _largest_numba, layout, *vectors, largest.view(-1).numpy(), geometry, threads=threads
    )
    is_stochastic = seed_and_step is not None
    code_format = NUMBER_FORMATS[number_format]
    store_scales(largest, rows, layout, code_format, stochastic=is_stochastic)
    seed, step = seed_and_step or (0, 0)
    _run_on_pieces(
        _encode_numba,
        layout,
        *vectors,
        *_to_numpy(*flat_views(rows, layout)),
        geometry,
        (rows.stride(0), layout.code_bytes // 4, layout.bits),
        _format_constants(code_format),
        is_stochastic,
        tuple(np.uint64(word) for word in (*split_key(step), *split_key(seed))),
        offset,
        threads=threads,
    )


def update_error_blocks_numba(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
    *,
    threads: int | None = None,
) -> None:
    """`update_error_blocks_reference` on the CPU, for contiguous float32."""
    _run_on_pieces(
        _update_error_numba,
        layout,
        *_to_numpy(values, error),
        _active_to_numpy(active),
        *_to_numpy(*flat_views(rows, layout), NUMBER_FORMATS[number_format].values),
        piece_geometry(layout),
        (rows.stride(0), layout.code_bytes // 4, layout.bits),
        threads=threads,
    )


def mean_of_blocks_numba(
    rows: Tensor,
    layout: BlockLayout,
    out: Tensor,
    number_format: str,
    *,
    threads: int | None = None,
) -> None:
    """`mean_of_blocks_reference` on the CPU, for contiguous float32."""
    _run_on_pieces(
        _mean_numba,
        layout,
        *_to_numpy(*flat_views(rows, layout), NUMBER_FORMATS[number_format].values),
        _active_to_numpy(None),
        *_to_numpy(out),
        piece_geometry(layout),
        (rows.stride(0), layout.code_bytes // 4, layout.bits),
        len(rows),
        np.float32(1 / len(rows)),
        threads=threads,
    )


def decode_blocks_numba(
    rows: Tensor,
    layout: BlockLayout,
    active: Tensor | None,
    out: Tensor,
    number_format: str,
    *,
    threads: int | None = None,
) -> None:
    """`decode_blocks_reference` on the CPU, for contiguous float32."""
    _run_on_pieces(
        _decode_numba,
        layout,
        *_to_numpy(*flat_views(rows, layout), NUMBER_FORMATS[number_format].values),
        _active_to_numpy(active),
        *_to_numpy(out),
        piece_geometry(layout),
        (rows.stride(0), layout.code_bytes // 4, layout.bits),
        threads=threads,
    )
