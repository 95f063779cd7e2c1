"""Check the arguments of PyG's loaders, and reject unsupported ones by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.interop.options import Options, check_tables, torch_options
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.sampling.neighbor import check_seeds
from gcnzc.system.arguments import (
    as_ids,
    check_callable,
    check_device,
    check_fanouts,
    check_flag,
    check_kind,
    describe,
)

# what each argument must be, for there to be nothing to refuse
_SUPPORTED = {
    "directed": True,
    "disjoint": False,
    "replace": False,
    "subgraph_type": "directional",
    "temporal_strategy": "uniform",
}


def check_supported(who: str, **arguments: Any) -> None:
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


def check_num_neighbors(num_neighbors: Any, who: str) -> list[int]:
    """The numbers of neighbours of the hops, from a list or PyG's `NumNeighbors`.

    Raises:
        TypeError: they are no list of integers.
        ValueError: they are by edge type, or one is below -1.
    """
    if isinstance(num_neighbors, import_pyg().sampler.base.NumNeighbors):
        num_neighbors = num_neighbors.values
    if isinstance(num_neighbors, Mapping):
        raise ValueError(
            f"num_neighbors is a dict: {who} does not support num_neighbors by edge type\n\n"
            "hint: a list with one number for each hop, such as [10, 5]; there are no edge types"
        )
    check_kind(
        "num_neighbors",
        num_neighbors,
        (list, tuple),
        "a list with one number for each hop, such as [10, 5]",
    )
    return list(check_fanouts("num_neighbors", num_neighbors)) if num_neighbors else []


def check_ids(input_id: Tensor | None, num_items: int) -> None:
    """Look at the names of items.

    Raises:
        ValueError: there is not one for each.
    """
    if input_id is None:
        return
    check_kind("input_id", input_id, Tensor, "a tensor with a number for each item, or None")
    if input_id.ndim == 0 or len(input_id) != num_items:
        raise ValueError(
            f"input_id is {describe(input_id)} for {num_items} items\n\nhint: one for each"
        )


def check_common(transform: Any, is_sorted: Any, filter_per_worker: Any, tables: Any) -> None:
    """Check arguments that both loaders have.

    Raises:
        TypeError: one is of another type.
    """
    check_callable("transform", transform)
    check_flag("is_sorted", is_sorted)
    if filter_per_worker is not None:
        check_flag("filter_per_worker", filter_per_worker)
    check_tables(tables)


def options_of(kwargs: dict[str, Any], who: str, device: Any, **ours: Any) -> Options:
    """What PyG's loaders hand on to torch's, and gcnzc's own arguments.

    Raises:
        TypeError: an argument that nobody knows, or of another type.
        ValueError: one that makes no sense.
    """
    kwargs = dict(kwargs)
    # minibatches are made by the loader's own, as in PyG, which drops this one too
    kwargs.pop("collate_fn", None)
    num_workers, torchs, left = torch_options(kwargs, who)
    theirs = {
        name: left.pop(name) for name in ("batch_size", "shuffle", "drop_last") if name in left
    }
    if left:
        raise TypeError(f"{who} has no argument {', '.join(sorted(left))}")
    if theirs.get("batch_size", 1) is None:
        raise ValueError(f"{who} does not support batch_size=None\n\nhint: batch_size=1")
    if theirs.get("shuffle") is None:
        theirs["shuffle"] = False
    device = check_device("device", device)
    return Options(**theirs, **ours, device=device, num_workers=num_workers, torchs=torchs)


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


def check_nodes(
    input_nodes: Any, input_id: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """The ids of the nodes to iterate over, and what `input_id` is of each, if not its place.

    Raises:
        ValueError: they are neither ids of nodes nor a mask of all.
    """
    input_nodes = without_type("input_nodes", input_nodes)
    if input_nodes is None:
        input_nodes = torch.arange(num_nodes)
    mask = _as_mask(input_nodes)
    if mask is not None:
        nodes = mask
        if nodes.shape != (num_nodes,):
            raise ValueError(
                f"input_nodes is a mask of shape {tuple(nodes.shape)} for {num_nodes} nodes\n\n"
                "hint: one truth value for each node"
            )
        nodes = nodes.nonzero().flatten()
        input_id = nodes if input_id is None else input_id
    else:
        nodes = as_ids("input_nodes", input_nodes, "ids of nodes, or a mask of all nodes").cpu()
    check_ids(input_id, len(nodes))
    return check_seeds("input_nodes", nodes, num_nodes), input_id


def _as_mask(given: Any) -> Tensor | None:
    """Truth values, given as a tensor, an array or a list; None if `given` is something else."""
    if isinstance(given, Tensor):
        return given.cpu() if given.dtype == torch.bool else None
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given.copy()) if given.dtype == bool else None
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return torch.tensor(given) if is_list and all(isinstance(x, bool) for x in given) else None
