"""Choose the fastest collective algorithm for each kind and size of request."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gcnzc.exchange.algorithms import ALGORITHMS, DEFAULT
from gcnzc.exchange.choices import Choices, Steps
from gcnzc.exchange.collectives.broadcast import CHAIN
from gcnzc.exchange.requests import BUILTIN

KINDS = tuple(kind for kind, names in ALGORITHMS.items() if len(names) > 1)


# default sizes to measure: 4 B to 16 MiB
SIZES = tuple(4 << power for power in range(23))


# piece sizes of chains to measure, in bytes
PIECES = tuple(1024 << power for power in (3, 4, 5, 6, 8))


# the best number of pieces is proportional to the square root of the size; more pieces also take
# more CPU time
MAX_PIECES = 128


# an algorithm replaces another only if its time is below this share of the other's
CLEARLY = 0.95


# an algorithm that takes this many times as long as the fastest may be left out at larger sizes
HOPELESS = 2.0


# times are dominated by bandwidth if they grow by at least this share of the growth in size
MOSTLY_BYTES = 0.8


# number of rounds at one size: as many as take `ROUNDS_S` seconds
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_S = 3, 16, 0.3


# a size is measured only after a size of at least 1/8 of it, which predicts its time
PROBE_GAP = 8


# the smallest size that is measured only for such a prediction
PROBE_BYTES = 4 << 10


# share of a kind's budget for a second measurement of the choice and of builtin
SECOND_LOOK = 0.3


Times = dict[str, dict[int, dict[str, float]]]


"""Seconds by kind, size in bytes and algorithm; sizes beyond the budget have no algorithms."""


Timer = Callable[[str, int, Sequence[str], int], tuple[list[float], float]]


"""A function of kind, size in bytes, algorithms and rounds; returns the least seconds of each
algorithm and the seconds of the measurement, the same on all ranks."""


@dataclass(frozen=True)
class Measurement:
    """The times of all algorithms for one kind and size of request."""

    kind: str
    num_bytes: int
    chosen: str
    """the algorithm that is chosen"""
    seconds: float
    """time of the chosen algorithm"""
    builtin_s: float
    """time of the process group's own collective"""
    all_s: Mapping[str, float]
    """time by algorithm"""

    def summary(self) -> str:
        """Return one line with the chosen algorithm, its time, and that of builtin."""
        builtin = "" if self.chosen == BUILTIN else f", {BUILTIN} {1e3 * self.builtin_s:.2f} ms"
        chosen = f"{self.chosen} {1e3 * self.seconds:.2f} ms{builtin}"
        return f"{self.kind} of {self.num_bytes:,} B: {chosen}"


@dataclass(frozen=True)
class Tuning:
    """Measured times of collective algorithms, and the choices that follow from them."""

    times: Times
    """seconds by kind, size in bytes and algorithm"""

    @property
    def choices(self) -> Choices:
        """The fastest algorithms; builtin where no other is clearly faster.

        A size between two measured sizes has the choice of the nearer one, by ratio. Sizes below
        the smallest measured one have its choice, and so have sizes up to `PROBE_GAP` times the
        largest one, or all larger sizes if it is a chain. Larger sizes, and kinds that were not
        measured, have the default algorithms.
        """
        steps = {}
        for kind, by_size in self._measured().items():
            if kind == "AllToAll":
                steps[kind] = _choose_for_all_sizes(by_size)
            else:
                steps[kind] = _choose_by_size(by_size)
        return Choices(steps)

    def rows(self) -> list[Measurement]:
        """Return the measurements, by kind and ascending size."""
        choices, rows = self.choices, []
        for kind, by_size in self._measured().items():
            for size, seconds in by_size.items():
                name = choices.name_in_steps(kind, size)
                rows.append(Measurement(kind, size, name, seconds[name], seconds[BUILTIN], seconds))
        return rows

    def _measured(self) -> Times:
        found = {}
        for kind, by_size in self.times.items():
            sizes = sorted(size for size, seconds in by_size.items() if seconds)
            if sizes:
                found[kind] = {size: by_size[size] for size in sizes}
        return found


