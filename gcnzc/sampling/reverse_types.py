"""Find the edge types that have the reverse edges of another edge type."""

import re
import warnings

import torch
from torch import Tensor

from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph

# the names that PyG's ToUndirected, RelBench and others give to reverse relations
_WORDS = "rev|reverse|reversed|inv|inverse"
_PREFIX = re.compile(rf"(?:{_WORDS})[_-](?P<name>.+)", re.IGNORECASE)
_SUFFIX = re.compile(rf"(?P<name>.+)[_-](?:{_WORDS})", re.IGNORECASE)
# fraction of the pairs that edge types with other names must have in common
COMMON = 0.9


def find_reverse_types(graph: HeteroGraph, edge_type: EdgeType | str) -> list[EdgeType]:
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
        UserWarning: an edge type has the name of a reverse, but most of its edges are no reverses.
    """
    edge_type = graph.edge_type(edge_type)
    count, own = graph.num_edges(edge_type), None
    found = []
    for other in graph.edge_types:
        if other[::2] != edge_type[::-2]:
            continue
        is_named = _is_named_reverse(edge_type[1], other[1])
        smaller, larger = sorted((graph.num_edges(other), count))
        if not is_named and smaller < COMMON * larger:
            continue
        if own is None:
            own = _sorted_keys(graph, edge_type, is_reverse=False)
        its = _sorted_keys(graph, other, is_reverse=True)
        if torch.equal(own, its):
            found.append(other)
        elif other != edge_type:
            numbers = _count_common(own, its)
            if is_named and numbers[0]:
                found.append(other)
                _warn(edge_type, other, *numbers)
            elif numbers[0] >= COMMON * max(numbers[1:]):
                found.append(other)
    return found


def _is_named_reverse(relation: str, other: str) -> bool:
    """Whether one of two names is that of the reverse of the other."""
    names = {(relation, other), (other, relation)}
    return any(
        match is not None and match["name"] == name
        for name, reverse in names
        for match in (_PREFIX.fullmatch(reverse), _SUFFIX.fullmatch(reverse))
    )


def _sorted_keys(graph: HeteroGraph, edge_type: EdgeType, *, is_reverse: bool) -> Tensor:
    """Return one number for each edge, which determines its ends, in ascending order."""
    edges = graph.edges(edge_type).edge_index()
    first, second = edges.flip(0) if is_reverse else edges
    count = graph.num_nodes(edge_type[0 if is_reverse else 2])
    return (first * count + second).sort().values


def _count_common(own: Tensor, its: Tensor) -> tuple[int, int, int]:
    """Return the number of common keys, and of each set of keys, without duplicates."""
    own, its = own.unique_consecutive(), its.unique_consecutive()
    if not len(own) or not len(its):
        return 0, len(own), len(its)
    places = torch.searchsorted(own, its).clamp(max=len(own) - 1)
    return int((own[places] == its).sum()), len(own), len(its)


def _warn(
    edge_type: EdgeType, other: EdgeType, num_common: int, num_own: int, num_its: int
) -> None:
    if num_common < min(num_own, num_its) / 2:
        warnings.warn(
            f"{other} has the name of the reverse of {edge_type}, and is treated as such, but only "
            f"{num_common:,} of its {num_its:,} pairs of nodes are reverses\n\n"
            "hint: reverse_types=[] if it is not; otherwise check the node ids of both types",
            stacklevel=4,
        )
