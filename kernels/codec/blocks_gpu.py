"""Low-precision codes on a GPU, in Triton.

They are launched with `enable_fp_fusion=False`: a product that is added without being rounded first
would differ from the CPU's. Rows of bytes are flat here: row j begins at byte j * stride, and
`scales` are the same memory as float32.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.blocks_reference import store_scales
from gcnzc.kernels.codec.number_formats import NUMBER_FORMATS, Draws, NumberFormat, memory

TILE = 1024  # elements of a GPU's program


@lru_cache
def _table(form: str, device: torch.device) -> Tensor:
    return NUMBER_FORMATS[form].values.to(device)


def _bytes(active: Tensor | None, other: Tensor) -> Tensor:
    """What is active as Triton takes it; anything in place of None, since it is not read."""
    return other if active is None else active.view(torch.uint8)


def encode_blocks_triton(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
) -> None:
    """`encode_blocks_reference` in Triton, for contiguous float32 on its device."""
    how, num_blocks = NUMBER_FORMATS[form], cut.parts * cut.blocks
    vectors = (values, values if error is None else error, _bytes(active, values))
    given = {"HAS_ERROR": error is not None, "HAS_ACTIVE": active is not None}
    columns = min(TILE, triton.next_power_of_2(cut.block_elements))
    spans = triton.cdiv(cut.block_elements, columns)
    largest = values.new_empty((cut.parts, cut.blocks, spans), dtype=torch.int32)
    tiles = triton.cdiv(cut.part, TILE)
    seed, step = draws or (0, 0)
    with torch.cuda.device_of(values):
        largest_gpu[(triton.cdiv(num_blocks, TILE // columns) * spans,)](
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
        store_scales(largest, rows, cut, how)
        encode_gpu[(cut.parts * tiles,)](
            *vectors,
            *memory(rows, cut),
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


def code_constants(form: NumberFormat) -> dict[str, Any]:
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


def update_error_blocks_triton(
    values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor, form: str
) -> None:
    """`update_error_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(values):
        update_error_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            values,
            error,
            _bytes(active, values),
            *memory(rows, cut),
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


def mean_of_blocks_triton(rows: Tensor, cut: BlockLayout, out: Tensor, form: str) -> None:
    """`mean_of_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        mean_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            *memory(rows, cut),
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
    rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor, form: str
) -> None:
    """`decode_blocks_reference` in Triton, for contiguous float32 on its device."""
    with torch.cuda.device_of(out):
        decode_gpu[(triton.cdiv(cut.num_elements, TILE),)](
            *memory(rows, cut),
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


@triton.jit
def _sums(values, error, active, e, inside, HAS_ERROR: tl.constexpr, HAS_ACTIVE: tl.constexpr):
    """y of elements `e`; 0 where they are not inside, or not active."""
    if HAS_ACTIVE:
        inside = inside & (tl.load(active + e, mask=inside, other=0) != 0)
    y = tl.load(values + e, mask=inside, other=0.0)
    if HAS_ERROR:
        y += tl.load(error + e, mask=inside, other=0.0)
    return y


@triton.jit
def _decoded(codes, scales, table, start, i, inside, first_scale, block, BITS: tl.constexpr):
    """What the codes of elements `i` stand for, of rows that begin at byte `start`."""
    if BITS == 8:
        code = tl.load(codes + start + i, mask=inside, other=0).to(tl.int32)
    else:
        byte = tl.load(codes + start + i // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> (i % 2 * 4).to(tl.int32)) & 15
    scale = tl.load(scales + start // 4 + first_scale + i // block, mask=inside, other=0.0)
    return tl.load(table + code, mask=inside, other=0.0) * scale


@triton.jit
def _words(seed, step, counters):
    """Four random words of each counter, in a row."""
    # int64 first: a counter may have more than 32 bits, and a number may be any of Triton's types
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
    part,
    num_blocks,
    blocks,
    block,
    spans,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The bits of the largest |y| of each span of COLUMNS elements of a block; NaN is largest."""
    program = tl.program_id(0).to(tl.int64)
    number = program // spans * ROWS + tl.arange(0, ROWS)  # of a block, over all parts
    span = program % spans
    column = span * COLUMNS + tl.arange(0, COLUMNS)
    i = (number % blocks * block)[:, None] + column[None, :]
    e = (number // blocks * part)[:, None] + i
    inside = (number < num_blocks)[:, None] & (column < block)[None, :] & (i < part)
    y = _sums(values, error, active, e, inside & (e < num_elements), HAS_ERROR, HAS_ACTIVE)
    sizes = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(largest + number * spans + span, tl.max(sizes, 1), mask=number < num_blocks)


@triton.jit(do_not_specialize=["seed", "step", "offset"])
def encode_gpu(
    values,
    error,
    active,
    codes,
    scales,
    num_elements,
    part,
    stride,
    first_scale,
    block,
    tiles,
    seed,
    step,
    offset,
    BITS: tl.constexpr,
    DROPPED: tl.constexpr,
    SHIFT: tl.constexpr,
    NORMAL: tl.constexpr,
    PER_STEP: tl.constexpr,
    MOST: tl.constexpr,
    INTEGER: tl.constexpr,
    TIES_UP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):
    """The codes of TILE elements of one part."""
    program = tl.program_id(0).to(tl.int64)
    j = program // tiles
    first = program % tiles * TILE
    i = first + tl.arange(0, TILE)
    e = j * part + i
    y = _sums(values, error, active, e, (i < part) & (e < num_elements), HAS_ERROR, HAS_ACTIVE)
    scale = tl.load(scales + j * stride // 4 + first_scale + i // block, mask=i < part, other=0.0)
    scaled = scale > 0  # not where it is NaN
    quotient = tl.where(scaled, tl.div_rn(y, tl.where(scaled, scale, 1.0)), 0.0)
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    # the code below, and which share of the way to the next one is gone
    steps = tl.minimum(size, NORMAL) * PER_STEP
    low = steps.to(tl.int32)
    share = steps - low.to(tl.float32)
    normal = size >= NORMAL
    low = tl.where(normal, (magnitude >> DROPPED) - SHIFT, low)
    rest = (magnitude & ((1 << DROPPED) - 1)).to(tl.float32) * (1.0 / (1 << DROPPED))
    share = tl.where(normal, rest, share)
    if STOCHASTIC:
        counters = (offset + j * part + first) // 4 + tl.arange(0, TILE // 4)
        word = _words(seed, step, counters).to(tl.uint32)
        up = (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) < share
    elif TIES_UP:
        up = share >= 0.5
    else:
        up = (share > 0.5) | ((share == 0.5) & (low % 2 == 1))
    code = tl.minimum(low + up.to(tl.int32), MOST)
    # complements of two, or a bit for the sign
    negative = (1 << BITS) - code if INTEGER else (1 << (BITS - 1)) + code
    code = tl.where((bits < 0) & (code > 0), negative, code)
    if BITS == 8:
        tl.store(codes + j * stride + i, code.to(tl.uint8), mask=i < part)
    else:
        low_half, high_half = tl.split(tl.reshape(code, [TILE // 2, 2]))
        byte = first // 2 + tl.arange(0, TILE // 2)
        pair = (low_half | (high_half << 4)).to(tl.uint8)
        tl.store(codes + j * stride + byte, pair, mask=byte < part // 2)


@triton.jit
def update_error_gpu(
    values,
    error,
    active,
    codes,
    scales,
    table,
    num_elements,
    part,
    stride,
    first_scale,
    block,
    BITS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leave in `error` what the codes of TILE elements did not say."""
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = e < num_elements
    y = tl.load(values + e, mask=inside, other=0.0) + tl.load(error + e, mask=inside, other=0.0)
    start, i = e // part * stride, e % part
    left = y - _decoded(codes, scales, table, start, i, inside, first_scale, block, BITS)
    if HAS_ACTIVE:
        left = tl.where(tl.load(active + e, mask=inside, other=0) != 0, left, 0.0)
    tl.store(error + e, left, mask=inside)


@triton.jit
def mean_gpu(
    codes,
    scales,
    table,
    out,
    num_elements,
    stride,
    first_scale,
    block,
    num_rows,
    share,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mean of TILE elements over all rows."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < num_elements
    start = tl.zeros_like(i)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(num_rows):
        total += _decoded(codes, scales, table, start, i, inside, first_scale, block, BITS)
        start += stride
    tl.store(out + i, total * share, mask=inside)


@triton.jit
def decode_gpu(
    codes,
    scales,
    table,
    active,
    out,
    num_elements,
    part,
    stride,
    first_scale,
    block,
    BITS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """What the codes of TILE elements stand for."""
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = e < num_elements
    start, i = e // part * stride, e % part
    found = _decoded(codes, scales, table, start, i, inside, first_scale, block, BITS)
    if HAS_ACTIVE:
        found = tl.where(tl.load(active + e, mask=inside, other=0) != 0, found, 0.0)
    tl.store(out + e, found, mask=inside)
