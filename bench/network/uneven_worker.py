"""Train with uneven workers, as one rank of bench/network/uneven_strategies.py.

    python -m bench.network.uneven_worker '{"method": "DiLoCo", ...}' ...

Each rank runs this program, with the environment variables of torch.distributed; rank 0 prints a
JSON line for each task. `train` runs over processes and in `lockstep`.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from bench.strategies.compare import METHODS
from bench.strategies.task import Setup, dataset
from gcnzc import Loader
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, Compute, Group, Now, init_group
from gcnzc.exchange.requests import yield_request
from gcnzc.models import SAGE
from gcnzc.sampling import Batch

TIMEOUT_S = 300.0
PRIORITY = -10


@dataclass(frozen=True)
class Task:
    """A run of one method."""

    method: str
    """a name of `bench.strategies.compare.METHODS`"""
    workers: int
    steps: int
    """of each worker"""
    step_s: float
    """seconds of the computation of a step of a worker that is not slow; longer than the
    computation itself"""
    slow: dict[int, float]
    """by worker, how many times as slowly it computes"""
    seed: int = 0


def train(task: Task, group: Group) -> Algorithm[float]:
    """Train one rank, and return the seconds of its steps, without those of the first.

    A step takes `step_s` seconds: over processes the rest of them is a pause, so the machines need
    no core each, and in virtual time all of them.
    """
    setup = Setup()
    data = dataset(setup.graph)
    torch.manual_seed(task.seed)
    model = SAGE(data.features.shape[1], setup.hidden, data.num_classes, num_layers=2, dropout=0.0)
    loader = Loader(
        data.graph,
        data.table,
        data.split["train"],
        setup.fanouts,
        batch_size=setup.batch_size,
        labels=data.labels,
        seed=task.seed,
        rank=group.rank,
        world_size=group.world_size,
        threads=1,
    )
    optimizer = METHODS[task.method](model, group, task.steps)
    yield from optimizer.broadcast_model_algorithm()
    batches = _repeat(loader)
    # the first computation loads kernels
    _loss(model, next(batches)).backward()
    optimizer.zero_grad()
    step_s = task.step_s * task.slow.get(group.rank, 1.0)
    yield AllGatherScalar(0)
    begin = yield Now()
    for _ in range(task.steps):
        began = yield Now()
        optimizer.zero_grad()
        _loss(model, next(batches)).backward()
        computed_s = (yield Now()) - began
        yield Compute(max(0.0, step_s - computed_s))
        yield from optimizer.algorithm()
    end = yield Now()
    yield from optimizer.finalize_algorithm()
    return float(end - begin)


def _repeat(loader: Loader) -> Iterator[Batch]:
    for _ in count():
        yield from loader


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch.blocks, batch.x), batch.y)


def main() -> None:
    """Run the tasks of the command line."""
    with suppress(PermissionError):
        os.nice(PRIORITY)
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        task = read_task(text)
        with init_group(timeout_s=TIMEOUT_S) as group:
            own = group.run(train(task, group))
            seconds = torch.tensor([own], dtype=torch.float64)
            gathered = group.run(yield_request(AllGather(seconds))).flatten().tolist()
            sent = group.ledger.bytes_sent
            if group.rank == 0:
                line: dict[str, Any] = asdict(task) | {"seconds": gathered, "sent_bytes": sent}
                print(json.dumps(line), flush=True)
        # the store of this run may still use its port
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 100)


def read_task(text: str) -> Task:
    """Parse a task; JSON has strings in place of the workers' numbers."""
    fields = json.loads(text)
    return Task(**fields | {"slow": {int(rank): each for rank, each in fields["slow"].items()}})


if __name__ == "__main__":
    main()