def measure(
    timer: Timer, sizes: Mapping[str, Sequence[int]], world_size: int, budget_s: float
) -> Times:
    """Measure all algorithms at ascending sizes, within a time budget.

    Args:
        timer: measures one kind and size.
        sizes: sizes in bytes, by kind.
        world_size: the number of ranks.
        budget_s: seconds for all measurements; time that a kind does not use is available to the
            kinds after it.
    """
    times: Times = {}
    for index, kind in enumerate(sizes):
        allowance = budget_s / (len(sizes) - index)
        first_s = (1 - SECOND_LOOK) * allowance
        times[kind], spent_s = _measure_kind(timer, kind, sizes[kind], world_size, first_s)
        spent_s += _measure_again(timer, kind, times[kind], allowance - spent_s)
        budget_s -= spent_s
    return times


def _measure_again(
    timer: Timer, kind: str, found: dict[int, dict[str, float]], budget_s: float
) -> float:
    """Measure the chosen algorithms and builtin again, and keep the worse of the two ratios.

    On busy machines, any algorithm may be the fastest of a few rounds by chance.

    Returns:
        The seconds that it took.
    """
    choices, spent_s = Tuning({kind: found}).choices, 0.0
    for size in sorted(found, reverse=True):
        # large sizes first: they had the fewest rounds
        seconds, name = found[size], choices.name_in_steps(kind, size)
        if name == BUILTIN or name not in seconds:
            continue
        round_s = seconds[name] + seconds[BUILTIN]
        rounds = _rounds(round_s, budget_s - spent_s)
        if (1 + rounds) * round_s > budget_s - spent_s:
            continue
        (again_s, builtin_s), elapsed_s = timer(kind, size, [name, BUILTIN], rounds)
        spent_s += elapsed_s
        ratio = max(seconds[name] / seconds[BUILTIN], again_s / builtin_s)
        seconds[BUILTIN] = min(seconds[BUILTIN], builtin_s)
        seconds[name] = ratio * seconds[BUILTIN]
    return spent_s


def _measure_kind(
    timer: Timer, kind: str, sizes: Sequence[int], world_size: int, budget_s: float
) -> tuple[dict[int, dict[str, float]], float]:
    found: dict[int, dict[str, float]] = {}
    hopeless: set[str] = set()
    known: list[tuple[int, float]] = []  # sizes, and the mean seconds of an algorithm
    spent_s = 0.0
    for size, is_probe in _add_probes(sizes):
        names = [name for name in candidates(kind, size, world_size) if name not in hopeless]
        if is_probe:
            last = next(reversed(found.values()), {BUILTIN: 0.0})
            names = [min(last, key=last.__getitem__)]
        round_s = len(names) * _predict_s(known, size)
        rounds = 1 if is_probe else _rounds(round_s, budget_s - spent_s)
        if (1 + rounds) * round_s > budget_s - spent_s:
            found |= {size: {} for size in sizes if size not in found}
            break
        seconds, elapsed_s = timer(kind, size, names, rounds)
        spent_s += elapsed_s
        known.append((size, sum(seconds) / len(seconds)))
        if not is_probe:
            found[size] = dict(zip(names, seconds, strict=True))
            # the one algorithm of AllToAll is chosen by all sizes together
            if kind != "AllToAll":
                hopeless |= _find_hopeless(found)
    return found, spent_s


def candidates(kind: str, num_bytes: int, world_size: int) -> list[str]:
    """Return the algorithms to measure; chains only with 2 to `MAX_PIECES` pieces."""
    names = [name for name in ALGORITHMS[kind] if name != CHAIN]
    if kind == "Broadcast" and world_size > 2:
        pieces = [piece for piece in PIECES if piece < num_bytes <= MAX_PIECES * piece]
        names += [f"{CHAIN}:{piece}" for piece in pieces]
    return names


def _rounds(round_s: float, left_s: float) -> int:
    wanted, affordable = ROUNDS_S // round_s, left_s // round_s - 1
    return int(max(min(wanted, affordable, MAX_ROUNDS), MIN_ROUNDS))


