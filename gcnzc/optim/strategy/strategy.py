"""The optimizer that executes a recipe around any optimizer of torch.

Notation: W ranks, n elements of the flat parameter vector, k extras (numbers appended to an
exchanged vector, such as signals), H steps from one synchronization to the next.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, overload
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer
from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.finite_gradients import delete_nonfinite_state, have_finite_gradients
from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.late_phase import FEWER_LOCAL_STEPS
from gcnzc.optim.method import identify_caller
from gcnzc.optim.strategy.control import Control
from gcnzc.optim.strategy.finite_mean import complete_mean, prepare_mean, reduce
from gcnzc.optim.strategy.overlapped_control import OverlappedControl
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.state import load_snapshot, take_snapshot
from gcnzc.optim.sync_interval import MAX_OVERLAP_SHARE, MAX_SHARE, Clocks, SyncInterval
from gcnzc.optim.validation import check_no_unknown
from gcnzc.optim.wrapper import Wrapper

# Names of channels and store keys that belong to one optimizer of a group.


_CLAIMS: "WeakKeyDictionary[Group, Counter[str]]" = WeakKeyDictionary()


def claim_namespace(group: Group, identity: str) -> str:
    """Return a prefix for the names of channels and keys, different from all others of the group.

    An optimizer claims it before it first uses a channel or a key. Copies have the same identity,
    but each copy that communicates has a prefix of its own. Prefixes are the same on all ranks if
    the optimizers and their copies first communicate in the same order; otherwise the ranks open
    channels of different names, which is a `RequestMismatch`.

    Args:
        group: the ranks that communicate.
        identity: the identity of the optimizer.
    """
    claims = _CLAIMS.setdefault(group, Counter())
    claims[identity] += 1
    number = claims[identity] - 1
    return f"{identity} copy {number}" if number else identity


class Strategy(Wrapper):
    """Takes local steps, and exchanges with other ranks as a recipe defines.

    ::

        optimizer = Strategy(torch.optim.SGD(model.parameters(), lr=0.1), selsync())
        loss.backward()
        optimizer.step()

    Call `finalize` after the last step: it sets the parameters of all ranks to their mean.

    Rank 0's parameters are broadcast at the start. If a gradient of a rank is not finite, or too
    large to be squared, only that rank skips its local step. If parameters of a rank are not finite
    or too large, the mean is taken over the other ranks, and that rank continues from their mean.
    With torch's GradScaler each rank has its own scale. A rank whose gradients overflow skips its
    local step; the other ranks take theirs.

    Recipes such as `fedglomo` need gradients at several points in each local step. For them, `step`
    calls a closure several times, like `step` of `torch.optim.LBFGS`::

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
        target: if the local steps are "auto", the largest fraction of the wall time for exchanges;
            1/20 if None, or 1/2 if the exchanges overlap with the steps.
        clocks: if the local steps are "auto", the clocks that measure them and the exchanges.

    Raises:
        TypeError: an option is unknown, the inner optimizer communicates itself or needs a closure,
            or a parameter is sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range, `module` has parameters, but none of the inner
            optimizer's, or the parameters of the ranks differ.
    """

    is_replicated = False
    late_phase_remedy = FEWER_LOCAL_STEPS

    def __init__(
        self,
        inner: Optimizer,
        recipe: Recipe,
        group: Group | None = None,
        *,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        target: float | None = None,
        clocks: Clocks = Clocks(),  # noqa: B008 - it cannot change
        **unknown: NoReturn,
    ) -> None:
        check_no_unknown(type(self).__name__, unknown)
        if not isinstance(recipe, Recipe):
            raise TypeError(
                f"Strategy got a {type(recipe).__name__} as its recipe\n\nhint: call the function "
                "of a strategy, as in Strategy(torch.optim.AdamW(model.parameters()), selsync())"
            )
        if any(hasattr(part, "strategy") for part in recipe.parts):
            raise ValueError(
                f"a recipe of {recipe.name} that another optimizer uses\n\nhint: make a new recipe "
                "for each optimizer"
            )
        self.recipe = recipe
        self.is_constructed = False
        super().__init__(inner, group, signals, module, total_steps)
        self.is_constructed = True
        self.share_inner_state()
        self.flat_params = FlatParameters(self.param_groups)
        self.record_parameters()
        self.worker_info = self.flat_params.worker_info(self.group.rank, self.group.world_size)
        if target is None:
            target = MAX_OVERLAP_SHARE if recipe.exchange.is_overlapped else MAX_SHARE
        self.sync_interval = SyncInterval(recipe.local_steps, target, clocks)
        self.sync_interval.counts_cpu_time = self.flat_params.device.type == "cpu"
        self.is_inner_only = self.group.world_size == 1 and not recipe.is_for_one_rank
        """whether this optimizer only takes the inner optimizer's steps"""
        self.is_in_sync = False
        """whether all ranks have the same parameters now"""
        self.is_counted: bool | Tensor = True
        """whether this rank's last contribution was finite; a tensor () until it is read"""
        self.steps_since_sync = 0
        """number of local steps since the last synchronization"""
        self.dropped = 0
        """number of means that failed, or excluded ranks with non-finite or too large parameters"""
        kind = OverlappedControl if recipe.is_control_overlapped else Control
        self.control = kind(self, recipe.control_interval)
        self.num_exchanges = 0
        """number of exchanges so far, equal on all ranks if the recipe's policy `is_uniform`. If a
        run resumes with another number of ranks, it is the mean over the ranks of the saved run"""
        self._namespace = ""
        self.closure: Callable[[], Any] | None = None
        """the closure of the next step, if `needs_closure`. `step` sets it; a caller that runs
        `algorithm` itself sets it before"""
        self.loss: Any = None
        """what the closure returned first in the last step, detached from its graph; None if it was
        not called"""
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

    def describe_options(self) -> str:
        """Return the options, which must be equal on all ranks, as text."""
        return self.recipe.describe()

    def initialize(self) -> None:
        """Initialize the recipe from the current parameters, which are equal on all ranks."""
        for part in self.recipe.parts:
            part.initialize()

    def reinitialize(self) -> None:
        """Continue in the middle of a run from the current parameters, equal on all ranks."""
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
            The result of the first call of the closure, detached from its graph; None if it was not
            called, for example because this rank does not participate in the round.

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

    def take_step(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: a local step, and an exchange if it is due."""
        self.local_step()
        self.steps += 1
        if self.is_inner_only:
            # there are no other ranks
            self.received_signals = list(self.signals)
            return ""
        self.is_in_sync = False
        self.sync_interval.record_step()
        self.steps_since_sync += 1
        yield from self.recipe.policy.after_step()
        yield from self.recipe.exchange.apply_due()
        yield from self.control.after_step()
        yield from self.recipe.policy.end_step()
        yield from self.sync_interval.choose()
        return ""

    def end_step(self, skip_reason: str) -> None:
        """See `DistributedOptimizer`; `take_step` has counted the step."""
        if self.steps == self.late_step:
            self.warn_of_late_phase()

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "exchange" if self.steps < self.sync_interval.steps else ""

    def local_step(self) -> None:
        """Take a local step, if the gradients are finite; the policy reads them before."""
        if not self.is_inner_only:
            self.recipe.policy.observe()
        if self.recipe.local is None:
            if self.check_gradients():
                self.scale_gradients(self.flat_params.parameters)
                self.inner.step()
            return
        if self.closure is None:
            raise TypeError(
                f"a step of {self.name} without a closure\n\nhint: call step(closure), where "
                "closure() computes the loss of the minibatch, calls backward() on it, and "
                "returns it; a GradScaler does not support closures"
            )
        loss = self.recipe.local.take(self.closure)
        # tensors with a graph cannot be copied by copy.deepcopy, and keep activations in memory
        self.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def check_gradients(self) -> bool:
        """Return whether the gradients are finite; if not, count and report a skipped step."""
        is_finite = have_finite_gradients(self.flat_params.parameters, self.gradient_factor())
        if not is_finite:
            self.skipped += 1
            bad = f"a gradient of rank {self.group.rank} is not finite or too large"
            self.skip_reason = f"local step skipped, because {bad}"
        return is_finite

    def synchronize_algorithm(self) -> Algorithm[None]:
        """Exchange, or start an exchange; the policy calls it."""
        yield from self.recipe.exchange.synchronize()

    def pause_exchanges(self) -> None:
        """Prepare for collectives of all ranks; see `RecipePart.pause_exchanges`."""
        self._run(self.pause_exchanges_algorithm(), "pause_exchanges()")

    @identify_caller
    def pause_exchanges_algorithm(self) -> Algorithm[None]:
        """Return the communication of `pause_exchanges`; see `algorithm`."""
        if not self.is_broadcast:
            # before the first step, the parts have no state
            yield from self.broadcast_model_algorithm()
        if not self.is_inner_only:
            for part in self.recipe.parts:
                yield from part.pause_exchanges()
            yield from self.control.finish_sums()

    def resume_exchanges(self) -> None:
        """Take part in exchanges again after `pause_exchanges`."""
        self._run(self.resume_exchanges_algorithm(), "resume_exchanges()")

    @identify_caller
    def resume_exchanges_algorithm(self) -> Algorithm[None]:
        """Return the communication of `resume_exchanges`; see `algorithm`."""
        if not self.is_inner_only:
            for part in self.recipe.parts:
                yield from part.resume_exchanges()

    def compare_algorithm(self) -> Algorithm[bool]:
        """See `DistributedOptimizer`."""
        if not self.comparison.is_due:
            return False
        yield from self.pause_exchanges_algorithm()
        is_compared = yield from super().compare_algorithm()
        yield from self.resume_exchanges_algorithm()
        return is_compared

    @identify_caller
    def finalize_algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`."""
        yield from self.pause_exchanges_algorithm()
        yield from super().finalize_algorithm()

    def finish_pending(self) -> None:
        """Wait for the pending exchanges, and keep their results until they are due."""
        self._run(self.finish_pending_algorithm(), "finish_pending()")

    def finish_pending_algorithm(self) -> Algorithm[None]:
        """Return the communication of `finish_pending`; see `algorithm`."""
        for part in self.recipe.parts:
            yield from part.finish_pending()

    def apply_pending(self) -> None:
        """Wait for the pending exchanges, and apply their results."""
        self._run(self.apply_pending_algorithm(), "apply_pending()")

    def apply_pending_algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `apply_pending`; see `algorithm`."""
        for part in self.recipe.parts:
            yield from part.apply_pending()

    def finish(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: set the parameters to their mean over the ranks."""
        if self.is_inner_only:
            return ""
        yield from self.apply_pending_algorithm()
        if not self.is_in_sync:
            mean = yield from self._compute_parameter_mean()
            if mean is None:
                return "no rank's parameters are finite, or their mean overflows"
            self.set_parameters(mean)
            self.steps_since_sync = 0
            self.reinitialize()
        yield from self.compare_algorithm()
        return ""

    @identify_caller
    def average_parameters_algorithm(self) -> Algorithm[Tensor]:
        """See `DistributedOptimizer`; returns this rank's own parameters (n,)."""
        yield from self.pause_exchanges_algorithm()
        own = self.vector()
        if not (self.is_inner_only or self.is_in_sync):
            mean = yield from self._compute_parameter_mean()
            if mean is not None:
                self.flat_params.write_parameters(mean)
        yield from self.resume_exchanges_algorithm()
        return own

    def restore_parameters(self, own: Tensor) -> None:
        """See `DistributedOptimizer`."""
        self.flat_params.write_parameters(own)

    def _compute_parameter_mean(self) -> Algorithm[Tensor | None]:
        """Return the mean (n,) of the parameters over the ranks; None if no rank's are finite."""
        values = self.flat_params.read_parameters(self.flat_params.empty(self.extras))
        prepare_mean(self, values)
        reducer = Dense().reducer(self.flat_params.num_elements, self.worker_info)
        reduction = yield from reduce(reducer, values, self.extras)
        return complete_mean(self, reduction)

    def layout_lines(self) -> list[str]:
        """See `DistributedOptimizer`."""
        inner = type(self.inner).__name__
        own = f"{self.describe_options()} around {inner} and {len(self.signals)} signals"
        return [own, *self.flat_params.layout(), *option_lines(self.param_groups, with_gpu=True)]

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        self.is_in_sync = True
        if not self.is_inner_only:
            self.initialize()

    @property
    def extras(self) -> int:
        """k, the number of extras after a vector: whether it is finite, and the common extras."""
        return 1 + self.num_common_extras

    def record_drop(self, why: str) -> None:
        """Count a mean that excludes ranks or failed, and append the reason to `skip_reason`."""
        self.dropped += 1
        self.skip_reason = f"{self.skip_reason}; {why}" if self.skip_reason else why

    def vector(self, values: Tensor | None = None) -> Tensor:
        """Return a copy (n,) of `values` on the parameters' device; of the parameters if None."""
        if values is None:
            return self.flat_params.read_parameters(self.flat_params.empty())
        return values.to(self.flat_params.device, self.flat_params.dtype, copy=True)

    def set_parameters(self, common: Tensor) -> None:
        """Set the parameters to the first n elements of a vector that is equal on all ranks."""
        self.flat_params.write_parameters(common)
        self.is_in_sync = True
        if not self.is_counted:
            delete_nonfinite_state(self.state, self.flat_params.parameters)

    @property
    def local_share(self) -> float:
        """The fraction of steps without an exchange so far; 0 before the first step."""
        return 1 - self.num_exchanges / self.steps if self.steps else 0.0

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without the state of the inner optimizer."""
        return sum(part.state_bytes for part in self.recipe.parts) + self.error_bytes

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; waits for pending exchanges, as `snapshot` does."""
        self._wait_for_pending()
        return {**super().__getstate__(), "_namespace": ""}

    def _wait_for_pending(self) -> None:
        """Run `finish_pending`; in a simulation the caller does so, for all ranks in `lockstep`."""
        if self.group.world_size == 1 or self.group.backend:
            self.finish_pending()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank; see `take_snapshot`.

        It waits for pending exchanges, whose results are applied when they are due.
        """
        self._wait_for_pending()
        return take_snapshot(self)

    def state_layout(self) -> list[str]:
        """See `DistributedOptimizer`."""
        return self.flat_params.layout()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a `snapshot` of this rank; see `load_snapshot`."""
        load_snapshot(self, snapshot)

    def check_option(self, name: str, was_saved: bool, *, has_now: bool) -> None:
        """Check that a state was saved with an option if and only if the recipe has it.

        Raises:
            ValueError: the state has the option and the recipe has not, or the other way round.
        """
        if was_saved != has_now:
            there, here = ("with", "without") if was_saved else ("without", "with")
            raise ValueError(
                f"the state was saved by {self.name} {there} {name}, but this one is {here} it\n\n"
                "hint: construct it with the options of the run that saved the state"
            )

    @property
    def local_steps(self) -> int:
        """H, the current number of steps from one synchronization to the next."""
        return self.sync_interval.steps

    def reducer(self, name: str, compress: Compression, num_elements: int) -> Reducer:
        """Make a reducer for vectors of `num_elements`; checkpoints have its compression errors."""
        self.reducers[name] = compress.reducer(num_elements, self.worker_info)
        return self.reducers[name]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction, because the flat vectors are laid out already.

        Raises:
            RuntimeError: the optimizer is constructed already.
        """
        if self.is_constructed:
            raise RuntimeError(
                f"{self.name} does not support adding parameters\n\nhint: add them to "
                "the inner optimizer before wrapping it"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{self.describe_options()} of {self.inner!r}, workers={self.group.world_size}"
