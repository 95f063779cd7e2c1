"""The arguments of the PyG loaders: the table of how they are checked, and the items."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import EDGE, NODE
from gcnzc.graph.stores import EdgeType
from gcnzc.graph.times import as_times
from gcnzc.interop.engine import CscGraph
from gcnzc.interop.options import check_tables
from gcnzc.interop.pyg.graph import Key, part_of
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.sampler import ARGUMENTS
from gcnzc.sampling.neighbor import check_seeds
from gcnzc.system.arguments import (
    as_ids,
    check_callable,
    check_edge_index,
    check_flag,
    check_kind,
    describe,
)


def _check_transform(name: str, value: Any) -> Any:
    check_callable(name, value)
    return value


def _check_optional_flag(name: str, value: Any) -> bool | None:
    return None if value is None else check_flag(name, value)


def _reject(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"gcnzc's loader does not support {name}\n\n"
            "hint: use PyG's own loader, which needs pyg-lib or torch-sparse"
        )


# the arguments that both loaders check alike; each function returns the checked value
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **ARGUMENTS,
    "is_sorted": check_flag,
    "transform": _check_transform,
    "filter_per_worker": _check_optional_flag,
    "transform_sampler_output": _reject,
    "neighbor_sampler": _reject,
}
# gcnzc's own arguments, which are fields of `Options`
OWN = ("seed", "device", "rank", "world_size", "threads", "ahead")


def check_input_nodes(
    given: Any, input_id: Tensor | None, csc: CscGraph
) -> tuple[str, Tensor, Tensor | None]:
    """Return the type of the nodes to iterate over, their ids, and their input ids.

    None for the input ids stands for the positions in `given`.

    Raises:
        TypeError: there is no node type, or the ids have a wrong type.
        ValueError: the node type is unknown, or there are neither ids nor a mask of its nodes.
    """
    node_type, nodes = given, None
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], str | None):
        node_type, nodes = given
    elif not csc.is_typed:
        node_type, nodes = None, given
    node_type = _check_node_type("input_nodes", node_type, csc)
    num_nodes = csc.graph.nodes(node_type).num_nodes
    nodes = torch.arange(num_nodes) if nodes is None else nodes
    mask = torch.as_tensor(nodes).cpu() if _is_mask(nodes) else None
    if mask is None:
        nodes = as_ids("input_nodes", nodes, "ids of nodes, or a mask of all nodes").cpu()
    elif mask.shape != (num_nodes,):
        raise ValueError(
            f"input_nodes is a mask of shape {tuple(mask.shape)} for {num_nodes} nodes"
        )
    else:
        nodes = mask.nonzero().flatten()
        input_id = nodes if input_id is None else input_id
    check_input_id(input_id, len(nodes))
    return node_type, check_seeds("input_nodes", nodes, num_nodes), input_id


def _check_node_type(argument: str, given: Any, csc: CscGraph) -> str:
    if not csc.is_typed:
        if given is not None:
            raise ValueError(f"{argument} has the type {given!r:.100}, but a Data has no types")
        return NODE
    if not isinstance(given, str):
        raise TypeError(
            f"{argument} is {describe(given)}, without a node type\n\n"
            "hint: 'paper', or a pair such as ('paper', mask)"
        )
    if given not in csc.graph.node_types:
        raise ValueError(
            f"{argument} has the node type {given!r:.100}, which the data does not have"
        )
    return given


def _is_mask(nodes: Any) -> bool:
    if isinstance(nodes, Tensor | np.ndarray):
        return nodes.dtype in (torch.bool, np.bool_)
    is_list = isinstance(nodes, list | tuple) and len(nodes) > 0
    return is_list and all(isinstance(each, bool) for each in nodes)


def check_input_id(input_id: Tensor | None, num_items: int) -> None:
    """Check that there is one input id for each item.

    Raises:
        TypeError: `input_id` is not a tensor.
        ValueError: it has another length.
    """
    if input_id is None:
        return
    check_kind("input_id", input_id, Tensor, "a tensor with a number for each item, or None")
    if input_id.ndim == 0 or len(input_id) != num_items:
        raise ValueError(
            f"input_id is {describe(input_id)}, not one id for each of {num_items} items"
        )


def check_input_edges(given: Any, data: Any, csc: CscGraph) -> tuple[EdgeType, Tensor]:
    """Return the type of the edges to iterate over, and the (2, E) edges as int64 on the host.

    Raises:
        TypeError: there is no edge type, or the edges have a wrong type.
        ValueError: the edge type is unknown, or an edge has ids that are not nodes.
    """
    edge_type, edges = given, None
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if is_pair and (given[0] is None or isinstance(given[0], list | tuple)):
        edge_type, edges = given
    elif not csc.is_typed:
        edge_type, edges = None, given
    edge_type = _check_edge_type(edge_type, csc)
    if edges is None:
        stored = EDGE if not csc.is_typed else csc.graph.edge_type(edge_type)
        edges = part_of(data, stored).edge_index
        edges = torch.empty((2, 0), dtype=torch.int64) if edges is None else edges
    if isinstance(edges, import_pyg().EdgeIndex):
        edges = edges.as_tensor()
    edges = check_edge_index("edge_label_index", edges).cpu().long()
    for ids, node_type in zip(edges, edge_type[::2], strict=True):
        count = csc.graph.nodes(node_type).num_nodes
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ValueError(
                f"edge_label_index reaches from {int(ids.min())} to {int(ids.max())}, but the data "
                f"has {count} nodes of type {node_type!r}"
            )
    return edge_type, edges


def _check_edge_type(given: Any, csc: CscGraph) -> EdgeType:
    if not csc.is_typed:
        if given is not None:
            raise ValueError(f"edge_label_index has the type {given!r:.100}, but a Data has none")
        return EDGE
    names = tuple(given) if isinstance(given, list | tuple) else ()
    if len(names) not in (2, 3) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"edge_label_index is {describe(given)}, without an edge type\n\n"
            "hint: an edge type, or a pair such as (('user', 'buys', 'item'), edge_label_index)"
        )
    for name in (names[0], names[-1]):
        _check_node_type("edge_label_index", name, csc)
    if len(names) == 3:
        return names
    # given without its relation: the only one, or else "to", as in PyG
    found = [each for each in csc.graph.edge_types if (each[0], each[2]) == names]
    return found[0] if len(found) == 1 else (names[0], "to", names[1])


def check_times(
    name: str, given: Any, csc: CscGraph, num_items: int, node_type: str | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the times of the items, int64, and those of minibatches; None if none are given.

    Args:
        name: of the argument.
        given: as given by the user.
        csc: the graph.
        num_items: the number of items.
        node_type: the type of the items if they are nodes, which may have times of their own.

    Raises:
        ValueError: there are times but no `time_attr`, or the reverse, or the times are wrong.
    """
    is_temporal = csc.time is not None
    if given is None:
        if is_temporal and (node_type is None or csc.graph.nodes(node_type).time is None):
            of = "" if node_type is None else f", and the nodes of type {node_type!r} have no times"
            raise ValueError(f"time_attr was given, but {name!r} is not set{of}")
        return None, None
    if not is_temporal:
        raise ValueError(f"{name} was given without time_attr")
    times = as_times(name, given, num_items, csc.graph.time_unit, is_limit=True)
    # a tensor keeps its dtype, as in PyG
    return times, given.cpu() if isinstance(given, Tensor) else times


def check_typed_tables(tables: Any, csc: CscGraph) -> Mapping[Key, FeatureTable]:
    """Return tables by type and name; those of a `Data` are given by name.

    Raises:
        TypeError: `tables` is not a mapping of tables.
        ValueError: a key is not a pair of a type and an attribute's name.
    """
    check_tables(tables)
    if not csc.is_typed:
        return {(NODE, name): table for name, table in (tables or {}).items()}
    kinds: list[Any] = [*csc.graph.node_types, *csc.graph.edge_types]
    for key in tables or {}:
        if not (isinstance(key, tuple) and len(key) == 2 and key[0] in kinds):
            raise ValueError(f"tables has the key {key!r:.200}, not a pair of a type and a name")
    return tables or {}
