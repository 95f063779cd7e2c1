"""CO2: rounds of local steps; the exchange of a round overlaps with the next round.

    x_i <- s_r - e d_i                               start of round r on rank i; d_i of round r - 1
    x_i <- x_i - InnerOpt(gradient of rank i)        H local steps
    d_i <- the decrease of x_i in these steps        exchanged during round r + 1
    d   <- mean_i d_i / g                            of round r - 1, whose exchange finishes now
    b   <- clip(m b + d)                             every element to [-c, c]
    s   <- s_r - lr b                                start of round r + 1

after Sun et al., "CO2: efficient distributed training with full communication-computation overlap"
(2024, https://arxiv.org/abs/2401.16265), which has e = 0. The mean of a round is applied
one round late, so training may diverge with a large momentum or in long rounds. A small momentum
and the gap g make this less likely, and `CO2` warns of it; the clip c bounds each step.

The text of the paper was not available when this was written. Two details are therefore not
verified against it: its staleness gap, equation (3), for which the gap of Barkai et al., "Gap-aware
mitigation of gradient staleness" (2020, https://arxiv.org/abs/1909.10802), is used; and that the
first two rounds have the same start s, because no mean is available after the first. The divisor in
the authors' code (https://github.com/weigao266/fairscale-CO2, commit 55aaca5) is a constant.

With e > 0, a rank applies this fraction of its own last outer gradient d_i at once, until the mean
replaces it. A gap is then not needed. Eager updates for DiLoCo are due to Kale et al. (2025,
https://arxiv.org/abs/2502.12996), whose text was not available either, so details may differ.

The start s of a round depends only on earlier rounds, not on the current steps. The outer step
therefore also overlaps with the local steps, and so does the all-gather of its result if the state
is sharded.

Notation: W ranks, n elements, k extras, H steps of a round.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, Group, ReduceScatter, Start, Sum
from gcnzc.optim import defaults
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.local.base import LocalUpdates
from gcnzc.optim.local.pending_reduction import CHANNEL, PendingReduction
from gcnzc.optim.local.staleness_gap import StalenessGap
from gcnzc.optim.local.sync_interval import MAX_OVERLAP_SHARE, Clocks, SyncInterval
from gcnzc.optim.resize import shard_bounds
from gcnzc.optim.validation import check_at_least_zero, check_fraction
from gcnzc.system.scalars import scalars_like

# steps; in longer rounds, too much momentum was harmful on a least-squares problem
LONG_ROUND = 20


class CO2(LocalUpdates):
    """CO2: rounds of local steps whose exchange overlaps with the next round.

    After the last step of a round the parameters are bitwise equal on all ranks, unless `eager` is
    above 0. Signals are sent at the end of a round, and received when its mean is applied. A rank
    whose parameters or difference are not finite or too large at the end of a round is excluded
    from its mean. If there is no mean, the start s does not change. A single rank only takes the
    inner optimizer's steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most half the wall
            time (`target` without a delay) and, if the parameters are on a CPU, add at most 1/40 to
            the CPU time of the steps (`SyncInterval`).
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: m, the momentum of the outer optimizer. With a delay, use values above the
            default only with short rounds.
        gap: the divisor of delayed differences: "gap_aware", "none", a number, or a function; see
            `StalenessGap`. If None, it is "none" if `eager` is above 0, else "gap_aware".
        clip: c, the largest absolute value of an element of the momentum, in units of the
            parameters; None for no limit.
        compress: compression of the exchanged differences.
        sharded: whether to shard the vectors of the outer optimizer over the ranks; not with
            compression.
        delay: the number of rounds that overlap with an exchange: 1; or 0 to wait for it at once,
            which is SlowMo if gap="none" and clip=None.
        eager: e, in [0, 1). A value above 0 requires a delay and memory for one more
            vector, and works best with gap="none". If None, it is 0.5 with a delay and 0 without.
            The published method has no eager updates: eager=0.
        signals: the number of flags, such as a request to stop, that each round combines over the
            ranks.
        total_steps: the number of steps of the run; None if it is not known. Rank 0 warns if the
            first exchange is late in the run.
        module: see `DistributedOptimizer`.
        target: the largest fraction of exchanges in the wall time for "auto" without a delay.
        clocks: the clocks that measure for "auto".

    Raises:
        TypeError: see `LocalUpdates`.
        ValueError: an option is out of range, options contradict each other, or options, or shapes
            or dtypes of parameters, differ between ranks.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = defaults.CO2.local_steps,
        outer_lr: float = defaults.CO2.outer_lr,
        outer_momentum: float = defaults.CO2.outer_momentum,
        gap: str | float | Callable[[float, float], float] | None = None,
        clip: float | None = 1.0,
        compress: Compression = Dense(),  # noqa: B008 - it cannot change
        sharded: bool = False,
        delay: int = 1,
        eager: float | None = None,
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
        if delay not in (0, 1):
            raise ValueError(f"a delay of {delay} rounds\n\nhint: give 1, or 0 for no overlap")
        if eager is None:
            eager = defaults.EAGER if delay else 0.0
        if not 0 <= eager < 1 or (eager and not delay):
            raise ValueError(
                f"eager is {eager}, with a delay of {delay} rounds\n\nhint: give a number in "
                "[0, 1), or 0 without a delay"
            )
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip}\n\nhint: give a number above 0, or None")
        if gap is None:
            # delayed means are divided by a gap so that training does not diverge; eager updates
            # make it unnecessary
            gap = "none" if eager else "gap_aware"
        sync_interval = SyncInterval(local_steps, MAX_OVERLAP_SHARE if delay else target, clocks)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            sync_interval=sync_interval,
            module=module,
        )
        self.outer_lr, self.outer_momentum, self.clip = outer_lr, outer_momentum, clip
        self.gap, self.compress = StalenessGap(gap), compress
        self.delay, self.is_sharded, self.eager = delay, sharded, eager
        count, world_size = self.flat_params.num_elements, self.group.world_size
        self.shard_size = count
        """elements of a shard; those of the last ranks may be smaller"""
        self.begin, self.end = 0, count
        if sharded:
            self.shard_size = shard_bounds(count, 0, world_size)[1]
            self.begin, self.end = shard_bounds(count, self.group.rank, world_size)
        else:
            self.mean = self.reducer("difference", compress, count)
        self.padded = self.shard_size * world_size if sharded else count
        """number of elements of an exchanged vector, without its extras"""
        self.start = self.flat_params.zeros()[:0]
        """elements begin to end of s, the common start of the current round"""
        self.before = self.start
        """the same for the round that is being exchanged; only if sharded and not eager"""
        self.own = self.start
        """(n,): this rank's parameters at the start of the current round; only if eager"""
        self.momentum = self.start
        """elements begin to end of the outer momentum"""
        self.pending: PendingReduction | None = None
        """the exchange of the last round, of a vector (padded + k,); its result is the next s"""
        self.is_warned = False
        self.warn_of_momentum()
        self.connect()

    def describe_options(self) -> str:
        """See `LocalUpdates`."""
        return (
            f"CO2(local_steps={self.sync_interval.requested}, outer_lr={self.outer_lr}, "
            f"outer_momentum={self.outer_momentum}, gap={self.gap}, clip={self.clip}, "
            f"compress={self.compress}, sharded={self.is_sharded}, delay={self.delay}, "
            f"eager={self.eager})"
        )

    def warn_of_momentum(self) -> None:
        """Warn once, when H is known, if the momentum may make training diverge."""
        interval = self.sync_interval
        if self.is_warned or self.is_inner_only or not self.delay or interval.is_measuring:
            return
        self.is_warned = True
        steps, momentum = interval.steps, self.outer_momentum
        may_diverge = self.gap.may_diverge(self.outer_lr, momentum, self.eager)
        if may_diverge and (momentum > 0.5 or steps > LONG_ROUND):
            warnings.warn(
                f"CO2: with outer_momentum={momentum} and gap={self.gap}, means delayed by one "
                f"round of {steps} steps may make training diverge; outer_momentum=0.2 with "
                "gap='gap_aware' or eager=0.5 is safer, or shorter rounds",
                stacklevel=3,
            )

    # --- rounds

    def initialize(self) -> None:
        """See `LocalUpdates`."""
        self.reinitialize()
        self.momentum = torch.zeros_like(self.start)

    def reinitialize(self) -> None:
        """See `LocalUpdates`."""
        own = self.vector()
        self.start = own[self.begin : self.end].clone()
        self.own = own.clone() if self.eager else self.start[:0]
        # the next two rounds have the same start s
        self.gap.update(0.0)
        if self.delay:
            # an exchange that is finished already, whose result is the start of this round
            world_size = self.group.world_size
            self.pending = self._make_finished(own, [world_size], world_size)

    def _make_finished(
        self, start: Tensor, extra_sums: Sequence[float], workers: int, skip_reason: str = ""
    ) -> PendingReduction:
        """Return a finished exchange with a given result.

        Args:
            start: (n,), the start of the next round.
            extra_sums: the sums of the first extras over the ranks; the other extras are 0.
            workers: the number of ranks.
            skip_reason: as `_compute_next_start` returns.
        """
        values = self._make_buffer()
        values[: len(start)] = start
        values[self.padded : self.padded + len(extra_sums)] = scalars_like(extra_sums, values)
        return PendingReduction(values, workers, skip_reason=skip_reason)

    def _make_buffer(self) -> Tensor:
        """Return zeros (padded + k,) for an exchange."""
        return self.flat_params.zeros(self.padded - self.flat_params.num_elements + self.extras)

    def synchronize(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        self.warn_of_momentum()
        if self.delay:
            before = self.start
            values = yield from self._finish_exchange()
            yield from self._start_exchange(values, before)
        else:
            values = self.flat_params.read_parameters(self._make_buffer())
            yield from self._start_exchange(values, self.start)
            yield from self._finish_exchange()
            self.pending = None

    def _start_exchange(self, values: Tensor, before: Tensor) -> Algorithm[None]:
        """Start the exchange of a round.

        Args:
            values: (padded + k,), this rank's parameters at the end of the round; must not be used
                until the exchange has finished.
            before: elements begin to end of s, the common start of the round.
        """
        count = self.flat_params.num_elements
        values[count:] = 0
        if self.is_sharded and not self.eager:
            # this rank has only its shard of the start, so the end of the round is exchanged, and
            # `_mean_difference` subtracts it from the start
            self.before = before
        else:
            torch.sub(self.own if self.eager else before, values[:count], out=values[:count])
        self.prepare_mean(values)
        if not self.is_counted:
            delete_nonfinite_state(self.state, self.flat_params.parameters)
        if self.eager:
            self.flat_params.read_parameters(self.own).sub_(values[:count], alpha=self.eager)
            self.flat_params.write_parameters(self.own)
            self.is_in_sync = False
        self.pending = PendingReduction(values, self.group.world_size)
        self.pending.handle = yield Start(self._compute_next_start(values), CHANNEL)
        if self.sync_interval.is_measuring:
            yield from self.sync_interval.time_exchange(self.pending.wait())

    def _finish_exchange(self) -> Algorithm[Tensor]:
        """Wait for the pending exchange, and set the parameters to its result.

        Returns:
            The memory (padded + k,) of the exchange, with this rank's previous parameters as the
            first n elements.
        """
        assert self.pending is not None, "an exchange was started"
        yield from self.pending.wait()
        values = self.pending.values
        # only the extras: `_mean_difference` has already divided by the number of finite ranks
        self.complete_mean(values[self.padded :], self.pending.skip_reason, self.pending.workers)
        self.start = values[self.begin : self.end].clone()
        self.before = self.start[:0]
        self._swap_parameters(values)
        self.is_in_sync = True
        return values

    @torch.no_grad()
    def _swap_parameters(self, values: Tensor) -> None:
        """Swap the parameters and the first n elements of a vector, parameter by parameter."""
        views = self.flat_params.views(values)
        for parameter, view in zip(self.flat_params.parameters, views, strict=True):
            own = parameter.to(values.dtype, copy=True)
            parameter.copy_(view)
            view.copy_(own)

    def apply_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`. With a delay, an incomplete round is exchanged like a complete one.

        Without a delay no exchange is pending, and `finalize` averages the parameters.
        """
        if not self.delay:
            return
        if self.since:
            self.since = 0
            yield from self.synchronize()
        yield from self._finish_exchange()
        self.reinitialize()

    def finish_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        if self.pending is not None:
            yield from self.pending.wait()

    def _compute_next_start(self, values: Tensor) -> Algorithm[str]:
        """Exchange the differences of a round, and take the outer step.

        Args:
            values: (padded + k,), after `prepare_mean`; replaced by the start of the next round and
                the sums of the extras.

        Returns:
            Why there is no mean; empty if there is one, or if no rank's parameters are finite.
            Without a mean s does not change.
        """
        skip_reason, difference = yield from self._mean_difference(values)
        if difference is not None:
            momentum = difference.div_(self.gap.divisor())
            momentum.add_(self.momentum, alpha=self.outer_momentum)
            # before clipping, which makes infinite elements finite; a shard may be empty
            largest = float(momentum.abs().amax()) if len(momentum) else 0.0
            if self.clip is not None:
                momentum.clamp_(-self.clip, self.clip)
            moved = self.outer_lr * float(torch.linalg.vector_norm(momentum))
            start = torch.sub(self.start, momentum, alpha=self.outer_lr)
            distance = moved if math.isfinite(largest) else largest
            moved = yield from self._gather_start(start, distance, values)
            if math.isfinite(moved):
                self.momentum.copy_(momentum)
                self._record_distance(moved)
                return ""
            skip_reason = "the mean overflows"
        yield from self._gather_start(self.start, 0.0, values)
        self._record_distance(0.0)
        return skip_reason

    def _record_distance(self, distance: float) -> None:
        """Record the distance for the next gap; 0 without a delay."""
        self.gap.update(distance if self.delay else 0.0)

    def _mean_difference(self, values: Tensor) -> Algorithm[tuple[str, Tensor | None]]:
        """Average the differences of a round over the ranks whose parameters are finite.

        Returns:
            Why there is no mean, empty if there is one or no rank's parameters are finite; and
            elements begin to end of the mean, None if there is none.
        """
        extras = values[self.padded :]
        if self.is_sharded:
            yield Sum(extras)
            summed = yield ReduceScatter(values[: self.padded])
            count = round(float(extras[0]))
            if not count:
                return "", None
            mean = summed[: len(self.start)] / count
            return "", mean if self.eager else self.before - mean
        skip_reason = yield from self.mean.mean(values, self.extras)
        count = 0 if skip_reason else round(float(extras[0]))
        if not count:
            return skip_reason, None
        return "", values[: self.padded] * (self.group.world_size / count)

    def _gather_start(self, part: Tensor, moved: float, values: Tensor) -> Algorithm[float]:
        """Write the start of the next round, gathered from all ranks if sharded, into `values`.

        Args:
            part: elements begin to end of the start.
            moved: the Euclidean distance of these elements from the last start, or not finite.
            values: (padded + k,), whose first elements are written.

        Returns:
            `moved` of all elements; equal on all ranks if the state is sharded or the gap needs it.
        """
        if not self.is_sharded:
            values[: self.padded] = part
            # ranks may round the norm differently, but must use the same gap
            return max((yield AllGatherScalar(moved))) if self.gap.is_measured else moved
        sent = part.new_zeros(self.shard_size + 1)
        sent[: len(part)] = part
        sent[self.shard_size] = moved
        rows = yield AllGather(sent)
        values[: self.padded].view(-1, self.shard_size).copy_(rows[:, : self.shard_size])
        return math.hypot(*rows[:, self.shard_size].tolist())

    # --- cost, and checkpoints

    @property
    def bytes_per_round(self) -> int:
        """Bytes that this rank sends for an outer step, by formula as `Compression.bytes_sent`."""
        workers, size = self.group.world_size, self.flat_params.dtype.itemsize
        if not self.is_sharded:
            distances = 8 * (workers - 1) if self.gap.is_measured else 0
            count, layers = self.flat_params.num_elements, self.worker_info.layers
            return distances + self.compress.bytes_sent(count, workers, self.extras, layers)
        extras = 2 * (workers - 1) * self.extras * size // workers
        return (workers - 1) * (2 * self.shard_size + 1) * size + extras

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without that of the inner optimizer.

        An exchange allocates one or two more temporarily, with a delay during the next round.
        """
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        pending = 0 if self.pending is None else self.pending.values.nbytes
        vectors = sum(each.nbytes for each in (self.start, self.before, self.own, self.momentum))
        return vectors + errors + pending

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`; call `finish_pending` first, so that no exchange is pending."""
        gap = self.gap
        shared: dict[str, Any] = {"gap": [gap.distance, gap.average]}
        if not self.is_sharded:
            shared |= {"start": self.start, "momentum": self.momentum}
        if self.pending is not None:
            assert self.pending.handle is None, "finish_pending was called"
            values = self.pending.values
            shared |= {
                "next": values[: self.flat_params.num_elements],
                "extra_sums": values[self.padded :].tolist(),
                "workers": self.pending.workers,
                "skip_reason": self.pending.skip_reason,
            }
        return shared

    def local_state(self) -> dict[str, Tensor]:
        """See `LocalUpdates`."""
        return {"own": self.own} if self.eager else {}

    def shard_state(self) -> dict[str, Tensor]:
        """See `LocalUpdates`."""
        return {"start": self.start, "momentum": self.momentum} if self.is_sharded else {}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        kept = shards if self.is_sharded else shared
        self.start, self.momentum = self.vector(kept["start"]), self.vector(kept["momentum"])
        self.before = self.start[:0]
        self.own = self.vector(local["own"]) if self.eager else self.before
        self.gap.distance, self.gap.average = shared["gap"]
        if self.delay:
            # signals of the run that saved the state are not restored
            saved = shared["extra_sums"][:1], shared["workers"], shared["skip_reason"]
            self.pending = self._make_finished(self.vector(shared["next"]), *saved)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `LocalUpdates`.

        Raises:
            ValueError: `sharded`, `delay`, or whether `eager` is above 0 differs in the snapshot.
        """
        shared = snapshot["shared"]
        if not shared["numbers"]["is_plain"]:
            found = {
                "eager": "own" in snapshot["local"],
                "sharded": "momentum" in snapshot["shards"],
                "delay": "next" in shared,
            }
            own = {"eager": self.eager > 0, "sharded": self.is_sharded, "delay": self.delay > 0}
            for name, was in found.items():
                if was != own[name]:
                    there, here = ("with", "without") if was else ("without", "with")
                    raise ValueError(
                        f"the state was saved by CO2 {there} {name}, but this one is {here} it\n\n"
                        "hint: construct it with the options of the run that saved the state"
                    )
        super().restore(snapshot)
        if self.is_inner_only and "next" in shared:
            # a single rank does not exchange, so the pending result is applied at once
            kept = snapshot["shards"] if self.is_sharded else shared
            start = snapshot["local"]["own"] if self.eager else kept["start"]
            self.flat_params.add_to_parameters(self.vector(shared["next"]) - self.vector(start))
