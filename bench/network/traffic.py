"""Measure the bytes that each optimizer sends, at the network interfaces of an emulated cluster.

    python -m bench.network.traffic [--workers N] [--elements N ...]
                                  [--parts PART ...] [--ways METHOD ...]

Each optimizer takes some steps with random gradients of a model with a given number of elements.
Ratios compare the bytes sent by the interfaces in the same run, with headers and acknowledgements.

    stage       steps of 1-bit Adam and 1-bit LAMB after warm-up, which send signs, compared with
                averaging float32 gradients
    run         100 steps of 1-bit Adam and 1-bit LAMB, of which 15 are warm-up, compared with
                float16 gradients
    streaming   200 steps of Streaming DiLoCo in float4_e3m0, synchronized every 100 steps in 1 or 8
                fragments, compared with bfloat16 gradients; also the most bytes sent in one step
    methods     96 steps of each method of bench/strategies/compare.py with its defaults, compared
                with averaging float32 gradients; the last exchanges, in `finalize`, count as well

It runs on the emulated machines of bench/network/cluster.py, which needs root.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.harness import record
from bench.network import tasks
from bench.network.cluster import Cluster
from bench.network.tasks import Line
from bench.strategies.compare import METHODS
from gcnzc.compress import Dense, Sign, compression
from gcnzc.exchange import AllGather, AllGatherScalar, Group
from gcnzc.exchange.requests import yield_request
from gcnzc.optim import Averaged, OneBitAdam, OneBitLamb, StreamingDiLoCo

MODULE = "bench.network.traffic"
MBIT_PER_S = 1000.0
PARTS = ("stage", "run", "streaming", "methods")
LAST_ACKNOWLEDGEMENTS_S = 0.1  # time until the last acknowledgements have arrived
TENSORS = 12  # of the model


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurements of the command line and record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--elements", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", help="only these methods, and each part's baseline")
    options = parser.parse_args(argv)
    chosen = [
        {"part": part, "elements": elements, **task}
        for part in options.parts
        for elements in options.elements
        for number, task in enumerate(tasks_of(part))
        if not (number and options.ways) or task["way"] in options.ways
    ]
    firsts: dict[tuple[str, int], Line] = {}
    with Cluster(options.workers, MBIT_PER_S) as cluster:
        lines = list(tasks.run_on(cluster, MODULE, chosen))
    for task, found in zip(chosen, lines, strict=True):
        line = {"steps": task["steps"], **found}
        # the first task of each part is the baseline of the others
        first = firsts.setdefault((task["part"], task["elements"]), line)
        times = first["wire_bytes_per_step"] / line["wire_bytes_per_step"]
        line |= {
            "times_fewer": times,
            "times_fewer_by_ledger": first["ledger_bytes"]
            / first["steps"]
            / (line["ledger_bytes"] / line["steps"]),
            "wire_of_ledger": line["wire_bytes"] / line["ledger_bytes"],
        }
        record("traffic", {"workers": options.workers, **task}, **line)


def tasks_of(part: str) -> Iterator[Line]:
    """Return the tasks of a part; the first one is the baseline."""
    if part == "stage":
        yield {"way": "float32", "steps": 20, "skip": 2}
        yield {"way": "onebit-adam", "steps": 200, "skip": 3, "warmup": 1}
        yield {"way": "onebit-lamb", "steps": 200, "skip": 3, "warmup": 1}
    elif part == "run":
        yield {"way": "float16", "steps": 20, "skip": 1}
        for method in ("onebit-adam float16", "onebit-lamb float16", "onebit-adam", "onebit-lamb"):
            yield {"way": method, "steps": 100, "skip": 0, "warmup": 15}
    elif part == "methods":
        for method in METHODS:
            yield {"way": method, "steps": 96, "skip": 0}
    else:
        yield {"way": "bfloat16", "steps": 20, "skip": 1}
        for fragments in (1, 8):
            options = {"local_steps": 100, "fragments": fragments}
            yield {"way": "streaming-diloco float4_e3m0", "steps": 200, "skip": 101, **options}


def measure(group: Group, task: Line) -> Iterator[Line]:
    """Yield the bytes that all workers sent in one task, by ledger and by interface."""
    elements, steps = task["elements"], task["steps"]
    shares = torch.arange(1, TENSORS + 1, dtype=torch.float64)
    sizes = (shares / shares.sum() * elements).long()
    sizes[-1] += elements - int(sizes.sum())
    generator = torch.Generator().manual_seed(group.rank)
    parameters = [torch.nn.Parameter(torch.randn(int(size))) for size in sizes]
    optimizer = optimizer_of(task, parameters, group)

    def set_random_gradients() -> float:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return 0.0

    before, most = None, 0
    for step in range(task["skip"] + steps):
        if step == task["skip"]:
            before = counters(group)
        ledger = group.ledger.bytes_sent
        optimizer.step(set_random_gradients)
        most = max(most, group.ledger.bytes_sent - ledger)
    if task["part"] == "methods":
        optimizer.finalize()
    assert before is not None, "there are steps"
    found = [b - a for a, b in zip(before, counters(group), strict=True)]
    mine = torch.tensor([*found, most], dtype=torch.float64)
    rows = group.run(yield_request(AllGather(mine)))
    ledger_bytes, requests, wire_bytes, packets, _ = rows.sum(0).tolist()
    yield {
        "ledger_bytes": ledger_bytes,
        "requests_per_step": requests / steps / group.world_size,
        "wire_bytes": wire_bytes,
        "packets": packets,
        "wire_bytes_per_step": wire_bytes / steps / group.world_size,
        "most_bytes_in_a_step": float(rows[:, 4].max()),
    }


def optimizer_of(task: dict[str, Any], parameters: list[Any], group: Group) -> Any:
    """Return the optimizer of a task."""
    method, warmup = task["way"], task.get("warmup", 0)
    if task["part"] == "methods":
        return METHODS[method](torch.nn.ParameterList(parameters), group, task["steps"])
    if method in ("float32", "float16", "bfloat16"):
        inner = torch.optim.SGD(parameters, 1e-6)
        compress = None if method == "float32" else Dense(getattr(torch, method))
        return Averaged(inner, group, compress=compress)
    if method == "onebit-adam":
        return OneBitAdam(parameters, warmup=warmup, compress=Sign(), group=group)
    if method == "onebit-lamb":
        return OneBitLamb(parameters, warmup=warmup, compress=Sign(), group=group)
    if method in ("onebit-adam float16", "onebit-lamb float16"):
        kind = OneBitAdam if method.startswith("onebit-adam") else OneBitLamb
        half = Dense(torch.float16)
        return kind(
            parameters, warmup=warmup, compress=Sign(), gradient_compression=half, group=group
        )
    assert method == "streaming-diloco float4_e3m0", f"unknown method {method}"
    inner = torch.optim.SGD(parameters, 1e-6)
    fragments, codes = task["fragments"], compression("float4_e3m0")
    return StreamingDiLoCo(
        inner, group, local_steps=task["local_steps"], fragments=fragments, compress=codes
    )


def counters(group: Group) -> list[float]:
    """Return this worker's counts by its ledger and by its interface."""
    group.run(yield_request(AllGatherScalar(0)))
    time.sleep(LAST_ACKNOWLEDGEMENTS_S)
    return [group.ledger.bytes_sent, group.ledger.requests, *tasks.interface_counts()]


if __name__ == "__main__":
    if tasks.is_worker():
        tasks.serve(measure, heartbeats=False)
    else:
        main()
