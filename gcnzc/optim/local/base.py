"""The base class of optimizers with local updates: local steps, and a synchronisation every H.

It has local steps, means over the workers whose parameters are finite, overlapped exchanges, and
checkpoints. A subclass defines what is exchanged, when, and how the result is applied.

Letters: W workers, n elements of the parameters as one vector, k notes appended to a vector, H
steps from one synchronisation to the next.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer, WorkerInfo
from gcnzc.exchange import Algorithm, Group, Start, Wait, run
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.base import DistributedOptimizer, identified
from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.local.sync_interval import SyncInterval
from gcnzc.optim.validation import check_inner
from gcnzc.system.scalars import read_scalars, scalars_like

CHANNEL = "outer"
"""the channel of exchanges that overlap with compute"""


@dataclass
class PendingReduction:
    """A pending reduction, or a finished one whose result has not been applied yet."""

    values: Tensor
    """(elements + k,); must not be used until the reduction has finished"""
    workers: int | None = None
    """the number of workers in the mean; the current number if None"""
    pending: Any = None
    """the result of `Start`; None if the reduction has finished"""
    skip_reason: str = ""
    """why there is no mean; empty if there is one"""

    def ended(self) -> Algorithm[None]:
        """Wait until the reduction has finished."""
        if self.pending is not None:
            self.skip_reason = yield Wait(self.pending)
            self.pending = None

    def saved(self, name: str) -> dict[str, Any]:
        """Return the state of a finished reduction for a checkpoint."""
        return {
            f"{name} values": self.values,
            f"{name} workers": self.workers,
            f"{name} blame": self.skip_reason,
        }


class LocalUpdates(DistributedOptimizer):
    """The base class of optimizers that take local steps and synchronise every H of them.

    Rank 0's parameters are broadcast at the start. If a gradient of a worker is not finite, only
    that worker skips its local step. If parameters of a worker are not finite, the mean is taken
    over the other workers, and that worker continues from their mean.

    Args:
        inner: the optimizer that takes the local steps. The wrapper shares its parameter groups and
            state, so learning rate schedulers work.
        group: the ranks that communicate; see `DistributedOptimizer`.
        signals: the number of flags, such as a request to stop, that each synchronisation combines
            over the ranks.
        total_steps: the number of steps of the run; None if it is not known.
        pace: the interval of synchronisations.
        alone: whether a single worker runs the whole method; if False, it only takes the inner
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
    """the number of exchanges in H steps, of those whose time `pace` measures"""
    is_replicated = False

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        signals: int = 0,
        total_steps: int | None = None,
        pace: SyncInterval,
        alone: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.is_made = False
        check_inner(type(self).__name__, inner)
        super().__init__(inner.param_groups, inner.defaults, group, signals, module, total_steps)
        self.is_made = True
        self.inner = inner
        self._share()
        self.space = FlatParameters(self.param_groups)
        self.is_trainable = self.trainable()
        self.place = WorkerInfo(
            self.group.rank, self.group.world_size, self.space.device, self.space.dtype
        )
        self.pace = pace
        pace.counts_work = self.space.device.type == "cpu"
        self.is_plain = self.group.world_size == 1 and not alone
        """whether this optimizer only takes the inner optimizer's steps"""
        self.reducers: dict[str, Reducer] = {}
        """by name; checkpoints have the same names"""
        self.is_in_sync = False
        """whether all ranks have the same parameters now"""
        self.is_counted: bool | Tensor = True
        """whether this worker's last contribution was finite; a tensor () until it is read"""
        self.since = 0
        """steps since the last synchronisation"""
        self.dropped = 0
        """number of means without some or all workers, whose parameters were not finite"""

    @abstractmethod
    def words(self) -> str:
        """Return the options, which must be the same on all workers, as text."""

    @abstractmethod
    def started(self) -> None:
        """Initialise the method from the current parameters, which are equal on all ranks."""

    def restarted(self) -> None:
        """Continue in the middle of a run from the current parameters, equal on all ranks."""

    @abstractmethod
    def synchronised(self) -> Algorithm[None]:
        """Synchronise the workers; called every H steps."""

    def apply_pending(self) -> Algorithm[None]:
        """Wait for the pending exchanges, and apply their results."""
        return
        yield

    def finish_pending(self) -> Algorithm[None]:
        """Wait for the pending exchanges, and keep their results until they are due."""
        return
        yield

    def shared_state(self) -> dict[str, Any]:
        """Return the tensors and numbers that are the same on all workers."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """Return the vectors (n,) of this worker besides its parameters.

        With another number of workers, their means are loaded.
        """
        return {}

    def shard_state(self) -> dict[str, Tensor]:
        """Return this worker's slices of sharded vectors."""
        return {}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Load the three states above; the parameters are loaded already."""

    @identified
    def algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: an inner step, and every H steps a synchronisation."""
        if self.group.world_size == 1:
            self.check_trainable()
        yield from self.broadcast_model()
        self.skip_reason = ""
        self.local_step()
        self.steps += 1
        if self.is_plain:
            # there are no other ranks
            self.heard = list(self.asks)
            return
        self.heard = [False] * len(self.asks)
        self.is_in_sync = False
        self.pace.stepped()
        yield from self.after_step()
        yield from self.pace.chosen(self.exchanges)
        if (yield from self.compare()):
            self.check_trainable()
        self.warn_of_late_phase(self.steps)

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "exchange" if self.steps < self.pace.steps else ""

    def after_step(self) -> Algorithm[None]:
        """Run `synchronised` after every H local steps; called after each local step."""
        self.since += 1
        if self.since >= self.pace.steps:
            self.since = 0
            yield from self.synchronised()

    def local_step(self) -> None:
        """Take the inner optimizer's step, if the gradients are finite."""
        if not self._can_step():
            self.skipped += 1
            self.skip_reason = f"a gradient of worker {self.group.rank} is not finite: step skipped"
            return
        self.scale_gradients(self.space.parameters)
        self.inner.step()

    def _can_step(self) -> bool:
        """Whether the gradients are finite, and GradScaler has found no overflow."""
        gradients = [p.grad for p in self.space.parameters if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        flags = [are_finite(*values)] if values else []
        found_inf = getattr(self, "found_inf", None)
        flags += [found_inf == 0] if isinstance(found_inf, Tensor) else []
        return not flags or all(flag > 0 for (flag,) in read_scalars(*flags))

    def layout(self) -> list[str]:
        """See `DistributedOptimizer`."""
        own = f"{self.words()} around {type(self.inner).__name__} and {len(self.asks)} signals"
        return [own, *self.space.layout(), *option_lines(self.param_groups, with_gpu=True)]

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        self.is_in_sync = True
        if not self.is_plain:
            self.started()

    @property
    def notes(self) -> int:
        """k, the number of notes after a vector: whether it is finite, and the common notes."""
        return 1 + self.num_common_notes

    def offer(self, values: Tensor) -> None:
        """Prepare a vector (elements + k,) for a mean: write its notes; zero it if not finite.

        Sets `is_counted`. Does not synchronise with a GPU.
        """
        end = values.numel() - self.notes
        self.is_counted = are_finite(values[:end])
        if values.device.type != "cpu" or not bool(self.is_counted):
            values[:end].masked_fill_(~self.is_counted, 0)
        values[end:] = scalars_like([0, *self.common_notes()], values)
        values[end] = self.is_counted

    def accept(
        self,
        values: Tensor,
        skip_reason: str,
        workers: int | None = None,
        sums: Sequence[float] | None = None,
    ) -> bool:
        """Convert a mean over all workers to one over those that are finite; read the signals.

        Args:
            values: (elements + k,), after `offer` and the reduction; scaled in place.
            blame: the error of the reducer; empty if it succeeded.
            workers: the number of workers in the mean; the current number if None.
            sums: the sums of the notes if they have been read; None to read them from `values`.

        Returns:
            Whether there is a mean. If not, no rank may change its parameters.
        """
        end, workers = values.numel() - self.notes, workers or self.group.world_size
        if skip_reason:
            self.drop(f"synchronisation skipped: {skip_reason}")
            return False
        count, bits, *signals = sums or values[end:].tolist()
        count = round(count)
        self.comparison.receive(bits, workers)
        self.heard = [was or round(each) > 0 for was, each in zip(self.heard, signals, strict=True)]
        if count == workers:
            self.is_counted = True
            return True
        if not count:
            self.drop("synchronisation skipped: no worker's parameters are finite")
            return False
        self.drop(f"the parameters of {workers - count} of {workers} workers are not finite")
        values[:end] *= workers / count
        return True

    def silenced(self, flight: PendingReduction, num_elements: int) -> PendingReduction:
        """Clear the notes of a reduction from a checkpoint, which belong to the earlier run.

        Args:
            flight: with values (num_elements + k,), or with the fewer notes of an older version.
            num_elements: the number of elements of its vector.
        """
        notes = flight.values.new_zeros(self.notes)
        notes[0] = flight.values[num_elements]
        flight.values = torch.cat([flight.values[:num_elements], notes])
        return flight

    def drop(self, why: str) -> None:
        """Count a mean that does not include all ranks, and append the reason to `skip_reason`."""
        self.dropped += 1
        self.skip_reason = f"{self.skip_reason}; {why}" if self.skip_reason else why

    def averaged(self, reducer: Reducer, values: Tensor) -> Algorithm[bool]:
        """Replace a vector by its mean over the workers whose vector is finite.

        Args:
            reducer: for the vector's number of elements.
            values: (elements + k,), written in place.

        Returns:
            Whether there is a mean. If not, no rank may change its parameters.
        """
        self.offer(values)
        skip_reason = yield from self.pace.timed(reducer.mean(values, self.notes))
        return self.accept(values, skip_reason, sums=reducer.note_sums)

    def launched(self, reducer: Reducer, values: Tensor) -> Algorithm[PendingReduction]:
        """Start a mean as `averaged` takes it, overlapped with compute.

        Args:
            reducer: for the vector's number of elements; not to be used until the mean is finished.
            values: (elements + k,); not to be used until then. `accept` completes the mean.

        Returns:
            The pending reduction.
        """
        self.offer(values)
        flight = PendingReduction(values, self.group.world_size)
        flight.pending = yield Start(reducer.mean(values, self.notes), CHANNEL)
        if self.pace.is_measuring:
            yield from self.pace.timed(flight.ended())
        return flight

    def mean_of_parameters(self) -> Algorithm[Tensor | None]:
        """Return the mean (n,) of the parameters over the workers; None if there is none."""
        values = self.space.read_parameters(self.space.empty(self.notes))
        self.offer(values)
        reducer = Dense().reducer(self.space.num_elements, self.place)
        skip_reason = yield from reducer.mean(values, self.notes)
        has_mean = self.accept(values, skip_reason, sums=reducer.note_sums)
        return values[: self.space.num_elements] if has_mean else None

    def vector(self, values: Tensor | None = None) -> Tensor:
        """Return a copy (n,) of `values` on the parameters' device; of the parameters if None."""
        if values is None:
            return self.space.read_parameters(self.space.empty())
        return values.to(self.space.device, self.space.dtype, copy=True)

    def adopt(self, common: Tensor) -> None:
        """Set the parameters to the first n elements of a vector that is equal on all workers."""
        self.space.write_parameters(common)
        self.is_in_sync = True
        if not self.is_counted:
            self.forget_what_is_not_finite()

    def forget_what_is_not_finite(self) -> None:
        """Delete the inner optimizer's state of parameters for which it is not finite."""
        for parameter in self.space.parameters:
            kept = self.state.get(parameter, {}).values()
            tensors = [each for each in kept if isinstance(each, Tensor)]
            if not all(bool(are_finite(each)) for each in tensors):
                del self.state[parameter]

    @identified
    def parameters_averaged(self) -> Algorithm[Tensor]:
        """Set the parameters to their mean over the workers, and return this worker's own (n,)."""
        own = self.vector()
        if not (self.is_plain or self.is_in_sync):
            mean = yield from self.mean_of_parameters()
            if mean is not None:
                self.space.write_parameters(mean)
        return own

    def parameters_restored(self, own: Tensor) -> Algorithm[None]:
        """Set the parameters to the result of `parameters_averaged`; does not communicate."""
        self.space.write_parameters(own)
        return
        yield

    def finish(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: set the parameters to their mean over the ranks."""
        if self.is_plain:
            return
        yield from self.apply_pending()
        if not self.is_in_sync:
            mean = yield from self.mean_of_parameters()
            if mean is not None:
                self.adopt(mean)
                self.since = 0
                self.restarted()
        yield from self.compare()

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; waits for pending exchanges, as `snapshot` does."""
        if self.group.backend:
            run(self.finish_pending(), self.group)
        return super().__getstate__()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this worker; the tensors are not copied.

        It waits for pending exchanges, whose results are applied when they are due.
        `gcnzc.optim.resized` converts the states for another number of workers. The keys are

            inner    the inner optimizer's state
            shared   tensors, numbers and strings that are the same on all workers
            local    vectors (n,) of this worker; has `parameters` unless they are in sync
            shards   this worker's slices of sharded vectors
            errors   the compression errors of each reducer
            rank, world_size
        """
        if self.group.backend:
            run(self.finish_pending(), self.group)
        numbers = {
            "steps": self.steps,
            "since": self.since,
            "local_steps": 0 if self.pace.is_measuring else self.pace.steps,
            "is_plain": self.is_plain,
        }
        shared: dict[str, Any] = {"numbers": numbers}
        local: dict[str, Tensor] = {}
        (shared if self.is_in_sync else local)["parameters"] = self.vector()
        if not self.is_plain:
            shared |= self.shared_state()
            local |= self.local_state()
        return {
            "inner": self.inner.state_dict(),
            "shared": shared,
            "local": local,
            "shards": {} if self.is_plain else self.shard_state(),
            "errors": {name: reducer.errors() for name, reducer in self.reducers.items()},
            "rank": self.group.rank,
            "world_size": self.group.world_size,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a `snapshot` of this worker, or a result of `gcnzc.optim.resized`.

        Raises:
            ValueError: it is the state of another worker, or of another number of workers.
        """
        self.check_own(snapshot)
        self.inner.load_state_dict(snapshot["inner"])
        self._share()
        shared, local = snapshot["shared"], snapshot["local"]
        numbers = shared["numbers"]
        self.steps, self.since = numbers["steps"], numbers["since"]
        if self.pace.wanted == "auto" and numbers["local_steps"]:
            self.pace.steps, self.pace.is_measuring = numbers["local_steps"], False
        for name, reducer in self.reducers.items():
            reducer.load_errors(snapshot["errors"].get(name, {}))
        self.is_broadcast, self.is_in_sync = True, "parameters" in shared
        own = (shared if self.is_in_sync else local)["parameters"]
        self.space.write_parameters(self.vector(own))
        if self.is_plain:
            return
        if numbers["is_plain"]:
            # a state of a single worker has no state of the method
            self.started()
        else:
            self.load_own(shared, local, snapshot["shards"])

    @property
    def local_steps(self) -> int:
        """H, the current number of steps from one synchronisation to the next."""
        return self.pace.steps

    def reducer(self, name: str, compress: Compression, num_elements: int) -> Reducer:
        """Make a reducer for vectors of `num_elements`; checkpoints have its compression errors."""
        self.reducers[name] = compress.reducer(num_elements, self.place)
        return self.reducers[name]

    def _share(self) -> None:
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
        if self.is_made:
            raise RuntimeError(
                f"{type(self).__name__} takes no more parameters\n\nhint: give them to the inner "
                "optimizer before it is wrapped"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{self.words()} of {self.inner!r}, workers={self.group.world_size}"
