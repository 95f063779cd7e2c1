"""Check the arguments of the DGL loader, and reject unsupported ones by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.stores import EdgeType
from gcnzc.interop.dgl.blocks import Kind
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.system.arguments import as_ids, check_choice, check_fanouts, describe


def check_graph(graph: Any) -> None:
    """Check that `graph` is a DGL graph on the host, and no type is without nodes.

    Raises:
        ValueError: it is not.
    """
    dgl = import_dgl()
    if not isinstance(graph, dgl.DGLGraph) or graph.is_block:
        raise ValueError(f"graph: DataLoader does not support {describe(graph)}")
    for kind in graph.ntypes:
        if graph.num_nodes(kind) == 0:
            raise ValueError(f"DataLoader does not support node types without nodes, as {kind!r}")
    if graph.device.type != "cpu":
        raise ValueError(
            f"the graph is on {graph.device}, but neighbours are sampled on the host\n\n"
            f"hint: graph.cpu(), and device='{graph.device}' for the minibatches"
        )


def check_sampler(graph_sampler: Any, sampler_library: Any) -> None:
    """Check that a DGL sampler returns blocks, and check `sampler_library`.

    Raises:
        ValueError: the sampler is not supported, or `sampler_library` is unknown.
    """
    loading = import_dgl().dataloading
    check_choice("sampler_library", sampler_library, ("gcnzc", "dgl"))
    inner = graph_sampler
    if isinstance(graph_sampler, loading.EdgePredictionSampler):
        inner = graph_sampler.sampler
    if not isinstance(inner, loading.BlockSampler):
        raise ValueError(
            f"graph_sampler: DataLoader does not support {describe(inner)}\n\n"
            "hint: NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, another sampler "
            "of blocks, or as_edge_prediction_sampler around one"
        )
    if inner.output_device is not None and torch.device(inner.output_device).type != "cpu":
        raise ValueError(
            f"DataLoader does not support a sampler's output_device {inner.output_device}"
        )


def find_node_type(argument: str, graph: Any, key: Any) -> str:
    """Return a node type of `graph`.

    Raises:
        ValueError: there is no such type.
    """
    if not isinstance(key, str) or key not in graph.ntypes:
        raise ValueError(
            f"{argument} has the node type {describe(key)}, which the graph does not have"
        )
    return key


def find_edge_type(argument: str, graph: Any, key: Any) -> EdgeType:
    """Return the triple of an edge type of `graph`, given as a triple or as its relation's name.

    Raises:
        ValueError: there is no such type, or several have the name.
    """
    types = graph.canonical_etypes
    found = [each for each in types if key in (each, each[1])]
    if len(found) != 1:
        reason = "several edge types of the graph have" if found else "the graph does not have"
        raise ValueError(f"{argument} has the edge type {describe(key)}, which {reason}")
    return found[0]


def find_type(argument: str, graph: Any, key: Any, is_edges: bool) -> Kind:
    """Return a node type, or the triple of an edge type; see above."""
    find = find_edge_type if is_edges else find_node_type
    return find(argument, graph, key)


def fanouts_by_type(graph: Any, fanouts: Any) -> dict[EdgeType, tuple[int, ...]]:
    """Return the fanouts of a DGL sampler by edge type, input layer first.

    Args:
        graph: a DGL graph.
        fanouts: for each layer a number for all edge types, or a dict by edge type.

    Raises:
        TypeError: a fanout is not an integer.
        ValueError: an edge type is unknown or missing, or a fanout is out of range.
    """
    layers: list[dict[EdgeType, Any]] = []
    for number, layer in enumerate(fanouts):
        if not isinstance(layer, Mapping):
            layers.append(dict.fromkeys(graph.canonical_etypes, layer))
            continue
        name = f"fanouts[{number}]"
        layers.append({find_edge_type(name, graph, key): own for key, own in layer.items()})
        missing = [each for each in graph.canonical_etypes if each not in layers[-1]]
        if missing:
            raise ValueError(f"{name} has no edge type {missing[0]}")
    return {
        each: check_fanouts(f"fanouts of {each}", [layer[each] for layer in layers])
        for each in graph.canonical_etypes
    }


def reverse_edges(
    graph: Any, sampler: Any, edge_types: Iterable[Any] = ()
) -> dict[EdgeType, tuple[EdgeType, Tensor | None]]:
    """Return the reverse edges that an edge prediction sampler excludes.

    Args:
        graph: a DGL graph.
        sampler: an `EdgePredictionSampler`.
        edge_types: of the edges to iterate over.

    Returns:
        For edge types the type of the reverse edges, and their ids by edge; None for the same ids.

    Raises:
        ValueError: the reverse edges of an edge type are missing or wrong.
    """
    argument = {"reverse_types": "reverse_etypes", "reverse_id": "reverse_eids"}.get(
        sampler.exclude if isinstance(sampler.exclude, str) else ""
    )
    if argument is None:
        return {}
    given = getattr(sampler, argument)
    if isinstance(given, Tensor) and len(graph.canonical_etypes) == 1:
        given = {graph.canonical_etypes[0]: given}
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"exclude is {sampler.exclude!r}, but {argument} is {describe(given)}")
    own = {find_edge_type(argument, graph, key): value for key, value in given.items()}
    if argument == "reverse_eids":
        for each in edge_types:
            if own.get(each) is None or len(own[each]) < graph.num_edges(each):
                raise ValueError(f"{argument} has no id for each of the edges of type {each}")
        return {each: (each, ids) for each, ids in own.items()}
    found: dict[EdgeType, tuple[EdgeType, Tensor | None]] = {}
    for each, key in own.items():
        other = find_edge_type(argument, graph, key)
        if each[::2] != other[::-2] or graph.num_edges(each) != graph.num_edges(other):
            raise ValueError(
                f"{argument}: {other} is not the reverse of {each}, since it connects other types "
                "of nodes, or has another number of edges"
            )
        found[each] = other, None
    return found


def check_kinds(argument: str, graph: Any, names: Any, is_edges: bool) -> list[tuple[Kind, str]]:
    """Return the names of data in a sampler's argument as pairs of a type and a name.

    Args:
        argument: its name.
        graph: a DGL graph.
        names: None, a list if the graph has one type, or a dict of lists by type.
        is_edges: whether the data is of edges.

    Raises:
        ValueError: a type is unknown, or there is a list, and the graph has several types.
    """
    types = graph.canonical_etypes if is_edges else graph.ntypes
    if isinstance(names, Mapping):
        return [
            (find_type(argument, graph, key, is_edges), name)
            for key, own in names.items()
            for name in own
        ]
    found = list(names or [])
    if found and len(types) > 1:
        kind = "edge" if is_edges else "node"
        raise ValueError(f"{argument} is {describe(names)}, but the graph has several {kind} types")
    return [(types[0], name) for name in found]


@dataclass(frozen=True, eq=False)
class Items:
    """Ids of nodes or edges by type; an item is an index of the ids of all types in their order.

    Attributes:
        by_type: for node types, or edge types, int64 ids on the host, without duplicates.
    """

    by_type: Mapping[Kind, Tensor]

    @cached_property
    def ids(self) -> Tensor:
        """(S,) int64 ids of all types."""
        return torch.cat([*self.by_type.values()])

    def select(self, items: Tensor) -> dict[Kind, Tensor]:
        """Return the ids of a minibatch by type, each in the order of the items.

        Types without items are left out, as in DGL.

        Args:
            items: (B,) int64 indices of `ids`.
        """
        ids = self.ids[items]
        if len(self.by_type) == 1:
            return dict.fromkeys(self.by_type, ids)
        ends = np.cumsum([len(own) for own in self.by_type.values()])
        types = torch.from_numpy(np.searchsorted(ends, items.numpy(), side="right"))
        found = {kind: ids[types == number] for number, kind in enumerate(self.by_type)}
        return {kind: own for kind, own in found.items() if len(own)}


def check_items(indices: Any, graph: Any, is_edges: bool) -> Items:
    """Return `indices` by type.

    Args:
        indices: a dict of ids by type, or ids if the graph has one type of nodes, or of edges.
        graph: a DGL graph.
        is_edges: whether they are edges.

    Raises:
        TypeError: ids are not integers.
        ValueError: a type is unknown or missing, or an id is out of range or occurs twice.
    """
    types = graph.canonical_etypes if is_edges else graph.ntypes
    if not isinstance(indices, Mapping):
        if len(types) > 1:
            what = "edge" if is_edges else "node"
            raise ValueError(
                f"indices is {describe(indices)}, but the graph has several {what} types"
            )
        return Items({types[0]: _check_ids("indices", indices, graph, types[0])})
    found: dict[Kind, Tensor] = {}
    for key, ids in indices.items():
        kind = find_type("indices", graph, key, is_edges)
        if kind in found:
            raise ValueError(f"indices has the type {kind!r} twice")
        found[kind] = _check_ids(f"indices[{key!r}]", ids, graph, kind)
    if not found:
        raise ValueError("indices is a dict without types")
    return Items(found)


def _check_ids(name: str, indices: Any, graph: Any, kind: Kind) -> Tensor:
    ids = as_ids(name, indices, "a mask becomes ids with .nonzero().flatten()").cpu()
    if isinstance(kind, str):
        count, what = graph.num_nodes(kind), "nodes"
    else:
        count, what = graph.num_edges(kind), "edges"
    if len(ids):
        ordered = ids.sort().values
        if ordered[0] < 0 or ordered[-1] >= count:
            raise ValueError(
                f"{name} reach from {int(ordered[0])} to {int(ordered[-1])}, but the graph has "
                f"{count} {what}{_of(graph, kind)}"
            )
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice) > 0:
            raise ValueError(
                f"index {int(twice[0])} occurs twice in {name} ({len(twice)} duplicates in all)"
            )
    return ids


def _of(graph: Any, kind: Kind) -> str:
    types = graph.ntypes if isinstance(kind, str) else graph.canonical_etypes
    return f" of type {kind}" if len(types) > 1 else ""
