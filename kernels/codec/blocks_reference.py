"""Blocks of low-precision codes in plain torch: the reference for the kernels."""

import numpy as np
import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.number_formats import NUMBER_FORMATS, NumberFormat, SeedAndStep
from gcnzc.kernels.gather.quantize import SMALLEST_SCALE
from gcnzc.kernels.philox import philox4x32_reference, split_key


@torch.no_grad()
def encode_blocks_reference(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
    seed_and_step: SeedAndStep | None = None,
    offset: int = 0,
) -> None:
    """Reference for `encode_blocks`, which must match it bit for bit."""
    y = values.new_zeros(layout.num_parts, layout.part_elements, dtype=torch.float32)
    y.view(-1)[: layout.num_elements] = _sums(values, error, active)
    padding = layout.blocks_per_part * layout.block_elements - layout.part_elements
    blocks = torch.nn.functional.pad(y, (0, padding)).view(
        layout.num_parts, layout.blocks_per_part, layout.block_elements
    )
    is_stochastic = seed_and_step is not None
    largest = blocks.abs().amax(2)
    scales = _compute_scales(largest, NUMBER_FORMATS[number_format], stochastic=is_stochastic)
    _scales_view(rows, layout).copy_(scales)
    uniform = None
    if seed_and_step is not None:
        uniform = _random_uniform(y.numel(), seed_and_step, offset).view(y.shape).to(y.device)
    element_scales = _scale_of_elements(scales, layout)
    codes = _round_to_codes(y, element_scales, NUMBER_FORMATS[number_format], uniform)
    codes = codes.to(torch.uint8)
    for bits in range(layout.bits.bit_length() - 1, 3):
        # two codes of 2**bits bits become one of twice as many
        codes = codes[:, ::2] | codes[:, 1::2] << (1 << bits)
    rows[:, : layout.code_bytes] = codes


@torch.no_grad()
def update_error_blocks_reference(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
) -> None:
    """Reference for `update_error_blocks`, which must match it bit for bit."""
    y = _sums(values, error, None)
    residual = y - _decode(rows, layout, number_format).view(-1)[: layout.num_elements]
    error.copy_(residual if active is None else torch.where(active, residual, 0.0))


def mean_of_blocks_reference(
    rows: Tensor, layout: BlockLayout, out: Tensor, number_format: str
) -> None:
    """Reference for `mean_of_blocks`, which must match it bit for bit."""
    total = rows.new_zeros(layout.part_elements, dtype=torch.float32)
    for row in rows:
        total += _decode(row[None], layout, number_format)[0]
    out.copy_(total[: layout.num_elements] * (1 / len(rows)))


def decode_blocks_reference(
    rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor, number_format: str
) -> None:
    """Reference for `decode_blocks`, which must match it bit for bit."""
    decoded = _decode(rows, layout, number_format).view(-1)[: layout.num_elements]
    out.copy_(decoded if active is None else torch.where(active, decoded, 0.0))


def _sums(values: Tensor, error: Tensor | None, active: Tensor | None) -> Tensor:
    """Return y as (n,) float32 or float64, with 0 where not active."""
    y = values.to(torch.promote_types(values.dtype, torch.float32))
    if error is not None:
        y = y + error
    return y if active is None else torch.where(active, y, 0.0)


def _compute_scales(largest: Tensor, number_format: NumberFormat, *, stochastic: bool) -> Tensor:
    """Return the scales of blocks from the largest |y| of each, which may be NaN."""
    largest_number = number_format.scaled_largest(stochastic=stochastic)
    # the largest float32 could overflow when it is divided and multiplied again
    max_scale = torch.finfo(torch.float32).max / largest_number * (1 - 2.0**-23)
    # divide by a tensor: on a GPU torch replaces division by a number with a multiplication
    scales = (largest / torch.full_like(largest, largest_number)).clamp(SMALLEST_SCALE, max_scale)
    scales = torch.where(largest == 0, 0.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def _scales_view(rows: Tensor, layout: BlockLayout) -> Tensor:
    """Return a (W, blocks) float32 view of the scales in the rows."""
    return rows[:, layout.code_bytes : layout.row_bytes].view(torch.float32)


def _scale_of_elements(scales: Tensor, layout: BlockLayout) -> Tensor:
    """Repeat the (W, blocks) scales for each element: (W, part elements)."""
    return scales.repeat_interleave(layout.block_elements, 1)[:, : layout.part_elements]


def _random_uniform(count: int, seed_and_step: SeedAndStep, offset: int) -> Tensor:
    """Return (count,) float32 random numbers in [0, 1), multiples of 2**-24."""
    seed, step = seed_and_step
    counters = np.arange(offset // 4, offset // 4 + -(-count // 4), dtype=np.uint64)
    low, high = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    words = philox4x32_reference(low, high, *split_key(step), *split_key(seed))
    return torch.from_numpy((np.stack(words, 1).ravel()[:count] >> 8).astype(np.float32) / 2**24)


def _round_to_codes(
    y: Tensor, scales: Tensor, number_format: NumberFormat, uniform: Tensor | None
) -> Tensor:
    """Return the codes of elements, given the scale of each element."""
    quotients = torch.where(scales > 0, y / scales, 0.0)
    magnitudes = number_format.magnitudes.to(y.device)
    magnitude = quotients.abs().clamp(max=float(magnitudes[-1]))
    low = torch.searchsorted(magnitudes, magnitude, right=True) - 1
    high = (low + 1).clamp(max=number_format.max_code)
    # the distance from the lower number as a fraction of the step; NaN at the largest number, which
    # is not rounded up
    share = (magnitude - magnitudes[low]) / (magnitudes[high] - magnitudes[low])
    if uniform is not None:
        up = uniform < share
    elif number_format.ties_up:
        up = share >= 0.5
    else:
        up = (share > 0.5) | ((share == 0.5) & (low % 2 == 1))
    code = torch.where(up, high, low)
    return torch.where(quotients.signbit() & (code > 0), number_format.negative(code), code)


def _decode(rows: Tensor, layout: BlockLayout, number_format: str) -> Tensor:
    """Return the decoded (W, part elements) float32 numbers."""
    codes = rows[:, : layout.code_bytes].long()
    shifts = torch.arange(0, 8, layout.bits, device=rows.device)
    codes = (codes[:, :, None] >> shifts & (1 << layout.bits) - 1).view(len(rows), -1)
    numbers = NUMBER_FORMATS[number_format].values.to(rows.device)[codes]
    return numbers * _scale_of_elements(_scales_view(rows, layout), layout)


def store_scales(
    largest: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    number_format: NumberFormat,
    *,
    stochastic: bool,
) -> None:
    """Write the scales of blocks to their rows.

    Args:
        largest: (W, blocks, spans) int32: the bits of the largest |y| of each span of a block.
        rows: (W, stride) uint8.
        layout: of the vector.
        number_format: of the codes.
        stochastic: whether the codes are rounded at random.
    """
    sizes = largest.amax(2).view(torch.float32)
    scales = _compute_scales(sizes, number_format, stochastic=stochastic)
    _scales_view(rows, layout).copy_(scales)
