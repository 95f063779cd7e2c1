"""Find the cheapest of the fastest settings, by interleaved measurements."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)


# called with the name of the measurement, finished measurements and their total number
Progress: TypeAlias = Callable[[str, int, int], object]


WITHIN = 0.03  # relative difference from the fastest that does not count


MOSTLY = 0.6  # share of rounds in which a setting must be slower than that to be rejected


ROUNDS = (3, 9)  # least and most rounds, after a warm-up round that compiles and touches pages


STAGE_S = 8.0  # time limit for the rounds of one kind of setting, in seconds


def cheapest(taken_s: Mapping[S, Sequence[float]], cost: Callable[[S], Any]) -> S:
    """Return the setting of least cost among those that are about as fast as the fastest.

    Args:
        taken_s: seconds of each setting in rounds that measured all of them.
        cost: cost of a setting, comparable by `min`.
    """
    median_s = medians(taken_s)
    best = min(median_s, key=lambda setting: median_s[setting])

    def is_as_good(setting: S) -> bool:
        if median_s[setting] <= median_s[best] * (1 + WITHIN):
            return True
        pairs = zip(taken_s[setting], taken_s[best], strict=True)
        slower = [mine > its * (1 + WITHIN) for mine, its in pairs]
        return sum(slower) < MOSTLY * len(slower)

    return min(filter(is_as_good, taken_s), key=cost)


def medians(taken_s: Mapping[S, Sequence[float]]) -> dict[S, float]:
    """Return the median of the rounds of each setting."""
    return {setting: statistics.median(values) for setting, values in taken_s.items()}


def spread(taken_s: Mapping[Any, Sequence[float]]) -> float:
    """Return the noise of measurements: the median of all interquartile ranges over medians."""
    ranges = []
    for values in taken_s.values():
        low, middle, high = statistics.quantiles(values, method="inclusive")
        ranges.append((high - low) / middle)
    return statistics.median(ranges)


def measure_in_rounds(
    settings: Sequence[S], seconds: Callable[[S], float], what: str, progress: Progress
) -> dict[S, list[float]]:
    """Measure all settings in rounds and return the seconds of each.

    The first round is a warm-up, which also determines how many of `ROUNDS` fit into `STAGE_S`.

    Args:
        settings: to measure.
        seconds: measures a setting once.
        what: name of the measurement, for `progress`.
        progress: see `Progress`.
    """
    least, most = ROUNDS
    taken: dict[S, list[float]] = {setting: [] for setting in settings}
    rounds, began_s, done = most, time.perf_counter(), 0
    index = 0
    while index <= rounds:
        for setting in settings:
            value = seconds(setting)
            if index:
                taken[setting].append(value)
            done += 1
            progress(what, done, len(settings) * (rounds + 1))
        if index == 0:
            a_round_s = max(time.perf_counter() - began_s, 1e-9)
            rounds = max(least, min(most, int(STAGE_S / a_round_s)))
        index += 1
    return taken
