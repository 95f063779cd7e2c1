"""Check the arguments of the DGL loader, and reject unsupported ones by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.system.arguments import as_ids, describe


def check_graph(graph: Any) -> None:
    """Check that `graph` is a DGL graph on the host, with one node type and one edge type.

    Raises:
        ValueError: it is not.
    """
    dgl = import_dgl()
    if not isinstance(graph, dgl.DGLGraph):
        raise ValueError(
            f"graph: DataLoader does not support {describe(graph)}\n\nhint: a dgl.DGLGraph"
        )
    if len(graph.ntypes) != 1 or len(graph.etypes) != 1:
        raise ValueError(
            f"DataLoader does not support graphs with several types: nodes {graph.ntypes}, edges "
            f"{graph.etypes}\n\nhint: use dgl.dataloading.DataLoader for such graphs"
        )
    if graph.device.type != "cpu":
        raise ValueError(
            f"the graph is on {graph.device}, but neighbours are sampled on the host\n\n"
            f"hint: graph.cpu(), and device='{graph.device}' for the minibatches"
        )


def check_sampler(graph_sampler: Any, sampler_library: Any) -> None:
    """Check that a DGL sampler returns blocks and uses no edge types, and check `sampler_library`.

    Raises:
        ValueError: the sampler is not supported, or `sampler_library` is unknown.
    """
    loading = import_dgl().dataloading
    if not isinstance(sampler_library, str) or sampler_library not in ("gcnzc", "dgl"):
        raise ValueError(
            f"sampler_library is {describe(sampler_library)}\n\nhint: 'gcnzc' or 'dgl'"
        )
    inner = graph_sampler
    if isinstance(graph_sampler, loading.EdgePredictionSampler):
        inner = graph_sampler.sampler
        if graph_sampler.reverse_etypes is not None or graph_sampler.exclude == "reverse_types":
            raise ValueError(
                "DataLoader does not support reverse_etypes, which need edge types\n\n"
                "hint: exclude='reverse_id' with reverse_eids"
            )
    if not isinstance(inner, loading.BlockSampler):
        raise ValueError(
            f"graph_sampler: DataLoader does not support {describe(inner)}\n\n"
            "hint: NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, another sampler "
            "of blocks, or as_edge_prediction_sampler around one"
        )
    if inner.output_device is not None and torch.device(inner.output_device).type != "cpu":
        raise ValueError(
            f"DataLoader does not support a sampler's output_device {inner.output_device}\n\n"
            "hint: DataLoader(..., device=...)"
        )


def check_items(indices: Any, graph: Any, is_edges: bool) -> Tensor:
    """Return `indices` as int64 on the host; they may be a dictionary with the graph's one type.

    Raises:
        TypeError: `indices` is not a tensor of ids.
        ValueError: an id is out of range or occurs twice, or the type is not the graph's.
    """
    if isinstance(indices, Mapping):
        names = [*graph.etypes, *graph.canonical_etypes] if is_edges else graph.ntypes
        if len(indices) != 1 or next(iter(indices)) not in names:
            raise ValueError(
                f"indices is a dict with the types {list(indices)}, but the graph has the types "
                f"{names}\n\nhint: a tensor of ids"
            )
        (indices,) = indices.values()
    items = as_ids("indices", indices, "a mask becomes ids with .nonzero().flatten()").cpu()
    count, kind = (graph.num_edges(), "edges") if is_edges else (graph.num_nodes(), "nodes")
    if len(items):
        ordered = items.sort().values
        if ordered[0] < 0 or ordered[-1] >= count:
            raise ValueError(
                f"indices reach from {int(ordered[0])} to {int(ordered[-1])}, but the graph has "
                f"{count} {kind}\n\nhint: {kind} are counted from 0"
            )
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice) > 0:
            raise ValueError(
                f"index {int(twice[0])} occurs twice ({len(twice)} duplicates in all)\n\n"
                "hint: indices.unique()"
            )
    return items
