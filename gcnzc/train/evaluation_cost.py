"""Predict cost and memory of an evaluation, to choose its method.

All nodes and the needed ones give the same outputs up to rounding. The needed nodes are fewer, but
finding them and renumbering their edges has a cost. Computing all nodes is therefore cheaper if
most are needed. Sampled neighbours are chosen if the layer outputs of neither fit into memory.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.models.layers import EDGE_COST, Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.train.layerwise.layer import is_projected
from gcnzc.train.layerwise.ranges import BATCH_NODES, degrees_of, limit_batch_nodes, needed_nodes

# the cost of finding and renumbering one edge, in multiply-adds: that of aggregating 8 columns
INDEX_COST = 8 * EDGE_COST

# half of the memory remains for the features, the graph and the minibatches
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Cost:
    """Predicted cost of layer-wise inference."""

    num_rows: int  # output rows of all layers
    operations: int  # multiply-adds
    num_bytes: int  # of the layer inputs and outputs that are in memory at once


@dataclass(frozen=True)
class Choice:
    """A method of evaluation, and the reason for it."""

    method: str  # "exact", "needed" or "sampled"
    reason: str


def choose_evaluation(
    model: Model,
    graph: Graph,
    nodes: Tensor | None,
    num_columns: int,
    memory_bytes: int,
    *,
    can_sample: bool = False,
) -> Choice:
    """Choose whether hidden layers are computed for all nodes, the needed ones or sampled ones.

    Args:
        model: the model, on any device.
        graph: the whole graph.
        nodes: (M,) int64 ids of the evaluated nodes; None for all nodes.
        num_columns: columns of the features.
        memory_bytes: host memory and swap of the machine.
        can_sample: whether neighbours may be sampled.
    """
    needed = predict_cost(model, graph, nodes, num_columns)
    exact = predict_cost(model, graph, None, num_columns)
    limit = int(MEMORY_SHARE * memory_bytes)
    method = "needed" if needed.operations < exact.operations else "exact"
    reason = (
        f"predicted {needed.operations / 1e9:.3g} billion multiply-adds for the "
        f"{needed.num_rows:,} layer outputs that are needed, {exact.operations / 1e9:.3g} billion "
        f"for all {exact.num_rows:,}"
    )
    if can_sample and limit < min(needed.num_bytes, exact.num_bytes):
        method = "sampled"
        reason = (
            f"layer outputs take {min(needed.num_bytes, exact.num_bytes) / 1e9:.3g} GB without "
            f"sampling, more than {MEMORY_SHARE:.0%} of the memory; `gcnzc predict --scratch` "
            "stores them on disk"
        )
    elif method == "exact" and exact.num_bytes > max(limit, needed.num_bytes):
        method = "needed"
        reason = (
            f"layer outputs of all nodes take {exact.num_bytes / 1e9:.3g} GB, more than "
            f"{MEMORY_SHARE:.0%} of the memory; those of the needed nodes take "
            f"{needed.num_bytes / 1e9:.3g} GB"
        )
    return Choice(method, reason)


def format_memory_warning(
    model: Model, graph: Graph, nodes: Tensor | None, num_columns: int, memory_bytes: int
) -> str:
    """Return a warning if the layer outputs of an evaluation exceed the memory, otherwise "".

    Args:
        model: the model, on any device.
        graph: the whole graph.
        nodes: (M,) int64 ids of the evaluated nodes; None if the outputs of all are computed.
        num_columns: columns of the features.
        memory_bytes: host memory and swap of the machine.
    """
    # an upper bound for fewer nodes, which need not be found then
    num_bytes = predict_cost(model, graph, None, num_columns).num_bytes
    if num_bytes > memory_bytes and nodes is not None:
        num_bytes = predict_cost(model, graph, nodes, num_columns).num_bytes
    if num_bytes <= memory_bytes:
        return ""
    return (
        f"warning: the layer outputs of an evaluation take {num_bytes / 1e9:.3g} GB, but there are "
        f"{memory_bytes / 1e9:.3g} GB of memory; use --evaluate sampled or auto"
    )


def predict_cost(model: Model, graph: Graph, nodes: Tensor | None, num_columns: int) -> Cost:
    """Predict the cost of computing the outputs of nodes, or of all nodes if None.

    Args:
        model: the model.
        graph: the whole graph.
        nodes: (M,) int64 node ids; None for all nodes, whose edges need no renumbering.
        num_columns: columns of the features.
    """
    layers = [cast(Layer, layer) for layer in model.layers]
    batch_nodes = limit_batch_nodes(graph, BATCH_NODES)
    needed = needed_nodes(graph, len(layers), nodes, batch_nodes)
    counts = [graph.num_nodes if ids is None else len(ids) for ids in needed]
    edges = [
        graph.num_edges if ids is None else int(degrees_of(graph, ids).sum()) for ids in needed[1:]
    ]
    widths = [num_columns if model.input_linear is None else layers[0].in_features, *model.widths]
    # elements that are in memory at once, and outputs of the nodes that are combined to the logits
    operations = peak = kept = 0
    if model.input_linear is not None:
        operations += counts[0] * num_columns * model.input_linear.out_features
    for index, (layer, num_edges) in enumerate(zip(layers, edges, strict=True)):
        sources, targets = counts[index : index + 2]
        columns, projects = layer.heads * layer.out_features, is_projected(layer)
        # the second projection is that of the target itself, or of a skip connection
        projected = (sources if projects else targets) + targets
        aggregated = columns if projects else layer.in_features * layer.heads
        operations += projected * layer.in_features * columns + EDGE_COST * num_edges * aggregated
        # unprojected features are in memory anyway
        has_inputs = index > 0 or model.input_linear is not None
        inputs = has_inputs * widths[index] * sources + projects * columns * sources
        peak = max(peak, kept + inputs + widths[index + 1] * targets)
        if model.jumping != "none":
            kept += widths[index + 1] * counts[-1]
    # edges whose sources must be found, plus edges between nodes that must be renumbered
    indexed = sum(edges) if nodes is not None else 0
    indexed += sum(count for ids, count in zip(needed[1:], edges, strict=True) if ids is not None)
    num_bytes = peak * parameter_dtype(model).itemsize
    return Cost(sum(counts[1:]), operations + INDEX_COST * indexed, num_bytes)
