"""Streaming DiLoCo: DiLoCo of one fragment at a time, overlapped with the steps.

Of every fragment p, at every H-th step t of its own, an exchange begins that ends D steps later:

    after step t       d_p   <- mean_i (a_p - x_p,i), begun
    after step t + D   b_p   <- m b_p + d_p
                       a_p   <- a_p - lr (d_p + m b_p)
                       x_p,i <- mix x_p,i + (1 - mix) a_p      x as it has become by now

as in Douillard et al., "Streaming DiLoCo with overlapping communication" (2025,
https://arxiv.org/abs/2501.18512). The anchors a and momenta b are the same on all workers, which
themselves differ, until `finalize`. Fragment p of P begins at steps round(p H / P) + H, and every H
steps from there.

Letters: n elements, P fragments, H local steps, D the delay, k notes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, Group
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.defaults import DELAY, FRAGMENTS, STREAMING_DILOCO
from gcnzc.optim.local.base import LocalUpdates, PendingReduction
from gcnzc.optim.local.diloco import Outer
from gcnzc.optim.local.fragments import Fragment, split_into_fragments
from gcnzc.optim.local.sync_interval import FIRST, HIDDEN, Clocks, SyncInterval
from gcnzc.optim.validation import check_at_least_zero, check_fraction


class StreamingDiLoCo(LocalUpdates):
    """An optimizer that steps on this worker alone, and takes outer steps beside that.

    One worker without others just takes the inner optimizer's steps.

    Args:
        inner: of the parameters, on this worker; any of torch's.
        group: of all workers; those for which torch.distributed was initialised if None.
        local_steps: H; or "auto", so many that the exchanges take half the time of the
            steps, and a fortieth of their work (`SyncInterval`).
        fragments: P; or "modules", or regular expressions: see
            `gcnzc.optim.local.fragments.split_into_fragments`.
        delay: D, steps from an exchange's beginning to its end; less than H. Or "auto", with H
            that is measured too: so many that an exchange takes half their time.
        mixing: how much of a worker's own parameters stays: 0 nothing, 1 everything.
        outer_lr: the outer optimizer's step size.
        outer_momentum: its momentum, Nesterov's.
        compress: how means are taken.
        named_parameters: of the model, for fragments by name.
        alone: whether one worker without others takes outer steps nevertheless.
        signals: how many things, such as a wish to stop, are told with each fragment.
        total_steps: of the run, for a warning if the first exchange comes late in it; None if that
            is not known.
        module: see `DistributedOptimizer`.
        clocks: seconds, for "auto".

    Raises:
        ValueError: options contradict one another, or the parameters of workers differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = STREAMING_DILOCO.local_steps,
        fragments: int | str | Sequence[str] = FRAGMENTS,
        delay: int | str = DELAY,
        mixing: float = 0.5,
        outer_lr: float = STREAMING_DILOCO.outer_lr,
        outer_momentum: float = STREAMING_DILOCO.outer_momentum,
        compress: Compression = Dense(),  # noqa: B008 - it cannot change
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        alone: bool = False,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        clocks: Clocks = Clocks(),  # noqa: B008 - it cannot change
    ) -> None:
        check_at_least_zero("outer_lr", outer_lr)
        check_fraction("outer_momentum", outer_momentum)
        if delay == "auto" and local_steps != "auto":
            raise ValueError(
                f"a delay that is measured, with {local_steps} local steps\n\n"
                "hint: local_steps='auto' measures both"
            )
        self.wanted_delay = delay
        self.delay = 1 if isinstance(delay, str) else delay
        """D, as it is now"""
        pace = SyncInterval(local_steps, HIDDEN, clocks, least=self.delay + 1)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            pace=pace,
            module=module,
            alone=alone,
        )
        if (isinstance(delay, str) and delay != "auto") or not 0 <= self.delay < pace.steps:
            raise ValueError(
                f"a delay of {delay} steps\n\nhint: from 0 to {pace.steps - 1}, since a fragment "
                "must be back before it leaves again"
                + (f"; H is {FIRST} while it is measured" if local_steps == "auto" else "")
            )
        if not 0 <= mixing <= 1:
            raise ValueError(f"mixing is {mixing}\n\nhint: from 0 to 1")
        self.outer = Outer(outer_lr, outer_momentum)
        self.mixing, self.compress = mixing, compress
        self.fragments = split_into_fragments(self.space, fragments, named_parameters)
        self.exchanges = len(self.fragments)
        self.means = [
            self.reducer(f"fragment {number}", compress, fragment.num_elements)
            for number, fragment in enumerate(self.fragments)
        ]
        self.anchor = self.space.zeros()[:0]
        """(n,), one fragment after the other: where all would begin"""
        self.momentum = self.anchor
        """(n,), in the same order"""
        self.flights: dict[int, tuple[int, PendingReduction]] = {}
        """of fragments, by number: the step after which it ends"""
        self.origin, self.period = 0, pace.steps
        """the step from which beginnings are counted, and the H of that"""
        self.connect()

    def words(self) -> str:
        """See `LocalUpdates`."""
        sizes = ", ".join(str(fragment.num_elements) for fragment in self.fragments)
        return (
            f"StreamingDiLoCo(local_steps={self.pace.wanted}, fragments of {sizes}, "
            f"delay={self.wanted_delay}, mixing={self.mixing}, outer_lr={self.outer.lr}, "
            f"outer_momentum={self.outer.momentum}, compress={self.compress})"
        )

    def started(self) -> None:
        """See `LocalUpdates`."""
        self.restarted()
        self.momentum = torch.zeros_like(self.anchor)

    def restarted(self) -> None:
        """See `LocalUpdates`."""
        self.anchor = self.space.empty()
        for fragment, part in zip(self.fragments, self._parts(self.anchor), strict=True):
            fragment.read(part)

    def begins(self, number: int) -> bool:
        """Whether the exchange of a fragment begins after the step taken last."""
        offset = round(number * self.period / len(self.fragments))
        since = self.steps - self.origin - offset
        return since > 0 and since % self.period == 0

    def after_step(self) -> Algorithm[None]:
        """See `LocalUpdates`: any step may be one of some fragment's."""
        yield from self.synchronised()

    def synchronised(self) -> Algorithm[None]:
        """Begin the exchanges, and end those, for which it is time."""
        if self.period != self.pace.steps:
            # H was chosen after the last step
            self.origin, self.period = self.steps - 1, self.pace.steps
            if self.wanted_delay == "auto":
                self.delay = min(self.pace.steps_an_exchange, self.period - 1)
        for number in range(len(self.fragments)):
            if self.begins(number):
                yield from self.leave(number)
        for number in [each for each, (due, _) in self.flights.items() if due == self.steps]:
            yield from self.arrive(number)

    def leave(self, number: int) -> Algorithm[None]:
        """Begin the exchange of a fragment, of a copy that no step changes."""
        fragment = self.fragments[number]
        values = self.anchor.new_empty(fragment.num_elements + self.notes)
        difference = fragment.read(values)[: fragment.num_elements]
        torch.sub(self._parts(self.anchor)[number], difference, out=difference)
        flight = yield from self.launched(self.means[number], values)
        self.flights[number] = self.steps + self.delay, flight

    def arrive(self, number: int) -> Algorithm[None]:
        """End the exchange of a fragment, and take its outer step."""
        fragment, (_, flight) = self.fragments[number], self.flights.pop(number)
        yield from flight.ended()
        if not self.accept(flight.values, flight.skip_reason, flight.workers):
            return
        anchor, momentum = (self._parts(each)[number] for each in (self.anchor, self.momentum))
        self.outer.step(anchor, momentum, flight.values[: fragment.num_elements])
        # its memory serves for the parameters
        own = fragment.read(flight.values)[: fragment.num_elements]
        if bool(are_finite(own)):
            fragment.write(own.mul_(self.mixing).add_(anchor, alpha=1 - self.mixing))
        else:
            fragment.write(anchor)
            self.forget_what_is_not_finite()

    def apply_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for number in list(self.flights):
            yield from self.arrive(number)

    def finish_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for _, flight in self.flights.values():
            yield from flight.ended()

    @property
    def bytes_per_window(self) -> int:
        """What this worker sends in H steps: the formula."""
        world_size, notes = self.group.world_size, self.notes
        return sum(
            self.compress.bytes_sent(fragment.num_elements, world_size, notes)
            for fragment in self.fragments
        )

    @property
    def state_bytes(self) -> int:
        """Memory from one step to the next now, besides that of the inner optimizer."""
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        flying = sum(flight.values.nbytes for _, flight in self.flights.values())
        return self.anchor.nbytes + self.momentum.nbytes + errors + flying

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`; exchanges that go on must have been ended, by `finish_pending`."""
        shared: dict[str, Any] = {"anchor": self.anchor, "momentum": self.momentum}
        shared |= {"origin": self.origin, "period": self.period, "delay": self.delay}
        for number, (due, flight) in self.flights.items():
            assert flight.pending is None, "drained before"
            shared |= {f"flight {number} due": due, **flight.saved(f"flight {number}")}
        return shared

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        self.anchor, self.momentum = self.vector(shared["anchor"]), self.vector(shared["momentum"])
        self.origin, self.period = shared["origin"], shared["period"]
        if self.wanted_delay == "auto":
            self.delay = shared["delay"]
        self.flights = {
            number: (
                shared[f"flight {number} due"],
                self.silenced(
                    PendingReduction(
                        self.vector(shared[f"flight {number} values"]),
                        shared[f"flight {number} workers"],
                        skip_reason=shared[f"flight {number} blame"],
                    ),
                    fragment.num_elements,
                ),
            )
            for number, fragment in enumerate(self.fragments)
            if f"flight {number} due" in shared
        }

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """A vector of all fragments, as one for each."""
        return values.split([fragment.num_elements for fragment in self.fragments])


__all__ = ["Fragment", "StreamingDiLoCo"]
