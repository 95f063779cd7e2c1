"""Encode and decode blocks of low-precision codes on a GPU, with Triton.

The kernels are launched with `enable_fp_fusion=False`: a fused multiply-add would round differently
from the CPU. The rows are passed as flat memory: row j begins at byte j * stride, and `scales` is
the same memory as float32.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.blocks_reference import store_scales
from gcnzc.kernels.codec.number_formats import NUMBER_FORMATS, NumberFormat, SeedAndStep, flat_views

TILE = 1024  # elements of a program


@lru_cache
def _table(number_format: str, device: torch.device) -> Tensor:
    return NUMBER_FORMATS[number_format].values.to(device)


def _active_or(active: Tensor | None, other: Tensor) -> Tensor:
    """Return `active` as uint8, or `other` as a placeholder pointer that is not read."""
    return other if active is None else active.view(torch.uint8)


def encode_blocks_triton(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
    seed_and_step: SeedAndStep | None = None,
    offset: int = 0,
) -> None:
    """`encode_blocks_reference` in Triton, for contiguous float32 on its device."""
    code_format = NUMBER_FORMATS[number_format]
    num_blocks = layout.num_parts * layout.blocks_per_part
    vectors = (values, values if error is None else error, _active_or(active, values))
    flags = {"HAS_ERROR": error is not None, "HAS_ACTIVE": active is not None}
    columns = min(TILE, triton.next_power_of_2(layout.block_elements))
    spans = triton.cdiv(layout.block_elements, columns)
    largest = values.new_empty((layout.num_parts, layout.blocks_per_part, spans), dtype=torch.int32)
    tiles = triton.cdiv(layout.part_elements, TILE)
    seed, step = seed_and_step or (0, 0)
    with torch.cuda.device_of(values):
        largest_gpu[(triton.cdiv(num_blocks, TILE // columns) * spans,)](
            *vectors,
            largest,
            layout.num_elements,
            layout.part_elements,
            num_blocks,
            layout.blocks_per_part,
            layout.block_elements,
            spans,
            **flags,
            ROWS=TILE // columns,
            COLUMNS=columns,
            enable_fp_fusion=False,
        )
        is_stochastic = seed_and_step is not None
        store_scales(largest, rows, layout, code_format, stochastic=is_stochastic)
        encode_gpu[(layout.num_parts * tiles,)](
            *vectors,
            *flat_views(rows, layout),
            layout.num_elements,
            layout.part_elements,
            rows.stride(0),
            layout.code_bytes // 4,
            layout.block_elements,
            tiles,
            seed,
            step,
            offset,
            **code_constants(code_format),
            **flags,
            STOCHASTIC=is_stochastic,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def code_constants(number_format: NumberFormat) -> dict[str, Any]:
    """Return the compile-time constants of `encode_gpu` for a number format."""
    return {
        "BITS": number_format.bits,
        "DROPPED_BITS": 23 - number_format.mantissa_bits,
        "EXPONENT_SHIFT": number_format.exponent_shift,
        "MIN_NORMAL": number_format.min_normal,
        "STEPS_PER_UNIT": number_format.steps_per_unit,
        "MAX_CODE": number_format.max_code,
        "INTEGER": number_format.is_integer,
        "TIES_UP": number_format.ties_up,
    }


def update_error_blocks_triton(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
) -> None:
    """`update_error_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(values):
        update_error_gpu[(triton.cdiv(layout.num_elements, TILE),)](
            values,
            error,
            _active_or(active, values),
            *flat_views(rows, layout),
            _table(number_format, rows.device),
            layout.num_elements,
            layout.part_elements,
            rows.stride(0),
            layout.code_bytes // 4,
            layout.block_elements,
            layout.bits,
            HAS_ACTIVE=active is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def mean_of_blocks_triton(
    rows: Tensor, layout: BlockLayout, out: Tensor, number_format: str
) -> None:
    """`mean_of_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        mean_gpu[(triton.cdiv(layout.num_elements, TILE),)](
            *flat_views(rows, layout),
            _table(number_format, rows.device),
            out,
            layout.num_elements,
            rows.stride(0),
            layout.code_bytes // 4,
            layout.block_elements,
            len(rows),
            1 / len(rows),
            BITS=layout.bits,
            TILE=TILE,
            enable_fp_fusion=False,
        )


