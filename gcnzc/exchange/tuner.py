"""Choose the fastest collective algorithm for each kind and size of request."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gcnzc.exchange.choices import ALGORITHMS, BUILTIN, CHAIN, DEFAULT_STEPS, Choices, Steps

KINDS = tuple(kind for kind, names in ALGORITHMS.items() if len(names) > 1)


SIZES = tuple(4 << power for power in range(23))  # 4 B to 16 MiB


PIECES = tuple(1024 << power for power in (3, 4, 5, 6, 8))  # of chains, in bytes


# the best number of pieces rises with the root of the bytes; more cost time of processors, too
MOST_PIECES = 128


# what is not faster than this share of another's time is no reason to leave that other
CLEARLY = 0.95


HOPELESS = 2.0  # times the fastest


MOSTLY_BYTES = 0.8  # of the rise in bytes, where messages cost little beside them


# of all algorithms at one size: as many as take this time
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 16, 0.3


# a size is timed only after one of this share of it, which tells what it will take
PROBE_GAP = 8


PROBE_BYTES = 4 << 10


SECOND_LOOK = 0.3  # of a kind's time, to time what would be chosen and the builtin one again


Times = dict[str, dict[int, dict[str, float]]]


"""Seconds by kind, bytes and algorithm. A size that would have taken too long has no algorithms."""


Timer = Callable[[str, int, Sequence[str], int], tuple[list[float], float]]


"""From kind, bytes, algorithms and rounds to the least seconds of each, and what it took in all.
The answer is the same on all workers."""


@dataclass(frozen=True)
class Row:
    """What was measured of one kind of request of one size."""

    kind: str
    num_bytes: int
    chosen: str
    seconds: float  # of the chosen one
    builtin_s: float
    all_s: Mapping[str, float]

    def told(self) -> str:
        """In a line."""
        beside = "" if self.chosen == BUILTIN else f", {BUILTIN} {1e3 * self.builtin_s:.2f} ms"
        took = f"{self.chosen} {1e3 * self.seconds:.2f} ms{beside}"
        return f"{self.kind} of {self.num_bytes:,} B: {took}"


@dataclass(frozen=True)
class Tuning:
    """Times, and what follows from them."""

    times: Times

    @property
    def choices(self) -> Choices:
        """The fastest, or the builtin one where none is clearly faster.

        Between two sizes that were measured the nearer one tells, by its ratio; the first tells of
        smaller ones, and the last of some times larger ones. Beyond that, and for a kind that was
        not measured, there are the usual ones.
        """
        steps = {}
        for kind, by_size in self._measured().items():
            if kind == "AllToAll":
                steps[kind] = _for_all_sizes(by_size)
            else:
                steps[kind] = _by_size(by_size, DEFAULT_STEPS[kind])
        return Choices(steps)

    def rows(self) -> list[Row]:
        """A row for each kind and size that was measured, in order."""
        choices, rows = self.choices, []
        for kind, by_size in self._measured().items():
            for size, seconds in by_size.items():
                name = choices.name_of(kind, size)
                rows.append(Row(kind, size, name, seconds[name], seconds[BUILTIN], seconds))
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
    """Time all algorithms, at sizes that rise, as long as the budget lasts.

    Args:
        timer: that is asked.
        sizes: bytes of each kind.
        world_size: how many workers there are.
        budget_s: seconds of the timer's in all; what a kind leaves is for those that follow.
    """
    times: Times = {}
    for number, kind in enumerate(sizes):
        allowance = budget_s / (len(sizes) - number)
        first_s = (1 - SECOND_LOOK) * allowance
        times[kind], spent_s = _measure_kind(timer, kind, sizes[kind], world_size, first_s)
        spent_s += _look_again(timer, kind, times[kind], allowance - spent_s)
        budget_s -= spent_s
    return times


def _look_again(
    timer: Timer, kind: str, found: dict[int, dict[str, float]], budget_s: float
) -> float:
    """Time what would be chosen once more beside the builtin one; the worse of two shares counts.

    On busy machines a few rounds may make any algorithm the fastest by chance.

    Returns:
        What it took.
    """
    choices, spent_s = Tuning({kind: found}).choices, 0.0
    for size in sorted(found, reverse=True):
        # large ones had the fewest rounds
        seconds, name = found[size], choices.name_of(kind, size)
        if name == BUILTIN or name not in seconds:
            continue
        round_s = seconds[name] + seconds[BUILTIN]
        rounds = _rounds(round_s, budget_s - spent_s)
        if (1 + rounds) * round_s > budget_s - spent_s:
            continue
        (again_s, builtin_s), took_s = timer(kind, size, [name, BUILTIN], rounds)
        spent_s += took_s
        share = max(seconds[name] / seconds[BUILTIN], again_s / builtin_s)
        seconds[BUILTIN] = min(seconds[BUILTIN], builtin_s)
        seconds[name] = share * seconds[BUILTIN]
    return spent_s


def _measure_kind(
    timer: Timer, kind: str, sizes: Sequence[int], world_size: int, budget_s: float
) -> tuple[dict[int, dict[str, float]], float]:
    found: dict[int, dict[str, float]] = {}
    hopeless: set[str] = set()
    known: list[tuple[int, float]] = []  # sizes, and the seconds of an algorithm there
    spent_s = 0.0
    for size, is_probe in _ladder(sizes):
        names = [name for name in candidates(kind, size, world_size) if name not in hopeless]
        if is_probe:
            last = next(reversed(found.values()), {BUILTIN: 0.0})
            names = [min(last, key=last.__getitem__)]
        round_s = len(names) * _foreseen_s(known, size)
        rounds = 1 if is_probe else _rounds(round_s, budget_s - spent_s)
        if (1 + rounds) * round_s > budget_s - spent_s:
            found |= {size: {} for size in sizes if size not in found}
            break
        seconds, took_s = timer(kind, size, names, rounds)
        spent_s += took_s
        known.append((size, sum(seconds) / len(seconds)))
        if not is_probe:
            found[size] = dict(zip(names, seconds, strict=True))
            if kind != "AllToAll":  # whose sizes are judged together
                hopeless |= _hopeless(found)
    return found, spent_s


def candidates(kind: str, num_bytes: int, world_size: int) -> list[str]:
    """The algorithms that may be the fastest; of chains, those with a fair number of pieces."""
    names = [name for name in ALGORITHMS[kind] if name != CHAIN]
    if kind == "Broadcast" and world_size > 2:
        fair = [piece for piece in PIECES if piece < num_bytes <= MOST_PIECES * piece]
        names += [f"{CHAIN}:{piece}" for piece in fair]
    return names


def _rounds(round_s: float, left_s: float) -> int:
    wanted, affordable = ROUNDS_S // round_s, left_s // round_s - 1
    return int(max(min(wanted, affordable, MOST_ROUNDS), LEAST_ROUNDS))


def _ladder(sizes: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The sizes, and before the first, and those that are far above the last, some that probe."""
    before = min(*sizes, PROBE_BYTES)
    yield before, True
    for size in sorted(sizes):
        while size > PROBE_GAP * before:
            before = max(PROBE_GAP * before, PROBE_BYTES)
            yield before, True
        yield size, False
        before = size


