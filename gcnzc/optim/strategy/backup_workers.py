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
coordinator. Each rank announces in the store that it has finished. A rank that reads that both ends
of a pending edge have finished closes the round by a compare-and-set. Members average by messages
to their neighbours, so no rank communicates with a rank that has not finished.

Notation: W ranks, n elements of the flat parameter vector.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Receive, Send, Start, Wait
from gcnzc.exchange.topology import Edge
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.strategy.close_rounds import CloseRounds
from gcnzc.optim.strategy.parameter_mean import ParameterMean
from gcnzc.optim.strategy.recipe import Exchange, Recipe


def backup_workers(
    topology: str | Iterable[Edge] = "ring",
    *,
    grace: float = 0.1,
    control_interval: int = 32,
    wait_interval: int | None = None,
) -> Recipe:
    """Return the recipe of dynamic backup workers.

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
        topology: the graph of the ranks that average with one another: "ring", "complete",
            "exponential", a regular graph such as "4-regular", or edges (i, j) of ranks.
        grace: the time for which a rank that can close a round waits for others to finish, as a
            fraction of the shortest time of its last 16 local steps. It is at least 2 ms, unless
            `grace` is 0. Without it, ranks that are about equally fast would miss each other's
            rounds. With infinity, every round waits for all ranks.
        control_interval: the number of steps from one sum of signals to the next. The sums overlap
            with the steps: a signal is received `control_interval` to twice as many steps after it
            was sent.
        wait_interval: the number of steps after which all ranks wait for one another, such as the
            number of steps of an epoch; None if they never wait. The waits have the time limit of
            the group.

    Raises:
        ValueError: an option is out of range, or there is no such graph.
    """
    rounds = CloseRounds(topology, grace, control_interval, wait_interval)
    return Recipe("BackupWorkers", rounds, MixedParameters(), NeighborMean(rounds))


class MixedParameters(ParameterMean):
    """Set the parameters of this rank to a weighted mean of its own and its neighbours'."""

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        flat_params = self.strategy.flat_params
        flat_params.write_parameters(mean)
        if not self.strategy.is_counted:
            delete_nonfinite_state(self.strategy.state, flat_params.parameters)
        return
        yield


class NeighborMean(Exchange):
    """The weighted mean of the parameters of this rank and its neighbours in the current round.

    Each member sends n elements to each of its neighbours among the members. A member whose
    parameters are not finite sends nothing, and takes the mean of its neighbours.

    Args:
        rounds: closes the rounds.
    """

    def __init__(self, rounds: CloseRounds) -> None:
        self.rounds = rounds

    def describe(self) -> str:
        """See `Exchange`."""
        return ""

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`."""
        strategy, rules, closed = self.strategy, self.rounds.rules, self.rounds.last
        rank, own = strategy.group.rank, values[: strategy.recipe.update.num_elements]
        sends, inboxes = [], {}
        for peer in rules.peers(closed, rank):
            # the two ranks of an edge start in opposite orders, as NCCL requires
            for is_send in (rank < peer, rank > peer):
                if is_send and rank not in closed.damaged:
                    sends.append((yield Start(Send(own, peer))))
                elif not is_send and peer not in closed.damaged:
                    inboxes[peer] = yield Start(Receive(torch.empty_like(own), peer))
        mean = torch.zeros_like(own)
        weights = rules.weights(closed, rank)
        for peer, weight in weights.items():
            mean.add_(own if peer == rank else (yield Wait(inboxes[peer])), alpha=weight)
        for pending in sends:
            yield Wait(pending)
        if closed.damaged:
            ranks = ", ".join(map(str, closed.damaged))
            strategy.record_drop(f"parameters are not finite or too large on ranks {ranks}")
        return mean if weights else None
