"""The policy of rounds that close without the slowest ranks.

Each rank announces in the store that it has finished. A rank that reads that a round can close
closes it by a compare-and-set; see `gcnzc.optim.strategy.rounds` for the rules.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

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
from gcnzc.optim.group_options import find_difference
from gcnzc.optim.state_layout import SavedTensor, saved_world_size
from gcnzc.optim.strategy.gossip_graph import GossipGraph
from gcnzc.optim.strategy.recipe import Policy
from gcnzc.optim.strategy.rounds import ClosedRound, RankStatus, RoundRules, StatusKind
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_at_least_zero, check_count

# least time that a rank waits before it closes a round, and number of steps whose times it keeps
MIN_GRACE_S, STEPS_KEPT = 0.002, 16

_POLICIES: "WeakKeyDictionary[Group, WeakSet[CloseRounds]]" = WeakKeyDictionary()
"""by group, the policies that have announced a status"""


class CloseRounds(Policy):
    """Announce that a step is finished, and close the round if that is possible."""

    is_uniform = False

    rules: RoundRules
    last: ClosedRound
    """the last closed round that this rank has read"""

    def __init__(
        self,
        topology: str | Iterable[Edge],
        grace: float,
        control_interval: int,
        wait_interval: int | None,
    ) -> None:
        if grace != math.inf:
            check_at_least_zero("grace", grace)
        check_count("control_interval", control_interval, 1)
        if wait_interval is not None:
            check_count("wait_interval", wait_interval, 1)
        self.graph = GossipGraph(topology)
        self.grace, self.wait_interval = grace, wait_interval
        self.control_interval = control_interval
        self.status = b""
        """what this rank has announced in the store; empty before the first step"""
        self.generation = 0
        """the number of times that the rounds have begun again, because a state was loaded"""
        self.loaded: ClosedRound | None = None
        """the round from which the rounds begin again in the next step; None if they continue"""
        self.is_paused = False
        """whether `status` is `PAUSED`: the rounds do not wait for this rank"""
        self.paused_by: set[int] = set()
        """ids of the policies of this rank's optimizers that wait for other ranks, and therefore
        pause this one"""
        self.step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        """the times of this rank's last local steps in seconds"""
        self.ended_s: float | None = None
        """the time of the end of the last step"""
        self.num_steps = 0
        """the number of steps since the construction"""
        self.pending: Any = None
        """the handle of the overlapped sum of signals"""
        self.votes: Tensor | None = None
        """sums (common extras,) that have not been applied"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        world_size = strategy.group.world_size
        if world_size > 1:
            self.rules = RoundRules(world_size, self.graph.edges(world_size))
            self.last = self.rules.begin()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the state of the rounds; a copy takes no part in them."""
        own = {
            "status": b"",
            "is_paused": False,
            "paused_by": set(),
            "pending": None,
            "ended_s": None,
        }
        # a copy has begun no rounds, so it continues from the loaded round at once
        last = {} if self.loaded is None else {"last": self.loaded, "loaded": None}
        return {**vars(self), **own, **last, "generation": 0}

    def describe(self) -> str:
        """See `Policy`."""
        return (
            f"topology={self.graph.topology}, grace={self.grace}, "
            f"control_interval={self.control_interval}, wait_interval={self.wait_interval}"
        )

    @property
    def grace_s(self) -> float:
        """The time that this rank waits for others before it closes a round, in seconds."""
        if self.grace in (0.0, math.inf):
            return self.grace
        return max(MIN_GRACE_S, self.grace * min(self.step_s, default=0.0))

    @property
    def is_for_all_ranks(self) -> bool:
        """Whether each round needs all ranks, so that none of them can be ahead by a round."""
        return self.grace == math.inf

    @property
    def _channel(self) -> str:
        """The channel of the sums of signals."""
        return f"{self.strategy.namespace}/control"

    def _key(self, name: str) -> str:
        return f"{self.strategy.namespace}/{self.generation}/{name}"

    def _closed_key(self, number: int) -> str:
        return self._key(f"closed/{number}")

    def _status_key(self, rank: int) -> str:
        return self._key(f"status/{rank}")

    # rounds

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`: finish a round; whether this rank averages with others in it."""
        closed = yield from self.finish_round()
        return bool(self.rules.peers(closed, self.strategy.group.rank))

    def finish_round(self) -> Algorithm[ClosedRound]:
        """Announce that this rank has finished, and wait for a round that it is a member of.

        Returns:
            That round, or one without members, if the rules close such rounds.
        """
        strategy = self.strategy
        # a new interval of local steps begins, even if this rank has no peers in the round
        strategy.steps_since_sync = 0
        parameters = [each.detach() for each in strategy.flat_params.parameters]
        strategy.is_counted = bool(can_be_squared(*parameters))
        kind = StatusKind.FINISHED if strategy.is_counted else StatusKind.DAMAGED
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
                self.loaded = self.last
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
                if not closed.members or strategy.group.rank in closed.members:
                    return closed
            # this rank is late; the key of its round may be deleted
            yield from self._skip_to(latest)

    def begin_rounds(self) -> Algorithm[None]:
        """Begin the rounds in the first step, or again after a state was loaded.

        All ranks call it in the same step, because they wait for one another.
        """
        if self.loaded is None:
            yield from self._agree_on_round() if not self.status else ()
            return
        # ranks that have not loaded the state yet end their rounds without this one, whose new
        # parameters they must not get
        yield from self._announce_pause(loaded_after=self.num_steps)
        closed = map(self._closed_key, range(self.last.oldest, self.last.round + 1))
        old = [self._status_key(self.strategy.group.rank), *closed]
        self.last, self.loaded = self.loaded, None
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
        key, value = self._status_key(self.strategy.group.rank), status.to_bytes()
        while (answer := (yield CompareAndSet(key, self.status, value))) != value:
            self.status = answer
            if not answer:
                return False
        self.status = value
        return True

    def _read(self, number: int) -> Algorithm[tuple[list[RankStatus], ClosedRound | None]]:
        """Read the statuses of all ranks, and a round, None if it has not closed."""
        world_size = self.strategy.group.world_size
        keys = [*map(self._status_key, range(world_size)), self._closed_key(number)]
        *statuses, closed = yield ReadKeys(keys)
        return (
            [RankStatus.from_bytes(each) for each in statuses],
            ClosedRound.from_bytes(closed) if closed else None,
        )

    def _close(self, statuses: list[RankStatus]) -> Algorithm[ClosedRound | None]:
        """Close the current round, after a time for other ranks to finish."""
        number = self.last.round + 1
        key = self._closed_key(number)
        if self.grace_s and not self.rules.is_complete(self.last, statuses):
            if self.grace == math.inf:
                return None
            if data := (yield WaitForKey(key, self.grace_s)):
                return ClosedRound.from_bytes(data)
            statuses, closed = yield from self._read(number)
            if closed is not None:
                return closed
            if not self.rules.can_close(self.last, statuses):
                # a paused rank takes part again, and closes the round when it can
                return None
        closed = self.rules.close(self.last, statuses, self.strategy.group.rank)
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
        lines = self.strategy.compared_lines() if self.generation else []
        own = [self.last.to_bytes().decode(), self.describe_state()]
        gather = all_gather_text("\n".join([*own, *lines]))
        # this also opens the channel, in which the ranks wait for one another
        texts = yield Wait((yield Start(gather, self._channel)))
        yield from self._resume(others)
        _POLICIES.setdefault(self.strategy.group, WeakSet()).add(self)
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

    # waits for all ranks

    def pause_exchanges(self) -> Algorithm[None]:
        """See `RecipePart`: let the other ranks close rounds without this one."""
        yield from self._pause([self, *self._others()])

    def resume_exchanges(self) -> Algorithm[None]:
        """See `RecipePart`."""
        yield from self._resume([self, *self._others()])
        if self.is_for_all_ranks:
            # otherwise a rank could close its next round while another one is still paused
            yield AllGatherScalar(0)

    def _others(self) -> "list[CloseRounds]":
        """Return the policies of other optimizers of the group whose rounds this rank is in.

        While this rank waits in one optimizer, others must not wait for it in another: several
        ranks could otherwise wait for one another forever. Rounds that need all ranks are excluded:
        slower ranks need no further message of this rank to finish them.
        """
        known = _POLICIES.get(self.strategy.group, ())
        return [
            each for each in known if each is not self and each.status and not each.is_for_all_ranks
        ]

    def _pause(self, policies: "Sequence[CloseRounds]") -> Algorithm[None]:
        """Announce that this rank is paused in the rounds of some optimizers, until `_resume`."""
        for each in policies:
            if each.status:
                each.paused_by.add(id(self))
                yield from each._announce_pause() if not each.is_paused else ()

    def _resume(self, policies: "Sequence[CloseRounds]") -> Algorithm[None]:
        """End `_pause`; this rank stays paused while another of its optimizers waits."""
        for each in policies:
            each.paused_by.discard(id(self))
            if each.is_paused and not each.paused_by and each.loaded is None:
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

    def end_step(self) -> Algorithm[None]:
        """See `Policy`: sum the signals if that is due, and wait for all ranks if necessary."""
        strategy = self.strategy
        # not the number of steps, which a state of another step may have changed on one rank only
        is_due, self.num_steps = self.num_steps % self.control_interval == 0, self.num_steps + 1
        if is_due:
            yield from self.finish_pending()
            if self.votes is not None:
                strategy.control.receive(self.votes)
                self.votes = None
            values = torch.tensor(strategy.common_extras(), dtype=torch.float64)
            self.pending = yield Start(Sum(values), self._channel)
        elif self.pending is not None and (yield First([self.pending], 0.0)) is not None:
            # if a rank is lost, the sum has ended with this error
            yield from self.finish_pending()
        is_last = self.wait_interval is not None and strategy.steps % self.wait_interval == 0
        if is_last or any(strategy.received_signals):
            yield from self.pause_exchanges()
            yield from strategy.control.sum()
            yield from self.resume_exchanges()
        self.ended_s = yield Now()

    def finish_pending(self) -> Algorithm[None]:
        """See `RecipePart`: wait for the sum of signals, which the slowest rank has started."""
        if self.pending is None:
            return
        # if each round needs all ranks, no rank can be a round behind, so this rank need not pause
        own = [] if self.is_for_all_ranks else [self]
        limit_s = 0.0 if self.is_for_all_ranks else self.grace_s
        is_ended = (yield First([self.pending], limit_s)) is not None
        paused = [] if is_ended else [*own, *self._others()]
        yield from self._pause(paused)
        self.votes = yield Wait(self.pending)
        self.pending = None
        yield from self._resume(paused)

    def apply_pending(self) -> Algorithm[None]:
        """See `RecipePart`; called while the exchanges are paused."""
        yield from self.finish_pending()
        if self.votes is not None:
            self.strategy.control.receive(self.votes)
            self.votes = None

    # state

    def initialize(self) -> None:
        """See `RecipePart`; also called if the state before the first step is loaded."""
        self._continue_from(self.rules.begin())

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`: the last closed round that this rank has read."""
        if self.strategy.is_inner_only:
            return {}
        last = self.last if self.loaded is None else self.loaded
        is_pending = [int(edge in last.pending) for edge in self.rules.tree]
        by_rank = last.numbers_by_rank
        if self.rules.numbers_are_statistics:
            by_rank = (0,) * len(by_rank)
        numbers = [last.round, last.epochs, *is_pending, *by_rank]
        return {"rounds": torch.tensor(numbers, dtype=torch.int64)}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`; the numbers are those of the ranks that saved the state."""
        if self.strategy.is_inner_only:
            return {}
        world_size = saved_world_size(snapshot)
        # a spanning tree, unless the rules need none
        num_edges = world_size - 1 if self.rules.tree else 0
        return {"rounds": SavedTensor((2 + num_edges + world_size,), dtype=torch.int64, least=0)}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`; a state of another number of ranks begins with the first round."""
        # the signals of a sum that has not ended belong to the earlier run
        self.pending = self.votes = None
        begin, tree = self.rules.begin(), self.rules.tree
        number, epochs, *others = local["rounds"].tolist()
        if len(others) != len(tree) + len(begin.numbers_by_rank):
            self._continue_from(begin)
            return
        pending = tuple(edge for edge, each in zip(tree, others, strict=False) if each)
        numbers_by_rank = tuple(others[len(tree) :])
        last = ClosedRound(number, begin.members, (), pending, epochs, numbers_by_rank, number)
        self._continue_from(last)

    def _continue_from(self, last: ClosedRound) -> None:
        """Set the last closed round; if rounds have begun, they begin again in the next step."""
        if self.status:
            self.loaded = last
        else:
            self.last = last
