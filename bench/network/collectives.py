"""Measure collective algorithms on slow links: their times and the bytes that they send.

    python -m bench.network.collectives --workers 8 --links delay --kinds Sum Broadcast
    python -m bench.network.collectives --workers 8 --links slow --bytes
    python -m bench.network.collectives --workers 2 --links here --most-bytes 4096

The ranks run on the emulated machines of bench/network/cluster.py, which needs root; with `--links
here` they are local processes, whose times do not show the effect of slow links. Each kind of
request is tuned; then all algorithms are timed in turns, and compared with their formulas.
`--bytes` instead counts the bytes of each kind of request by the ledger, the formula and the
network interfaces.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness import record
from bench.network.cluster import Cluster
from gcnzc.exchange.tuner import KINDS

WORKER = "bench.network.collectives_worker"
# bandwidth in Mbit/s, and latency between two machines in ms
LINKS: dict[str, tuple[float | None, float]] = {
    "delay": (None, 1.0),
    "slow": (100.0, 0.0),
    "unlimited": (None, 0.0),
}
HERE = "here"
Line = dict[str, Any]


def main() -> None:
    """Measure the links, workers and collectives of the command line, and record the results."""
    options = _options()
    for case, line in results(options):
        record("collectives", case | line)


def results(options: argparse.Namespace) -> Iterator[tuple[Line, Line]]:
    """Measure, and yield each case with its results."""
    for link in options.links:
        for workers in options.workers:
            tasks = [json.dumps(task) for task in _tasks(options, workers)]
            case: Line = {"link": link, "workers": workers}
            if link == HERE:
                for line in run_here(workers, [sys.executable, "-m", WORKER, *tasks]):
                    yield case, line
                continue
            mbit_per_s, delay_ms = LINKS[link]
            with Cluster(workers, mbit_per_s, delay_ms) as cluster:
                measured = cluster.measure()
                case |= {
                    "mbit_per_s": mbit_per_s,
                    "delay_ms": delay_ms,
                    "switch": cluster.switch,
                    "measured_round_trip_ms": measured.round_trip_ms,
                    "measured_mbit_per_s": measured.mbit_per_s,
                }
                ran = cluster.run(lambda _: [sys.executable, "-m", WORKER, *tasks])  # noqa: B023
            if any(ran.codes):
                raise SystemExit(f"error: the workers exited with {ran.codes}")
            for text in ran.output[0].splitlines():
                yield case, json.loads(text)


def _tasks(options: argparse.Namespace, workers: int) -> Iterator[Line]:
    if options.bytes:
        yield {"part": "bytes"}
        return
    for kind in options.kinds:
        # limit the size of the result of a gather
        most = options.most_bytes // (workers if kind == "AllGather" else 1)
        sizes = []
        size = options.least_bytes
        while size <= most:
            sizes.append(size)
            size *= options.step
        yield {"part": "times", "kind": kind, "sizes": sizes, "budget_s": options.budget_s}


def run_here(workers: int, command: Sequence[str]) -> Iterator[Line]:
    """Run the ranks as processes on this machine, and yield the lines of rank 0.

    Args:
        workers: the number of ranks.
        command: the command of each rank; rank 0 prints JSON lines.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SystemExit(f"error: the workers exited with {codes}")
    for text in outputs[0].splitlines():
        yield json.loads(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--links", nargs="+", choices=[*LINKS, HERE], default=list(LINKS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--bytes", action="store_true", help="count bytes instead of timing")
    parser.add_argument("--step", type=int, default=2, help="ratio of successive sizes")
    parser.add_argument(
        "--least-bytes", type=int, default=4, help="smallest size of the values of a rank"
    )
    parser.add_argument("--most-bytes", type=int, default=16 << 20)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="seconds to tune each kind of request"
    )
    options = parser.parse_args()
    if options.bytes and HERE in options.links:
        parser.error("all workers of this machine share its interface, so no bytes can be counted")
    return options


if __name__ == "__main__":
    main()
