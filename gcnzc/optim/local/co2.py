"""CO2: rounds of local steps; the exchange of a round overlaps with the next round.

    x_i <- s_r - e d_i                               where worker i begins round r; d_i of r - 1
    x_i <- x_i - InnerOpt(gradient of worker i)      H times
    d_i <- what these steps took from x_i            exchanged beside round r + 1
    d   <- mean_i d_i / g                            of round r - 1, whose exchange ends now
    b   <- clip(m b + d)                             every element to [-c, c]
    s   <- s_r - lr b                                of round r + 1

after Sun et al., "CO2: efficient distributed training with full communication-computation overlap"
(2024, https://arxiv.org/abs/2401.16265), which has e = 0. As the mean of a round comes one round
late, momentum acts on what is old already: with much of it, or in long rounds, training may run
away. Small momentum, the gap g and the clip c prevent that.

With e, a share of what a worker's own last round brought counts at once, until the mean of all that
takes its place has come. It is after Kale et al., "Eager updates for overlapped communication and
computation in DiLoCo" (2025, https://arxiv.org/abs/2502.12996), where the share is one of all
workers' and goes through the outer optimizer. Rounds then need not be held back by a gap.

Where s is depends on rounds that have ended alone, not on the steps that go on. So the outer step,
too, is taken beside these, and where workers keep shares, so is the gathering of its result.

Not verified against the paper, whose text could not be had: its equation (3), for which stands the
gap of Barkai et al., "Gap-aware mitigation of gradient staleness" (2020,
https://arxiv.org/abs/1909.10802); and that the first two rounds begin with the same parameters, as
nothing has come at the end of the first. The authors' own code was no help: there the gap is a
number, the clip is without effect, and means are waited for.

Letters: W workers, n elements, k notes, H steps of a round, s = elements of a worker's share.
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
from gcnzc.optim.local.base import CHANNEL, LocalUpdates, PendingReduction
from gcnzc.optim.local.staleness_gap import Gap
from gcnzc.optim.local.sync_interval import HIDDEN, Clocks, SyncInterval
from gcnzc.optim.resize import part_of
from gcnzc.optim.validation import check_at_least_zero, check_fraction
from gcnzc.system.scalars import scalars_like

LONG = 20  # steps of a round, from which on too much momentum did harm on the same least squares


class CO2(LocalUpdates):
    """An optimizer that steps on this worker alone, in rounds that are exchanged one round late.

    After the last step of a round all workers have the same parameters, bit for bit, unless they
    are eager. Signals are told at the end of a round, and heard when its mean is taken. A worker
    whose parameters are not finite then is left out of the mean; where there is no mean at all, the
    next round begins where this one did. One worker without others just takes the inner optimizer's
    steps.

    Args:
        inner: of the parameters, on this worker; any of torch's.
        group: of all workers; those for which torch.distributed was initialised if None.
        local_steps: H; or "auto", so many that the exchange takes half the time of the
            steps, and a fortieth of their work (`SyncInterval`).
        outer_lr: the outer optimizer's step size.
        outer_momentum: its momentum, m. With a delay more than the usual one is for short rounds.
        gap: what late differences are divided by: "gap_aware", "none", a number, or a function;
            see `Gap`. If None, "none" for eager ranks and "gap_aware" for others.
        clip: c, what an element of the momentum is at most, in units of the parameters; no limit
            if None.
        compress: how means are taken.
        sharded: whether each worker keeps the outer optimizer's vectors for its share alone; only
            for means that are not compressed.
        delay: rounds from an exchange's beginning to its end: 1; or 0, so that it is waited for at
            once, which without gap and clip is SlowMo.
        eager: e, at least 0 and below 1. More than 0 takes a vector more, goes with a delay, and
            best with gap="none". If None, 0.5 with a delay and 0 without; CO2 as published is
            eager=0, outer_lr=1, outer_momentum=0.2.
        signals: how many things, such as a wish to stop, are told with a round.
        total_steps: of the run, for a warning if the first exchange comes late in it; None if that
            is not known.
        module: see `DistributedOptimizer`.
        target: for "auto" without delay, the share of exchange in the time of steps.
        clocks: seconds, for "auto".

    Raises:
        ValueError: options contradict one another, or the parameters of workers differ.
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
                f"sharded with {compress}\n\nhint: shares are exchanged whole; leave out one of "
                "the two"
            )
        if delay not in (0, 1):
            raise ValueError(f"a delay of {delay} rounds\n\nhint: 1, or 0 to wait at once")
        if eager is None:
            eager = defaults.EAGER if delay else 0.0
        if not 0 <= eager < 1 or (eager and not delay):
            raise ValueError(
                f"eager is {eager}, with a delay of {delay} rounds\n\nhint: at least 0 and below "
                "1; and 0 without delay, where nothing is late"
            )
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip}\n\nhint: above 0, or None for no limit")
        if gap is None:
            # late means are divided by a gap so that training does not diverge; eager ranks do not
            # need one
            gap = "none" if eager else "gap_aware"
        pace = SyncInterval(local_steps, HIDDEN if delay else target, clocks)
        super().__init__(
            inner, group, signals=signals, total_steps=total_steps, pace=pace, module=module
        )
        self.outer_lr, self.outer_momentum, self.clip = outer_lr, outer_momentum, clip
        self.gap, self.compress, self.delay, self.is_sharded = Gap(gap), compress, delay, sharded
        self.eager = eager
        count, world_size = self.space.num_elements, self.group.world_size
        self.share = count
        """s; the last worker's may be fewer"""
        self.begin, self.end = 0, count
        if sharded:
            self.share = part_of(count, 0, world_size)[1]
            self.begin, self.end = part_of(count, self.group.rank, world_size)
        else:
            self.mean = self.reducer("difference", compress, count)
        self.padded = self.share * world_size if sharded else count
        """elements of a vector that is exchanged, before its notes"""
        self.start = self.space.zeros()[:0]
        """of elements begin to end, as the next two: where the round that goes on began"""
        self.before = self.start
        """where the round began whose mean is taken, if workers keep shares and are not eager"""
        self.own = self.start
        """(n,), where this worker began the round that goes on, if workers are eager"""
        self.momentum = self.start
        self.flight: PendingReduction | None = None
        """(padded + k,): what of the last round is under way, and comes as where the next begins"""
        self.is_warned = False
        self.warn_of_momentum()
        self.connect()

    def words(self) -> str:
        """See `LocalUpdates`."""
        return (
            f"CO2(local_steps={self.pace.wanted}, outer_lr={self.outer_lr}, "
            f"outer_momentum={self.outer_momentum}, gap={self.gap}, clip={self.clip}, "
            f"compress={self.compress}, sharded={self.is_sharded}, delay={self.delay}, "
            f"eager={self.eager})"
        )

    def warn_of_momentum(self) -> None:
        """Warn once of momentum that may run away, when it is known how long rounds are.

        In rounds so long that each ends where it would have ended from anywhere, with k = lr / g,
        the workers' mean x where they begin goes on as

            x''' - (1 + m - e) x'' + (k + m - e (1 + m)) x' + e m x = 0

        from where it should be, which by Jury's criterion shrinks if |k + m - e (1 - m^2) - e^2 m|
        < 1 - e^2 m^2. Without e that is k + m < 1.
        """
        if self.is_warned or self.is_plain or not self.delay or self.pace.is_measuring:
            return
        self.is_warned = True
        steps, momentum, eager = self.pace.steps, self.outer_momentum, self.eager
        pull = self.outer_lr / self.gap.steady()
        shrunk = abs(pull + momentum - eager * (1 - momentum**2) - eager**2 * momentum)
        if shrunk >= 1 - (eager * momentum) ** 2 and (momentum > 0.5 or steps > LONG):
            warnings.warn(
                f"CO2: with an outer momentum of {momentum} and gap={self.gap}, means that come "
                f"one round of {steps} steps late may make training diverge; outer_momentum=0.2 "
                "with gap='gap_aware' or eager=0.5 is safer, or shorter rounds",
                stacklevel=3,
            )

    # --- rounds

    def started(self) -> None:
        """See `LocalUpdates`."""
        self.restarted()
        self.momentum = torch.zeros_like(self.start)

    def restarted(self) -> None:
        """See `LocalUpdates`."""
        own = self.vector()
        self.start = own[self.begin : self.end].clone()
        self.own = own.clone() if self.eager else self.start[:0]
        # the next round that is exchanged begins where the one after it will
        self.gap.moved(0.0)
        if self.delay:
            # the second round begins where the first one did, as if all had said so
            workers = self.group.world_size
            self.flight = self.arrived(own, [workers], workers)

    def arrived(
        self, start: Tensor, told: Sequence[float], workers: int, skip_reason: str = ""
    ) -> PendingReduction:
        """An exchange that has ended.

        Args:
            start: (n,), where the next round begins.
            told: the sums of the workers' first notes; those of others are 0.
            workers: how many these were.
            blame: why there was no mean, in words.
        """
        values = self.room()
        values[: len(start)] = start
        values[self.padded : self.padded + len(told)] = scalars_like(told, values)
        return PendingReduction(values, workers, skip_reason=skip_reason)

    def room(self) -> Tensor:
        """(padded + k,) zeros, for an exchange."""
        return self.space.zeros(self.padded - self.space.num_elements + self.notes)

    def synchronised(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        self.warn_of_momentum()
        if self.delay:
            before = self.start
            values = yield from self.arrive()
            yield from self.leave(values, before)
        else:
            yield from self.leave(self.space.read_parameters(self.room()), self.start)
            yield from self.arrive()
            # nothing is left to wait for
            self.flight = None

    def leave(self, values: Tensor, before: Tensor) -> Algorithm[None]:
        """Begin the exchange of a round.

        Args:
            values: (padded + k,), with this worker's parameters at its end; not to be touched until
                it arrives.
            before: of elements begin to end: where it began.
        """
        count = self.space.num_elements
        values[count:] = 0
        if self.is_sharded and not self.eager:
            # of where it began this worker has only its share: what is exchanged is where it came
            self.before = before
        else:
            torch.sub(self.own if self.eager else before, values[:count], out=values[:count])
        self.offer(values)
        if not self.is_counted:
            self.forget_what_is_not_finite()
        if self.eager:
            self.space.read_parameters(self.own).sub_(values[:count], alpha=self.eager)
            self.space.write_parameters(self.own)
            self.is_in_sync = False
        self.flight = PendingReduction(values, self.group.world_size)
        self.flight.pending = yield Start(self.exchanged(values), CHANNEL)
        if self.pace.is_measuring:
            yield from self.pace.timed(self.flight.ended())

    def arrive(self) -> Algorithm[Tensor]:
        """End the exchange that is under way, and begin a round where it says.

        Returns:
            (padded + k,), its memory, with what this worker's parameters were, and zeros after it.
        """
        assert self.flight is not None, "left before"
        yield from self.flight.ended()
        values = self.flight.values
        # the mean was made one over those that count on the way
        self.accept(values[self.padded :], self.flight.skip_reason, self.flight.workers)
        self.start = values[self.begin : self.end].clone()
        self.before = self.start[:0]
        self.swap(values)
        self.is_in_sync = True
        return values

    @torch.no_grad()
    def swap(self, values: Tensor) -> None:
        """Exchange the parameters and the first n elements of a vector, one after the other."""
        for parameter, view in zip(self.space.parameters, self.space.views(values), strict=True):
            own = parameter.to(values.dtype, copy=True)
            parameter.copy_(view)
            view.copy_(own)

    def apply_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`. With a delay an unfinished round is exchanged as a whole one.

        Without a delay there is nothing to do: `finalize` takes the plain mean of the parameters.
        """
        if not self.delay:
            return
        if self.since:
            self.since = 0
            yield from self.synchronised()
        yield from self.arrive()
        self.restarted()

    def finish_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        if self.flight is not None:
            yield from self.flight.ended()

    # --- beside the steps

    def exchanged(self, values: Tensor) -> Algorithm[str]:
        """Make of how far all have come in a round where the next one begins.

        Args:
            values: (padded + k,), offered; written in place, with the sums of the notes.

        Returns:
            Why there is no mean, in words; the next round then begins where the last one did.
        """
        skip_reason, difference = yield from self.difference(values)
        if difference is not None:
            momentum = difference.div_(self.gap.divisor())
            momentum.add_(self.momentum, alpha=self.outer_momentum)
            # before the clip hides what is not finite; a worker may have no share
            largest = float(momentum.abs().amax()) if len(momentum) else 0.0
            if self.clip is not None:
                momentum.clamp_(-self.clip, self.clip)
            moved = self.outer_lr * float(torch.linalg.vector_norm(momentum))
            start = torch.sub(self.start, momentum, alpha=self.outer_lr)
            told = moved if math.isfinite(largest) else largest
            moved = yield from self.shown(start, told, values)
            if math.isfinite(moved):
                self.momentum.copy_(momentum)
                self.move(moved)
                return ""
            skip_reason = "the mean overflows"
        yield from self.shown(self.start, 0.0, values)
        self.move(0.0)
        return skip_reason

    def move(self, distance: float) -> None:
        """Keep what the gap of the next difference will be: none if it is waited for."""
        self.gap.moved(distance if self.delay else 0.0)

    def difference(self, values: Tensor) -> Algorithm[tuple[str, Tensor | None]]:
        """Of elements begin to end: the mean of how far the workers that count have come.

        Returns:
            Why there is none, in words; and the difference, None if there is none.
        """
        notes = values[self.padded :]
        if self.is_sharded:
            yield Sum(notes)
            summed = yield ReduceScatter(values[: self.padded])
            count = round(float(notes[0]))
            if not count:
                return "", None
            mean = summed[: len(self.start)] / count
            return "", mean if self.eager else self.before - mean
        skip_reason = yield from self.mean.mean(values, self.notes)
        count = 0 if skip_reason else round(float(notes[0]))
        if not count:
            return skip_reason, None
        return "", values[: self.padded] * (self.group.world_size / count)

    def shown(self, part: Tensor, moved: float, values: Tensor) -> Algorithm[float]:
        """Write elements begin to end of all workers into a vector.

        Returns:
            How far they have moved, of how far each has.
        """
        if not self.is_sharded:
            values[: self.padded] = part
            # another machine may round a norm in another way, and all must divide by the same
            return max((yield AllGatherScalar(moved))) if self.gap.is_measured else moved
        sent = part.new_zeros(self.share + 1)
        sent[: len(part)] = part
        sent[self.share] = moved
        rows = yield AllGather(sent)
        values[: self.padded].view(-1, self.share).copy_(rows[:, : self.share])
        return math.hypot(*rows[:, self.share].tolist())

    # --- what it costs, and what a checkpoint keeps

    @property
    def bytes_per_round(self) -> int:
        """What this worker sends for an outer step: the formula."""
        workers, size = self.group.world_size, self.space.dtype.itemsize
        if not self.is_sharded:
            vote = 8 * (workers - 1) if self.gap.is_measured else 0
            return vote + self.compress.bytes_sent(self.space.num_elements, workers, self.notes)
        notes = 2 * (workers - 1) * self.notes * size // workers
        return (workers - 1) * (2 * self.share + 1) * size + notes

    @property
    def state_bytes(self) -> int:
        """Memory from one step to the next, besides that of the inner optimizer.

        Where an exchange ends and the next one begins, one or two such vectors more are needed for
        a moment.
        """
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        flying = 0 if self.flight is None else self.flight.values.nbytes
        kept = sum(each.nbytes for each in (self.start, self.before, self.own, self.momentum))
        return kept + errors + flying

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`; call `finish_pending` first, so that no exchange is pending."""
        gap = self.gap
        shared: dict[str, Any] = {"gap": [gap.distance, gap.usual]}
        if not self.is_sharded:
            shared |= {"start": self.start, "momentum": self.momentum}
        if self.flight is not None:
            assert self.flight.pending is None, "drained before"
            values = self.flight.values
            shared |= {
                "next": values[: self.space.num_elements],
                "told": values[self.padded :].tolist(),
                "workers": self.flight.workers,
                "blame": self.flight.skip_reason,
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
        self.gap.distance, self.gap.usual = shared["gap"]
        if self.delay:
            # signals were for the run that the state was taken of
            told = shared["told"][:1], shared["workers"], shared["blame"]
            self.flight = self.arrived(self.vector(shared["next"]), *told)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `LocalUpdates`.

        Raises:
            ValueError: it is of workers that were eager, kept shares, or were late, and these are
                or do not, or the other way round.
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
                        f"the state of a CO2 {there} {name}, for one {here} it\n\n"
                        "hint: give this one the options of the other"
                    )
        super().restore(snapshot)
        if self.is_plain and "next" in shared:
            # nobody is left to exchange with: what the last round came to is taken at once
            kept = snapshot["shards"] if self.is_sharded else shared
            start = snapshot["local"]["own"] if self.eager else kept["start"]
            self.space.add_to_parameters(self.vector(shared["next"]) - self.vector(start))
