"""Update the rows of a minibatch in place: steps of SGD, Adagrad and lazy Adam.

Rows without a gradient do not change, and neither does their state. The steps are those of torch's
optimizers for sparse gradients, in the same order of operations.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.memory import LINE_BYTES, prefetch
from gcnzc.kernels.threads import parallel_for

# fewest elements for a thread
GRAIN_ELEMENTS = 1 << 15

# rows that are prefetched ahead of their use
DISTANCE = 8


def sgd_reference(rows: Tensor, ids: Tensor, gradients: Tensor, *, lr: float) -> None:
    """Reference for `update_sgd`."""
    rows[ids] -= lr * gradients


def adagrad_reference(
    rows: Tensor, sums: Tensor, ids: Tensor, gradients: Tensor, *, lr: float, eps: float
) -> None:
    """Reference for `update_adagrad`."""
    sums[ids] += gradients.square()
    rows[ids] -= lr * (gradients / (sums[ids].sqrt() + eps))


def adam_reference(
    rows: Tensor,
    means: Tensor,
    squares: Tensor,
    ids: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Reference for `update_adam`."""
    means[ids] += (gradients - means[ids]) * (1 - betas[0])
    squares[ids] += (gradients.square() - squares[ids]) * (1 - betas[1])
    rows[ids] -= _step_size(lr, betas, step) * (means[ids] / (squares[ids].sqrt() + eps))


def update_sgd(
    rows: Tensor, ids: Tensor, gradients: Tensor, *, lr: float, threads: int | None = None
) -> None:
    """Subtract `lr` times the gradients from rows.

    Args:
        rows: (N, D) float32 or float64, contiguous, on the host.
        ids: (U,) int64, ascending and different, on the host.
        gradients: (U, D) of the dtype of `rows`, contiguous, on the host.
        lr: the learning rate.
        threads: number of threads; `torch.get_num_threads()` if None.

    Raises:
        IndexError: an id is outside [0, N). Nothing is changed then.
    """
    _run(_update_sgd, rows, (), ids, gradients, (lr,), threads)


def update_adagrad(
    rows: Tensor,
    sums: Tensor,
    ids: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    eps: float,
    threads: int | None = None,
) -> None:
    """Take a step of Adagrad: Duchi, Hazan and Singer, JMLR 2011.

    https://jmlr.org/papers/v12/duchi11a.html

    Args:
        rows: see `update_sgd`.
        sums: the sums of squares of the gradients, like `rows`; updated in place.
        ids: see `update_sgd`.
        gradients: see `update_sgd`.
        lr: the learning rate.
        eps: is added to the root of the sums.
        threads: number of threads; `torch.get_num_threads()` if None.

    Raises:
        IndexError: an id is outside [0, N). Nothing is changed then.
    """
    _run(_update_adagrad, rows, (sums,), ids, gradients, (lr, eps), threads)


def update_adam(
    rows: Tensor,
    means: Tensor,
    squares: Tensor,
    ids: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    threads: int | None = None,
) -> None:
    """Take a step of Adam with the moments of the given rows only, as `torch.optim.SparseAdam`.

    The moments of other rows do not decay. Source: Kingma and Ba, https://arxiv.org/abs/1412.6980.

    Args:
        rows: see `update_sgd`.
        means: the first moments, like `rows`; updated in place.
        squares: the second moments, like `rows`; updated in place.
        ids: see `update_sgd`.
        gradients: see `update_sgd`.
        lr: the learning rate.
        betas: the decay rates of the moments.
        eps: is added to the root of the second moments.
        step: the number of this step, from 1, for the correction of the bias.
        threads: number of threads; `torch.get_num_threads()` if None.

    Raises:
        IndexError: an id is outside [0, N). Nothing is changed then.
    """
    numbers = (1 - betas[0], 1 - betas[1], eps, _step_size(lr, betas, step))
    _run(_update_adam, rows, (means, squares), ids, gradients, numbers, threads)


def _step_size(lr: float, betas: tuple[float, float], step: int) -> float:
    return lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def _run(kernel, rows, state, ids, gradients, numbers, threads):
    if len(ids) == 0:
        return
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= len(rows):
        raise IndexError(f"id {first if first < 0 else last} is not in a table of {len(rows)} rows")
    tensors = [each.detach().numpy() for each in (rows, *state, ids, gradients)]
    # numbers of the rows' dtype, as torch converts them; wider ones would widen the arithmetic
    kind = np.float32 if rows.dtype == torch.float32 else np.float64
    parallel_for(
        kernel,
        len(ids),
        *tensors,
        *map(kind, numbers),
        threads=threads,
        grain_size=max(1, GRAIN_ELEMENTS // max(1, rows.shape[1])),
    )


@njit(nogil=True, cache=True, inline="always")
def _prefetch_row(rows, row):
    row_bytes = rows.shape[1] * rows.itemsize
    address = rows.ctypes.data + row * row_bytes
    for offset in range(0, row_bytes, LINE_BYTES):
        prefetch(address + offset)


@njit(nogil=True, cache=True)
def _update_sgd(rows, ids, gradients, lr, begin, end):
    for i in range(begin, end):
        _prefetch_row(rows, ids[min(i + DISTANCE, end - 1)])
        own, gradient = rows[ids[i]], gradients[i]
        for j in range(len(own)):
            own[j] -= lr * gradient[j]


@njit(nogil=True, cache=True)
def _update_adagrad(rows, sums, ids, gradients, lr, eps, begin, end):
    for i in range(begin, end):
        upcoming = ids[min(i + DISTANCE, end - 1)]
        _prefetch_row(rows, upcoming)
        _prefetch_row(sums, upcoming)
        own, total, gradient = rows[ids[i]], sums[ids[i]], gradients[i]
        for j in range(len(own)):
            value = gradient[j]
            total[j] += value * value
            own[j] -= lr * (value / (np.sqrt(total[j]) + eps))


@njit(nogil=True, cache=True)
def _update_adam(rows, means, squares, ids, gradients, share, square_share, eps, size, begin, end):
    for i in range(begin, end):
        upcoming = ids[min(i + DISTANCE, end - 1)]
        _prefetch_row(rows, upcoming)
        _prefetch_row(means, upcoming)
        _prefetch_row(squares, upcoming)
        own, gradient = rows[ids[i]], gradients[i]
        mean, square = means[ids[i]], squares[ids[i]]
        for j in range(len(own)):
            value = gradient[j]
            mean[j] += (value - mean[j]) * share
            square[j] += (value * value - square[j]) * square_share
            own[j] -= size * (mean[j] / (np.sqrt(square[j]) + eps))
