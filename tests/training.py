"""Runs of several workers, for tests."""

import math
from pathlib import Path
from typing import Any

import torch

from gcnzc.exchange import init_group
from gcnzc.optim import DistributedOptimizer
from gcnzc.train import checkpoint, results
from gcnzc.train.config import TrainConfig
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train
from gcnzc.train.trainer import Interrupted


class Listener(NullReporter):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def saved(run: Path) -> dict[str, Any]:
    return checkpoint.load(run / "checkpoint.pt")


def train_as_worker(
    config: TrainConfig, folder: Path, stop_at: int | None = None, bad_at: int | None = None
) -> Any:
    """What a run came to on this worker, or why it stopped.

    Worker 0 asks all to stop from a step on. The last worker has a gradient that is no number in
    one.
    """
    listener = Listener()
    steps = 0

    def watched(usual: Any) -> Any:
        def step(self: Any, closure: Any = None) -> None:
            nonlocal steps
            steps += 1
            if self.group.rank == 0 and stop_at is not None and steps >= stop_at:
                self.signals[0] = True
            if self.group.rank == self.group.world_size - 1 and steps - 1 == bad_at:
                self.param_groups[0]["params"][0].grad[0] = math.nan
            usual(self, closure)

        return step

    DistributedOptimizer.step = watched(DistributedOptimizer.step)
    # as in `quick_runs`
    results.curves = lambda runs, file: file.touch()
    torch.manual_seed(0)
    with init_group(timeout_s=config.timeout_s) as group:
        try:
            found = train(config, folder, listener, group)
        except Interrupted as error:
            return str(error).splitlines()[0]
    return found | {"said": [line for line in listener.said if "not finite" in line]}
