"""Find the edge types that have the reverse edges of another edge type."""

import re
import warnings
from typing import NamedTuple

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
        UserWarning: an edge type has the name of a reverse, but fewer than half of the pairs of
            the smaller of the two types are common.
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
        if not is_named and graph.num_edges(other) < COMMON * len(own_pairs):
            continue
        keys = _sorted_keys(graph, other, is_reverse=True)
        if torch.equal(own, keys):
            found.append(other)
        elif other != edge_type:
            counts = _count_pairs(own_pairs, keys.unique_consecutive())
            if is_named and counts.num_common:
                found.append(other)
                _warn(edge_type, other, counts)
            elif counts.num_common >= COMMON * max(counts.num_own, counts.num_other):
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


def _warn(edge_type: EdgeType, other: EdgeType, counts: _Counts) -> None:
    smaller = min(counts.num_own, counts.num_other)
    if counts.num_common < smaller / 2:
        warnings.warn(
            f"{other} has the name of the reverse of {edge_type}, and is treated as such, but only "
            f"{counts.num_common:,} of {smaller:,} pairs of nodes of the smaller type are reverses"
            "\n\n"
            "hint: reverse_types=[] if it is not; otherwise check the node ids of both types",
            stacklevel=4,
        )