def decode_blocks_triton(
    rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor, number_format: str
) -> None:
    """`decode_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        decode_gpu[(triton.cdiv(layout.num_elements, TILE),)](
            *flat_views(rows, layout),
            _table(number_format, rows.device),
            _active_or(active, out),
            out,
            layout.num_elements,
            layout.part_elements,
            rows.stride(0),
            layout.code_bytes // 4,
            layout.block_elements,
            layout.bits,
            HAS_ACTIVE=active is not None,
            TILE=TILE,
            enable_fp_fusion=False,
        )


@triton.jit
def _load_sums(values, error, active, e, mask, HAS_ERROR: tl.constexpr, HAS_ACTIVE: tl.constexpr):
    """Load y at the indices `e`, with 0 where masked out or not active."""
    if HAS_ACTIVE:
        mask = mask & (tl.load(active + e, mask=mask, other=0) != 0)
    y = tl.load(values + e, mask=mask, other=0.0)
    if HAS_ERROR:
        y += tl.load(error + e, mask=mask, other=0.0)
    return y


@triton.jit
def _decode(codes, scales, table, start, i, mask, first_scale, block_elements, BITS: tl.constexpr):
    """Decode elements `i` of a row that begins at byte `start`."""
    if BITS == 8:
        code = tl.load(codes + start + i, mask=mask, other=0).to(tl.int32)
    else:
        per_byte: tl.constexpr = 8 // BITS
        byte = tl.load(codes + start + i // per_byte, mask=mask, other=0).to(tl.int32)
        code = (byte >> (i % per_byte * BITS).to(tl.int32)) & ((1 << BITS) - 1)
    scale = tl.load(scales + start // 4 + first_scale + i // block_elements, mask=mask, other=0.0)
    return tl.load(table + code, mask=mask, other=0.0) * scale


@triton.jit
def _random_words(seed, step, counters):
    """Return the four random words of each counter, one after another."""
    # as int64: counters may exceed 32 bits, and Triton picks the type of `step` by its value
    steps = tl.zeros_like(counters) + step
    w0, w1, w2, w3 = tl.philox(
        seed,
        counters.to(tl.uint32),
        (counters >> 32).to(tl.uint32),
        steps.to(tl.uint32),
        (steps >> 32).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def largest_gpu(
    values,
    error,
    active,
    largest,
    num_elements,
    part_elements,
    num_blocks,
    blocks_per_part,
    block_elements,
    spans_per_block,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the bits of the largest |y| of each span of COLUMNS elements; NaN is the largest."""
    program = tl.program_id(0).to(tl.int64)
    block = program // spans_per_block * ROWS + tl.arange(0, ROWS)  # counted over all parts
    span = program % spans_per_block
    column = span * COLUMNS + tl.arange(0, COLUMNS)
    i = (block % blocks_per_part * block_elements)[:, None] + column[None, :]
    e = (block // blocks_per_part * part_elements)[:, None] + i
    mask = (block < num_blocks)[:, None] & (column < block_elements)[None, :] & (i < part_elements)
    y = _load_sums(values, error, active, e, mask & (e < num_elements), HAS_ERROR, HAS_ACTIVE)
    magnitudes = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(
        largest + block * spans_per_block + span, tl.max(magnitudes, 1), mask=block < num_blocks
    )


@triton.jit(do_not_specialize=["seed", "step", "offset"])
def encode_gpu(
    values,
    error,
    active,
    codes,
    scales,
    num_elements,
    part_elements,
    stride,
    first_scale,
    block_elements,
    tiles_per_part,
    seed,
    step,
    offset,
    BITS: tl.constexpr,
    DROPPED_BITS: tl.constexpr,
    EXPONENT_SHIFT: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    STEPS_PER_UNIT: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INTEGER: tl.constexpr,
    TIES_UP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the codes of TILE elements of one part."""
    program = tl.program_id(0).to(tl.int64)
    j = program // tiles_per_part
    first = program % tiles_per_part * TILE
    i = first + tl.arange(0, TILE)
    e = j * part_elements + i
    y = _load_sums(
        values, error, active, e, (i < part_elements) & (e < num_elements), HAS_ERROR, HAS_ACTIVE
    )
    scale = tl.load(
        scales + j * stride // 4 + first_scale + i // block_elements,
        mask=i < part_elements,
        other=0.0,
    )
    has_scale = scale > 0  # false for NaN
    quotient = tl.where(has_scale, tl.div_rn(y, tl.where(has_scale, scale, 1.0)), 0.0)
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    # the lower code, and the distance from its number as a fraction of the step to the next
    steps = tl.minimum(size, MIN_NORMAL) * STEPS_PER_UNIT
    low = steps.to(tl.int32)
    share = steps - low.to(tl.float32)
    is_normal = size >= MIN_NORMAL
    low = tl.where(is_normal, (magnitude >> DROPPED_BITS) - EXPONENT_SHIFT, low)
    rest = (magnitude & ((1 << DROPPED_BITS) - 1)).to(tl.float32) * (1.0 / (1 << DROPPED_BITS))
    share = tl.where(is_normal, rest, share)
    if STOCHASTIC:
        counters = (offset + j * part_elements + first) // 4 + tl.arange(0, TILE // 4)
        word = _random_words(seed, step, counters).to(tl.uint32)
        up = (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) < share
    elif TIES_UP:
        up = share >= 0.5
    else:
        up = (share > 0.5) | ((share == 0.5) & (low % 2 == 1))
    code = tl.minimum(low + up.to(tl.int32), MAX_CODE)
    # two's complement, or a sign bit
    negative = (1 << BITS) - code if INTEGER else (1 << (BITS - 1)) + code
    code = tl.where((bits < 0) & (code > 0), negative, code)
    if BITS == 8:
        tl.store(codes + j * stride + i, code.to(tl.uint8), mask=i < part_elements)
    elif BITS == 4:
        low_half, high_half = tl.split(tl.reshape(code, [TILE // 2, 2]))
        byte = first // 2 + tl.arange(0, TILE // 2)
        pair = (low_half | (high_half << 4)).to(tl.uint8)
        tl.store(codes + j * stride + byte, pair, mask=byte < part_elements // 2)
    else:
        even, odd = tl.split(tl.reshape(code, [TILE // 4, 2, 2]))
        low_half, high_half = tl.split(even | (odd << 2))
        byte = first // 4 + tl.arange(0, TILE // 4)
        four = (low_half | (high_half << 4)).to(tl.uint8)
        tl.store(codes + j * stride + byte, four, mask=byte < part_elements // 4)


@triton.jit
def update_error_gpu(
    values,
    error,
    active,
    codes,
    scales,
    table,
    num_elements,
    part_elements,
    stride,
    first_scale,
    block_elements,
    BITS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Set `error` to the rounding error of TILE elements."""
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = e < num_elements
    y = tl.load(values + e, mask=mask, other=0.0) + tl.load(error + e, mask=mask, other=0.0)
    start, i = e // part_elements * stride, e % part_elements
    residual = y - _decode(codes, scales, table, start, i, mask, first_scale, block_elements, BITS)
    if HAS_ACTIVE:
        residual = tl.where(tl.load(active + e, mask=mask, other=0) != 0, residual, 0.0)
    tl.store(error + e, residual, mask=mask)


@triton.jit
def mean_gpu(
    codes,
    scales,
    table,
    out,
    num_elements,
    stride,
    first_scale,
    block_elements,
    num_rows,
    inverse_count,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the mean of TILE elements over all rows."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < num_elements
    start = tl.zeros_like(i)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(num_rows):
        total += _decode(codes, scales, table, start, i, mask, first_scale, block_elements, BITS)
        start += stride
    tl.store(out + i, total * inverse_count, mask=mask)


@triton.jit
def decode_gpu(
    codes,
    scales,
    table,
    active,
    out,
    num_elements,
    part_elements,
    stride,
    first_scale,
    block_elements,
    BITS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the decoded numbers of TILE elements."""
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = e < num_elements
    start, i = e // part_elements * stride, e % part_elements
    decoded = _decode(codes, scales, table, start, i, mask, first_scale, block_elements, BITS)
    if HAS_ACTIVE:
        decoded = tl.where(tl.load(active + e, mask=mask, other=0) != 0, decoded, 0.0)
    tl.store(out + e, decoded, mask=mask)
