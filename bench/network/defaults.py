"""Measure the default options of each optimizer in short runs.

    python -m bench.network.defaults [--tasks TASK ...] [--methods METHOD ...]
                                   [--seeds N] [--steps N]

Four ranks train in lockstep in one process. All methods use the same number of minibatches and the
same learning rate. The tasks are a multilayer perceptron on scikit-learn's handwritten digits, a
character-level transformer on the text of LICENSE, and GraphSAGE on a graph with planted
communities. The baseline is AdamW on averaged gradients. A recorded line has the scores of all
seeds (accuracy in percent, or bits per character, for which lower is better), and the bytes that
rank 0 sent in the whole run and in the last 100 steps.
"""

import argparse
import math
import statistics
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from bench import harness
from gcnzc import Sampler
from gcnzc.datasets.generate import Shape, make
from gcnzc.exchange import Algorithm, Group, lockstep
from gcnzc.graph.load import load
from gcnzc.graph.prepare import prepare
from gcnzc.models.gnn import SAGE
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    DistributedOptimizer,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    StreamingDiLoCo,
    ZeroOneAdam,
)

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 4
LAST = 100  # number of last steps of a run, whose bytes are also recorded separately
ADAM = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLamb, "zero-one-adam": ZeroOneAdam}
LOCAL = {"local-sgd": LocalSGD, "diloco": DiLoCo, "streaming-diloco": StreamingDiLoCo, "co2": CO2}
METHODS = ("adamw", *ADAM, *LOCAL)


@dataclass
class Task:
    """A small training task."""

    lr: float
    unit: str
    """unit of the score, "percent" or "bits" """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a model with random parameters from torch's generator."""

    @abstractmethod
    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return the loss of a random minibatch of one rank."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return the score of a model on held-out data."""


class Digits(Task):
    """A multilayer perceptron on handwritten digits."""

    def __init__(self) -> None:
        super().__init__(lr=0.003, unit="percent")
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.x = torch.from_numpy(images).float()[order] / 16
        self.y = torch.from_numpy(labels)[order]
        self.num_train = 1000

    def model(self) -> nn.Module:
        """See `Task`."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """See `Task`."""
        rows = torch.randint(self.num_train, (16,), generator=generator)
        return functional.cross_entropy(model(self.x[rows]), self.y[rows])

    def score(self, model: nn.Module) -> float:
        """See `Task`."""
        predicted = model(self.x[self.num_train :]).argmax(dim=1)
        return 100 * float((predicted == self.y[self.num_train :]).float().mean())


class Transformer(nn.Module):
    """A transformer with one layer, which predicts the next character."""

    def __init__(self, num_characters: int, context: int, width: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.logits = nn.Linear(width, num_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of the next characters.

        Args:
            text: characters, (B, T) int64.

        Returns:
            For each character, the logits of the character after it, (B, T, num_characters).
        """
        hidden = self.characters(text) + self.positions.weight
        return self.logits(self.layers(hidden, mask=self.mask))


class Characters(Task):
    """A character-level transformer on the text of this project's license."""

    context = 24

    def __init__(self) -> None:
        super().__init__(lr=0.003, unit="bits")
        text = (ROOT / "LICENSE").read_text()
        characters = sorted(set(text))
        codes = torch.tensor([characters.index(each) for each in text])
        self.num_characters = len(characters)
        self.windows = codes.unfold(0, self.context + 1, 1)
        # training and held-out windows do not overlap
        self.num_train = round(0.9 * len(codes)) - self.context

    def model(self) -> nn.Module:
        """See `Task`."""
        return Transformer(self.num_characters, self.context)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """See `Task`."""
        return self._loss(model, torch.randint(self.num_train, (4,), generator=generator))

    def score(self, model: nn.Module) -> float:
        """See `Task`."""
        begin = self.num_train + self.context
        rows = torch.arange(begin, len(self.windows), self.context)
        return float(self._loss(model, rows)) / math.log(2)

    def _loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        windows = self.windows[rows]
        logits = model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Planted(Task):
    """GraphSAGE on a graph with planted communities, with sampled neighbours."""

    def __init__(self) -> None:
        super().__init__(lr=0.003, unit="percent")
        # kept, since the arrays are memory-mapped from its files
        self.folder = tempfile.TemporaryDirectory()
        raw, prepared = Path(self.folder.name) / "raw", Path(self.folder.name) / "graph"
        make(raw, "planted", Shape(3000, 18_000, 24, 8), seed=3)
        prepare(raw, prepared)
        data = load(prepared)
        self.x, self.y, self.split, self.graph = data.features, data.labels, data.split, data.graph

    def model(self) -> nn.Module:
        """See `Task`."""
        return SAGE(self.x.shape[1], 32, int(self.y.max()) + 1, num_layers=2, dropout=0.0)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """See `Task`."""
        ids = self.split["train"]
        seeds = ids[torch.randperm(len(ids), generator=generator)[:32]]
        epoch = int(torch.randint(1 << 30, (), generator=generator))
        return functional.cross_entropy(self._logits(model, seeds, (5, 5), epoch), self.y[seeds])

    def score(self, model: nn.Module) -> float:
        """See `Task`."""
        seeds = self.split["test"]
        predicted = self._logits(model, seeds, (-1, -1), 0).argmax(dim=1)
        return 100 * float((predicted == self.y[seeds]).float().mean())

    def _logits(
        self, model: nn.Module, seeds: Tensor, fanouts: tuple[int, int], epoch: int
    ) -> Tensor:
        batch = Sampler(self.graph, fanouts).sample(seeds, epoch)
        return model(batch.blocks, self.x[batch.nodes])


