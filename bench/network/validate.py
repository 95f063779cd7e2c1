"""Compare the times of collectives over network namespaces with those of the simulator.

    python -m bench.network.validate --workers 4 8 --mbit-per-s 10 --sizes 4096 65536 386000
    python -m bench.network.validate --workers 4 8 --mbit-per-s 50 --sizes 386000 4194304

Ranks on the emulated machines of bench/network/cluster.py, which needs root, and ranks in
`lockstep` execute the same algorithm: a pause, a scalar all-gather, and the collective that is
timed. A recorded line has the median, least and largest seconds of the slowest rank, the simulated
seconds with `Link.tcp` and with an ideal link, and the seconds on a cluster without limits: the
time that the processes take on the shared cores. All workers run with a high priority.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench.harness import record
from bench.network.cluster import Cluster
from bench.network.validate_worker import timed
from gcnzc.exchange import Choices, Link, lockstep

WORKER = "bench.network.validate_worker"
CASES = (
    ("Sum", "ring"),
    ("Sum", "halving"),
    ("Sum", "doubling"),
    ("AllGather", "ring"),
    ("AllGather", "doubling"),
    ("Broadcast", "chain"),
    ("Broadcast", "binomial"),
    ("AllToAll", "direct"),
)
PRIORITY = -15
LIMIT_S = 900.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and simulate the cases of the command line, and record them."""
    options = _options(argv)
    with suppress(PermissionError):
        # the workers share the cores with other programs, which would delay their messages
        os.nice(PRIORITY)
    for workers in options.workers:
        tasks = make_tasks(options, workers)
        machine_s = {
            _key(line): statistics.median(line["seconds"])
            for line in measure(workers, None, 0.0, tasks)
        }
        for mbit_per_s in options.mbit_per_s:
            for line in measure(workers, mbit_per_s, options.delay_ms, tasks):
                seconds = sorted(line.pop("seconds"))
                case = {"workers": workers, "mbit_per_s": mbit_per_s, "delay_ms": options.delay_ms}
                record(
                    "validation",
                    case | line,
                    measured_s=statistics.median(seconds),
                    least_s=seconds[0],
                    most_s=seconds[-1],
                    machine_s=machine_s[_key(line)],
                    **compare(line, workers, mbit_per_s, options.delay_ms, seconds),
                )


def make_tasks(options: argparse.Namespace, workers: int) -> list[dict[str, Any]]:
    """Return the tasks of the workers; the size of an all-gather is that of its result."""
    return [
        {
            "kind": kind,
            "algorithm": algorithm,
            "num_bytes": size // (workers if kind == "AllGather" else 1),
            "rounds": options.rounds,
        }
        for kind, algorithm in CASES
        for size in options.sizes
        if not options.kinds or kind in options.kinds
    ]


def measure(
    workers: int, mbit_per_s: float | None, delay_ms: float, tasks: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run the tasks on a cluster, and yield their lines with the seconds of each round."""
    words = [json.dumps(task) for task in tasks]
    with Cluster(workers, mbit_per_s, delay_ms) as cluster:
        ran = cluster.run(lambda _: [sys.executable, "-m", WORKER, *words], limit_s=LIMIT_S)
    if any(ran.codes):
        raise SystemExit(f"error: the workers exited with {ran.codes}")
    for text in ran.output[0].splitlines():
        yield json.loads(text)


def compare(
    task: Mapping[str, Any],
    workers: int,
    mbit_per_s: float,
    delay_ms: float,
    seconds: Sequence[float],
) -> dict[str, float]:
    """Return the simulated times of a task, and the ratios of the measured time to them."""
    tcp = Link.tcp(mbit_per_s, delay_ms / 1e3)
    ideal = Link(tcp.bytes_per_s, tcp.delay_s, in_bytes_per_s=tcp.in_bytes_per_s)
    measured_s = statistics.median(seconds)
    tcp_s, ideal_s = (simulate(task, workers, link) for link in (tcp, ideal))
    return {
        "tcp_s": tcp_s,
        "ideal_s": ideal_s,
        "measured_of_tcp": measured_s / tcp_s,
        "measured_of_ideal": measured_s / ideal_s,
    }


def simulate(task: Mapping[str, Any], workers: int, link: Link) -> float:
    """Return the virtual seconds of a task on the slowest rank."""
    ranks = [timed(task["kind"], task["num_bytes"], rank, workers) for rank in range(workers)]
    choices = Choices.always(**{task["kind"]: task["algorithm"]})
    return max(lockstep(ranks, link, choices=choices).results)


def _key(line: Mapping[str, Any]) -> tuple[str, str, int]:
    return line["kind"], line["algorithm"], line["num_bytes"]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[10.0])
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 65536, 386_000])
    parser.add_argument("--kinds", nargs="+", choices=list(dict.fromkeys(k for k, _ in CASES)))
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
