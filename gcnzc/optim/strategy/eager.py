"""Eager updates: a rank applies a fraction of its own difference before the mean is known.

    x_i <- s - e d_i                                 start of a round on rank i
    x_i <- x_i - InnerOpt(gradient of rank i)        local steps
    d_i <- the decrease of x_i in these steps        exchanged during the next round

s is the common start, which an outer step computes from the means of earlier rounds. When the mean
of d_i is applied, it replaces e d_i. Kale et al. (2025, https://arxiv.org/abs/2502.12996) apply
eager updates to DiLoCo; the text was not available, so details may differ.

Notation: n elements, e the weight.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.strategy.clipped_step import ClippedStep
from gcnzc.optim.strategy.finite_mean import Reduction
from gcnzc.optim.strategy.recipe import Update
from gcnzc.optim.strategy.strategy import Strategy


class Eager(Update):
    """Start each round from the common start minus a fraction of this rank's last difference.

    The exchange must overlap with the local steps (`DelayedRound`).

    Args:
        outer: computes the common start.
        weight: e, in (0, 1).
    """

    own: Tensor
    """(n,): this rank's parameters at the start of the current round"""

    def __init__(self, outer: ClippedStep, weight: float) -> None:
        self.outer, self.weight = outer, weight

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.outer.attach(strategy)
        # no elements before `initialize`
        self.own = strategy.flat_params.zeros()[:0]

    def describe(self) -> str:
        """See `Update`."""
        return f"{self.outer.describe()}, eager={self.weight}"

    def initialize(self) -> None:
        """See `RecipePart`."""
        self.outer.initialize()
        self.own = self.strategy.vector()

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        self.outer.reinitialize()
        self.own = self.strategy.vector()

    def read(self, out: Tensor) -> None:
        """See `Update`: the difference of this rank's start and its parameters."""
        values = self.strategy.flat_params.read_parameters(out)[: self.num_elements]
        torch.sub(self.own, values, out=values)

    def before_start(self, values: Tensor) -> None:
        """See `Update`: apply a fraction of the difference to the common start."""
        self.outer.before_start(values)
        flat_params = self.strategy.flat_params
        flat_params.read_parameters(self.own).sub_(values[: self.num_elements], alpha=self.weight)
        flat_params.write_parameters(self.own)
        self.strategy.is_in_sync = False

    def compute(self, reduction: Reduction, out: Tensor) -> Algorithm[Reduction]:
        """See `Update`."""
        return (yield from self.outer.compute(reduction, out))

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        yield from self.outer.apply(mean)

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`."""
        return self.outer.state_bytes + self.own.nbytes

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        return self.outer.shared_state()

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"own": self.own}

    def shard_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return self.outer.shard_state()

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.outer.check_state(shared, local, shards)

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.outer.load(shared, local, shards)
        self.own = self.strategy.vector(local["own"])

    def load_alone(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.outer.move_to_next(local["own"], shared)
