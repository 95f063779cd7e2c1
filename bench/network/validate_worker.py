"""Time collectives as one rank of bench/network/validate.py; rank 0 prints JSON lines.

    python -m bench.network.validate_worker '{"kind": "Sum", "algorithm": "ring", ...}' ...

Each rank runs this program, with the environment variables of torch.distributed.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from gcnzc.exchange import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    Choices,
    Compute,
    Group,
    Now,
    init_group,
)
from gcnzc.exchange.measure import make_request
from gcnzc.exchange.requests import yield_request

TIMEOUT_S = 300.0
# scalar all-gathers before measuring, until the scheduler has distributed the processes over cores
WARMUP = 100
PRIORITY = -10
SETTLE_S = 0.3


def main() -> None:
    """Run the tasks of the command line."""
    os.nice(PRIORITY)
    torch.set_num_threads(1)
    with init_group(timeout_s=TIMEOUT_S) as group:
        if group.monitor is not None:
            # its heartbeats would share the links
            group.monitor.stop()
        for _ in range(WARMUP):
            group.run(yield_request(AllGatherScalar(0)))
        for text in sys.argv[1:]:
            for line in time_task(group, json.loads(text)):
                if group.rank == 0:
                    print(json.dumps(line), flush=True)


def time_task(group: Group, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Time the rounds of a task, and yield the seconds of each on the slowest rank."""
    before = group.choices
    group.choices = Choices.always(**{task["kind"]: task["algorithm"]})
    case = task["kind"], task["num_bytes"], group.rank, group.world_size
    try:
        own = [group.run(timed(*case)) for _ in range(1 + task["rounds"])][1:]
    finally:
        group.choices = before
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
    main()
