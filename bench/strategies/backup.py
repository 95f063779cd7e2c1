"""Measure dynamic backup workers in virtual time: the time of a round, and the loss.

    python -m bench.strategies.backup [--seeds 3] [--steps 200]

Eight ranks train a small classifier on data of different distributions, over simulated links of
100 Mbit/s with 1 ms of latency and a store that answers in 1 ms. A step takes 95 to 105 ms; with
stragglers, each step of each rank takes 5 times as long with a probability of 20 %. Methods with
the same seed have the same step times, minibatches and initial parameters.

`backup` closes a round at the first pending edge, and `full` waits for all ranks and mixes over the
same graph. The mean round time is that of the rounds up to the end of the first rank, and the mean
step time that of all steps of all ranks. `loss` is that of the mean of all parameters when the
first rank of `backup` has taken all its steps; `full` is evaluated at the same virtual time.
"""

import argparse
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench import harness
from gcnzc.exchange import Algorithm, Compute, Group, Link, Now, lockstep
from gcnzc.optim import BackupWorkers

WORLD_SIZE = 8
LINK, STORE_S = Link(bytes_per_s=12.5e6, delay_s=0.001), 0.001
STEP_S, JITTER, SLOW_FACTOR, SLOW_CHANCE = 0.1, 0.05, 5.0, 0.2
FEATURES, HIDDEN, CLASSES = 128, 64, 16
BATCH, SAMPLES, LR = 32, 512, 0.1
GRACE = 0.1
GRAPHS = ("ring", "4-regular", "complete")


@dataclass
class Run:
    """What a rank has done."""

    model: nn.Module
    optimizer: BackupWorkers
    ends: list[float] = field(default_factory=list)
    """the virtual time of the end of each step"""
    vectors: list[Tensor] = field(default_factory=list)
    """the parameters after each step"""
    rounds: dict[int, float] = field(default_factory=dict)
    """by round that this rank was a member of, the virtual time of its end"""


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """Return samples (W, n, features) and classes (W, n); each rank has its own distribution."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    # a rank has mostly samples of some classes, as a part of a graph has
    weights = torch.rand(WORLD_SIZE, CLASSES, generator=generator) ** 4
    classes = torch.multinomial(weights, SAMPLES, replacement=True, generator=generator)
    noise = torch.randn(WORLD_SIZE, SAMPLES, FEATURES, generator=generator)
    return centers[classes] * 0.5 + noise * 1.5, classes


def make_model(seed: int) -> nn.Sequential:
    """Return the classifier; parameters depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            bound = FEATURES**-0.5
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 * bound - bound)
    return model


def train(run: Run, x: Tensor, y: Tensor, times: list[float], seed: int) -> Algorithm[None]:
    """Take the steps of one rank, on minibatches of its samples."""
    generator = torch.Generator().manual_seed(seed)
    yield from run.optimizer.broadcast_model_algorithm()
    for seconds in times:
        chosen = torch.randint(SAMPLES, (BATCH,), generator=generator)
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.model(x[chosen]), y[chosen]).backward()
        yield Compute(seconds)
        yield from run.optimizer.algorithm()
        now = yield Now()
        run.ends.append(now)
        run.vectors.append(run.optimizer.parameters)
        run.rounds[run.optimizer.last.round] = now
    yield from run.optimizer.finalize_algorithm()


def simulate(graph: str, grace: float, seed: int, times: list[list[float]]) -> list[Run]:
    """Train on all ranks."""
    x, y = make_data(seed)
    runs = []
    for rank in range(WORLD_SIZE):
        model = make_model(seed)
        inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0)
        group = Group(rank, WORLD_SIZE)
        runs.append(Run(model, BackupWorkers(inner, group, topology=graph, grace=grace)))
    steps = [
        train(run, x[rank], y[rank], times[rank], 1000 * seed + rank)
        for rank, run in enumerate(runs)
    ]
    lockstep(steps, LINK, store_s=STORE_S)
    return runs


def loss_at(runs: list[Run], seed: int, at_s: float) -> float:
    """Return the loss on all samples of the mean of the parameters that ranks have at a time."""
    x, y = make_data(seed)
    vectors = []
    for run in runs:
        count = sum(end <= at_s for end in run.ends)
        vectors.append(run.vectors[count - 1] if count else None)
    known = [each for each in vectors if each is not None]
    model = make_model(seed)
    if len(known) < len(runs):
        return math.nan
    nn.utils.vector_to_parameters(torch.stack(known).mean(0), model.parameters())
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()))


def mean_round_s(runs: list[Run]) -> float:
    """Return the mean time of a round up to the end of the first rank."""
    end_s = min(run.ends[-1] for run in runs)
    ends: dict[int, float] = {}
    for run in runs:
        for number, at_s in run.rounds.items():
            ends[number] = min(at_s, ends.get(number, math.inf))
    before = [at_s for at_s in ends.values() if at_s <= end_s]
    return max(before) / len(before)


def measure(seed: int, steps: int, chance: float) -> dict[tuple[str, str], dict[str, float]]:
    """Return the results of all methods and graphs, with one seed."""
    choose = np.random.default_rng(seed)
    is_slow = choose.random((WORLD_SIZE, steps)) < chance
    steps_s = STEP_S * choose.uniform(1 - JITTER, 1 + JITTER, is_slow.shape)
    times = (np.where(is_slow, SLOW_FACTOR, 1.0) * steps_s).tolist()
    found = {}
    for graph in GRAPHS:
        graces = {"backup": GRACE, "full": math.inf}
        runs = {method: simulate(graph, each, seed, times) for method, each in graces.items()}
        at_s = min(run.ends[-1] for run in runs["backup"])
        for method, own in runs.items():
            result = {
                "round_s": mean_round_s(own),
                "step_s": statistics.mean(run.ends[-1] / steps for run in own),
                "run_s": max(run.ends[-1] for run in own),
                "loss": loss_at(own, seed, at_s),
            }
            found[graph, method] = result
    return found


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for chance in (SLOW_CHANCE, 0.0):
        seeds = [measure(seed, asked.steps, chance) for seed in range(asked.seeds)]
        for graph, method in seeds[0]:
            results = [each[graph, method] for each in seeds]
            full = [each[graph, "full"] for each in seeds]
            means: dict[str, Any] = {
                name: statistics.mean(each[name] for each in results) for name in results[0]
            }
            for name in ("round_s", "step_s", "run_s"):
                ratios = [a[name] / b[name] for a, b in zip(results, full, strict=True)]
                means[f"{name[:-2]}_of_full"] = statistics.mean(ratios)
                means[f"{name[:-2]}_of_full_each"] = ratios
            means["losses"] = [each["loss"] for each in results]
            harness.record(
                "backup_workers",
                {"graph": graph, "method": method, "ranks": WORLD_SIZE, "slow_chance": chance}
                | {"grace": GRACE},
                **means,
                steps=asked.steps,
                seeds=asked.seeds,
                slow_factor=SLOW_FACTOR,
            )


if __name__ == "__main__":
    main()
