"""The base class of local methods: local steps of any optimizer of torch, and an exchange at times.

    x_i <- InnerOpt(x_i, gradient of rank i)         `local_step`
    v_i <- what rank i contributes                   `read`, after the steps of `find_due`
    v   <- mean of v_i over the ranks                of those whose v_i is finite
    x_i <- x_i and the state, updated with v         `apply`, at once or some steps later

Between the last two the reduction overlaps with local steps. The flat vector is exchanged in one or
more fragments, which are slices of it.

Notation: W ranks, n elements, m of a fragment, P fragments, H local steps, D the delay, k extras.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, Start, Sum, Wait
from gcnzc.exchange.engine import check_kind, identify_caller
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.finite_gradients import delete_nonfinite_state, have_finite_gradients
from gcnzc.optim.fully_shard import holds_on_all_shards
from gcnzc.optim.options import option
from gcnzc.optim.resize import shard_bounds
from gcnzc.optim.sharded import Sharded, gather_shards, padded_size
from gcnzc.optim.state import (
    OWN,
    Errors,
    Field,
    Inner,
    Kind,
    Scalar,
    Vector,
    declared_fields,
    scalar,
    vector,
)
from gcnzc.optim.sync_interval import MAX_OVERLAP_SHARE, MAX_SHARE, Clocks, SyncInterval
from gcnzc.optim.validation import check_above_zero
from gcnzc.optim.wrapping import WrappingOptimizer
from gcnzc.system.arguments import check_flag
from gcnzc.system.scalars import scalars_like

CHANNEL = "outer"
"""the channel of reductions that overlap with local steps"""
SKIPPED = "synchronization skipped"
"""how notes begin that say why there is no mean"""
AT_NEXT_START = -1
"""in place of a step: when the next exchange of the fragment starts"""


def has_exchanges(own: Any) -> bool:
    """Whether a method has the state of exchanges; see `LocalMethod.is_local`."""
    return not own.is_local


def count_kind(own: Any) -> Kind:
    """Return whether counts of exchanges are equal on all ranks."""
    return "shared" if own.is_uniform else "local"


def outer_vector(**options: Any) -> Any:
    """Declare a vector (n,) that is updated with means, while there are exchanges.

    It is equal on all ranks, or each rank has its shard if `sharded`.

    Args:
        options: see `gcnzc.optim.vector`.
    """
    own: dict[str, Any] = {"kind": lambda own: own.outer_kind, "resize": "mean"}
    return vector(exists=has_exchanges, **own | options)


@dataclass(eq=False)
class Fragment:
    """A slice of the flat vector that is exchanged on its own, and its pending result."""

    name: str
    """the name of its compression errors"""
    here: slice
    """the slice, of m elements"""
    padding: int = 0
    """the number of zeros between a vector and its extras, for shards of equal sizes"""
    started: int = 0
    """the step after which its last exchange started"""
    due: int = 0
    """the step after which to apply the result; 0 if none is pending; or `AT_NEXT_START`"""
    mean: Tensor | None = None
    """(m,) of the pending result; None if there is no mean"""
    note: str = ""
    """which ranks the pending mean excludes, or why there is none"""
    excluded: Collection[int] = ()
    """the ranks that do not contribute to the exchange"""
    is_finite: bool | Tensor = True
    """whether this rank's last contribution was finite; a tensor () until it is read"""
    handle: Any = None
    """the answer of `Start`, while the reduction runs"""
    sums: Sequence[float] = ()
    """the sums of the common extras; not saved, since they belong to one run"""
    outer: Optimizer | None = None
    """the outer optimizer of `DiLoCo`, if it is one of torch"""

    def __post_init__(self) -> None:
        self.state_prefix, self.num_elements = self.name, self.here.stop - self.here.start
        self.num_results = self.num_elements
        """the number of elements of a mean that this rank gets"""


