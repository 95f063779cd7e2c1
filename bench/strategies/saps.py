"""Measure SAPS-PSGD on two islands of fast links that are joined by slow ones, in virtual time.

    python -m bench.strategies.saps [--rounds N] [--seeds N]

Eight ranks are two islands of four. Links within an island have 100 Mbit/s, those between islands
10 Mbit/s, all with 1 ms of latency.

Random matchings are compared with those of SAPS-PSGD for several windows: the bandwidth of the
slowest pair of a round, averaged over the rounds, the second eigenvalue of the expected mixing
matrix, and the time of a round. An all-reduce of the same values is there for comparison. A model
has 207,000 parameters, of which all or 1 % are exchanged.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench import harness
from gcnzc.exchange import Algorithm, Link, SendReceive, SizeOnly, Sum, lockstep
from gcnzc.exchange.topology import (
    NEVER,
    Edge,
    Matrix,
    bandwidth_matching,
    bottleneck_threshold,
    expected_mixing,
    find_peer,
    random_matching,
    second_eigenvalue,
)

RANKS = 8
FAST, SLOW = 100.0, 10.0  # Mbit/s
DELAY_S = 0.001
PARAMETERS = 207_000
WINDOWS = (2, 4, 8, 16)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    pairs(asked.rounds, asked.seeds)


def bandwidths() -> Matrix:
    """Return the bandwidth of each pair in Mbit/s, (8, 8), 0 on the diagonal."""
    is_first = np.arange(RANKS) < RANKS // 2
    found = np.where(is_first[:, None] == is_first, FAST, SLOW)
    np.fill_diagonal(found, 0)
    return found


def links() -> dict[tuple[int, int], Link]:
    """Return the links of the two islands."""
    return {
        (sender, receiver): Link(float(rate) * 1e6 / 8, DELAY_S)
        for (sender, receiver), rate in np.ndenumerate(bandwidths())
        if sender != receiver
    }


def pairs(rounds: int, seeds: int) -> None:
    """Compare the matchings, and an all-reduce."""
    for window in (None, *WINDOWS):
        found = [_matchings(window, rounds, seed) for seed in range(seeds)]
        rate = bandwidths()
        bottlenecks = [np.mean([min(rate[e] for e in each) for each in of]) for of in found]
        for keep in (1.0, 0.01):
            count = round(keep * PARAMETERS)
            seconds = [_exchange_s(of, count) for of in found]
            harness.record(
                "saps",
                {"part": "pairs", "ranks": RANKS, "keep": keep}
                | {"pairs": "random" if window is None else "saps", "window": window},
                bottleneck_mbit_per_s=float(np.mean(bottlenecks)),
                second_eigenvalue=statistics.mean(
                    second_eigenvalue(expected_mixing(RANKS, of)) for of in found
                ),
                round_ms=1e3 * statistics.mean(seconds),
                rounds_ms=[1e3 * each for each in seconds],
                rounds=rounds,
                seeds=seeds,
            )

    def all_reduce() -> Algorithm[Any]:
        return (yield Sum(SizeOnly(PARAMETERS)))

    outcome = lockstep([all_reduce() for _ in range(RANKS)], links=links())
    harness.record(
        "saps",
        {"part": "pairs", "ranks": RANKS, "keep": 1.0, "pairs": "all-reduce", "window": None},
        round_ms=1e3 * max(outcome.seconds),
    )


def _matchings(window: int | None, rounds: int, seed: int) -> list[list[Edge]]:
    """Return the matchings of SAPS-PSGD, or random ones if the window is None."""
    if window is None:
        return [random_matching(RANKS, seed, round=number) for number in range(rounds)]
    rate = bandwidths()
    last_met, threshold = np.full((RANKS, RANKS), NEVER), bottleneck_threshold(rate)
    found = []
    for number in range(rounds):
        matching = bandwidth_matching(
            rate, last_met, seed, round=number, window=window, threshold=threshold
        )
        for low, high in matching:
            last_met[low, high] = last_met[high, low] = number
        found.append(matching)
    return found


def _exchange_s(matchings: Sequence[Sequence[Edge]], count: int) -> float:
    """Return the virtual seconds of a round in which pairs exchange `count` values."""

    def rank_of(rank: int) -> Algorithm[None]:
        for matching in matchings:
            peer = find_peer(matching, rank)
            yield SendReceive(SizeOnly(count), rank if peer is None else peer)

    outcome = lockstep([rank_of(rank) for rank in range(RANKS)], links=links())
    return max(outcome.seconds) / len(matchings)


if __name__ == "__main__":
    main()
