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
the store (`gcnzc.optim.rounds`), the window is fixed, and the members have equal weights.

The quorum is a majority, so each round has a member of the previous round, which has the current
anchor and momentum. It sends them to the members that do not have them.

Notation: W ranks, q quorum, n elements of the flat parameter vector, k extras.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Receive, Send, Start, Sum, Wait, among
from gcnzc.exchange.sync import find_difference
from gcnzc.exchange.topology import Edge
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.group_options import HINTS, NORMS, format_norms
from gcnzc.optim.options import option
from gcnzc.optim.rounds import ClosedRound, Rounds
from gcnzc.optim.state import Kind
from gcnzc.optim.validation import check_at_least_zero, check_count


class DecoupledDiLoCo(Rounds, DiLoCo):
    """DiLoCo whose outer steps begin as soon as a quorum of the ranks has taken H local steps.

    With a quorum of all ranks, it is `DiLoCo`. As with `BackupWorkers`, do not run other
    collectives between two steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        quorum: q, the number of ranks, more than half of them, that an outer step needs.
        grace_s: the seconds for which an outer step waits for further ranks.
        control_interval: the number of steps from one sum of signals to the next; see
            `BackupWorkers`. A fast rank is ahead of a slow one by at most twice as many steps.
        options: the options of `DiLoCo`, without `compress`, `sharded`, `alone`, `outer`, `offload`
            and `local_steps="auto"`.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """

    quorum: int = option(check=partial(check_count, least=1))
    grace_s: float = option(0.0, check_at_least_zero)
    # the base classes have these options, but a quorum excludes them
    compress: Any = None
    outer: Any = None
    sharded = alone = offload = False
    outer_kind: Kind = "local"

    def configure(self) -> None:
        """See `DistributedOptimizer`.

        Raises:
            ValueError: the quorum is not a majority of the ranks, or above their number.
        """
        if self.local_steps == "auto":
            raise ValueError("quorum with local_steps='auto'\n\nhint: give a number")
        super().configure()
        world_size = self.group.world_size
        if not world_size < 2 * self.quorum <= 2 * world_size:
            valid = f"{world_size // 2 + 1} to {world_size}"
            # any two quorums have a rank in common
            raise ValueError(
                f"a quorum of {self.quorum} of {world_size} ranks\n\nhint: give {valid}"
            )
        self.wait_s, self.is_for_all_ranks = self.grace_s, self.quorum == world_size

    # --- when a round closes

    def begin_memory(self) -> tuple[int, ...]:
        """See `Rounds`: for each rank, the last round of which it was a member."""
        return (0,) * self.group.world_size

    def is_enough(self, last: ClosedRound, finished: set[int], active: set[int]) -> bool:
        """See `Rounds`."""
        return len(finished) >= self.quorum

    def remember(self, last: ClosedRound, members: Sequence[int]) -> tuple[int, ...]:
        """See `Rounds`."""
        return tuple(
            last.round + 1 if rank in members else before for rank, before in enumerate(last.memory)
        )

    def choose_sends(self, last: ClosedRound, members: Sequence[int]) -> tuple[Edge, ...]:
        """See `Rounds`: members of the newest round send the anchor and momentum to the others."""
        # unless a state was loaded, no other rank has a newer one: any two quorums share a rank
        newest = max((last.memory[rank] for rank in members), default=0)
        holders = [rank for rank in members if last.memory[rank] == newest]
        others = [rank for rank in members if last.memory[rank] < newest]
        return tuple((holders[at % len(holders)], rank) for at, rank in enumerate(others))

    def resume(self, rounds: Sequence[ClosedRound]) -> ClosedRound:
        """See `Rounds`.

        The last round of which a rank was a member is taken from that rank's own state. Other ranks
        may have a later round for it, if the ranks have saved their states at different times.
        """
        memory = tuple(each.memory[rank] for rank, each in enumerate(rounds))
        return super().resume(rounds)._replace(memory=memory)

    # --- outer steps

    def take_part(self, step: int) -> Algorithm[None]:
        """See `Rounds`: an outer step after H local steps, if this rank is a member of a round."""
        yield from self.begin_rounds()
        (fragment,) = self.fragments
        if step - fragment.started < self.local_steps:
            return
        closed = yield from self.finish_round(step)
        if not closed.members:
            return
        values = self.flat.empty(self.extras)
        self.read(fragment, values[: self.flat.num_elements])
        mean = yield from self.mean_of_members(closed, values)
        self.num_exchanges += 1
        if mean is not None:
            self.outer_step(self.anchor, self.momentum, mean)
        self.set_parameters(fragment, self.anchor)
        # other ranks may be in an earlier round
        self.is_in_sync = self.is_for_all_ranks

    def mean_of_members(self, closed: ClosedRound, values: Tensor) -> Algorithm[Tensor | None]:
        """Return the mean over the members, after the newest anchor was sent to those without it.

        Args:
            closed: the round.
            values: (n + k,), the difference of this rank; overwritten.

        Returns:
            (n,); None if there is no finite mean.
        """
        count, members, rank = self.flat.num_elements, closed.members, self.group.rank
        yield from self._send_state(closed)
        vector = values[:count]
        # signals have a sum of their own, so the extras are zeros. They are sent because the order
        # of the summation depends on the length, which must be that of `DiLoCo`
        values[count:] = 0
        if rank in closed.damaged:
            vector.zero_()
        if len(members) == self.group.world_size:
            total = yield Sum(values)
        elif len(members) == 1:
            total = values
        else:
            total = yield from among(members, rank, Sum(values))
        num_finite = len(members) - len(closed.damaged)
        self.note_damaged(closed)
        if not num_finite or not bool(are_finite(total)):
            self.note_drop("outer step skipped: there is no finite mean")
            return None
        mean: Tensor = total[:count].div_(num_finite)
        return mean

    def _send_state(self, closed: ClosedRound) -> Algorithm[None]:
        """Send the newest anchor and momentum to the members that have older ones."""
        rank, pending = self.group.rank, []
        state = torch.cat([self.anchor, self.momentum])
        for holder, member in closed.sends:
            if rank == holder:
                pending.append((yield Start(Send(state, member))))
            if rank == member:
                yield Receive(state, holder)
                self.anchor, self.momentum = (each.clone() for each in state.chunk(2))
        for each in pending:
            yield Wait(each)

    # --- the state

    def describe_state(self) -> str:
        """See `Rounds`: the norms of the anchor and the momentum."""
        return format_norms({"anchor": self.anchor, "momentum": self.momentum})

    def compare_states(self, lines: Sequence[str], rounds: Sequence[ClosedRound]) -> None:
        """See `Rounds`: ranks that were last members of the same round have equal norms.

        The others receive the newest state from one of these ranks before their next outer step.
        """
        numbers = [each.memory[rank] for rank, each in enumerate(rounds)]
        for number in sorted(set(numbers)):
            ranks = [rank for rank, each in enumerate(numbers) if each == number]
            texts = {rank: f"{NORMS}\t{lines[rank]}" for rank in ranks}
            if difference := find_difference(texts, HINTS):
                raise ValueError(difference)
