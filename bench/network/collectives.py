"""Measure collective algorithms on slow links: their times and the bytes that they send.

    python -m bench.network.collectives --workers 8 --links delay --kinds Sum Broadcast
    python -m bench.network.collectives --workers 8 --links slow --bytes
    python -m bench.network.collectives --workers 2 --links here --most-bytes 4096

The ranks run on the emulated machines of bench/network/cluster.py, which needs root; with `--links
here` they are local processes, whose times do not show the effect of slow links. The algorithms are
timed in turns. `--bytes` instead counts the bytes of each kind of request by the ledger, the
formula and the network interfaces.
"""

import argparse
import hashlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from bench.harness import record
from bench.network import tasks
from bench.network.cluster import Cluster
from bench.network.tasks import Line
from gcnzc.exchange import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Group,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
)
from gcnzc.exchange.collectives import AllReduce, Collective
from gcnzc.exchange.engine import Entry
from gcnzc.exchange.requests import yield_request

MODULE = "bench.network.collectives"
# bandwidth in Mbit/s, and latency between two machines in ms
LINKS: dict[str, tuple[float | None, float]] = {
    "delay": (None, 1.0),
    "slow": (100.0, 0.0),
    "unlimited": (None, 0.0),
}
HERE = "here"
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_S = 3, 40, 1.0
# the algorithm of gcnzc's messages, by the kind of request
MESSAGES = {"Sum": "doubling", "AllGather": "doubling", "AllToAll": "direct"}
BUILTIN = "builtin"
KINDS = (*MESSAGES, "Broadcast")
# scalar all-gathers before measuring
WARM_UP = 200
# size and number of requests whose bytes are counted, so that acknowledgements are negligible
COUNTED_BYTES, COUNTED, COUNTED_SCALARS = 1 << 20, 4, 200
# headers of Ethernet, IP, and TCP with time stamps
HEADER_BYTES = 14 + 20 + 32
# time until the last acknowledgements have arrived
SETTLE_S = 0.1


def main() -> None:
    """Measure the links, workers and collectives of the command line, and record the results."""
    options = _options()
    for case, line in results(options):
        record("collectives", case | line)


def results(options: argparse.Namespace) -> Iterator[tuple[Line, Line]]:
    """Measure, and yield each case with its results."""
    for link in options.links:
        for workers in options.workers:
            own = list(_tasks(options, workers))
            case: Line = {"link": link, "workers": workers}
            if link == HERE:
                for line in tasks.run_here(workers, tasks.command(MODULE, own)):
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
                for line in tasks.run_on(cluster, MODULE, own):
                    yield case, line


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
        yield {"part": "times", "kind": kind, "sizes": sizes}


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
    options = parser.parse_args()
    if options.bytes and HERE in options.links:
        parser.error("all workers of this machine share its interface, so no bytes can be counted")
    return options


def measure_task(group: Group, task: Line) -> Iterator[Line]:
    """Run a task, and yield its results."""
    if task["part"] == "bytes":
        for line in count_bytes(group):
            yield {"part": "bytes"} | line
        return
    kind = task["kind"]
    for size in task["sizes"]:
        names = [BUILTIN, *([MESSAGES[kind]] if kind in MESSAGES else [])]
        round_s = time_algorithms(group, kind, size, names, 1).sum().item()
        rounds = int(min(max(ROUNDS_S / round_s, MIN_ROUNDS), MAX_ROUNDS))
        algorithms = time_all(group, kind, size, names, rounds)
        case = {"part": "times", "kind": kind, "num_bytes": size, "rounds": rounds}
        yield case | {"ways": algorithms}


@contextmanager
def executed_by(way: str) -> Iterator[None]:
    """Execute all collectives by gcnzc's "messages" or by "builtin" ones, whatever their size.

    A `Broadcast` has no messages of gcnzc over processes.
    """
    largest = -1 if way == BUILTIN else math.inf
    with ExitStack() as stack:
        for kind in (AllReduce, AllGather, AllToAll):
            for name in ("small_bytes", "small_bytes_started"):
                stack.enter_context(mock.patch.object(kind, name, largest))
        yield


