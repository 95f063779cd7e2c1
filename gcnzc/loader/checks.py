"""Checks of a loader's arguments."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.pinning import can_read_host
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import NODE, Graph
from gcnzc.sampling.neighbor import SamplerProtocol, check_range
from gcnzc.system.arguments import (
    THREADS_LIMIT,
    IdsLike,
    as_ids,
    check_integer,
    check_kind,
    check_number,
    describe,
)

# Each thread holds a batch of up to hundreds of megabytes. On two cores without a model, two
# threads prepare 1.6 times as many batches as one, and three threads as many as two. With a model,
# one thread is enough.
MAX_DEFAULT_THREADS = 4


def default_threads(world_size: int = 1) -> int:
    """Return the default number of a loader's threads: one per core, at most four.

    Ranks on one machine share its cores. Their number is the environment variable LOCAL_WORLD_SIZE,
    which torchrun sets, or else `world_size`.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min((os.cpu_count() or 1) // ranks, MAX_DEFAULT_THREADS))


# largest `ahead`; an iterator submits `ahead` batches at once when it starts
AHEAD_LIMIT = 2**16


def check_sampler(sampler: SamplerProtocol | None) -> SamplerProtocol | None:
    """Check that a loader's sampler, if it is given, has the method `sample`, and return it."""
    if sampler is not None and not callable(getattr(sampler, "sample", None)):
        raise TypeError(f"sampler is {describe(sampler)}, which has no method sample(seeds, epoch)")
    return sampler


def check_seeds(
    seeds: IdsLike, num_nodes: int, num_items: int | None, may_be_empty: bool
) -> Tensor:
    """Check the seeds' shape, dtype, range and number; return them as (S,) integers on the host."""
    found = as_ids("seeds", seeds, "a mask becomes ids by .nonzero().flatten()")
    found = found.cpu().contiguous()
    if len(found) == 0:
        if may_be_empty:
            return found
        raise ValueError("seeds is empty: no seeds, so no batches\n\nhint: is the split empty?")
    if num_items is None:
        check_range("seeds", found, num_nodes, "the graph has {} nodes", "ids of nodes")
    else:
        check_range("seeds", found, num_items, "the sampler has {} items", "its items")
    ordered = found.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice) > 0:
        is_mask = len(found) == num_nodes and int(ordered[-1]) <= 1
        hint = "seeds.nonzero().flatten(), if it is a mask" if is_mask else "seeds.unique()"
        raise ValueError(
            f"seeds: seed {int(twice[0])} occurs twice ({len(twice)} seeds too many)\n\n"
            f"hint: {hint}"
        )
    return found


def check_seed_nodes(given: Any, graph: Graph, may_be_empty: bool) -> tuple[str, Tensor]:
    """Check seeds of a graph with types; return their node type, and their ids on the host."""
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str):
        raise TypeError(f"seeds is {describe(given)}, not a pair of a node type and ids")
    node_type, ids = given
    name = f"seeds of node type {node_type!r}"
    found = as_ids(name, ids, "a mask becomes ids by .nonzero().flatten()").cpu().contiguous()
    check_range(name, found, graph.nodes(node_type).num_nodes, "it has {} nodes", "node ids")
    if len(found) == 0 and not may_be_empty:
        raise ValueError(f"{name} are empty: no batches\n\nhint: is the split empty?")
    return node_type, found


def check_share(copied_share: float) -> float:
    """Check that a fraction is in [0, 1]."""
    hint = "a fraction of a batch's rows; with 0 the GPU reads all rows"
    return check_number("copied_share", copied_share, lambda share: 0 <= share <= 1, hint)


def check_priority(priority: int) -> int:
    """Check the priority of CUDA streams."""
    return check_integer("priority", priority, most=0, hint="0, or -1 for a higher priority")


