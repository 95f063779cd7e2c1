"""Averages of the weights over the steps of a run (EMA) or over its last epochs (SWA).

The average is evaluated, and stored as the best model, instead of the weights that are trained. The
running statistics of batch normalization are averaged as well, over the ends of epochs, where they
are equal on all workers.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Algorithm
from gcnzc.exchange.sync import dense_buffers, synchronize_buffers
from gcnzc.train.config import TrainingOptions


class WeightAverage:
    """The average of the weights of a model; see `torch.optim.swa_utils.AveragedModel`.

    Args:
        model: the model that is trained.
        decay: factor of the previous average in each step (EMA); None for SWA.
        begin: number of epochs before those that SWA averages.
    """

    def __init__(self, model: nn.Module, decay: float | None, begin: int) -> None:
        # imported here, because most runs do not need it
        from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

        self.model, self.decay, self.begin = model, decay, begin
        average = get_swa_multi_avg_fn() if decay is None else self._decay_weights
        self.averaged = AveragedModel(model, multi_avg_fn=average)
        # of the floating-point buffers, by name; empty before the first end of an epoch
        self.buffers: dict[str, Tensor] = {}
        self.steps = 0  # steps since the buffers were averaged
        self.epochs = 0  # the last epoch added to the averages, counted from 1; 0 if there is none

    @property
    def updates(self) -> int:
        """The number of averaged weights; 0 before the average has begun."""
        return int(self.averaged.n_averaged)

    @torch.no_grad()
    def _decay_weights(
        self, averaged: Sequence[Tensor], weights: Sequence[Tensor], num_averaged: Tensor | int
    ) -> None:
        """Add weights to the exponential moving average, as `AveragedModel` calls it."""
        assert self.decay is not None, "SWA has another function"
        share = 1 - ema_decay(self.decay, int(num_averaged))
        for values, new in zip(averaged, weights, strict=True):
            values.lerp_(new.to(values.device), share)

    def end_step(self) -> None:
        """Add the weights after a step to the average (EMA)."""
        if self.decay is not None:
            self.averaged.update_parameters(self.model)
            self.steps += 1

    def end_epoch(self, epoch: int) -> None:
        """Add the buffers, and for SWA the weights, after an epoch to the average.

        Args:
            epoch: counted from 0; an epoch that was added before is not added again. The buffers of
                the model are equal on all workers.
        """
        decay, begin = self.decay, self.begin
        if epoch < self.epochs:
            return
        if decay is None and self.epochs - self.updates + 1 <= begin:
            # a run that resumes with more --epochs averages anew; the average has the last
            # `updates` epochs
            self.averaged.n_averaged.zero_()
            self.buffers = {}
        if decay is None and epoch + 1 <= begin:
            return
        self.epochs = epoch + 1
        if decay is None:
            share = 1 / (self.updates + 1)
            self.averaged.update_parameters(self.model)
        else:
            added = range(self.updates - self.steps, self.updates)
            share = 1 - math.prod(ema_decay(decay, number) for number in added)
        self.steps = 0
        for name, value in _floating_buffers(self.model).items():
            averaged = self.buffers.setdefault(name, value.clone())
            averaged.lerp_(value, share)

    def build_evaluated_model(self) -> Algorithm[nn.Module]:
        """Build the model that is evaluated: the mean of the averages of all workers.

        The averages differ after local steps. Before the average has begun, the model that is
        trained is returned. A collective operation.
        """
        if not self.updates:
            return self.model
        model: nn.Module = copy.deepcopy(self.averaged.module)
        parameters = nn.Module()
        for number, parameter in enumerate(model.parameters()):
            parameters.register_buffer(f"parameter{number}", parameter.detach())
        yield from synchronize_buffers(parameters)
        source = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(self.buffers.get(name, source[name]))
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their position, for a checkpoint."""
        return {
            "parameters": [each.detach() for each in self.averaged.module.parameters()],
            "updates": self.updates,
            "buffers": self.buffers,
            "steps": self.steps,
            "epochs": self.epochs,
        }

    @torch.no_grad()
    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the mean of the states of several workers, or the state of one.

        Raises:
            KeyError, ValueError, RuntimeError: a state is not of this model.
        """
        first = states[0]
        parameters = list(self.averaged.module.parameters())
        own = (state["parameters"] for state in states)
        for averaged, value, *others in zip(parameters, *own, strict=True):
            averaged.copy_(value.view(averaged.shape))
            # differences, because the rounded mean of equal values may differ from them
            for other in others:
                averaged += (other - value).to(averaged.device) / len(states)
        self.averaged.n_averaged.fill_(first["updates"])
        here = _floating_buffers(self.model)
        self.buffers = {
            name: value.to(here[name].device, copy=True) for name, value in first["buffers"].items()
        }
        self.steps, self.epochs = first["steps"], first["epochs"]


def ema_decay(decay: float, num_averaged: int) -> float:
    """Return the factor of the previous average in a step.

    It begins at a small value, (1 + n) / (10 + n) for n averaged weights, so that the average of a
    short run is not mainly that of its first weights.
    """
    return min(decay, (1 + num_averaged) / (10 + num_averaged))


def ema(model: nn.Module, epochs: int, *, decay: float = 0.99) -> WeightAverage:
    """The exponential moving average over the steps.

    Args:
        decay: factor of the previous average in each step, smaller in the first ones; the average
            is over about 1 / (1 - decay) steps.
    """
    return WeightAverage(model, decay, 0)


def swa(model: nn.Module, epochs: int, *, start: float = 0.75) -> WeightAverage:
    """The mean over the ends of the last epochs: stochastic weight averaging.

    Args:
        start: fraction of --epochs after which the weights are averaged.
    """
    return WeightAverage(model, None, _epochs_before(start, epochs))


def build_average(training: TrainingOptions, model: nn.Module) -> WeightAverage | None:
    """Return the average that --average selects; None if there is none."""
    chosen = training.average
    if chosen.name == "none":
        return None
    average: WeightAverage = chosen.load()(model, training.epochs, **chosen.given)
    return average


def format_average_warning(
    training: TrainingOptions, best: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> str:
    """Return a warning if the best model of a run does not use averaged weights; "" otherwise.

    Args:
        training: options of the run.
        best: epoch of the best model, counted from 0; empty if there is none.
        lines: lines of the record.
    """
    # without an average, the record does not count those that are averaged
    if not best or lines[best["epoch"]].get("averaged", 1):
        return ""
    chosen, first, last = training.average, 1, lines[-1]["epoch"] + 1
    if chosen.name == "swa":
        first = _epochs_before(chosen["start"], training.epochs) + 1
    why, remedy = "no average is better", "use a smaller start"
    if last < first:
        why, remedy = f"the run ended after epoch {last}", f"{remedy} or a larger --patience"
    return (
        f"--average {chosen.name} averages the weights from epoch {first} on, and {why}: the "
        f"best model has the weights of epoch {best['epoch'] + 1}; {remedy}"
    )


def _epochs_before(start: float, epochs: int) -> int:
    """Return the number of epochs before those that SWA averages."""
    # 0.29 * 100 is slightly less than 29
    return math.floor(start * epochs + 1e-9)


def _floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach() for name, value in dense_buffers(model) if value.is_floating_point()
    }
