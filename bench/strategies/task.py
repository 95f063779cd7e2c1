"""Train GraphSAGE on a real graph with W simulated ranks, in virtual time.

Each rank has its own model and its own minibatches, and all ranks run in one process by
`gcnzc.exchange.lockstep`. The clock of the simulation has the exchanges, and a fixed time for the
computation of a step, so the times do not depend on this machine. The parameters are those that
real ranks would have.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gcnzc import Dataset, Loader, inference, load, prepare
from gcnzc.exchange import Algorithm, Compute, Group, Link, Now, SlowDown, lockstep
from gcnzc.models import SAGE
from gcnzc.optim import DistributedOptimizer, FedGLOMO
from gcnzc.sampling import Batch

DATA = Path(__file__).parents[3] / "shared" / "data"

Build = Callable[[nn.Module, Group, int], DistributedOptimizer]
"""builds the optimizer of a rank from its model, the group and the number of steps of the run"""


@dataclass(frozen=True)
class Setup:
    """The task, the model, the machines and the network of a run."""

    graph: str = "amazon_photo"
    """a folder of ../shared/data"""
    world_size: int = 4
    hidden: int = 64
    fanouts: tuple[int, ...] = (10, 10)
    batch_size: int = 32
    """of one rank"""
    epochs: int = 12
    mbit_per_s: float = 50.0
    """bandwidth of the link of each rank, in both directions"""
    delay_s: float = 0.0005
    """latency of a message"""
    step_s: float = 0.01
    """time of the computation of a step"""
    slow_rank_factor: float = 1.0
    """by which the last rank computes more slowly than the others"""
    slow_link_factor: float = 1.0
    """by which the link of the last rank is slower than those of the others"""

    @property
    def links(self) -> list[Link]:
        """The link of each rank."""
        rates = [self.mbit_per_s * 1e6 / 8] * self.world_size
        rates[-1] /= self.slow_link_factor
        return [Link(rate, self.delay_s, in_bytes_per_s=rate) for rate in rates]

    @property
    def faults(self) -> dict[int, list[SlowDown]]:
        """The slow-down of the last rank, if it has one."""
        if self.slow_rank_factor == 1:
            return {}
        return {self.world_size - 1: [SlowDown(0.0, self.slow_rank_factor)]}


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    accuracy: float
    """on the test nodes, of the model after `finalize`"""
    seconds: float
    """virtual time of the training"""
    bytes_sent: float
    """mean over the ranks"""
    state_bytes: int
    """optimizer state of the rank that has most, without that of the inner optimizer"""
    steps: int
    """of the rank with the most steps"""
    losses: Sequence[float]
    """mean training loss of each epoch over the ranks"""
    epoch_ends_s: Sequence[float]
    """virtual time at the end of each epoch, of rank 0"""
    optimizers: Sequence[DistributedOptimizer]
    """of all ranks"""


@cache
def dataset(name: str) -> Dataset:
    """Prepare and load a graph; it is kept until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gcnzc-bench-")) / name
    prepare(DATA / name / f"{name}.npz", folder)
    return load(folder)


def run(setup: Setup, build: Build, seed: int) -> Result:
    """Train one model.

    Args:
        setup: the task and the network.
        build: builds the optimizer of a rank.
        seed: of the model, the order of the seeds and the sampling.
    """
    data = dataset(setup.graph)
    models, optimizers, algorithms = [], [], []
    losses = np.zeros((setup.world_size, setup.epochs))
    ends = np.zeros((setup.world_size, setup.epochs))
    for rank in range(setup.world_size):
        torch.manual_seed(seed)
        model = SAGE(
            data.features.shape[1],
            setup.hidden,
            data.num_classes,
            num_layers=len(setup.fanouts),
            dropout=0.0,
        )
        loader = Loader(
            data.graph,
            data.table,
            data.split["train"],
            setup.fanouts,
            batch_size=setup.batch_size,
            labels=data.labels,
            seed=seed,
            rank=rank,
            world_size=setup.world_size,
            threads=1,
        )
        optimizer = build(model, Group(rank, setup.world_size), setup.epochs * len(loader))
        models.append(model)
        optimizers.append(optimizer)
        algorithms.append(_train(setup, model, optimizer, loader, losses[rank], ends[rank]))
    outcome = lockstep(algorithms, setup.links, faults=setup.faults)
    test = data.split["test"]
    outputs = inference(models[0], data.graph, data.table, nodes=test)
    return Result(
        accuracy=float((outputs.argmax(1) == data.labels[test]).float().mean()),
        seconds=max(outcome.seconds),
        bytes_sent=sum(each.bytes_sent for each in outcome.ledgers) / setup.world_size,
        state_bytes=max(each.state_bytes for each in optimizers),
        steps=max(each.steps for each in optimizers),
        losses=losses.mean(axis=0).tolist(),
        epoch_ends_s=ends[0].tolist(),
        optimizers=optimizers,
    )


def _train(
    setup: Setup,
    model: nn.Module,
    optimizer: DistributedOptimizer,
    loader: Loader,
    losses: np.ndarray,
    ends: np.ndarray,
) -> Algorithm[None]:
    yield from optimizer.broadcast_model_algorithm()
    for epoch in range(setup.epochs):
        for batch in loader:
            model.train()
            evaluated = []

            def closure(batch: Batch = batch, evaluated: list[float] = evaluated) -> float:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch.blocks, batch.x), batch.y)
                loss.backward()
                evaluated.append(float(loss.detach()))
                return evaluated[-1]

            if isinstance(optimizer, FedGLOMO):
                optimizer.closure = closure
                yield from optimizer.algorithm()
                yield Compute(setup.step_s * len(evaluated))
            else:
                closure()
                yield Compute(setup.step_s)
                yield from optimizer.algorithm()
            losses[epoch] += evaluated[0] / len(loader)
        ends[epoch] = yield Now()
    yield from optimizer.finalize_algorithm()
