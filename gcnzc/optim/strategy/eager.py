"""Eager updates: a rank applies a fraction of its own difference before the mean is known.

    x_i <- s - e d_i                                 start of a round on rank i
    x_i <- x_i - InnerOpt(gradient of rank i)        local steps
    d_i <- the decrease of x_i in these steps        exchanged during the next round

s is the common start, which the update computes from the means of earlier rounds. When the mean of
d_i is applied, it replaces e d_i. Kale et al. (2025, https://arxiv.org/abs/2502.12996) apply eager
updates to DiLoCo; the text was not available, so details may differ.

Notation: n elements, e the weight.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.all_ranks import Collective
from gcnzc.optim.strategy.delayed import DelayedRound
from gcnzc.optim.strategy.strategy import Strategy


class EagerRound(DelayedRound):
    """Start each round from the common start minus a fraction of this rank's last difference.

    It exchanges the differences itself, so `Update.read` is not called.

    Args:
        exchange: computes the means.
        weight: e, in (0, 1).
    """

    own: Tensor
    """(n,): this rank's parameters at the start of the current round"""

    def __init__(self, exchange: Collective, weight: float) -> None:
        super().__init__(exchange)
        self.weight = weight

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        # no elements before `initialize`
        self.own = strategy.flat_params.zeros()[:0]

    def describe(self) -> str:
        """See `BaseExchange`."""
        return f"{super().describe()}, eager={self.weight}"

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        super().reinitialize()
        self.own = self.strategy.vector()

    initialize = reinitialize

    def read(self, out: Tensor) -> None:
        """See `DelayedRound`: this rank's start of the round minus the parameters."""
        values = self.strategy.flat_params.read_parameters(out)[: len(self.own)]
        torch.sub(self.own, values, out=values)

    def begin_round(self, values: Tensor) -> None:
        """See `DelayedRound`: apply a fraction of the difference to the common start."""
        flat_params = self.strategy.flat_params
        flat_params.read_parameters(self.own).sub_(values[: len(self.own)], alpha=self.weight)
        flat_params.write_parameters(self.own)
        self.strategy.is_in_sync = False

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`."""
        return super().state_bytes + self.own.nbytes

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"own": self.own}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        own = SavedTensor((self.source.num_elements,))
        return {**super().saved_tensors(snapshot), "own": own}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        super().load(shared, local, shards)
        self.own = self.strategy.vector(local["own"])
