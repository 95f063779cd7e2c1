"""The base class of optimizers that take local steps and synchronize every H steps.

It implements local steps, means over the ranks whose parameters are finite, overlapped exchanges,
and checkpoints. A subclass defines what is exchanged, when, and how the result is applied.

Notation: W ranks, n elements of the flat parameter vector, k extras (numbers appended to an
exchanged vector, such as signals), H steps from one synchronization to the next.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer
from gcnzc.exchange import Algorithm, Group, Start, run
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.base import DistributedOptimizer
from gcnzc.optim.caller import identify_caller
from gcnzc.optim.finite_gradients import delete_nonfinite_state, have_finite_gradients
from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.local.pending_reduction import CHANNEL, PendingReduction
from gcnzc.optim.local.sync_interval import SyncInterval
from gcnzc.optim.state_layout import check_inner_state, check_layout
from gcnzc.optim.validation import check_inner, check_rank
from gcnzc.system.scalars import scalars_like


class LocalUpdates(DistributedOptimizer):
    """The base class of optimizers that take local steps and synchronize every H of them.

    Rank 0's parameters are broadcast at the start. If a gradient of a rank is not finite, or too
    large to be squared, only that rank skips its local step. If parameters of a rank are not finite
    or too large, the mean is taken over the other ranks, and that rank continues from their mean.

    Args:
        inner: the optimizer that takes the local steps. The wrapper shares its parameter groups and
            state, so learning rate schedulers work.
        group: the ranks that communicate; see `DistributedOptimizer`.
        signals: the number of flags, such as a request to stop, that each synchronization combines
            over the ranks.
        total_steps: the number of steps of the run; None if it is not known.
        sync_interval: the number of steps between synchronizations.
        alone: whether a single rank runs the whole method; if False, it only takes the inner
            optimizer's steps.
        module: see `DistributedOptimizer`.

    With torch's GradScaler each rank has its own scale. A rank whose gradients overflow skips its
    local step; the other ranks take theirs.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure, or a parameter is
            sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range.
    """

    exchanges = 1
    """the number of exchanges in H steps, of those whose time `sync_interval` measures"""
    is_replicated = False

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        signals: int = 0,
        total_steps: int | None = None,
        sync_interval: SyncInterval,
        alone: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.is_constructed = False
        check_inner(self.name, inner)
        super().__init__(inner.param_groups, inner.defaults, group, signals, module, total_steps)
        self.is_constructed = True
        self.inner = inner
        self._share_inner_state()
        self.flat_params = FlatParameters(self.param_groups)
        self.initial_requires_grad = self.requires_grad_flags()
        self.worker_info = self.flat_params.worker_info(self.group.rank, self.group.world_size)
        self.sync_interval = sync_interval
        sync_interval.counts_cpu_time = self.flat_params.device.type == "cpu"
        self.is_inner_only = self.group.world_size == 1 and not alone
        """whether this optimizer only takes the inner optimizer's steps"""
        self.reducers: dict[str, Reducer] = {}
        """reducers by name; checkpoints use the same names"""
        self.is_in_sync = False
        """whether all ranks have the same parameters now"""
        self.is_counted: bool | Tensor = True
        """whether this rank's last contribution was finite; a tensor () until it is read"""
        self.since = 0
        """steps since the last synchronization"""
        self.dropped = 0
        """number of means that failed, or excluded ranks with non-finite or too large parameters"""

    @abstractmethod
    def describe_options(self) -> str:
        """Return the options, which must be equal on all ranks, as text."""

    @abstractmethod
    def initialize(self) -> None:
        """Initialize the method from the current parameters, which are equal on all ranks."""

    def reinitialize(self) -> None:
        """Continue in the middle of a run from the current parameters, equal on all ranks."""

    @abstractmethod
    def synchronize(self) -> Algorithm[None]:
        """Synchronize the ranks; called every H steps."""

    def apply_pending(self) -> Algorithm[None]:
        """Wait for the pending exchanges, and apply their results."""
        return
        yield

    def finish_pending(self) -> Algorithm[None]:
        """Wait for the pending exchanges, and keep their results until they are due."""
        return
        yield

    def shared_state(self) -> dict[str, Any]:
        """Return the tensors and numbers that are equal on all ranks."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """Return the vectors (n,) of this rank, without its parameters.

        If the number of ranks changes, their means are loaded.
        """
        return {}

    def shard_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of sharded vectors."""
        return {}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Load results of `shared_state`, `local_state` and `shard_state`.

        The parameters are loaded already.
        """

    @identify_caller
    def algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: an inner step, and every H steps a synchronization."""
        if self.group.world_size == 1:
            self.check_trainable()
        if not self.is_broadcast:
            yield from self.broadcast_model()
        self.skip_reason = ""
        self.local_step()
        self.steps += 1
        if self.is_inner_only:
            # there are no other ranks
            self.received_signals = list(self.signals)
            return
        self.received_signals = [False] * len(self.signals)
        self.is_in_sync = False
        self.sync_interval.record_step()
        yield from self.after_step()
        yield from self.sync_interval.choose(self.exchanges)
        if (yield from self.compare()):
            self.check_trainable()
        self.warn_of_late_phase(self.steps)

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "exchange" if self.steps < self.sync_interval.steps else ""

    def after_step(self) -> Algorithm[None]:
        """Run `synchronize` after every H local steps; called after each local step."""
        self.since += 1
        if self.since >= self.sync_interval.steps:
            self.since = 0
            yield from self.synchronize()

    def local_step(self) -> None:
        """Take the inner optimizer's step, if the gradients are finite."""
        if self.check_gradients():
            self.scale_gradients(self.flat_params.parameters)
            self.inner.step()

    def check_gradients(self) -> bool:
        """Return whether the gradients are finite; if not, count and report a skipped step."""
        is_finite = have_finite_gradients(self.flat_params.parameters, self.gradient_factor())
        if not is_finite:
            self.skipped += 1
            bad = f"a gradient of rank {self.group.rank} is not finite or too large"
            self.skip_reason = f"local step skipped, because {bad}"
        return is_finite

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

    def prepare_mean(self, values: Tensor) -> None:
        """Prepare a vector (elements + k,) for a mean: write its extras; zero it if not finite.

        Elements above `square_limit` count as not finite, because they overflow a norm.

        Sets `is_counted`. Does not synchronize with a GPU.
        """
        end = values.numel() - self.extras
        self.is_counted = can_be_squared(values[:end])
        if values.device.type != "cpu" or not bool(self.is_counted):
            values[:end].masked_fill_(~self.is_counted, 0)
        values[end:] = scalars_like([0, *self.common_extras()], values)
        values[end] = self.is_counted

    def complete_mean(
        self,
        values: Tensor,
        skip_reason: str,
        workers: int | None = None,
        sums: Sequence[float] | None = None,
        contributors: int | None = None,
    ) -> bool:
        """Convert a mean over all ranks to one over those that are finite; read the signals.

        Args:
            values: (elements + k,), after `prepare_mean` and the reduction; scaled in place.
            skip_reason: the error of the reducer; empty if it succeeded.
            workers: the number of ranks in the mean; the current number if None.
            sums: the sums of the extras if they have been read; None to read them from `values`.
            contributors: the number of ranks that contribute a vector; all of them if None.

        Returns:
            Whether there is a mean. If not, no rank may change its parameters.
        """
        end, workers = values.numel() - self.extras, workers or self.group.world_size
        if skip_reason:
            self.record_drop(f"synchronization skipped: {skip_reason}")
            return False
        count, bits, *signals = sums or values[end:].tolist()
        count, expected = round(count), workers if contributors is None else contributors
        self.receive_common([bits, *signals], workers)
        if not count:
            self.record_drop("synchronization skipped: no rank's parameters are finite")
            return False
        if count == expected:
            self.is_counted = True
        else:
            bad = f"the parameters of {expected - count} of {expected} ranks"
            self.record_drop(f"{bad} are not finite or too large")
        if count != workers:
            values[:end] *= workers / count
        return True

    def receive_common(self, sums: Sequence[float], workers: int) -> None:
        """Read the sums of the common extras over `workers` ranks."""
        bits, *signals = sums
        self.comparison.receive(bits, workers)
        self.received_signals = [
            was or round(each) > 0 for was, each in zip(self.received_signals, signals, strict=True)
        ]

    def clear_extras(self, pending: PendingReduction, num_elements: int) -> PendingReduction:
        """Clear the extras of a reduction from a checkpoint, which belong to the earlier run.

        Args:
            pending: its values are (num_elements + k,), or have the fewer extras of an older
                version.
            num_elements: the number of elements of its vector.
        """
        extras = pending.values.new_zeros(self.extras)
        extras[0] = pending.values[num_elements]
        pending.values = torch.cat([pending.values[:num_elements], extras])
        return pending

    def record_drop(self, why: str) -> None:
        """Count a mean that excludes ranks or failed, and append the reason to `skip_reason`."""
        self.dropped += 1
        self.skip_reason = f"{self.skip_reason}; {why}" if self.skip_reason else why

    def average(self, reducer: Reducer, values: Tensor) -> Algorithm[bool]:
        """Replace a vector by its mean over the ranks whose vector is finite.

        Args:
            reducer: a reducer for the vector's number of elements.
            values: (elements + k,), written in place.

        Returns:
            Whether there is a mean. If not, no rank may change its parameters.
        """
        self.prepare_mean(values)
        skip_reason = yield from reducer.mean(values, self.extras)
        return self.complete_mean(values, skip_reason, sums=reducer.extra_sums)

    def start_mean(self, reducer: Reducer, values: Tensor) -> Algorithm[PendingReduction]:
        """Start the reduction of `average`, overlapped with compute.

        Args:
            reducer: a reducer for the vector's number of elements; must not be used until the
                reduction has finished.
            values: (elements + k,); must not be used until then. Pass it to `complete_mean` after.

        Returns:
            The pending reduction.
        """
        self.prepare_mean(values)
        pending = PendingReduction(values, self.group.world_size)
        pending.handle = yield Start(reducer.mean(values, self.extras), CHANNEL)
        if self.sync_interval.is_measuring:
            yield from self.sync_interval.time_exchange(pending.wait())
        return pending

    def compute_parameter_mean(self) -> Algorithm[Tensor | None]:
        """Return the mean (n,) of the parameters over the ranks; None if no rank's are finite."""
        values = self.flat_params.read_parameters(self.flat_params.empty(self.extras))
        self.prepare_mean(values)
        reducer = Dense().reducer(self.flat_params.num_elements, self.worker_info)
        skip_reason = yield from reducer.mean(values, self.extras)
        has_mean = self.complete_mean(values, skip_reason, sums=reducer.extra_sums)
        return values[: self.flat_params.num_elements] if has_mean else None

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

    @identify_caller
    def average_parameters(self) -> Algorithm[Tensor]:
        """Set the parameters to their mean over the ranks, and return this rank's own (n,)."""
        own = self.vector()
        if not (self.is_inner_only or self.is_in_sync):
            mean = yield from self.compute_parameter_mean()
            if mean is not None:
                self.flat_params.write_parameters(mean)
        return own

    def restore_parameters(self, own: Tensor) -> Algorithm[None]:
        """Set the parameters to the result of `average_parameters`; does not communicate."""
        self.flat_params.write_parameters(own)
        return
        yield

    def finish(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: set the parameters to their mean over the ranks."""
        if self.is_inner_only:
            return
        yield from self.apply_pending()
        if not self.is_in_sync:
            mean = yield from self.compute_parameter_mean()
            if mean is not None:
                self.set_parameters(mean)
                self.since = 0
                self.reinitialize()
        yield from self.compare()

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; waits for pending exchanges, as `snapshot` does."""
        self._wait_for_pending()
        return super().__getstate__()

    def _wait_for_pending(self) -> None:
        """Run `finish_pending`, unless `lockstep` runs the ranks and thus has done so."""
        if self.group.world_size == 1 or self.group.backend:
            run(self.finish_pending(), self.group)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank; the tensors are not copied.

        It waits for pending exchanges, whose results are applied when they are due.
        `gcnzc.optim.resize_state` converts the states for another number of ranks. The keys are

            inner    the inner optimizer's state
            shared   tensors, numbers and strings that are equal on all ranks
            local    this rank's counters, and vectors (n,), with `parameters` unless in sync
            shards   this rank's shards of sharded vectors
            errors   the compression errors of each reducer
            layout   a line for each trained parameter, with its shape and dtype
            rank, world_size
        """
        self._wait_for_pending()
        # before the first step, a single rank has no state of the method, too
        is_plain = self.is_inner_only or not self.is_broadcast
        numbers = {
            "steps": self.steps,
            "since": self.since,
            "local_steps": 0 if self.sync_interval.is_measuring else self.sync_interval.steps,
            "is_plain": is_plain,
        }
        shared: dict[str, Any] = {"numbers": numbers}
        counters = torch.tensor([self.skipped, self.dropped], dtype=torch.float64)
        local: dict[str, Tensor] = {"counters": counters}
        (shared if self.is_in_sync else local)["parameters"] = self.vector()
        if not is_plain:
            shared |= self.shared_state()
            local |= self.local_state()
        return {
            "inner": self.inner.state_dict(),
            "shared": shared,
            "local": local,
            "shards": {} if is_plain else self.shard_state(),
            "errors": {name: reducer.errors() for name, reducer in self.reducers.items()},
            "layout": self.flat_params.layout(),
            "rank": self.group.rank,
            "world_size": self.group.world_size,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a `snapshot` of this rank, or a result of `gcnzc.optim.resize_state`.

        Raises:
            ValueError: it is the state of another rank, of another number of ranks, or of other
                parameters. Nothing is loaded then.
        """
        check_rank(snapshot, self.group)
        self._check_layout(snapshot)
        self.inner.load_state_dict(snapshot["inner"])
        self._share_inner_state()
        shared, local = snapshot["shared"], snapshot["local"]
        numbers = shared["numbers"]
        self.steps, self.since = numbers["steps"], numbers["since"]
        # older states have no counters; with another number of ranks they are means
        self.skipped, self.dropped = map(round, local.get("counters", torch.zeros(2)).tolist())
        if self.sync_interval.requested == "auto" and numbers["local_steps"]:
            self.sync_interval.steps = numbers["local_steps"]
            self.sync_interval.is_measuring = False
        for name, reducer in self.reducers.items():
            reducer.load_errors(snapshot["errors"].get(name, {}))
        self.is_broadcast, self.is_in_sync = True, "parameters" in shared
        own = (shared if self.is_in_sync else local)["parameters"]
        self.flat_params.write_parameters(self.vector(own))
        if self.is_inner_only:
            return
        if numbers["is_plain"]:
            # the state of a single rank has no state of the method
            self.initialize()
        else:
            self.load_own(shared, local, snapshot["shards"])

    def _check_layout(self, snapshot: Mapping[str, Any]) -> None:
        own, saved = self.flat_params.layout(), snapshot.get("layout")
        if saved is None:
            # a state of an older version has only the vector of all parameters
            vector = {**snapshot["local"], **snapshot["shared"]}["parameters"]
            own, saved = ([f"{n} elements"] for n in (self.flat_params.num_elements, len(vector)))
        check_layout(own, saved)
        check_inner_state(self.inner, snapshot["inner"])

    @property
    def local_steps(self) -> int:
        """H, the current number of steps from one synchronization to the next."""
        return self.sync_interval.steps

    def reducer(self, name: str, compress: Compression, num_elements: int) -> Reducer:
        """Make a reducer for vectors of `num_elements`; checkpoints have its compression errors."""
        self.reducers[name] = compress.reducer(num_elements, self.worker_info)
        return self.reducers[name]

    def _share_inner_state(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.fill_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

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
