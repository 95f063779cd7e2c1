"""Rounds that close without the slowest ranks: the base class of methods that agree by the store.

    F_k <- the ranks that have finished their local steps when round k closes
    the ranks in F_k exchange; the others compute, and finish a later round

Each rank announces in the store that it has finished. A rank that reads that the ranks that have
finished are a quorum (`Quorum`) closes the round by a compare-and-set, so all ranks read the same
members. There is no coordinator, and no rank communicates with a rank that has not finished.

A rank that waits for all others, as in an evaluation, is paused: no round waits for it.

Notation: W ranks.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.exchange import (
    Algorithm,
    AllGatherScalar,
    CompareAndSet,
    DeleteKeys,
    First,
    Group,
    Now,
    ReadKeys,
    Start,
    Sum,
    Wait,
    WaitForKey,
)
from gcnzc.exchange.sync import all_gather_text
from gcnzc.exchange.topology import Edge
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.control import namespace
from gcnzc.optim.group_options import find_difference
from gcnzc.optim.local_method import LocalMethod
from gcnzc.optim.method import identify_caller
from gcnzc.optim.state import Field, Number
from gcnzc.optim.validation import check_count

STEPS_KEPT = 16
"""the number of steps whose times a rank keeps"""
_METHODS: "WeakKeyDictionary[Group, WeakSet[Rounds]]" = WeakKeyDictionary()
"""by group, the optimizers that have announced a status"""


class StatusKind(Enum):
    """What a rank does, or the result of its last local step."""

    FINISHED = "finished"
    """it has finished a local step for a round; its parameters are finite"""
    DAMAGED = "damaged"
    """it has finished a local step for a round; its parameters are not finite or too large"""
    PAUSED = "paused"
    """it waits for all ranks, so no round may wait for it; see `LocalMethod.pause_exchanges`"""


@dataclass(frozen=True)
class RankStatus:
    """What a rank has announced: a state, and the last round for which it has finished a step."""

    round: int
    kind: StatusKind
    loaded_after: int = -1
    """the number of steps after which the rank has loaded a state, so that its rounds begin again;
    -1 if it has not"""

    def to_bytes(self) -> bytes:
        """Return the status as the value of a key."""
        return f"{self.round} {self.kind.value} {self.loaded_after}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankStatus":
        """Return the status in a value; an empty value is that of a rank before its first step."""
        if not data:
            return cls(-1, StatusKind.FINISHED)
        number, kind, loaded_after = data.decode().split()
        return cls(int(number), StatusKind(kind), int(loaded_after))


@dataclass(frozen=True)
class ClosedRound:
    """A closed round, equal on all ranks."""

    round: int
    members: tuple[int, ...]
    """the ranks that exchange, ascending; none if a quorum was not possible"""
    damaged: tuple[int, ...]
    """the members whose parameters are not finite or too large"""
    memory: tuple[int, ...]
    """what the quorum of the next round depends on; see `Quorum.remember`"""
    sends: tuple[Edge, ...] = ()
    """which member sends its state to which"""
    closer: int = 0
    """the rank that has closed the round, and deletes the keys of earlier ones"""
    oldest: int = 0
    """the oldest round whose key is not deleted"""

    def to_bytes(self) -> bytes:
        """Return the round as the value of a key."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClosedRound":
        """Return the round of a value."""
        fields = json.loads(data)
        fields["sends"] = map(tuple, fields["sends"])
        for name in ("members", "damaged", "memory", "sends"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


class Quorum(ABC):
    """When a round closes: when the ranks that have finished are a quorum.

    The rules are functions of the ranks' statuses and of the last closed round, so that any rank
    can apply them. They do not communicate.

    Args:
        world_size: W.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @abstractmethod
    def is_enough(self, last: ClosedRound, finished: set[int], active: set[int]) -> bool:
        """Whether the ranks that have finished are a quorum of those that are not paused."""

    def is_possible(self, active: set[int]) -> bool:
        """Whether these ranks can be a quorum; otherwise the round closes without members."""
        return True

    @abstractmethod
    def remember(self, last: ClosedRound, members: Sequence[int]) -> tuple[int, ...]:
        """Return the `memory` of the current round."""

    def choose_sends(self, last: ClosedRound, members: Sequence[int]) -> tuple[Edge, ...]:
        """Return the `sends` of the current round."""
        return ()

    @abstractmethod
    def begin_memory(self) -> tuple[int, ...]:
        """Return the memory before the first round."""

    def begin(self) -> ClosedRound:
        """Return the round before the first one."""
        return ClosedRound(0, tuple(range(self.world_size)), (), self.begin_memory())

    def resume(self, rounds: Sequence[ClosedRound]) -> ClosedRound:
        """Return the round that a run continues from.

        Args:
            rounds: by rank, the last round that the rank has read.
        """
        return max(rounds, key=lambda each: each.round)

    def is_complete(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """Whether the current round has nothing to wait for.

        Args:
            last: the last closed round.
            statuses: of all ranks.
        """
        active = active_ranks(statuses)
        return not self.is_possible(active) or active <= finished_ranks(last, statuses)

    def can_close(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """Whether there is a quorum for the current round, or cannot be one."""
        finished, active = finished_ranks(last, statuses), active_ranks(statuses)
        if not finished or not self.is_possible(active):
            return bool(finished)
        return self.is_enough(last, finished, active)

    def close(self, last: ClosedRound, statuses: Sequence[RankStatus], closer: int) -> ClosedRound:
        """Return the current round, closed with the ranks that have finished.

        Args:
            last: the last closed round.
            statuses: of all ranks, for which `can_close` is true.
            closer: the rank that closes the round.
        """
        active = active_ranks(statuses)
        members = sorted(finished_ranks(last, statuses)) if self.is_possible(active) else []
        # a rank may still wait for the key of the round in its status, and a late rank reads the
        # keys of the last two rounds
        kept = min([last.round, *(statuses[rank].round for rank in active)])
        return ClosedRound(
            last.round + 1,
            tuple(members),
            tuple(rank for rank in members if statuses[rank].kind is StatusKind.DAMAGED),
            self.remember(last, members),
            self.choose_sends(last, members),
            closer,
            max(last.oldest, kept),
        )


def active_ranks(statuses: Sequence[RankStatus]) -> set[int]:
    """Return the ranks that are not paused."""
    return {rank for rank, each in enumerate(statuses) if each.kind is not StatusKind.PAUSED}


def finished_ranks(last: ClosedRound, statuses: Sequence[RankStatus]) -> set[int]:
    """Return the ranks that have finished their step for the round after `last`."""
    number = last.round + 1
    return {rank for rank in active_ranks(statuses) if statuses[rank].round == number}


class Rounds(LocalMethod):
    """The base class of local methods whose ranks exchange in rounds without the slowest ranks.

    A subclass implements `make_quorum` and `take_part`, which calls `finish_round`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        control_interval: the number of steps from one sum of signals to the next; the sums overlap
            with the steps.
        options: see `LocalMethod`.
    """

    is_uniform = False
    accepts_shards = False
    wait_interval: int | None = None
    """the number of steps after which all ranks wait for one another; None for never"""
    compared_options: Sequence[str] = ("control_interval", "wait_interval")
    last: ClosedRound
    """the last closed round that this rank has read"""
    status: bytes
    """what this rank has announced in the store; empty before the first step"""
    generation: int
    """the number of times that the rounds have begun again, because a state was loaded"""
    is_paused: bool
    """whether `status` is `PAUSED`: the rounds do not wait for this rank"""
    paused_by: set[int]
    """ids of this rank's optimizers that wait for other ranks, and therefore pause this one"""
    pending: Any
    """the handle of the overlapped sum of signals"""
    ended_s: float | None
    """the time of the end of the last step"""

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        control_interval: int = 32,
        **options: Any,
    ) -> None:
        check_count("control_interval", control_interval, 1)
        self.control_interval = control_interval
        self.step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        """the times of this rank's last local steps in seconds"""
        self.num_steps = 0
        """the number of steps since the construction"""
        self.votes: Tensor | None = None
        """sums (common extras,) that have not been received"""
        self.loaded_round: ClosedRound | None = None
        """the round from which the rounds begin again in the next step; None if they continue"""
        vars(self).update(self._outside())
        super().__init__(inner, group, **options)

    def _outside(self) -> dict[str, Any]:
        """Return the attributes of an optimizer that takes no part in rounds yet."""
        return {
            "status": b"",
            "generation": 0,
            "is_paused": False,
            "paused_by": set(),
            "pending": None,
            "ended_s": None,
        }

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        self.rules = self.make_quorum(self.group.world_size)
        self.last = self.rules.begin()
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; a copy takes no part in the rounds."""
        # a copy has begun no rounds, so it continues from the loaded round at once
        last = {"last": self.loaded_round or self.last, "loaded_round": None}
        return {**super().__getstate__(), **self._outside(), **last}

    # --- what a method implements

    @abstractmethod
    def make_quorum(self, world_size: int) -> Quorum:
        """Return the rules of the rounds."""

    @abstractmethod
    def take_part(self, step: int) -> Algorithm[None]:
        """Finish a round after a step, if that is due, and exchange with its other members."""

    @property
    @abstractmethod
    def wait_s(self) -> float:
        """The time that this rank waits for others before it closes a round, in seconds."""

    @property
    @abstractmethod
    def is_for_all_ranks(self) -> bool:
        """Whether each round needs all ranks, so that none of them can be ahead by a round."""

    def describe_state(self) -> str:
        """Return a line for the state that ranks may have in common; see `compare_states`."""
        return ""

    def compare_states(self, lines: Sequence[str], rounds: Sequence[ClosedRound]) -> None:
        """Compare the state that some ranks must have in common; nothing by default.

        Args:
            lines: by rank, the result of `describe_state`.
            rounds: by rank, the last round that the rank has read.

        Raises:
            ValueError: it differs; raised on all ranks.
        """

    # --- steps

    def exchange(self, step: int) -> Algorithm[None]:
        """See `LocalMethod`: a round; then the signals, and a wait for all ranks if necessary."""
        yield from self.take_part(step)
        # not the number of steps, which a state of another step may have changed on one rank only
        is_due, self.num_steps = self.num_steps % self.control_interval == 0, self.num_steps + 1
        if is_due:
            yield from self.apply_pending_algorithm()
            values = torch.tensor(self.common_extras(), dtype=torch.float64)
            self.pending = yield Start(Sum(values), self._channel)
        elif self.pending is not None and (yield First([self.pending], 0.0)) is not None:
            # if a rank is lost, the sum has ended with this error
            yield from self.finish_pending_algorithm()
        is_last = self.wait_interval is not None and step % self.wait_interval == 0
        if is_last or any(self.received_signals):
            yield from self.pause_exchanges_algorithm()
            yield from self.sum_common()
            yield from self.resume_exchanges_algorithm()
        self.ended_s = yield Now()

    def finish_round(self, step: int) -> Algorithm[ClosedRound]:
        """Announce that this rank has finished, and wait for a round that it is a member of.

        Returns:
            That round, or one without members, if no quorum is possible.
        """
        (interval,) = self.fragments
        # a new interval of local steps begins, even if this rank has no peers in the round
        interval.started = step
        parameters = [each.detach() for each in self.flat.parameters]
        is_finite = interval.is_finite = bool(can_be_squared(*parameters))
        kind = StatusKind.FINISHED if is_finite else StatusKind.DAMAGED
        if self.ended_s is not None:
            self.step_s.append((yield Now()) - self.ended_s)
        yield from self.begin_rounds()
        while True:
            number = self.last.round + 1
            if not (yield from self._announce(RankStatus(number, kind))):
                # the store has no status of this rank: it is a new one, as after a restart
                yield from self._agree_on_round()
                continue
            statuses, closed = yield from self._read(number)
            if closed is None and any(
                0 <= each.loaded_after <= self.num_steps for each in statuses
            ):
                # A rank loaded a state before a step for which this rank did not. Restart the
                # rounds, so that all ranks compare their states.
                self.loaded_round = self.last
                yield from self.begin_rounds()
                continue
            latest = max(each.round for each in statuses)
            if closed is None and latest == number:
                if self.rules.can_close(self.last, statuses):
                    closed = yield from self._close(statuses)
                if closed is None:
                    closed = yield from self._wait_for_round(number)
            if closed is not None:
                self.last = closed
                if not closed.members or self.group.rank in closed.members:
                    return closed
            # this rank is late; the key of its round may be deleted
            yield from self._skip_to(latest)

    def note_damaged(self, closed: ClosedRound) -> None:
        """Count a mean that excludes members."""
        if closed.damaged:
            ranks = ", ".join(map(str, closed.damaged))
            self.note_drop(f"parameters are not finite or too large on ranks {ranks}")

    # --- the store

    @property
    def _channel(self) -> str:
        """The channel of the sums of signals."""
        return f"{namespace(self)}/control"

    def _closed_key(self, number: int) -> str:
        return f"{namespace(self)}/{self.generation}/closed/{number}"

    def _status_key(self, rank: int) -> str:
        return f"{namespace(self)}/{self.generation}/status/{rank}"

    def begin_rounds(self) -> Algorithm[None]:
        """Begin the rounds in the first step, or again after a state was loaded.

        All ranks call it in the same step, because they wait for one another.
        """
        if self.loaded_round is None:
            yield from self._agree_on_round() if not self.status else ()
            return
        # ranks that have not loaded the state yet end their rounds without this one, whose new
        # parameters they must not get
        yield from self._announce_pause(loaded_after=self.num_steps)
        closed = map(self._closed_key, range(self.last.oldest, self.last.round + 1))
        old = [self._status_key(self.group.rank), *closed]
        self.last, self.loaded_round = self.loaded_round, None
        self.generation += 1
        yield from self._agree_on_round()
        yield DeleteKeys(old)

    def _wait_for_round(self, number: int) -> Algorithm[ClosedRound]:
        """Wait until other ranks have closed a round; this rank is paused in other optimizers."""
        others = self._others()
        yield from self._pause(others)
        data = yield WaitForKey(self._closed_key(number))
        yield from self._resume(others)
        return ClosedRound.from_bytes(data)

    def _announce(self, status: RankStatus) -> Algorithm[bool]:
        """Write the status of this rank; return False if the store has lost the previous one."""
        key, value = self._status_key(self.group.rank), status.to_bytes()
        while (answer := (yield CompareAndSet(key, self.status, value))) != value:
            self.status = answer
            if not answer:
                return False
        self.status = value
        return True

    def _read(self, number: int) -> Algorithm[tuple[list[RankStatus], ClosedRound | None]]:
        """Read the statuses of all ranks, and a round, None if it has not closed."""
        keys = [*map(self._status_key, range(self.group.world_size)), self._closed_key(number)]
        *statuses, closed = yield ReadKeys(keys)
        return (
            [RankStatus.from_bytes(each) for each in statuses],
            ClosedRound.from_bytes(closed) if closed else None,
        )

    def _close(self, statuses: list[RankStatus]) -> Algorithm[ClosedRound | None]:
        """Close the current round, after a time for other ranks to finish."""
        number = self.last.round + 1
        key = self._closed_key(number)
        if self.wait_s and not self.rules.is_complete(self.last, statuses):
            if self.wait_s == math.inf:
                return None
            if data := (yield WaitForKey(key, self.wait_s)):
                return ClosedRound.from_bytes(data)
            statuses, closed = yield from self._read(number)
            if closed is not None:
                return closed
            if not self.rules.can_close(self.last, statuses):
                # a paused rank takes part again, and closes the round when it can
                return None
        closed = self.rules.close(self.last, statuses, self.group.rank)
        value = closed.to_bytes()
        answer = yield CompareAndSet(key, b"", value)
        if answer == value and closed.oldest > self.last.oldest:
            old = range(self.last.oldest, closed.oldest)
            yield DeleteKeys([self._closed_key(each) for each in old])
        return ClosedRound.from_bytes(answer)

    def _skip_to(self, number: int) -> Algorithm[None]:
        """Set `last` to the last closed round, if a rank has announced a step for a later one.

        Args:
            number: the latest round that a rank has finished a step for.
        """
        if number > self.last.round + 1:
            keys = [self._closed_key(each) for each in (number, number - 1)]
            found = next(filter(None, (yield ReadKeys(keys))), b"")
            if found:
                self.last = ClosedRound.from_bytes(found)

    def _agree_on_round(self) -> Algorithm[None]:
        """Agree on the round to begin with; see `begin_rounds`.

        After resuming, the last rounds of the ranks may differ.

        Raises:
            ValueError: the ranks have not loaded states of the same run, or the rounds begin again,
                and the ranks have not loaded the same state; raised on all ranks.
        """
        others = self._others()
        yield from self._pause(others)
        lines = self.compared_lines() if self.generation else []
        own = [self.last.to_bytes().decode(), self.describe_state()]
        gather = all_gather_text("\n".join([*own, *lines]))
        # this also opens the channel, in which the ranks wait for one another
        texts = yield Wait((yield Start(gather, self._channel)))
        yield from self._resume(others)
        _METHODS.setdefault(self.group, WeakSet()).add(self)
        found = [each.split("\n", 2) for each in texts]
        compared = {rank: "".join(each[2:]) for rank, each in enumerate(found)}
        if difference := find_difference(compared):
            raise ValueError(difference)
        rounds = [ClosedRound.from_bytes(each[0].encode()) for each in found]
        self.compare_states([each[1] for each in found], rounds)
        # the keys of earlier rounds were in another store
        self.last = first = self.rules.resume(rounds)
        yield CompareAndSet(self._closed_key(first.round), b"", first.to_bytes())
        self.status, self.is_paused = b"", False
        self.paused_by.clear()
        yield from self._announce(RankStatus(first.round, StatusKind.FINISHED))

    # --- waits for all ranks

    @identify_caller
    def pause_exchanges_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`: let the other ranks close rounds without this one."""
        yield from super().pause_exchanges_algorithm()
        if not self.is_inner_only:
            yield from self._pause([self, *self._others()])

    @identify_caller
    def resume_exchanges_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`."""
        if self.is_inner_only:
            return
        yield from self._resume([self, *self._others()])
        if self.is_for_all_ranks:
            # otherwise a rank could close its next round while another one is still paused
            yield AllGatherScalar(0)

    def _others(self) -> "list[Rounds]":
        """Return the other optimizers of the group whose rounds this rank is in.

        While this rank waits in one optimizer, others must not wait for it in another: several
        ranks could otherwise wait for one another forever. Rounds that need all ranks are excluded:
        slower ranks need no further message of this rank to finish them.
        """
        known = _METHODS.get(self.group, ())
        return [
            each for each in known if each is not self and each.status and not each.is_for_all_ranks
        ]

    def _pause(self, methods: "Sequence[Rounds]") -> Algorithm[None]:
        """Announce that this rank is paused in the rounds of some optimizers, until `_resume`."""
        for each in methods:
            if each.status:
                each.paused_by.add(id(self))
                yield from each._announce_pause() if not each.is_paused else ()

    def _resume(self, methods: "Sequence[Rounds]") -> Algorithm[None]:
        """End `_pause`; this rank stays paused while another of its optimizers waits."""
        for each in methods:
            each.paused_by.discard(id(self))
            if each.is_paused and not each.paused_by and each.loaded_round is None:
                each.is_paused = False
                yield from each._announce(RankStatus(each.last.round, StatusKind.FINISHED))

    def _announce_pause(self, loaded_after: int = -1) -> Algorithm[None]:
        """Announce that this rank is paused, and close the round if the others waited for it.

        Args:
            loaded_after: the number of steps of this rank before it loaded a state, if that is why
                it is paused; -1 otherwise. Ranks that have not loaded a state after as many steps
                begin the rounds again.
        """
        status = RankStatus(self.last.round, StatusKind.PAUSED, loaded_after)
        self.is_paused = yield from self._announce(status)
        while self.is_paused:
            statuses, closed = yield from self._read(self.last.round + 1)
            number = max(each.round for each in statuses)
            if closed is None and number <= self.last.round + 1:
                # this rank may be the only one that the others have waited for
                if self.rules.can_close(self.last, statuses):
                    yield from self._close(statuses)
                return
            self.last = closed or self.last
            yield from self._skip_to(number)

    def finish_pending_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`: wait for the sum of signals, which the slowest rank has started."""
        if self.pending is None:
            return
        # if each round needs all ranks, no rank can be a round behind, so this rank need not pause
        own = [] if self.is_for_all_ranks else [self]
        limit_s = 0.0 if self.is_for_all_ranks else self.wait_s
        is_ended = (yield First([self.pending], limit_s)) is not None
        paused = [] if is_ended else [*own, *self._others()]
        yield from self._pause(paused)
        self.votes = yield Wait(self.pending)
        self.pending = None
        yield from self._resume(paused)

    def apply_pending_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`: receive the signals."""
        yield from self.finish_pending_algorithm()
        if self.votes is not None:
            self.receive_common(self.votes.tolist())
            self.votes = None

    # --- the state

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`; the rounds of another number of ranks begin again."""
        begin = [0, *self.rules.begin_memory()]
        return [
            *super().declare(),
            Number(self, "rounds", begin, "local", resize="drop", length=len(begin)),
        ]

    @property
    def rounds(self) -> list[int]:
        """The number of the last closed round that this rank has read, and its memory.

        If rounds have begun, they begin again from an assigned round in the next step.
        """
        last = self.loaded_round or self.last
        return [last.round, *last.memory]

    @rounds.setter
    def rounds(self, values: Sequence[int]) -> None:
        number, *memory = values
        last = replace(self.rules.begin(), round=number, memory=tuple(memory), oldest=number)
        if self.status:
            self.loaded_round = last
        else:
            self.last = last

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_broadcast()
        self.rounds = [0, *self.rules.begin_memory()]

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        # the signals of a sum that has not ended belong to the earlier run
        self.pending = self.votes = None
