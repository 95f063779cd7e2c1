"""Signs packed to words, in plain torch: the reference of the kernels."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout

Scale: TypeAlias = Literal["rms", "l1"]


SCALES: tuple[Scale, ...] = get_args(Scale)


def encode_signs_reference(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
) -> None:
    """What `encode_signs` must equal: bits exactly, scales to within 1e-6 of them."""
    y = values if error is None else values + error
    live = torch.ones_like(y, dtype=torch.bool) if active is None else active
    bits = _by_part((y >= 0) & live, cut).view(cut.parts, cut.code_bytes, 8)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    rows[:, : cut.code_bytes] = (bits << places).sum(-1, dtype=torch.uint8)
    sizes = torch.where(live, y, 0).double()
    totals = _block_sums(sizes.square() if scale == "rms" else sizes.abs(), cut)
    means = totals / _block_sums(live.double(), cut).clamp(min=1)
    scales_of(rows, cut).copy_(means.sqrt() if scale == "rms" else means)


def update_error_signs_reference(
    values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
) -> None:
    """What `update_error_signs` must equal, bit for bit."""
    y = values + error
    scales = _by_element(scales_of(rows, cut), cut).to(y.dtype)
    error.copy_(y - torch.where(y >= 0, scales, -scales))
    if active is not None:
        error[~active] = 0


def mean_of_signs_reference(rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
    """What `mean_of_signs` must equal, bit for bit."""
    share = torch.tensor(1 / len(rows), dtype=torch.float32, device=rows.device)
    out.zero_()
    for row in rows.split(1):
        scales = _by_element(scales_of(row, cut) * share, cut)
        out += torch.where(_bits_of(row, cut), scales, -scales)


def decode_signs_reference(
    rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor
) -> None:
    """What `decode_signs` must equal, bit for bit."""
    scales = _by_element(scales_of(rows, cut), cut)
    out.copy_(torch.where(_bits_of(rows, cut), scales, -scales))
    if active is not None:
        out[~active] = 0


def scales_of(rows: Tensor, cut: BlockLayout) -> Tensor:
    """(parts, blocks) float32: the scales of rows, where they lie."""
    return rows[:, cut.code_bytes : cut.row_bytes].view(torch.float32)


def _by_part(x: Tensor, cut: BlockLayout) -> Tensor:
    """(parts, part): a vector, and zeros beyond its end."""
    padded = x.new_zeros(cut.parts * cut.part)
    padded[: cut.num_elements] = x
    return padded.view(cut.parts, cut.part)


def _block_sums(x: Tensor, cut: BlockLayout) -> Tensor:
    """(parts, blocks)"""
    blocks = _by_part(x, cut).split(cut.block_elements, 1)
    return torch.stack([block.sum(1) for block in blocks], 1)


def _by_element(scales: Tensor, cut: BlockLayout) -> Tensor:
    """(n,): the scale of each element's block."""
    spread = scales.repeat_interleave(cut.block_elements, 1)[:, : cut.part]
    return spread.reshape(-1)[: cut.num_elements]


def _bits_of(rows: Tensor, cut: BlockLayout) -> Tensor:
    """(n,) bool"""
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = rows[:, : cut.code_bytes, None] >> places & 1
    return bits.reshape(-1)[: cut.num_elements] == 1
