"""Check the arguments of DGL's loader, and reject unsupported ones by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.system.arguments import as_ids, describe


def check_graph(graph: Any) -> None:
    """Refuse what is no graph of one type of nodes and one of edges, on the host.

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
            f"{graph.etypes}\n\nhint: dgl.dataloading.DataLoader loads them"
        )
    if graph.device.type != "cpu":
        raise ValueError(
            f"the graph lies on {graph.device}, but neighbours are drawn on the host\n\n"
            f"hint: graph.cpu(), and device='{graph.device}' for the minibatches"
        )


def check_sampler(graph_sampler: Any, drawn_by: Any) -> None:
    """Refuse a DGL sampler that gives no blocks, or has edge types; and an unknown `drawn_by`.

    Raises:
        ValueError: it is of these.
    """
    loading = import_dgl().dataloading
    if not isinstance(drawn_by, str) or drawn_by not in ("gcnzc", "dgl"):
        raise ValueError(f"drawn_by is {describe(drawn_by)}\n\nhint: 'gcnzc' or 'dgl'")
    inner = graph_sampler
    if isinstance(graph_sampler, loading.EdgePredictionSampler):
        inner = graph_sampler.sampler
        if graph_sampler.reverse_etypes is not None or graph_sampler.exclude == "reverse_types":
            raise ValueError(
                "DataLoader does not support reverse_etypes, for it has no edge types\n\n"
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
    """`indices` as int64, on the host, of the graph's one type if they are given by type.

    Raises:
        ValueError: they are not ids of nodes, or of edges, all different; or of another type.
    """
    if isinstance(indices, Mapping):
        names = [*graph.etypes, *graph.canonical_etypes] if is_edges else graph.ntypes
        if len(indices) != 1 or next(iter(indices)) not in names:
            raise ValueError(
                f"indices is a dict: indices are of types {list(indices)}, but the graph has "
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
                f"index {int(twice[0])} occurs twice ({len(twice)} too many)\n\n"
                "hint: indices.unique()"
            )
    return items
