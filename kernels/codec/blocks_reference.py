"""Blocks of low-precision codes, in plain torch: the reference of the kernels."""

import numpy as np
import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.number_formats import NUMBER_FORMATS, Draws, NumberFormat
from gcnzc.kernels.gather.quantize import SMALLEST_SCALE
from gcnzc.kernels.philox import philox4x32_reference, split_key


@torch.no_grad()
def encode_blocks_reference(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
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
    scales = _scales_of(blocks.abs().amax(2), NUMBER_FORMATS[form])
    _scales(rows, cut).copy_(scales)
    drawn = None
    if draws is not None:
        drawn = _drawn(y.numel(), draws, offset).view(y.shape).to(y.device)
    codes = _codes(y, _spread(scales, cut), NUMBER_FORMATS[form], drawn).to(torch.uint8)
    if cut.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    rows[:, : cut.code_bytes] = codes


@torch.no_grad()
def update_error_blocks_reference(
    values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor, form: str
) -> None:
    """What `update_error_blocks` must leave in `error`, bit for bit."""
    y = _sums(values, error, None)
    left = y - _decoded(rows, cut, form).view(-1)[: cut.num_elements]
    error.copy_(left if active is None else torch.where(active, left, 0.0))


def mean_of_blocks_reference(rows: Tensor, cut: BlockLayout, out: Tensor, form: str) -> None:
    """What `mean_of_blocks` must write to `out`, bit for bit."""
    total = rows.new_zeros(cut.part, dtype=torch.float32)
    for row in rows:
        total += _decoded(row[None], cut, form)[0]
    out.copy_(total[: cut.num_elements] * (1 / len(rows)))


def decode_blocks_reference(
    rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor, form: str
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


def _scales_of(largest: Tensor, form: NumberFormat) -> Tensor:
    """The scales of blocks whose largest |y| are given, NaN among them."""
    most_number = float(form.sizes[-1])
    # the largest float32, divided and multiplied again, could be rounded up
    most = torch.finfo(torch.float32).max / most_number * (1 - 2.0**-23)
    # by a tensor, since a GPU multiplies with one over a number
    scales = (largest / torch.full_like(largest, most_number)).clamp(SMALLEST_SCALE, most)
    scales = torch.where(largest == 0, 0.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def _scales(rows: Tensor, cut: BlockLayout) -> Tensor:
    """(parts, blocks) float32: where a row has its scales."""
    return rows[:, cut.code_bytes : cut.row_bytes].view(torch.float32)


def _spread(scales: Tensor, cut: BlockLayout) -> Tensor:
    """(parts, part): the scale of each element."""
    return scales.repeat_interleave(cut.block_elements, 1)[:, : cut.part]


def _drawn(count: int, draws: Draws, offset: int) -> Tensor:
    """(count,) float32 in [0, 1), multiples of 2**-24."""
    seed, step = draws
    counters = np.arange(offset // 4, offset // 4 + -(-count // 4), dtype=np.uint64)
    low, high = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    words = philox4x32_reference(low, high, *split_key(step), *split_key(seed))
    return torch.from_numpy((np.stack(words, 1).ravel()[:count] >> 8).astype(np.float32) / 2**24)


def _codes(y: Tensor, scales: Tensor, form: NumberFormat, drawn: Tensor | None) -> Tensor:
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


def _decoded(rows: Tensor, cut: BlockLayout, form: str) -> Tensor:
    """(parts, part) float32."""
    codes = rows[:, : cut.code_bytes].long()
    if cut.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).view(len(rows), cut.part)
    return NUMBER_FORMATS[form].values.to(rows.device)[codes] * _spread(_scales(rows, cut), cut)


def store_scales(largest: Tensor, rows: Tensor, cut: BlockLayout, form: NumberFormat) -> None:
    """Write the scales of blocks, from the bits of the largest |y| of their spans."""
    _scales(rows, cut).copy_(_scales_of(largest.amax(2).view(torch.float32), form))
