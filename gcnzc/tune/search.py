"""Find the cheapest of the fastest settings, by interleaved measurements."""

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)


# called with the name of the measurement, finished measurements and their total number
Progress: TypeAlias = Callable[[str, int, int], object]


WITHIN = 0.03  # relative difference from the fastest that does not count


# a setting is rejected if it is slower than that in at least this fraction of the rounds
SLOWER_ROUNDS = 0.6


# minimum and maximum of rounds, after a warm-up round that compiles and touches pages
ROUNDS = (3, 9)


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
        slower = [seconds > best_s * (1 + WITHIN) for seconds, best_s in pairs]
        return sum(slower) < SLOWER_ROUNDS * len(slower)

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
    settings: Sequence[S], seconds: Callable[[S], float], name: str, progress: Progress
) -> dict[S, list[float]]:
    """Measure all settings in as many of `ROUNDS` as fit into `STAGE_S`, after a warm-up round.

    Args:
        settings: to measure.
        seconds: measures a setting once.
        name: of the measurement, for `progress`.
        progress: see `Progress`.

    Returns:
        The seconds of each setting.
    """
    least, most = ROUNDS
    advance = partial(progress, name)
    return interleave(settings, seconds, most, least=least, limit_s=STAGE_S, advance=advance)


def interleave(
    settings: Iterable[S],
    seconds: Callable[[S], float],
    rounds: int,
    *,
    warm_up: int = 1,
    least: int = 1,
    limit_s: float = math.inf,
    shuffler: random.Random | None = None,
    advance: Callable[[int, int], object] | None = None,
) -> dict[S, list[float]]:
    """Measure settings in turns, so that a machine that slows down for a while slows all of them.

    Args:
        settings: to measure.
        seconds: measures a setting once.
        rounds: largest number of counted rounds.
        warm_up: rounds before these, which compile kernels and touch fresh pages.
        least: smallest number of counted rounds.
        limit_s: time limit for the counted rounds, by the time of the warm-up.
        shuffler: orders the settings of each round; None keeps their order.
        advance: called with the finished measurements, and their total number, both with the
            warm-up.

    Returns:
        The seconds of each setting in the counted rounds.
    """
    taken: dict[S, list[float]] = {setting: [] for setting in settings}
    order, number, done, begin_s = list(taken), 0, 0, time.perf_counter()
    while number < warm_up + rounds:
        for setting in shuffler.sample(order, len(order)) if shuffler else order:
            taken[setting].append(seconds(setting))
            done += 1
            if advance is not None:
                advance(done, len(order) * (warm_up + rounds))
        number += 1
        if number == warm_up:
            fitting = limit_s * warm_up / max(time.perf_counter() - begin_s, 1e-9)
            rounds = int(max(least, min(rounds, fitting)))
    return {setting: values[warm_up:] for setting, values in taken.items()}
