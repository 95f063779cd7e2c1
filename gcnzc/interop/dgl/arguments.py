"""Check the arguments of the DGL loader, and reject unsupported ones by name."""

from typing import Any

import torch

from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.system.arguments import describe


def check_graph(graph: Any) -> None:
    """Check that `graph` is a DGL graph on the host, with edge types and no type without nodes.

    Raises:
        ValueError: it is not.
    """
    dgl = import_dgl()
    if not isinstance(graph, dgl.DGLGraph) or graph.is_block:
        raise ValueError(
            f"graph: DataLoader does not support {describe(graph)}\n\nhint: a dgl.DGLGraph"
        )
    if not graph.canonical_etypes:
        raise ValueError("the graph has no edge types to sample from\n\nhint: add edges")
    for kind in graph.ntypes if is_typed(graph) else ():
        if graph.num_nodes(kind) == 0:
            raise ValueError(
                f"DataLoader does not support node types without nodes, as {kind!r}\n\n"
                "hint: dgl.edge_type_subgraph(graph, ...) without its edge types"
            )
    if graph.device.type != "cpu":
        raise ValueError(
            f"the graph is on {graph.device}, but neighbours are sampled on the host\n\n"
            f"hint: graph.cpu(), and device='{graph.device}' for the minibatches"
        )


def is_typed(graph: Any) -> bool:
    """Whether a DGL graph has several types of nodes or edges."""
    return len(graph.ntypes) != 1 or len(graph.canonical_etypes) != 1


def check_sampler(graph: Any, graph_sampler: Any, sampler_library: Any) -> None:
    """Check that a DGL sampler returns blocks and fits the graph, and check `sampler_library`.

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
        uses_types = graph_sampler.reverse_etypes is not None
        if not is_typed(graph) and (uses_types or graph_sampler.exclude == "reverse_types"):
            raise ValueError(
                "DataLoader does not support reverse_etypes for graphs with one edge type\n\n"
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
