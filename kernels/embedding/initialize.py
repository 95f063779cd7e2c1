"""Fill the rows of a table with random numbers that depend only on the seed, row and column.

Four adjacent elements of a row use the four Philox words of one counter: the number of the four
columns, a constant, and the low and high 32 bits of the row. Rows therefore do not depend on the
number of rows or threads.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key
from gcnzc.kernels.threads import parallel_for

# the second word of the counters, so that a sampler with the same seed uses other counters
STREAM = 0x656D6264

# fewest elements for a thread
GRAIN_ELEMENTS = 1 << 16

_UNIT = 2.0**-32


def fill_normal_reference(num_rows: int, num_columns: int, std: float, seed: int) -> Tensor:
    """Reference for `fill_normal` in float64, from which it differs by 1e-6 std at most."""
    uniform = _uniform_reference(num_rows, num_columns, seed).reshape(num_rows, -1)
    return std * torch.special.ndtri(torch.from_numpy(uniform[:, :num_columns]))


def fill_uniform_reference(num_rows: int, num_columns: int, bound: float, seed: int) -> Tensor:
    """Reference for `fill_uniform` in float64."""
    uniform = _uniform_reference(num_rows, num_columns, seed).reshape(num_rows, -1)
    return torch.from_numpy(bound * (2 * uniform[:, :num_columns] - 1))


def _uniform_reference(num_rows: int, num_columns: int, seed: int) -> np.ndarray:
    """Return (N, ceil(D / 4), 4) float64 in (0, 1)."""
    rows = np.arange(num_rows, dtype=np.uint64)[:, None]
    blocks = np.arange(-(-num_columns // 4), dtype=np.uint64)[None]
    words = philox4x32_reference(blocks, STREAM, rows & 0xFFFFFFFF, rows >> 32, *split_key(seed))
    return (np.stack(words, 2) + 0.5) * _UNIT


def fill_normal(rows: Tensor, std: float, seed: int, *, threads: int | None = None) -> None:
    """Fill `rows` with normal random numbers of mean 0, in place.

    The numbers are quantiles of the normal distribution at uniform random numbers. Source: Wichura,
    "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 1988,
    https://doi.org/10.2307/2347330.

    Args:
        rows: (N, D) float32 or float64, contiguous, on the host.
        std: the standard deviation.
        seed: of 64 bits.
        threads: number of threads; `torch.get_num_threads()` if None.
    """
    _fill(_fill_normal, rows, std, seed, threads)


def fill_uniform(rows: Tensor, bound: float, seed: int, *, threads: int | None = None) -> None:
    """Fill `rows` with random numbers from -bound to bound, in place.

    Args:
        rows: see `fill_normal`.
        bound: the largest absolute value.
        seed: of 64 bits.
        threads: number of threads; `torch.get_num_threads()` if None.
    """
    _fill(_fill_uniform, rows, bound, seed, threads)


def _fill(kernel, rows, scale, seed, threads):
    grain_size = max(1, GRAIN_ELEMENTS // max(1, rows.shape[1]))
    args = (rows.numpy(), float(scale), *map(np.uint64, split_key(seed)))
    parallel_for(kernel, len(rows), *args, threads=threads, grain_size=grain_size)


@njit(nogil=True, cache=True, inline="always")
def _quantile(word):
    # the rational functions of PPND7 in Wichura's paper, whose relative error is about 1e-7
    q = (np.float64(word) + 0.5) * _UNIT - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        above = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179
        below = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
        return q * above / below
    r = math.sqrt(-math.log(0.5 - abs(q)))
    # the third function of the paper is for r > 5, and r is below 4.8 for words of 32 bits
    r -= 1.6
    above = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
    below = (0.12021132975 * r + 0.73700164250) * r + 1.0
    return math.copysign(above / below, q)


@njit(nogil=True, cache=True)
def _fill_normal(rows, std, k0, k1, begin, end):
    num_columns = rows.shape[1]
    words = np.empty(4, np.uint64)
    for row in range(begin, end):
        for first in range(0, num_columns, 4):
            words[0], words[1], words[2], words[3] = philox4x32(
                first // 4, STREAM, row & 0xFFFFFFFF, row >> 32, k0, k1
            )
            for j in range(min(4, num_columns - first)):
                rows[row, first + j] = std * _quantile(words[j])


@njit(nogil=True, cache=True)
def _fill_uniform(rows, bound, k0, k1, begin, end):
    num_columns = rows.shape[1]
    words = np.empty(4, np.uint64)
    for row in range(begin, end):
        for first in range(0, num_columns, 4):
            words[0], words[1], words[2], words[3] = philox4x32(
                first // 4, STREAM, row & 0xFFFFFFFF, row >> 32, k0, k1
            )
            for j in range(min(4, num_columns - first)):
                unit = (np.float64(words[j]) + 0.5) * _UNIT
                rows[row, first + j] = bound * (2.0 * unit - 1.0)
