"""Run a worker of bench/network/traffic.py; worker 0 prints JSON lines.

    python -m bench.network.traffic_worker '{"way": "onebit-adam", "steps": 20, ...}' ...

It runs on every machine, with the environment variables of torch.distributed. The optimizer takes
steps with random gradients, which send as many bytes as gradients of training.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.strategies.compare import METHODS
from gcnzc.compress import Dense, Sign, compression
from gcnzc.exchange import AllGather, AllGatherScalar, Group, init_group
from gcnzc.exchange.requests import yield_request
from gcnzc.optim import Averaged, OneBitAdam, OneBitLamb, StreamingDiLoCo

LAST_ACKNOWLEDGEMENTS_S = 0.1  # time until the last acknowledgements have arrived
TENSORS = 12  # of the model


def main() -> None:
    """Run the tasks of the command line."""
    torch.set_num_threads(1)
    with init_group(timeout_s=120) as group:
        if group.monitor is not None:
            group.monitor.stop()  # its heartbeats count as bytes too
        for text in sys.argv[1:]:
            line = measured(group, json.loads(text))
            if group.rank == 0:
                print(json.dumps(line), flush=True)


def measured(group: Group, task: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that all workers sent in one task, by ledger and by interface."""
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
    return {
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
    fields = [0] * 16
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            fields = [int(number) for number in numbers.split()]
    return [group.ledger.bytes_sent, group.ledger.requests, fields[8], fields[9]]


if __name__ == "__main__":
    main()
