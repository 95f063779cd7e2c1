"""DiLoCo with a quorum: an outer step does not wait for the slowest ranks.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    M   <- the ranks that have finished              at least q of them, after a grace window
    d   <- mean_(i in M) (a_i - x_i)                 a_i: the anchor from which rank i started
    b   <- m b + d;  a <- a - lr (d + m b)           the outer step of `DiLoCo`
    x_i <- a                                         ranks in M

A rank that has not finished continues its local steps. It is a member of the outer step that is
current when it finishes: this step uses the difference from the rank's older anchor, and the rank
receives the current anchor. The minimum quorum and the grace window are from Douillard et al.,
"Decoupled DiLoCo for Resilient Distributed Pre-training" (2026, https://arxiv.org/abs/2604.21428),
but only its abstract and summaries were available. The paper has a central synchronizer, an
adaptive window, and weights by tokens. Here the ranks agree on the members by a compare-and-set in
the store, the window is fixed, and the members have equal weights.

The quorum is a majority, so each round has a member of the previous round, which has the current
anchor and momentum. It sends them to the members that do not have them.

Notation: W ranks, q quorum, n elements of the flat parameter vector, k extras.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Receive, Send, Start, Sum, Wait, among
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.checksums import sum_of_bits
from gcnzc.optim.defaults import DILOCO
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.group_options import NORMS, find_difference, format_norms
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.close_rounds import CloseRounds
from gcnzc.optim.strategy.outer_step import OuterSGD, OuterStep
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.rounds import ClosedRound, RankStatus, RoundRules, StatusKind
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_at_least_zero, check_count


def diloco(
    local_steps: int = DILOCO.local_steps,
    outer_lr: float = DILOCO.outer_lr,
    outer_momentum: float = DILOCO.outer_momentum,
    *,
    quorum: int,
    nesterov: bool = True,
    grace_s: float = 0.0,
    control_interval: int = 32,
) -> Recipe:
    """Return the recipe of DiLoCo with a quorum.

    An outer step begins as soon as at least `quorum` ranks have taken H steps, and uses the
    differences of these ranks. As with `backup_workers`, do not run other collectives between two
    steps.

    Args:
        local_steps: H.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        quorum: the number of ranks, more than half of them, that an outer step needs.
        nesterov: whether to use Nesterov momentum.
        grace_s: the seconds for which an outer step waits for further ranks.
        control_interval: the number of steps from one sum of signals to the next; see
            `backup_workers`. A fast rank is ahead of a slow one by at most twice as many steps.

    Raises:
        ValueError: an option is out of range.
    """
    rounds = Quorum(quorum, grace_s, control_interval)
    step = QuorumOuterStep(OuterSGD(outer_lr, outer_momentum, nesterov), rounds)
    return Recipe("DiLoCo", rounds, step, QuorumMean(rounds, step), local_steps=local_steps)


class QuorumRules(RoundRules):
    """The rules of rounds with a quorum.

    A round that cannot have a quorum, because ranks wait for all others, closes without members. In
    a `ClosedRound`, `numbers_by_rank` has, for each rank, the last round of which it was a member.
    `pending` has pairs (rank, member): the rank sends the anchor and the momentum to the member.

    Args:
        world_size: W.
        quorum: q, above W / 2.
    """

    tree = ()
    numbers_are_statistics = False

    def __init__(self, world_size: int, quorum: int) -> None:
        self.world_size, self.quorum = world_size, quorum

    def resume(self, rounds: Sequence[ClosedRound]) -> ClosedRound:
        """See `RoundRules`.

        The last round of which a rank was a member is taken from that rank's own state. Other ranks
        may have a later round for it, if the ranks have saved their states at different times.
        """
        numbers_by_rank = tuple(each.numbers_by_rank[rank] for rank, each in enumerate(rounds))
        return replace(super().resume(rounds), numbers_by_rank=numbers_by_rank)

    def is_complete(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """See `RoundRules`; also True if there can be no quorum."""
        return not self._has_quorum(statuses) or super().is_complete(last, statuses)

    def can_close(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """See `RoundRules`: whether there is a quorum, or cannot be one."""
        finished = len(self._finished(last, statuses))
        return finished >= (self.quorum if self._has_quorum(statuses) else 1)

    def close(self, last: ClosedRound, statuses: Sequence[RankStatus], closer: int) -> ClosedRound:
        """See `RoundRules`."""
        number, finished = last.round + 1, sorted(self._finished(last, statuses))
        members = tuple(finished) if len(finished) >= self.quorum else ()
        # unless a state was loaded, no other rank has a newer one: any two quorums share a rank
        newest = max((last.numbers_by_rank[rank] for rank in members), default=0)
        holders = [rank for rank in members if last.numbers_by_rank[rank] == newest]
        others = [rank for rank in members if last.numbers_by_rank[rank] < newest]
        pending = tuple((holders[at % len(holders)], rank) for at, rank in enumerate(others))
        damaged = tuple(rank for rank in members if statuses[rank].kind is StatusKind.DAMAGED)
        numbers_by_rank = tuple(
            number if rank in members else before
            for rank, before in enumerate(last.numbers_by_rank)
        )
        kept = min([last.round, *(statuses[rank].round for rank in self._active(statuses))])
        oldest = max(last.oldest, kept)
        return ClosedRound(number, members, damaged, pending, last.epochs, numbers_by_rank, oldest)

    def _has_quorum(self, statuses: Sequence[RankStatus]) -> bool:
        return len(self._active(statuses)) >= self.quorum


class Quorum(CloseRounds):
    """Exchange after H local steps, in a round that closes when it has a quorum.

    Args:
        quorum: q.
        grace_s: the time that a round with a quorum waits for others, in seconds.
        control_interval: see `backup_workers`.
    """

    def __init__(self, quorum: int, grace_s: float, control_interval: int) -> None:
        check_at_least_zero("grace_s", grace_s)
        super().__init__("complete", grace_s, control_interval, None)
        check_count("quorum", quorum, 1)
        self.quorum = quorum
        self.has_common_anchor = False
        """whether the ranks whose anchor is the newest had equal anchors and momenta, bit for bit,
        when the rounds began"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`.

        Raises:
            ValueError: the quorum is not a majority of the ranks, or above their number.
        """
        super().attach(strategy)
        world_size = strategy.group.world_size
        if not world_size < 2 * self.quorum <= 2 * world_size:
            least = world_size // 2 + 1
            valid = f"{least} to {world_size}" if least < world_size else f"{least}"
            raise ValueError(
                f"a quorum of {self.quorum} of {world_size} ranks\n\nhint: give {valid}, so "
                "that any two quorums have a rank in common"
            )
        if world_size > 1:
            self.rules = QuorumRules(world_size, self.quorum)
            self.last = self.rules.begin()

    @property
    def grace_s(self) -> float:
        """See `CloseRounds`: a fixed time."""
        return self.grace

    @property
    def is_full(self) -> bool:
        """Whether the quorum is all ranks, so that all of them are members of each outer step."""
        return self.quorum == self.strategy.group.world_size

    @property
    def is_for_all_ranks(self) -> bool:
        """See `CloseRounds`."""
        return self.is_full

    def describe_state(self) -> str:
        """See `CloseRounds`: checksums of the anchor and the momentum, and their norms."""
        state = self.strategy.recipe.update.local_state()
        sums = " ".join(str(int(sum_of_bits(each))) for each in state.values())
        return f"{sums}\t{format_norms(state)}"

    def compare_states(self, lines: Sequence[str], rounds: Sequence[ClosedRound]) -> None:
        """See `CloseRounds`: ranks that were last members of the same round have equal states.

        Their norms must be equal. Ranks with different hardware may round differently, so equal
        checksums are only required for `has_common_anchor`.
        """
        numbers = [each.numbers_by_rank[rank] for rank, each in enumerate(rounds)]
        found = [line.partition("\t") for line in lines]
        for number in sorted(set(numbers)):
            norms = {
                rank: f"{NORMS}\t{found[rank][2]}"
                for rank, each in enumerate(numbers)
                if each == number
            }
            if difference := find_difference(norms):
                raise ValueError(difference)
        # the others receive the newest anchor from one of these ranks before their next outer step
        newest = [
            sums for (sums, *_), each in zip(found, numbers, strict=True) if each == max(numbers)
        ]
        self.has_common_anchor = len(set(newest)) == 1

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        super().reinitialize()
        self.has_common_anchor = True

    def describe(self) -> str:
        """See `Policy`."""
        return (
            f"local_steps={self.strategy.sync_interval.requested}, quorum={self.quorum}, "
            f"grace_s={self.grace_s}, control_interval={self.control_interval}"
        )

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`: whether this rank is a member of a round."""
        strategy = self.strategy
        yield from self.begin_rounds()
        if strategy.steps_since_sync < strategy.sync_interval.steps:
            return False
        closed = yield from self.finish_round()
        return bool(closed.members)


