"""Exchanges that overlap with the local steps, whose results are applied later.

    DelayedSteps    a result is applied a number of steps after the start of its exchange
    DelayedRound    a result is applied when the next exchange starts

The reduction runs on a channel, and so does what an update computes from the mean (`compute`). The
result is applied between two local steps, after the same step on all ranks.

Notation: m elements of an exchanged vector, k extras.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Start, Wait
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.resize import check_mapping
from gcnzc.optim.state_layout import SavedTensor, check_numbers, check_value
from gcnzc.optim.strategy.all_ranks import Collective
from gcnzc.optim.strategy.finite_mean import Reduction, complete_mean
from gcnzc.optim.strategy.recipe import BaseExchange, Update
from gcnzc.optim.strategy.strategy import Strategy

CHANNEL = "outer"
"""the channel of the exchanges"""
DELAYED_MEAN = "next"
"""the name of the mean of a `DelayedRound` in states"""


@dataclass
class Pending:
    """An exchange that has started, or has finished, but whose result has not been applied."""

    values: Tensor
    """(elements + k,): the memory of the exchange; must not be used until it has finished"""
    workers: int
    """the number of ranks in the exchange"""
    due: int = 0
    """the step after which to apply the result"""
    handle: Any = None
    """the result of `Start`; None if the exchange has finished"""
    result: Reduction | None = None
    """the result, if the exchange has finished"""

    def wait(self) -> Algorithm[Reduction]:
        """Wait until the exchange has finished, and return its result."""
        if self.result is None:
            self.result = yield Wait(self.handle)
            self.handle = None
        return self.result


class Delayed(BaseExchange):
    """The base of exchanges whose result is applied later; at most one is pending.

    Args:
        exchange: computes the means.
    """

    def __init__(self, exchange: Collective) -> None:
        self.exchange = exchange
        self.pending: Pending | None = None

    @property
    def source(self) -> Update:
        """The update whose vectors are exchanged."""
        return self.exchange.source

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.exchange.attach(strategy)

    def make_buffer(self) -> Tensor:
        """Return memory (elements + k,) for an exchange: zeros after the first m elements."""
        flat_params, count = self.strategy.flat_params, self.exchange.num_buffered
        values = torch.empty(
            count + self.strategy.extras, dtype=flat_params.dtype, device=flat_params.device
        )
        values[self.source.num_elements :] = 0
        return values

    def start(self, values: Tensor, due: int = 0) -> Algorithm[None]:
        """Start the exchange of a vector.

        Args:
            values: the result of `make_buffer` with the vector, after `Collective.prepare`.
            due: the step after which to apply the result.
        """
        strategy = self.strategy
        self.pending = Pending(values, strategy.group.world_size, due)
        self.pending.handle = yield Start(self._compute(values), CHANNEL)
        if strategy.sync_interval.is_measuring:
            yield from strategy.sync_interval.time_exchange(self.pending.wait())

    def _compute(self, values: Tensor) -> Algorithm[Reduction]:
        """Reduce the vectors and compute the result, overlapped with the local steps."""
        reduction = yield from self.exchange.reduce(values)
        return (yield from self.source.compute(reduction, values))

    def finish(self) -> Algorithm[None]:
        """Wait for the pending exchange, and apply its result."""
        pending = self.pending
        if pending is None:
            return
        result = yield from pending.wait()
        self.pending = None
        mean = complete_mean(self.strategy, result, pending.workers)
        if mean is not None:
            yield from self.source.apply(mean)
        else:
            self.source.discard()

    def finish_pending(self) -> Algorithm[None]:
        """See `RecipePart`."""
        if self.pending is not None:
            yield from self.pending.wait()

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`."""
        return 0 if self.pending is None else self.pending.values.nbytes

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`; call `finish_pending` first, so that no exchange is running."""
        pending = self.pending
        if pending is None:
            return {}
        assert pending.result is not None, "finish_pending was called"
        return self.pending_state(pending, pending.result)

    @abstractmethod
    def pending_state(self, pending: Pending, result: Reduction) -> dict[str, Any]:
        """Return the state of a finished exchange."""


class DelayedSteps(Delayed):
    """An exchange whose result is applied after a number of local steps.

    Args:
        exchange: computes the means.
        delay: the number of steps; 0 to wait at once. It may change between two exchanges.
        name: the name of a pending exchange in checkpoints.
    """

    def __init__(self, exchange: Collective, delay: int, name: str) -> None:
        super().__init__(exchange)
        self.delay, self.name = delay, name

    @property
    def is_overlapped(self) -> bool:
        """See `BaseExchange`."""
        return self.delay > 0

    def describe(self) -> str:
        """See `BaseExchange`."""
        return f"{self.exchange.describe()}, delay={self.delay}"

    def synchronize(self) -> Algorithm[None]:
        """See `BaseExchange`: start an exchange."""
        self.strategy.num_exchanges += 1
        values = self.make_buffer()
        self.source.read(values)
        self.exchange.prepare(values)
        yield from self.start(values, self.strategy.steps + self.delay)

    def apply_due(self) -> Algorithm[None]:
        """See `BaseExchange`."""
        if self.pending is not None and self.pending.due == self.strategy.steps:
            yield from self.finish()

    def apply_pending(self) -> Algorithm[None]:
        """See `RecipePart`."""
        yield from self.finish()

    def pending_state(self, pending: Pending, result: Reduction) -> dict[str, Any]:
        """See `Delayed`."""
        names = ("due", "values", "workers", "skip_reason")
        # of the extras, only the number of finite vectors is loaded
        values = pending.values[: self.source.num_elements + 1]
        found = (pending.due, values, pending.workers, result.skip_reason)
        return {f"{self.name} {name}": value for name, value in zip(names, found, strict=True)}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        name = f"{self.name} values"
        if name not in snapshot["shared"]:
            return {}
        # a mean that is not applied may have overflowed
        return {name: SavedTensor((self.source.num_elements + 1,), may_overflow=True)}

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.strategy.check_option("delay", DELAYED_MEAN in shared, has_now=False)
        names = [f"{self.name} {each}" for each in ("due", "values", "workers", "skip_reason")]
        if any(name in shared for name in names):
            check_mapping(shared, *names)
            # a result that was due earlier would never be applied
            steps = shared["numbers"]["steps"]
            check_value(shared, f"{self.name} due", steps + 1 if self.is_overlapped else steps)
            check_value(shared, f"{self.name} workers", 1)
            # the number of ranks with a finite vector, as a mean
            values, count = shared[f"{self.name} values"], self.source.num_elements
            if isinstance(values, Tensor) and values.numel() > count:
                name = f"{self.name} values[{count}]"
                check_value({name: float(values.flatten()[count])}, name, kind=float)
            check_value(shared, f"{self.name} skip_reason", kind=str)

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.pending = None
        due = shared.get(f"{self.name} due")
        if due is None:
            return
        values, workers = shared[f"{self.name} values"], shared[f"{self.name} workers"]
        count = self.source.num_elements
        # the other extras belong to the run that saved the state
        sums = [float(values[count]), *[0.0] * (self.strategy.extras - 1)]
        values = torch.cat(
            [self.strategy.vector(values[:count]), self.strategy.vector(torch.tensor(sums))]
        )
        skip_reason = shared[f"{self.name} skip_reason"]
        mean = values[:count] if not skip_reason and round(sums[0]) else None
        self.pending = Pending(values, workers, due, result=Reduction(mean, sums, skip_reason))


class DelayedRound(Delayed):
    """An exchange of the end of a round of local steps, which overlaps with the next round.

    At the end of a round, its vector is read before the parameters are set to the result of the
    previous round. At the end of the first round, that result is the initial parameters.
    """

    @property
    def is_overlapped(self) -> bool:
        """See `BaseExchange`."""
        return True

    def describe(self) -> str:
        """See `BaseExchange`."""
        return f"{self.exchange.describe()}, delay=1"

    def reinitialize(self) -> None:
        """See `RecipePart`: the next round starts from the current parameters."""
        world_size = self.strategy.group.world_size
        self._set_finished(self.strategy.vector(), world_size, world_size)

    initialize = reinitialize

    def _set_finished(
        self, result: Tensor, workers: int, num_finite: float, skip_reason: str = ""
    ) -> None:
        """Set the pending exchange to a finished one with a given result (m,)."""
        sums = [num_finite, *[0.0] * (self.strategy.extras - 1)]
        values = self.make_buffer()
        values[: len(result)] = result
        mean = values[: len(result)]
        self.pending = Pending(values, workers, result=Reduction(mean, sums, skip_reason))

    def synchronize(self) -> Algorithm[None]:
        """See `BaseExchange`: apply the result of the last round, and exchange this one."""
        strategy = self.strategy
        strategy.num_exchanges += 1
        # the update may still use what `read` replaces
        yield from self.finish_pending()
        values = self.make_buffer()
        self.read(values)
        yield from self.finish()
        self.exchange.prepare(values)
        if not strategy.is_counted:
            delete_nonfinite_state(strategy.state, strategy.flat_params.parameters)
        self.begin_round(values)
        yield from self.start(values)

    def read(self, out: Tensor) -> None:
        """Write the vector of the last round into the first m elements of `out`."""
        self.source.read(out)

    def begin_round(self, values: Tensor) -> None:
        """Set the parameters for the next round; does nothing by default.

        Args:
            values: the result of `read`, or zeros if it is not finite.
        """

    def apply_pending(self) -> Algorithm[None]:
        """See `RecipePart`: an incomplete round is exchanged like a complete one."""
        if self.strategy.steps_since_sync:
            self.strategy.steps_since_sync = 0
            yield from self.synchronize()
        yield from self.finish()
        self.source.reinitialize()
        self.reinitialize()

    def pending_state(self, pending: Pending, result: Reduction) -> dict[str, Any]:
        """See `Delayed`."""
        return {
            DELAYED_MEAN: pending.values[: self.source.num_elements],
            "extra_sums": list(result.sums),
            "workers": pending.workers,
            "skip_reason": result.skip_reason,
        }

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        # a mean that is not applied may have overflowed
        return {DELAYED_MEAN: SavedTensor((self.source.num_elements,), may_overflow=True)}

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        is_eager = bool(self.local_state())
        self.strategy.check_option("eager", "own" in local, has_now=is_eager)
        self.strategy.check_option("delay", DELAYED_MEAN in shared, has_now=True)
        check_numbers(shared, "extra_sums")
        check_value(shared, "workers", 1)
        check_value(shared, "skip_reason", kind=str)

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`; signals of the run that saved the state are not restored."""
        num_finite = next(iter(shared["extra_sums"]), 0.0)
        result, skip_reason = self.strategy.vector(shared[DELAYED_MEAN]), shared["skip_reason"]
        self._set_finished(result, shared["workers"], num_finite, skip_reason)

    def load_alone(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`: apply the movement from the start of this round to the next one."""
        # an eager rank has a start of its own
        start = local["own"] if "own" in local else {**shared, **shards}["start"]
        moved = self.strategy.vector(shared[DELAYED_MEAN]) - self.strategy.vector(start)
        self.strategy.flat_params.add_to_parameters(moved)
