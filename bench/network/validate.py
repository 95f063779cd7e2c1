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
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.harness import record
from bench.network import tasks
from bench.network.cluster import Cluster
from bench.network.collectives import BUILTIN, executed_by, make_request
from bench.network.shared_links import SharedLinks, TcpLink, tcp_link
from gcnzc.exchange import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    Compute,
    Group,
    Link,
    Now,
    lockstep,
)
from gcnzc.exchange.requests import yield_request

MODULE = "bench.network.validate"
CASES = (
    ("Sum", BUILTIN),
    ("Sum", "doubling"),
    ("AllGather", BUILTIN),
    ("AllGather", "doubling"),
    ("Broadcast", BUILTIN),
    ("AllToAll", "direct"),
)
LIMIT_S, TIMEOUT_S, WARM_UP = 900.0, 300.0, 100
SETTLE_S = 0.3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and simulate the cases of the command line, and record them."""
    options = _options(argv)
    for workers in options.workers:
        own = make_tasks(options, workers)
        machine_s = {
            _key(line): statistics.median(line["seconds"])
            for line in measure(workers, None, 0.0, own)
        }
        for mbit_per_s in options.mbit_per_s:
            for line in measure(workers, mbit_per_s, options.delay_ms, own):
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
    workers: int, mbit_per_s: float | None, delay_ms: float, own: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run tasks on a cluster, and yield their lines with the seconds of each round."""
    with Cluster(workers, mbit_per_s, delay_ms) as cluster:
        yield from tasks.run_on(cluster, MODULE, own, LIMIT_S)


def compare(
    task: Mapping[str, Any],
    workers: int,
    mbit_per_s: float,
    delay_ms: float,
    seconds: Sequence[float],
) -> dict[str, float]:
    """Return the simulated times of a task, and the ratios of the measured time to them."""
    tcp = tcp_link(mbit_per_s, delay_ms / 1e3)
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
    network = SharedLinks(workers, link) if isinstance(link, TcpLink) else link
    with executed_by(task["algorithm"]):
        return max(lockstep(ranks, network).results)


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


def time_task(group: Group, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Time the rounds of a task, and yield the seconds of each on the slowest rank."""
    case = task["kind"], task["num_bytes"], group.rank, group.world_size
    with executed_by(task["algorithm"]):
        own = [group.run(timed(*case)) for _ in range(1 + task["rounds"])][1:]
    seconds = group.run(yield_request(AllGather(torch.tensor(own, dtype=torch.float64))))
    yield task | {"seconds": seconds.amax(0).tolist()}


def timed(kind: str, num_bytes: int, rank: int, world_size: int) -> Algorithm[float]:
    """Return the seconds of a collective, which the ranks start at about the same time."""
    request = make_request(kind, num_bytes, rank, world_size)
    # bytes of the round before may still be in send buffers
    yield Compute(SETTLE_S)
    yield AllGatherScalar(0)
    begin = yield Now()
    yield request
    end = yield Now()
    return float(end - begin)


if __name__ == "__main__":
    if tasks.is_worker():
        tasks.serve(time_task, timeout_s=TIMEOUT_S, warm_up=WARM_UP, heartbeats=False)
    else:
        main()
