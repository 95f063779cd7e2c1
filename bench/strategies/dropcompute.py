"""Compare DropCompute with plain gradient accumulation in virtual time.

    python -m bench.strategies.dropcompute [--sigmas X ...] [--seeds N ...] [--steps N]

Eight ranks accumulate up to 12 micro-batches in each step. The times of micro-batches are drawn
from a log-normal distribution, independently for each rank, step and micro-batch, and the same for
both methods; a third of a time is that of the forward pass. The ranks exchange gradients over links
of 1 Gbit/s with 0.1 ms of latency. A multilayer perceptron learns scikit-learn's handwritten
digits. DropCompute measures its steps 6 to 50, and then selects its threshold. Both methods train
on the same number of samples, so DropCompute takes more steps.

A recorded line has the speeds, which are samples per virtual second after step 50 divided by those
of plain accumulation, and the accuracies in percent after the last step. With small `sigma` there
is little to gain.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from bench import harness
from gcnzc.exchange import Algorithm, Group, Link, lockstep
from gcnzc.optim import DropCompute
from gcnzc.optim.compute_deadline import SimulatedClock

WORLD_SIZE, MICRO_BATCHES, SAMPLES = 8, 12, 4
CALIBRATION = (6, 50)
MEDIAN_S = 0.02  # of a micro-batch
FORWARD = 1 / 3  # fraction of the time of a micro-batch
SIGMAS = (0.2, 1.0)  # of the logarithm of a micro-batch's time
LINK = Link(bytes_per_s=125e6, delay_s=1e-4)
TRAINING_SAMPLES = 1000
LR = 2e-3


@dataclass
class Trained:
    """A simulated run: its time after the calibration, and its result."""

    optimizer: DropCompute
    samples_per_s: float
    """samples of all ranks per virtual second, in the steps after the calibration"""
    dropped: float
    """fraction of the micro-batches that was dropped in these steps"""
    steps: int
    accuracy: float
    """of the held-out samples, in percent"""


class Digits:
    """Handwritten digits, in an order that depends on a seed."""

    def __init__(self, seed: int) -> None:
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)
        self.y = self.y[order]
        self.seed = seed

    def loss(self, model: nn.Module, step: int, rank: int, number: int) -> Tensor:
        """Return the loss of a micro-batch, whose samples are drawn at random."""
        drawn = np.random.Philox(key=self.seed, counter=[step, rank, number, 0])
        rows = torch.from_numpy(np.random.Generator(drawn).integers(TRAINING_SAMPLES, size=SAMPLES))
        return functional.cross_entropy(model(self.x[rows]), self.y[rows])

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy of the held-out samples in percent."""
        with torch.no_grad():
            found = model(self.x[TRAINING_SAMPLES:]).argmax(dim=1)
        return 100 * float((found == self.y[TRAINING_SAMPLES:]).float().mean())


def micro_batch_s(sigma: float, seed: int, step: int, rank: int, number: int) -> float:
    """Return the virtual time of a micro-batch."""
    drawn = np.random.Philox(key=seed + 1000, counter=[step, rank, number, 0])
    return float(MEDIAN_S * np.random.Generator(drawn).lognormal(0.0, sigma))


def train_rank(
    optimizer: DropCompute, model: nn.Module, data: Digits, sigma: float, num_samples: int
) -> Algorithm[tuple[float, float, int]]:
    """Train one rank until all ranks have used so many samples.

    Returns:
        The virtual seconds and the samples of all ranks after the calibration, and the steps.
    """
    clock, rank = optimizer.deadline.clock, optimizer.group.rank
    assert isinstance(clock, SimulatedClock)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer.inner, lambda _: max(0.0, 1 - count(optimizer) / num_samples)
    )
    began_s = samples = 0.0
    step = 0
    while count(optimizer) < num_samples:
        optimizer.zero_grad()
        for number in optimizer.micro_batches(range(MICRO_BATCHES)):
            loss = data.loss(model, step, rank, number)
            taken_s = micro_batch_s(sigma, data.seed, step, rank, number)
            yield from clock.compute(FORWARD * taken_s)
            if optimizer.backward(loss):
                yield from clock.compute((1 - FORWARD) * taken_s)
        yield from optimizer.algorithm()
        schedule.step()
        step += 1
        if step == CALIBRATION[1]:
            began_s, samples = clock.time_s, count(optimizer)
    return clock.time_s - began_s, count(optimizer) - samples, step


def count(optimizer: DropCompute) -> float:
    """Return the number of samples that all ranks have used; the same on all ranks."""
    micro_batches = optimizer.steps * MICRO_BATCHES - optimizer.dropped_of_all
    return micro_batches * optimizer.group.world_size * SAMPLES


def train(threshold: str | None, sigma: float, seed: int, steps: int) -> Trained:
    """Train all ranks on the samples of `steps` whole steps."""
    data = Digits(seed)
    algorithms, models, optimizers = [], [], []
    for rank in range(WORLD_SIZE):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        inner = torch.optim.Adam(model.parameters(), lr=LR)
        options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "threshold": threshold}
        optimizer = DropCompute(
            inner,
            Group(rank, WORLD_SIZE),
            calibration=CALIBRATION,
            clock=SimulatedClock(),
            **options,
        )
        num_samples = steps * WORLD_SIZE * MICRO_BATCHES * SAMPLES
        algorithms.append(train_rank(optimizer, model, data, sigma, num_samples))
        models.append(model)
        optimizers.append(optimizer)
    results = lockstep(algorithms, LINK).results
    seconds, samples, taken = max(results)
    later = taken - CALIBRATION[1]
    dropped = 1 - samples / (later * WORLD_SIZE * MICRO_BATCHES * SAMPLES)
    accuracy = data.accuracy(models[0])
    return Trained(optimizers[0], samples / seconds, dropped, taken, accuracy)


def main() -> None:
    """Compare and record all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for sigma in given.sigmas:
        for seed in given.seeds:
            plain = train(None, sigma, seed, given.steps)
            found = train("auto", sigma, seed, given.steps)
            deadline = found.optimizer.deadline
            assert deadline.prediction is not None, "the run has more steps than the calibration"
            harness.record(
                "dropcompute",
                {
                    "ranks": WORLD_SIZE,
                    "micro_batches": MICRO_BATCHES,
                    "sigma": sigma,
                    "seed": seed,
                    "steps": given.steps,
                },
                threshold_s=deadline.threshold_s,
                predicted_speed=deadline.prediction.speed,
                measured_speed=found.samples_per_s / plain.samples_per_s,
                predicted_dropped=deadline.prediction.dropped,
                measured_dropped=found.dropped,
                calibrations=deadline.calibrations,
                steps_taken=found.steps,
                accuracy_percent=found.accuracy,
                plain_accuracy_percent=plain.accuracy,
            )


if __name__ == "__main__":
    main()
