"""DiLoCo: H local steps, then one step of an outer optimizer on all ranks.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    d   <- mean_i (a - x_i)                          a: the anchor, where all ranks started
    b   <- m b + d
    a   <- a - lr (d + m b)                          Nesterov momentum; lr b without it
    x_i <- a

as in Douillard et al., "DiLoCo" (2023, https://arxiv.org/abs/2311.08105). The mean difference d is
the outer gradient. Without Nesterov momentum it is SlowMo (Wang et al., 2020,
https://arxiv.org/abs/1910.00643) if the inner learning rate is constant: SlowMo divides d by it.
With m = 0 and lr = 1 it is local SGD. The states of the inner optimizers are not exchanged.

Notation: W ranks, n elements, k extras, s elements of a rank's shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, AllGather, Group, ReduceScatter
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.defaults import DILOCO
from gcnzc.optim.flat_parameters import tiles
from gcnzc.optim.local.base import LocalUpdates
from gcnzc.optim.local.sync_interval import Clocks, SyncInterval
from gcnzc.optim.resize import shard_bounds
from gcnzc.optim.validation import check_at_least_zero, check_fraction


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: SGD with momentum, as in torch, on one flat vector."""

    lr: float
    momentum: float
    nesterov: bool = True

    @torch.no_grad()
    def step(self, anchor: Tensor, buffer: Tensor, difference: Tensor) -> None:
        """Update the anchor and the momentum in place; all vectors have the same shape.

        Args:
            anchor: the parameters at the last outer step.
            buffer: the momentum.
            difference: the anchor minus the mean of the ranks' parameters; overwritten.
        """
        for here in tiles(0, len(anchor), anchor.device):
            step = difference[here]
            if self.momentum:
                moved = buffer[here].mul_(self.momentum).add_(step)
                step = step.add_(moved, alpha=self.momentum) if self.nesterov else moved
            anchor[here].add_(step, alpha=-self.lr)


