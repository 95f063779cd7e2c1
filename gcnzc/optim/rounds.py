"""Rounds that close without the slowest ranks: the base class of methods that agree by the store.

    F_k <- the ranks that have finished their local steps when round k closes
    the ranks in F_k exchange; the others compute, and finish a later round

Each rank announces in the store that it has finished. A rank that reads that the ranks that have
finished are a quorum closes the round by a compare-and-set, so all ranks read the same members.
There is no coordinator, and no rank communicates with a rank that has not finished.

A rank that waits for all others, as in an evaluation, is paused: no round waits for it.

Notation: W ranks.
"""

import math
from abc import abstractmethod
from ast import literal_eval
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from gcnzc.exchange import (
    Algorithm,
    AllGatherScalar,
    CompareAndSet,
    DeleteKeys,
    First,
    Group,
    ReadKeys,
    Start,
    Wait,
    WaitForKey,
)
from gcnzc.exchange.engine import identify_caller
from gcnzc.exchange.sync import all_gather_text, find_difference
from gcnzc.exchange.topology import Edge
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.control import PartialExchanges, namespace
from gcnzc.optim.group_options import HINTS
from gcnzc.optim.options import option
from gcnzc.optim.state import Field, Scalar
from gcnzc.optim.validation import check_count

_METHODS: "WeakKeyDictionary[Group, WeakSet[Rounds]]" = WeakKeyDictionary()
"""by group, the optimizers that have announced a status"""


class RankStatus(NamedTuple):
    """What a rank has announced; by default, that of a rank before its first step."""

    round: int = -1
    """the last round for which it has finished a local step"""
    kind: Literal["finished", "damaged", "paused"] = "finished"
    """"damaged": its parameters are not finite or too large after that step. "paused": it waits for
    all ranks, so no round may wait for it; see `LocalMethod.pause_exchanges`"""
    loaded_after: int = -1
    """the number of steps after which the rank has loaded a state, so that its rounds begin again;
    -1 if it has not"""


class ClosedRound(NamedTuple):
    """A closed round, equal on all ranks."""

    round: int
    members: tuple[int, ...]
    """the ranks that exchange, ascending; none if a quorum was not possible"""
    damaged: tuple[int, ...]
    """the members whose parameters are not finite or too large"""
    memory: tuple[int, ...]
    """what the quorum of the next round depends on; see `Rounds.remember`"""
    sends: tuple[Edge, ...] = ()
    """which member sends its state to which"""
    closer: int = 0
    """the rank that has closed the round, and deletes the keys of earlier ones"""
    oldest: int = 0
    """the oldest round whose key is not deleted"""


def to_bytes(value: RankStatus | ClosedRound) -> bytes:
    """Return a status or a round as the value of a key."""
    return repr(tuple(value)).encode()


def read_round(data: bytes) -> ClosedRound | None:
    """Return the round in the value of a key; None if it has not closed."""
    return ClosedRound(*literal_eval(data.decode())) if data else None


