"""Compute the outputs of a layer for all nodes of a type, with the best model of a run.

Notation: N nodes of the type, D output columns of the layer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gcnzc.models.hetero import HeteroModel
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.train.hetero.encoder import build_hetero_sampler
from gcnzc.train.hetero.inference import node_outputs
from gcnzc.train.hetero.prediction import (
    TrainedHeteroModel,
    check_time,
    convert_time,
    open_feature_tables,
    time_after_all,
)
from gcnzc.train.prediction_outputs import check_finite
from gcnzc.train.progress import Reporter


class LayerOutputs(NamedTuple):
    """The outputs of a layer for all nodes of a type."""

    rows: Tensor  # (N, D), on the host
    node_type: str
    layer: int | None  # from 1; None for the outputs of the encoder of link prediction


def compute_layer_outputs(
    loaded: TrainedHeteroModel,
    node_type: str | None,
    layer: int | None,
    reporter: Reporter,
    *,
    time: Any = None,
    fanouts: Sequence[int] | None = None,
) -> LayerOutputs:
    """Compute the outputs of a layer for all nodes of a type, see `gcnzc.train.embed_nodes`.

    Args:
        loaded: the model and the graph.
        node_type: of the nodes. None for the type that the model classifies, or that both ends of
            the predicted edges have.
        layer: number of the layer, from 1. None for the last hidden layer, or for ends of predicted
            edges the rows from which scores are computed.
        reporter: shows the progress.
        time: for temporal runs, of all nodes: an integer or a date. Default: the times of the
            nodes; in link prediction, or if nodes have no times, later than all nodes and edges.
        fanouts: neighbours per node and edge type, input layer first; None for all.

    Raises:
        ValueError: there is no such node type or layer, the layer does not compute the type, or an
            output is not finite.
    """
    is_link = loaded.config.graph.task.name == "link"
    encoder: HeteroModel = loaded.model.encoder if is_link else loaded.model
    node_type = _choose_type(loaded, encoder, node_type)
    num_layers = len(encoder.layers)
    is_whole = layer is None and is_link and node_type in encoder.targets
    if layer is None and not is_whole:
        # the last layer computes the outputs, unless a linear layer follows it
        layer = num_layers - (not encoder.output_linears)
        if layer == 0:
            raise ValueError(
                "the model has no hidden layer: its only layer computes the outputs\n\n"
                "hint: --layer 1 (in Python layer=1) returns the outputs"
            )
    if layer is not None:
        _check_layer(encoder, layer, node_type)
    count = num_layers if layer is None else layer

    def compute(model: nn.Module, batch: HeteroBatch) -> Tensor:
        if layer is None:
            rows: Tensor = model(batch.blocks, loaded.inputs(batch))[node_type]
            return rows
        return encoder.layer_outputs(batch.blocks, loaded.inputs(batch), node_type)

    is_output = count == num_layers and (layer is None or not encoder.output_linears)
    num_nodes = loaded.graph.num_nodes(node_type)
    with open_feature_tables(loaded) as tables, reporter.task("embed") as bar:
        rows = node_outputs(
            encoder,
            build_hetero_sampler(loaded.config, loaded.graph, loaded.fanouts(fanouts)[:count]),
            (node_type, torch.arange(num_nodes)),
            tables,
            compute,
            num_columns=encoder.out_features if is_output else encoder.hidden,
            device=loaded.device,
            is_sampled=fanouts is not None,
            times=_times(loaded, node_type, time),
            threads=loaded.config.loading.threads or None,
            progress=bar,
        )
    check_finite(rows)
    return LayerOutputs(rows, node_type, layer)


def _choose_type(loaded: TrainedHeteroModel, encoder: HeteroModel, node_type: str | None) -> str:
    if node_type is None:
        if len(encoder.targets) > 1:
            raise ValueError(
                f"the model has embeddings of the node types {', '.join(encoder.targets)}\n\n"
                f"hint: --node-type {' or '.join(encoder.targets)} (in Python `node_type`)"
            )
        return encoder.targets[0]
    if node_type not in loaded.graph.node_types:
        raise ValueError(
            f"there is no node type {node_type!r:.100}\n\n"
            f"hint: the node types are {', '.join(loaded.graph.node_types)}"
        )
    return node_type


def _check_layer(encoder: HeteroModel, layer: int, node_type: str) -> None:
    """Check that a layer exists, and computes a node type."""
    num_layers = len(encoder.layers)
    if not 1 <= layer <= num_layers:
        raise ValueError(
            f"layer {layer} of a model of {num_layers} layers\n\n"
            f"hint: layers are numbered from 1 to {num_layers}"
        )
    computed = encoder.layer_types(layer)
    if node_type in computed:
        return
    others = [n for n in range(1, num_layers + 1) if node_type in encoder.layer_types(n)]
    remedy = f"it computes {', '.join(computed)}"
    if others:
        remedy += f"; --layer {' or '.join(map(str, others))} computes {node_type}"
    raise ValueError(
        f"layer {layer} does not compute nodes of type {node_type!r}, on which no output depends"
        f"\n\nhint: {remedy}"
    )


def _times(loaded: TrainedHeteroModel, node_type: str, time: Any) -> Tensor | None:
    """Return the time of each node, up to which its neighbours are read; None for their own."""
    check_time(loaded, time)
    if not loaded.is_temporal:
        return None
    is_link = loaded.config.graph.task.name == "link"
    if time is None:
        if not is_link and loaded.graph.nodes(node_type).time is not None:
            return None
        time = time_after_all(loaded.graph)
    else:
        time = convert_time(loaded, time)
    # neighbours of pairs are earlier than the pair, as in training
    return torch.full((loaded.graph.num_nodes(node_type),), time - 1 if is_link else time)
