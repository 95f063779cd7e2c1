"""Signs and scales on a GPU, in Triton.

A program processes up to 4096 elements of one block, so that a block of many millions has many
programs. A second kernel adds up their sums, and a third computes the scales. A word of 32 bits
corresponds to eight vectors of 16 B of neighbouring lanes. Every byte of the vectors is read once
and written once, and the eight lanes of a word of bits request it at once.

Sums are float64, as on the CPU: a few operations an element, far fewer than an A100 or H100 does
while it reads one.

Letters: n elements of the vector, W workers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout

MOST_WORDS = 128  # of a program


WARP_WORDS = 16  # a warp's share of it: 16 elements a lane, four loads of 16 B


TOTALS = 1024  # sums of programs that are added at once


SCALES_OF_PROGRAM = 128  # blocks whose scales one program writes


@triton.jit
def _chunk(n, part, block, blocks, chunks, WORDS: tl.constexpr):
    """The row of a program, its block, where it begins in the part and in the vector, its elements
    in the part, and those of them in the vector."""
    item = tl.program_id(0)
    # long before they are multiplied: a vector may have more than 2**31 elements
    row = (item // (blocks * chunks)).to(tl.int64)
    number = (item // chunks % blocks).to(tl.int64)
    inner = (item % chunks).to(tl.int64) * (32 * WORDS)
    first = number * block + inner
    length = tl.minimum(tl.minimum(block - inner, part - first), 32 * WORDS)
    begin = row * part + first
    count = tl.maximum(tl.minimum(length, n - begin), 0)
    return row, number, first, begin, length, count


@triton.jit
def _places(WORDS: tl.constexpr):
    return tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _load(vector, begin, count, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    """`count` elements in order, (WORDS, 32), and zeros."""
    places = _places(WORDS)
    # a mask of whole words leaves lanes their vectors
    inside = tl.arange(0, WORDS)[:, None] * 32 < count
    pointers = vector + begin + places
    if RAGGED:
        if count % 32 == 0:
            x = tl.load(pointers, mask=inside, other=0)
        else:
            x = tl.load(pointers, mask=places < count, other=0)
    else:
        x = tl.load(pointers, mask=inside, other=0)
    return x


@triton.jit
def _store(vector, x, begin, count, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    places = _places(WORDS)
    inside = tl.arange(0, WORDS)[:, None] * 32 < count
    pointers = vector + begin + places
    if RAGGED:
        if count % 32 == 0:
            tl.store(pointers, x, mask=inside)
        else:
            tl.store(pointers, x, mask=places < count)
    else:
        tl.store(pointers, x, mask=inside)


@triton.jit
def _signed(scale, positive):
    """The scale with a sign, which is a bit of it: -0.0 too, and nothing to be fused with a sum."""
    sign = (positive.to(tl.int32) ^ 1) << 31
    return (scale.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _bits(words, at, count, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    codes = tl.load(words + at + word, mask=word * 32 < count, other=0)
    return (codes[:, None] >> tl.arange(0, 32)[None, :]) & 1


@triton.jit
def _scale_of(words, at):
    return tl.load(words + at).to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    values,
    error,
    active,
    words,
    totals,
    counts,
    n,
    part,
    block,
    blocks,
    chunks,
    stride,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    SQUARES: tl.constexpr,
    RAGGED: tl.constexpr,  # n is no multiple of 32
    WORDS: tl.constexpr,
):
    row, _, first, begin, length, count = _chunk(n, part, block, blocks, chunks, WORDS)
    y = _load(values, begin, count, WORDS, RAGGED)
    if HAS_ERROR:
        y += _load(error, begin, count, WORDS, RAGGED)
    live = _places(WORDS) < count
    if HAS_ACTIVE:
        live = live & (_load(active, begin, count, WORDS, RAGGED) != 0)
    codes = tl.sum(((y >= 0) & live).to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)
    word = tl.arange(0, WORDS)
    tl.store(words + row * stride + first // 32 + word, codes, mask=word * 32 < length)
    size = y.to(tl.float64)
    size = size * size if SQUARES else tl.abs(size)
    # NaN that is not active is nobody's
    total = tl.sum(tl.sum(tl.where(live, size, 0.0), axis=1), axis=0)
    if HAS_ACTIVE:
        count = tl.sum(tl.sum(live.to(tl.int32), axis=1), axis=0).to(tl.int64)
    tl.store(totals + tl.program_id(0), total)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _add_up(totals, counts, block_totals, block_counts, chunks, TOTALS: tl.constexpr):
    """Sum what the `chunks` programs of a block found."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TOTALS)
    total = tl.zeros([TOTALS], tl.float64)
    count = tl.zeros([TOTALS], tl.int64)
    for begin in range(0, chunks, TOTALS):
        inside = begin + place < chunks
        total += tl.load(totals + block * chunks + begin + place, mask=inside, other=0.0)
        count += tl.load(counts + block * chunks + begin + place, mask=inside, other=0)
    tl.store(block_totals + block, tl.sum(total, axis=0))
    tl.store(block_counts + block, tl.sum(count, axis=0))