def check_loader_device(
    device: torch.device, tables: Mapping[str, FeatureTable], copied_share: float
) -> torch.device:
    """Check that minibatches can be copied to a device; return it with its index.

    Args:
        device: of the minibatches.
        tables: features by node type.
        copied_share: fraction of the rows that are gathered on the host.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: batches go to cpu or cuda\n\nhint: device='cpu'")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {device}: torch.cuda.is_available() is False\n\n"
                "hint: device='cpu'; or check the driver with `nvidia-smi`, and install a CUDA "
                "build of torch"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    for name, table in tables.items():
        _check_device_rows(device, table, copied_share, f"table[{name!r}]: " if name else "")
    return device


def _check_device_rows(
    device: torch.device, table: FeatureTable, copied_share: float, prefix: str
) -> None:
    if table.device == device or is_copied(device, table):
        return
    if table.device.type == "cuda":
        raise ValueError(
            f"{prefix}a table on {table.device} cannot be gathered on {device}\n\n"
            f"hint: FeatureTable(rows.to('{device}'))"
        )
    if table.is_sparse or copied_share == 1:
        return
    if not (table.rows.is_pinned() or table.rows.numel() == 0):
        raise ValueError(
            f"{prefix}a table on the host cannot be read from {device}, because its memory is not "
            "page-locked\n\nhint: `with gcnzc.pinned(rows) as table:`; or copied_share=1, for "
            "the CPU to gather all rows"
        )


def is_copied(device: torch.device, table: FeatureTable | None) -> bool:
    """Whether rows are gathered on the host and copied, since the GPU cannot read them in place."""
    if device.type != "cuda" or table is None or table.device.type != "cpu":
        return False
    # rows that are page-locked already can be read in place, even if gcnzc could not lock them
    locked = not table.is_sparse and table.rows.is_pinned()
    return not (locked or can_read_host(device))


def choose_copied_share(device: torch.device, table: FeatureTable, copied_share: float) -> float:
    """Return the fraction of a batch's rows that are gathered on the host and copied.

    It is `copied_share`, or 1 if the GPU cannot read the rows, or if they are sparse.
    """
    return 1.0 if is_copied(device, table) or table.is_sparse else copied_share


def check_threads(
    threads: int | None, ahead: int | None, sampler: SamplerProtocol, world_size: int
) -> tuple[int, int]:
    """Check the numbers of threads and of prefetched minibatches; replace None by the default."""
    hint = "None for the default"
    if threads is None:
        threads = default_threads(world_size)
    threads = check_integer("threads", threads, 1, THREADS_LIMIT, hint)
    if not getattr(sampler, "thread_safe", True):
        threads = 1
    if ahead is None:
        ahead = threads + 1
    return threads, check_integer("ahead", ahead, 1, AHEAD_LIMIT, hint)


def check_tables(graph: Graph, given: Any, has_types: bool = False) -> dict[str, FeatureTable]:
    """Check that each table has one row per node, and return the tables by node type.

    Args:
        graph: the graph.
        given: the only table, or None; for a graph with types a dict, or None for its own tables.
        has_types: whether it is a graph with types; the only table otherwise has `NODE`.
    """
    if given is None:
        stores = {name: graph.nodes(name) for name in graph.node_types} if has_types else {}
        return {name: own.table for name, own in stores.items() if own.table is not None}
    if not has_types:
        check_kind("table", given, FeatureTable, "gcnzc.FeatureTable(rows), or None")
        if given.num_rows != graph.num_nodes:
            raise ValueError(
                f"the table has {given.num_rows} rows, but the graph {graph.num_nodes} nodes"
            )
        return {NODE: given}
    check_kind("table", given, Mapping, "{'paper': FeatureTable(rows)}")
    for name, table in given.items():
        check_kind(f"table[{name!r}]", table, FeatureTable, "gcnzc.FeatureTable(rows)")
        num_nodes = graph.nodes(name).num_nodes
        if table.num_rows != num_nodes:
            raise ValueError(
                f"table[{name!r}] has {table.num_rows} rows, but the type has {num_nodes} nodes"
            )
    return dict(given)


def check_labels(labels: Any, num_rows: int, of: str) -> Tensor | None:
    """Check that labels have one row for each of `num_rows` nodes or seeds, and return them.

    Args:
        labels: a tensor, an array or None.
        num_rows: the number of rows.
        of: what the rows are of, "nodes" or "seeds".
    """
    if labels is None:
        return None
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
        # torch warns about read-only arrays
        labels = torch.from_numpy(np.require(labels, requirements=["C", "W"]))
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels is {describe(labels)}, not a tensor or an array")
    if labels.ndim == 0 or len(labels) != num_rows:
        raise ValueError(f"labels of shape {tuple(labels.shape)} for {num_rows} {of}")
    return labels.detach().cpu()
