"""Codes of 8 or 4 bits for exchange: blocks of a vector share a scale, `y` is about `code * scale`.

What is sent is y = values + error. The scale of a block is the largest |y| among its elements that
are active, divided by the form's largest number; it is at least 2**-126, 0 for a block of zeros or
of nothing, and NaN if any y there is not finite, and then the whole block decodes to NaN. Finite
numbers never decode to anything else. A code of 0 is the only zero. Codes that are never written
stand for NaN.

    form            codes                                        largest number
    float8_e4m3fn   torch's                                      448
    float8_e5m2     torch's                                      57344
    int8            two's complement, -127 to 127                127
    int4            two's complement, -7 to 7                    7
    float4_e3m0     a sign, then m of 3 bits: 0, or 2**(m - 7)   1

The types of one byte with an exponent are those of Micikevicius et al., "FP8 formats for deep
learning" (2022, https://arxiv.org/abs/2209.05433); to send a sign and three bits of exponent is
from Douillard et al., "Streaming DiLoCo" (2025, https://arxiv.org/abs/2501.18512). Of two codes in
a byte the first has the low four bits.

Numbers are rounded to the nearest, ties to the even code, and of float4_e3m0 to the larger number;
or up or down at random, so that the mean of what is decoded is y, to 2**-24 of the step between two
numbers. With s for the scale, y' for what is decoded, and 2**-150 more where that is subnormal,

    |y - y'| at most   to nearest                                at random
    float8_e4m3fn      max(|y| * 2**-4, s * 2**-10)              max(|y| * 2**-3, s * 2**-9)
    float8_e5m2        max(|y| * 2**-3, s * 2**-17)              max(|y| * 2**-2, s * 2**-16)
    int8               s * (1/2 + 2**-16)                        s * (1 + 2**-16)
    int4               s * (1/2 + 2**-20)                        s * (1 + 2**-20)
    float4_e3m0        max(|y| / 3, s * 2**-7)                   max(|y|, s * 2**-6)

those with a maximum times 1 + 2**-18, for the rounding of scales, quotients and products.

What is random is drawn by Philox: element e of the vector takes word e' % 4 of counter e' // 4 of
the seed and the step, where e' = e + offset. Each worker has a seed of its own. A worker that
encodes a part by itself, in the same step, takes as offset the elements of all parts, `cut.parts *
cut.part`, and so draws what it has not drawn yet.

The CPU takes its way by numba and a GPU by Triton, for contiguous float32; all other vectors are
left to the references, in float64 if they have it. All ways give the same bits.

Letters: n elements of the vector, W workers, m elements of one part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import triton
from numba import njit, uint64
from torch import Tensor

from gcnzc.kernels import block_codes_gpu as gpu
from gcnzc.kernels.cut import PART_MULTIPLE, Cut
from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key
from gcnzc.kernels.quantize import SMALLEST_SCALE
from gcnzc.kernels.threads import in_parts

PIECE = 512  # elements that numba takes at a time, a multiple of 32
LEAST_ELEMENTS = 1 << 15  # worth a thread
TILE = 1024  # elements of a GPU's program


@dataclass(frozen=True)
class Form:
    """What codes stand for. All are floats without infinity; integers have no bits of exponent."""

    bits: int
    mantissa_bits: int
    least_exponent: int  # of the normal numbers; below them, codes count steps
    most: int  # the largest code without its sign
    ties_up: bool = False

    @property
    def integer(self) -> bool:
        """Whether negative numbers are complements of two, instead of having a bit for the sign."""
        return self.mantissa_bits == self.bits - 1

    @property
    def per_step(self) -> float:
        """One over the smallest number."""
        return 2.0 ** (self.mantissa_bits - self.least_exponent)

    @property
    def normal(self) -> float:
        """The smallest normal number; larger than all if there is none."""
        return 2.0**self.least_exponent

    @property
    def shift(self) -> int:
        """Between exponents counted from float32's bias and from the code's."""
        return (127 + self.least_exponent - 1) << self.mantissa_bits

    @cached_property
    def sizes(self) -> Tensor:
        """(most + 1,) float32: the numbers from 0 on, which rise with their codes."""
        code = torch.arange(self.most + 1)
        exponent = ((code >> self.mantissa_bits) - 1).clamp(min=0)
        hidden = torch.where(code >> self.mantissa_bits > 0, 1 << self.mantissa_bits, 0)
        steps = hidden + code % (1 << self.mantissa_bits)
        return (steps * 2.0**exponent / self.per_step).float()

    @cached_property
    def values(self) -> Tensor:
        """(2**bits,) float32: what each code stands for."""
        values = torch.full((1 << self.bits,), torch.nan)
        values[: self.most + 1] = self.sizes
        code = torch.arange(1, self.most + 1)
        values[self.negative(code)] = -self.sizes[1:]
        return values

    def negative(self, code: Tensor) -> Tensor:
        """The codes of the numbers below zero, from those above."""
        return (1 << self.bits) - code if self.integer else (1 << (self.bits - 1)) + code


FORMS = {
    "float8_e4m3fn": Form(8, mantissa_bits=3, least_exponent=-6, most=0x7E),
    "float8_e5m2": Form(8, mantissa_bits=2, least_exponent=-14, most=0x7B),
    "int8": Form(8, mantissa_bits=7, least_exponent=7, most=127),
    "int4": Form(4, mantissa_bits=3, least_exponent=3, most=7),
    "float4_e3m0": Form(4, mantissa_bits=0, least_exponent=-6, most=7, ties_up=True),
}
BITS = {name: form.bits for name, form in FORMS.items()}

# what is random: a seed and a step
Draws = tuple[int, int]


@torch.no_grad()
def encode_blocks_reference(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: Cut,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
) -> None:
    """What `encode_blocks` must write, bit for bit."""
    y = values.new_zeros(cut.parts, cut.part, dtype=torch.float32)
    y.view(-1)[: cut.num_elements] = _sums(values, error, active)
    padding = cut.blocks * cut.block_elements - cut.part
    blocks = torch.nn.functional.pad(y, (0, padding)).view(
        cut.parts, cut.blocks, cut.block_elements
    )
    scales = _scales_of(blocks.abs().amax(2), FORMS[form])
    _scales(rows, cut).copy_(scales)
    drawn = None
    if draws is not None:
        drawn = _drawn(y.numel(), draws, offset).view(y.shape).to(y.device)
    codes = _codes(y, _spread(scales, cut), FORMS[form], drawn).to(torch.uint8)
    if cut.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    rows[:, : cut.code_bytes] = codes


@torch.no_grad()
def settle_blocks_reference(
    values: Tensor, error: Tensor, active: Tensor | None, cut: Cut, rows: Tensor, form: str
) -> None:
    """What `settle_blocks` must leave in `error`, bit for bit."""
    y = _sums(values, error, None)
    left = y - _decoded(rows, cut, form).view(-1)[: cut.num_elements]
    error.copy_(left if active is None else torch.where(active, left, 0.0))


def mean_of_blocks_reference(rows: Tensor, cut: Cut, out: Tensor, form: str) -> None:
    """What `mean_of_blocks` must write to `out`, bit for bit."""
    total = rows.new_zeros(cut.part, dtype=torch.float32)
    for row in rows:
        total += _decoded(row[None], cut, form)[0]
    out.copy_(total[: cut.num_elements] * (1 / len(rows)))


def decode_blocks_reference(
    rows: Tensor, cut: Cut, active: Tensor | None, out: Tensor, form: str
) -> None:
    """What `decode_blocks` must write to `out`, bit for bit."""
    found = _decoded(rows, cut, form).view(-1)[: cut.num_elements]
    out.copy_(found if active is None else torch.where(active, found, 0.0))


def _sums(values: Tensor, error: Tensor | None, active: Tensor | None) -> Tensor:
    """(n,) y, in float32 or wider; 0 where not active."""
    y = values.to(torch.promote_types(values.dtype, torch.float32))
    if error is not None:
        y = y + error
    return y if active is None else torch.where(active, y, 0.0)


def _scales_of(largest: Tensor, form: Form) -> Tensor:
    """The scales of blocks whose largest |y| are given, NaN among them."""
    most_number = float(form.sizes[-1])
    # the largest float32, divided and multiplied again, could be rounded up
    most = torch.finfo(torch.float32).max / most_number * (1 - 2.0**-23)
    # by a tensor, since a GPU multiplies with one over a number
    scales = (largest / torch.full_like(largest, most_number)).clamp(SMALLEST_SCALE, most)
    scales = torch.where(largest == 0, 0.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def _scales(rows: Tensor, cut: Cut) -> Tensor:
    """(parts, blocks) float32: where a row has its scales."""
    return rows[:, cut.code_bytes : cut.row_bytes].view(torch.float32)


def _spread(scales: Tensor, cut: Cut) -> Tensor:
    """(parts, part): the scale of each element."""
    return scales.repeat_interleave(cut.block_elements, 1)[:, : cut.part]


def _drawn(count: int, draws: Draws, offset: int) -> Tensor:
    """(count,) float32 in [0, 1), multiples of 2**-24."""
    seed, step = draws
    counters = np.arange(offset // 4, offset // 4 + -(-count // 4), dtype=np.uint64)
    low, high = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    words = philox4x32_reference(low, high, *split_key(step), *split_key(seed))
    return torch.from_numpy((np.stack(words, 1).ravel()[:count] >> 8).astype(np.float32) / 2**24)


def _codes(y: Tensor, scales: Tensor, form: Form, drawn: Tensor | None) -> Tensor:
    """The codes of elements, of which each has its scale here."""
    quotients = torch.where(scales > 0, y / scales, 0.0)
    sizes = form.sizes.to(y.device)
    size = quotients.abs().clamp(max=float(sizes[-1]))
    low = torch.searchsorted(sizes, size, right=True) - 1
    high = (low + 1).clamp(max=form.most)
    # how much of the way from one number to the next is gone; 0 / 0 at the last one, which stays
    share = (size - sizes[low]) / (sizes[high] - sizes[low])
    if drawn is not None:
        up = drawn < share
    elif form.ties_up:
        up = share >= 0.5
    else:
        up = (share > 0.5) | ((share == 0.5) & (low % 2 == 1))
    code = torch.where(up, high, low)
    return torch.where(quotients.signbit() & (code > 0), form.negative(code), code)


def _decoded(rows: Tensor, cut: Cut, form: str) -> Tensor:
    """(parts, part) float32."""
    codes = rows[:, : cut.code_bytes].long()
    if cut.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).view(len(rows), cut.part)
    return FORMS[form].values.to(rows.device)[codes] * _spread(_scales(rows, cut), cut)


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
def _settle_numba(values, error, active, codes, scales, table, sizes, layout, begin, end):
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
    kernel: Callable[..., None], cut: Cut, *args: Any, threads: int | None = None
) -> None:
    """Call a kernel so that threads share the pieces of all parts."""
    _, blocks, block, pieces, piece = _sizes(cut)
    least = max(1, LEAST_ELEMENTS // min(block, piece))
    in_parts(kernel, cut.parts * blocks * pieces, *args, threads=threads, least=least)


def _memory(rows: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """All bytes from the first row's to the last one's, and the same as float32."""
    flat = rows.as_strided(((len(rows) - 1) * rows.stride(0) + cut.row_bytes,), (1,))
    return flat, flat.view(torch.float32)


def _sizes(cut: Cut) -> tuple[int, ...]:
    """How pieces are numbered, see `_piece`."""
    pieces = -(-cut.block_elements // PIECE)
    return cut.part, cut.blocks, cut.block_elements, pieces, PIECE


def _numpy(*tensors: Tensor | None) -> list[Any]:
    """As numba takes them: without a gradient, and empty if they are None."""
    none = torch.empty(0)
    return [(none if tensor is None else tensor.detach()).numpy() for tensor in tensors]


def _active_numpy(active: Tensor | None) -> Any:
    return np.empty(0, np.uint8) if active is None else active.view(torch.uint8).numpy()


def _form_numba(form: Form) -> tuple[Any, ...]:
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
    cut: Cut,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
    *,
    threads: int | None = None,
) -> None:
    """`encode_blocks_reference` on the CPU, for contiguous float32."""
    vectors, sizes = (*_numpy(values, error), _active_numpy(active)), _sizes(cut)
    largest = torch.empty(cut.parts, cut.blocks, sizes[3], dtype=torch.int32)
    _in_pieces(_largest_numba, cut, *vectors, largest.view(-1).numpy(), sizes, threads=threads)
    _store_scales(largest, rows, cut, FORMS[form])
    seed, step = draws or (0, 0)
    _in_pieces(
        _encode_numba,
        cut,
        *vectors,
        *_numpy(*_memory(rows, cut)),
        sizes,
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        _form_numba(FORMS[form]),
        draws is not None,
        tuple(np.uint64(word) for word in (*split_key(step), *split_key(seed))),
        offset,
        threads=threads,
    )


def settle_blocks_numba(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    cut: Cut,
    rows: Tensor,
    form: str,
    *,
    threads: int | None = None,
) -> None:
    """`settle_blocks_reference` on the CPU, for contiguous float32."""
    _in_pieces(
        _settle_numba,
        cut,
        *_numpy(values, error),
        _active_numpy(active),
        *_numpy(*_memory(rows, cut), FORMS[form].values),
        _sizes(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        threads=threads,
    )


def mean_of_blocks_numba(
    rows: Tensor, cut: Cut, out: Tensor, form: str, *, threads: int | None = None
) -> None:
    """`mean_of_blocks_reference` on the CPU, for contiguous float32."""
    _in_pieces(
        _mean_numba,
        cut,
        *_numpy(*_memory(rows, cut), FORMS[form].values),
        _active_numpy(None),
        *_numpy(out),
        _sizes(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        len(rows),
        np.float32(1 / len(rows)),
        threads=threads,
    )


def decode_blocks_numba(
    rows: Tensor,
    cut: Cut,
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
        *_numpy(*_memory(rows, cut), FORMS[form].values),
        _active_numpy(active),
        *_numpy(out),
        _sizes(cut),
        (rows.stride(0), cut.code_bytes // 4, cut.bits),
        threads=threads,
    )


def _store_scales(largest: Tensor, rows: Tensor, cut: Cut, form: Form) -> None:
    """Write the scales of blocks, from the bits of the largest |y| of their spans."""
    _scales(rows, cut).copy_(_scales_of(largest.amax(2).view(torch.float32), form))


@lru_cache
def _table(form: str, device: torch.device) -> Tensor:
    return FORMS[form].values.to(device)


def _bytes(active: Tensor | None, other: Tensor) -> Tensor:
    """What is active as Triton takes it; anything in place of None, since it is not read."""
    return other if active is None else active.view(torch.uint8)


def encode_blocks_triton(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: Cut,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
) -> None:
    """`encode_blocks_reference` in Triton, for contiguous float32 on its device."""
    how, num_blocks = FORMS[form], cut.parts * cut.blocks
    vectors = (values, values if error is None else error, _bytes(active, values))
    given = {"HAS_ERROR": error is not None, "HAS_ACTIVE": active is not None}
    columns = min(TILE, triton.next_power_of_2(cut.block_elements))
    spans = triton.cdiv(cut.block_elements, columns)
    largest = values.new_empty((cut.parts, cut.blocks, spans), dtype=torch.int32)
    tiles = triton.cdiv(cut.part, TILE)
    seed, step = draws or (0, 0)
    with torch.cuda.device_of(values):
        gpu.largest_gpu[(triton.cdiv(num_blocks, TILE // columns) * spans,)](
            *vectors,
            largest,
            cut.num_elements,
            cut.part,
            num_blocks,
            cut.blocks,
            cut.block_elements,
            spans,
            **given,
            ROWS=TILE // columns,
            COLUMNS=columns,
            enable_fp_fusion=False,
        )
        _store_scales(largest, rows, cut, how)
        gpu.encode_gpu[(cut.parts * tiles,)](
            *vectors,
            *_memory(rows, cut),
            cut.num_elements,
            cut.part,
            rows.stride(0),
            cut.code_bytes // 4,
            cut.block_elements,
            tiles,
            seed,
            step,
            offset,
            **code_constants(how),
            **given,
            STOCHASTIC=draws is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def code_constants(form: Form) -> dict[str, Any]:
    """What `encode_gpu` is compiled for."""
    return {
        "BITS": form.bits,
        "DROPPED": 23 - form.mantissa_bits,
        "SHIFT": form.shift,
        "NORMAL": form.normal,
        "PER_STEP": form.per_step,
        "MOST": form.most,
        "INTEGER": form.integer,
        "TIES_UP": form.ties_up,
    }


def settle_blocks_triton(
    values: Tensor, error: Tensor, active: Tensor | None, cut: Cut, rows: Tensor, form: str
) -> None:
    """`settle_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(values):
        gpu.settle_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            values,
            error,
            _bytes(active, values),
            *_memory(rows, cut),
            _table(form, rows.device),
            cut.num_elements,
            cut.part,
            rows.stride(0),
            cut.code_bytes // 4,
            cut.block_elements,
            cut.bits,
            HAS_ACTIVE=active is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def mean_of_blocks_triton(rows: Tensor, cut: Cut, out: Tensor, form: str) -> None:
    """`mean_of_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        gpu.mean_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            *_memory(rows, cut),
            _table(form, rows.device),
            out,
            cut.num_elements,
            rows.stride(0),
            cut.code_bytes // 4,
            cut.block_elements,
            len(rows),
            1 / len(rows),
            BITS=cut.bits,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def decode_blocks_triton(
    rows: Tensor, cut: Cut, active: Tensor | None, out: Tensor, form: str
) -> None:
    """`decode_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        gpu.decode_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            *_memory(rows, cut),
            _table(form, rows.device),
            _bytes(active, out),
            out,
            cut.num_elements,
            cut.part,
            rows.stride(0),
            cut.code_bytes // 4,
            cut.block_elements,
            cut.bits,
            HAS_ACTIVE=active is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def _demand(form: str, cut: Cut, rows: Tensor, num_rows: int, *vectors: Tensor | None) -> None:
    """Raise if arguments do not fit each other.

    Raises:
        ValueError: they do not.
    """
    if form not in FORMS or cut.bits != BITS[form]:
        raise ValueError(
            f"codes of {cut.bits} bits cannot be of form {form!r}\n\nhint: one of "
            + ", ".join(f"{name} ({bits} bits)" for name, bits in BITS.items())
        )
    long = rows.dim() == 2 and len(rows) == num_rows and rows.shape[1] >= cut.row_bytes
    if (
        not long
        or rows.dtype != torch.uint8
        or (cut.row_bytes and (rows.stride(1) != 1 or rows.stride(0) % 4 or rows.data_ptr() % 4))
    ):
        raise ValueError(
            f"{rows.dtype} {tuple(rows.shape)} of strides {rows.stride()} cannot be the rows of "
            f"{num_rows} parts\n\nhint: uint8, {cut.row_bytes} bytes or more, and each row begins "
            "at a multiple of 4 bytes"
        )
    for vector in vectors:
        if vector is not None and (
            vector.shape != (cut.num_elements,) or vector.device != rows.device
        ):
            raise ValueError(
                f"{tuple(vector.shape)} on {vector.device} does not go with {cut.num_elements} "
                f"elements and rows on {rows.device}\n\nhint: vectors of as many elements as the "
                "cut, where the rows are"
            )


def _way(
    ways: tuple[Callable[..., None], Callable[..., None], Callable[..., None]],
    *vectors: Tensor | None,
) -> Callable[..., None]:
    """Which way to take: the reference, numba's or Triton's."""
    there = [vector for vector in vectors if vector is not None]
    if not all(vector.is_contiguous() for vector in there) or any(
        vector.dtype not in (torch.float32, torch.bool) for vector in there
    ):
        return ways[0]
    return ways[2] if there[0].is_cuda else ways[1]


def encode_blocks(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: Cut,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
) -> None:
    """Write the codes of `values + error` and their scales.

    Args:
        values: (n,) floating point, on the CPU or a GPU; so is all else.
        error: (n,) floating point, added to values; None for zeros.
        active: (n,) bool: what counts for scales, and has a code other than 0; all if None.
        cut: of the vector, with the bits of the form.
        rows: (parts, stride) uint8, each row contiguous and beginning at a multiple of 4 bytes.
            Of each one the first `cut.row_bytes` are written, and no others.
        form: one of `FORMS`.
        draws: to round at random, a seed of 64 bits and a step in [0, 2**63); None for to nearest.
        offset: a multiple of 32, added to an element's number in what is drawn for it.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, values, error, active)
    if draws is not None:
        split_key(draws[0])
        if not 0 <= draws[1] < 2**63 or offset < 0 or offset % PART_MULTIPLE:
            raise ValueError(
                f"nothing can be drawn for step {draws[1]} from offset {offset}\n\n"
                f"hint: a step of 0 to 2**63 - 1, and an offset that is a multiple of "
                f"{PART_MULTIPLE}"
            )
    if cut.part:
        ways = (encode_blocks_reference, encode_blocks_numba, encode_blocks_triton)
        way = _way(ways, values, error, active)
        way(values, error, active, cut, rows, form, draws, offset)


