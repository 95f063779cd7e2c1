"""The optimizer that executes a recipe around any optimizer of torch."""

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.caller import identify_caller
from gcnzc.optim.local.base import LocalUpdates
from gcnzc.optim.local.sync_interval import Clocks, SyncInterval
from gcnzc.optim.strategy.control import Control
from gcnzc.optim.strategy.namespaces import claim_namespace
from gcnzc.optim.strategy.overlapped_control import OverlappedControl
from gcnzc.optim.strategy.recipe import Recipe


class Strategy(LocalUpdates):
    """Takes local steps, and exchanges with other ranks as a recipe defines.

    ::

        optimizer = Strategy(torch.optim.SGD(model.parameters(), lr=0.1), selsync())
        loss.backward()
        optimizer.step()

    Call `finalize` after the last step: it sets the parameters of all ranks to their mean.

    Recipes such as `fedglomo` need gradients at several points in each local step. For them, `step`
    calls a closure several times, as that of `torch.optim.LBFGS` does::

        def closure():
            optimizer.zero_grad()
            loss = compute_loss(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    Args:
        inner: the optimizer of torch that takes the local steps. The wrapper shares its parameter
            groups and state, so learning rate schedulers work.
        recipe: the strategy, such as the result of `selsync`; it must not be used by another
            optimizer.
        group: the ranks that communicate; see `DistributedOptimizer`.
        signals: the number of flags, such as a request to stop, that the ranks combine by a logical
            or.
        total_steps: the number of steps of the run; None if it is not known. Rank 0 warns if the
            first exchange is late in the run.
        module: see `DistributedOptimizer`.
        target: if the local steps are "auto", the largest fraction of the wall time for exchanges.
        clocks: if the local steps are "auto", the clocks that measure them and the exchanges.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure, or a parameter is
            sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        recipe: Recipe,
        group: Group | None = None,
        *,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        target: float = 0.05,
        clocks: Clocks = Clocks(),  # noqa: B008 - it cannot change
    ) -> None:
        if any(hasattr(part, "strategy") for part in recipe.parts):
            raise ValueError(
                f"a recipe of {recipe.name} that another optimizer uses\n\nhint: make a new recipe "
                "for each optimizer"
            )
        self.recipe = recipe
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            sync_interval=SyncInterval(recipe.local_steps, target, clocks),
            alone=recipe.is_for_one_rank,
            module=module,
        )
        kind = OverlappedControl if recipe.is_control_overlapped else Control
        self.control = kind(self, recipe.control_interval)
        self.num_exchanges = 0
        """number of exchanges so far, equal on all ranks if the recipe's policy `is_uniform`. With
        another number of ranks, a resumed run continues with the mean of those of the ranks"""
        self._namespace = ""
        self.closure: Callable[[], Any] | None = None
        """the closure of the next step, if `needs_closure`. `step` sets it; a caller that runs
        `algorithm` itself sets it before"""
        self.loss: Any = None
        """what the closure returned first in the last step; None if it was not called"""
        for part in recipe.parts:
            part.attach(self)
        self.connect()

    @property
    def name(self) -> str:
        """See `DistributedOptimizer`: the name of the recipe."""
        return self.recipe.name

    @property
    def namespace(self) -> str:
        """The prefix of this optimizer's channels and store keys; a copy has one of its own."""
        if not self._namespace:
            self._namespace = claim_namespace(self.group, self.identity)
        return self._namespace

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`."""
        return {**super().__getstate__(), "_namespace": ""}

    def describe_options(self) -> str:
        """See `LocalUpdates`."""
        return self.recipe.describe()

    def initialize(self) -> None:
        """See `LocalUpdates`."""
        for part in self.recipe.parts:
            part.initialize()

    def reinitialize(self) -> None:
        """See `LocalUpdates`."""
        for part in self.recipe.parts:
            part.reinitialize()

    @property
    def needs_closure(self) -> bool:
        """Whether `step` needs a closure, which it may call several times."""
        return self.recipe.local is not None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See `DistributedOptimizer`; calls the closure several times if `needs_closure`.

        Returns:
            The result of the first call of the closure; None if it was not called, for example
            because this rank does not participate in the round.

        Raises:
            TypeError: there is no closure, but `needs_closure`.
        """
        if not self.needs_closure:
            return super().step(closure)
        self.closure = closure
        try:
            super().step()
        finally:
            self.closure = None
        loss: float | None = self.loss
        return loss

    def local_step(self) -> None:
        """See `LocalUpdates`; the policy reads the gradients before the step."""
        if not self.is_inner_only:
            self.recipe.policy.observe()
        if self.recipe.local is None:
            super().local_step()
            return
        if self.closure is None:
            raise TypeError(
                f"a step of {self.name} without a closure\n\nhint: call step(closure), where "
                "closure() computes the loss of the minibatch, calls backward() on it, and "
                "returns it; a GradScaler does not support closures"
            )
        self.loss = self.recipe.local.take(self.closure)

    def after_step(self) -> Algorithm[None]:
        """See `LocalUpdates`: exchange if the policy decides so."""
        self.since += 1
        yield from self.recipe.policy.after_step()
        yield from self.control.take_turn()
        yield from self.recipe.policy.end_step()

    @identify_caller
    def pause_exchanges(self) -> Algorithm[None]:
        """Prepare for collectives of all ranks; see `RecipePart.pause_exchanges`."""
        if not self.is_broadcast:
            # before the first step, the parts have no state
            yield from self.broadcast_model()
        if not self.is_inner_only:
            for part in self.recipe.parts:
                yield from part.pause_exchanges()
            yield from self.control.finish_sums()

    @identify_caller
    def resume_exchanges(self) -> Algorithm[None]:
        """Take part in exchanges again after `pause_exchanges`."""
        if not self.is_inner_only:
            for part in self.recipe.parts:
                yield from part.resume_exchanges()

    def compare(self) -> Algorithm[bool]:
        """See `DistributedOptimizer`."""
        if not self.comparison.is_due:
            return False
        yield from self.pause_exchanges()
        is_compared = yield from super().compare()
        yield from self.resume_exchanges()
        return is_compared

    @identify_caller
    def average_parameters(self) -> Algorithm[Tensor]:
        """See `LocalUpdates`."""
        yield from self.pause_exchanges()
        own = yield from super().average_parameters()
        yield from self.resume_exchanges()
        return own

    @identify_caller
    def finalize_algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`."""
        yield from self.pause_exchanges()
        yield from super().finalize_algorithm()

    def synchronize(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        update, flat_params = self.recipe.update, self.flat_params
        count = update.num_elements + self.extras
        values = torch.empty(count, dtype=flat_params.dtype, device=flat_params.device)
        update.read(values)
        mean = yield from self.recipe.exchange.mean(values)
        self.num_exchanges += 1
        if mean is not None:
            yield from update.apply(mean)
        else:
            update.discard()

    def finish_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for part in self.recipe.parts:
            yield from part.finish_pending()

    def apply_pending(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        for part in self.recipe.parts:
            yield from part.apply_pending()

    @property
    def local_share(self) -> float:
        """The fraction of steps without an exchange so far; 0 before the first step."""
        return 1 - self.num_exchanges / self.steps if self.steps else 0.0

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without that of the inner optimizer."""
        errors = sum(reducer.state_bytes for reducer in self.reducers.values())
        return sum(part.state_bytes for part in self.recipe.parts) + errors

    def snapshot(self) -> dict[str, Any]:
        """See `LocalUpdates`."""
        snapshot = super().snapshot()
        if not self.recipe.policy.is_uniform:
            # it differs between ranks; see `local_state`
            snapshot["shared"]["numbers"]["since"] = 0
        return snapshot

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`."""
        is_uniform = self.recipe.policy.is_uniform
        state: dict[str, Any] = {"num_exchanges": self.num_exchanges} if is_uniform else {}
        for part in self.recipe.parts:
            state |= part.shared_state()
        return state

    def local_state(self) -> dict[str, Tensor]:
        """See `LocalUpdates`."""
        state: dict[str, Tensor] = {}
        if not self.recipe.policy.is_uniform:
            # floats, so that `resize_state` computes their means
            numbers = [self.num_exchanges, self.since]
            state["num_exchanges"], state["since"] = torch.tensor(numbers, dtype=torch.float64)
        for part in self.recipe.parts:
            state |= part.local_state()
        return state

    def shard_state(self) -> dict[str, Tensor]:
        """See `LocalUpdates`."""
        return {
            name: each for part in self.recipe.parts for name, each in part.shard_state().items()
        }

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        # a state of an older version has it in `shared`, or not at all
        num_exchanges = local.get("num_exchanges", shared.get("num_exchanges", 0))
        self.num_exchanges = round(float(num_exchanges))
        self.since = round(float(local.get("since", self.since)))
        for part in self.recipe.parts:
            part.load(shared, local, shards)
