"""Local updates: workers take steps on their own, and exchange what came of them now and then.

What all such optimizers have in common. One of them says what is exchanged, when, and what is done
with it; here are the local step, means over those workers whose parameters are finite, exchanges
that go on beside the steps, and what a checkpoint keeps.

Letters: W workers, n elements of the parameters as one vector, k notes after a vector, H steps from
one synchronisation to the next.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Place, Reducer
from gcnzc.exchange import Algorithm, Begin, End, Group, run
from gcnzc.finite import are_finite
from gcnzc.optim.exchanging import Exchanging
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.pace import Pace
from gcnzc.optim.space import Space
from gcnzc.optim.validation import check_inner
from gcnzc.scalars import read_scalars, scalars_like

CHANNEL = "outer"
"""on which exchanges go on beside the steps"""


@dataclass
class Flight:
    """A mean that is taken beside the steps, or that has come and waits for its turn."""

    values: Tensor
    """(elements + k,); until the end it belongs to the exchange"""
    workers: int | None = None
    """over how many it is taken; those that there are if None"""
    pending: Any = None
    """of `Begin`; None if it has ended"""
    blame: str = ""
    """why there is no mean, in words"""

    def ended(self) -> Algorithm[None]:
        """Wait for the end."""
        if self.pending is not None:
            self.blame = yield End(self.pending)
            self.pending = None

    def saved(self, name: str) -> dict[str, Any]:
        """What a checkpoint keeps of a flight that has ended."""
        return {
            f"{name} values": self.values,
            f"{name} workers": self.workers,
            f"{name} blame": self.blame,
        }


class LocalUpdates(Exchanging):
    """An optimizer of torch that steps on this worker alone, and what W workers do now and then.

    The parameters of worker 0 become those of all at the start. Where a gradient is not finite,
    this worker alone leaves out its step; where parameters are not, the mean is that of the other
    workers, and this one takes up what they have in common.

    Args:
        inner: of the parameters, on this worker. Its groups and state are this one's, so schedulers
            of the step size work.
        group: of all workers; those for which torch.distributed was initialised if None.
        signals: how many things, such as a wish to stop, are told with a synchronisation.
        total_steps: of the run; None if that is not known.
        pace: how often.
        alone: whether one worker without others does what it would do among them; else it just
            takes the inner optimizer's steps.
        module: see `Exchanging`.

    With torch's GradScaler each rank has its own scale. A rank whose gradients overflow skips its
    local step; the other ranks take theirs.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure, or a parameter is
            sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range.
    """

    exchanges = 1
    """in H steps, of those whose seconds the pace measures"""

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        signals: int = 0,
        total_steps: int | None = None,
        pace: Pace,
        alone: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.is_made = False
        check_inner(type(self).__name__, inner)
        super().__init__(inner.param_groups, inner.defaults, group, signals, module, total_steps)
        self.is_made = True
        self.inner = inner
        self._share()
        self.space = Space(self.param_groups)
        self.is_trainable = self.trainable()
        self.place = Place(
            self.group.rank, self.group.world_size, self.space.device, self.space.dtype
        )
        self.pace = pace
        pace.counts_work = self.space.device.type == "cpu"
        self.is_plain = self.group.world_size == 1 and not alone
        """whether there is nothing to do but the inner optimizer's steps"""
        self.reducers: dict[str, Reducer] = {}
        """by names that a checkpoint keeps"""
        self.is_in_sync = False
        """whether all ranks have the same parameters now"""
        self.is_counted: bool | Tensor = True
        """whether what this worker offered last was finite; () on the device until it is known"""
        self.since = 0
        """steps since the last synchronisation"""
        self.dropped = 0
        """means that were not taken, or not of all workers, since parameters were not finite"""

    @abstractmethod
    def words(self) -> str:
        """The options, which must be the same on all workers."""

    @abstractmethod
    def started(self) -> None:
        """Begin from the parameters as they are now, the same on all workers."""

    def restarted(self) -> None:
        """Go on from the parameters as they are now, the same on all workers, in their middle."""

    @abstractmethod
    def synchronised(self) -> Algorithm[None]:
        """What is done every H steps."""

    def landed(self) -> Algorithm[None]:
        """End the exchanges that go on, and do what was to be done with them."""
        return
        yield

    def drained(self) -> Algorithm[None]:
        """End the exchanges that go on, and keep the answers until they are due."""
        return
        yield

    def shared_state(self) -> dict[str, Any]:
        """Tensors and numbers that are the same on all workers."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """Vectors (n,) of this worker besides its parameters, of which other workers take means."""
        return {}

    def shard_state(self) -> dict[str, Tensor]:
        """This worker's parts of vectors that are shared out."""
        return {}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """Take up what the three above gave; the parameters are there already."""

    def algorithm(self) -> Algorithm[None]:
        """See `Exchanging`: the inner optimizer's step, and what is done now and then."""
        if self.group.world_size == 1:
            self.demand_trainable()
        yield from self.broadcast_model()
        self.blame = ""
        self.local_step()
        self.steps += 1
        if self.is_plain:
            # nobody to tell
            self.heard = list(self.asks)
            return
        self.heard = [False] * len(self.asks)
        self.is_in_sync = False
        self.pace.stepped()
        yield from self.after_step()
        yield from self.pace.chosen(self.exchanges)
        if (yield from self.compare()):
            self.demand_trainable()
        self.warn_of_late_phase(self.steps)

    def late_phase(self) -> str:
        """See `Exchanging`."""
        return "exchange" if self.steps < self.pace.steps else ""

    def after_step(self) -> Algorithm[None]:
        """What is done after every local step: `synchronised` after every H of them."""
        self.since += 1
        if self.since >= self.pace.steps:
            self.since = 0
            yield from self.synchronised()

    def local_step(self) -> None:
        """Take the inner optimizer's step, if the gradients are finite."""
        if not self._can_step():
            self.skipped += 1
            self.blame = f"a gradient of worker {self.group.rank} is not finite: its step left out"
            return
        self.scale_gradients(self.space.parameters)
        self.inner.step()

    def _can_step(self) -> bool:
        """Whether the gradients are finite, and GradScaler has found nothing else."""
        gradients = [p.grad for p in self.space.parameters if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        flags = [are_finite(*values)] if values else []
        found_inf = getattr(self, "found_inf", None)
        if isinstance(found_inf, Tensor):
            flags.append(found_inf == 0)
        return not flags or all(flag > 0 for (flag,) in read_scalars(*flags))

    def layout(self) -> list[str]:
        """See `Exchanging`."""
        options = option_lines(self.param_groups, with_gpu=True)
        return [f"{self.words()} and {len(self.asks)} signals", *self.space.layout(), *options]

    def on_broadcast(self) -> None:
        """See `Exchanging`."""
        self.is_in_sync = True
        if not self.is_plain:
            self.started()

    @property
    def notes(self) -> int:
        """k, after every vector: whether it counts, and the common notes."""
        return 1 + self.num_common_notes

    def offer(self, values: Tensor) -> None:
        """Make a vector (elements + k,) ready for a mean: zeros, which do not count, if not finite.

        `is_counted` says which; nothing is read from a GPU.
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
        blame: str,
        workers: int | None = None,
        sums: Sequence[float] | None = None,
    ) -> bool:
        """Make the mean over those that count of a mean over all, and hear the signals.

        Args:
            values: (elements + k,), offered and then averaged.
            blame: what the reducer said.
            workers: over which it was taken; those that there are now if None.
            sums: of the notes, if they have been read; None to read them from `values`.

        Returns:
            Whether there is a mean; else nothing is to be changed, on any worker.
        """
        end, workers = values.numel() - self.notes, workers or self.group.world_size
        if blame:
            self.drop(f"a synchronisation left out: {blame}")
            return False
        count, bits, *signals = sums or values[end:].tolist()
        count = round(count)
        self.comparison.receive(bits, workers)
        self.heard = [was or round(each) > 0 for was, each in zip(self.heard, signals, strict=True)]
        if count == workers:
            self.is_counted = True
            return True
        if not count:
            self.drop("a synchronisation left out: no worker's parameters are finite")
            return False
        self.drop(f"the parameters of {workers - count} of {workers} workers are not finite")
        values[:end] *= workers / count
        return True

    def silenced(self, flight: Flight, num_elements: int) -> Flight:
        """A flight of a checkpoint, without what its notes said to the run that it was taken of.

        Args:
            flight: with values (num_elements + k,), or fewer notes of an older version.
            num_elements: of its vector.
        """
        notes = flight.values.new_zeros(self.notes)
        notes[0] = flight.values[num_elements]
        flight.values = torch.cat([flight.values[:num_elements], notes])
        return flight

    def drop(self, why: str) -> None:
        """Count a mean that was not taken of all workers, and say why."""
        self.dropped += 1
        self.blame = f"{self.blame}; {why}" if self.blame else why

    def averaged(self, reducer: Reducer, values: Tensor) -> Algorithm[bool]:
        """Replace a vector by its mean over those workers where it is finite.

        Args:
            reducer: of so many elements.
            values: (elements + k,), written in place.

        Returns:
            Whether there is a mean; else nothing is to be changed, on any worker.
        """
        self.offer(values)
        blame = yield from self.pace.timed(reducer.mean(values, self.notes))
        return self.accept(values, blame, sums=reducer.note_sums)

    def launched(self, reducer: Reducer, values: Tensor) -> Algorithm[Flight]:
        """Begin to take such a mean beside the steps.

        Args:
            reducer: of so many elements, that takes no other mean until this one's end.
            values: (elements + k,), not to be touched until then; `accept` makes a mean of it.
        """
        self.offer(values)
        flight = Flight(values, self.group.world_size)
        flight.pending = yield Begin(reducer.mean(values, self.notes), CHANNEL)
        if self.pace.is_measuring:
            yield from self.pace.timed(flight.ended())
        return flight

    def mean_of_parameters(self) -> Algorithm[Tensor | None]:
        """(n,): the mean of the parameters over the workers; None if there is none."""
        values = self.space.read_parameters(self.space.empty(self.notes))
        self.offer(values)
        reducer = Dense().reducer(self.space.num_elements, self.place)
        blame = yield from reducer.mean(values, self.notes)
        has_mean = self.accept(values, blame, sums=reducer.note_sums)
        return values[: self.space.num_elements] if has_mean else None

    def vector(self, values: Tensor | None = None) -> Tensor:
        """(n,): a copy of a vector such as a checkpoint's, or of the parameters if None."""
        if values is None:
            return self.space.read_parameters(self.space.empty())
        return values.to(self.space.device, self.space.dtype, copy=True)

    def adopt(self, common: Tensor) -> None:
        """Go on from a vector (n + any,) that is the same on all workers."""
        self.space.write_parameters(common)
        self.is_in_sync = True
        if not self.is_counted:
            self.forget_what_is_not_finite()

    def forget_what_is_not_finite(self) -> None:
        """Let the inner optimizer begin anew with parameters whose state is not finite."""
        for parameter in self.space.parameters:
            kept = self.state.get(parameter, {}).values()
            tensors = [each for each in kept if isinstance(each, Tensor)]
            if not all(bool(are_finite(each)) for each in tensors):
                del self.state[parameter]

    def parameters_averaged(self) -> Algorithm[Tensor]:
        """Set the parameters to their mean over the workers, and return this worker's own (n,)."""
        own = self.vector()
        if not (self.is_plain or self.is_in_sync):
            mean = yield from self.mean_of_parameters()
            if mean is not None:
                self.space.write_parameters(mean)
        return own

    def parameters_restored(self, own: Tensor) -> Algorithm[None]:
        """Set the parameters to what `parameters_averaged` returned; nothing is asked."""
        self.space.write_parameters(own)
        return
        yield

    def finish(self) -> Algorithm[None]:
        """See `Exchanging`: the mean of what the ranks have."""
        if self.is_plain:
            return
        yield from self.landed()
        if not self.is_in_sync:
            mean = yield from self.mean_of_parameters()
            if mean is not None:
                self.adopt(mean)
                self.since = 0
                self.restarted()
        yield from self.compare()

    def __getstate__(self) -> dict[str, Any]:
        """See `Exchanging`; waits for pending exchanges, as `snapshot` does."""
        if self.group.backend:
            run(self.drained(), self.group)
        return super().__getstate__()

    def snapshot(self) -> dict[str, Any]:
        """What this worker needs to go on, the tensors themselves; `resized` fits it to others.

        Exchanges that go on are waited for, though what they bring is not applied before it is due.
        It holds

            inner    the inner optimizer's state
            shared   tensors, numbers and words that are the same on all workers
            local    vectors (n,) of this worker; `parameters` unless all have the same
            shards   this worker's parts of vectors that are shared out
            errors   of each reducer
            rank, world_size
        """
        if self.group.backend:
            run(self.drained(), self.group)
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
        """Take up this worker's own state, or what `gcnzc.optim.resized` made of that of others.

        Raises:
            ValueError: it is the state of another worker, or of another number of workers.
        """
        self.demand_own(snapshot)
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
            # of one worker alone, without anything in common with others
            self.started()
        else:
            self.load_own(shared, local, snapshot["shards"])

    @property
    def local_steps(self) -> int:
        """H, as it is now."""
        return self.pace.steps

    def reducer(self, name: str, compress: Compression, num_elements: int) -> Reducer:
        """Something to take means of so many elements with, whose errors a checkpoint keeps."""
        self.reducers[name] = compress.reducer(num_elements, self.place)
        return self.reducers[name]

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.fill_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters, since what workers have in common is already laid out.

        Raises:
            RuntimeError: always, once this is made.
        """
        if self.is_made:
            raise RuntimeError(
                f"{type(self).__name__} takes no more parameters\n\nhint: give them to the inner "
                "optimizer before it is wrapped"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{self.words()} of {self.inner!r}, workers={self.group.world_size}"
