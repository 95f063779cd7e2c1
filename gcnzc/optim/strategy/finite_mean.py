"""Means over the ranks whose vectors are finite.

A rank whose vector has an element that is not finite, or too large to be squared, contributes
zeros. The first extra counts the other ranks, and the mean is taken over them.

Notation: W ranks, m elements of the vector, k extras.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gcnzc.compress import Reducer
from gcnzc.exchange import Algorithm
from gcnzc.kernels.finite import can_be_squared
from gcnzc.system.scalars import scalars_like

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Reduction:
    """The result of a reduction, before its extras are read."""

    mean: Tensor | None
    """(m,), or this rank's shard: the mean over the finite ranks; None if there is none"""
    sums: Sequence[float] = ()
    """the sums of the k extras; empty if the reduction failed"""
    skip_reason: str = ""
    """why the reduction failed; empty if it did not"""


def prepare_mean(strategy: "Strategy", values: Tensor) -> None:
    """Prepare a vector (elements + k,) for a mean: write its extras; zero it if not finite.

    Elements above `square_limit` count as not finite, because they overflow a norm.

    Sets `Strategy.is_counted`. Does not synchronize with a GPU.
    """
    end = values.numel() - strategy.extras
    strategy.is_counted = can_be_squared(values[:end])
    if values.device.type != "cpu" or not bool(strategy.is_counted):
        values[:end].masked_fill_(~strategy.is_counted, 0)
    values[end:] = scalars_like([0, *strategy.common_extras()], values)
    values[end] = strategy.is_counted


def reduce(reducer: Reducer, values: Tensor, extras: int) -> Algorithm[Reduction]:
    """Reduce a vector after `prepare_mean`; may overlap with compute.

    Args:
        reducer: a reducer for m elements; must not be used until the reduction has finished.
        values: (m + k,), written in place; must not be used until then.
        extras: k.

    Returns:
        The reduction; its mean is a part of `values`.
    """
    skip_reason = yield from reducer.mean(values, extras)
    if skip_reason:
        return Reduction(None, (), skip_reason)
    sums = list(reducer.extra_sums)
    mean = values[: values.numel() - extras]
    return Reduction(exclude_zeros(mean, sums, reducer.worker.world_size), sums)


def exclude_zeros(mean: Tensor, sums: Sequence[float], workers: int) -> Tensor | None:
    """Convert a mean over `workers` ranks, in place, to one over those that are finite.

    Returns:
        The mean; None if no rank is finite.
    """
    count = round(sums[0])
    if count not in (0, workers):
        mean *= workers / count
    return mean if count else None


def complete_mean(
    strategy: "Strategy",
    reduction: Reduction,
    workers: int | None = None,
    contributors: int | None = None,
) -> Tensor | None:
    """Read the extras of a reduction: the signals, and how many ranks the mean excludes.

    Args:
        strategy: the optimizer, which counts and reports the means that exclude ranks or failed.
        reduction: the reduction of a vector after `prepare_mean`.
        workers: the number of ranks in the reduction; the current number if None.
        contributors: the number of ranks that contribute a vector; all of them if None.

    Returns:
        The mean. If it is None, no rank may change its parameters.
    """
    workers = workers or strategy.group.world_size
    if reduction.skip_reason:
        strategy.record_drop(f"synchronization skipped: {reduction.skip_reason}")
        return reduction.mean
    count, expected = round(reduction.sums[0]), workers if contributors is None else contributors
    strategy.receive_common(reduction.sums[1:], workers)
    if not count:
        strategy.record_drop("synchronization skipped: no rank's parameters are finite")
    elif count == expected:
        strategy.is_counted = True
    else:
        bad = f"the parameters of {expected - count} of {expected} ranks"
        strategy.record_drop(f"{bad} are not finite or too large")
    return reduction.mean
