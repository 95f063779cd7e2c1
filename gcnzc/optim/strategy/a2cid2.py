"""A2CiD2: gossip in pairs of ranks, accelerated by a second vector of each rank.

Each rank takes local steps, and averages its parameters x with those of one neighbour at a time.
Its second vector x~ reduces the differences between ranks faster, as if they exchanged more often:

    mixing, for a time t      e = exp(-2 eta t);  (x, x~) <- (x + c (x~ - x), x~ - c (x~ - x)),
                              c = (1 - e) / 2
    gradient                  x' = InnerOpt(x, g);  (x, x~) <- (x', x~ + (x' - x))
    exchange of ranks i, j    d = x_i - x_j;  x_i <- x_i - d / 2,  x~_i <- x~_i - alpha~ d

    eta = 1 / (2 sqrt(chi_1 chi_2)),  alpha~ = sqrt(chi_1 / chi_2) / 2

as in Nabli, Belilovsky and Oyallon, "A2CiD2: Accelerating Asynchronous Communication in
Decentralized Deep Learning" (2023, https://arxiv.org/abs/2306.08289). chi_1 and chi_2 are
constants of the graph and its rates; see `gcnzc.exchange.topology`.
"""

from collections.abc import Sequence
from functools import partial

from gcnzc.exchange.topology import Edge
from gcnzc.optim.defaults import MAX_GOSSIP_RATE
from gcnzc.optim.strategy.gossip_graph import GossipGraph
from gcnzc.optim.strategy.gossip_times import GossipTimes
from gcnzc.optim.strategy.matched_gossip import GossipRounds, MatchedPairs
from gcnzc.optim.strategy.overlapped_gossip import OverlappedPairs
from gcnzc.optim.strategy.recipe import Exchange, Policy, Recipe
from gcnzc.optim.strategy.two_variables import TwoVariables
from gcnzc.optim.validation import check_above_zero, check_at_least_zero, check_count


def a2cid2(
    topology: str | Sequence[Edge] = "ring",
    gossip_rate: float = 1.0,
    *,
    asynchronous: bool = False,
    eta: float | None = None,
    control_interval: int = 10,
) -> Recipe:
    """Return the recipe of A2CiD2.

    With `asynchronous=False` the ranks exchange in rounds of pairs, and a rank waits for its peer.
    A run is reproducible bit for bit, even if it is resumed. With `asynchronous=True` exchanges are
    overlapped with the steps, and a rank does not wait for others before `average_parameters` or
    `finalize`. Use it if ranks differ in speed, or if exchanges take a large fraction of the time.
    All ranks still take the same number of steps. A saved state does not contain pending exchanges,
    so the mean of the ranks' parameters changes slightly when the state is loaded.

    The momentum reduces the differences between ranks if the graph has many hops, as a ring has. In
    a complete graph, and between two ranks, it has no benefit.

    Gradients are not averaged: use the learning rate of a single rank, or scale it as for large
    batches.

    Args:
        topology: the graph of the ranks: "ring", "exponential", "complete", a regular graph such
            as "4-regular", or edges (i, j) that connect all ranks. A rank exchanges with its
            neighbours in the graph only.
        gossip_rate: the number of exchanges per rank and step, at most 1,000, because a step takes
            the time of all its exchanges. With `asynchronous=True` it is an upper limit: an
            exchange takes at least a step.
        asynchronous: whether exchanges are overlapped with the steps.
        eta: replaces the constant of the graph; 0 for gossip without momentum, which needs no
            memory for x~. None for the constant of the graph.
        control_interval: the number of steps from one sum of the signals and comparison of options
            over all ranks to the next. With `asynchronous=True` the sums are overlapped.

    Raises:
        ValueError: an option is out of range.
    """
    check_above_zero("gossip_rate", gossip_rate, MAX_GOSSIP_RATE)
    check_count("control_interval", control_interval, 1)
    if eta is not None:
        check_at_least_zero("eta", eta)
    graph = GossipGraph(topology)
    policy: Policy
    exchange: Exchange
    if asynchronous:
        update = TwoVariables(partial(graph.rates, rate=gossip_rate), eta)
        exchange = overlapped = OverlappedPairs(graph, update)
        policy = GossipTimes(gossip_rate, update, overlapped)
    else:
        exchange = pairs = MatchedPairs(graph)
        update = TwoVariables(partial(pairs.rates, rate=gossip_rate), eta)
        policy = GossipRounds(gossip_rate, update, pairs)
    return Recipe(
        "A2CiD2",
        policy,
        update,
        exchange,
        control_interval=control_interval,
        is_control_overlapped=asynchronous,
    )
