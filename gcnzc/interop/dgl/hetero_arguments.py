"""Check the arguments of the DGL loader that concern types of nodes and edges."""

from collections.abc import Iterable, Mapping
from typing import Any

from gcnzc.graph.hetero.graph import EdgeType
from gcnzc.interop.dgl.blocks import Kind
from gcnzc.system.arguments import check_fanouts, describe


def find_node_type(argument: str, graph: Any, key: Any) -> str:
    """Return a node type of `graph`.

    Raises:
        ValueError: there is no such type.
    """
    if not isinstance(key, str) or key not in graph.ntypes:
        raise ValueError(
            f"{argument} has the node type {describe(key)}, which the graph does not have\n\n"
            f"hint: {', '.join(graph.ntypes)}"
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
        raise ValueError(
            f"{argument} has the edge type {describe(key)}, which {reason}\n\n"
            f"hint: {', '.join(map(str, types))}"
        )
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
            raise ValueError(
                f"{name} has no edge type {missing[0]}\n\n"
                "hint: a number for each edge type; 0 samples none of its edges"
            )
    return {
        each: check_fanouts(f"fanouts of {each}", [layer[each] for layer in layers])
        for each in graph.canonical_etypes
    }


def check_reverse_edges(graph: Any, sampler: Any, edge_types: Iterable[Any]) -> None:
    """Check which edges an edge prediction sampler excludes.

    Args:
        graph: with several types of nodes or edges.
        sampler: an `EdgePredictionSampler`.
        edge_types: of the edges to iterate over.

    Raises:
        ValueError: the reverse edges of an edge type are missing or wrong.
    """
    if sampler.exclude == "reverse_types":
        given = sampler.reverse_etypes
        if not isinstance(given, Mapping) or not given:
            raise ValueError(
                f"exclude is 'reverse_types', but reverse_etypes is {describe(given)}\n\n"
                "hint: reverse_etypes={'buys': 'bought-by', 'bought-by': 'buys'}"
            )
        for key, value in given.items():
            each, other = (find_edge_type("reverse_etypes", graph, name) for name in (key, value))
            if (each[0], each[2]) != (other[2], other[0]):
                raise ValueError(
                    f"reverse_etypes: {other} is not the reverse of {each}, since it connects "
                    "other types of nodes\n\n"
                    f"hint: an edge type from {each[2]!r} to {each[0]!r}"
                )
            if graph.num_edges(each) != graph.num_edges(other):
                raise ValueError(
                    f"reverse_etypes: {each} has {graph.num_edges(each)} edges, but {other} has "
                    f"{graph.num_edges(other)}\n\n"
                    "hint: an edge and its reverse edge have the same id"
                )
    if sampler.exclude == "reverse_id":
        ids = sampler.reverse_eids
        if not isinstance(ids, Mapping) and len(graph.canonical_etypes) == 1:
            ids = {graph.canonical_etypes[0]: ids}
        if not isinstance(ids, Mapping):
            raise ValueError(
                f"exclude is 'reverse_id', but reverse_eids is {describe(ids)}\n\n"
                "hint: a dict of ids by edge type"
            )
        own = {find_edge_type("reverse_eids", graph, key): value for key, value in ids.items()}
        for each in edge_types:
            count = graph.num_edges(each)
            if each not in own or own[each] is None or len(own[each]) < count:
                found = "nothing" if own.get(each) is None else f"{len(own[each])} ids"
                raise ValueError(
                    f"reverse_eids has {found} for the {count} edges of type {each}\n\n"
                    "hint: the id of the reverse edge of each edge; exclude='reverse_types' if "
                    "reverse edges have another type"
                )


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
        raise ValueError(
            f"{argument} is {describe(names)}, but the graph has several {kind} types\n\n"
            f"hint: a dict of lists by type, such as {{{types[0]!r}: {found!r}}}"
        )
    return [(types[0], name) for name in found]