def _foreseen_s(known: Sequence[tuple[int, float]], size: int) -> float:
    """What an algorithm will take, on a line through the first and the last time; 0 without any."""
    if not known:
        return 0.0
    (first, first_s), (last, last_s) = known[0], known[-1]
    rise = (last_s - first_s) / (last - first) if last > first else 0.0
    return last_s + max(rise, 0.0) * (size - last)


def _hopeless(found: Mapping[int, Mapping[str, float]]) -> set[str]:
    """Those far behind that do not catch up, once a time rises as its bytes do; never builtin."""
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


def _by_size(by_size: Mapping[int, Mapping[str, float]], usual: Steps) -> Steps:
    chosen: list[tuple[int, str]] = []
    for size, shares in _shares(by_size).items():
        name = _best(shares, chosen[-1][1] if chosen else BUILTIN)
        # neighbours do not outvote what speaks for builtin: gloo does less for a few elements
        seconds = by_size[size]
        chosen.append((size, BUILTIN if seconds[name] > seconds[BUILTIN] else name))
    steps: list[tuple[int | None, str]] = [
        (round(math.sqrt(size * after)), name)
        for (size, name), (after, other) in pairwise(chosen)
        if name != other
    ]
    largest, last = chosen[-1]
    most = PROBE_GAP * largest
    beyond = [(limit, name) for limit, name in usual if limit is None or limit > most]
    # a chain that was timed is better than the usual one
    if {name.partition(":")[0] for _, name in beyond} == {last.partition(":")[0]}:
        return (*steps, (None, last))
    return (*steps, (most, last), *beyond)


def _shares(by_size: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Times in those of the fastest: medians over sizes of a quarter to four times as much.

    Such shares rise or fall slowly with the size, and what chance did to one is outvoted.
    """
    alone = {
        size: {name: each / min(seconds.values()) for name, each in seconds.items()}
        for size, seconds in by_size.items()
    }
    found: dict[int, dict[str, float]] = {}
    for size, shares in alone.items():
        near = [alone[other] for other in alone if size <= 4 * other and other <= 4 * size]
        found[size] = {name: median(each[name] for each in near if name in each) for name in shares}
    return found


def _best(shares: Mapping[str, float], smaller: str) -> str:
    """The fastest, unless the builtin one, or what serves the size before, is about as fast."""
    best = min(shares, key=shares.__getitem__)
    for usual in (BUILTIN, smaller):
        if shares[best] > CLEARLY * shares.get(usual, math.inf):
            return usual
    return best


def _for_all_sizes(by_size: Mapping[int, Mapping[str, float]]) -> Steps:
    """One that is nowhere clearly slower than the builtin one, and somewhere clearly faster."""
    for name in set.intersection(*(set(seconds) for seconds in by_size.values())) - {BUILTIN}:
        shares = [seconds[name] / seconds[BUILTIN] for seconds in by_size.values()]
        if max(shares) <= 1 / CLEARLY and min(shares) < CLEARLY:
            return ((None, name),)
    return ((None, BUILTIN),)
