"""What of the arguments of PyG's loaders is followed, and what is refused by name."""

from typing import Any

import torch
from torch import Tensor

from gcnzc.interop.minibatches import Options, torch_options
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
        if value is not supported and value != supported:
            raise ValueError(
                f"{who} does not support {name}={value!r}, but only {supported!r}\n\n"
                f"hint: torch_geometric.loader.{who} with pyg-lib"
            )


def demand_num_neighbors(num_neighbors: Any) -> list[int]:
    """The numbers of neighbours of the hops.

    Raises:
        ValueError: they are no list, but a dictionary by edge type, say.
    """
    if not isinstance(num_neighbors, list | tuple):
        raise ValueError(
            f"num_neighbors is a {type(num_neighbors).__name__}\n\n"
            "hint: a list with one number for each hop, such as [10, 5]; there are no edge types"
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
    num_workers, left = torch_options(kwargs, who)
    # set by Lightning, when it makes a loader anew
    left.pop("dataset", None)
    theirs = {
        name: left.pop(name) for name in ("batch_size", "shuffle", "drop_last") if name in left
    }
    if left:
        raise TypeError(f"{who} has no argument {', '.join(sorted(left))}")
    theirs["shuffle"] = bool(theirs.get("shuffle"))
    ours["threads"] = ours["threads"] or num_workers or None
    return Options(**theirs, **ours)


def demand_nodes(
    input_nodes: Any, input_id: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """The ids of the nodes to iterate over, and what `input_id` is of each, if not its place.

    Raises:
        ValueError: they are neither ids of nodes nor a mask of all.
    """
    if input_nodes is None:
        input_nodes = torch.arange(num_nodes)
    if isinstance(input_nodes, str) or (
        isinstance(input_nodes, tuple) and input_nodes and isinstance(input_nodes[0], str)
    ):
        raise ValueError(
            f"input_nodes names a node type: {input_nodes!r}\n\n"
            "hint: ids or a mask of nodes; a loader of gcnzc has no node types"
        )
    nodes = torch.as_tensor(input_nodes).cpu()
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
