"""Hold out edges of one type of a heterogeneous graph for validation and test.

Notation: E edges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph, TimeKind
from gcnzc.graph.stores import EdgeStore, EdgeType
from gcnzc.loader.seeds import permutation
from gcnzc.sampling.link import edge_times
from gcnzc.sampling.reverse_types import find_reverse_types
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset

# stream of the random generator; stream 0 shuffles the seeds of an epoch
SPLIT = 3


@dataclass(frozen=True)
class HeteroEdgeSplit:
    """The edges of one type, divided into training, validation and test edges.

    Attributes:
        edge_type: of the edges.
        edges: "train", "valid" and "test": (2, E of the split) int64 sources and destinations.
        times: by split, (E of the split,); None if the edges have no times.
        graph: for message passing: without the held-out edges and their reverses; with them if
            `are_kept`.
        reverse_types: the edge types of the reverse edges; None if held-out edges are kept, and
            the types are not given.
        kind: whether the latest or random edges are held out.
        are_kept: whether the held-out edges are in `graph`, whose sampler leaves out later edges.
    """

    edge_type: EdgeType
    edges: Mapping[str, Tensor]
    times: Mapping[str, Tensor] | None
    graph: Graph
    reverse_types: Sequence[EdgeType] | None
    kind: Literal["time", "random"]
    are_kept: bool


def split_edges(
    graph: Graph,
    edge_type: EdgeType,
    kind: Literal["auto", "time", "random"],
    valid: float,
    test: float,
    seed: int,
    *,
    keep: bool,
    reverse_types: Sequence[EdgeType] | None = None,
    time: TimeKind = "both",
) -> HeteroEdgeSplit:
    """Divide the edges of a type by time or at random.

    In a random split, edges between the nodes of a held-out edge are not training edges. If the
    type is its own reverse, both directions of an edge are held out together. In a split by time,
    the reverse of a held-out edge is not a training edge if it has the same type and time; earlier
    reverses may be training edges.

    Args:
        graph: the graph.
        edge_type: of the edges to predict.
        kind: "time" holds out the latest edges, "random" random ones; "auto" is "time" if the edges
            or their nodes have times.
        valid, test: fractions of the edges to hold out.
        seed: of the random split.
        keep: keep held-out edges in the graph, because its sampler excludes later edges.
        reverse_types: edge types of the reverse edges. Default: those that `find_reverse_types`
            finds.
        time: which times count, see `find_times`.

    Raises:
        ValueError: the edges have no times, or a split has no edges.
    """
    times, edges = find_times(graph, edge_type, time), graph.edges(edge_type).edge_index()
    if kind == "auto":
        kind = "random" if times is None else "time"
    if kind == "time" and times is None:
        raise ValueError(
            f"--task link:split=time: {describe_missing_times(edge_type, time)}\n\n"
            "hint: use split=random; with --temporal, another `time` may select existing times"
        )
    count, width = edges.shape[1], graph.nodes(edge_type[2]).num_nodes
    if reverse_types is None and not keep:
        reverse_types = find_reverse_types(graph, edge_type)
    reverses = reverse_types or []
    if kind == "time":
        assert times is not None, "checked above"
        order = times.argsort(stable=True)
    elif edge_type in reverses:
        order = _shuffle_pairs(edges, width, seed)
    else:
        order = torch.from_numpy(permutation(count, seed, 0, SPLIT))
    num_test, num_valid = int(count * test), int(count * valid)
    num_train = count - num_test - num_valid
    parts = dict(
        zip(("train", "valid", "test"), order.split([num_train, num_valid, num_test]), strict=True)
    )
    held_out = order[num_train:]
    keys = edges[0] * width + edges[1]
    if kind == "random":
        own = parts["train"]
        parts["train"] = own[torch.isin(keys[own], keys[held_out], invert=True)]
    # a temporal sampler keeps reverses out of neighbourhoods, but they may still be training edges
    if edge_type in reverses or (reverse_types is None and edge_type[0] == edge_type[2]):
        flipped = edges[1] * width + edges[0]
        later_times = times if kind == "time" else None
        for name, later in (("train", held_out), ("valid", parts["test"])):
            parts[name] = _drop_reverses(parts[name], later, keys, flipped, later_times)
    for name, ids in parts.items():
        if not len(ids):
            raise ValueError(
                f"of the {count:,} edges {edge_type}, none is in the {name} split\n\n"
                "hint: choose valid_edges and test_edges of --task such that each split has edges"
            )
    if not keep:
        later = times if kind == "time" else None
        graph = _without(graph, edge_type, reverses, edges[:, held_out], held_out, later, time)
    return HeteroEdgeSplit(
        edge_type,
        {name: edges[:, ids] for name, ids in parts.items()},
        None if times is None else {name: times[ids] for name, ids in parts.items()},
        graph,
        reverse_types,
        kind,
        keep,
    )


def split_edges_of_run(config: TrainConfig, data: HeteroDataset) -> HeteroEdgeSplit:
    """Divide the edges that a run predicts, as its options say; see `split_edges`."""
    assert data.edge_type is not None, "`load_hetero` has found it"
    task, time = config.graph.task, config.graph.time_kind
    # Without a time of its own, an edge counts as late as its source and may be visible before its
    # destination exists, so that a temporal sampler would not leave out the edge itself.
    own_times, _ = data.graph.times(data.edge_type, time)
    return split_edges(
        data.graph,
        data.edge_type,
        task["split"],
        task["valid_edges"],
        task["test_edges"],
        config.loading.seed,
        keep=config.graph.is_temporal and own_times is not None,
        reverse_types=data.reverse_types,
        time=time,
    )


def find_times(graph: Graph, edge_type: EdgeType, time: TimeKind = "both") -> Tensor | None:
    """Return the (E,) times of the edges by edge id; None if they have none.

    Args:
        graph: the graph.
        edge_type: of the edges.
        time: "edge" for their own times, "node" for the latest of their ends', "both" for their own
            if they have some, and otherwise the latest of their ends'.
    """
    times = None if time == "node" else edge_times(graph, edge_type)
    if times is not None or time == "edge":
        return times
    edges = graph.edges(edge_type).edge_index()
    for end, ids in zip(edge_type[::2], edges, strict=True):
        of_nodes = graph.nodes(end).time
        if of_nodes is not None:
            own = of_nodes[ids]
            times = own if times is None else torch.maximum(times, own)
    return times


def describe_missing_times(edge_type: EdgeType, time: TimeKind) -> str:
    """Return the message that the edges to predict have no times that count."""
    if time == "edge":
        return f"the edges {edge_type} have no times of their own"
    if time == "node":
        return f"the nodes of the edges {edge_type} have no times"
    return f"neither the edges {edge_type} nor their nodes have times"


def _shuffle_pairs(edges: Tensor, width: int, seed: int) -> Tensor:
    """Return edge ids in a random order in which edges between the same two nodes are adjacent."""
    low, high = edges.aminmax(dim=0)
    pairs, inverse = (low * width + high).unique(return_inverse=True)
    return (
        torch.from_numpy(permutation(len(pairs), seed, 0, SPLIT))
        .argsort()[inverse]
        .argsort(stable=True)
    )


def _drop_reverses(
    ids: Tensor, later: Tensor, keys: Tensor, flipped: Tensor, times: Tensor | None
) -> Tensor:
    """Return the edges that are not reverses of those of a later split.

    Args:
        ids: of edges, none of which is later than one of `later`.
        later: ids of the edges of the later split.
        keys, flipped: (E,) a number for each edge and one for its reverse, by edge id.
        times: (E,), if edges are split by time. Earlier reverses then are other events, and remain.
    """
    if times is None or not len(later):
        return ids[torch.isin(flipped[ids], keys[later], invert=True)]
    first = times[later].min()
    later = later[times[later] == first]
    is_reverse = torch.isin(flipped[ids], keys[later]) & (times[ids] == first)
    return ids[~is_reverse]


def _without(
    graph: Graph,
    edge_type: EdgeType,
    reverses: Sequence[EdgeType],
    pairs: Tensor,
    held_out: Tensor,
    times: Tensor | None,
    time: TimeKind,
) -> Graph:
    """Return the graph without the held-out edges and their reverses.

    Args:
        graph: the graph.
        edge_type: of the held-out edges.
        reverses: edge types of their reverses.
        pairs: (2, E) the held-out edges.
        held_out: (E,) their edge ids.
        times: of all edges, if the latest are held out. An earlier edge between the nodes of a
            held-out edge then remains.
        time: which times count, see `find_times`.
    """
    stores = {each: graph.edges(each) for each in graph.edge_types}
    if times is not None:
        is_removed = torch.zeros(graph.edges(edge_type).num_edges, dtype=torch.bool)
        is_removed[held_out] = True
        own = stores[edge_type]
        stores[edge_type] = _select(
            own, ~(is_removed if own.edge_ids is None else is_removed[own.edge_ids])
        )
        first = times[held_out].min()
        # without times of their own, edges are as late as their ends, and so are their reverses
        reverse_time: TimeKind = time if time == "node" or own.time is None else "edge"
        for each in reverses:
            found = None if each == edge_type else find_times(graph, each, reverse_time)
            if found is not None:
                own = stores[each]
                stores[each] = _select(
                    own, (found if own.edge_ids is None else found[own.edge_ids]) < first
                )
            else:
                stores[each] = _drop_pairs(graph, each, stores[each], pairs.flip(0))
    else:
        stores[edge_type] = _drop_pairs(graph, edge_type, stores[edge_type], pairs)
        for each in reverses:
            stores[each] = _drop_pairs(graph, each, stores[each], pairs.flip(0))
    nodes = {name: graph.nodes(name) for name in graph.node_types}
    return Graph.from_stores(nodes, stores, name=graph.name, time_unit=graph.time_unit, check=False)


def _drop_pairs(graph: Graph, edge_type: EdgeType, store: EdgeStore, pairs: Tensor) -> EdgeStore:
    """Return the edges that do not connect one of some pairs of nodes."""
    width = graph.nodes(edge_type[2]).num_nodes
    targets = torch.arange(width).repeat_interleave(store.indptr.diff())
    keys = store.indices.long() * width + targets
    return _select(store, torch.isin(keys, pairs[0] * width + pairs[1], invert=True))


def _select(store: EdgeStore, is_kept: Tensor) -> EdgeStore:
    """Return the edges at some positions, which get new edge ids, without features."""
    before = torch.zeros(store.num_edges + 1, dtype=torch.int64)
    torch.cumsum(is_kept, 0, out=before[1:])
    return replace(
        store,
        indptr=before[store.indptr],
        indices=store.indices[is_kept],
        edge_ids=None,
        features=None,
        quantized=None,
        time=None if store.time is None else store.time[is_kept],
        weight=None if store.weight is None else store.weight[is_kept],
    )