class Rounds(PartialExchanges):
    """The base class of local methods whose ranks exchange in rounds without the slowest ranks.

    A subclass implements the rules of the rounds, and `take_part`, which calls `finish_round`. The
    rules are functions of the last closed round and of the ranks' statuses, so that any rank can
    apply them; they do not communicate.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        wait_interval: the number of steps after which all ranks wait for one another, such as the
            number of steps of an epoch; None if they never wait. The waits have the time limit of
            the group.
        options: see `PartialExchanges`.
    """

    is_uniform = False
    wait_interval: int | None = option(None, partial(check_count, least=1))
    control_interval: Any = option(32, partial(check_count, least=1))

    wait_s: float
    """the time that this rank waits for others before it closes a round, in seconds"""
    is_for_all_ranks: bool
    """whether each round needs all ranks, so that none of them can be ahead by a round"""
    last: ClosedRound
    """the last closed round that this rank has read"""
    loaded_round: ClosedRound | None = None
    """the round from which the rounds begin again in the next step; None if they continue"""
    status: bytes
    """what this rank has announced in the store; empty before the first step"""
    generation: int
    """the number of times that the rounds have begun again, because a state was loaded"""
    is_paused: bool
    """whether `status` is that of a paused rank: the rounds do not wait for this rank"""
    paused_by: set[int]
    """ids of this rank's optimizers that wait for other ranks, and therefore pause this one"""

    def outside(self) -> dict[str, Any]:
        """See `PartialExchanges`; a copy takes no part in the rounds."""
        own = {"status": b"", "generation": 0, "is_paused": False, "paused_by": set()}
        return super().outside() | own

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        self.last = self.begin()
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`."""
        # a copy has begun no rounds, so it continues from the loaded round at once
        last = {"last": self.loaded_round or self.last, "loaded_round": None}
        return {**super().__getstate__(), **last}

    # --- what a method implements

    @abstractmethod
    def is_enough(self, last: ClosedRound, finished: set[int], active: set[int]) -> bool:
        """Whether the ranks that have finished are a quorum of those that are not paused.

        If all that are not paused are not enough, the round closes without members.
        """

    @abstractmethod
    def begin_memory(self) -> tuple[int, ...]:
        """Return the memory before the first round."""

    @abstractmethod
    def remember(self, last: ClosedRound, members: Sequence[int]) -> tuple[int, ...]:
        """Return the `memory` of the current round."""

    def choose_sends(self, last: ClosedRound, members: Sequence[int]) -> tuple[Edge, ...]:
        """Return the `sends` of the current round."""
        return ()

    def resume(self, rounds: Sequence[ClosedRound]) -> ClosedRound:
        """Return the round that a run continues from.

        Args:
            rounds: by rank, the last round that the rank has read.
        """
        return max(rounds, key=lambda each: each.round)

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

    # --- the rules

    def begin(self) -> ClosedRound:
        """Return the round before the first one."""
        return ClosedRound(0, tuple(range(self.group.world_size)), (), self.begin_memory())

    def find_quorum(
        self, last: ClosedRound, statuses: Sequence[RankStatus]
    ) -> tuple[list[int] | None, bool]:
        """Return the members with which the current round can close, and whether all are there.

        Args:
            last: the last closed round.
            statuses: of all ranks.

        Returns:
            The ranks that have finished, if they are a quorum; none if no quorum is possible; None
            if the round cannot close yet. And whether it has nothing to wait for.
        """
        active = {rank for rank, each in enumerate(statuses) if each.kind != "paused"}
        finished = {rank for rank in active if statuses[rank].round == last.round + 1}
        if not self.is_enough(last, active, active):
            return ([] if finished else None), True
        is_quorum = finished and self.is_enough(last, finished, active)
        return (sorted(finished) if is_quorum else None), active <= finished

    def closed_round(
        self, last: ClosedRound, statuses: Sequence[RankStatus], members: Sequence[int]
    ) -> ClosedRound:
        """Return the current round, closed by this rank with the ranks that have finished."""
        # a rank may still wait for the key of the round in its status, and a late rank reads the
        # keys of the last two rounds
        waited_for = (each.round for each in statuses if each.kind != "paused")
        return ClosedRound(
            last.round + 1,
            tuple(members),
            tuple(rank for rank in members if statuses[rank].kind == "damaged"),
            self.remember(last, members),
            self.choose_sends(last, members),
            self.group.rank,
            max(last.oldest, min([last.round, *waited_for])),
        )

    # --- steps

    def exchange(self, step: int) -> Algorithm[None]:
        """See `PartialExchanges`; then waits for all ranks if necessary."""
        yield from super().exchange(step)
        is_last = self.wait_interval is not None and step % self.wait_interval == 0
        if is_last or any(self.received_signals):
            yield from self.pause_exchanges_algorithm()
            yield from self.sum_common()
            yield from self.resume_exchanges_algorithm()

    def finish_round(self, step: int) -> Algorithm[ClosedRound]:
        """Announce that this rank has finished, and wait for a round that it is a member of.

        Returns:
            That round, or one without members, if no quorum is possible.
        """
        (interval,) = self.fragments
        # a new interval of local steps begins, even if this rank has no peers in the round
        interval.started = step
        parameters = [each.detach() for each in self.flat.parameters]
        interval.is_finite = bool(can_be_squared(*parameters))
        yield from self.begin_rounds()
        while True:
            number = self.last.round + 1
            status = RankStatus(number, "finished" if interval.is_finite else "damaged")
            if not (yield from self._announce(status)):
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
                closed = yield from self._close(statuses)
                if closed is None:
                    request = WaitForKey(self._closed_key(number))
                    closed = read_round((yield from self._wait_paused(self._others(), request)))
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

    def _closed_key(self, number: int) -> str:
        return f"{namespace(self)}/{self.generation}/closed/{number}"

    def _status_key(self, rank: int) -> str:
        return f"{namespace(self)}/{self.generation}/status/{rank}"

    def _announce(self, status: RankStatus) -> Algorithm[bool]:
        """Write the status of this rank; return False if the store has lost the previous one."""
        key, value = self._status_key(self.group.rank), to_bytes(status)
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
        # a key is empty before the first step of its rank
        found = [RankStatus(*literal_eval(each.decode() or "()")) for each in statuses]
        return found, read_round(closed)

    def _close(self, statuses: list[RankStatus]) -> Algorithm[ClosedRound | None]:
        """Close the current round if there is a quorum, after a time for other ranks to finish."""
        number = self.last.round + 1
        key = self._closed_key(number)
        members, is_complete = self.find_quorum(self.last, statuses)
        if members is None:
            return None
        if self.wait_s and not is_complete:
            if self.wait_s == math.inf:
                return None
            if data := (yield WaitForKey(key, self.wait_s)):
                return read_round(data)
            statuses, found = yield from self._read(number)
            members, _ = self.find_quorum(self.last, statuses)
            if found is not None or members is None:
                # a paused rank takes part again, and closes the round when it can
                return found
        closed = self.closed_round(self.last, statuses, members)
        value = to_bytes(closed)
        answer = yield CompareAndSet(key, b"", value)
        if answer == value and closed.oldest > self.last.oldest:
            old = range(self.last.oldest, closed.oldest)
            yield DeleteKeys([self._closed_key(each) for each in old])
        return read_round(answer)

    def _skip_to(self, number: int) -> Algorithm[None]:
        """Set `last` to the last closed round, if a rank has announced a step for a later one.

        Args:
            number: the latest round that a rank has finished a step for.
        """
        if number > self.last.round + 1:
            keys = [self._closed_key(each) for each in (number, number - 1)]
            found = next(filter(None, (yield ReadKeys(keys))), b"")
            self.last = read_round(found) or self.last

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
        own = [to_bytes(self.last).decode(), self.describe_state()]
        gather = all_gather_text("\n".join([*own, *lines]))
        # this also opens the channel, in which the ranks wait for one another
        texts = yield Wait((yield Start(gather, self.channel)))
        yield from self._resume(others)
        _METHODS.setdefault(self.group, WeakSet()).add(self)
        found = [each.split("\n", 2) for each in texts]
        compared = {rank: "".join(each[2:]) for rank, each in enumerate(found)}
        if difference := find_difference(compared, HINTS):
            raise ValueError(difference)
        rounds = [ClosedRound(*literal_eval(each[0])) for each in found]
        self.compare_states([each[1] for each in found], rounds)
        # the keys of earlier rounds were in another store
        self.last = first = self.resume(rounds)
        yield CompareAndSet(self._closed_key(first.round), b"", to_bytes(first))
        self.status, self.is_paused = b"", False
        self.paused_by.clear()
        yield from self._announce(RankStatus(first.round))

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

    def wait_for_all(self, handle: Any) -> Algorithm[Any]:
        """See `PartialExchanges`: this rank is paused while it waits for slower ones."""
        # if each round needs all ranks, no rank can be a round behind, so this rank need not pause
        own = [] if self.is_for_all_ranks else [self]
        limit_s = 0.0 if self.is_for_all_ranks else self.wait_s
        is_ended = (yield First([handle], limit_s)) is not None
        return (
            yield from self._wait_paused(() if is_ended else [*own, *self._others()], Wait(handle))
        )

    def _wait_paused(self, methods: "Sequence[Rounds]", request: Any) -> Algorithm[Any]:
        """Return the answer of a request for which this rank is paused in some optimizers."""
        yield from self._pause(methods)
        answer = yield request
        yield from self._resume(methods)
        return answer

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
                yield from each._announce(RankStatus(each.last.round))

    def _announce_pause(self, loaded_after: int = -1) -> Algorithm[None]:
        """Announce that this rank is paused, and close the round if the others waited for it.

        Args:
            loaded_after: the number of steps of this rank before it loaded a state, if that is why
                it is paused; -1 otherwise. Ranks that have not loaded a state after as many steps
                begin the rounds again.
        """
        status = RankStatus(self.last.round, "paused", loaded_after)
        self.is_paused = yield from self._announce(status)
        while self.is_paused:
            statuses, closed = yield from self._read(self.last.round + 1)
            latest = max(each.round for each in statuses)
            if closed is None and latest <= self.last.round + 1:
                # this rank may be the only one that the others have waited for
                yield from self._close(statuses)
                return
            self.last = closed or self.last
            yield from self._skip_to(latest)

    # --- the state

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`; the rounds of another number of ranks begin again."""
        begin = [0, *self.begin_memory()]
        rounds = Scalar(owner=self, name="rounds", initial=begin, kind="local", resize="drop")
        return [*super().declare(), rounds]

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
        last = self.begin()._replace(round=number, memory=tuple(memory), oldest=number)
        if self.status:
            self.loaded_round = last
        else:
            self.last = last

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_broadcast()
        self.rounds = [0, *self.begin_memory()]
