"""Recipes: strategies of communication that are composed of three parts, and rarely a fourth.

    policy     when this rank exchanges
    update     what is exchanged, such as parameters, and how the mean is applied
    exchange   with which ranks, and how the mean over them is computed, such as compressed
    local      how a local step is taken, if it needs gradients at several points

A strategy is a function that returns a `Recipe`, such as `gcnzc.optim.selsync`.
`gcnzc.optim.Strategy` executes the recipe around any optimizer of torch. A part has options and,
after `attach`, state of one optimizer, so each optimizer needs its own recipe.

Notation: W ranks, n elements of the flat parameter vector, m elements of an exchanged vector, k
extras (numbers appended to an exchanged vector, such as signals).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.state_layout import SavedTensor

if TYPE_CHECKING:
    from gcnzc.optim.strategy.finite_mean import Reduction
    from gcnzc.optim.strategy.strategy import Strategy


class RecipePart:
    """The base of the parts of a recipe.

    The names in the states of a recipe's parts must differ.
    """

    strategy: "Strategy"
    """the optimizer that the part belongs to; set by `attach`"""
    children: "Sequence[RecipePart]" = ()
    """parts of this part, which the optimizer also initializes, saves and loads"""

    def attach(self, strategy: "Strategy") -> None:
        """Allocate the state for the ranks and parameters of an optimizer; called once.

        The parameters are not equal on all ranks yet; see `initialize`.
        """
        self.strategy = strategy

    def initialize(self) -> None:
        """Initialize the state from the parameters, which are equal on all ranks."""

    def reinitialize(self) -> None:
        """Continue from the current parameters, equal on all ranks, in the middle of a run."""

    def finish_pending(self) -> Algorithm[None]:
        """Wait for pending requests, and keep their results until they are due."""
        return
        yield

    def apply_pending(self) -> Algorithm[None]:
        """Wait for pending requests, and apply their results."""
        return
        yield

    def pause_exchanges(self) -> Algorithm[None]:
        """Prepare for collectives of all ranks outside of the exchanges, as in an evaluation.

        If ranks do not wait for one another in steps, slower ranks still exchange. The part lets
        them exchange without this rank, or continues to exchange with them until all ranks have
        called this method. All ranks call it after the same number of steps; it may be called again
        while exchanges are paused.
        """
        return
        yield

    def resume_exchanges(self) -> Algorithm[None]:
        """Take part in exchanges again after `pause_exchanges`."""
        return
        yield

    def shared_state(self) -> dict[str, Any]:
        """Return the tensors and numbers that are equal on all ranks."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """Return the tensors of this rank.

        If the number of ranks changes, the means of floating-point tensors over the ranks are
        loaded, and the first rank's tensors of integers.
        """
        return {}

    def shard_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of sharded vectors."""
        return {}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """Return by name what to check of the tensors of a state, before anything is loaded.

        All tensors that `load` reads are included; a tensor that only some states have is included
        if this state has it.

        Args:
            snapshot: see `gcnzc.optim.strategy.state.take_snapshot`.
        """
        return {}

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Check the arguments of `load`, before anything is loaded.

        Raises:
            ValueError: a value is missing or damaged, or the state was saved with other options.
        """

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Load the states of all parts; each part reads its own names.

        The parameters are loaded already.
        """

    def load_alone(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Load a state of several ranks on a single one, which only takes local steps.

        It may change the parameters, which are loaded already, by results that were pending.
        """

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors of this part's state between steps, without compression errors."""
        states = (self.shared_state(), self.local_state(), self.shard_state())
        return sum(
            each.nbytes for state in states for each in state.values() if isinstance(each, Tensor)
        )


class Policy(RecipePart, ABC):
    """Decides after each local step whether the ranks exchange."""

    is_uniform: ClassVar[bool] = True
    """whether all ranks exchange after the same steps"""

    @abstractmethod
    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text for `repr`."""

    def observe(self) -> None:
        """Read this rank's gradients before its local step; does nothing by default."""

    @abstractmethod
    def is_due(self) -> Algorithm[bool]:
        """Return whether this rank exchanges after the current step.

        Equal on all ranks if all ranks take part in each exchange.
        """

    def end_step(self) -> Algorithm[None]:
        """End a step, after its exchange if there was one; does nothing by default."""
        return
        yield

    def after_step(self) -> Algorithm[None]:
        """Exchange once if `is_due`; called after each local step."""
        strategy = self.strategy
        if (yield from self.is_due()):
            strategy.steps_since_sync = 0
            yield from strategy.synchronize_algorithm()


class BaseUpdate(RecipePart):
    """The base of updates, and of sets of updates for the fragments of the parameters."""

    @property
    def num_elements(self) -> int:
        """m, the number of exchanged elements; n by default."""
        return self.strategy.flat_params.num_elements

    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text; empty for none."""
        return ""


class Update(BaseUpdate, ABC):
    """What the ranks exchange, and how its mean is applied."""

    @abstractmethod
    def read(self, out: Tensor) -> None:
        """Write the vector to exchange into the first m elements of `out`, (m + k,)."""

    @abstractmethod
    def apply(self, mean: Tensor) -> Algorithm[None]:
        """Apply a mean.

        Args:
            mean: the result of `Exchange.mean`; may be overwritten.
        """

    def discard(self) -> None:
        """Handle an exchange without a mean, on all ranks; keeps the parameters by default."""

    def compute(self, reduction: "Reduction", out: Tensor) -> Algorithm["Reduction"]:
        """Compute the result of an exchange from its mean, overlapped with the local steps.

        Called by `Delayed`; returns the reduction unchanged by default.

        Args:
            reduction: the mean, and the sums of the extras.
            out: the memory of the exchange, whose first m elements may be overwritten.

        Returns:
            The reduction whose `mean` `apply` gets.
        """
        return reduction
        yield


class BaseExchange(RecipePart, ABC):
    """Exchanges the vectors of updates with other ranks, and applies the results."""

    @property
    def is_overlapped(self) -> bool:
        """Whether exchanges overlap with the local steps."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text for `repr`."""

    @abstractmethod
    def synchronize(self) -> Algorithm[None]:
        """Exchange, or start an exchange; called when the policy decides so."""

    def apply_due(self) -> Algorithm[None]:
        """Apply the results that are due after this step; called after each step."""
        return
        yield


class Exchange(BaseExchange):
    """Computes means over ranks, which are applied at once."""

    def synchronize(self) -> Algorithm[None]:
        """See `BaseExchange`."""
        yield from self.strategy.sync_interval.time_exchange(self._read_and_apply())

    def _read_and_apply(self) -> Algorithm[None]:
        strategy, update = self.strategy, self.strategy.recipe.vector_update
        flat_params, count = strategy.flat_params, update.num_elements + strategy.extras
        values = torch.empty(count, dtype=flat_params.dtype, device=flat_params.device)
        update.read(values)
        mean = yield from self.mean(values)
        strategy.num_exchanges += 1
        if mean is not None:
            yield from update.apply(mean)
        else:
            update.discard()

    @abstractmethod
    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """Compute the mean of a vector over ranks.

        Args:
            values: (m + k,). The exchange sets the extras. Overwritten.

        Returns:
            The mean (m,), or this rank's shard of it if the exchange is sharded; None if there is
            no mean, and the parameters must not change.
        """


class LocalStep(RecipePart, ABC):
    """Takes local steps from evaluations of the closure that the caller passes to `step`."""

    @abstractmethod
    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text for `repr`."""

    @abstractmethod
    def take(self, closure: Callable[[], Any]) -> Any:
        """Take one local step.

        Args:
            closure: computes the loss and the gradients of the current minibatch, at the current
                parameters; may be called any number of times.

        Returns:
            The loss at the parameters before the step; None if this rank does not compute it.
        """


@dataclass(frozen=True, eq=False)
class Recipe:
    """A strategy of communication; `gcnzc.optim.Strategy` executes it."""

    name: str
    """name of the strategy, in messages, checkpoints and headers of requests"""
    policy: Policy
    update: BaseUpdate
    exchange: BaseExchange
    local_steps: int | str = 1
    """number of local steps from one exchange to the next, or "auto"; see `SyncInterval`. Only the
    policy `EveryInterval` uses it"""
    control_interval: int | None = None
    """number of steps from one sum of signals over all ranks to the next; None if the exchanges and
    the policy's votes also sum the signals"""
    is_control_overlapped: bool = False
    """whether the sums of `control_interval` are overlapped with the steps; see
    `OverlappedControl`"""
    is_for_one_rank: bool = False
    """whether a single rank also executes the recipe; if False, it takes only local steps"""
    local: LocalStep | None = None
    """how local steps are taken; None for steps of the inner optimizer with the gradients that the
    caller has computed"""

    @property
    def vector_update(self) -> Update:
        """The update, in recipes that do not exchange fragments of the parameters."""
        assert isinstance(self.update, Update), "the parameters are exchanged in fragments"
        return self.update

    @property
    def parts(self) -> list[RecipePart]:
        """The parts, each followed by its children."""
        return [each for part in self._own_parts for each in (part, *part.children)]

    @property
    def _own_parts(self) -> tuple[Policy | BaseUpdate | BaseExchange | LocalStep, ...]:
        parts = self.policy, self.update, self.exchange
        return parts if self.local is None else (*parts, self.local)

    def describe(self) -> str:
        """Return the name and the options, which must be equal on all ranks, as text."""
        options = [part.describe() for part in self._own_parts]
        if self.control_interval is not None:
            options.append(f"control_interval={self.control_interval}")
        return f"{self.name}({', '.join(filter(None, options))})"