def settle_blocks(
    values: Tensor, error: Tensor, active: Tensor | None, cut: Cut, rows: Tensor, form: str
) -> None:
    """Leave in `error` what `encode_blocks` of the same arguments did not say.

    Args:
        values: (n,) floating point, as encoded.
        error: (n,) floating point, as encoded; `values + error` less what is decoded is written to
            it, and 0 where not active.
        active: (n,) bool, or None, as encoded.
        cut: of the vector.
        rows: (parts, stride) uint8, as written.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, values, error, active)
    if cut.num_elements:
        ways = (settle_blocks_reference, settle_blocks_numba, settle_blocks_triton)
        _way(ways, values, error, active)(values, error, active, cut, rows, form)


def mean_of_blocks(rows: Tensor, cut: Cut, out: Tensor, form: str) -> None:
    """The mean of what W workers sent of one part, summed in float32 in the order of the rows.

    Args:
        rows: (W, stride) uint8: the part's row of each worker.
        cut: of the part, see `Cut.of_part`.
        out: (m,) floating point, written: the sum times one over W, both rounded to float32.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other, or the cut is of several parts.
    """
    if cut.parts != 1 or len(rows) == 0:
        raise ValueError(
            f"{len(rows)} rows of {cut.parts} parts have no mean\n\n"
            "hint: rows of one part, from one worker or more, and its own cut: cut.of_part(number)"
        )
    _demand(form, cut, rows, len(rows), out)
    if cut.num_elements:
        ways = (mean_of_blocks_reference, mean_of_blocks_numba, mean_of_blocks_triton)
        _way(ways, out)(rows, cut, out, form)


def decode_blocks(rows: Tensor, cut: Cut, active: Tensor | None, out: Tensor, form: str) -> None:
    """What codes stand for.

    Args:
        rows: (parts, stride) uint8, one row for each part.
        cut: of the vector.
        active: (n,) bool: others get 0, whatever their codes and scales are; all if None.
        out: (n,) floating point, written.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, active, out)
    if cut.num_elements:
        ways = (decode_blocks_reference, decode_blocks_numba, decode_blocks_triton)
        _way(ways, out, active)(rows, cut, active, out, form)
