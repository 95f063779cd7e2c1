"""Sum the rows of in-neighbours: `out[t] = b[t] * sum of a[s] * x[s] over the edges s -> t`.

With `b[t]` = 1 / in-degree this is GraphSAGE's mean (Hamilton et al., 2017,
https://arxiv.org/abs/1706.02216); with both scales it is the normalization of Kipf and Welling
(2017, https://arxiv.org/abs/1609.02907). The gradient is the same sum over the transposed block
with `a` and `b` exchanged, so each of its rows is written once, in a fixed order of summation.

Notation: S sources, T targets, E edges of the block, F columns.
"""

from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcnzc.kernels.aggregate.rows import add_rows, clear_row, round_row, scale_row
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.half_precision import KINDS, item_bytes, kind_of
from gcnzc.kernels.memory import LINE_BYTES, prefetch
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

# Rows are prefetched ahead of their sum, but so few that they stay in the L1 cache until then, and
# that a core can wait for them at once.
PREFETCH_BYTES, PREFETCH_ROWS = 8192, 16

# below 4096 targets plus edges, starting a thread costs more than it saves
GRAIN_SIZE = 4096

# the loads of several edges of a target overlap in a GPU program, as one load takes hundreds of
# cycles
EDGES = 8

# wider rows are divided among GPU programs, which bounds the registers of each
BLOCK = 128

# no load of a GPU lane is wider
VECTOR_BYTES = 16


# page faults of newly allocated memory would take most of the time of a sum, so the memory of
# earlier minibatches is reused
empty_rows = Pool().empty


def aggregate_reference(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
) -> Tensor:
    """Reference for `aggregate`, in the precision of `x`; differentiable."""
    num_targets = len(indptr) - 1
    target_of = torch.repeat_interleave(
        torch.arange(num_targets, device=x.device), indptr.diff(), output_size=len(indices)
    )
    rows = x if source_scale is None else x * source_scale[:, None].to(x.dtype)
    out = x.new_zeros(num_targets, x.shape[1]).index_add(0, target_of, rows[indices.long()])
    return out if target_scale is None else out * target_scale[:, None].to(x.dtype)


@njit(nogil=True, cache=True)
def first_target(indptr, work):
    """Return the first target with at least `work` targets and edges before it."""
    low, high = 0, len(indptr) - 1
    while low < high:
        middle = (low + high) // 2
        if indptr[middle] + middle < work:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def prefetch_row(address, num_bytes):
    """Prefetch the cache lines of `num_bytes` bytes at `address`."""
    line = address - address % LINE_BYTES
    while line < address + num_bytes:
        prefetch(line)
        line += LINE_BYTES


@njit(nogil=True, cache=True)
def _scale(a_S, s):
    return a_S[s] if len(a_S) else a_S.dtype.type(1)


@njit(nogil=True, cache=True)
def _sum_rows(
    indptr, indices, x, row_bytes, a_S, b_T, out, num_cols, kind, distance, begin, end
):  # fmt: skip
    num_edges = len(indices)
    out_bytes = num_cols * item_bytes(kind)
    is_half = item_bytes(kind) == 2
    # float32 sums of a row, which are rounded to bfloat16 or float16 once
    sums = np.empty(num_cols if is_half else 0, dtype=a_S.dtype)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        e, last = indptr[t], indptr[t + 1]
        for upcoming in range(e + distance, min(last + distance, num_edges)):
            prefetch_row(x + indices[upcoming] * row_bytes, out_bytes)
        out_row = out + t * out_bytes
        sum_row = sums.ctypes.data if is_half else out_row
        clear_row(sum_row, num_cols, a_S.dtype.type(0))
        # four rows at a time, to read and write the sums once for them
        while e + 4 <= last:
            s0, s1, s2, s3 = indices[e], indices[e + 1], indices[e + 2], indices[e + 3]
            rows = x + s0 * row_bytes, x + s1 * row_bytes, x + s2 * row_bytes, x + s3 * row_bytes
            weights = _scale(a_S, s0), _scale(a_S, s1), _scale(a_S, s2), _scale(a_S, s3)
            add_rows(sum_row, num_cols, rows, weights, kind)
            e += 4
        if e + 2 <= last:
            s0, s1 = indices[e], indices[e + 1]
            pair = x + s0 * row_bytes, x + s1 * row_bytes
            add_rows(sum_row, num_cols, pair, (_scale(a_S, s0), _scale(a_S, s1)), kind)
            e += 2
        if e < last:
            s0 = indices[e]
            add_rows(sum_row, num_cols, (x + s0 * row_bytes,), (_scale(a_S, s0),), kind)
        if len(b_T):
            scale_row(sum_row, num_cols, b_T[t])
        round_row(out_row, sum_row, num_cols, kind)


