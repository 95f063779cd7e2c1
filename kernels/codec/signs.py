"""Encode vectors as signs with one scale per block, and decode means.

What is sent of y is `s * sgn(y)`, where s is the root of the mean square of a block, or its mean
absolute value, and sgn is 1 from zero on and else -1. What that leaves out, `y - s * sgn(y)`, stays
with the sender as an error that is added to the next y: Seide et al., "1-bit stochastic gradient
descent" (Interspeech 2014), and, with a server that averages and compresses again, Tang et al.,
"1-bit Adam" (2021, https://arxiv.org/abs/2102.02888).

A row is one part of a `BlockLayout`: bit k of byte b is the sign of element 8b + k, set for 1; then
follow float32 scales. NaN has no bit, and its block no finite scale. Sums are float64
everywhere, since the square of a float32 of 1e20 is none. An element that is not active has no bit,
and no weight in a scale.

float32 goes to numba on the CPU, and on a GPU to Triton, in `gcnzc.kernels.codec.signs_gpu`; other
types take the references, anywhere.

Letters: n elements of the vector, W workers.
"""

import torch
from torch import Tensor

from gcnzc.kernels.codec import signs_gpu
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs_cpu import decode_numba, encode_numba, mean_numba, update_error_numba
from gcnzc.kernels.codec.signs_reference import (
    SCALES,
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
    cut: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
    *,
    threads: int | None = None,
) -> None:
    """Write the bits and scales of `values + error`.

    Args:
        values: (n,) of floating point, contiguous.
        error: like `values`; zeros if None.
        active: (n,) bool, contiguous; all if None.
        cut: of codes of one bit.
        rows: (parts, stride) uint8 to write into, each on 4 bytes; where `values` lie. What follows
            `cut.row_bytes` of a row stays as it is.
        scale: the root of the mean square, or the mean absolute value, of what is active in a
            block; 0 where nothing is. Finite if that is, and else not.
        threads: how many share the work on the CPU; `torch.get_num_threads()` if None. They do not
            change the result.

    Raises:
        ValueError: shapes, types or places do not fit; or no such scale.
    """
    if scale not in SCALES:
        raise ValueError(f"no scale {scale!r}\n\nhint: one of {', '.join(SCALES)}")
    _demand(cut, rows, cut.parts, values, error, active)
    if cut.row_bytes == 0:
        return
    if values.dtype != torch.float32:
        encode_signs_reference(values, error, active, cut, rows, scale)
    elif values.is_cuda:
        signs_gpu.encode(values, error, active, cut, rows, squares=scale == "rms")
    else:
        encode_numba(values, error, active, cut, rows, scale, threads)


def update_error_signs(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Set `error` to what was not sent of `values + error`, and to 0 where nothing is active.

    Args:
        values: see `encode_signs`, which wrote `rows` from this and `error`.
        error: like `values`, written over.
        active: see there.
        cut: see there.
        rows: of whose scales this is.
        threads: see there.

    Raises:
        ValueError: shapes, types or places do not fit.
    """
    _demand(cut, rows, cut.parts, values, error, active)
    if cut.num_elements == 0:
        return
    if values.dtype != torch.float32:
        update_error_signs_reference(values, error, active, cut, rows)
    elif values.is_cuda:
        signs_gpu.update_error(values, error, active, cut, rows)
    else:
        update_error_numba(values, error, active, cut, rows, threads)


def mean_of_signs(
    rows: Tensor, cut: BlockLayout, out: Tensor, *, threads: int | None = None
) -> None:
    """The mean of what W workers sent of one part, added up in their order.

    Args:
        rows: (W, stride) uint8; see `encode_signs`.
        cut: of that part alone, see `BlockLayout.of_part`.
        out: (cut.num_elements,) to write into, contiguous.
        threads: see there.

    Raises:
        ValueError: shapes, types or places do not fit; or the cut has several parts.
    """
    _demand(cut, rows, len(rows), out)
    if cut.parts != 1:
        raise ValueError(
            f"the mean of one part has a cut of {cut.parts}\n\nhint: cut.of_part(part)"
        )
    if cut.num_elements == 0:
        return
    if out.dtype != torch.float32:
        mean_of_signs_reference(rows, cut, out)
    elif out.is_cuda:
        signs_gpu.mean(rows, cut, out)
    else:
        mean_numba(rows, cut, out, threads)


def decode_signs(
    rows: Tensor,
    cut: BlockLayout,
    active: Tensor | None,
    out: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Write what rows stand for: each element's scale with its sign, and 0 where it is not active.

    Args:
        rows: see `encode_signs`.
        cut: see there.
        active: see there.
        out: (n,) to write into, contiguous.
        threads: see there.

    Raises:
        ValueError: shapes, types or places do not fit.
    """
    _demand(cut, rows, cut.parts, out, active=active)
    if cut.num_elements == 0:
        return
    if out.dtype != torch.float32:
        decode_signs_reference(rows, cut, active, out)
    elif out.is_cuda:
        signs_gpu.decode(rows, cut, active, out)
    else:
        decode_numba(rows, cut, active, out, threads)


def _demand(
    cut: BlockLayout,
    rows: Tensor,
    num_rows: int,
    vector: Tensor,
    error: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    if cut.bits != 1:
        raise ValueError(f"signs have 1 bit, not {cut.bits}\n\nhint: Cut(..., bits=1, ...)")
    wanted = vector.dtype, vector.dtype, torch.bool
    for one, dtype in zip((vector, error, active), wanted, strict=True):
        if one is not None and (
            one.shape != (cut.num_elements,)
            or one.dtype != dtype
            or one.device != rows.device
            or not one.is_contiguous()
        ):
            raise ValueError(
                f"{tuple(one.shape)} {one.dtype} on {one.device} with strides {one.stride()}, for "
                f"a cut of {cut.num_elements} elements of {dtype} and rows on {rows.device}"
                "\n\nhint: one contiguous row of values, and errors of the same type"
            )
    if (
        rows.dtype != torch.uint8
        or rows.ndim != 2
        or len(rows) != num_rows
        or rows.shape[1] < cut.row_bytes
        or num_rows == 0
    ):
        raise ValueError(
            f"rows are {tuple(rows.shape)} {rows.dtype}, and must be {num_rows or 'some'} rows of "
            f"{cut.row_bytes} bytes\n\nhint: torch.empty(cut.parts, cut.row_bytes, "
            "dtype=torch.uint8)"
        )
    if cut.row_bytes and (
        rows.stride(1) != 1
        or rows.stride(0) < cut.row_bytes
        or rows.stride(0) % 4
        or rows.data_ptr() % 4
    ):
        raise ValueError(
            f"rows of {cut.row_bytes} bytes have strides {rows.stride()} and begin at "
            f"{rows.data_ptr():#x}\n\nhint: each must be in one piece, and begin on 4 bytes"
        )