TASKS = {"digits": Digits, "characters": Characters, "planted": Planted}


def build(
    method: str, model: nn.Module, lr: float, group: Group, options: Any
) -> DistributedOptimizer:
    """Create the optimizer of one rank."""
    if method in ADAM:
        return ADAM[method](model.parameters(), lr=lr, group=group, **options)
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    if method == "adamw":
        return Averaged(inner, group)
    return LOCAL[method](inner, group, **options)


@dataclass(frozen=True)
class Run:
    """The score of a run, and the bytes that rank 0 sent in all steps and in the last steps."""

    score: float
    bytes_sent: int
    last_bytes_sent: int


def train(task: Task, method: str, options: Mapping[str, Any], steps: int, seed: int) -> Run:
    """Train with four ranks in lockstep."""
    models, optimizers = [], []
    for rank in range(WORLD_SIZE):
        torch.manual_seed(seed)
        models.append(task.model())
        group = Group(rank, WORLD_SIZE)
        optimizers.append(build(method, models[-1], task.lr, group, options))
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(WORLD_SIZE)]

    def take_steps(rank: int, number: int) -> Algorithm[None]:
        for _ in range(number):
            optimizers[rank].zero_grad()
            task.loss(models[rank], generators[rank]).backward()
            yield from optimizers[rank].algorithm()

    def take_last_steps(rank: int) -> Algorithm[None]:
        yield from take_steps(rank, LAST)
        yield from optimizers[rank].finalize_algorithm()

    first = lockstep([take_steps(rank, steps - LAST) for rank in range(WORLD_SIZE)])
    last = lockstep([take_last_steps(rank) for rank in range(WORLD_SIZE)])
    sent = [each.ledgers[0].bytes_sent for each in (first, last)]
    with torch.no_grad():
        return Run(task.score(models[0].eval()), sum(sent), sent[1])


def measure(name: str, methods: Sequence[str], seeds: int, steps: int) -> None:
    """Train by each method, without and with the number of steps, and record the scores."""
    task = TASKS[name]()
    for method in methods:
        sets: dict[str, dict[str, Any]] = {"now": {}}
        if method != "adamw":
            sets["now, length given"] = {"total_steps": steps}
        for defaults, options in sets.items():
            runs = [train(task, method, options, steps, seed) for seed in range(seeds)]
            scores = [run.score for run in runs]
            harness.record(
                "defaults",
                {"task": name, "method": method, "defaults": defaults},
                score=statistics.mean(scores),
                spread=statistics.stdev(scores) if seeds > 1 else 0.0,
                unit=task.unit,
                scores=scores,
                bytes_sent=runs[0].bytes_sent,
                last_bytes_sent=runs[0].last_bytes_sent,
                steps=steps,
                last_steps=LAST,
                world_size=WORLD_SIZE,
                command=f"python -m bench.network.defaults --seeds {seeds} --steps {steps}",
            )


def main() -> None:
    """Measure the tasks and methods of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tasks:
        measure(name, arguments.methods, arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