def make_request(kind: str, num_bytes: int, rank: int, world_size: int) -> Collective:
    """Create a request of zeros, of about `num_bytes` bytes."""
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    if kind == "Sum":
        return Sum(torch.zeros(max(num_bytes // 4, 1)))
    if kind == "AllGather":
        return AllGather(values)
    if kind == "Broadcast":
        return Broadcast(values)
    parts = values.tensor_split(world_size)
    return AllToAll(parts, [len(parts[rank])] * world_size)


def time_algorithms(
    group: Group, kind: str, num_bytes: int, names: Sequence[str], rounds: int
) -> torch.Tensor:
    """Time algorithms on all ranks, after a warm-up round, in a random order in each round.

    An all-gather precedes each algorithm, so that all ranks start it at about the same time.

    Returns:
        float64, a row for each round and a column for each name: seconds on the slowest rank, the
        same on all ranks.
    """
    request = make_request(kind, num_bytes, group.rank, group.world_size)
    seconds = torch.empty(1 + rounds, len(names), dtype=torch.float64)
    shuffler = random.Random(0)
    for turn in range(1 + rounds):
        for index in shuffler.sample(range(len(names)), len(names)):
            group.run(yield_request(AllGatherScalar(0)))
            begin = time.perf_counter()
            _run(group, request, names[index])
            seconds[turn, index] = time.perf_counter() - begin
    gathered = group.run(yield_request(AllGather(seconds[1:].flatten())))
    return gathered.amax(0).view(rounds, len(names))


def time_all(
    group: Group, kind: str, size: int, names: Sequence[str], rounds: int
) -> dict[str, Line]:
    """Return the times of each algorithm, measured in turns."""
    seconds = time_algorithms(group, kind, size, names, rounds)
    least, median = seconds.amin(0).tolist(), seconds.quantile(0.5, 0).tolist()
    return {
        name: {
            "least_s": least[i],
            "median_s": median[i],
            "equal": is_equal(group, kind, size, name),
        }
        for i, name in enumerate(names)
    }


def is_equal(group: Group, kind: str, size: int, name: str) -> bool:
    """Return whether the results are correct.

    The result of an all-to-all must be the values that were sent to the rank; the results of other
    collectives must be bit-identical on all ranks.
    """
    request = make_request(kind, size, group.rank, group.world_size)
    generator = torch.Generator().manual_seed(group.rank)
    if isinstance(request, AllToAll):
        for part in request.parts:
            part.random_(generator=generator)
        sent = sum(_hash(part, group.rank, to) for to, part in enumerate(request.parts))
        parts = _run(group, request, name)
        received = sum(_hash(part, source, group.rank) for source, part in enumerate(parts))
        return sum(group.run(yield_request(AllGatherScalar(sent - received)))) == 0
    if isinstance(request, Sum):
        request.values.normal_(generator=generator)
    else:
        request.values.random_(generator=generator)
    own = _hash(_run(group, request, name))
    return len(set(group.run(yield_request(AllGatherScalar(own))))) == 1


def count_bytes(group: Group) -> Iterator[Line]:
    """Count the bytes of each request and algorithm: by ledger, formula and network interface."""
    if group.monitor is not None:
        group.monitor.stop()  # the interface would count its heartbeats, too
    for request in make_requests(group.rank, group.world_size):
        kind = "Sum" if isinstance(request, Mean) else type(request).__name__
        names = [MESSAGES.get(kind, "direct")] if kind != "Broadcast" else []
        names += [BUILTIN] if kind in KINDS else []
        for name in names:
            times = COUNTED_SCALARS if isinstance(request, AllGatherScalar) else COUNTED
            before = _counters(group, request)
            for _ in range(times):
                _run(group, request, name)
            after = _counters(group, request)
            formula = times * sent_bytes(request, name, group)
            own = [*(b - a for a, b in zip(before, after, strict=True)), formula]
            gathered = group.run(yield_request(AllGather(torch.tensor(own, dtype=torch.float64))))
            sent, messages, wire, packets, formula = gathered.sum(0).tolist()
            yield {
                "request": type(request).__name__,
                "algorithm": name,
                "requests": times,
                "num_bytes": request.num_bytes,
                "ledger_bytes": sent,
                "formula_bytes": formula,
                "same_on_each": bool((gathered[:, 0] == gathered[:, 4]).all()),
                "messages": messages,
                "wire_bytes": wire,
                "packets": packets,
                "wire_of_ledger": wire / sent,
                "tcp_payload_of_ledger": (wire - HEADER_BYTES * packets) / sent,
            }


def sent_bytes(request: Collective, name: str, group: Group) -> float:
    """Return the bytes that a rank sends by the formula of an algorithm."""
    if name == MESSAGES["Sum"] and isinstance(request, AllReduce):
        # a power of two of ranks, each of which sends the whole vector in each round
        return (group.world_size.bit_length() - 1) * request.num_bytes
    return request.sent_bytes(group.rank, group.world_size)


def make_requests(rank: int, world_size: int) -> list[Collective]:
    """Return a request of each kind, of about COUNTED_BYTES except the scalar."""
    count = COUNTED_BYTES // 4 // world_size * world_size
    parts = torch.zeros(count).tensor_split(world_size)
    return [
        Sum(torch.zeros(count)),
        Mean(torch.zeros(count)),
        AllGather(torch.zeros(count // world_size)),
        ReduceScatter(torch.zeros(count)),
        AllToAll(parts, [len(parts[rank])] * world_size),
        Broadcast(torch.zeros(count)),
        SendReceive(torch.zeros(count), rank ^ 1),
        AllGatherScalar(rank),
    ]


def _run(group: Group, request: Collective, name: str) -> Any:
    """Run a request by an algorithm, and return its result."""
    with executed_by(name):
        return group.run(yield_request(request))


def _hash(values: torch.Tensor, *labels: int) -> int:
    data = hashlib.sha256(memoryview(values.view(-1).view(torch.uint8).numpy()))
    data.update(repr(labels).encode())
    return int.from_bytes(data.digest()[:4], "big")


def _counters(group: Group, request: Collective) -> list[float]:
    """Return bytes and messages by the ledger, and bytes and packets by the network interface."""
    # a barrier by a kind of request that is not being counted
    is_scalar = isinstance(request, AllGatherScalar)
    group.run(yield_request(AllGather(torch.zeros(1)) if is_scalar else AllGatherScalar(0)))
    time.sleep(SETTLE_S)
    entry = group.ledger.entries.get(type(request).__name__, Entry())
    return [entry.bytes_sent, entry.messages, *tasks.interface_counts()]


if __name__ == "__main__":
    if tasks.is_worker():
        tasks.serve(measure_task, warm_up=WARM_UP)
    else:
        main()
