"""Quantise rows of features to one byte per element, with scales.

A scale is that of a row, or of a block of columns over all rows: the largest absolute value there,
divided by the largest code, so that zero stays zero and signs stay. Codes are rounded to nearest,
ties to even. With x' for what `dequantize_reference` gives back, and s for its scale,

    int8                 |x - x'| <= s * (1/2 + 2**-16)
    float8_e4m3fn        |x - x'| <= max(|x| * 2**-4, s * 2**-10) * (1 + 2**-18)
    float8_e5m2          |x - x'| <= max(|x| * 2**-3, s * 2**-17) * (1 + 2**-18)

where the last factor, and the last term, are for the rounding of scales, quotients and products.
The types of one byte with an exponent are those of Micikevicius et al., "FP8 formats for deep
learning" (2022, https://arxiv.org/abs/2209.05433).

Letters: N rows, D columns.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

# the largest number of each type of code
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


# bits of the mantissa, and the exponent of the smallest normal number
_FLOAT8 = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}


# a smaller scale would have lost bits of its own
SMALLEST_SCALE = 2.0**-126


# that share a scale, if columns do: a vector of 16 B of codes
SCALE_COLUMNS = 16


# fewer elements than this are not worth a thread
GRAIN_ELEMENTS = 1 << 17


def largest_reference(rows: Tensor, scale_columns: int | None = None) -> Tensor:
    """What `largest` must equal, bit for bit."""
    if scale_columns is None:
        return rows.abs().amax(1)
    return torch.stack([part.abs().max() for part in rows.split(scale_columns, 1)])


def quantize_reference(
    rows: Tensor, scales: Tensor, dtype: torch.dtype, scale_columns: int | None = None
) -> Tensor:
    """What `quantize` must equal, bit for bit."""
    quotients = rows / spread(scales, rows.shape[1], scale_columns)
    return quotients.round().to(dtype) if dtype == torch.int8 else quotients.to(dtype)


def dequantize_reference(codes: Tensor, scales: Tensor, scale_columns: int | None = None) -> Tensor:
    """(N, D) float32: what the codes stand for."""
    return codes.float() * spread(scales, codes.shape[1], scale_columns)


def spread(scales: Tensor, num_columns: int, scale_columns: int | None) -> Tensor:
    """Scales as what can be multiplied with rows: (N, 1) of rows, else (D,), one a column."""
    if scale_columns is None:
        return scales[:, None]
    return scales.repeat_interleave(scale_columns)[:num_columns]


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales of rows or blocks of columns whose largest absolute values are given.

    Args:
        largest: float32, finite, 0 or more.
        dtype: of the codes, one of `LARGEST`.

    Returns:
        float32, like `largest`: 1 where that is 0, at least `SMALLEST_SCALE`, and so that no code
        stands for infinity.
    """
    # the largest float32, divided and multiplied again, could be rounded up
    most = torch.finfo(torch.float32).max / LARGEST[dtype] * (1 - 2.0**-23)
    scales = (largest / LARGEST[dtype]).clamp(SMALLEST_SCALE, most)
    return torch.where(largest == 0, 1.0, scales)


def largest(
    rows: Tensor, scale_columns: int | None = None, *, threads: int | None = None
) -> Tensor:
    """The largest absolute values of rows, or of blocks of columns.

    Args:
        rows: (N, D) float32 on the host, finite.
        scale_columns: of a block; None for rows.
        threads: how many share the work; `torch.get_num_threads()` if None.

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
    """The codes of rows, on the host.

    Args:
        rows: (N, D) float32, finite, no larger than their scales allow.
        scales: (N,) float32, or (ceil(D / scale_columns),); see `scales_of`.
        dtype: of the codes, one of `LARGEST`.
        scale_columns: of a block of columns that share a scale; None for a scale of each row.
        threads: how many share the work; `torch.get_num_threads()` if None.

    Returns:
        (N, D) of `dtype`.
    """
    values = rows.contiguous().numpy()
    codes = torch.empty(rows.shape, dtype=dtype)
    factors = spread(scales, rows.shape[1], scale_columns).reshape(-1).contiguous().numpy()
    by_row = scale_columns is None
    grain_size = max(1, GRAIN_ELEMENTS // max(1, rows.shape[1]))
    into = codes.view(torch.int8).numpy()
    kernel, bits = (_to_int8, ()) if dtype == torch.int8 else (_to_float8, _FLOAT8[dtype])
    args = (values, factors, by_row, *bits, into)
    parallel_for(kernel, len(values), *args, threads=threads, grain_size=grain_size)
    return codes


@njit(nogil=True, cache=True)
def _largest_of_rows(values, found, begin, end):
    for i in range(begin, end):
        most = np.float32(0)
        for j in range(values.shape[1]):
            most = max(most, abs(values[i, j]))
        found[i] = most


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
def _to_float8(values, scales, by_row, mantissa_bits, least_exponent, codes, begin, end):
    dropped = 23 - mantissa_bits
    # below the smallest normal number codes count steps of this size, and the next code follows
    step = np.float32(2.0 ** (least_exponent - mantissa_bits))
    normal = np.float32(2.0**least_exponent)
    # between exponents counted from float32's bias and from the code's
    shift = (127 + least_exponent - 1) << mantissa_bits
    for i in range(begin, end):
        for j in range(values.shape[1]):
            value = values[i, j] / (scales[i] if by_row else scales[j])
            bits = np.int64(np.float32(value).view(np.int32))
            magnitude = bits & 0x7FFFFFFF
            if abs(value) < normal:
                code = np.int64(np.rint(abs(value) / step))
            else:
                # half a unit of the last bit, less what makes a tie go to even
                half = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1)
                code = ((magnitude + half) >> dropped) - shift
            codes[i, j] = np.int8(code - 128 if bits < 0 else code)
