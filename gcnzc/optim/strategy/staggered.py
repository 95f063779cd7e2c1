"""Exchanges of fragments of the parameters, which start one after another.

The exchange of fragment p of P starts after the steps round(p H / P) + i H, i = 1, 2, ..., and its
result is applied D steps later:

    d_p   <- mean_i (a_p - x_p,i)                    started
    a_p   <- OuterOpt(a_p, d_p)                      D steps later
    x_p,i <- mix x_p,i + (1 - mix) a_p               with the current x

Notation: n elements, m of a fragment, P fragments, H local steps, D the delay, k extras.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Dense
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.local.fragments import Fragment, split_into_fragments
from gcnzc.optim.local.sync_interval import INITIAL_STEPS
from gcnzc.optim.state_layout import check_value
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.delayed import DelayedSteps
from gcnzc.optim.strategy.outer_step import OuterSGD, OuterState
from gcnzc.optim.strategy.recipe import BaseExchange, Policy, Update
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_count, check_range


class FragmentSteps(OuterState):
    """The outer steps of all fragments.

    Args:
        fragments: see `split_into_fragments`.
        named_parameters: the model's `named_parameters()`, for fragments by name.
        outer: the outer optimizer.
        mixing: the weight of a rank's own parameters, from 0 to 1.

    Raises:
        ValueError: `mixing` is out of range.
    """

    def __init__(
        self,
        fragments: int | str | Sequence[str],
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None,
        outer: OuterSGD,
        mixing: float,
    ) -> None:
        check_range("mixing", mixing, lambda weight: 0 <= weight <= 1, "a number in [0, 1]")
        self.requested, self.outer, self.mixing = fragments, outer, mixing
        self.named_parameters = named_parameters

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`.

        Raises:
            ValueError: there are no such fragments.
        """
        super().attach(strategy)
        self.fragments = split_into_fragments(
            strategy.flat_params, self.requested, self.named_parameters
        )
        self.named_parameters = None
        self.steps = [FragmentStep(self, number) for number in range(len(self.fragments))]
        """for each fragment"""
        for step in self.steps:
            step.attach(strategy)

    def describe(self) -> str:
        """See `BaseUpdate`."""
        sizes = ", ".join(str(fragment.num_elements) for fragment in self.fragments)
        return f"fragments of {sizes}, mixing={self.mixing}, {self.outer.describe()}"

    def parts(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return a view of a vector (n,) for each fragment."""
        return vector.split([fragment.num_elements for fragment in self.fragments])

    def reinitialize(self) -> None:
        """See `RecipePart`; the elements of the anchor are in the order of the fragments."""
        self.anchor = self.strategy.flat_params.empty()
        for fragment, part in zip(self.fragments, self.parts(self.anchor), strict=True):
            fragment.read(part)


class FragmentStep(Update):
    """The outer step of one fragment.

    Args:
        steps: has the anchors and momenta of all fragments.
        number: the number of the fragment.
    """

    def __init__(self, steps: FragmentSteps, number: int) -> None:
        self.steps, self.number = steps, number

    @property
    def fragment(self) -> Fragment:
        """The fragment."""
        return self.steps.fragments[self.number]

    @property
    def num_elements(self) -> int:
        """See `BaseUpdate`."""
        return self.fragment.num_elements

    def read(self, out: Tensor) -> None:
        """See `Update`: the anchor minus the parameters."""
        difference = self.fragment.read(out)[: self.num_elements]
        anchor = self.steps.parts(self.steps.anchor)[self.number]
        torch.sub(anchor, difference, out=difference)

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        steps, fragment, strategy = self.steps, self.fragment, self.strategy
        anchor, momentum = (
            steps.parts(each)[self.number] for each in (steps.anchor, steps.momentum)
        )
        steps.outer.step(anchor, momentum, mean)
        # reuse the memory of the exchange
        own = fragment.read(mean)
        if bool(can_be_squared(own)):
            fragment.write(own.mul_(steps.mixing).add_(anchor, alpha=1 - steps.mixing))
        else:
            fragment.write(anchor)
            delete_nonfinite_state(strategy.state, strategy.flat_params.parameters)
        return
        yield


class Staggered(Policy):
    """Start the exchange of each fragment every H steps, at other steps for other fragments.

    Args:
        delay: D, below H; or "auto", the smallest D such that an exchange takes at most half the
            time of D steps, once H has been measured.
        update: has the fragments.

    Raises:
        ValueError: the delay is out of range.
    """

    def __init__(self, delay: int | str, update: FragmentSteps) -> None:
        if delay != "auto":
            # a fractional delay would never equal a step number
            check_count("delay", delay)
        self.requested_delay, self.update = delay, update
        self.delay = 1 if isinstance(delay, str) else int(delay)
        """the current D"""
        self.due: list[int] = []
        """the numbers of the fragments whose exchange starts after this step"""
        self.origin = 0
        """the step from which the starts of exchanges are counted"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`.

        Raises:
            ValueError: the delay is not below H.
        """
        super().attach(strategy)
        interval = strategy.sync_interval
        interval.least = self.delay + 1
        self.period = interval.steps
        """H since the step `origin`; `SyncInterval.steps` may have changed"""
        if self.delay >= interval.steps:
            raise ValueError(
                f"a delay of {self.requested_delay} steps\n\nhint: give a delay from 0 to "
                f"{interval.steps - 1}, so that an exchange of a fragment finishes before the next "
                "one starts"
                + (f"; H is {INITIAL_STEPS} while it is measured" if interval.is_measuring else "")
            )

    def describe(self) -> str:
        """See `Policy`."""
        requested = self.strategy.sync_interval.requested
        return f"local_steps={requested}, delay={self.requested_delay}"

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`; without communication."""
        strategy, interval = self.strategy, self.strategy.sync_interval
        if self.period != interval.steps:
            # H was measured, and set after the last step
            self.origin, self.period = strategy.steps - 1, interval.steps
            if self.requested_delay == "auto":
                self.delay = min(interval.steps_per_exchange, self.period - 1)
        count, since = len(self.update.fragments), strategy.steps - self.origin
        offsets = [round(number * self.period / count) for number in range(count)]
        self.due = [
            number
            for number, offset in enumerate(offsets)
            if since > offset and (since - offset) % self.period == 0
        ]
        return bool(self.due)
        yield

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        return {"origin": self.origin, "period": self.period, "delay": self.delay}

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        check_value(shared, "origin")
        check_value(shared, "period", 1)
        check_value(shared, "delay")

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.origin, self.period = shared["origin"], shared["period"]
        if self.requested_delay == "auto":
            self.delay = shared["delay"]


class FragmentExchanges(BaseExchange):
    """The exchanges of all fragments, each with a delay of D steps.

    Args:
        compress: compression of the exchanged differences; None for none.
        policy: chooses the fragments, and D.
        update: has the updates of the fragments.
    """

    def __init__(
        self, compress: Compression | None, policy: Staggered, update: FragmentSteps
    ) -> None:
        check_compression(compress)
        self.compress = Dense() if compress is None else compress
        self.policy, self.update = policy, update

    @property
    def is_overlapped(self) -> bool:
        """See `BaseExchange`; also while a delay of 0 steps is tried."""
        return True

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.exchanges: list[DelayedSteps] = []
        """for each fragment"""
        for number, step in enumerate(self.update.steps):
            mean = AllRanks(self.compress, f"fragment {number}")
            mean.source = step
            self.exchanges.append(DelayedSteps(mean, self.policy.delay, mean.name))
            self.exchanges[-1].attach(strategy)
        self.children = self.exchanges
        strategy.sync_interval.exchanges = len(self.exchanges)

    def describe(self) -> str:
        """See `BaseExchange`."""
        return f"compress={self.compress}"

    def synchronize(self) -> Algorithm[None]:
        """See `BaseExchange`: start the exchanges of the fragments that are due."""
        before = self.strategy.num_exchanges
        for number in self.policy.due:
            self.exchanges[number].delay = self.policy.delay
            yield from self.exchanges[number].synchronize()
        # one exchange is counted even if those of several fragments start
        self.strategy.num_exchanges = before + 1

    def apply_due(self) -> Algorithm[None]:
        """See `BaseExchange`."""
        for exchange in self.exchanges:
            yield from exchange.apply_due()
