"""Project the rows of each attention head with the weight of the head.

Notation: T rows, H heads, K columns of a row, F columns of its projection.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def project_heads(rows_THK: Tensor, weight_HFK: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows[t, h] @ weight[h].T + bias[h]` for all rows and heads.

    `torch.bmm` returns (H, T, F); concatenating the heads would copy it. This writes (T, H * F)
    directly, and the gradient of the rows likewise. Differentiable once.

    Args:
        rows_THK: (T, H, K).
        weight_HFK: (H, F, K), converted to the dtype of the rows.
        bias: (H * F,), converted to the dtype of the rows; none if None.

    Returns:
        (T, H * F) with the dtype of the rows.
    """
    dtype = rows_THK.dtype
    bias = None if bias is None else bias.to(dtype)
    return _ProjectHeads.apply(rows_THK, weight_HFK.to(dtype), bias)


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_THK: Tensor, weight_HFK: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_THK, weight_HFK)
        heads, columns = weight_HFK.shape[:2]
        out = rows_THK.new_empty(len(rows_THK), heads * columns)
        by_head = out.view(-1, heads, columns).transpose(0, 1)
        torch.bmm(rows_THK.transpose(0, 1), weight_HFK.mT, out=by_head)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_THK, weight_HFK = ctx.saved_tensors
        heads, columns = weight_HFK.shape[:2]
        grad_HTF = grad.reshape(-1, heads, columns).transpose(0, 1)
        grad_rows = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows_THK, memory_format=torch.contiguous_format)
            torch.bmm(grad_HTF, weight_HFK, out=grad_rows.transpose(0, 1))
        if ctx.needs_input_grad[1]:
            grad_weight = torch.bmm(grad_HTF.mT, rows_THK.transpose(0, 1))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_rows, grad_weight, grad_bias
