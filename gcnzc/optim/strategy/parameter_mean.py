"""Updates that set the parameters of all ranks to their mean."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.recipe import Update
from gcnzc.optim.strategy.strategy import Strategy


class ParameterMean(Update):
    """Exchange the parameters, and set them to their mean."""

    def read(self, out: Tensor) -> None:
        """See `Update`."""
        self.strategy.flat_params.read_parameters(out)

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        self.strategy.set_parameters(mean)
        return
        yield


class DifferenceMean(Update):
    """Exchange the differences from the last mean, and subtract their mean from it.

    The differences are smaller than the parameters, so a compression error is smaller too.
    """

    anchor: Tensor
    """(n,): the parameters after the last exchange, equal on all ranks"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        # no elements before `initialize`
        self.anchor = strategy.flat_params.zeros()[:0]

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        self.anchor = self.strategy.vector()

    initialize = reinitialize

    def read(self, out: Tensor) -> None:
        """See `Update`: the anchor minus the parameters."""
        self.strategy.flat_params.read_parameters(out)
        difference = out[: self.num_elements]
        torch.sub(self.anchor, difference, out=difference)

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        self.strategy.set_parameters(self.anchor.sub_(mean))
        return
        yield

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        return {"anchor": self.anchor}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        return {"anchor": SavedTensor((self.strategy.flat_params.num_elements,))}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.anchor = self.strategy.vector(shared["anchor"])
