"""Measure how long simulations of collectives with many ranks take.

    python -m bench.network.simulation [--rounds 5]

Each case simulates one all-reduce of 386 KB, the gradient of a GraphSAGE with 256 columns, over
links of 100 Mbit/s with 1 ms of latency. `SizeOnly` values have no elements. A recorded line has
the median seconds on one core, the seconds per simulated message, and the simulated time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import harness
from gcnzc.exchange import Algorithm, Choices, Link, SizeOnly, Sum, lockstep

ELEMENTS = 386 * 1000 // 4
LINK = Link(bytes_per_s=12.5e6, delay_s=0.001)
CASES = (
    ("ring", 64, "tensor"),
    ("ring", 256, "tensor"),
    ("ring", 64, "size only"),
    ("ring", 256, "size only"),
    ("ring", 1024, "size only"),
    ("halving", 256, "tensor"),
    ("halving", 1024, "size only"),
    ("doubling", 1024, "size only"),
)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, world_size, values in CASES:
        make = torch.zeros if values == "tensor" else SizeOnly
        took_s = []
        # the largest ones take minutes
        for _ in range(rounds if (name, world_size) != ("ring", 1024) else 1):
            ranks = [_sum(make) for _ in range(world_size)]
            begin = time.process_time()
            outcome = lockstep(ranks, LINK, choices=Choices.always(Sum=name))
            took_s.append(time.process_time() - begin)
        messages = sum(each.entries["Sum"].messages for each in outcome.ledgers)
        harness.record(
            "simulation",
            {"algorithm": name, "ranks": world_size, "values": values},
            cpu_s=statistics.median(took_s),
            rounds=len(took_s),
            messages=messages,
            us_per_message=1e6 * statistics.median(took_s) / messages,
            simulated_ms=1e3 * max(outcome.seconds),
        )


def _sum(make: Callable[[int], Any]) -> Algorithm[Any]:
    return (yield Sum(make(ELEMENTS)))


if __name__ == "__main__":
    main()
