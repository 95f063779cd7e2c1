"""The cheapest of several candidates, by interleaved measurement."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)


# told (what is measured, how many of how many times)
Progress: TypeAlias = Callable[[str, int, int], object]


WITHIN = 0.03  # of the fastest, which is no difference


MOSTLY = 0.6  # of the rounds in which a setting is behind by more, or it is as good


ROUNDS = (3, 9)  # that are counted, after one that compiles and touches fresh pages


STAGE_S = 8.0  # that the rounds of one kind of setting should take at most


def cheapest(taken_s: Mapping[S, Sequence[float]], cost: Callable[[S], Any]) -> S:
    """Of the settings that are as good as the fastest, the one of least cost.

    Args:
        taken_s: the seconds of each in rounds that all had part in.
        cost: of a setting; what `min` can order.
    """
    middle = medians(taken_s)
    best = min(middle, key=lambda setting: middle[setting])

    def is_as_good(setting: S) -> bool:
        if middle[setting] <= middle[best] * (1 + WITHIN):
            return True
        pairs = zip(taken_s[setting], taken_s[best], strict=True)
        slower = [mine > its * (1 + WITHIN) for mine, its in pairs]
        return sum(slower) < MOSTLY * len(slower)

    return min(filter(is_as_good, taken_s), key=cost)


def medians(taken_s: Mapping[S, Sequence[float]]) -> dict[S, float]:
    """Of the rounds of each setting."""
    return {setting: statistics.median(values) for setting, values in taken_s.items()}


def spread(taken_s: Mapping[Any, Sequence[float]]) -> float:
    """How far rounds differ: the range of their middle half by their median, in the middle."""
    ranges = []
    for values in taken_s.values():
        low, middle, high = statistics.quantiles(values, method="inclusive")
        ranges.append((high - low) / middle)
    return statistics.median(ranges)


def in_rounds(
    settings: Sequence[S], seconds: Callable[[S], float], what: str, progress: Progress
) -> dict[S, list[float]]:
    """The seconds of each setting in rounds in which every one has its turn.

    The first round is not counted, and says how many of `ROUNDS` there is time for.
    """
    least, most = ROUNDS
    taken: dict[S, list[float]] = {setting: [] for setting in settings}
    rounds, began_s, done = most, time.perf_counter(), 0
    turn = 0
    while turn <= rounds:
        for setting in settings:
            value = seconds(setting)
            if turn:
                taken[setting].append(value)
            done += 1
            progress(what, done, len(settings) * (rounds + 1))
        if turn == 0:
            a_round_s = max(time.perf_counter() - began_s, 1e-9)
            rounds = max(least, min(most, int(STAGE_S / a_round_s)))
        turn += 1
    return taken
