"""The learning rate of each step: warm-up and schedule."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gcnzc.loader.seeds import Shares
from gcnzc.train.config import TrainConfig


class Schedule:
    """Sets the learning rate of an optimizer before each of its steps.

    The learning rate depends only on the position in the run, which is stored in checkpoints. If a
    run is resumed with another number of workers, which changes the number of steps of an epoch, it
    continues from the same position within the epoch.

    Args:
        config: options of the run.
        optimizer: optimizer, whose current learning rates are used at the end of the warm-up.
    """

    def __init__(self, config: TrainConfig, optimizer: Optimizer) -> None:
        self.config, self.optimizer = config, optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def begin_epoch(self, epoch: int, shares: Shares, minibatch: int) -> None:
        """Set the learning rate of the first step of an epoch, or of the rest of one.

        Args:
            epoch: counted from 0.
            shares: the seeds of each minibatch.
            minibatch: the first minibatch, counted from the first one of `shares`.
        """
        step_seeds = shares.world_size * shares.batch_size * self.config.accumulate
        steps = math.ceil(shares.num_seeds / step_seeds)
        position = epoch * steps + math.ceil(shares.step_start(minibatch) / step_seeds)
        self._steps = steps
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.setdefault("initial_lr", rate)
        self._scheduler = LambdaLR(
            self.optimizer, lambda now: factor(self.config, now, steps), last_epoch=position - 1
        )

    def step(self) -> None:
        """Set the learning rate of the next step; call it after each step of the optimizer."""
        self._scheduler.step()

    def last_lr(self, epoch: int) -> float:
        """Return the learning rate of the last step of an epoch, of the first parameter group."""
        rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return rate * factor(self.config, (epoch + 1) * self._steps - 1, self._steps)


def build_schedule(config: TrainConfig, optimizer: Optimizer) -> Schedule | None:
    """Return the schedule that the options select; None if the learning rate is constant."""
    if config.schedule == "constant" and not config.warmup_epochs:
        return None
    return Schedule(config, optimizer)


def factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the factor by which --lr is multiplied in a step.

    In the k-th of W warm-up steps, the factor is k / W. After them, "cosine" and "linear" equal
    torch's `CosineAnnealingLR` and `LinearLR` to 0 over the remaining steps. "step" equals torch's
    `StepLR` from the start of the run.

    Args:
        config: options of the run.
        step: counted from 0, over all epochs.
        steps_per_epoch: the number of steps of an epoch.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "step":
        return config.step_factor ** (step // max(1, round(config.step_epochs * steps_per_epoch)))
    progress = min(1.0, (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup))
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress if config.schedule == "linear" else 1.0
