"""Find the cheapest of the fastest settings, by interleaved measurements."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)


# called with the name of the measurement, finished measurements and their total number
Progress: TypeAlias = Callable[[str, int, int], object]


WITHIN = 0.03  # relative difference from the fastest that does not count


# a setting is rejected if it is slower than that in at least this fraction of the rounds
SLOWER_ROUNDS = 0.6


ROUNDS = (
    3,
    9,
)  # minimum and maximum of rounds, after a warm-up round that compiles and touches pages


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
    """Measure all settings in rounds and return the seconds of each.

    The first round is a warm-up, which also determines how many of `ROUNDS` fit into `STAGE_S`.

    Args:
        settings: to measure.
        seconds: measures a setting once.
        name: of the measurement, for `progress`.
        progress: see `Progress`.
    """
    min_rounds, max_rounds = ROUNDS
    rounds, began_s = max_rounds, time.perf_counter()

    def count_rounds() -> int:
        nonlocal rounds
        a_round_s = max(time.perf_counter() - began_s, 1e-9)
        rounds = max(min_rounds, min(max_rounds, int(STAGE_S / a_round_s)))
        return rounds

    def advance(done: int) -> None:
        progress(name, done, len(settings) * (rounds + 1))

    return interleave(settings, seconds, count_rounds, advance=advance)


def interleave(
    settings: Iterable[S],
    seconds: Callable[[S], float],
    rounds: int | Callable[[], int],
    *,
    warm_up: int = 1,
    shuffler: random.Random | None = None,
    advance: Callable[[int], object] | None = None,
) -> dict[S, list[float]]:
    """Measure settings in turns, so that a machine that slows down for a while slows all of them.

    Args:
        settings: to measure.
        seconds: measures a setting once.
        rounds: number of counted rounds, or a function that returns it after the warm-up.
        warm_up: rounds before these, which compile kernels and touch fresh pages.
        shuffler: orders the settings of each round; None keeps their order.
        advance: called with the number of finished measurements, those of the warm-up included.

    Returns:
        The seconds of each setting in the counted rounds.
    """
    taken: dict[S, list[float]] = {setting: [] for setting in settings}
    order, done = list(taken), 0

    def measure_round() -> None:
        nonlocal done
        for setting in shuffler.sample(order, len(order)) if shuffler else order:
            taken[setting].append(seconds(setting))
            done += 1
            if advance is not None:
                advance(done)

    for _ in range(warm_up):
        measure_round()
    for _ in range(rounds if isinstance(rounds, int) else rounds()):
        measure_round()
    return {setting: values[warm_up:] for setting, values in taken.items()}
