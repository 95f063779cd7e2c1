"""The graph and the samplers of the drop-in loaders: no other module constructs samplers.

The edges are another library's, in our memory as CSC. A graph of that library with one type of
nodes and edges has one type here too. Sampled edges are positions in CSC order, whose ids in the
library are looked up when they are needed.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph, TimeKind
from gcnzc.graph.stores import EdgeType
from gcnzc.interop.column import gather_ids
from gcnzc.sampling.neighbor import Sampler


@dataclass(frozen=True, eq=False)
class CscGraph:
    """The edges of another library's graph.

    Attributes:
        graph: without edge ids.
        edge_ids: by edge type (E,) the library's id of each edge in CSC order; None if it is the
            position.
        is_typed: whether the library's graph has types.
        time: the kind of types that have times; None without times.
        values: keeps the values alive from which the graph was built, see `cached_graph`.
    """

    graph: Graph
    edge_ids: Mapping[EdgeType, Tensor | None]
    is_typed: bool
    time: TimeKind | None = None
    values: tuple[Any, ...] = ()
    # what `positions` computed
    _positions: dict[EdgeType, Tensor] = field(default_factory=dict)

    def ids(self, edge_type: EdgeType, positions: Tensor) -> Tensor:
        """Return the library's ids of edges, int64."""
        edge_ids = self.edge_ids[edge_type]
        return positions if edge_ids is None else gather_ids(edge_ids, positions)

    def positions(self, edge_type: EdgeType, ids: Tensor) -> Tensor:
        """Return the positions of edges, given by the library's ids."""
        edge_ids = self.edge_ids[edge_type]
        if edge_ids is None:
            return ids
        found = self._positions.get(edge_type)
        if found is None:
            # two threads may both compute it, and one is kept
            found = self._positions.setdefault(edge_type, invert_edge_ids(edge_ids))
        return found[ids]


# The loaders of training and evaluation share one sorted graph.
_cache: weakref.WeakValueDictionary[Any, CscGraph] = weakref.WeakValueDictionary()


def cached_graph(key: Any, values: Sequence[Any], build: Callable[[], CscGraph]) -> CscGraph:
    """Return the graph that `build` returned for the same values, as long as it is in use.

    Args:
        key: tells graphs apart that are built from the same values.
        values: from which the graph is built; it is cached if they are tensors, integers or None.
        build: builds the graph.
    """
    if not all(value is None or isinstance(value, Tensor | int) for value in values):
        return build()
    key = (key, *map(_identity, values))
    found = _cache.get(key)
    if found is None:
        # the addresses of tensors are in the key, so the values are kept
        found = _cache[key] = replace(build(), values=tuple(values))
    return found


def _identity(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    version = 0 if value.is_inference() else value._version
    place = (value.data_ptr(), version, value.stride(), value.shape)
    return (*place, value.dtype, value.device)


def invert_edge_ids(edge_ids: Tensor) -> Tensor:
    """Return the (E,) int64 positions of edges by their ids, a permutation."""
    positions = torch.empty(len(edge_ids), dtype=torch.int64)
    positions[edge_ids.long()] = torch.arange(len(edge_ids))
    return positions


def without_edge_ids(graph: Graph) -> tuple[Graph, dict[EdgeType, Tensor | None]]:
    """Return a graph whose edge ids are positions, and its edge ids by type."""
    edges = {each: graph.edges(each) for each in graph.edge_types}
    found = Graph.from_stores(
        {each: graph.nodes(each) for each in graph.node_types},
        {each: replace(store, edge_ids=None) for each, store in edges.items()},
        time_unit=graph.time_unit,
        check=False,
    )
    return found, {each: store.edge_ids for each, store in edges.items()}


class OneTypeSampler(Sampler):
    """Samples a graph of a library without types, whichever names its only types have here."""

    @property
    def has_types(self) -> bool:
        """False."""
        return False


def make_sampler(csc: CscGraph, num_neighbors: Any, **options: Any) -> Sampler:
    """Return a sampler of a graph, whose edges are given by positions.

    Args:
        csc: the graph.
        num_neighbors: as `fanouts` of `gcnzc.Sampler`, but from the seeds outward.
        options: of `gcnzc.Sampler`; by default each node is sampled once.
    """
    if isinstance(num_neighbors, Mapping):
        fanouts: Any = {each: list(own)[::-1] for each, own in num_neighbors.items()}
        if not csc.is_typed:
            (fanouts,) = fanouts.values()
    else:
        fanouts = list(num_neighbors)[::-1]
    kind = Sampler if csc.is_typed else OneTypeSampler
    return kind(csc.graph, fanouts, edge_ids=True, **{"once": True} | options)