class DiLoCo(LocalUpdates):
    """DiLoCo: take local steps, and every H steps one step of an outer optimizer on all ranks.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most `target` of the
            wall time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        nesterov: whether to use Nesterov momentum.
        compress: compression of the exchanged differences.
        sharded: whether to shard the anchor and the momentum over the ranks; not with compression.
        alone: whether a single rank also takes outer steps.
        signals: the number of flags, such as a request to stop, that each outer step combines over
            the ranks.
        total_steps: the number of steps of the run; None if it is not known. Rank 0 warns if the
            first exchange is late in the run.
        module: see `DistributedOptimizer`.
        target: the largest fraction of exchanges in the wall time for "auto".
        clocks: the clocks that measure for "auto".

    Raises:
        ValueError: an option is out of range, options contradict each other, or the parameters of
            the ranks differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = DILOCO.local_steps,
        outer_lr: float = DILOCO.outer_lr,
        outer_momentum: float = DILOCO.outer_momentum,
        nesterov: bool = True,
        compress: Compression = Dense(),  # noqa: B008 - it cannot change
        sharded: bool = False,
        alone: bool = False,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        target: float = 0.05,
        clocks: Clocks = Clocks(),  # noqa: B008 - it cannot change
    ) -> None:
        check_at_least_zero("outer_lr", outer_lr)
        check_fraction("outer_momentum", outer_momentum)
        if sharded and compress != Dense():
            raise ValueError(
                f"sharded=True with compress={compress}\n\nhint: omit one of them, because shards "
                "are exchanged uncompressed"
            )
        sync_interval = SyncInterval(local_steps, target, clocks)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            sync_interval=sync_interval,
            module=module,
            alone=alone,
        )
        self.outer = Outer(outer_lr, outer_momentum, nesterov)
        self.compress, self.is_sharded = compress, sharded
        count, world_size = self.flat_params.num_elements, self.group.world_size
        self.shard_size = shard_bounds(count, 0, world_size)[1]
        """s, elements of a shard; those of the last ranks may be smaller"""
        self.begin, self.end = (
            shard_bounds(count, self.group.rank, world_size) if sharded else (0, count)
        )
        if not sharded:
            self.mean = self.reducer("difference", compress, count)
        self.anchor = self.flat_params.zeros()[:0]
        """elements begin to end of the parameters at the last outer step"""
        self.momentum = self.anchor
        """the outer momentum of the same elements"""
        self.connect()

    def describe_options(self) -> str:
        """See `LocalUpdates`."""
        return (
            f"DiLoCo(local_steps={self.sync_interval.requested}, outer_lr={self.outer.lr}, "
            f"outer_momentum={self.outer.momentum}, nesterov={self.outer.nesterov}, "
            f"compress={self.compress}, sharded={self.is_sharded})"
        )

    def initialize(self) -> None:
        """See `LocalUpdates`."""
        self.reinitialize()
        self.momentum = torch.zeros_like(self.anchor)

    def reinitialize(self) -> None:
        """See `LocalUpdates`."""
        self.anchor = self.vector()[self.begin : self.end].clone()

    def synchronize(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        if self.is_sharded:
            yield from self.sync_interval.time_exchange(self._synchronize_sharded())
            return
        values = self.flat_params.read_parameters(self.flat_params.empty(self.extras))
        difference = values[: self.flat_params.num_elements]
        torch.sub(self.anchor, difference, out=difference)
        if (yield from self.average(self.mean, values)):
            self.outer.step(self.anchor, self.momentum, difference)
            self.set_parameters(self.anchor)

    def _synchronize_sharded(self) -> Algorithm[None]:
        """Reduce-scatter the parameters, take the outer step per shard, all-gather the anchors."""
        count, shard_size, extras = self.flat_params.num_elements, self.shard_size, self.extras
        values = self.flat_params.read_parameters(self.flat_params.empty(extras))
        self.prepare_mean(values)
        # a row for each rank: its shard and the extras
        rows = values.new_zeros(self.group.world_size, shard_size + extras)
        for row, part in zip(rows, values[:count].split(shard_size), strict=False):
            row[: len(part)] = part
        rows[:, shard_size:] = values[count:]
        summed = yield ReduceScatter(rows.view(-1))
        # `complete_mean` expects a mean over all ranks
        summed[:shard_size] /= self.group.world_size
        if not self.complete_mean(summed, ""):
            return
        anchor, momentum = self.anchor.clone(), self.momentum.clone()
        self.outer.step(anchor, momentum, anchor - summed[: len(anchor)])
        sent = anchor.new_zeros(shard_size)
        sent[: len(anchor)] = anchor
        everyones = (yield AllGather(sent)).view(-1)[:count]
        # all ranks detect a sum that overflows on one rank
        if not bool(are_finite(everyones)):
            self.record_drop("synchronization skipped: the mean overflows")
            return
        self.anchor, self.momentum = anchor, momentum
        self.set_parameters(everyones)

    @property
    def bytes_per_synchronization(self) -> int:
        """Bytes that this rank sends for an outer step."""
        workers, size = self.group.world_size, self.flat_params.dtype.itemsize
        if self.is_sharded:
            return (workers - 1) * (2 * self.shard_size + self.extras) * size
        return self.compress.bytes_sent(self.flat_params.num_elements, workers, self.extras)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without that of the inner optimizer."""
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        return self.anchor.nbytes + self.momentum.nbytes + errors

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`."""
        return {} if self.is_sharded else {"anchor": self.anchor, "momentum": self.momentum}

    def shard_state(self) -> dict[str, Tensor]:
        """See `LocalUpdates`."""
        return {"anchor": self.anchor, "momentum": self.momentum} if self.is_sharded else {}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        kept = shards if self.is_sharded else shared
        self.anchor, self.momentum = self.vector(kept["anchor"]), self.vector(kept["momentum"])
