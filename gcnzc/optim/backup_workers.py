"""Dynamic backup workers: slow ranks miss rounds of decentralized averaging.

    x_i <- InnerOpt(x_i)                    a local step of rank i, finished at the time t_i
    theta_k = min_(u, v) max(t_u, t_v)      over the pending edges of a spanning tree
    F_k = { i : t_i <= theta_k }            the members of round k
    x_i <- sum_j M_ij x_j                   i and j in F_k, M: Metropolis weights of their graph

A round closes as soon as both ends of a pending edge have finished a local step. The other ranks
continue to compute, and take part in the round that is current when they finish. Each round
establishes the edges of the tree among its members. When all edges have been established, an epoch
of rounds ends, and all edges are pending again. So the rounds of an epoch together connect all
ranks. An epoch of rounds is not one of the training data.

The method is that of Wang, Liu and Zhang, "Straggler-Resilient Distributed Machine Learning with
Dynamic Backup Workers" (2021, https://arxiv.org/abs/2102.06280), with a protocol without a
coordinator; see `gcnzc.optim.rounds`. Members average by messages to their neighbours.

Notation: W ranks, n elements of the flat parameter vector.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Now, Receive, Send, Start, Wait
from gcnzc.exchange.topology import Edge, metropolis_weights, neighbors, sort_edges
from gcnzc.optim.gossip import GossipGraph
from gcnzc.optim.local_method import Fragment
from gcnzc.optim.options import option
from gcnzc.optim.rounds import ClosedRound, Rounds
from gcnzc.optim.validation import check_range

MIN_GRACE_S = 0.002
"""least time that a rank waits before it closes a round, unless `grace` is 0"""
STEPS_KEPT = 16
"""the number of steps whose times a rank keeps"""


class BackupWorkers(Rounds):
    """Dynamic backup workers: average with the neighbours that have finished their step.

    The ranks do not take the same steps at the same time: a fast rank is ahead of a slow one by at
    most 2 `control_interval` steps. If all ranks finish at the same time, all of them are members
    of the round; on a complete graph, this is local SGD with a mean after every step.

    Do not run other collectives between two calls of `step`: fast ranks would wait in them for slow
    ranks, which may wait for a round with the fast ones. They are allowed after the steps in which
    all ranks wait for one another: those whose number is a multiple of `wait_interval`, and those
    that receive a signal. The methods of the optimizer are always allowed. A rank that waits for
    all others does not delay their rounds.

    Several optimizers of a group, and copies of them, may take steps in turns. While a rank waits
    in a round of one of them, it is paused in the rounds of the others, which do not wait for it.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        topology: the graph of the ranks that average with one another: "ring", "complete",
            "exponential", a regular graph such as "4-regular", or edges (i, j) of ranks.
        grace: the time for which a rank that can close a round waits for others to finish, as a
            fraction of the shortest time of its last 16 local steps. It is at least 2 ms, unless
            `grace` is 0. Without it, ranks that are about equally fast would miss each other's
            rounds. With infinity, every round waits for all ranks.
        control_interval: the number of steps from one sum of signals to the next; 32 by default.
            The sums overlap with the steps: a signal is received `control_interval` to twice as
            many steps after it was sent.
        options: `wait_interval` of `Rounds`, and the options of `DistributedOptimizer`.

    Raises:
        ValueError: an option is out of range, or there is no such graph.
    """

    topology: GossipGraph = option("ring", GossipGraph)
    grace: float = option(
        0.1, partial(check_range, is_valid=lambda x: x >= 0, hint="a number of at least 0")
    )

    edges: list[Edge]
    """the graph"""
    tree: list[Edge]
    """its spanning tree. The memory of a round is, for each of its edges, whether it is pending:
    whether the current epoch has not established it"""
    ended_s: float | None
    """the time of the end of the last step"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        self.edges = self.topology.edges(self.group.world_size)
        self.tree = depth_first_tree(self.group.world_size, self.edges)
        self.wait_s = MIN_GRACE_S if 0 < self.grace < math.inf else self.grace
        self.is_for_all_ranks = self.grace == math.inf
        self.step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        """the times of this rank's last local steps in seconds"""

    def outside(self) -> dict[str, Any]:
        """See `PartialExchanges`."""
        return super().outside() | {"ended_s": None}

    # --- when a round closes

    def begin_memory(self) -> tuple[int, ...]:
        """See `Rounds`: all edges of the tree are pending."""
        return (1,) * len(self.tree)

    def pending_edges(self, closed: ClosedRound) -> list[Edge]:
        """Return the edges of the tree that are pending after a round."""
        return [edge for edge, flag in zip(self.tree, closed.memory, strict=True) if flag]

    def is_enough(self, last: ClosedRound, finished: set[int], active: set[int]) -> bool:
        """See `Rounds`: whether both ends of a pending edge have finished.

        If all pending edges have a paused end, any edge of the graph suffices. If the ranks that
        are not paused have no edge, or all of them have finished, no edge is necessary.
        """
        usable = [edge for edge in self.pending_edges(last) if active.issuperset(edge)]
        usable = usable or [edge for edge in self.edges if active.issuperset(edge)]
        return not usable or active <= finished or any(map(finished.issuperset, usable))

    def remember(self, last: ClosedRound, members: Sequence[int]) -> tuple[int, ...]:
        """See `Rounds`."""
        pending = {edge for edge in self.pending_edges(last) if not set(members).issuperset(edge)}
        return tuple(int(edge in pending) for edge in self.tree) if pending else self.begin_memory()

    # --- the mean of the members

    def exchange(self, step: int) -> Algorithm[None]:
        """See `LocalMethod`; measures the time of the local step."""
        if self.ended_s is not None:
            self.step_s.append((yield Now()) - self.ended_s)
        if 0 < self.grace < math.inf:
            self.wait_s = max(MIN_GRACE_S, self.grace * min(self.step_s, default=0.0))
        yield from super().exchange(step)
        self.ended_s = yield Now()

    def take_part(self, step: int) -> Algorithm[None]:
        """See `Rounds`: average with the neighbours that are members of the round."""
        closed = yield from self.finish_round(step)
        if not self.peers(closed, self.group.rank):
            return
        (fragment,) = self.fragments
        own = self.flat.empty()
        self.read(fragment, own)
        mean = yield from self.neighbor_mean(closed, own)
        self.num_exchanges += 1
        if mean is not None:
            self.apply(fragment, mean)

    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`: set the parameters to the weighted mean."""
        self.set_parameters(fragment, mean)
        self.is_in_sync = False

    def neighbor_mean(self, closed: ClosedRound, own: Tensor) -> Algorithm[Tensor | None]:
        """Return the weighted mean (n,) of this rank's vector and those of its neighbours.

        Each member sends n elements to each of its neighbours among the members. A member whose
        parameters are not finite sends nothing, and takes the mean of its neighbours, if it has
        any.
        """
        rank, sends, inboxes = self.group.rank, [], {}
        for peer in self.peers(closed, rank):
            # the two ranks of an edge start in opposite orders, as NCCL requires
            for is_send in (rank < peer, rank > peer):
                if is_send and rank not in closed.damaged:
                    sends.append((yield Start(Send(own, peer))))
                elif not is_send and peer not in closed.damaged:
                    inboxes[peer] = yield Start(Receive(torch.empty_like(own), peer))
        mean, weights = torch.zeros_like(own), self.weights(closed, rank)
        for peer, weight in weights.items():
            mean.add_(own if peer == rank else (yield Wait(inboxes[peer])), alpha=weight)
        for pending in sends:
            yield Wait(pending)
        self.note_damaged(closed)
        return mean if weights else None

    def member_edges(self, closed: ClosedRound) -> list[Edge]:
        """Return the edges of the graph among the members."""
        members = set(closed.members)
        return [edge for edge in self.edges if members.issuperset(edge)]

    def peers(self, closed: ClosedRound, rank: int) -> list[int]:
        """Return the members that a member has an edge with, ascending."""
        return neighbors(self.group.world_size, self.member_edges(closed))[rank]

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
        row = metropolis_weights(self.group.world_size, finite)[rank].tolist()
        return {peer: weight for peer, weight in enumerate(row) if weight or peer == rank}


def depth_first_tree(world_size: int, edges: Collection[Edge]) -> list[Edge]:
    """Return the spanning tree of a depth-first search from rank 0; of a complete graph, a path.

    Its ranks have few edges, so that a slow rank delays few edges.

    Args:
        world_size: W.
        edges: a graph that connects all ranks.
    """
    adjacent = neighbors(world_size, edges)
    seen: set[int] = set()
    tree: list[Edge] = []
    stack = [(0, 0)]
    while stack:
        parent, rank = stack.pop()
        if rank not in seen:
            seen.add(rank)
            tree.append((parent, rank))
            stack += [(rank, peer) for peer in reversed(adjacent[rank])]
    return sort_edges(tree)
