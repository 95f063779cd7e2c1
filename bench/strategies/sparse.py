"""Measure bytes, exchange time and accuracy of sparse compressions.

    python -m bench.strategies.sparse [--seeds 3] [--steps 100] [--methods METHOD ...]

Four ranks train a multilayer perceptron of a million parameters on scikit-learn's digits, in one
process (`gcnzc.exchange.lockstep`). Each rank has a quarter of the training images, at random. The
gradient methods use SGD with momentum; `diloco` and `sparseloco` take local steps of AdamW and
exchange every 10 steps. All have the same batches and numbers of steps.

A recorded line is a method, with the mean and the standard deviation of the test accuracy over the
seeds; the bytes that a rank sends in an exchange, and the time that the exchange takes on links of
50 Mbit/s, by the virtual clock and without the time of the compression; and the bytes of the
uncompressed method divided by its own.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bench import harness
from gcnzc.compress import Threshold, TopK
from gcnzc.exchange import Algorithm, Group, Link, lockstep
from gcnzc.optim import Averaged, DiLoCo, DistributedOptimizer, SparseLoCo

RANKS, BATCH, WIDTH, LOCAL_STEPS = 4, 32, 1000, 10
LINK = Link(bytes_per_s=50e6 / 8)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the gradient methods."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer of the methods with local steps."""
    return torch.optim.AdamW(model.parameters(), lr=0.001)


@dataclass(frozen=True)
class Method:
    """A method, and the one without compression that it is compared with."""

    inner: Callable[[nn.Module], torch.optim.Optimizer]
    wrapper: Callable[..., DistributedOptimizer]
    baseline: str
    interval: int = 1
    """steps from one exchange to the next"""


local = partial(DiLoCo, local_steps=LOCAL_STEPS)
METHODS = {
    "dense": Method(sgd, Averaged, "dense"),
    "topk 0.01": Method(sgd, partial(Averaged, compress=TopK(0.01)), "dense"),
    "topk 0.01 per layer": Method(sgd, partial(Averaged, compress=TopK(0.01, "layer")), "dense"),
    "threshold 0.01": Method(sgd, partial(Averaged, compress=Threshold(0.01)), "dense"),
    "diloco": Method(adamw, local, "diloco", LOCAL_STEPS),
    "sparseloco": Method(
        adamw, partial(SparseLoCo, local_steps=LOCAL_STEPS), "diloco", LOCAL_STEPS
    ),
}


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    accuracy: float
    bytes_per_exchange: float
    seconds_per_exchange: float


def main() -> None:
    """Measure all methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    if missing := {METHODS[name].baseline for name in arguments.methods} - {*arguments.methods}:
        parser.error(f"--methods also needs the uncompressed {', '.join(missing)}")
    torch.set_num_threads(1)
    sent: dict[str, float] = {}
    for name in arguments.methods:
        method = METHODS[name]
        runs = [_train(method, seed, arguments.steps) for seed in range(arguments.seeds)]
        accuracies = [run.accuracy for run in runs]
        sent[name] = statistics.mean(run.bytes_per_exchange for run in runs)
        harness.record(
            "sparse",
            {"method": name, "ranks": RANKS, "mbit_per_s": 50, "parameters": _count_parameters()},
            steps=arguments.steps,
            seeds=len(runs),
            accuracy=statistics.mean(accuracies),
            accuracy_std=statistics.stdev(accuracies) if len(runs) > 1 else 0.0,
            bytes_per_exchange=sent[name],
            exchange_s=statistics.mean(run.seconds_per_exchange for run in runs),
            steps_per_exchange=method.interval,
            times_fewer_bytes=sent[method.baseline] / sent[name],
        )


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, 10),
    )


def _count_parameters() -> int:
    return sum(parameter.numel() for parameter in _model(0).parameters())


def _train(method: Method, seed: int, steps: int) -> Run:
    """Train the ranks of a method."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    rows, classes = (
        torch.tensor(images, dtype=torch.float32)[order] / 16,
        torch.tensor(labels)[order],
    )
    num_test = len(rows) // 5
    models = [_model(seed) for _ in range(RANKS)]
    optimizers = [
        method.wrapper(method.inner(model), Group(rank, RANKS)) for rank, model in enumerate(models)
    ]
    # the broadcast of the model is not counted
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    shards = zip(rows[num_test:].chunk(RANKS), classes[num_test:].chunk(RANKS), strict=True)
    outcome = lockstep(
        [
            _steps(model, optimizer, *shard, seed, steps)
            for model, optimizer, shard in zip(models, optimizers, shards, strict=True)
        ],
        LINK,
    )
    with torch.no_grad():
        is_right = models[0](rows[:num_test]).argmax(dim=1) == classes[:num_test]
    exchanges = steps // method.interval
    sent = statistics.mean(ledger.bytes_sent for ledger in outcome.ledgers)
    return Run(float(is_right.double().mean()), sent / exchanges, max(outcome.seconds) / exchanges)


def _steps(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    rows: Tensor,
    classes: Tensor,
    seed: int,
    steps: int,
) -> Algorithm[None]:
    """Train one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + optimizer.group.rank)
    for _ in range(steps):
        batch = torch.randint(len(rows), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows[batch]), classes[batch]).backward()
        yield from optimizer.algorithm()


if __name__ == "__main__":
    main()
