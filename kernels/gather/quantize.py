"""Quantize feature rows to one byte per element, with scales.

There is a scale for each row, or for each block of columns over all rows: the largest absolute
value divided by the largest code, so that zeros and signs are preserved. Codes are rounded to
nearest, ties to even. With x' for the result of `dequantize_reference`, and s for the scale,

    int8                 |x - x'| <= s * (1/2 + 2**-16)
    float8_e4m3fn        |x - x'| <= max(|x| * 2**-4, s * 2**-10) * (1 + 2**-18)
    float8_e5m2          |x - x'| <= max(|x| * 2**-3, s * 2**-17) * (1 + 2**-18)

where the last factor, and the last term of int8, account for the rounding of scales, quotients and
products. The 8-bit floats are those of Micikevicius et al., "FP8 formats for deep learning" (2022,
https://arxiv.org/abs/2209.05433).

Notation: N rows, D columns.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

# the largest number of each dtype of codes
MAX_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


# bits of the mantissa, and the exponent of the smallest normal number
_FLOAT8 = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}


# the smallest normal float32; smaller scales would lose precision
SMALLEST_SCALE = 2.0**-126


# columns that share a scale by default: a 16 B vector of codes
SCALE_COLUMNS = 16


# fewest elements for a thread
GRAIN_ELEMENTS = 1 << 17


def largest_reference(rows: Tensor, scale_columns: int | None = None) -> Tensor:
    """Reference for `largest`, which must match it bit for bit."""
    if scale_columns is None:
        return rows.abs().amax(1)
    return torch.stack([part.abs().max() for part in rows.split(scale_columns, 1)])


def quantize_reference(
    rows: Tensor, scales: Tensor, dtype: torch.dtype, scale_columns: int | None = None
) -> Tensor:
    """Reference for `quantize`, which must match it bit for bit."""
    quotients = rows / broadcast_scales(scales, rows.shape[1], scale_columns)
    return quotients.round().to(dtype) if dtype == torch.int8 else quotients.to(dtype)


def dequantize_reference(codes: Tensor, scales: Tensor, scale_columns: int | None = None) -> Tensor:
    """Return the (N, D) float32 numbers of the codes."""
    return codes.float() * broadcast_scales(scales, codes.shape[1], scale_columns)


def broadcast_scales(scales: Tensor, num_columns: int, scale_columns: int | None) -> Tensor:
    """Return the scales in a shape that broadcasts with rows: (N, 1) or (D,)."""
    if scale_columns is None:
        return scales[:, None]
    return scales.repeat_interleave(scale_columns)[:num_columns]


def compute_scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of rows or blocks of columns from their largest absolute values.

    Args:
        largest: float32, finite, not negative.
        dtype: of the codes, one of `MAX_CODE`.

    Returns:
        float32 of the shape of `largest`: at least `SMALLEST_SCALE`, 1 where `largest` is 0, and
        small enough that no code is dequantized to infinity.
    """
    # the largest float32 could overflow when it is divided and multiplied again
    max_scale = torch.finfo(torch.float32).max / MAX_CODE[dtype] * (1 - 2.0**-23)
    scales = (largest / MAX_CODE[dtype]).clamp(SMALLEST_SCALE, max_scale)
    return torch.where(largest == 0, 1.0, scales)


def largest(
    rows: Tensor, scale_columns: int | None = None, *, threads: int | None = None
) -> Tensor:
    """Return the largest absolute value of each row, or of each block of columns.

    Args:
        rows: (N, D) float32 on the host, finite.
        scale_columns: columns of a block; None for rows.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        (N,) float32, or (ceil(D / scale_columns),).
    """
    values = rows.contiguous().numpy()
    if scale_columns is None:
        found = np.empty(len(values), np.float32)
        grain_size = max(1, GRAIN_ELEMENTS // max(1, values.shape[1]))
        parallel_for(
            _largest_of_rows, len(values), values, found, threads=threads, grain_size=grain_size
        )
        return torch.from_numpy(found)
    columns = np.zeros(values.shape[1], np.float32)
    _largest_of_columns(values, columns)
    begins = np.arange(0, len(columns), scale_columns)
    return torch.from_numpy(np.maximum.reduceat(columns, begins))


def quantize(
    rows: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    scale_columns: int | None = None,
    *,
    threads: int | None = None,
) -> Tensor:
    """Return the codes of rows, on the host.

    Args:
        rows: (N, D) float32, finite, within the range of their scales.
        scales: (N,) float32, or (ceil(D / scale_columns),); see `compute_scales`.
        dtype: of the codes, one of `MAX_CODE`.
        scale_columns: number of adjacent columns that share a scale; None for a scale per row.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        (N, D) of `dtype`.
    """
    values = rows.contiguous().numpy()
    codes = torch.empty(rows.shape, dtype=dtype)
    factors = (
        broadcast_scales(scales, rows.shape[1], scale_columns).reshape(-1).contiguous().numpy()
    )
    by_row = scale_columns is None
    grain_size = max(1, GRAIN_ELEMENTS // max(1, rows.shape[1]))
    out = codes.view(torch.int8).numpy()
    kernel, bits = (_to_int8, ()) if dtype == torch.int8 else (_to_float8, _FLOAT8[dtype])
    args = (values, factors, by_row, *bits, out)
    parallel_for(kernel, len(values), *args, threads=threads, grain_size=grain_size)
    return codes


@njit(nogil=True, cache=True)
def _largest_of_rows(values, found, begin, end):
    for i in range(begin, end):
        row_max = np.float32(0)
        for j in range(values.shape[1]):
            row_max = max(row_max, abs(values[i, j]))
        found[i] = row_max


@njit(nogil=True, cache=True)
def _largest_of_columns(values, found):
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            found[j] = max(found[j], abs(values[i, j]))


@njit(nogil=True, cache=True)
def _to_int8(values, scales, by_row, codes, begin, end):
    for i in range(begin, end):
        for j in range(values.shape[1]):
            scale = scales[i] if by_row else scales[j]
            codes[i, j] = np.int8(np.rint(values[i, j] / scale))


@njit(nogil=True, cache=True)
def _to_float8(values, scales, by_row, mantissa_bits, min_exponent, codes, begin, end):
    dropped = 23 - mantissa_bits
    # below the smallest normal number, codes count steps of this size
    step = np.float32(2.0 ** (min_exponent - mantissa_bits))
    normal = np.float32(2.0**min_exponent)
    # the difference between float32's exponent bias and the code's, in the code's bits
    shift = (127 + min_exponent - 1) << mantissa_bits
    for i in range(begin, end):
        for j in range(values.shape[1]):
            value = values[i, j] / (scales[i] if by_row else scales[j])
            bits = np.int64(np.float32(value).view(np.int32))
            magnitude = bits & 0x7FFFFFFF
            if abs(value) < normal:
                code = np.int64(np.rint(abs(value) / step))
            else:
                # half a unit in the last place, minus 1 if the code is even, for ties to even
                half = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1)
                code = ((magnitude + half) >> dropped) - shift
            codes[i, j] = np.int8(code - 128 if bits < 0 else code)
