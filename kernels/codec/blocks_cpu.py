"""Blocks of low-precision codes on CPUs: numba kernels over pieces of a vector."""

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
    Draws,
    NumberFormat,
    memory,
    sizes_of,
)
from gcnzc.kernels.philox import philox4x32, split_key
from gcnzc.kernels.threads import in_parts

LEAST_ELEMENTS = 1 << 15  # worth a thread


# A piece is of one block, and long enough that calls cost little. Indices are unsigned, since numba
# looks at the sign of others in every turn of a loop, which then does not become vector code.
@njit(nogil=True, cache=True)
def _piece(number, sizes):
    """The part of a piece, its first element there, and how many it has: a multiple of 32, or 0."""
    part, blocks, block, pieces, piece = sizes
    b = number // pieces
    first = b % blocks * block + number % pieces * piece
    last = min(first + piece, (b % blocks + 1) * block, part)
    return b // blocks, first, max(0, last - first)


@njit(nogil=True, cache=True)
def _sums_numba(values, error, active, first, count, y):
    """`_sums` of `count` elements; 0 beyond the end."""
    there = max(0, min(count, len(values) - first))
    for k in range(there):
        y[uint64(k)] = values[uint64(first + k)]
    for k in range(there, count):
        y[uint64(k)] = 0
    if len(error):
        for k in range(there):
            y[uint64(k)] += error[uint64(first + k)]
    if len(active):
        for k in range(there):
            kept = active[uint64(first + k)] != 0
            y[uint64(k)] = y[uint64(k)] if kept else np.float32(0)


@njit(nogil=True, cache=True)
def _store_numba(found, active, first, count, out):
    """Write `count` elements as far as `out` has them, and 0 where not active."""
    there = max(0, min(count, len(out) - first))
    if len(active):
        for k in range(there):
            kept = active[uint64(first + k)] != 0
            out[uint64(first + k)] = found[uint64(k)] if kept else np.float32(0)
    else:
        for k in range(there):
            out[uint64(first + k)] = found[uint64(k)]


