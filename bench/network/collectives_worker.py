"""Measure collectives as one rank of bench/network/collectives.py; rank 0 prints JSON lines.

    python -m bench.network.collectives_worker '{"part": "times", "kind": "Sum", ...}' ...

Each rank runs this program, with the environment variables of torch.distributed.

Notation: W ranks.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gcnzc.exchange import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Choices,
    Group,
    Mean,
    Receive,
    ReduceScatter,
    Send,
    SendReceive,
    Start,
    Sum,
    Wait,
    init_group,
    tune,
)
from gcnzc.exchange.collectives.broadcast import CHAIN
from gcnzc.exchange.ledger import Entry
from gcnzc.exchange.measure import make_request, time_algorithms
from gcnzc.exchange.requests import BUILTIN, Collective, yield_request
from gcnzc.exchange.tuner import candidates

TIMEOUT_S = 120.0
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_S = 3, 40, 1.0
# up to this size, measure also the algorithms that the tuner left out
SMALL_BYTES = 1 << 20
# scalar all-gathers before measuring, until the scheduler has distributed the processes over cores
WARMUP = 200
# size and number of requests whose bytes are counted, so that acknowledgements are negligible
COUNTED_BYTES, COUNTED, COUNTED_SCALARS = 1 << 20, 4, 200
# headers of Ethernet, IP, and TCP with time stamps
HEADER_BYTES = 14 + 20 + 32
# time until the last acknowledgements have arrived
SETTLE_S = 0.1
# size of the messages that measure bandwidth, and number of round trips that measure latency
PAIR_BYTES, ROUND_TRIPS = 1 << 20, 8

Line = dict[str, Any]


def main() -> None:
    """Run the tasks of the command line."""
    torch.set_num_threads(1)
    with init_group(timeout_s=TIMEOUT_S) as group:
        for _ in range(WARMUP):
            group.run(yield_request(AllGatherScalar(0)))
        for task in sys.argv[1:]:
            for line in measure_task(group, json.loads(task)):
                if group.rank == 0:
                    print(json.dumps(line), flush=True)


def measure_task(group: Group, task: Line) -> Iterator[Line]:
    """Run a task of bench/network/collectives.py, and yield its results, the same on all ranks."""
    if task["part"] == "bytes":
        for line in count_bytes(group):
            yield {"part": "bytes"} | line
        return
    alpha_s, bytes_per_s = measure_link(group)
    link = {"alpha_s": alpha_s, "bytes_per_s": bytes_per_s}
    kind, sizes = task["kind"], task["sizes"]
    with tempfile.TemporaryDirectory() as folder:
        tuning = tune(group, Path(folder), {kind: sizes}, budget_s=task["budget_s"])
    choices = tuning.choices
    for size in sizes:
        chosen = choices.find_for_size(kind, size, group.world_size)
        tried = tuning.times[kind][size]
        names = {*(candidates(kind, size, group.world_size) if size <= SMALL_BYTES else tried)}
        names = sorted({*names, chosen, BUILTIN})
        rounds = choose_rounds(sum(tried.values()))
        algorithms = time_all(group, kind, size, names, rounds)
        for name, line in algorithms.items():
            line["formula_s"] = formula_s(kind, name, size, group.world_size, alpha_s, bytes_per_s)
        share = algorithms[chosen]["least_s"] / algorithms[BUILTIN]["least_s"]
        case = {
            "part": "times",
            "kind": kind,
            "num_bytes": size,
            "rounds": rounds,
            "ways": algorithms,
        }
        yield case | link | {"tuned": chosen, "tuned_of_builtin": share}


def measure_link(group: Group) -> tuple[float, float]:
    """Return the seconds of a message, and bytes per second, with all pairs of ranks active."""
    round_trips_s = _least_s(group, lambda: _ping_pong(group.rank), rounds=30)
    alpha_s = round_trips_s / (2 * ROUND_TRIPS)
    request = SendReceive(torch.zeros(PAIR_BYTES, dtype=torch.uint8), group.rank ^ 1)
    # over gloo both ranks also send a notification that they are ready to receive
    return alpha_s, PAIR_BYTES / (
        _least_s(group, lambda: yield_request(request), rounds=5) - 2 * alpha_s
    )


def choose_rounds(round_s: float) -> int:
    """Return the number of rounds that take ROUNDS_S; the least if the time is unknown."""
    wanted = ROUNDS_S / round_s if round_s else 0
    return int(min(max(wanted, MIN_ROUNDS), MAX_ROUNDS))


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


def formula_s(
    kind: str, name: str, size: int, world_size: int, alpha_s: float, bytes_per_s: float
) -> float | None:
    """Return the time by the formulas of gcnzc/exchange/collectives/; gloo uses rings."""
    transfer_s, others = size / bytes_per_s, world_size - 1
    doublings = math.ceil(math.log2(world_size))
    shares_s = others / world_size * transfer_s
    if kind == "AllToAll":
        return alpha_s + shares_s
    if kind == "Sum":
        return {
            "doubling": doublings * (alpha_s + transfer_s),
            "halving": 2 * doublings * alpha_s + 2 * shares_s,
            "ring": 2 * others * alpha_s + 2 * shares_s,
            BUILTIN: 2 * others * alpha_s + 2 * shares_s,
        }[name]
    if kind == "AllGather":
        messages = doublings if name == "doubling" else others
        return messages * alpha_s + others * transfer_s
    if name.startswith(CHAIN):
        piece = int(name.partition(":")[2])
        steps = math.ceil(size / piece) + world_size - 2
        return steps * (alpha_s + min(piece, size) / bytes_per_s)
    return None if name == BUILTIN else doublings * (alpha_s + transfer_s)


def count_bytes(group: Group) -> Iterator[Line]:
    """Count the bytes of each request and algorithm: by ledger, formula and network interface."""
    if group.monitor is not None:
        group.monitor.stop()  # the interface would count its heartbeats, too
    for request in make_requests(group.rank, group.world_size):
        for name in request.algorithms:
            times = COUNTED_SCALARS if isinstance(request, AllGatherScalar) else COUNTED
            before = _counters(group, request)
            for _ in range(times):
                _run(group, request, name)
            after = _counters(group, request)
            formula = times * request.sent_bytes(name, group.rank, group.world_size)
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
    default = group.choices
    group.choices = Choices.always(**{request.kind: name})
    result = group.run(yield_request(request))
    group.choices = default
    return result


def _ping_pong(rank: int) -> Algorithm[None]:
    """Send messages back and forth between pairs of ranks."""
    peer, values = rank ^ 1, torch.zeros(4)
    pending = []
    for _ in range(ROUND_TRIPS):
        pending.append((yield Start(Receive(torch.empty(4), peer))))
    for each in pending:
        if rank % 2:
            yield Wait(each)
        yield Send(values, peer)
        if not rank % 2:
            yield Wait(each)


def _least_s(group: Group, make: Callable[[], Algorithm[Any]], rounds: int) -> float:
    """Return the seconds of the fastest round, on the slowest rank."""
    seconds = []
    for _ in range(rounds):
        group.run(yield_request(AllGatherScalar(0)))
        begin = time.perf_counter()
        group.run(make())
        seconds.append(time.perf_counter() - begin)
    gathered = group.run(yield_request(AllGather(torch.tensor(seconds, dtype=torch.float64))))
    return float(gathered.amax(0).min())


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
    fields = [0] * 16
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            fields = [int(number) for number in numbers.split()]
    return [entry.bytes_sent, entry.messages, fields[8], fields[9]]


if __name__ == "__main__":
    main()
