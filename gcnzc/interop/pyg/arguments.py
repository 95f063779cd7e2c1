"""Check the arguments of the PyG loaders, and reject unsupported ones by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.interop.options import Options, check_tables, split_options
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.sampling.neighbor import check_seeds
from gcnzc.system.arguments import (
    as_ids,
    check_callable,
    check_device,
    check_edge_index,
    check_fanouts,
    check_flag,
    check_kind,
    describe,
)


def check_num_neighbors(num_neighbors: Any, loader_name: str) -> list[int]:
    """Return the number of neighbours of each hop, from a list or PyG's `NumNeighbors`.

    Raises:
        TypeError: `num_neighbors` is not a list of integers.
        ValueError: `num_neighbors` is a dictionary by edge type, or a number is below -1.
    """
    if isinstance(num_neighbors, import_pyg().sampler.base.NumNeighbors):
        num_neighbors = num_neighbors.values
    if isinstance(num_neighbors, Mapping):
        raise ValueError(
            f"num_neighbors is a dict: {loader_name} does not support num_neighbors by edge type"
        )
    check_kind("num_neighbors", num_neighbors, (list, tuple))
    return list(check_fanouts("num_neighbors", num_neighbors)) if num_neighbors else []


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


def check_common(
    loader_name: str,
    *,
    transform: Any,
    is_sorted: Any,
    filter_per_worker: Any,
    tables: Any,
    **unsupported: Any,
) -> None:
    """Check the arguments that the loaders share.

    Args:
        loader_name: the name of the loader, for error messages.
        transform, is_sorted, filter_per_worker, tables: as given by the user.
        unsupported: arguments of PyG's loader of which only None is supported.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is not supported; the message names it.
    """
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(
                f"{loader_name} does not support {name}\n\n"
                f"hint: use torch_geometric.loader.{loader_name}, which needs pyg-lib or "
                "torch-sparse"
            )
    check_callable("transform", transform)
    check_flag("is_sorted", is_sorted)
    if filter_per_worker is not None:
        check_flag("filter_per_worker", filter_per_worker)
    check_tables(tables)


def make_options(kwargs: dict[str, Any], loader_name: str, device: Any, **own: Any) -> Options:
    """Return the options of a loader, from the arguments of torch's DataLoader and gcnzc's own.

    Args:
        kwargs: arguments of torch's DataLoader.
        loader_name: the name of the loader, for error messages.
        device: the device of the minibatches.
        own: gcnzc's own arguments, as fields of `Options`.

    Raises:
        TypeError: an argument is unknown or has a wrong type.
        ValueError: an argument is out of range or not supported.
    """
    kwargs = dict(kwargs)
    # PyG's loaders ignore this argument too: they collate minibatches themselves
    kwargs.pop("collate_fn", None)
    num_workers, dataloader_options, rest = split_options(kwargs)
    torch_options = {
        name: rest.pop(name) for name in ("batch_size", "shuffle", "drop_last") if name in rest
    }
    if rest:
        raise TypeError(f"{loader_name} has no argument {', '.join(sorted(rest))}")
    if torch_options.get("batch_size", 1) is None:
        raise ValueError(f"{loader_name} does not support batch_size=None\n\nhint: batch_size=1")
    if torch_options.get("shuffle") is None:
        torch_options["shuffle"] = False
    device = check_device("device", device)
    return Options(
        **torch_options,
        **own,
        device=device,
        num_workers=num_workers,
        dataloader_options=dataloader_options,
    )


def strip_type(name: str, given: Any) -> Any:
    """Return nodes or edges without the type that PyG allows in front of them.

    Args:
        name: the name of the argument, for error messages.
        given: ids, a mask, edges or None; or a tuple (None, one of these), as PyG allows for a
            graph without types.

    Raises:
        ValueError: there is a named type.
    """
    first = given[0] if isinstance(given, tuple | list) and len(given) else given
    if isinstance(first, tuple | list) and len(first):
        first = first[0]
    if isinstance(first, str):
        raise ValueError(f"gcnzc's loader does not support types, but {name} has {first!r}")
    if isinstance(given, tuple | list) and len(given) == 2 and given[0] is None:
        return given[1]
    return given


def check_nodes(
    input_nodes: Any, input_id: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """Return the ids of the nodes to iterate over, and their input ids.

    None for the input ids stands for the positions in `input_nodes`.

    Raises:
        ValueError: `input_nodes` has neither node ids nor a mask of all nodes.
    """
    return check_node_ids(strip_type("input_nodes", input_nodes), input_id, num_nodes)


def check_node_ids(
    input_nodes: Any, input_id: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """Return ids of nodes and their input ids, as `check_nodes` does, given without a type.

    Raises:
        ValueError: `input_nodes` has neither node ids nor a mask of all nodes.
    """
    if input_nodes is None:
        input_nodes = torch.arange(num_nodes)
    mask = _as_mask(input_nodes)
    if mask is not None:
        nodes = mask
        if nodes.shape != (num_nodes,):
            raise ValueError(
                f"input_nodes is a mask of shape {tuple(nodes.shape)} for {num_nodes} nodes"
            )
        nodes = nodes.nonzero().flatten()
        input_id = nodes if input_id is None else input_id
    else:
        nodes = as_ids("input_nodes", input_nodes, "ids of nodes, or a mask of all nodes").cpu()
    check_input_id(input_id, len(nodes))
    return check_seeds("input_nodes", nodes, num_nodes), input_id


def check_edges(edges: Any, num_nodes: int) -> Tensor:
    """Return the edges to iterate over, given as a (2, E) tensor, as int64 on the host.

    Raises:
        ValueError: `edges` is not such a tensor, or has ids that are not below `num_nodes`.
    """
    edges = check_edge_index("edge_label_index", edges)
    if edges.shape[1]:
        least, greatest = (int(bound) for bound in edges.aminmax())
        if least < 0 or greatest >= num_nodes:
            raise ValueError(
                f"edge_label_index reaches from {least} to {greatest}, but the data has "
                f"{num_nodes} nodes"
            )
    return edges.cpu().long()


def _as_mask(given: Any) -> Tensor | None:
    """Return a boolean tensor, array or list as a tensor; None if `given` is something else."""
    if isinstance(given, Tensor):
        return given.cpu() if given.dtype == torch.bool else None
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given.copy()) if given.dtype == bool else None
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return torch.tensor(given) if is_list and all(isinstance(x, bool) for x in given) else None