def _add_probes(sizes: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the sizes in ascending order, each with False, and smaller probes before them.

    A probe, with True, precedes the first size and each size that is more than `PROBE_GAP` times
    the previous one.
    """
    before = min(*sizes, PROBE_BYTES)
    yield before, True
    for size in sorted(sizes):
        while size > PROBE_GAP * before:
            before = max(PROBE_GAP * before, PROBE_BYTES)
            yield before, True
        yield size, False
        before = size


def _predict_s(known: Sequence[tuple[int, float]], size: int) -> float:
    """Predict the seconds of an algorithm by a line through the first and the last measurement."""
    if not known:
        return 0.0
    (first, first_s), (last, last_s) = known[0], known[-1]
    slope = (last_s - first_s) / (last - first) if last > first else 0.0
    return last_s + max(slope, 0.0) * (size - last)


def _find_hopeless(found: Mapping[int, Mapping[str, float]]) -> set[str]:
    """Return algorithms that need not be measured at larger sizes; never builtin.

    They are much slower than the fastest one, and their ratio to it does not improve with the size,
    which must be large enough that times are dominated by bandwidth.
    """
    if len(found) < 2:
        return set()
    (size_before, before), (size, last) = list(found.items())[-2:]
    best_s, best_before_s = min(last.values()), min(before.values())
    if best_s / best_before_s < MOSTLY_BYTES * size / size_before:
        return set()
    behind = {name: seconds / best_s for name, seconds in last.items() if name != BUILTIN}
    return {
        name
        for name, ratio in behind.items()
        if ratio > HOPELESS and ratio >= before.get(name, math.inf) / best_before_s
    }


def _choose_by_size(by_size: Mapping[int, Mapping[str, float]]) -> Steps:
    """Choose an algorithm for each size, from seconds by size in bytes and algorithm."""
    chosen: list[tuple[int, str]] = []
    for size, ratios in _smooth_ratios(by_size).items():
        name = _choose(ratios, chosen[-1][1] if chosen else BUILTIN)
        # builtin must not lose by its neighbours' times: gloo has a shortcut for a few elements
        seconds = by_size[size]
        chosen.append((size, BUILTIN if seconds[name] > seconds[BUILTIN] else name))
    steps: list[tuple[int | None, str]] = [
        (round(math.sqrt(size * after)), name)
        for (size, name), (after, other) in pairwise(chosen)
        if name != other
    ]
    largest, last = chosen[-1]
    if last.startswith(CHAIN):
        # its measured piece size is better than the default one
        return (*steps, (None, last))
    return (*steps, (PROBE_GAP * largest, last), (None, DEFAULT))


def _smooth_ratios(by_size: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Return each algorithm's time relative to the fastest, smoothed over neighbouring sizes.

    The result is the median over sizes from a quarter to four times the size, which removes
    outliers, since the ratios change slowly with the size.
    """
    ratios = {
        size: {name: each / min(seconds.values()) for name, each in seconds.items()}
        for size, seconds in by_size.items()
    }
    found: dict[int, dict[str, float]] = {}
    for size, own in ratios.items():
        near = [ratios[other] for other in ratios if size <= 4 * other and other <= 4 * size]
        found[size] = {name: median(each[name] for each in near if name in each) for name in own}
    return found


def _choose(ratios: Mapping[str, float], previous: str) -> str:
    """Return the fastest algorithm, unless builtin or the previous size's is about as fast."""
    best = min(ratios, key=ratios.__getitem__)
    for preferred in (BUILTIN, previous):
        if ratios[best] > CLEARLY * ratios.get(preferred, math.inf):
            return preferred
    return best


def _choose_for_all_sizes(by_size: Mapping[int, Mapping[str, float]]) -> Steps:
    """Choose an algorithm that is clearly faster than builtin at a size, clearly slower at none."""
    for name in set.intersection(*(set(seconds) for seconds in by_size.values())) - {BUILTIN}:
        ratios = [seconds[name] / seconds[BUILTIN] for seconds in by_size.values()]
        if max(ratios) <= 1 / CLEARLY and min(ratios) < CLEARLY:
            return ((None, name),)
    return ((None, BUILTIN),)
