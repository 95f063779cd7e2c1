"""Find the edge types that have the reverse edges of another edge type."""

import re
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeType

# the names that PyG's ToUndirected, RelBench and others give to reverse relations
_WORDS = "rev|reverse|reversed|inv|inverse"
_PREFIX = re.compile(rf"(?:{_WORDS})[_-](?P<name>.+)", re.IGNORECASE)
_SUFFIX = re.compile(rf"(?P<name>.+)[_-](?:{_WORDS})", re.IGNORECASE)
# fraction of the pairs that edge types with other names must have in common
COMMON = 0.9
# fraction of the pairs above which reverses that are not by chance cause a warning
UNEXPECTED = 0.1


def find_reverse_types(graph: Graph, edge_type: EdgeType | str) -> list[EdgeType]:
    """Return the edge types that have the reverse edges of a type.

    An edge type between the same node types in the other direction is one of them if

    - its edges are the reverses of all edges of the type; or
    - the name of its relation is that of a reverse, such as `rev_buys` or `buys_rev` for `buys`,
      and some of its edges are reverses; or
    - nine of ten pairs of nodes of the larger type are reverses of those of the other.

    Args:
        graph: the graph.
        edge_type: a triple, or the name of a unique relation. It is one of the results if each of
            its edges has a reverse edge of the same type.

    Warns:
        UserWarning: an edge type

            - has the name of a reverse, but fewer than half of the pairs of the smaller of the two
              types are common; or
            - is none of the results, but has the reverses of many pairs of `edge_type`: by more
              than 10 % of these pairs more than random edges between nodes of the same degrees,
              and twice as many, or half of the other pairs more.
    """
    edge_type = graph.edge_type(edge_type)
    own = None
    found = []
    for other in graph.edge_types:
        if other[::2] != edge_type[::-2]:
            continue
        is_named = _is_named_reverse(edge_type[1], other[1])
        if own is None:
            own = _sorted_keys(graph, edge_type, is_reverse=False)
            own_pairs = own.unique_consecutive()
        if not is_named and graph.edges(other).num_edges < UNEXPECTED * len(own_pairs):
            continue
        keys = _sorted_keys(graph, other, is_reverse=True)
        if torch.equal(own, keys):
            found.append(other)
            continue
        pairs = keys.unique_consecutive()
        counts = _count_pairs(own_pairs, pairs)
        if other != edge_type and is_named and counts.num_common:
            found.append(other)
            _warn_of_name(edge_type, other, counts)
        elif other != edge_type and counts.num_common >= COMMON * max(counts[1:]):
            found.append(other)
        elif counts.num_common > UNEXPECTED * counts.num_own:
            num_expected = _expect_common(own_pairs, pairs, graph.nodes(edge_type[2]).num_nodes)
            _warn_of_common(edge_type, other, counts, num_expected)
    return found


def _is_named_reverse(relation: str, other: str) -> bool:
    """Whether one of two names is that of the reverse of the other."""
    names = {(relation, other), (other, relation)}
    return any(
        match is not None and match["name"] == name
        for name, reverse in names
        for match in (_PREFIX.fullmatch(reverse), _SUFFIX.fullmatch(reverse))
    )


def _sorted_keys(graph: Graph, edge_type: EdgeType, *, is_reverse: bool) -> Tensor:
    """Return one number for each edge, which determines its ends, in ascending order."""
    edges = graph.edges(edge_type).edge_index()
    first, second = edges.flip(0) if is_reverse else edges
    count = graph.nodes(edge_type[0 if is_reverse else 2]).num_nodes
    return (first * count + second).sort().values


class _Counts(NamedTuple):
    """Numbers of different pairs of nodes of two edge types."""

    num_common: int
    num_own: int
    num_other: int


def _count_pairs(own: Tensor, other: Tensor) -> _Counts:
    """Count ascending keys without duplicates."""
    if not len(own) or not len(other):
        return _Counts(0, len(own), len(other))
    places = torch.searchsorted(own, other).clamp(max=len(own) - 1)
    return _Counts(int((own[places] == other).sum()), len(own), len(other))


def _expect_common(own: Tensor, other: Tensor, width: int) -> float:
    """Return the expected number of common pairs if ends are random, but degrees are not.

    As in the configuration model, the probability that two nodes of degrees a and b are one of E
    random pairs is about ab / E.

    Args:
        own, other: ascending keys `first * width + second` without duplicates.
        width: number of nodes of the second type.
    """
    first, second = other // width, other % width
    # the first node of a pair may have a higher number in `own` than in `other`
    of_first = first.bincount(minlength=int(own[-1]) // width + 1)[own // width]
    of_second = second.bincount(minlength=width)[own % width]
    product = of_first.double() * of_second
    return float((product / len(other)).clamp(max=1).sum())


def _warn_of_common(
    edge_type: EdgeType, other: EdgeType, counts: _Counts, num_expected: float
) -> None:
    """Warn if more pairs are common than random edges have."""
    excess = counts.num_common - num_expected
    least = max(
        UNEXPECTED * counts.num_own,
        # four standard deviations of the number of rare events
        4 * max(num_expected, 1) ** 0.5,
        # the expected number is too small if degrees are very skewed
        min(num_expected, (counts.num_own - num_expected) / 2),
    )
    if excess <= least:
        return
    warnings.warn(
        f"{counts.num_common:,} of {counts.num_own:,} pairs of nodes of {edge_type} have a reverse "
        f"edge in {other}, and about {num_expected:,.0f} would by chance, but {other} is not "
        "treated as a reverse type: these edges may show a model the edges that it predicts\n\n"
        f"hint: reverse_types=[{other}] (gcnzc train: --task link:reverse_types={','.join(other)}) "
        "if they are reverse edges, otherwise reverse_types=[] (--task link:reverse_types=none)",
        stacklevel=4,
    )


def _warn_of_name(edge_type: EdgeType, other: EdgeType, counts: _Counts) -> None:
    smaller = min(counts.num_own, counts.num_other)
    if counts.num_common < smaller / 2:
        warnings.warn(
            f"{other} has the name of the reverse of {edge_type}, and is treated as such, but only "
            f"{counts.num_common:,} of {smaller:,} pairs of nodes of the smaller type are reverses"
            "\n\n"
            "hint: reverse_types=[] (gcnzc train: --task link:reverse_types=none) if it is not; "
            "otherwise check the node ids of both types",
            stacklevel=4,
        )