class LocalMethod(WrappingOptimizer):
    """The base class of optimizers that take local steps, and exchange at times.

    Rank 0's parameters are broadcast at the start. If a gradient of a rank is not finite, or too
    large to be squared, only that rank skips its local step. If parameters of a rank are not finite
    or too large, the mean is taken over the other ranks, and that rank continues from their mean.
    With torch's GradScaler each rank has its own scale. A single rank only takes the inner
    optimizer's steps, unless `alone`. Call `finalize` after the last step.

    A subclass implements `restart` and `apply`, and may replace `read`, `find_due` and others.

    Args:
        inner: the optimizer of torch that takes the local steps. Its parameter groups and state are
            shared, so learning rate schedulers work.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most `target` of the
            wall time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        compress: compression of the exchanged vectors; None sends them as they are.
        sharded: whether each rank gets only its shard of a mean, for outer state that is sharded
            over the ranks; not with compression.
        alone: whether a single rank also exchanges, with itself.
        target: with "auto", the largest fraction of the wall time for exchanges, above 0; 1/20 if
            None, or 1/2 if the exchanges overlap with the steps.
        clocks: with "auto", the clocks that measure the steps and the exchanges.
        options: those of `DistributedOptimizer`.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure.
        ValueError: an option is out of range, options contradict each other, or options or
            parameters differ between ranks.
    """

    local_steps: Any = option(1)
    """H, the current number of local steps from one exchange to the next"""
    compress: Compression = option(None, check_compression)
    sharded: bool = option(False, check_flag, is_saved=True)
    alone: bool = option(False, check_flag, is_compared=False)
    target: float | None = option(None, check_above_zero)
    clocks: Clocks = option(Clocks(), is_compared=False)

    is_local: bool = scalar(True)
    """whether there have been only local steps, so that there is no state of exchanges: before the
    broadcast, and always on a single rank, unless `alone`"""
    is_in_sync: bool = scalar(False)
    """whether all ranks have the same parameters now"""
    num_exchanges: int = scalar(kind=count_kind, resize="mean")
    """number of exchanges so far"""
    dropped: int = scalar(**OWN)
    """number of means that failed, or excluded ranks with non-finite or too large parameters"""
    delay_steps: int = 0
    """D, the number of steps from the start of an exchange until its result is applied, below H; or
    `AT_NEXT_START`. A subclass may set it in `configure`, before it calls that of its base"""
    is_replicated = False
    accepts_shards = True
    needs_closure = False
    """whether `step` needs a closure, which it may call several times"""
    is_uniform = True
    """whether all ranks exchange after the same steps; otherwise each rank counts its exchanges"""
    late_phase_remedy = (
        "fewer local steps (`local_steps`, of gcnzc train --strategy NAME:local_steps=N) let it "
        "begin sooner"
    )

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        compress = self.compress or Dense()
        if self.sharded and compress != Dense():
            # shards are exchanged uncompressed
            raise ValueError(f"sharded=True with compress={compress}\n\nhint: omit one of them")
        self.compress = Sharded() if self.sharded else compress
        target = self.target
        if target is None:
            target = MAX_OVERLAP_SHARE if self.delay_steps else MAX_SHARE
        self.sync_interval = SyncInterval(self.local_steps, target, self.clocks)
        self.sync_interval.counts_cpu_time = self.all_parameters()[0].device.type == "cpu"
        self.local_steps = self.sync_interval.steps

    # --- what a method implements

    def restart(self) -> None:
        """Continue from the current parameters, which are equal on all ranks.

        Called after the broadcast, where the state has its initial values, and by `finalize`.
        """

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """Write the vector to exchange, by default the parameters, into `out` (m,)."""
        self.flat.read_parameters(out, fragment.here)

    @abstractmethod
    def apply(self, fragment: Fragment, mean: Tensor) -> Algorithm[None] | None:
        """Update the parameters and the state with a mean; a generator if that communicates.

        Args:
            fragment: what was exchanged.
            mean: (m,), or this rank's shard of it if `sharded`; or the result of `compute`. May be
                overwritten.
        """

    def find_due(self, step: int) -> Algorithm[list[Fragment]]:
        """Return the fragments whose exchange starts after a step, the same on all ranks."""
        return [each for each in self.fragments if step - each.started >= self.local_steps]
        yield

    def local_step(self) -> None:
        """Take a local step, if the gradients are finite."""
        if self.check_gradients():
            self.scale_gradients(self.flat.parameters)
            self.inner.step()

    def check_gradients(self) -> bool:
        """Return whether this rank's gradients are finite; if not, count a skipped step."""
        factor = self.gradient_factor()
        is_finite = have_finite_gradients(self.flat.parameters, factor)
        is_finite = holds_on_all_shards(is_finite, self.flat.parameters)
        if not is_finite:
            self.skipped += 1
            bad = f"a gradient of rank {self.group.rank} is not finite or too large"
            self.add_reason(f"local step skipped, because {bad}")
        return is_finite

    def on_start(self, fragment: Fragment, sent: Tensor) -> None:
        """Update the parameters when an exchange starts, after the last result was applied.

        Args:
            fragment: what is exchanged.
            sent: (m,), what `read` wrote; zeros if it is not finite.
        """

    def compute(
        self, fragment: Fragment, mean: Tensor | None, out: Tensor
    ) -> Algorithm[Tensor | None]:
        """Return what `apply` gets; overlapped with the local steps if the reduction is.

        Args:
            fragment: what was exchanged. If there is no mean, `note` of it has the reason.
            mean: see `apply`; None if there is none.
            out: (m,), memory for the result, which begins with the mean.
        """
        return mean
        yield

    def discard(self, fragment: Fragment) -> None:
        """Update the state after an exchange without a result; keeps it by default."""

    def load_alone(self) -> None:
        """Update the parameters of a single rank with a state of several ranks, just loaded."""

    @identify_caller
    def pause_exchanges_algorithm(self) -> Algorithm[None]:
        """Return the communication of `pause_exchanges`; nothing if all ranks exchange together."""
        yield from self.broadcast_model_algorithm()

    @identify_caller
    def resume_exchanges_algorithm(self) -> Algorithm[None]:
        """Return the communication of `resume_exchanges`."""
        return
        yield

    # --- for methods

    @property
    def parameters(self) -> Tensor:
        """The parameters as a vector (n,), copied; assign a vector to change them."""
        return self.flat.values

    @parameters.setter
    def parameters(self, values: Tensor) -> None:
        self.flat.values = values

    @cached_property
    def fragments(self) -> list[Fragment]:
        """The fragments of the flat vector."""
        bounds = pairwise(accumulate(self.fragment_sizes(), initial=0))
        found = [Fragment(f"fragment {p}", slice(*each)) for p, each in enumerate(bounds)]
        for each in found if self.sharded else ():
            count = each.num_elements
            each.num_results = len(range(*self._shard(count)))
            each.padding = padded_size(count, self.group.world_size) - count
        return found

    def fragment_sizes(self) -> list[int]:
        """Return the numbers of elements of the fragments; a single one by default."""
        return [self.flat.num_elements]

    @property
    def outer_kind(self) -> Kind:
        """Which ranks have an `outer_vector`."""
        return "sharded" if self.sharded else "shared"

    def own_part(self, vector: Tensor) -> Tensor:
        """Return what this rank has of a vector (n,): all, or a copy of its shard if `sharded`."""
        return vector[slice(*self._shard(len(vector)))].clone() if self.sharded else vector

    def _shard(self, num_elements: int) -> tuple[int, int]:
        return shard_bounds(num_elements, self.group.rank, self.group.world_size)

    def gather(self, part: Tensor) -> Algorithm[Tensor]:
        """Return the vector (n,) of which the ranks have parts; see `own_part`."""
        if not self.sharded:
            return part
        return (yield from gather_shards(part, self.flat.num_elements, self.group.world_size))

    def set_parameters(self, fragment: Fragment, values: Tensor, own_weight: float = 0.0) -> None:
        """Set the parameters of a fragment to values that are equal on all ranks, or to a mean.

        A rank whose parameters are not finite gets the values, and loses that inner state.

        Args:
            fragment: the fragment.
            values: (m,).
            own_weight: the weight of this rank's current parameters, from 0 to 1.
        """
        if self.delay_steps > 0 or own_weight:
            # the parameters are not those that were exchanged
            own = self.flat.read_parameters(torch.empty_like(values), fragment.here)
            fragment.is_finite = bool(can_be_squared(own))
            if fragment.is_finite and own_weight:
                values = own.mul_(own_weight).add_(values, alpha=1 - own_weight)
        self.flat.write_parameters(values, fragment.here)
        is_whole = fragment.num_elements == self.flat.num_elements
        self.is_in_sync = is_whole and not (own_weight or self.delay_steps > 0)
        if not fragment.is_finite:
            delete_nonfinite_state(self.state, self.flat.parameters)

    def sum_common(self, votes: Sequence[float] = ()) -> Algorithm[list[float]]:
        """Sum the common extras, such as signals, and votes over the ranks; return those of votes.

        For methods whose exchanges do not have all ranks, or whose ranks choose when to exchange.
        """
        values = torch.tensor([*self.common_extras(), *votes], dtype=torch.float64)
        sums = (yield Sum(values)).tolist()
        self.receive_common(sums[: self.num_common_extras])
        return sums[self.num_common_extras :]

    def note_drop(self, why: str) -> None:
        """Count a mean that excludes ranks or failed, on all ranks."""
        self.dropped += 1
        self.add_reason(why)

    def add_reason(self, why: str) -> None:
        """Append to `skip_reason`."""
        self.skip_reason = f"{self.skip_reason}; {why}" if self.skip_reason else why

    # --- steps

    @property
    def is_inner_only(self) -> bool:
        """Whether this optimizer only takes the inner optimizer's steps."""
        return self.group.world_size == 1 and not self.alone

    @property
    def local_share(self) -> float:
        """The fraction of steps without an exchange so far; 0 before the first step."""
        return 1 - self.num_exchanges / self.steps if self.steps else 0.0

    def take_step(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: a local step, and the exchanges that are due."""
        self.local_step()
        if self.is_inner_only:
            self.received_signals = list(self.signals)
            return
        self.is_in_sync = False
        self.sync_interval.record_step()
        yield from self.exchange(self.steps + 1)
        yield from self.sync_interval.choose()
        self.local_steps = self.sync_interval.steps

    def exchange(self, step: int) -> Algorithm[None]:
        """Start the exchanges that are due after a step, and apply the results that are due."""
        search = self.find_due(step)
        check_kind(search, Generator, f"{self.name}.find_due needs a `yield`; it has returned")
        due = yield from search
        self.num_exchanges += bool(due)
        for fragment in due:
            yield from self.sync_interval.time_exchange(self._start(fragment, step))
        for fragment in self.fragments:
            if fragment.due == step:
                yield from self._finish(fragment)

    def _start(self, fragment: Fragment, step: int) -> Algorithm[None]:
        # `apply` of the last result may replace what `compute` of it still reads
        yield from self._wait(fragment)
        payload = self._make_payload(fragment, partial(self.read, fragment))
        yield from self._finish(fragment)
        self.on_start(fragment, payload[: fragment.num_elements])
        fragment.started = step
        reduction = self._exchange(fragment, payload)
        if not self.delay_steps:
            fragment.due = step
            yield from reduction
            yield from self._finish(fragment)
            return
        fragment.due = step + self.delay_steps if self.delay_steps > 0 else AT_NEXT_START
        fragment.handle = yield Start(reduction, CHANNEL)
        if self.sync_interval.is_measuring:
            yield from self._wait(fragment)

    @property
    def extras(self) -> int:
        """k, the number of extras after a vector: whether it is finite, and the common extras."""
        return 1 + self.num_common_extras

    def _make_payload(self, fragment: Fragment, read: Callable[[Tensor], Any]) -> Tensor:
        """Return the vector to exchange, and the extras; does not synchronize with a GPU.

        A vector that is not finite, or too large to be squared, is replaced by zeros.

        Args:
            fragment: what is exchanged.
            read: writes the vector.
        """
        count, end = fragment.num_elements, fragment.num_elements + fragment.padding
        payload = torch.empty(end + self.extras, dtype=self.flat.dtype, device=self.flat.device)
        vector = payload[:count]
        read(vector)
        fragment.is_finite = can_be_squared(vector)
        if payload.device.type != "cpu" or not bool(fragment.is_finite):
            vector.masked_fill_(~fragment.is_finite, 0)
        payload[count:end] = 0
        payload[end:] = scalars_like([0, *self.common_extras()], payload)
        payload[end] = fragment.is_finite
        if self.group.rank in fragment.excluded:
            # it also reduces a slice of the vectors of the others, so it sends as much as they do
            payload[: end + 1] = 0
        return payload

    def _exchange(self, fragment: Fragment, payload: Tensor) -> Algorithm[None]:
        """Compute the result of an exchange; may overlap with the local steps."""
        mean = yield from self._mean(fragment, payload, self.reducers[fragment.name])
        out = payload[: fragment.num_elements]
        fragment.mean = yield from self.compute(fragment, mean, out)

    def _mean(
        self, fragment: Fragment, payload: Tensor, reducer: Reducer
    ) -> Algorithm[Tensor | None]:
        """Return the mean over the ranks whose vector is finite, in `payload`; None for none."""
        world_size = self.group.world_size
        reason = yield from reducer.mean(payload, self.extras)
        fragment.note, fragment.sums = "", ()
        mean = payload[: fragment.num_results]
        if not reason:
            num_finite, fragment.sums = round(reducer.extra_sums[0]), reducer.extra_sums[1:]
            if not num_finite:
                reason = "no rank's parameters are finite"
            elif num_finite < world_size:
                mean *= world_size / num_finite
            if 0 < num_finite < (expected := world_size - len(fragment.excluded)):
                bad = f"the parameters of {expected - num_finite} of {expected} ranks"
                fragment.note = f"{bad} are not finite or too large"
        if reason:
            fragment.note = f"{SKIPPED}: {reason}"
            return None
        return mean

    def _wait(self, fragment: Fragment) -> Algorithm[None]:
        if fragment.handle is not None:
            yield Wait(fragment.handle)
            fragment.handle = None

    def _finish(self, fragment: Fragment) -> Algorithm[None]:
        """Wait for the pending reduction of a fragment, if there is one, and apply its result."""
        yield from self._wait(fragment)
        if not fragment.due:
            return
        mean = self._receive(fragment)
        if mean is None:
            self.discard(fragment)
        else:
            yield from self.apply(fragment, mean) or ()

    def _receive(self, fragment: Fragment) -> Tensor | None:
        """Receive the signals and the note of a finished reduction, and return its result."""
        mean, fragment.mean, fragment.due = fragment.mean, None, 0
        if fragment.sums:
            self.receive_common(fragment.sums)
            fragment.sums = ()
        if fragment.note:
            self.note_drop(fragment.note)
        elif not self.delay_steps:
            # known without a read of the device
            fragment.is_finite = True
        return mean

    # --- evaluations, and the end of the run

    def mean_parameters(self, whole: Fragment) -> Algorithm[Tensor | None]:
        """Return the mean (n,) of the parameters over the ranks; None if there is none."""
        count = self.flat.num_elements
        payload = self._make_payload(whole, self.flat.read_parameters)
        worker = self.flat.worker_info(self.group.rank, self.group.world_size)
        whole.mean = yield from self._mean(whole, payload, Dense().reducer(count, worker))
        return self._receive(whole)

    def whole_vector(self) -> Fragment:
        """Return a fragment of all parameters, which has no state."""
        return Fragment("parameters", slice(0, self.flat.num_elements))

    def apply_pending_algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of pending exchanges, which are applied."""
        for fragment in self.fragments:
            if self.delay_steps == AT_NEXT_START and self.steps > fragment.started:
                # an incomplete round is exchanged like a complete one
                self.num_exchanges += 1
                yield from self._start(fragment, self.steps)
            yield from self._finish(fragment)

    def finish(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: apply pending results, and average the parameters."""
        if self.is_inner_only:
            return ""
        yield from self.apply_pending_algorithm()
        is_end = not self.is_in_sync or self.delay_steps == AT_NEXT_START
        if not self.is_in_sync:
            whole = self.whole_vector()
            mean = yield from self.mean_parameters(whole)
            if mean is None:
                return "no rank's parameters are finite, or their mean overflows"
            self.set_parameters(whole, mean)
            self.is_in_sync = True
        if is_end:
            self.end_round()
            self.restart()
        yield from self.compare_algorithm()
        return ""

    def end_round(self) -> None:
        """Begin the intervals between exchanges at the current step."""
        for fragment in self.fragments:
            fragment.started = self.steps

    @identify_caller
    def average_parameters_algorithm(self) -> Algorithm[Tensor]:
        """See `DistributedOptimizer`; returns this rank's own parameters (n,)."""
        yield from self.pause_exchanges_algorithm()
        own = self.parameters
        if not (self.is_inner_only or self.is_in_sync):
            mean = yield from self.mean_parameters(self.whole_vector())
            if mean is not None:
                self.parameters = mean
        yield from self.resume_exchanges_algorithm()
        return own

    def restore_parameters(self, own: Tensor) -> None:
        """See `DistributedOptimizer`."""
        self.parameters = own

    def pause_exchanges(self) -> None:
        """Prepare for collectives of all ranks outside of the exchanges, as in an evaluation.

        If ranks do not wait for one another in steps, slower ranks may still exchange. All ranks
        call it after the same number of steps, and `resume_exchanges` afterwards.
        """
        self._run(self.pause_exchanges_algorithm(), "pause_exchanges()")

    def resume_exchanges(self) -> None:
        """Take part in exchanges again after `pause_exchanges`."""
        self._run(self.resume_exchanges_algorithm(), "resume_exchanges()")

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

    # --- the state

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        fields: list[Field] = [
            *super().declare(),
            *declared_fields(self.sync_interval),
            Vector(
                owner=self,
                name="parameters",
                kind=lambda own: "shared" if own.is_in_sync else "local",
                resize="mean",
                is_computed=True,
            ),
            Inner(owner=self),
        ]
        for each in self.fragments:
            count: dict[str, Any] = {"owner": each, "kind": count_kind(self), "resize": "mean"}
            fields += [
                Scalar(name="started", **count),
                Scalar(owner=each, name="due"),
                Scalar(owner=each, name="note", initial=""),
                Vector(owner=each, name="mean", size=each.num_elements, exists=self._has_mean),
                Errors(owner=self, name=each.name, compress=self.compress, size=each.num_elements),
            ]
        return fields

    def _has_mean(self, fragment: Fragment) -> bool:
        is_skipped = fragment.note.startswith(SKIPPED) and self.delay_steps != AT_NEXT_START
        return fragment.due != 0 and not is_skipped

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        self.is_in_sync = True
        self._start_exchanges()

    def _start_exchanges(self) -> None:
        if not self.is_inner_only:
            self.is_local = False
            self.declared.allocate()
            self.restart()

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        self.local_steps = self.sync_interval.steps
        for fragment in self.fragments:
            # of an exchange before
            fragment.sums = ()
        if self.is_inner_only:
            if not self.is_local:
                self.load_alone()
            self.is_local = True
            self.declared.allocate()
            for fragment in self.fragments:
                fragment.mean, fragment.due = None, 0
        elif self.is_local:
            # the state of a single rank, or of the time before the broadcast
            self.end_round()
            self._start_exchanges()

    def finish_pending(self) -> None:
        """Wait for the pending exchanges, and keep their results until they are due.

        In a simulation the caller runs `finish_pending_algorithm` of all ranks in `lockstep`.
        """
        if self.group.world_size == 1 or self.group.backend:
            self._run(self.finish_pending_algorithm(), "finish_pending()")

    def finish_pending_algorithm(self) -> Algorithm[None]:
        """Return the communication of `finish_pending`; see `algorithm`."""
        for fragment in self.fragments:
            yield from self._wait(fragment)

    def snapshot(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; calls `finish_pending` before."""
        self.finish_pending()
        return super().snapshot()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `DistributedOptimizer`; calls `finish_pending` before."""
        # a pending exchange would overwrite what is loaded
        self.finish_pending()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; calls `finish_pending` before."""
        self.finish_pending()
        return super().__getstate__()

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; "auto", not the current number of local steps."""
        return super().compared_options() | {"local_steps": self.sync_interval.requested}

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "exchange" if self.steps < self.local_steps else ""
