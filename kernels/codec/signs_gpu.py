"""Signs and scales on a GPU, in Triton.

A program processes up to 4096 elements of one block, so a block of many millions of elements is
divided among many programs. A second kernel adds their sums, and a third computes the scales. A
word of 32 sign bits corresponds to eight 16 B vectors of neighbouring lanes. Every byte of the
vectors is read once and written once, and the eight lanes of a word load it in one request.

Sums are float64, as on the CPU: they take a few operations per element, far fewer than an A100 or
H100 can execute in the time it takes to read one.

Notation: n elements of the vector, W workers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout

MAX_WORDS = 128  # words of a program


WARP_WORDS = 16  # words of a warp: 16 elements per lane, in four loads of 16 B


TOTALS = 1024  # sums that a program adds at once


SCALES_PER_PROGRAM = 128  # scales that one program writes


@triton.jit
def _chunk(
    n, part_elements, block_elements, blocks_per_part, chunks_per_block, WORDS: tl.constexpr
):
    """Locate the chunk of this program.

    Returns:
        Its row, its block in the row, its first element in the part and in the vector, its number
        of elements in the part, and how many of them are in the vector.
    """
    chunk_index = tl.program_id(0)
    # int64 before the multiplication: a vector may have more than 2**31 elements
    row = (chunk_index // (blocks_per_part * chunks_per_block)).to(tl.int64)
    block_index = (chunk_index // chunks_per_block % blocks_per_part).to(tl.int64)
    inner = (chunk_index % chunks_per_block).to(tl.int64) * (32 * WORDS)
    first = block_index * block_elements + inner
    length = tl.minimum(tl.minimum(block_elements - inner, part_elements - first), 32 * WORDS)
    begin = row * part_elements + first
    count = tl.maximum(tl.minimum(length, n - begin), 0)
    return row, block_index, first, begin, length, count


@triton.jit
def _offsets(WORDS: tl.constexpr):
    return tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _load(vector, begin, count, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    """Load `count` elements as (WORDS, 32), padded with zeros."""
    offsets = _offsets(WORDS)
    # a mask that is equal for all elements of a word keeps the loads of a lane vectorized
    mask = tl.arange(0, WORDS)[:, None] * 32 < count
    # With 16 flags of 1 B per lane, Triton would assign 16 adjacent float32 to each lane as well,
    # and each load of 16 B would touch twice as many sectors as it needs
    pointers = tl.max_contiguous(vector + begin + offsets, [1, 4])
    if RAGGED:
        if count % 32 == 0:
            x = tl.load(pointers, mask=mask, other=0)
        else:
            x = tl.load(pointers, mask=offsets < count, other=0)
    else:
        x = tl.load(pointers, mask=mask, other=0)
    return x


@triton.jit
def _store(vector, x, begin, count, WORDS: tl.constexpr, RAGGED: tl.constexpr):
    offsets = _offsets(WORDS)
    mask = tl.arange(0, WORDS)[:, None] * 32 < count
    pointers = vector + begin + offsets
    if RAGGED:
        if count % 32 == 0:
            tl.store(pointers, x, mask=mask)
        else:
            tl.store(pointers, x, mask=offsets < count)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def _signed(scale, positive):
    """Return the scale with the sign `positive`.

    Setting the sign bit also gives -0.0, and cannot be fused with a later addition.
    """
    sign = (positive.to(tl.int32) ^ 1) << 31
    return (scale.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _bits(words, offset, count, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    codes = tl.load(words + offset + word, mask=word * 32 < count, other=0)
    return (codes[:, None] >> tl.arange(0, 32)[None, :]) & 1


@triton.jit
def _load_scale(words, offset):
    return tl.load(words + offset).to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    values,
    error,
    active,
    words,
    totals,
    counts,
    n,
    part_elements,
    block_elements,
    blocks_per_part,
    chunks_per_block,
    stride,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    SQUARES: tl.constexpr,
    RAGGED: tl.constexpr,  # n is not a multiple of 32
    WORDS: tl.constexpr,
):
    row, _, first, begin, length, count = _chunk(
        n, part_elements, block_elements, blocks_per_part, chunks_per_block, WORDS
    )
    y = _load(values, begin, count, WORDS, RAGGED)
    if HAS_ERROR:
        y += _load(error, begin, count, WORDS, RAGGED)
    is_active = _offsets(WORDS) < count
    if HAS_ACTIVE:
        is_active = is_active & (_load(active, begin, count, WORDS, RAGGED) != 0)
    codes = tl.sum(((y >= 0) & is_active).to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)
    word = tl.arange(0, WORDS)
    tl.store(words + row * stride + first // 32 + word, codes, mask=word * 32 < length)
    size = y.to(tl.float64)
    size = size * size if SQUARES else tl.abs(size)
    # select instead of multiply, so that a NaN that is not active has no effect
    total = tl.sum(tl.sum(tl.where(is_active, size, 0.0), axis=1), axis=0)
    if HAS_ACTIVE:
        count = tl.sum(tl.sum(is_active.to(tl.int32), axis=1), axis=0).to(tl.int64)
    tl.store(totals + tl.program_id(0), total)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _add_sums(totals, counts, block_totals, block_counts, chunks_per_block, TOTALS: tl.constexpr):
    """Add the sums and counts of the `chunks_per_block` programs of a block."""
    block_index = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, TOTALS)
    total = tl.zeros([TOTALS], tl.float64)
    count = tl.zeros([TOTALS], tl.int64)
    for begin in range(0, chunks_per_block, TOTALS):
        mask = begin + index < chunks_per_block
        total += tl.load(
            totals + block_index * chunks_per_block + begin + index, mask=mask, other=0.0
        )
        count += tl.load(
            counts + block_index * chunks_per_block + begin + index, mask=mask, other=0
        )
    tl.store(block_totals + block_index, tl.sum(total, axis=0))
    tl.store(block_counts + block_index, tl.sum(count, axis=0))


@triton.jit
def _write_scales(
    words,
    totals,
    counts,
    num_blocks,
    part_elements,
    blocks_per_part,
    stride,
    SQUARES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the scale of each block, computed from its sums.

    A float64 division and square root take tens of instructions that most GPUs execute slowly, so
    each lane computes them for its own block.
    """
    block_index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block_index < num_blocks
    count = tl.load(counts + block_index, mask=mask, other=0)
    mean = tl.load(totals + block_index, mask=mask, other=0.0) / tl.maximum(count, 1).to(tl.float64)
    if SQUARES:
        mean = tl.sqrt(mean)
    offset = (
        block_index // blocks_per_part * stride
        + part_elements // 32
        + block_index % blocks_per_part
    )
    tl.store(words + offset, mean.to(tl.float32).to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _update_error(
    values,
    error,
    active,
    words,
    n,
    part_elements,
    block_elements,
    blocks_per_part,
    chunks_per_block,
    stride,
    HAS_ACTIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, block_index, _, begin, _, count = _chunk(
        n, part_elements, block_elements, blocks_per_part, chunks_per_block, WORDS
    )
    if count > 0:
        scale = _load_scale(words, row * stride + part_elements // 32 + block_index)
        y = _load(values, begin, count, WORDS, RAGGED) + _load(error, begin, count, WORDS, RAGGED)
        residual = y - _signed(scale, y >= 0)
        if HAS_ACTIVE:
            residual = tl.where(_load(active, begin, count, WORDS, RAGGED) != 0, residual, 0.0)
        _store(error, residual, begin, count, WORDS, RAGGED)


@triton.jit
def _mean(
    words,
    out,
    num_rows,
    inverse_count,
    n,
    part_elements,
    block_elements,
    blocks_per_part,
    chunks_per_block,
    stride,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, block_index, first, begin, _, count = _chunk(
        n, part_elements, block_elements, blocks_per_part, chunks_per_block, WORDS
    )
    if count > 0:
        total = tl.zeros([WORDS, 32], tl.float32)
        # a layout of one part: row 0 is the first rank's
        offset = row * stride
        for _row in range(num_rows):
            scale = _load_scale(words, offset + part_elements // 32 + block_index) * inverse_count
            total += _signed(scale, _bits(words, offset + first // 32, count, WORDS))
            offset += stride
        _store(out, total, begin, count, WORDS, RAGGED)


@triton.jit
def _decode(
    words,
    active,
    out,
    n,
    part_elements,
    block_elements,
    blocks_per_part,
    chunks_per_block,
    stride,
    HAS_ACTIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, block_index, first, begin, _, count = _chunk(
        n, part_elements, block_elements, blocks_per_part, chunks_per_block, WORDS
    )
    if count > 0:
        scale = _load_scale(words, row * stride + part_elements // 32 + block_index)
        x = _signed(scale, _bits(words, row * stride + first // 32, count, WORDS))
        if HAS_ACTIVE:
            x = tl.where(_load(active, begin, count, WORDS, RAGGED) != 0, x, 0.0)
        _store(out, x, begin, count, WORDS, RAGGED)


def words_per_program(layout: BlockLayout) -> int:
    """Return the words of 32 elements that a program processes: a power of two."""
    return min(MAX_WORDS, triton.next_power_of_2(layout.block_elements // 32))


def num_warps(kernel: Any, words: int) -> int:
    """Return the number of warps for a program of `kernel` that processes `words` words.

    If a tensor has fewer elements than the program has lanes, Triton loads it several times instead
    of exchanging it between lanes. The kernels that read bits therefore get at most one lane per
    word, so that each word is loaded once.
    """
    reads_bits = kernel is _mean or kernel is _decode
    return max(1, words // (32 if reads_bits else WARP_WORDS))


def _chunks(layout: BlockLayout) -> int:
    return -(-layout.block_elements // (32 * words_per_program(layout)))


def _launch(kernel: Any, layout: BlockLayout, rows: Tensor, *args: Any, **constants: bool) -> None:
    words = words_per_program(layout)
    lengths = layout.num_elements, layout.part_elements, layout.block_elements
    geometry = *lengths, layout.blocks_per_part, _chunks(layout), rows.stride(0) // 4
    warps = num_warps(kernel, words)
    options = {"RAGGED": layout.num_elements % 32 != 0, "WORDS": words, "num_warps": warps}
    grid = (layout.num_parts * layout.blocks_per_part * _chunks(layout),)
    with torch.cuda.device_of(rows):
        kernel[grid](*args, *geometry, **constants, **options)


def _words_view(layout: BlockLayout, rows: Tensor) -> Tensor:
    return rows[:, : layout.row_bytes].view(torch.int32)


def _active_or(active: Tensor | None, other: Tensor) -> Tensor:
    # Triton needs a pointer even if it is not read
    return other if active is None else active.view(torch.uint8)


def encode(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    *,
    squares: bool,
) -> None:
    """`encode_signs_reference` on a GPU, for contiguous float32."""
    words, chunks = _words_view(layout, rows), _chunks(layout)
    blocks = layout.num_parts * layout.blocks_per_part
    totals, counts = _empty_sums(blocks * chunks, rows.device)
    vectors = values, values if error is None else error, _active_or(active, values)
    has = {"HAS_ERROR": error is not None, "HAS_ACTIVE": active is not None}
    _launch(_encode, layout, rows, *vectors, words, totals, counts, **has, SQUARES=squares)
    with torch.cuda.device_of(rows):
        if chunks > 1:
            sums, (totals, counts) = (totals, counts), _empty_sums(blocks, rows.device)
            _add_sums[(blocks,)](*sums, totals, counts, chunks, TOTALS)
        sizes = blocks, layout.part_elements, layout.blocks_per_part, rows.stride(0) // 4
        grid = (triton.cdiv(blocks, SCALES_PER_PROGRAM),)
        _write_scales[grid](words, totals, counts, *sizes, squares, SCALES_PER_PROGRAM)


def _empty_sums(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate `count` float64 sums and int64 counts."""
    totals = torch.empty(count, dtype=torch.float64, device=device)
    return totals, torch.empty(count, dtype=torch.int64, device=device)


def update_error(
    values: Tensor, error: Tensor, active: Tensor | None, layout: BlockLayout, rows: Tensor
) -> None:
    """`update_error_signs_reference` on a GPU, for contiguous float32."""
    args = values, error, _active_or(active, values), _words_view(layout, rows)
    _launch(_update_error, layout, rows, *args, HAS_ACTIVE=active is not None)


def mean(rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
    """`mean_of_signs_reference` on a GPU, for contiguous float32."""
    _launch(_mean, layout, rows, _words_view(layout, rows), out, len(rows), 1 / len(rows))


def decode(rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
    """`decode_signs_reference` on a GPU, for contiguous float32."""
    args = _words_view(layout, rows), _active_or(active, out), out
    _launch(_decode, layout, rows, *args, HAS_ACTIVE=active is not None)