@njit(nogil=True, cache=True)
def _drawn_numba(first, count, words, drawn):
    """`_drawn` for `count` elements, of which the first has a multiple of 4."""
    step_low, step_high, key_0, key_1 = words
    for c in range(count // 4):
        counter = uint64(first // 4 + c)
        low, high = counter & uint64(0xFFFFFFFF), counter >> uint64(32)
        w0, w1, w2, w3 = philox4x32(low, high, step_low, step_high, key_0, key_1)
        drawn[uint64(4 * c)] = np.int32(w0 >> uint64(8))
        drawn[uint64(4 * c + 1)] = np.int32(w1 >> uint64(8))
        drawn[uint64(4 * c + 2)] = np.int32(w2 >> uint64(8))
        drawn[uint64(4 * c + 3)] = np.int32(w3 >> uint64(8))
    for k in range(count):
        drawn[uint64(k)] *= np.float32(2.0**-24)


@njit(nogil=True, cache=True)
def _decoded_numba(codes, table, at, count, scale, bits, found):
    """What `count` codes stand for, of which the first is at byte `at`."""
    if bits == 8:
        for k in range(count):
            found[uint64(k)] = table[codes[uint64(at + k)]] * scale
    else:
        for b in range(count // 2):
            byte = codes[uint64(at + b)]
            found[uint64(2 * b)] = table[byte & 15] * scale
            found[uint64(2 * b + 1)] = table[byte >> 4] * scale


@njit(nogil=True, cache=True)
def _codes_numba(y, scale, count, form, drawn, code):
    """`_codes` of `count` elements; `drawn` is empty to round to nearest."""
    ints, ties_up, per_step, normal, per_rest = form
    dropped, mask, shift, most, zero_below, sign = ints
    bits = y.view(np.int32)
    for k in range(count):
        y[uint64(k)] /= scale
    random = len(drawn) > 0
    limits = drawn if random else y
    for k in range(count):
        magnitude = bits[uint64(k)] & np.int32(0x7FFFFFFF)
        size = abs(y[uint64(k)])
        # the code below, and which share of the way to the next one is gone
        steps = min(size, normal) * per_step
        low = np.int32(steps)
        share = steps - np.float32(low)
        large = size >= normal
        low = np.int32((magnitude >> dropped) - shift) if large else low
        share = np.float32(magnitude & mask) * per_rest if large else share
        odd = (low & np.int32(1)) == np.int32(1)
        nearer = (share > np.float32(0.5)) | ((share == np.float32(0.5)) & (odd | ties_up))
        up = (limits[uint64(k)] < share) if random else nearer
        found = np.int32(min(low + np.int32(up), most))
        below = np.int32(zero_below + sign * found)
        negative = (bits[uint64(k)] < np.int32(0)) & (found > np.int32(0))
        code[uint64(k)] = below if negative else found


@njit(nogil=True, cache=True)
def _largest_of(bits, count):
    most = np.int32(0)
    for k in range(count):
        most = max(most, bits[uint64(k)] & np.int32(0x7FFFFFFF))
    return most


@njit(nogil=True, cache=True)
def _largest_numba(values, error, active, largest, sizes, begin, end):
    """The bits of the largest |y| of each piece; those of NaN are largest."""
    y = np.empty(PIECE, np.float32)
    bits = y.view(np.int32)
    for number in range(begin, end):
        j, i, count = _piece(number, sizes)
        _sums_numba(values, error, active, j * sizes[0] + i, count, y)
        largest[number] = _largest_of(bits, count)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_numba(
    values, error, active, codes, scales, sizes, layout, form, random, words, offset, begin, end
):
    stride, first_scale, bits = layout
    y, drawn = np.empty(PIECE, np.float32), np.empty(PIECE if random else 0, np.float32)
    code = np.empty(PIECE, np.uint8)
    for number in range(begin, end):
        j, i, count = _piece(number, sizes)
        scale = scales[j * stride // 4 + first_scale + i // sizes[2]]
        if scale > 0:
            _sums_numba(values, error, active, j * sizes[0] + i, count, y)
            if random:
                _drawn_numba(offset + j * sizes[0] + i, count, words, drawn)
            _codes_numba(y, scale, count, form, drawn, code)
        else:
            # also where it is NaN
            code[:count] = 0
        if bits == 8:
            at = j * stride + i
            for k in range(count):
                codes[uint64(at + k)] = code[uint64(k)]
        else:
            at = j * stride + i // 2
            for b in range(count // 2):
                codes[uint64(at + b)] = code[uint64(2 * b)] | code[uint64(2 * b + 1)] << 4


@njit(nogil=True, cache=True)
def _update_error_numba(values, error, active, codes, scales, table, sizes, layout, begin, end):
    stride, first_scale, bits = layout
    y, found = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    for number in range(begin, end):
        j, i, count = _piece(number, sizes)
        scale = scales[j * stride // 4 + first_scale + i // sizes[2]]
        _sums_numba(values, error, active, j * sizes[0] + i, count, y)
        _decoded_numba(codes, table, j * stride + i * bits // 8, count, scale, bits, found)
        for k in range(count):
            y[uint64(k)] -= found[uint64(k)]
        _store_numba(y, active, j * sizes[0] + i, count, error)


@njit(nogil=True, cache=True)
def _mean_numba(codes, scales, table, active, out, sizes, layout, num_rows, share, begin, end):
    stride, first_scale, bits = layout
    found, total = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    for number in range(begin, end):
        _, i, count = _piece(number, sizes)
        total[:] = 0
        for w in range(num_rows):
            scale = scales[w * stride // 4 + first_scale + i // sizes[2]]
            _decoded_numba(codes, table, w * stride + i * bits // 8, count, scale, bits, found)
            for k in range(count):
                total[uint64(k)] += found[uint64(k)]
        for k in range(count):
            total[uint64(k)] *= share
        _store_numba(total, active, i, count, out)


@njit(nogil=True, cache=True)
def _decode_numba(codes, scales, table, active, out, sizes, layout, begin, end):
    stride, first_scale, bits = layout
    found = np.empty(PIECE, np.float32)
    for number in range(begin, end):
        j, i, count = _piece(number, sizes)
        scale = scales[j * stride // 4 + first_scale + i // sizes[2]]
        _decoded_numba(codes, table, j * stride + i * bits // 8, count, scale, bits, found)
        _store_numba(found, active, j * sizes[0] + i, count, out)


def _in_pieces(
    kernel: Callable[..., None], cut: BlockLayout, *args: Any, threads: int | None = None
) -> None:
    """Call a kernel so that threads share the pieces of all parts."""
    _, blocks, block, pieces, piece = sizes_of(cut)
    least = max(1, LEAST_ELEMENTS // min(block, piece))
    in_parts(kernel, cut.parts * blocks * pieces, *args, threads=threads, least=least)


def _numpy(*tensors: Tensor | None) -> list[Any]:
    """As numba takes them: without a gradient, and empty if they are None."""
    none = torch.empty(0)
    return [(none if tensor is None else tensor.detach()).numpy() for tensor in tensors]


def _active_numpy(active: Tensor | None) -> Any:
    return np.empty(0, np.uint8) if active is None else active.view(torch.uint8).numpy()


def _form_numba(form: NumberFormat) -> tuple[Any, ...]:
    """As `_codes_numba` takes it: in 32 bits, like what it is computed with."""
    dropped = 23 - form.mantissa_bits
    # the code of a negative number, from that above zero: a complement of two, or with a sign
    zero_below, sign = (1 << form.bits, -1) if form.integer else (1 << (form.bits - 1), 1)
    whole = (dropped, (1 << dropped) - 1, form.shift, form.most, zero_below, sign)
    floats = (form.per_step, form.normal, 1 / (1 << dropped))
    return tuple(map(np.int32, whole)), form.ties_up, *map(np.float32, floats)


def encode_blocks_numba(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
    *,
    threads: int | None = None,
) -> None:
    """`encode_blocks_reference` on the CPU, for contiguous float32."""
    vectors, sizes = (*_numpy(values, error), _active_numpy(active)), sizes_of(cut)
    largest = torch.empty(cut.parts, cut.blocks, sizes[3], dtype=torch.int32)
    _in_pieces(_largest_numba, cut, *vectors, largest.view(-1).numpy(), sizes, threads=threads)
    store_scales(largest, rows, cut, NUMBER_FORMATS[form])
    seed, step = draws or (0, 0)
    _in_pieces(
        _encode_numba,
        cut,
        *vectors,
        *_numpy(*memory(rows, cut)),
        sizes,
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        _form_numba(NUMBER_FORMATS[form]),
        draws is not None,
        tuple(np.uint64(word) for word in (*split_key(step), *split_key(seed))),
        offset,
        threads=threads,
    )


def update_error_blocks_numba(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    form: str,
    *,
    threads: int | None = None,
) -> None:
    """`update_error_blocks_reference` on the CPU, for contiguous float32."""
    _in_pieces(
        _update_error_numba,
        cut,
        *_numpy(values, error),
        _active_numpy(active),
        *_numpy(*memory(rows, cut), NUMBER_FORMATS[form].values),
        sizes_of(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        threads=threads,
    )


def mean_of_blocks_numba(
    rows: Tensor, cut: BlockLayout, out: Tensor, form: str, *, threads: int | None = None
) -> None:
    """`mean_of_blocks_reference` on the CPU, for contiguous float32."""
    _in_pieces(
        _mean_numba,
        cut,
        *_numpy(*memory(rows, cut), NUMBER_FORMATS[form].values),
        _active_numpy(None),
        *_numpy(out),
        sizes_of(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        len(rows),
        np.float32(1 / len(rows)),
        threads=threads,
    )


def decode_blocks_numba(
    rows: Tensor,
    cut: BlockLayout,
    active: Tensor | None,
    out: Tensor,
    form: str,
    *,
    threads: int | None = None,
) -> None:
    """`decode_blocks_reference` on the CPU, for contiguous float32."""
    _in_pieces(
        _decode_numba,
        cut,
        *_numpy(*memory(rows, cut), NUMBER_FORMATS[form].values),
        _active_numpy(active),
        *_numpy(out),
        sizes_of(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        threads=threads,
    )
