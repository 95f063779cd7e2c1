"""Updates that take a step of an outer optimizer, whose gradient is the mean difference.

    d   <- mean_i (a - x_i)                          a: the anchor, where all ranks started
    b   <- m b + d
    a   <- a - lr (d + m b)                          Nesterov momentum; lr b without it
    x_i <- a

Notation: W ranks, n elements, m elements of any of these vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.flat_parameters import tiles
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.parameter_mean import DifferenceMean
from gcnzc.optim.strategy.recipe import BaseUpdate
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_at_least_zero, check_fraction
from gcnzc.system.arguments import check_flag


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer: SGD with momentum, as in torch, on one flat vector.

    Raises:
        ValueError: `lr` is negative, or `momentum` not in [0, 1).
        TypeError: `nesterov` is not a flag.
    """

    lr: float
    momentum: float
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_at_least_zero("outer_lr", self.lr)
        check_fraction("outer_momentum", self.momentum)
        check_flag("nesterov", self.nesterov)

    @torch.no_grad()
    def step(self, anchor: Tensor, buffer: Tensor, difference: Tensor) -> None:
        """Update the anchor and the momentum in place.

        Args:
            anchor: (m,), the parameters at the last outer step.
            buffer: (m,), the momentum.
            difference: (m,), the anchor minus the mean of the ranks' parameters; overwritten.
        """
        for here in tiles(0, len(anchor), anchor.device):
            step = difference[here]
            if self.momentum:
                moved = buffer[here].mul_(self.momentum).add_(step)
                step = step.add_(moved, alpha=self.momentum) if self.nesterov else moved
            anchor[here].add_(step, alpha=-self.lr)

    def describe(self) -> str:
        """Return the options as text."""
        return f"outer_lr={self.lr}, outer_momentum={self.momentum}, nesterov={self.nesterov}"


class OuterState(BaseUpdate):
    """The anchor and the outer momentum of an outer optimizer, equal on all ranks."""

    anchor: Tensor
    """(n,): the outer optimizer's parameters"""
    momentum: Tensor
    """(n,), in the same order: the outer momentum"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        # no elements before `initialize`
        self.anchor = self.momentum = strategy.flat_params.zeros()[:0]

    def initialize(self) -> None:
        """See `RecipePart`."""
        self.reinitialize()
        self.momentum = torch.zeros_like(self.anchor)

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        return {"anchor": self.anchor, "momentum": self.momentum}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        vector = SavedTensor((self.strategy.flat_params.num_elements,))
        return {"anchor": vector, "momentum": vector}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.anchor = self.strategy.vector(shared["anchor"])
        self.momentum = self.strategy.vector(shared["momentum"])


class OuterStep(OuterState, DifferenceMean):
    """Exchange the differences from the anchor, and take an outer step with their mean.

    Args:
        outer: the outer optimizer.
    """

    def __init__(self, outer: OuterSGD) -> None:
        self.outer = outer

    def describe(self) -> str:
        """See `Update`."""
        return self.outer.describe()

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        self.outer.step(self.anchor, self.momentum, mean)
        self.strategy.set_parameters(self.anchor)
        return
        yield
