"""What of the arguments of PyG's loaders is followed, and what is refused by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.interop.minibatches import Options, torch_options
from gcnzc.interop.pyg_door import import_pyg
from gcnzc.sampler import demand_seeds

# what each argument must be, for there to be nothing to refuse
_SUPPORTED = {
    "directed": True,
    "disjoint": False,
    "replace": False,
    "subgraph_type": "directional",
    "temporal_strategy": "uniform",
}


def demand_supported(who: str, **arguments: Any) -> None:
    """Refuse arguments of PyG's by name.

    Raises:
        ValueError: one has another value than that which changes nothing.
    """
    for name, value in arguments.items():
        supported = _SUPPORTED.get(name)
        is_plain = isinstance(value, bool | str)
        if value is supported or (is_plain and value == supported):
            continue
        # of a tensor or a function the name says enough
        shown = f"{name}={value!r}" if is_plain else name
        only = "" if supported is None else f", but only {supported!r}"
        raise ValueError(
            f"{who} does not support {shown}{only}\n\n"
            f"hint: torch_geometric.loader.{who} with pyg-lib"
        )


def demand_num_neighbors(num_neighbors: Any, who: str) -> list[int]:
    """The numbers of neighbours of the hops, from a list or PyG's `NumNeighbors`.

    Raises:
        ValueError: they are no list, but a dictionary by edge type, say.
    """
    if isinstance(num_neighbors, import_pyg().sampler.base.NumNeighbors):
        num_neighbors = num_neighbors.values
    if isinstance(num_neighbors, Mapping):
        raise ValueError(
            f"{who} does not support num_neighbors by edge type\n\n"
            "hint: a list with one number for each hop, such as [10, 5]; there are no edge types"
        )
    if not isinstance(num_neighbors, list | tuple):
        raise ValueError(
            f"num_neighbors is a {type(num_neighbors).__name__}\n\n"
            "hint: a list with one number for each hop, such as [10, 5]"
        )
    return list(num_neighbors)


def demand_ids(input_id: Tensor | None, num_items: int) -> None:
    """Look at the names of items.

    Raises:
        ValueError: there is not one for each.
    """
    if input_id is not None and len(input_id) != num_items:
        raise ValueError(
            f"{len(input_id)} numbers in input_id for {num_items} items\n\nhint: one for each"
        )


def options_of(kwargs: dict[str, Any], who: str, **ours: Any) -> Options:
    """What PyG's loaders hand on to torch's, and gcnzc's own arguments.

    Raises:
        ValueError: an argument of torch's that is not supported.
        TypeError: one that nobody knows.
    """
    num_workers, torchs, left = torch_options(kwargs, who)
    theirs = {
        name: left.pop(name) for name in ("batch_size", "shuffle", "drop_last") if name in left
    }
    if left:
        raise TypeError(f"{who} has no argument {', '.join(sorted(left))}")
    if theirs.get("batch_size", 1) is None:
        raise ValueError(f"{who} does not support batch_size=None\n\nhint: batch_size=1")
    theirs["shuffle"] = bool(theirs.get("shuffle"))
    return Options(**theirs, **ours, num_workers=num_workers, torchs=torchs)


def without_type(name: str, given: Any) -> Any:
    """Nodes or edges that may come behind their type, which of a `Data` is None.

    Args:
        name: of the argument, for errors.
        given: ids, a mask, edges, None; or a tuple of None and one of these.

    Raises:
        ValueError: the type has a name.
    """
    first = given[0] if isinstance(given, tuple | list) and len(given) else given
    if isinstance(first, tuple | list) and len(first):
        first = first[0]
    if isinstance(first, str):
        raise ValueError(
            f"a loader of gcnzc does not support types, but {name} names {first!r}\n\n"
            "hint: only ids, a mask or edges"
        )
    if isinstance(given, tuple | list) and len(given) == 2 and given[0] is None:
        return given[1]
    return given


def demand_nodes(
    input_nodes: Any, input_id: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """The ids of the nodes to iterate over, and what `input_id` is of each, if not its place.

    Raises:
        ValueError: they are neither ids of nodes nor a mask of all.
    """
    input_nodes = without_type("input_nodes", input_nodes)
    if input_nodes is None:
        input_nodes = torch.arange(num_nodes)
    if isinstance(input_nodes, Mapping):
        raise ValueError("input_nodes is a dictionary\n\nhint: ids of nodes, or a mask of all")
    nodes = torch.as_tensor(input_nodes).cpu()
    if not isinstance(input_nodes, Tensor) and len(nodes) == 0:
        # of no numbers torch makes float32
        nodes = nodes.long()
    if nodes.dtype == torch.bool:
        if nodes.shape != (num_nodes,):
            raise ValueError(
                f"input_nodes is a mask of shape {tuple(nodes.shape)} for {num_nodes} nodes\n\n"
                "hint: one truth value for each node"
            )
        nodes = nodes.nonzero().flatten()
        input_id = nodes if input_id is None else input_id
    if nodes.ndim != 1 or nodes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_nodes is of {nodes.dtype} and shape {tuple(nodes.shape)}\n\n"
            "hint: one row of int64 ids, or a mask of all nodes"
        )
    demand_ids(input_id, len(nodes))
    return demand_seeds(nodes, num_nodes), input_id
