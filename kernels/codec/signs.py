"""Encode vectors as signs with one scale per block, and decode means.

A vector y is encoded as `s * sgn(y)`, where the scale s of a block is its root mean square or its
mean absolute value, and sgn is 1 for y >= 0 and -1 otherwise. The sender keeps the error
`y - s * sgn(y)` and adds it to its next vector: Seide et al., "1-bit stochastic gradient descent"
(Interspeech 2014), and, with a server that averages and compresses again, Tang et al., "1-bit Adam"
(2021, https://arxiv.org/abs/2102.02888).

A row is one part of a `BlockLayout`: bit k of byte b is set if element 8b + k has the sign 1;
float32 scales follow the bits. The bit of a NaN is not set, and the scale of its block is not
finite. Sums are float64, since the square of a large float32, such as 1e20, overflows. An element
that is not active has no bit set, and no weight in a scale.

float32 uses numba on the CPU and Triton on a GPU (`gcnzc.kernels.codec.signs_gpu`); other dtypes
use the torch references.

Notation: n elements of the vector, W ranks.
"""

import torch
from torch import Tensor

from gcnzc.kernels.codec import signs_gpu
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs_cpu import decode_numba, encode_numba, mean_numba, update_error_numba
from gcnzc.kernels.codec.signs_reference import (
    Scale,
    decode_signs_reference,
    encode_signs_reference,
    mean_of_signs_reference,
    update_error_signs_reference,
)


def encode_signs(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
    *,
    threads: int | None = None,
) -> None:
    """Write the sign bits and scales of `values + error` to `rows`.

    Args:
        values: (n,) floating point, contiguous.
        error: (n,) of the dtype of `values`, contiguous; zeros if None.
        active: (n,) bool, contiguous; all elements are active if None.
        layout: of the vector, with 1-bit codes.
        rows: (W, stride) uint8 on the device of `values`, written; each row contiguous and aligned
            to 4 bytes. Bytes past `layout.row_bytes` of a row are not written.
        scale: "rms" for the root mean square of a block's active elements, "l1" for their mean
            absolute value. The scale of a block without active elements is 0. A scale is finite if
            and only if all its elements are.
        threads: number of threads on the CPU, which does not change the result;
            `torch.get_num_threads()` if None.
    """
    if layout.row_bytes == 0:
        return
    if values.dtype != torch.float32:
        encode_signs_reference(values, error, active, layout, rows, scale)
    elif values.is_cuda:
        signs_gpu.encode(values, error, active, layout, rows, squares=scale == "rms")
    else:
        encode_numba(values, error, active, layout, rows, scale, threads)


def update_error_signs(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Set `error` to the error of the encoded vector: `values + error` less the decoded rows.

    Args:
        values: (n,) floating point, as passed to `encode_signs`.
        error: (n,) of the dtype of `values`, as passed to `encode_signs`; overwritten, with 0 for
            elements that are not active.
        active: (n,) bool or None, as passed to `encode_signs`.
        layout: of the vector, with 1-bit codes.
        rows: (W, stride) uint8, as written by `encode_signs`.
        threads: see `encode_signs`.
    """
    if layout.num_elements == 0:
        return
    if values.dtype != torch.float32:
        update_error_signs_reference(values, error, active, layout, rows)
    elif values.is_cuda:
        signs_gpu.update_error(values, error, active, layout, rows)
    else:
        update_error_numba(values, error, active, layout, rows, threads)


def mean_of_signs(
    rows: Tensor, layout: BlockLayout, out: Tensor, *, threads: int | None = None
) -> None:
    """Decode one part's rows from W ranks and write their mean, summed in rank order.

    Args:
        rows: (W, stride) uint8: the part's row of each rank, see `encode_signs`.
        layout: of the part, see `BlockLayout.part_layout`.
        out: (layout.num_elements,) floating point, contiguous, written.
        threads: see `encode_signs`.
    """
    if layout.num_elements == 0:
        return
    if out.dtype != torch.float32:
        mean_of_signs_reference(rows, layout, out)
    elif out.is_cuda:
        signs_gpu.mean(rows, layout, out)
    else:
        mean_numba(rows, layout, out, threads)


def decode_signs(
    rows: Tensor,
    layout: BlockLayout,
    active: Tensor | None,
    out: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Write the decoded vector: the scale of each element with its sign, or 0 if not active.

    Args:
        rows: (W, stride) uint8, one row for each part, see `encode_signs`.
        layout: of the vector, with 1-bit codes.
        active: (n,) bool, contiguous; all elements are active if None.
        out: (n,) floating point, contiguous, written.
        threads: see `encode_signs`.
    """
    if layout.num_elements == 0:
        return
    if out.dtype != torch.float32:
        decode_signs_reference(rows, layout, active, out)
    elif out.is_cuda:
        signs_gpu.decode(rows, layout, active, out)
    else:
        decode_numba(rows, layout, active, out, threads)
