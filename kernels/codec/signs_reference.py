"""Signs and scales in plain torch: the reference for the kernels."""

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
    layout: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
) -> None:
    """Reference for `encode_signs`, which must have the same bits, and scales within 1e-6."""
    y = values if error is None else values + error
    is_active = torch.ones_like(y, dtype=torch.bool) if active is None else active
    bits = _split_into_parts((y >= 0) & is_active, layout).view(
        layout.num_parts, layout.code_bytes, 8
    )
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    rows[:, : layout.code_bytes] = (bits << shifts).sum(-1, dtype=torch.uint8)
    y_active = torch.where(is_active, y, 0).double()
    totals = _block_sums(y_active.square() if scale == "rms" else y_active.abs(), layout)
    means = totals / _block_sums(is_active.double(), layout).clamp(min=1)
    scales_view(rows, layout).copy_(means.sqrt() if scale == "rms" else means)


def update_error_signs_reference(
    values: Tensor, error: Tensor, active: Tensor | None, layout: BlockLayout, rows: Tensor
) -> None:
    """Reference for `update_error_signs`, which must match it bit for bit."""
    y = values + error
    scales = _scale_of_elements(scales_view(rows, layout), layout).to(y.dtype)
    error.copy_(y - torch.where(y >= 0, scales, -scales))
    if active is not None:
        error[~active] = 0


def mean_of_signs_reference(rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
    """Reference for `mean_of_signs`, which must match it bit for bit."""
    inverse_count = torch.tensor(1 / len(rows), dtype=torch.float32, device=rows.device)
    out.zero_()
    for row in rows.split(1):
        scales = _scale_of_elements(scales_view(row, layout) * inverse_count, layout)
        out += torch.where(_sign_bits(row, layout), scales, -scales)


def decode_signs_reference(
    rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor
) -> None:
    """Reference for `decode_signs`, which must match it bit for bit."""
    scales = _scale_of_elements(scales_view(rows, layout), layout)
    out.copy_(torch.where(_sign_bits(rows, layout), scales, -scales))
    if active is not None:
        out[~active] = 0


def scales_view(rows: Tensor, layout: BlockLayout) -> Tensor:
    """Return a (W, blocks) float32 view of the scales in the rows."""
    return rows[:, layout.code_bytes : layout.row_bytes].view(torch.float32)


def _split_into_parts(x: Tensor, layout: BlockLayout) -> Tensor:
    """Pad a vector with zeros and reshape it to (W, part elements)."""
    padded = x.new_zeros(layout.num_parts * layout.part_elements)
    padded[: layout.num_elements] = x
    return padded.view(layout.num_parts, layout.part_elements)


def _block_sums(x: Tensor, layout: BlockLayout) -> Tensor:
    """Return the (W, blocks) sums of an (n,) vector."""
    blocks = _split_into_parts(x, layout).split(layout.block_elements, 1)
    return torch.stack([block.sum(1) for block in blocks], 1)


def _scale_of_elements(scales: Tensor, layout: BlockLayout) -> Tensor:
    """Repeat the (W, blocks) scales for each element of the vector: (n,)."""
    scales = scales.repeat_interleave(layout.block_elements, 1)[:, : layout.part_elements]
    return scales.reshape(-1)[: layout.num_elements]


def _sign_bits(rows: Tensor, layout: BlockLayout) -> Tensor:
    """Return the sign bits of the vector as (n,) bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = rows[:, : layout.code_bytes, None] >> shifts & 1
    return bits.reshape(-1)[: layout.num_elements] == 1
