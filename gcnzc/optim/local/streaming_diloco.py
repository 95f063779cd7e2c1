"""Streaming DiLoCo: synchronize one fragment of the parameters at a time, overlapped with steps.

Every H steps an exchange of fragment p starts, which finishes D steps later:

    after step t       d_p   <- mean_i (a_p - x_p,i)           started
    after step t + D   b_p   <- m b_p + d_p
                       a_p   <- a_p - lr (d_p + m b_p)
                       x_p,i <- mix x_p,i + (1 - mix) a_p      with the current x

as in Douillard et al., "Streaming DiLoCo with overlapping communication" (2025,
https://arxiv.org/abs/2501.18512). The anchors a and momenta b are equal on all ranks; the
parameters differ until `finalize`. The first exchange of fragment p of P starts after step
round(p H / P) + H.

Notation: n elements, P fragments, H local steps, D the delay, k extras.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, Group
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.defaults import DELAY, FRAGMENTS, STREAMING_DILOCO
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.local.base import LocalUpdates
from gcnzc.optim.local.fragments import Fragment, split_into_fragments
from gcnzc.optim.local.pending_reduction import PendingReduction
from gcnzc.optim.local.sync_interval import INITIAL_STEPS, MAX_OVERLAP_SHARE, Clocks, SyncInterval
from gcnzc.optim.strategy.outer_step import Outer
from gcnzc.optim.validation import check_at_least_zero, check_count, check_fraction


class StreamingDiLoCo(LocalUpdates):
    """Streaming DiLoCo: DiLoCo that exchanges fragments of the parameters, overlapped with steps.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most half the wall
            time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        fragments: P; or "modules", or regular expressions: see
            `gcnzc.optim.local.fragments.split_into_fragments`.
        delay: D, the number of steps that overlap with an exchange, below H; or "auto", which
            requires local_steps="auto": the smallest D such that an exchange takes at most half
            the time of D steps.
        mixing: the weight of a rank's own parameters when a fragment is synchronized, from 0 to 1.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the Nesterov momentum of the outer optimizer.
        compress: compression of the exchanged differences.
        named_parameters: the model's `named_parameters()`, for fragments by name.
        alone: whether a single rank also takes outer steps.
        signals: the number of flags, such as a request to stop, that each exchange of a fragment
            combines over the ranks.
        total_steps: the number of steps of the run; None if it is not known. Rank 0 warns if the
            first exchange is late in the run.
        module: see `DistributedOptimizer`.
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
                f"delay='auto' with local_steps={local_steps}\n\n"
                "hint: give local_steps='auto', which measures both"
            )
        if delay != "auto":
            # a fractional delay would never equal a step number
            check_count("delay", delay)
        self.requested_delay = delay
        self.delay = 1 if isinstance(delay, str) else delay
        """the current D"""
        sync_interval = SyncInterval(local_steps, MAX_OVERLAP_SHARE, clocks, least=self.delay + 1)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            sync_interval=sync_interval,
            module=module,
            alone=alone,
        )
        if self.delay >= sync_interval.steps:
            raise ValueError(
                f"a delay of {delay} steps\n\nhint: give a delay from 0 to "
                f"{sync_interval.steps - 1}, so that an exchange of a fragment finishes before the "
                "next one starts"
                + (f"; H is {INITIAL_STEPS} while it is measured" if local_steps == "auto" else "")
            )
        if not 0 <= mixing <= 1:
            raise ValueError(f"mixing is {mixing}\n\nhint: give a number in [0, 1]")
        self.outer = Outer(outer_lr, outer_momentum)
        self.mixing, self.compress = mixing, compress
        self.fragments = split_into_fragments(self.flat_params, fragments, named_parameters)
        self.exchanges = len(self.fragments)
        self.means = [
            self.reducer(f"fragment {number}", compress, fragment.num_elements)
            for number, fragment in enumerate(self.fragments)
        ]
        self.anchor = self.flat_params.zeros()[:0]
        """(n,), fragment by fragment: the outer optimizer's parameters"""
        self.momentum = self.anchor
        """(n,), in the same order: the outer momentum"""
        self.pending: dict[int, tuple[int, PendingReduction]] = {}
        """for each fragment with a pending exchange: the step after which to finish it, and the
        reduction"""
        self.origin, self.period = 0, sync_interval.steps
        """the step from which the starts of exchanges are counted, and the H since then"""
        self.connect()

    def describe_options(self) -> str:
        """See `LocalUpdates`."""
        sizes = ", ".join(str(fragment.num_elements) for fragment in self.fragments)
        return (
            f"StreamingDiLoCo(local_steps={self.sync_interval.requested}, fragments of {sizes}, "
            f"delay={self.requested_delay}, mixing={self.mixing}, outer_lr={self.outer.lr}, "
            f"outer_momentum={self.outer.momentum}, compress={self.compress})"
        )

    def initialize(self) -> None:
        """See `LocalUpdates`."""
        self.reinitialize()
        self.momentum = torch.zeros_like(self.anchor)

    def reinitialize(self) -> None:
        """See `LocalUpdates`."""
        self.anchor = self.flat_params.empty()
        for fragment, part in zip(self.fragments, self._parts(self.anchor), strict=True):
            fragment.read(part)

    def is_due(self, number: int) -> bool:
        """Return whether to start the exchange of fragment `number` after the last step."""
        offset = round(number * self.period / len(self.fragments))
        since = self.steps - self.origin - offset
        return since > 0 and since % self.period == 0

    def after_step(self) -> Algorithm[None]:
        """See `LocalUpdates`: exchanges of fragments may start or finish after any step."""
        yield from self.synchronize()

    def synchronize(self) -> Algorithm[None]:
        """Start the exchanges that are due, and finish those whose delay is over."""
        if self.period != self.sync_interval.steps:
            # H was measured, and set after the last step
            self.origin, self.period = self.steps - 1, self.sync_interval.steps
            if self.requested_delay == "auto":
                self.delay = min(self.sync_interval.steps_per_exchange, self.period - 1)
        for number in range(len(self.fragments)):
            if self.is_due(number):
                yield from self._start_exchange(number)
        for number in [each for each, (due, _) in self.pending.items() if due == self.steps]:
            yield from self._finish_exchange(number)

    def _start_exchange(self, number: int) -> Algorithm[None]:
        """Start the exchange of a fragment from a copy of its parameters."""
        fragment = self.fragments[number]
        values = self.anchor.new_empty(fragment.num_elements + self.extras)
        difference = fragment.read(values)[: fragment.num_elements]
        torch.sub(self._parts(self.anchor)[number], difference, out=difference)
        pending = yield from self.start_mean(self.means[number], values)
        self.pending[number] = self.steps + self.delay, pending

    def _finish_exchange(self, number: int) -> Algorithm[None]:
        """Wait for the exchange of a fragment, and take its outer step."""
        fragment, (_, pending) = self.fragments[number], self.pending.pop(number)
        yield from pending.wait()
        if not self.complete_mean(pending.values, pending.skip_reason, pending.workers):
            return
        anchor, momentum = (self._parts(each)[number] for each in (self.anchor, self.momentum))
        self.outer.step(anchor, momentum, pending.values[: fragment.num_elements])
        # reuse the exchange buffer
        own = fragment.read(pending.values)[: fragment.num_elements]
        if bool(can_be_squared(own)):
            fragment.write(own.mul_(self.mixing).add_(anchor, alpha=1 - self.mixing))
        else:
            fragment.write(anchor)
            delete_nonfinite_state(self.state, self.flat_params.parameters)

    def apply_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for number in list(self.pending):
            yield from self._finish_exchange(number)

    def finish_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for _, pending in self.pending.values():
            yield from pending.wait()

    @property
    def bytes_per_window(self) -> int:
        """Bytes that this rank sends in H steps."""
        world_size, extras = self.group.world_size, self.extras
        return sum(
            self.compress.bytes_sent(fragment.num_elements, world_size, extras)
            for fragment in self.fragments
        )

    @property
    def state_bytes(self) -> int:
        """Current bytes of optimizer state between steps, without the inner optimizer's."""
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        reductions = sum(pending.values.nbytes for _, pending in self.pending.values())
        return self.anchor.nbytes + self.momentum.nbytes + errors + reductions

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`; call `finish_pending` first, so that no exchange is running."""
        shared: dict[str, Any] = {"anchor": self.anchor, "momentum": self.momentum}
        shared |= {"origin": self.origin, "period": self.period, "delay": self.delay}
        for number, (due, pending) in self.pending.items():
            assert pending.handle is None, "finish_pending was called"
            shared |= {f"fragment {number} due": due, **pending.state(f"fragment {number}")}
        return shared

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        self.anchor, self.momentum = self.vector(shared["anchor"]), self.vector(shared["momentum"])
        self.origin, self.period = shared["origin"], shared["period"]
        if self.requested_delay == "auto":
            self.delay = shared["delay"]
        self.pending = {
            number: (
                shared[f"fragment {number} due"],
                self.clear_extras(
                    PendingReduction(
                        self.vector(shared[f"fragment {number} values"]),
                        shared[f"fragment {number} workers"],
                        skip_reason=shared[f"fragment {number} skip_reason"],
                    ),
                    fragment.num_elements,
                ),
            )
            for number, fragment in enumerate(self.fragments)
            if f"fragment {number} due" in shared
        }

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return a view of a vector (n,) for each fragment."""
        return values.split([fragment.num_elements for fragment in self.fragments])


__all__ = ["Fragment", "StreamingDiLoCo"]
