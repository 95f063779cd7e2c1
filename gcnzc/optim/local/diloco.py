"""DiLoCo: H local steps, then one step of an outer optimizer on all ranks.

    x_i <- InnerOpt(x_i, gradient of worker i)       H times, each worker on its own
    d   <- mean_i (a - x_i)                          a: where all began, the same on all workers
    b   <- m b + d
    a   <- a - lr (d + m b)                          Nesterov's momentum; lr b without it
    x_i <- a

as in Douillard et al., "DiLoCo" (2023, https://arxiv.org/abs/2311.08105). Without Nesterov's
momentum it is SlowMo (Wang et al., 2020, https://arxiv.org/abs/1910.00643), and with m = 0 and
lr = 1 it is local SGD. The state of the inner optimizers stays with the workers.

Letters: W workers, n elements, k notes, s elements of a worker's share.
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
from gcnzc.optim.resize import part_of
from gcnzc.optim.validation import check_at_least_zero, check_fraction


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: torch's SGD, on one vector."""

    lr: float
    momentum: float
    nesterov: bool = True

    @torch.no_grad()
    def step(self, anchor: Tensor, buffer: Tensor, difference: Tensor) -> None:
        """Move the anchor.

        Args:
            anchor: where all began; written in place.
            buffer: of the momentum, written in place; of the anchor's shape, as the next.
            difference: the anchor less the mean of where the workers came; used as memory to work
                in.
        """
        for here in tiles(0, len(anchor), anchor.device):
            step = difference[here]
            if self.momentum:
                moved = buffer[here].mul_(self.momentum).add_(step)
                step = step.add_(moved, alpha=self.momentum) if self.nesterov else moved
            anchor[here].add_(step, alpha=-self.lr)


class DiLoCo(LocalUpdates):
    """An optimizer that steps on this worker alone, and now and then takes an outer step with all.

    One worker without others just takes the inner optimizer's steps.

    Args:
        inner: of the parameters, on this worker; any of torch's.
        group: of all workers; those for which torch.distributed was initialised if None.
        local_steps: H; or "auto", so many that exchange takes `target` of the time of
            steps, and a fortieth of their work (`SyncInterval`).
        outer_lr: the outer optimizer's step size.
        outer_momentum: its momentum.
        nesterov: whether that is Nesterov's.
        compress: how means are taken.
        sharded: whether each worker keeps the anchor and the momentum of its share alone; only
            for means that are not compressed.
        alone: whether one worker without others takes outer steps nevertheless.
        signals: how many things, such as a wish to stop, are told with an outer step.
        total_steps: of the run, for a warning if the first exchange comes late in it; None if that
            is not known.
        module: see `DistributedOptimizer`.
        target: the share of exchange for "auto".
        clocks: seconds, for "auto".

    Raises:
        ValueError: options contradict one another, or the parameters of workers differ.
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
                f"sharded with {compress}\n\nhint: shares are exchanged whole; leave out one of "
                "the two"
            )
        pace = SyncInterval(local_steps, target, clocks)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            pace=pace,
            module=module,
            alone=alone,
        )
        self.outer = Outer(outer_lr, outer_momentum, nesterov)
        self.compress, self.is_sharded = compress, sharded
        count, world_size = self.space.num_elements, self.group.world_size
        self.share = part_of(count, 0, world_size)[1]
        """s, elements; the last workers' may be fewer"""
        self.begin, self.end = (
            part_of(count, self.group.rank, world_size) if sharded else (0, count)
        )
        if not sharded:
            self.mean = self.reducer("difference", compress, count)
        self.anchor = self.space.zeros()[:0]
        """of elements begin to end: where all began"""
        self.momentum = self.anchor
        """of the same elements"""
        self.connect()

    def words(self) -> str:
        """See `LocalUpdates`."""
        return (
            f"DiLoCo(local_steps={self.pace.wanted}, outer_lr={self.outer.lr}, "
            f"outer_momentum={self.outer.momentum}, nesterov={self.outer.nesterov}, "
            f"compress={self.compress}, sharded={self.is_sharded})"
        )

    def started(self) -> None:
        """See `LocalUpdates`."""
        self.restarted()
        self.momentum = torch.zeros_like(self.anchor)

    def restarted(self) -> None:
        """See `LocalUpdates`."""
        self.anchor = self.vector()[self.begin : self.end].clone()

    def synchronised(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        if self.is_sharded:
            yield from self.pace.timed(self.synchronised_by_shares())
            return
        values = self.space.read_parameters(self.space.empty(self.notes))
        difference = values[: self.space.num_elements]
        torch.sub(self.anchor, difference, out=difference)
        if (yield from self.averaged(self.mean, values)):
            self.outer.step(self.anchor, self.momentum, difference)
            self.adopt(self.anchor)

    def synchronised_by_shares(self) -> Algorithm[None]:
        """The same, each worker for its share: a sum of shares out, the new anchors back."""
        count, share, notes = self.space.num_elements, self.share, self.notes
        values = self.space.read_parameters(self.space.empty(notes))
        self.offer(values)
        # a row for each worker, with the notes
        rows = values.new_zeros(self.group.world_size, share + notes)
        for row, part in zip(rows, values[:count].split(share), strict=False):
            row[: len(part)] = part
        rows[:, share:] = values[count:]
        summed = yield ReduceScatter(rows.view(-1))
        # as a mean over all, which `accept` makes one over those that count
        summed[:share] /= self.group.world_size
        if not self.accept(summed, ""):
            return
        anchor, momentum = self.anchor.clone(), self.momentum.clone()
        self.outer.step(anchor, momentum, anchor - summed[: len(anchor)])
        sent = anchor.new_zeros(share)
        sent[: len(anchor)] = anchor
        everyones = (yield AllGather(sent)).view(-1)[:count]
        # a sum that overflows on one worker shows on all
        if not bool(are_finite(everyones)):
            self.drop("synchronisation skipped: the mean overflows")
            return
        self.anchor, self.momentum = anchor, momentum
        self.adopt(everyones)

    @property
    def bytes_per_synchronisation(self) -> int:
        """What this worker sends for an outer step: the formula."""
        workers, size = self.group.world_size, self.space.dtype.itemsize
        if self.is_sharded:
            return (workers - 1) * (2 * self.share + self.notes) * size
        return self.compress.bytes_sent(self.space.num_elements, workers, self.notes)

    @property
    def state_bytes(self) -> int:
        """Memory from one step to the next, besides that of the inner optimizer."""
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
