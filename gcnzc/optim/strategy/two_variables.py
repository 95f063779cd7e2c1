"""The update of A2CiD2: parameters x and a second vector x~ of each rank, and their events.

    mixing:    e = exp(-2 eta t);  (x, x~) <- (x + c (x~ - x), x~ - c (x~ - x)),  c = (1 - e) / 2
    gradient:  x' = InnerOpt(x, g);  (x, x~) <- (x', x~ + (x' - x))
    exchange:  d = x_i - x_j;  (x_i, x~_i) <- (x_i - d / 2, x~_i - alpha~ d);  symmetric for j

Mixing solves the differential equation of x and x~ for a time t, in units of a step. It preserves
x + x~, and commutes with a gradient event. An exchange preserves the sums over both ranks.

Notation: n elements of the flat parameter vector.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.exchange.topology import Edge
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.flat_parameters import tiles
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.gossip_graph import NO_MOMENTUM, compute_momentum
from gcnzc.optim.strategy.recipe import Update
from gcnzc.optim.strategy.strategy import Strategy


class TwoVariables(Update):
    """Exchange the parameters x in pairs; see `a2cid2`. Without momentum there is no x~.

    The events change a copy of the parameters, which `write` writes to the parameters.

    Args:
        find_rates: returns the exchanges per step of each edge, for a number of ranks.
        eta: see `compute_momentum`.
    """

    x: Tensor
    """(n,): the parameters, from `observe` to `write`"""
    second: Tensor
    """(n,): x~; no elements without momentum"""

    def __init__(
        self, find_rates: Callable[[int], Mapping[Edge, float]], eta: float | None
    ) -> None:
        self.find_rates, self.eta = find_rates, eta
        self.momentum = NO_MOMENTUM

    def describe(self) -> str:
        """See `Update`."""
        return "" if self.eta is None else f"eta={self.eta}"

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        world_size = strategy.group.world_size
        self.momentum = compute_momentum(world_size, self.find_rates(world_size), self.eta)
        # no elements before `initialize`
        self.x = self.second = strategy.flat_params.zeros()[:0]

    @property
    def has_momentum(self) -> bool:
        """Whether there is an x~."""
        return self.momentum.eta > 0

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        self.x = self.strategy.vector()
        self.second = self.x.clone() if self.has_momentum else self.x[:0]

    initialize = reinitialize

    def observe(self) -> None:
        """Read the parameters: those before a local step, or before exchanges without one."""
        self.strategy.flat_params.read_parameters(self.x)

    @torch.no_grad()
    def apply_gradient(self) -> None:
        """Read the parameters after the local step: the gradient event."""
        flat_params = self.strategy.flat_params
        after = flat_params.read_parameters(flat_params.scratch())
        if self.has_momentum:
            for here in tiles(0, len(self.x), self.x.device):
                self.second[here].add_(after[here] - self.x[here])
        self.x.copy_(after)

    @torch.no_grad()
    def mix(self, time: float) -> None:
        """Mix x and x~ for a time in units of a step."""
        if not self.has_momentum or time <= 0:
            return
        share = -math.expm1(-2 * self.momentum.eta * time) / 2
        for here in tiles(0, len(self.x), self.x.device):
            moved = (self.second[here] - self.x[here]).mul_(share)
            self.x[here].add_(moved)
            self.second[here].sub_(moved)

    @torch.no_grad()
    def exchange(self, own: Tensor, other: Tensor) -> None:
        """Apply an exchange with another rank.

        Args:
            own: (n,), the parameters of this rank that the other rank has received: the current
                ones, or older ones if the exchange is overlapped.
            other: (n,), the parameters of the other rank in the same exchange.
        """
        for here in tiles(0, len(self.x), self.x.device):
            difference = own[here] - other[here]
            self.x[here].add_(difference, alpha=-0.5)
            if self.has_momentum:
                self.second[here].add_(difference, alpha=-self.momentum.alpha)

    def replace(self, other: Tensor) -> None:
        """Replace parameters that are not finite by those (n,) of another rank."""
        self.x.copy_(other)
        if self.has_momentum:
            self.second.copy_(other)
        delete_nonfinite_state(self.strategy.state, self.strategy.flat_params.parameters)

    def is_usable(self) -> bool:
        """Whether x is finite and can be squared; synchronizes with a GPU."""
        return bool(can_be_squared(self.x))

    def write(self) -> None:
        """Write x to the parameters."""
        self.strategy.flat_params.write_parameters(self.x)

    def read(self, out: Tensor) -> None:
        """See `Update`."""
        out[: len(self.x)] = self.x

    @torch.no_grad()
    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`; the mean (n,) of x over this rank and its peer."""
        if not self.strategy.is_counted:
            self.replace(mean)
            return
        if self.has_momentum:
            for here in tiles(0, len(self.x), self.x.device):
                # x - mean is half of the difference
                half = self.x[here] - mean[here]
                self.second[here].add_(half, alpha=-2 * self.momentum.alpha)
        self.x.copy_(mean)
        return
        yield

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"second": self.second} if self.has_momentum else {}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        if not (self.has_momentum and "second" in snapshot["local"]):
            return {}
        return {"second": SavedTensor((self.strategy.flat_params.num_elements,))}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.reinitialize()
        # a state that was saved without momentum has no x~
        if self.has_momentum and "second" in local:
            self.second = self.strategy.vector(local["second"])

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`; includes x, which is kept so that the events need no new memory."""
        return self.x.nbytes + self.second.nbytes
