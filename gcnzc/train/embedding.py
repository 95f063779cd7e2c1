"""Compute the outputs of a layer for all nodes with the best model of a run.

Notation: N nodes, D output columns of the layer.
"""

from dataclasses import dataclass
from pathlib import Path

from gcnzc.models.stack import Model
from gcnzc.train.inference import inference
from gcnzc.train.prediction import (
    Array,
    TrainedModel,
    check_finite,
    feature_rows,
    get_node_ids,
    load_model,
)
from gcnzc.train.progress import NullReporter, Reporter


@dataclass(frozen=True)
class NodeEmbeddings:
    """Outputs of a layer for all nodes.

    Attributes:
        nodes: (N,) ids of the nodes, see `gcnzc.train.prediction.NodePredictions`.
        rows: (N, D) float32; read-only if a scratch folder was given.
        layer: number of the layer, from 1; None for the output of the whole model.
        epoch: the model's, from 1.
    """

    nodes: Array
    rows: Array
    layer: int | None
    epoch: int


def embed_nodes(
    run: str | Path,
    data: str | Path | None = None,
    *,
    layer: int | None = None,
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
        layer: number of the layer, from 1; its output is taken as the next layer receives it.
            None for the last hidden layer, or in link prediction for the rows from which the scores
            are computed.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`.
        reporter: shows the progress; None shows nothing.

    Returns:
        The ids of all N nodes, and their rows, (N, D) float32.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        TypeError: `layer` or `memory` is not an integer.
        ValueError: the graph does not fit the model, there is no such layer, an output is not
            finite, `memory` is below 2**20 or given without `scratch`, or the scratch folder has
            rows of another computation.
        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    folder = None if scratch is None else Path(scratch)
    return embed_loaded(loaded, layer, reporter or NullReporter(), folder, memory)


def embed_loaded(
    loaded: TrainedModel,
    layer: int | None,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
) -> NodeEmbeddings:
    """Compute the output of a layer with a loaded model, see `embed_nodes`."""
    is_link = loaded.config.task == "link"
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
