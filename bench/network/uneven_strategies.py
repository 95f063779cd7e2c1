"""Time optimizers with uneven workers: over emulated machines, and in virtual time.

    python -m bench.network.uneven_strategies --record
    python -m bench.network.uneven_strategies --slow-worker 3:3 average DiLoCo
    python -m bench.network.uneven_strategies --slow-link 0-1:10 --virtual

Both run `bench.network.uneven_worker.train`: over the emulated machines of
bench/network/cluster.py, which needs root, or with `--virtual` in `lockstep` with
`Link.tcp`. A line of JSON for each method has the seconds of the steps of each worker.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from bench.harness import record
from bench.network.cluster import Cluster
from bench.network.uneven import check_workers, pair_rates, slow_link, slow_worker
from bench.network.uneven_worker import Task, read_task, train
from bench.strategies.compare import METHODS
from gcnzc.exchange import Group, Link, lockstep

WORKER = "bench.network.uneven_worker"
DEFAULT_METHODS = ("average", "local SGD", "DiLoCo", "A2CiD2, overlapped", "backup workers")
LIMIT_S = 900.0
PRIORITY = -10


def main(argv: Sequence[str] | None = None) -> None:
    """Run the methods of the command line, and print or record the results."""
    options = _options(argv)
    torch.set_num_threads(1)
    slow = dict(options.slow_worker)
    check_workers(options.workers, list(slow))
    rates = [options.mbit_per_s] * options.workers
    links = pair_rates(rates, dict(options.slow_link))
    tasks = [
        Task(method, options.workers, options.steps, options.step_s, slow)
        for method in options.methods or DEFAULT_METHODS
    ]
    runs = _virtual_runs(tasks, options, links) if options.virtual else _runs(tasks, options, links)
    for task, seconds, sent in runs:
        case = {
            "part": "uneven",
            "method": task.method,
            "clock": "virtual" if options.virtual else "wall",
            "workers": task.workers,
            "mbit_per_s": options.mbit_per_s,
            "delay_ms": options.delay_ms,
            "steps": task.steps,
            "step_s": task.step_s,
            "slow_workers": {str(rank): factor for rank, factor in task.slow.items()},
            "slow_links": {f"{a}-{b}": factor for (a, b), factor in options.slow_link},
        }
        found = {
            "slowest_s": max(seconds),
            "median_s": statistics.median(seconds),
            "seconds": seconds,
            "sent_bytes": sent,
        }
        if options.record:
            record("cluster", case, **found)
        else:
            print(json.dumps(case | found), flush=True)


Run = tuple[Task, list[float], int]


def _runs(
    tasks: Sequence[Task], options: argparse.Namespace, links: dict[tuple[int, int], float]
) -> Iterator[Run]:
    """Run the tasks over emulated machines."""
    with suppress(PermissionError):
        # the workers share the cores with other programs
        os.nice(PRIORITY)
    words = [json.dumps(asdict(task)) for task in tasks]
    with Cluster(options.workers, options.mbit_per_s, options.delay_ms, links) as cluster:
        ran = cluster.run(lambda _: [sys.executable, "-m", WORKER, *words], limit_s=LIMIT_S)
    for text in ran.output[0].splitlines():
        line: dict[str, Any] = json.loads(text)
        seconds, sent = line.pop("seconds"), line.pop("sent_bytes")
        yield read_task(json.dumps(line)), seconds, sent
    if any(ran.codes):
        raise SystemExit(f"error: the workers exited with {ran.codes}")


def _virtual_runs(
    tasks: Sequence[Task], options: argparse.Namespace, links: dict[tuple[int, int], float]
) -> Iterator[Run]:
    """Run the tasks in virtual time."""
    link = Link.tcp(options.mbit_per_s, options.delay_ms / 1e3)
    of_pair = {pair: Link(Link.tcp(rate).bytes_per_s) for pair, rate in links.items()}
    for task in tasks:
        ranks = [train(task, Group(rank, task.workers)) for rank in range(task.workers)]
        outcome = lockstep(ranks, link, of_pair)
        yield task, outcome.results, outcome.ledgers[0].bytes_sent


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help="; ".join(METHODS).replace("%", "%%")
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit-per-s", type=float, default=50.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--step-s", type=float, default=0.15)
    parser.add_argument(
        "--slow-worker", type=slow_worker, action="append", default=[], metavar="WORKER:FACTOR"
    )
    parser.add_argument(
        "--slow-link", type=slow_link, action="append", default=[], metavar="A-B:FACTOR"
    )
    parser.add_argument("--virtual", action="store_true", help="simulate, in virtual time")
    parser.add_argument(
        "--record", action="store_true", help="append the results to bench/results/cluster.jsonl"
    )
    options = parser.parse_args(argv)
    unknown = set(options.methods) - set(METHODS)
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; use: {'; '.join(METHODS)}")
    return options


if __name__ == "__main__":
    main()
