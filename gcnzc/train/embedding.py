"""Compute the outputs of a layer for all nodes with the best model of a run.

Notation: N nodes, D output columns of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcnzc.models.stack import Model
from gcnzc.train.hetero.layer_outputs import compute_layer_outputs
from gcnzc.train.hetero.prediction import TrainedHeteroModel, check_prediction_options
from gcnzc.train.inference import inference
from gcnzc.train.prediction import (
    TrainedModel,
    feature_rows,
    get_node_ids,
    load_model,
    reject_hetero_options,
)
from gcnzc.train.prediction_outputs import Array, check_finite
from gcnzc.train.progress import NullReporter, Reporter


@dataclass(frozen=True)
class NodeEmbeddings:
    """Outputs of a layer for all nodes.

    Attributes:
        nodes: (N,) ids of the nodes, see `gcnzc.train.prediction.NodePredictions`.
        rows: (N, D) float32; read-only if a scratch folder was given.
        layer: number of the layer, from 1; None for the output of the whole model.
        epoch: the model's, from 1.
        node_type: of the nodes of a heterogeneous graph; otherwise None.
    """

    nodes: Array
    rows: Array
    layer: int | None
    epoch: int
    node_type: str | None = None


def embed_nodes(
    run: str | Path,
    data: str | Path | None = None,
    *,
    node_type: str | None = None,
    layer: int | None = None,
    time: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> NodeEmbeddings:
    """Compute the output of a layer for all nodes with the best model of a run.

    Args:
        run: the run folder.
        data: a graph with the same features, which may have other nodes and no labels; None for
            that of the run.
        node_type: heterogeneous graphs: type of the nodes. None for the type that the model
            classifies, or that both ends of the predicted edges have.
        layer: number of the layer, from 1; its output is taken as the next layer receives it.
            None for the last hidden layer, or in link prediction for the rows from which the scores
            are computed.
        time: temporal runs on heterogeneous graphs: time of all nodes, an integer in the unit of
            the graph's times; or a date, if `graph.time_unit` is set. Neighbours are not later; in
            link prediction they are earlier. Default: the times of the nodes; in link prediction,
            or if nodes have no times, later than all nodes and edges.
        fanouts: heterogeneous graphs: see `predict`.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The ids of all N nodes, and their rows, (N, D) float32.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        TypeError: `layer` or `memory` is not an integer.
        ValueError: the graph does not fit the model, there is no such layer or node type, an output
            is not finite, `memory` is below 2**20 or given without `scratch`, or the scratch folder
            has rows of another computation.
        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    folder = None if scratch is None else Path(scratch)
    reporter = reporter or NullReporter()
    return embed_loaded(
        loaded, layer, reporter, folder, memory, node_type=node_type, time=time, fanouts=fanouts
    )


def embed_loaded(
    loaded: TrainedModel | TrainedHeteroModel,
    layer: int | None,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
    *,
    node_type: str | None = None,
    time: Any = None,
    fanouts: Sequence[int] | None = None,
) -> NodeEmbeddings:
    """Compute the output of a layer with a loaded model, see `embed_nodes`."""
    if isinstance(loaded, TrainedHeteroModel):
        check_prediction_options(loaded, scratch, memory, fanouts)
        found = compute_layer_outputs(
            loaded, node_type, layer, reporter, time=time, fanouts=fanouts
        )
        nodes = loaded.node_ids(found.node_type)
        return NodeEmbeddings(nodes, found.rows.numpy(), found.layer, loaded.epoch, found.node_type)
    reject_hetero_options(node_type=node_type, time=time, fanouts=fanouts)
    is_link = loaded.config.graph.task.name == "link"
    encoder: Model = loaded.model.encoder if is_link else loaded.model
    if layer is None and not is_link:
        # the last layer computes the logits, unless a linear layer follows it
        layer = len(encoder.layers) - (encoder.output_linear is None)
        if layer == 0:
            raise ValueError(
                "the model has no hidden layer: its only layer computes the logits\n\n"
                "hint: --layer 1 (in Python layer=1) returns the logits"
            )
    with feature_rows(loaded) as table, reporter.task("embed") as bar:
        rows = inference(
            encoder,
            loaded.data.graph,
            table,
            loaded.device,
            layer=layer,
            progress=bar,
            scratch=scratch,
            memory=memory,
        )
    check_finite(rows)
    return NodeEmbeddings(get_node_ids(loaded.data, None), rows.numpy(), layer, loaded.epoch)
