"""The rounds of dynamic backup workers: when a round closes, and which ranks are its members.

The rules are functions of the ranks' states and of the last closed round, so that any rank can
apply them. They do not communicate.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from gcnzc.exchange.topology import Edge, metropolis_weights, neighbors, sort_edges


class StatusKind(Enum):
    """What a rank does, or the result of its last local step."""

    FINISHED = "finished"
    """it has finished a local step for a round; its parameters are finite"""
    DAMAGED = "damaged"
    """it has finished a local step for a round; its parameters are not finite or too large"""
    PAUSED = "paused"
    """it waits for all ranks, so no round may wait for it; see `RecipePart.pause_exchanges`"""


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
    """the ranks that mix their parameters, ascending"""
    damaged: tuple[int, ...]
    """the members whose parameters are not finite or too large"""
    pending: tuple[Edge, ...]
    """with `RoundRules`, the edges of the spanning tree that the current epoch has not established
    (`gcnzc.optim.strategy.backup_workers`); with `QuorumRules`, which member sends its state to
    which"""
    epochs: int
    """the number of completed epochs"""
    numbers_by_rank: tuple[int, ...]
    """a number for each rank. With `RoundRules`, the number of epochs that the rank has completed,
    because it closed the round that established their last edge; a rank that is always slow
    completes each epoch. With `QuorumRules`, the last round of which the rank was a member"""
    oldest: int
    """the oldest round whose key is not deleted"""

    def to_bytes(self) -> bytes:
        """Return the round as the value of a key."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClosedRound":
        """Return the round of a value."""
        fields = json.loads(data)
        fields["pending"] = map(tuple, fields["pending"])
        for name in ("members", "damaged", "pending", "numbers_by_rank"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


class RoundRules:
    """The rules of rounds on a graph.

    Args:
        world_size: W.
        edges: the graph; connects all ranks.
    """

    numbers_are_statistics = True
    """whether these rules do not read `ClosedRound.numbers_by_rank`. A saved state then has zeros
    instead, because the numbers depend on the times of the ranks"""

    def __init__(self, world_size: int, edges: Sequence[Edge]) -> None:
        self.world_size, self.edges = world_size, list(edges)
        self.tree = tuple(depth_first_tree(world_size, edges))
        """the spanning tree, whose edges each epoch establishes"""

    def begin(self) -> ClosedRound:
        """Return the round before the first one."""
        numbers_by_rank = (0,) * self.world_size
        return ClosedRound(0, tuple(range(self.world_size)), (), self.tree, 0, numbers_by_rank, 0)

    def resume(self, rounds: Sequence[ClosedRound]) -> ClosedRound:
        """Return the round that a run continues from.

        Args:
            rounds: by rank, the last round that the rank has read.
        """
        return max(rounds, key=lambda each: each.round)

    def is_complete(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """Whether all ranks that are not paused have finished their step for the current round.

        Args:
            last: the last closed round.
            statuses: of all ranks.
        """
        return self._active(statuses) <= self._finished(last, statuses)

    def can_close(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> bool:
        """Whether both ends of a pending edge have finished their step for the current round.

        If all pending edges have a paused end, any edge of the graph suffices. If the ranks that
        are not paused have no edge, or all of them have finished, no edge is necessary.
        """
        finished, active = self._finished(last, statuses), self._active(statuses)
        if not finished:
            return False
        usable = [edge for edge in last.pending if active.issuperset(edge)]
        usable = usable or [edge for edge in self.edges if active.issuperset(edge)]
        return not usable or active <= finished or any(map(finished.issuperset, usable))

    def close(self, last: ClosedRound, statuses: Sequence[RankStatus], closer: int) -> ClosedRound:
        """Return the current round, closed with the ranks that have finished.

        Args:
            last: the last closed round.
            statuses: of all ranks, for which `can_close` is true.
            closer: the rank that closes the round.
        """
        number, finished = last.round + 1, self._finished(last, statuses)
        pending = tuple(edge for edge in last.pending if not finished.issuperset(edge))
        epochs, by_rank = last.epochs, list(last.numbers_by_rank)
        if not pending:
            pending, epochs = self.tree, epochs + 1
            by_rank[closer] += 1
        damaged = tuple(
            rank for rank in sorted(finished) if statuses[rank].kind is StatusKind.DAMAGED
        )
        # a rank may still wait for the key of the round in its status, and a late rank reads the
        # keys of the last two rounds
        kept = min([last.round, *(statuses[rank].round for rank in self._active(statuses))])
        oldest = max(last.oldest, kept)
        members = tuple(sorted(finished))
        return ClosedRound(number, members, damaged, pending, epochs, tuple(by_rank), oldest)

    def member_edges(self, closed: ClosedRound) -> list[Edge]:
        """Return the edges of the graph among the members."""
        members = set(closed.members)
        return [edge for edge in self.edges if members.issuperset(edge)]

    def peers(self, closed: ClosedRound, rank: int) -> list[int]:
        """Return the members that a member has an edge with, ascending."""
        return neighbors(self.world_size, self.member_edges(closed))[rank]

    def weights(self, closed: ClosedRound, rank: int) -> dict[int, float]:
        """Return the weights of parameters in the mean of a member, by rank, ascending.

        They are the Metropolis weights of the graph among the members with finite parameters. A
        member whose parameters are not finite takes the mean of the finite members that it has
        an edge with; if there are none, it has no weights.
        """
        edges = self.member_edges(closed)
        finite = [edge for edge in edges if not set(edge).intersection(closed.damaged)]
        if rank in closed.damaged:
            peers = [peer for peer in self.peers(closed, rank) if peer not in closed.damaged]
            return dict.fromkeys(peers, 1 / max(1, len(peers)))
        row = metropolis_weights(self.world_size, finite)[rank].tolist()
        return {peer: weight for peer, weight in enumerate(row) if weight or peer == rank}

    def _finished(self, last: ClosedRound, statuses: Sequence[RankStatus]) -> set[int]:
        """Return the ranks that have finished their step for the current round."""
        number = last.round + 1
        return {rank for rank in self._active(statuses) if statuses[rank].round == number}

    def _active(self, statuses: Sequence[RankStatus]) -> set[int]:
        """Return the ranks that are not paused."""
        return {rank for rank, each in enumerate(statuses) if each.kind is not StatusKind.PAUSED}


def depth_first_tree(world_size: int, edges: Collection[Edge]) -> list[Edge]:
    """Return the spanning tree of a depth-first search from rank 0; of a complete graph, a path.

    Its ranks have few edges, so that a slow rank delays few edges.

    Args:
        world_size: W.
        edges: a graph that connects all ranks.
    """
    adjacent = neighbors(world_size, edges)
    seen, tree = {0}, []
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(adjacent[0]))]
    while stack:
        rank, peers = stack[-1]
        peer = next((each for each in peers if each not in seen), None)
        if peer is None:
            stack.pop()
            continue
        seen.add(peer)
        tree.append((rank, peer))
        stack.append((peer, iter(adjacent[peer])))
    return sort_edges(tree)