@triton.jit
def _scale(
    words,
    totals,
    counts,
    num_blocks,
    part,
    blocks,
    stride,
    SQUARES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the scale of each block from its sums.

    A division and a square root of float64 take tens of instructions of a kind that most GPUs
    execute slowly, so that a lane computes them for one block, not all lanes for the same one.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < num_blocks
    count = tl.load(counts + block, mask=inside, other=0)
    mean = tl.load(totals + block, mask=inside, other=0.0) / tl.maximum(count, 1).to(tl.float64)
    if SQUARES:
        mean = tl.sqrt(mean)
    at = block // blocks * stride + part // 32 + block % blocks
    tl.store(words + at, mean.to(tl.float32).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _update_error(
    values,
    error,
    active,
    words,
    n,
    part,
    block,
    blocks,
    chunks,
    stride,
    HAS_ACTIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, number, _, begin, _, count = _chunk(n, part, block, blocks, chunks, WORDS)
    if count > 0:
        scale = _scale_of(words, row * stride + part // 32 + number)
        y = _load(values, begin, count, WORDS, RAGGED) + _load(error, begin, count, WORDS, RAGGED)
        left = y - _signed(scale, y >= 0)
        if HAS_ACTIVE:
            left = tl.where(_load(active, begin, count, WORDS, RAGGED) != 0, left, 0.0)
        _store(error, left, begin, count, WORDS, RAGGED)


@triton.jit
def _mean(
    words,
    out,
    workers,
    share,
    n,
    part,
    block,
    blocks,
    chunks,
    stride,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, number, first, begin, _, count = _chunk(n, part, block, blocks, chunks, WORDS)
    if count > 0:
        total = tl.zeros([WORDS, 32], tl.float32)
        at = row * stride  # of the first worker: a part of its own is row 0
        for _worker in range(workers):
            scale = _scale_of(words, at + part // 32 + number) * share
            total += _signed(scale, _bits(words, at + first // 32, count, WORDS))
            at += stride
        _store(out, total, begin, count, WORDS, RAGGED)


@triton.jit
def _decode(
    words,
    active,
    out,
    n,
    part,
    block,
    blocks,
    chunks,
    stride,
    HAS_ACTIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, number, first, begin, _, count = _chunk(n, part, block, blocks, chunks, WORDS)
    if count > 0:
        scale = _scale_of(words, row * stride + part // 32 + number)
        x = _signed(scale, _bits(words, row * stride + first // 32, count, WORDS))
        if HAS_ACTIVE:
            x = tl.where(_load(active, begin, count, WORDS, RAGGED) != 0, x, 0.0)
        _store(out, x, begin, count, WORDS, RAGGED)


def words_of_program(cut: BlockLayout) -> int:
    """A power of two; no more than a block fills."""
    return min(MOST_WORDS, triton.next_power_of_2(cut.block_elements // 32))


def num_warps(kernel: Any, words: int) -> int:
    """Warps of a program of `kernel` that processes `words` words of bits.

    Triton reloads a tensor that has fewer elements than the program has lanes instead of exchanging
    it between lanes. The kernels that read bits therefore get no more lanes than words, so that
    each word is requested once.
    """
    reads_bits = kernel is _mean or kernel is _decode
    return max(1, words // (32 if reads_bits else WARP_WORDS))


def _chunks(cut: BlockLayout) -> int:
    return -(-cut.block_elements // (32 * words_of_program(cut)))


def _launch(kernel: Any, cut: BlockLayout, rows: Tensor, *args: Any, **constants: bool) -> None:
    words = words_of_program(cut)
    lengths = cut.num_elements, cut.part, cut.block_elements
    geometry = *lengths, cut.blocks, _chunks(cut), rows.stride(0) // 4
    warps = num_warps(kernel, words)
    options = {"RAGGED": cut.num_elements % 32 != 0, "WORDS": words, "num_warps": warps}
    grid = (cut.parts * cut.blocks * _chunks(cut),)
    with torch.cuda.device_of(rows):
        kernel[grid](*args, *geometry, **constants, **options)


def _words_of(cut: BlockLayout, rows: Tensor) -> Tensor:
    return rows[:, : cut.row_bytes].view(torch.int32)


def _flags(active: Tensor | None, other: Tensor) -> Tensor:
    # a pointer that is not read must still be one
    return other if active is None else active.view(torch.uint8)


def encode(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    *,
    squares: bool,
) -> None:
    """`encode_signs_reference` of `gcnzc.kernels.codec.signs`, for float32."""
    words, chunks, blocks = _words_of(cut, rows), _chunks(cut), cut.parts * cut.blocks
    totals, counts = _sums(blocks * chunks, rows.device)
    vectors = values, values if error is None else error, _flags(active, values)
    has = {"HAS_ERROR": error is not None, "HAS_ACTIVE": active is not None}
    _launch(_encode, cut, rows, *vectors, words, totals, counts, **has, SQUARES=squares)
    with torch.cuda.device_of(rows):
        if chunks > 1:
            found, (totals, counts) = (totals, counts), _sums(blocks, rows.device)
            _add_up[(blocks,)](*found, totals, counts, chunks, TOTALS)
        sizes = blocks, cut.part, cut.blocks, rows.stride(0) // 4
        grid = (triton.cdiv(blocks, SCALES_OF_PROGRAM),)
        _scale[grid](words, totals, counts, *sizes, squares, SCALES_OF_PROGRAM)


def _sums(number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for a sum and a number of elements of each block or program."""
    totals = torch.empty(number, dtype=torch.float64, device=device)
    return totals, torch.empty(number, dtype=torch.int64, device=device)


def update_error(
    values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
) -> None:
    """`update_error_signs_reference` of `gcnzc.kernels.codec.signs`, for float32."""
    args = values, error, _flags(active, values), _words_of(cut, rows)
    _launch(_update_error, cut, rows, *args, HAS_ACTIVE=active is not None)


def mean(rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
    """`mean_of_signs_reference` of `gcnzc.kernels.codec.signs`, for float32."""
    _launch(_mean, cut, rows, _words_of(cut, rows), out, len(rows), 1 / len(rows))


def decode(rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor) -> None:
    """`decode_signs_reference` of `gcnzc.kernels.codec.signs`, for float32."""
    args = _words_of(cut, rows), _flags(active, out), out
    _launch(_decode, cut, rows, *args, HAS_ACTIVE=active is not None)
