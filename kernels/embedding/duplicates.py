"""Sum the gradients of rows with the same id, in a fixed order."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

# fewest elements for a thread
GRAIN_ELEMENTS = 1 << 15


def sum_duplicates_reference(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Reference for `sum_duplicates`, which must match it bit for bit."""
    unique = torch.unique(ids)
    sums = torch.zeros(len(unique), gradients.shape[1], dtype=gradients.dtype)
    for row, gradient in zip(ids.tolist(), gradients, strict=True):
        sums[int(torch.searchsorted(unique, row))] += gradient
    return unique, sums


def sum_duplicates(
    ids: Tensor, gradients: Tensor, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the different ids in ascending order, and the sum of the gradients of each.

    The gradients of an id are added in the order in which they are given. If the ids are ascending
    and different, the arguments are returned.

    Args:
        ids: (B,) int64, on the host.
        gradients: (B, D) float32 or float64, contiguous, on the host.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        (U,) int64 and (U, D).
    """
    if _is_ascending(ids.numpy()):
        return ids, gradients
    in_order, order = torch.sort(ids, stable=True)
    starts = _starts(in_order.numpy())
    unique = in_order[torch.from_numpy(starts[:-1])]
    sums = torch.empty(len(unique), gradients.shape[1], dtype=gradients.dtype)
    parallel_for(
        _sum_rows,
        len(unique),
        *(starts, order.numpy(), gradients.numpy(), sums.numpy()),
        threads=threads,
        grain_size=max(1, GRAIN_ELEMENTS // max(1, gradients.shape[1])),
    )
    return unique, sums


@njit(nogil=True, cache=True)
def _is_ascending(ids):
    # without equal ids
    i = 1
    while i < len(ids) and ids[i - 1] < ids[i]:
        i += 1
    return i >= len(ids)


@njit(nogil=True, cache=True)
def _starts(in_order):
    """Return where each different value begins, and the length."""
    starts = np.empty(len(in_order) + 1, np.int64)
    count = 0
    for i in range(len(in_order)):
        if i == 0 or in_order[i] != in_order[i - 1]:
            starts[count] = i
            count += 1
    starts[count] = len(in_order)
    return starts[: count + 1].copy()


@njit(nogil=True, cache=True)
def _sum_rows(starts, order, gradients, sums, begin, end):
    for i in range(begin, end):
        total = sums[i]
        first = gradients[order[starts[i]]]
        for j in range(len(total)):
            total[j] = first[j]
        for position in range(starts[i] + 1, starts[i + 1]):
            added = gradients[order[position]]
            for j in range(len(total)):
                total[j] += added[j]
