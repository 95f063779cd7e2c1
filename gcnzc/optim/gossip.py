"""Gossip: the base class of local methods whose ranks exchange in pairs.

    x_i[c] <- (x_i[c] + x_j[c]) / 2                  j: the peer of rank i; c: the exchanged indices

Each pair keeps the sum of its parameters, so the mean of all ranks does not change. A method says
which ranks are a pair, and when. A rank waits for its peer, but not for other ranks; the signals
have sums of all ranks of their own. `gcnzc.optim.offers` exchanges in pairs without waiting.

Notation: W ranks, n elements of the flat parameter vector, k of them exchanged.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Receive, Send, SendReceive
from gcnzc.exchange.topology import GRAPHS, Edge, check_graph, neighbors, regular
from gcnzc.kernels.finite import are_finite, can_be_squared
from gcnzc.optim.control import PartialExchanges
from gcnzc.optim.local_method import Fragment

NOT_USABLE = "not finite or too large"

# the name of a regular graph, with the number of neighbors of each rank
_REGULAR = re.compile(r"(\d+)-regular")


class Gossip(PartialExchanges):
    """The base class of local methods whose ranks exchange in pairs.

    `take_part` of a subclass calls `average_pair`, or exchanges in another way.
    """

    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`: set the parameters to the mean with the peer's."""
        self.set_parameters(fragment, mean)
        # ranks of other pairs have other parameters
        self.is_in_sync = False

    def average_pair(self, peer: int | None, indices: Tensor | None = None) -> Algorithm[None]:
        """Exchange with a peer what `read` writes, and `apply` the mean.

        If the vector of one rank is not finite, or too large to be squared, that rank applies the
        vector of the other, which applies nothing.

        Args:
            peer: a rank, whose peer is this rank in the same exchange; None if this rank is idle.
            indices: (k,), the exchanged elements, equal on both ranks; None for all of them.
        """
        self.num_exchanges += 1
        if peer is None:
            # all ranks make the same request
            yield SendReceive(torch.empty(0, device=self.flat.device), self.group.rank)
            return
        (fragment,) = self.fragments
        own = self.flat.empty()
        self.read(fragment, own)
        mean = yield from self._pair_mean(fragment, own, peer, indices)
        if mean is not None:
            self.apply(fragment, mean)

    def _pair_mean(
        self, fragment: Fragment, own: Tensor, peer: int, indices: Tensor | None
    ) -> Algorithm[Tensor | None]:
        """Return the mean (n,) of a vector with that of a peer; None if the peer has none."""
        is_usable = fragment.is_finite = bool(can_be_squared(own))
        sent = own.clone() if indices is None else own[indices]
        if not is_usable:
            # a rank whose vector is not usable sends only NaN
            sent.fill_(torch.nan)
        received = yield SendReceive(sent, peer)
        is_peer_usable = bool(are_finite(received[:1]))
        if is_usable and is_peer_usable:
            sent.add_(received).mul_(0.5)
            return sent if indices is None else own.index_copy_(0, indices, sent)
        flags = sorted([(self.group.rank, is_usable), (peer, is_peer_usable)])
        ranks = " and ".join(str(rank) for rank, is_good in flags if not is_good)
        self.note_drop(f"the parameters of rank {ranks} are {NOT_USABLE}")
        if indices is not None and is_usable:
            yield Send(own, peer)
        if is_usable or not is_peer_usable:
            return None
        return received if indices is None else (yield Receive(own, peer))


class GossipGraph:
    """The graph of a gossip algorithm.

    Args:
        name: of the option, for messages.
        topology: one of `GRAPHS`, "k-regular", or edges that connect all ranks.

    Raises:
        ValueError: the name is unknown, or an edge is not a pair.
    """

    def __init__(self, name: str, topology: str | Iterable[Edge]) -> None:
        self.topology: str | list[Edge]
        if not isinstance(topology, str):
            self.topology = [(int(low), int(high)) for low, high in topology]
        elif topology in GRAPHS or _REGULAR.fullmatch(topology):
            self.topology = topology
        else:
            names = ", ".join(map(repr, GRAPHS))
            raise ValueError(
                f"{name} is {topology!r}\n\nhint: use one of {names}, a number of neighbors as in "
                "'4-regular', or edges such as [(0, 1), (1, 2)]"
            )

    def __str__(self) -> str:
        return repr(self.topology)

    def edges(self, world_size: int) -> list[Edge]:
        """Return the edges for W ranks; none for a single rank.

        Raises:
            ValueError: there is no such graph of so many ranks: the given edges do not connect
                them, or have ranks that do not exist.
        """
        if world_size == 1:
            return []
        if not isinstance(self.topology, str):
            return check_graph(world_size, self.topology)
        if degree := _REGULAR.fullmatch(self.topology):
            return regular(world_size, int(degree[1]))
        return GRAPHS[self.topology](world_size)

    def rates(self, world_size: int, rate: float) -> Mapping[Edge, float]:
        """Return the exchanges per step of each edge, if each rank starts them edge by edge.

        Each rank starts `rate` / 2 exchanges per step, with one neighbour after the other. In a
        graph whose ranks have the same number of neighbours, each rank therefore takes part in
        `rate` exchanges per step.
        """
        edges = self.edges(world_size)
        degrees = [len(each) for each in neighbors(world_size, edges)]
        return {
            (low, high): rate * (1 / degrees[low] + 1 / degrees[high]) / 2 for low, high in edges
        }
