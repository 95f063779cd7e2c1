"""Choose a compute threshold by the effective speed that measured times predict.

A rank that stops its micro-batches at a threshold discards samples, but the other ranks wait less
for it. The effective speed is the number of samples that all ranks compute per second, relative to
that without a threshold (arXiv 2306.10598, equation 6, https://arxiv.org/abs/2306.10598).

Notation: W ranks, S steps, M micro-batches of P parts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# number of thresholds that are compared
CANDIDATES = 200


@dataclass(frozen=True)
class ComputeThreshold:
    """A compute threshold, and its predicted effect."""

    seconds: float
    """the threshold in seconds from the beginning of a step; infinity for none"""
    speed: float
    """the effective speed, 1 without a threshold"""
    dropped: float
    """the fraction of the micro-batches that are dropped"""


NO_THRESHOLD = ComputeThreshold(np.inf, 1.0, 0.0)


def find_executed(
    times_s: NDArray[np.float64], threshold_s: float, passes: int = 1, delay: int = 0
) -> NDArray[np.bool_]:
    """Return the parts of a step that a rank executes with a threshold.

    A part is executed if the previous one has ended before the threshold. A part that has begun is
    always finished, and so is the first micro-batch.

    Args:
        times_s: (..., M * P) seconds from the beginning of a step to the end of each of its parts.
        threshold_s: the threshold in seconds, above 0.
        passes: P, the parts of a micro-batch: 2 for a forward and a backward pass, or 1 for both
            together. A rank may stop before each part.
        delay: see `ComputeClock.delay`; with 1, the last but one part must have ended.

    Returns:
        (..., M * P): True at the beginning of each row, and False after it. A micro-batch is kept
        if its last part is executed.
    """
    return _known_times(times_s, passes, delay) < threshold_s


def _known_times(times_s: NDArray[np.float64], passes: int, delay: int) -> NDArray[np.float64]:
    """Return (..., M * P): the end of the last part that is known when a part begins, or 0."""
    known = np.zeros_like(times_s)
    known[..., 1 + delay :] = times_s[..., : max(0, times_s.shape[-1] - 1 - delay)]
    # the first micro-batch is never dropped
    known[..., :passes] = 0.0
    return known


def effective_speed(
    times_s: NDArray[np.float64],
    overhead_s: float,
    threshold_s: float,
    passes: int = 1,
    delay: int = 0,
) -> ComputeThreshold:
    """Return a threshold with the effect that it would have had in measured steps.

    Args:
        times_s: (W, S, M * P), see `find_executed`, measured without a threshold.
        overhead_s: seconds of a step after the slowest rank's last micro-batch, such as those of
            the exchange.
        threshold_s: the threshold in seconds.
        passes: P, see `find_executed`.
        delay: see `find_executed`.
    """
    executed = find_executed(times_s, threshold_s, passes, delay)
    kept = executed[..., passes - 1 :: passes]
    full_s = times_s[..., -1].max(axis=0) + overhead_s
    short_s = np.where(executed, times_s, 0.0).max(axis=(0, 2)) + overhead_s
    # a step may take no time in a simulation
    ratios = np.divide(full_s, short_s, out=np.ones_like(full_s), where=short_s > 0)
    speed = (kept.mean(axis=(0, 2)) * ratios).mean()
    return ComputeThreshold(threshold_s, float(speed), float(1 - kept.mean()))


def choose_threshold(
    times_s: NDArray[np.float64],
    overhead_s: float,
    max_dropped: float,
    passes: int = 1,
    delay: int = 0,
) -> ComputeThreshold:
    """Return the threshold of the largest effective speed; `NO_THRESHOLD` if none is above 1.

    Args:
        times_s: (W, S, M * P), see `effective_speed`.
        overhead_s: see `effective_speed`.
        max_dropped: the largest fraction of the micro-batches that may be dropped.
        passes: P, see `find_executed`.
        delay: see `find_executed`.
    """
    best = NO_THRESHOLD
    if times_s.size == 0:
        return best
    # a threshold drops the micro-batches whose last part would begin later
    begins_s = _known_times(times_s, passes, delay)[..., passes - 1 :: passes]
    quantiles = np.linspace(1 - max_dropped, 1, CANDIDATES)
    for seconds in np.unique(np.quantile(begins_s, quantiles)):
        found = effective_speed(times_s, overhead_s, float(seconds), passes, delay)
        if found.dropped <= max_dropped and found.speed > best.speed:
            best = found
    return best


def measured_overhead(times_s: NDArray[np.float64], rest_s: NDArray[np.float64]) -> float:
    """Return the median overhead of a step, see `effective_speed`.

    Args:
        times_s: (W, S, M * P), see `effective_speed`.
        rest_s: (W, S) seconds from the end of a rank's last micro-batch to the end of its step,
            including those of waiting for slower ranks.
    """
    if rest_s.size == 0:
        return 0.0
    last_s = times_s[..., -1]
    overhead_s = (last_s + rest_s).mean(axis=0) - last_s.max(axis=0)
    return max(0.0, float(np.median(overhead_s)))