def make_rows_contiguous(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last axis; the other axes may have any stride."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def readable_rows(x: Tensor) -> Tensor:
    """Return `x` in a dtype that kernels read: float32 instead of the formats of 8 bits."""
    return x if x.dtype in KINDS else x.float()


def sum_dtype(x: Tensor) -> tuple[torch.dtype, Any]:
    """Return torch's and Triton's dtype of sums over `x`; float32 for bfloat16 and float16."""
    if x.dtype == torch.float64:
        return torch.float64, tl.float64
    return torch.float32, tl.float32


def prefetch_distance(row_bytes: int) -> int:
    """Return how many rows ahead to prefetch."""
    return max(1, min(PREFETCH_ROWS, PREFETCH_BYTES // max(row_bytes, 1)))


def sum_numba(
    indptr: Tensor, indices: Tensor, x: Tensor, a_S: Tensor | None, b_T: Tensor | None
) -> Tensor:
    """`sum_rows` on the CPU; threads get ranges with about equal sums of targets and edges."""
    dtype, _ = sum_dtype(x)
    no_scale = torch.empty(0, dtype=dtype)
    rows = make_rows_contiguous(readable_rows(x))
    num_targets, num_cols = len(indptr) - 1, x.shape[1]
    out = empty_rows((num_targets, num_cols), rows.dtype)
    parallel_for(
        _sum_rows,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        rows.data_ptr(),
        rows.stride(0) * rows.itemsize,
        *(
            (no_scale if s is None else s.detach().to(dtype).contiguous()).numpy()
            for s in (a_S, b_T)
        ),
        out.data_ptr(),
        num_cols,
        kind_of(rows.dtype),
        prefetch_distance(num_cols * rows.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out.to(x.dtype)


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices", "a_S", "b_T"])
def _sum_triton(
    indptr,
    indices,
    x,
    a_S,
    b_T,
    out,
    num_cols,  # all three in vectors of VECTOR elements
    x_stride,
    out_stride,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    SUM: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # as products with VECTOR, so that Triton can infer that rows consist of whole vectors
    col_mask = cols < num_cols * VECTOR
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    sum_EF = tl.zeros([EDGES, BLOCK], SUM)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        edge_mask = edge < last
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
        mask = edge_mask[:, None] & col_mask[None, :]
        offsets = (s * x_stride * VECTOR)[:, None] + cols[None, :]
        values = tl.load(x + offsets, mask=mask, other=0.0).to(SUM)
        if HAS_A:
            values *= tl.load(a_S + s, mask=edge_mask, other=0.0)[:, None]
        sum_EF += values
    sum_F = tl.sum(sum_EF, 0)
    if HAS_B:
        sum_F *= tl.load(b_T + t)
    tl.store(out + t * out_stride * VECTOR + cols, sum_F, mask=col_mask)


def vector_elements(x: Tensor, num_cols: int) -> int:
    """Return the elements of the widest aligned vector load, of up to 16 B, for the rows of `x`.

    Args:
        x: (S, F), or (S, H, F) with a row for each head; the last axis is contiguous.
        num_cols: F.
    """
    # the stride of an axis with one element is arbitrary
    axes = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    strides = [stride for stride, size in axes if size > 1]
    strides_bytes = [stride * x.itemsize for stride in (num_cols, *strides)]
    return gcd(*strides_bytes, x.data_ptr(), VECTOR_BYTES) // x.itemsize


def sum_triton(
    indptr: Tensor, indices: Tensor, x: Tensor, a_S: Tensor | None, b_T: Tensor | None
) -> Tensor:
    """`sum_rows` on a GPU; one program per target and block of columns, in a fixed order."""
    dtype, triton_dtype = sum_dtype(x)
    num_targets, num_cols = len(indptr) - 1, x.shape[1]
    x = make_rows_contiguous(x)
    out = torch.empty(num_targets, num_cols, dtype=x.dtype, device=x.device)
    a, b = (out if s is None else s.to(dtype).contiguous() for s in (a_S, b_T))
    grid = (num_targets, triton.cdiv(num_cols, BLOCK))
    has_a, has_b = a_S is not None, b_T is not None
    vector = vector_elements(x, num_cols)
    sizes = num_cols // vector, x.stride(0) // vector, num_cols // vector
    with torch.cuda.device_of(out):
        _sum_triton[grid](
            indptr, indices, x, a, b, out, *sizes, has_a, has_b, triton_dtype, EDGES, BLOCK, vector
        )
    return out


def sum_rows(
    indptr: Tensor, indices: Tensor, x: Tensor, a_S: Tensor | None = None, b_T: Tensor | None = None
) -> Tensor:
    """Compute `aggregate` without checks and without a gradient."""
    run = sum_triton if x.is_cuda else sum_numba
    return run(indptr, indices, x, a_S, b_T)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, indices: Tensor, x: Tensor, a_S: Tensor | None, b_T: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(indptr, indices, a_S, b_T)
        ctx.num_sources = len(x)
        return sum_rows(indptr, indices, x, a_S, b_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, a_S, b_T = ctx.saved_tensors
        block = transpose(indptr, indices, ctx.num_sources)
        return None, None, sum_rows(block.indptr, block.targets, grad, b_T, a_S), None, None


class _AggregateWithTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, indices: Tensor, x: Tensor, a_S: Tensor | None, b_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(indptr, indices, a_S, b_T)
        ctx.num_sources = len(x)
        ctx.set_materialize_grads(False)
        return sum_rows(indptr, indices, x, a_S, b_T), x[: len(indptr) - 1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_targets: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        indptr, indices, a_S, b_T = ctx.saved_tensors
        if grad is None:
            if grad_targets is None:
                return (None,) * 5
            grad = torch.zeros_like(grad_targets)
        block = transpose(indptr, indices, ctx.num_sources)
        grad_x = sum_rows(block.indptr, block.targets, grad, b_T, a_S)
        if grad_targets is not None:
            grad_x[: len(grad_targets)].add_(grad_targets)
        return None, None, grad_x, None, None


def aggregate_with_targets(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `aggregate`, and the rows of the targets, which are the first T sources.

    The gradient of the rows is added to that of the sums in place. That of `x[:T]` would be padded
    with zeros to S rows. With bfloat16 and float16, both are rounded before they are added, and the
    sum again, as torch adds gradients.

    Args:
        indptr, indices, x, source_scale, target_scale: see `aggregate`; S is at least T.

    Returns:
        (T, F) sums, and (T, F) rows, a view of `x`.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    if len(indptr) - 1 > len(x):
        raise ValueError(f"aggregate: {len(indptr) - 1} targets, but x has {len(x)} sources")
    if not (x.requires_grad and torch.is_grad_enabled()):
        sums = aggregate(indptr, indices, x, source_scale, target_scale)
        return sums, x[: len(indptr) - 1]
    _check("aggregate", indptr, indices, x, source_scale, target_scale)
    return _AggregateWithTargets.apply(indptr.long(), indices, x, source_scale, target_scale)


def aggregate(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
) -> Tensor:
    """Sum the rows of each target's in-neighbours, scaled per source and per target.

    Differentiable once, in `x`. The result does not depend on the number of threads. bfloat16 and
    float16 inputs are accumulated in float32 and rounded once.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        x: (S, F) floating point, on the device of the block; rows may be strided.
        source_scale: (S,), or None for ones; gets no gradient.
        target_scale: (T,), or None for ones; gets no gradient.

    Returns:
        (T, F) with the dtype of `x`; zeros for a target without edges.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    _check("aggregate", indptr, indices, x, source_scale, target_scale)
    # indptr is always int64, so that kernels are not compiled a second time for int32
    return _Aggregate.apply(indptr.long(), indices, x, source_scale, target_scale)


def _check(
    name: str,
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    source_scale: Tensor | None,
    target_scale: Tensor | None,
) -> None:
    """Check the arguments of `aggregate`."""
    check_block(name, indptr, indices, x)
    if x.dim() != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, not (sources, columns)")
    for what, scale, length in (
        ("source_scale", source_scale, len(x)),
        ("target_scale", target_scale, len(indptr) - 1),
    ):
        if scale is not None and scale.shape != (length,):
            raise ValueError(f"{name}: {what} has shape {tuple(scale.shape)}, not ({length},)")
        if scale is not None:
            check_device(name, what, scale, x.device)


def check_device(name: str, what: str, tensor: Tensor, device: torch.device) -> None:
    """Check that an argument is on the same device as the rows.

    Args:
        name: of the operation, for messages.
        what: name of the argument.
        tensor: the argument.
        device: of the rows.

    Raises:
        ValueError: it is on another device.
    """
    if tensor.device != device:
        raise ValueError(f"{name}: {what} is on {tensor.device}, but the rows are on {device}")


def check_block(name: str, indptr: Tensor, indices: Tensor, x: Tensor) -> None:
    """Check the shapes, dtypes and devices of a block and its rows.

    Args:
        name: of the operation, for messages.
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64.
        x: two or more dimensions, floating point.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    for what, tensor in (("indptr", indptr), ("indices", indices)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
            raise ValueError(
                f"{name}: {what} is {tensor.dim()}-dimensional {tensor.dtype}; it must be "
                "1-dimensional, int32 or int64"
            )
        check_device(name, what, tensor, x.device)
    if len(indptr) == 0:
        raise ValueError(f"{name}: indptr is empty; it must have one more entry than targets")
    if not x.is_floating_point():
        raise ValueError(f"{name}: x is {x.dtype}, not floating point")
    if x.dim() < 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must have rows and columns")
