"""Choose a compute threshold by the effective speed that measured times predict.

A rank that stops its micro-batches at a threshold discards samples, but the other ranks wait less
for it. The effective speed is the number of samples that all ranks compute per second, relative to
that without a threshold (arXiv 2306.10598, equation 6, https://arxiv.org/abs/2306.10598).

Notation: W ranks, S steps, M micro-batches.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# number of thresholds that are compared
CANDIDATES = 200


@dataclass(frozen=True)
class Threshold:
    """A compute threshold, and its predicted effect."""

    seconds: float
    """from the begin of a step; infinite for none"""
    speed: float
    """the effective speed, 1 without a threshold"""
    dropped: float
    """the fraction of the micro-batches that are dropped"""


NO_THRESHOLD = Threshold(np.inf, 1.0, 0.0)


def find_kept(ends_s: NDArray[np.float64], threshold_s: float, delay: int = 0) -> NDArray[np.bool_]:
    """Return the micro-batches that a threshold keeps.

    A micro-batch is kept if the previous one has ended before the threshold. A micro-batch that has
    begun is always finished, and so is the first one.

    Args:
        ends_s: (..., M) seconds from the begin of a step to the end of each of its micro-batches.
        threshold_s: the threshold in seconds.
        delay: see `ComputeClock.delay`; with 1, the last but one micro-batch must have ended.

    Returns:
        (..., M): True at the beginning of each row, and False after it.
    """
    return _known_times(ends_s, delay) < threshold_s


def _known_times(ends_s: NDArray[np.float64], delay: int) -> NDArray[np.float64]:
    """Return (..., M): the last end that is known when a micro-batch begins; 0 if none is."""
    known = np.zeros_like(ends_s)
    known[..., 1 + delay :] = ends_s[..., : max(0, ends_s.shape[-1] - 1 - delay)]
    return known


def effective_speed(
    ends_s: NDArray[np.float64], overhead_s: float, threshold_s: float, delay: int = 0
) -> Threshold:
    """Return a threshold with the effect that it would have had in measured steps.

    Args:
        ends_s: (W, S, M), see `find_kept`, measured without a threshold.
        overhead_s: seconds of a step after the slowest rank's last micro-batch, such as those of
            the exchange.
        threshold_s: the threshold in seconds.
        delay: see `find_kept`.
    """
    kept = find_kept(ends_s, threshold_s, delay)
    full_s = ends_s[..., -1].max(axis=0) + overhead_s
    short_s = np.where(kept, ends_s, 0.0).max(axis=(0, 2)) + overhead_s
    # a step may take no time in a simulation
    ratios = np.divide(full_s, short_s, out=np.ones_like(full_s), where=short_s > 0)
    speed = (kept.mean(axis=(0, 2)) * ratios).mean()
    return Threshold(threshold_s, float(speed), float(1 - kept.mean()))


def choose_threshold(
    ends_s: NDArray[np.float64], overhead_s: float, max_dropped: float, delay: int = 0
) -> Threshold:
    """Return the threshold of the largest effective speed; `NO_THRESHOLD` if none is above 1.

    Args:
        ends_s: (W, S, M), see `effective_speed`.
        overhead_s: see `effective_speed`.
        max_dropped: the largest fraction of the micro-batches that may be dropped.
        delay: see `find_kept`.
    """
    best = NO_THRESHOLD
    if ends_s.size == 0:
        return best
    # about one minus the fraction that a threshold drops is the quantile that it is
    quantiles = np.linspace(1 - max_dropped, 1, CANDIDATES)
    for seconds in np.unique(np.quantile(_known_times(ends_s, delay), quantiles)):
        found = effective_speed(ends_s, overhead_s, float(seconds), delay)
        if found.dropped <= max_dropped and found.speed > best.speed:
            best = found
    return best


def measured_overhead(ends_s: NDArray[np.float64], rest_s: NDArray[np.float64]) -> float:
    """Return the median overhead of a step, see `effective_speed`.

    Args:
        ends_s: (W, S, M), see `effective_speed`.
        rest_s: (W, S) seconds from the end of a rank's last micro-batch to the end of its step,
            including those of waiting for slower ranks.
    """
    if rest_s.size == 0:
        return 0.0
    last_s = ends_s[..., -1]
    overhead_s = (last_s + rest_s).mean(axis=0) - last_s.max(axis=0)
    return max(0.0, float(np.median(overhead_s)))
