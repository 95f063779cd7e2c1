"""The learning rate of each step: warm-up and schedule."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gcnzc.loader.seeds import Shares
from gcnzc.train.config import TrainingOptions


def constant(progress: float, now: int, epoch_steps: int) -> float:
    """Keep --lr."""
    return 1.0


def cosine(progress: float, now: int, epoch_steps: int) -> float:
    """Decay to 0 at the end of the run along a cosine, like torch's `CosineAnnealingLR`."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float, now: int, epoch_steps: int) -> float:
    """Decay linearly to 0 at the end of the run."""
    return 1 - progress


def step(
    progress: float, now: int, epoch_steps: int, *, epochs: float = 10.0, factor: float = 0.1
) -> float:
    """Multiply by a factor at regular intervals, like torch's `StepLR`.

    Args:
        epochs: epochs between two reductions of the learning rate.
        factor: by which each reduction multiplies it.
    """
    return factor ** (now // max(1, round(epochs * epoch_steps)))


class Schedule:
    """Sets the learning rate of an optimizer before each of its steps.

    In the k-th of W warm-up steps, the learning rate is multiplied by k / W. It depends only on the
    position in the run, which is stored in checkpoints. If a run is resumed with another number of
    workers, which changes the number of steps of an epoch, it continues from the same position
    within the epoch.

    Args:
        training: options of the run.
        optimizer: whose current learning rates are used at the end of the warm-up.
    """

    def __init__(self, training: TrainingOptions, optimizer: Optimizer) -> None:
        self.training, self.optimizer = training, optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        chosen = training.schedule
        self._factor, self._options = chosen.load(), chosen.given

    def begin_epoch(self, epoch: int, shares: Shares, minibatch: int) -> None:
        """Set the learning rate of the first step of an epoch, or of the rest of one.

        Args:
            epoch: counted from 0.
            shares: the seeds of each minibatch.
            minibatch: the first minibatch, counted from the first one of `shares`.
        """
        step_seeds = shares.world_size * shares.batch_size * self.training.accumulate
        self._steps = math.ceil(shares.num_seeds / step_seeds)
        position = epoch * self._steps + math.ceil(shares.step_start(minibatch) / step_seeds)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.setdefault("initial_lr", rate)
        self._scheduler = LambdaLR(
            self.optimizer, lambda now: self.factor(now, self._steps), last_epoch=position - 1
        )

    def step(self) -> None:
        """Set the learning rate of the next step; call it after each step of the optimizer."""
        self._scheduler.step()

    def last_lr(self, epoch: int) -> float:
        """Return the learning rate of the last step of an epoch, of the first parameter group."""
        rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return rate * self.factor((epoch + 1) * self._steps - 1, self._steps)

    def factor(self, now: int, epoch_steps: int) -> float:
        """Return the factor by which --lr is multiplied in a step, counted over all epochs."""
        training = self.training
        warmup = round(training.warmup_epochs * epoch_steps)
        if now < warmup:
            return (now + 1) / warmup
        progress = min(1.0, (now - warmup) / max(1, training.epochs * epoch_steps - warmup))
        return float(self._factor(progress, now, epoch_steps, **self._options))


def build_schedule(training: TrainingOptions, optimizer: Optimizer) -> Schedule | None:
    """Return the schedule that the options select; None if the learning rate is constant."""
    if training.schedule.name == "constant" and not training.warmup_epochs:
        return None
    return Schedule(training, optimizer)
