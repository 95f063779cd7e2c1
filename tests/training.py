"""Graphs and runs for tests of training: of one worker, stopped ones, and of several workers."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_runs import made_once

from gcnzc.datasets.generate import Shape, make
from gcnzc.exchange import init_group
from gcnzc.graph.prepare import prepare
from gcnzc.optim import DistributedOptimizer
from gcnzc.train import Callback, checkpoint, results
from gcnzc.train.config import ONE_BIT, OPTIMIZER_OF, STRATEGIES, TrainConfig
from gcnzc.train.errors import Interrupted
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train
from gcnzc.train.run_folder import last_checkpoint
from gcnzc.train.state import Run

# options of all optimizers and strategies, with one worker, whose steps need no closure
UPDATES = {
    **{name: {"optimizer": name} for name in ("adam", "sgd", "muon", *ONE_BIT)},
    **{
        name: {"strategy": name, "optimizer": OPTIMIZER_OF.get(name, "adamw")}
        for name in STRATEGIES.targets
        if name != "fedglomo"
    },
}
UPDATES["decoupled-diloco"]["strategy"] += ":quorum=1"


class Listener(NullReporter):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def planted(factory: pytest.TempPathFactory, *shape: int) -> Path:
    """A prepared graph with communities, whose source is the folder `raw` beside it.

    Its numbers of nodes, edges, columns of features and classes are `shape`.
    """

    def write(folder: Path) -> None:
        make(folder / "raw", "planted", Shape(*shape), seed=3)
        prepare(folder / "raw", folder / "graph")

    return made_once(factory, f"planted-{'-'.join(map(str, shape))}", write) / "graph"


class Stopped(Exception):
    """In the middle of an epoch."""


class Stopping(NullReporter):
    """Ends a run at a step of an epoch, of which the first is 1."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__()
        self.epoch, self.step = epoch, step

    @contextmanager
    def task(self, what: str) -> Iterator[Any]:
        def advance(done: int, total: int, figures: str = "") -> None:
            if what.startswith(f"epoch {self.epoch}/") and done == self.step:
                raise Stopped

        yield advance


def lines(run: Path) -> list[dict[str, Any]]:
    """The record of a run: a line for each epoch."""
    return [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]


def assert_same_weights(one: Path, other: Path) -> None:
    """Two runs have the same last and best model, bit for bit."""
    for read in (saved, checkpoint.load_best):
        state, expected = read(one), read(other)
        for name, value in expected["model"].items():
            assert torch.equal(state["model"][name], value), name


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs have the same models, and the same record but for its times and sent bytes.

    The payload includes the times and the reports of errors, as text.
    """
    left_out = "_s", "bytes_sent"

    def figures(run: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.endswith(left_out)} for line in lines(run)]

    assert figures(one) == figures(other)
    assert_same_weights(one, other)


class Interrupting(Callback):
    """Requests the end of a run in a step of it, of which the first is 1, as a signal does."""

    def __init__(self, step: float) -> None:
        self.step = step

    def on_start(self, run: Run) -> None:
        run.received_signal = lambda: run.in_epoch and run.steps >= self.step - 1


def saved(run: Path) -> dict[str, Any]:
    return checkpoint.load(last_checkpoint(run))


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
            if self.group.rank == self.group.world_size - 1 and steps - 1 == bad_at:
                self.param_groups[0]["params"][0].grad[0] = math.nan
            usual(self, closure)

        return step

    DistributedOptimizer.step = watched(DistributedOptimizer.step)
    # as in `quick_runs`
    results.curves = lambda runs, file: file.touch()
    torch.manual_seed(0)
    with init_group(timeout_s=config.run.timeout_s) as group:
        at = stop_at if stop_at is not None and group.rank == 0 else math.inf
        stopping = Interrupting(at)
        try:
            found = train(config, folder, listener, group, callbacks=[stopping])
        except Interrupted as error:
            return str(error).partition(";")[0]
    return found | {"said": [line for line in listener.said if "not finite" in line]}
