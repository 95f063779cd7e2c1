"""Check the numbers of neighbours of each edge type and hop."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph
from gcnzc.system.arguments import check_fanouts

Fanouts: TypeAlias = dict[EdgeType, tuple[int, ...]]
DEFAULT = "default"


def check_num_neighbors(graph: HeteroGraph, value: Any) -> Fanouts:
    """Return the fanouts of each edge type of `graph`, from the seeds outward.

    Args:
        graph: without edge types, there are no fanouts, and minibatches have only the seeds.
        value: a list for all edge types, or a dict by edge type: a triple, the name of a relation,
            or the names joined by "__". The key "default" is for edge types that are not in it.

    Raises:
        TypeError: fanouts are not integers.
        ValueError: an edge type is unknown, missing or given twice, or the numbers of hops differ.
    """
    if not isinstance(value, Mapping):
        fanouts = check_fanouts("num_neighbors", value)
        return dict.fromkeys(graph.edge_types, fanouts)
    given: Fanouts = {}
    default = None
    for key, own in value.items():
        fanouts = check_fanouts(f"num_neighbors[{key!r:.100}]", own)
        if key == DEFAULT:
            default = fanouts
            continue
        try:
            edge_type = graph.edge_type(tuple(key) if isinstance(key, list) else key)
        except ValueError as error:
            raise ValueError(f"num_neighbors: {error}") from None
        if edge_type in given:
            raise ValueError(f"num_neighbors has edge type {edge_type} twice\n\nhint: remove one")
        given[edge_type] = fanouts
    missing = [each for each in graph.edge_types if each not in given]
    if missing and default is None:
        raise ValueError(
            f"num_neighbors has no edge type {missing[0]}\n\n"
            f"hint: num_neighbors[{missing[0]}] = [0, ...] samples none of its edges; the key "
            "'default' is for all others"
        )
    found = {each: given.get(each, default or ()) for each in graph.edge_types}
    first, num_hops = next(((each, len(own)) for each, own in found.items()), (None, 0))
    for each, own in found.items():
        if len(own) != num_hops:
            raise ValueError(
                f"num_neighbors has {num_hops} hops for edge type {first}, but {len(own)} for "
                f"{each}: the number of hops must be the same across all edge types\n\n"
                "hint: one number for each hop; 0 samples no edges"
            )
    return found
