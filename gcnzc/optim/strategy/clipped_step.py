"""The outer step of CO2, for means of differences that are one round old.

    d   <- mean_i d_i / g                            the staleness gap g, see `StalenessGap`
    b   <- clip(m b + d)                             every element to [-c, c]
    s   <- s - lr b                                  the common start of a round

It depends only on earlier rounds, so it overlaps with the local steps, and so does the all-gather
of its result if the state is sharded.

Notation: W ranks, n elements, p the elements of this rank: all of them, or those of its shard.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar
from gcnzc.optim.local.staleness_gap import StalenessGap
from gcnzc.optim.state_layout import SavedTensor, check_numbers
from gcnzc.optim.strategy.all_ranks import Shards
from gcnzc.optim.strategy.finite_mean import Reduction
from gcnzc.optim.strategy.recipe import Update
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_at_least_zero, check_fraction, check_range


class ClippedStep(Update):
    """Exchange differences from the common start, and take a step with a gap and a clip.

    Args:
        lr: the learning rate.
        momentum: m.
        gap: g. If exchanges do not overlap with steps, all distances count as 0.
        clip: c; None for no limit.
        shards: the exchange, if it computes shards of the mean; else None.

    Raises:
        ValueError: an option is out of range.
    """

    start: Tensor
    """(p,): the common start of the current round"""
    momentum: Tensor
    """(p,): the outer momentum"""

    def __init__(
        self,
        lr: float,
        momentum: float,
        gap: StalenessGap,
        clip: float | None = None,
        shards: Shards | None = None,
    ) -> None:
        check_at_least_zero("outer_lr", lr)
        check_fraction("outer_momentum", momentum)
        if clip is not None:
            check_range("clip", clip, lambda most: most > 0, "a number above 0, or None")
        self.lr, self.outer_momentum = lr, momentum
        self.gap, self.clip, self.shards = gap, clip, shards
        self.before: Tensor | None = None
        """(p,): the start of the round that is being exchanged, if whole parameters are sent
        because this rank has only a shard of it"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        # no elements before `initialize`
        self.start = self.momentum = strategy.flat_params.zeros()[:0]

    def describe(self) -> str:
        """See `Update`."""
        return (
            f"outer_lr={self.lr}, outer_momentum={self.outer_momentum}, gap={self.gap}, "
            f"clip={self.clip}"
        )

    def initialize(self) -> None:
        """See `RecipePart`."""
        self.reinitialize()
        self.momentum = torch.zeros_like(self.start)

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        self.start = self._own_elements(self.strategy.vector())
        self.gap.update(0.0)

    def _own_elements(self, vector: Tensor) -> Tensor:
        """Return the elements of this rank; the vector (n,) must not be changed later."""
        # a copy of a shard does not keep the memory of the vector
        shards = self.shards
        return vector if shards is None else vector[shards.begin : shards.end].clone()

    def read(self, out: Tensor) -> None:
        """See `Update`: the start minus the parameters, or the parameters if it is sharded."""
        values = self.strategy.flat_params.read_parameters(out)[: self.num_elements]
        if self.shards is None:
            torch.sub(self.start, values, out=values)
        else:
            self.before = self.start

    def compute(self, reduction: Reduction, out: Tensor) -> Algorithm[Reduction]:
        """See `Update`: compute the start of the next round; without a mean, it does not change."""
        skip_reason, mean = reduction.skip_reason, reduction.mean
        if mean is not None:
            difference = mean if self.before is None else self.before - mean
            momentum = difference.div(self.gap.divisor()).add_(
                self.momentum, alpha=self.outer_momentum
            )
            # before clipping, which makes infinite elements finite; a shard may be empty
            largest = float(momentum.abs().amax()) if len(momentum) else 0.0
            if self.clip is not None:
                momentum.clamp_(-self.clip, self.clip)
            moved = self.lr * float(torch.linalg.vector_norm(momentum))
            start = torch.sub(self.start, momentum, alpha=self.lr)
            distance = moved if math.isfinite(largest) else largest
            moved = yield from self._gather(start, distance, out)
            if math.isfinite(moved):
                self.momentum.copy_(momentum)
                return self._finish(moved, out, reduction)
            skip_reason = "the mean overflows"
        yield from self._gather(self.start, 0.0, out)
        return self._finish(0.0, out, Reduction(None, reduction.sums, skip_reason))

    def _finish(self, moved: float, out: Tensor, reduction: Reduction) -> Reduction:
        self.before = None
        self.gap.update(moved if self.strategy.recipe.exchange.is_overlapped else 0.0)
        return Reduction(out[: self.num_elements], reduction.sums, reduction.skip_reason)

    def _gather(self, part: Tensor, moved: float, out: Tensor) -> Algorithm[float]:
        """Write the start of the next round, gathered from all ranks if sharded, into `out`.

        Args:
            part: (p,), the elements of this rank.
            moved: the Euclidean distance of these elements from the last start, or not finite.
            out: the memory of the exchange.

        Returns:
            `moved` of all elements; equal on all ranks if the state is sharded or the gap needs it.
        """
        if self.shards is None:
            out[: self.num_elements] = part
            # ranks may round the norm differently, but must use the same gap
            return max((yield AllGatherScalar(moved))) if self.gap.is_measured else moved
        size = self.shards.shard_size
        sent = part.new_zeros(size + 1)
        sent[: len(part)] = part
        sent[size] = moved
        rows = yield AllGather(sent)
        out[: self.num_elements] = rows[:, :size].reshape(-1)[: self.num_elements]
        return math.hypot(*rows[:, size].tolist())

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        self.start = self._own_elements(mean)
        self.strategy.set_parameters(mean)
        return
        yield

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`."""
        return super().state_bytes + (0 if self.before is None else self.before.nbytes)

    def _vectors(self) -> dict[str, Tensor]:
        return {"start": self.start, "momentum": self.momentum}

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        gap = {"gap": [self.gap.distance, self.gap.average]}
        return gap | self._vectors() if self.shards is None else gap

    def shard_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {} if self.shards is None else self._vectors()

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        own = self.shards
        size = self.strategy.flat_params.num_elements if own is None else own.end - own.begin
        return {"start": SavedTensor((size,)), "momentum": SavedTensor((size,))}

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        is_sharded = self.shards is not None
        self.strategy.check_option("sharded", "momentum" in shards, has_now=is_sharded)
        check_numbers(shared, "gap", 2, least=0)

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        kept, vector = shared if self.shards is None else shards, self.strategy.vector
        self.start, self.momentum = vector(kept["start"]), vector(kept["momentum"])
        self.before = None
        self.gap.distance, self.gap.average = shared["gap"]