class QuorumOuterStep(OuterStep):
    """The outer step of the members of a round.

    Args:
        outer: the outer optimizer.
        rounds: closes the rounds.
    """

    def __init__(self, outer: OuterSGD, rounds: Quorum) -> None:
        super().__init__(outer)
        self.rounds = rounds

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        self.outer.step(self.anchor, self.momentum, mean)
        self._write()
        return
        yield

    def discard(self) -> None:
        """See `Update`: the members continue from the anchor."""
        self._write()

    def _write(self) -> None:
        strategy = self.strategy
        if self.rounds.is_full and self.rounds.has_common_anchor:
            strategy.set_parameters(self.anchor)
            return
        # other ranks may be in an earlier round, or have loaded an anchor with other rounding
        strategy.flat_params.write_parameters(self.anchor)
        if not strategy.is_counted:
            delete_nonfinite_state(strategy.state, strategy.flat_params.parameters)

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`; the anchors of ranks that missed rounds differ."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return super().shared_state()

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        super().load(local, {}, {})


class QuorumMean(AllRanks):
    """The mean over the members of a round, after the newest anchor was sent to those without it.

    Args:
        rounds: closes the rounds.
        update: has the anchor and the momentum.
    """

    def __init__(self, rounds: Quorum, update: QuorumOuterStep) -> None:
        super().__init__(None, "difference")
        self.rounds, self.update = rounds, update

    def describe(self) -> str:
        """See `Exchange`."""
        return ""

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`."""
        strategy, closed, count = self.strategy, self.rounds.last, self.reducer.num_elements
        members, rank = closed.members, strategy.group.rank
        yield from self._send_state(closed)
        vector = values[:count]
        # signals have a sum of their own, so the extras are zeros. They are sent because the order
        # of the summation depends on the length, which must be that of `DiLoCo`
        values[count:] = 0
        if rank in closed.damaged:
            vector.zero_()
        if len(members) == strategy.group.world_size:
            total = yield Sum(values)
        else:
            total = yield from sum_of_members(values, members, rank)
        num_finite = len(members) - len(closed.damaged)
        if closed.damaged:
            ranks = ", ".join(map(str, closed.damaged))
            strategy.record_drop(f"parameters are not finite or too large on ranks {ranks}")
        if not num_finite or not bool(are_finite(total)):
            strategy.record_drop("outer step skipped: there is no finite mean")
            return None
        return total[:count].div_(num_finite)

    def _send_state(self, closed: ClosedRound) -> Algorithm[None]:
        """Send the newest anchor and momentum to the members that have older ones."""
        update, rank = self.update, self.strategy.group.rank
        state = torch.cat([update.anchor, update.momentum])
        pending = []
        for holder, member in closed.pending:
            if rank == holder:
                pending.append((yield Start(Send(state, member))))
            if rank == member:
                yield Receive(state, holder)
                update.anchor, update.momentum = (each.clone() for each in state.chunk(2))
        for each in pending:
            yield Wait(each)


def sum_of_members(values: Tensor, members: Sequence[int], rank: int) -> Algorithm[Tensor]:
    """Sum a vector over some ranks, by the messages of an all-reduce among them.

    Args:
        values: contiguous; may be overwritten.
        members: the ranks, in the same order on all of them.
        rank: this rank, one of them.
    """
    if len(members) == 1:
        return values
    total: Tensor = yield from among(members, rank, Sum(values))
    return total
