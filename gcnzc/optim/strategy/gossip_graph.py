"""The graph of a gossip algorithm, and the constants of A2CiD2 that follow from it.

Notation: W ranks, L (W, W) the Laplacian whose entry for an edge is its exchanges per step.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

from gcnzc.exchange.topology import (
    GRAPHS,
    Edge,
    check_graph,
    inverse_connectivity,
    laplacian,
    maximal_resistance,
    neighbors,
    regular,
)

# the name of a regular graph, with the number of neighbors of each rank
_REGULAR = re.compile(r"(\d+)-regular")


@dataclass(frozen=True)
class GossipGraph:
    """The graph of a gossip algorithm: one of `GRAPHS`, "k-regular", or edges that connect it.

    Raises:
        ValueError: the name is unknown, or an edge is not a pair of integers.
    """

    topology: str | Iterable[Edge]
    """a name, or the edges"""

    def __post_init__(self) -> None:
        if not isinstance(self.topology, str):
            object.__setattr__(self, "topology", as_edges(self.topology))
        elif self.topology not in GRAPHS and not _REGULAR.fullmatch(self.topology):
            names = ", ".join(map(repr, GRAPHS))
            raise ValueError(
                f"topology is {self.topology!r}\n\nhint: use one of {names}, a number of neighbors "
                "as in '4-regular', or edges such as [(0, 1), (1, 2)]"
            )

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

    def rates(self, world_size: int, rate: float) -> dict[Edge, float]:
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


@dataclass(frozen=True)
class MomentumConstants:
    """The constants of A2CiD2's momentum, from section 3 of Nabli, Belilovsky and Oyallon (2023).

    `compute_momentum` computes them from a graph.
    """

    eta: float
    """how fast x and x~ mix, per step; 0 for gossip without momentum"""
    alpha: float
    """alpha~, the factor of an exchange's difference in x~; it is 1/2 in x"""


NO_MOMENTUM = MomentumConstants(0.0, 0.5)


def as_edges(pairs: Iterable[Iterable[int]]) -> tuple[Edge, ...]:
    """Return the caller's pairs of ranks as edges.

    Raises:
        ValueError: an element is not a pair of integers.
    """
    try:
        edges = tuple(tuple(each) for each in pairs)
    except TypeError:
        raise ValueError(
            f"topology is {pairs!r}\n\nhint: give the name of a graph, or pairs of ranks, such as "
            "[(0, 1), (1, 2)]"
        ) from None
    for edge in edges:
        if len(edge) != 2 or not all(isinstance(rank, Integral) for rank in edge):
            raise ValueError(f"the edge {edge} of a graph\n\nhint: give pairs of ranks, as (0, 1)")
    return tuple((int(low), int(high)) for low, high in edges)


def compute_momentum(
    world_size: int, rates: Mapping[Edge, float], eta: float | None = None
) -> MomentumConstants:
    """Return the constants for exchanges at given rates over the edges of a connected graph.

        eta = 1 / (2 sqrt(chi_1 chi_2)),  alpha~ = sqrt(chi_1 / chi_2) / 2

    Args:
        world_size: W.
        rates: the exchanges per step of each edge.
        eta: replaces the computed value; None to compute it.
    """
    if world_size == 1 or eta == 0:
        return NO_MOMENTUM
    matrix = laplacian(world_size, rates, rates)
    chi_1, chi_2 = inverse_connectivity(matrix), maximal_resistance(matrix, rates)
    computed = 1 / (2 * (chi_1 * chi_2) ** 0.5)
    return MomentumConstants(computed if eta is None else eta, (chi_1 / chi_2) ** 0.5 / 2)
