"""Predict classes of nodes and scores of pairs of nodes with the best model of a run.

Notation: M nodes or pairs, C outputs of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.names import as_integers
from gcnzc.datasets.numbering import KnownNodes
from gcnzc.datasets.source import SPLITS
from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import load
from gcnzc.models.link import LinkModel
from gcnzc.models.stack import Model
from gcnzc.train.config import TrainConfig
from gcnzc.train.encoders import build_encoder
from gcnzc.train.evaluation import check_features, graph_of_run, load_best
from gcnzc.train.inference import inference
from gcnzc.train.label_inputs import LabelInputs, append_labels
from gcnzc.train.layerwise.scratch import remove_scratch
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run_folder import read_config
from gcnzc.train.schema import Schema, check_names, read_schema
from gcnzc.train.setup import choose_device, feature_table
from gcnzc.train.tasks.link import build_link_model

Array = NDArray[Any]
# outputs are checked in chunks of rows: they may be mapped from a file larger than the memory
CHECKED_ROWS = 1 << 16


@dataclass(frozen=True)
class NodePredictions:
    """Predictions for nodes.

    Attributes:
        nodes: (M,) ids of the nodes: those of the graph's source if they were mapped, int64 or str;
            otherwise the int64 node indices (0 to N - 1).
        classes: (M,) predicted classes, int64, or str if the classes have names; for multi-label
            models, (M, C) int64 zeros and ones.
        probabilities: (M, C) float32 class probabilities; for multi-label models, the probability
            of label 1.
        columns: C names of the columns of `probabilities`.
        epoch: the model's, from 1.
    """

    nodes: Array
    classes: Array
    probabilities: Array
    columns: list[str]
    epoch: int


@dataclass(frozen=True)
class LinkPredictions:
    """Predictions for pairs of nodes.

    Attributes:
        sources: (M,) ids, as `NodePredictions.nodes`.
        targets: (M,) ids.
        scores: (M,) float32 logits: a larger score means that an edge is more likely.
        epoch: the model's, from 1.
    """

    sources: Array
    targets: Array
    scores: Array
    epoch: int


@dataclass(frozen=True)
class TrainedModel:
    """The best model of a run, with a graph to predict on."""

    model: Any
    config: TrainConfig
    schema: Schema
    data: Dataset
    device: torch.device
    epoch: int  # from 1

    @cached_property
    def node_index(self) -> KnownNodes:
        """The ids of the nodes of the graph."""
        return KnownNodes(self.data.node_ids, self.data.graph.num_nodes)


def load_model(run: Path, source: Path | None = None, device: str = "auto") -> TrainedModel:
    """Load the best model of a run, and a graph.

    Args:
        run: the run folder.
        source: the folder of the graph; None for that of the run.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        ValueError: the graph does not fit the model.
    """
    trained = read_config(run)
    if trained.is_hetero:
        raise ValueError(
            f"the run in {run} is of --model {trained.model} on a heterogeneous graph, which "
            "`gcnzc predict`, `embed-nodes` and `export` do not support\n\n"
            "hint: `gcnzc evaluate RUN --predictions FILE.npy` writes the outputs of all nodes of "
            "the target"
        )
    source = source or graph_of_run(run, trained)
    schema = read_schema(run, trained)
    data = load(source, allow_nan=trained.allow_nan)
    check_names(schema, data, source)
    check_features(data, source)
    model: Model | LinkModel
    if trained.task == "link":
        model = build_link_model(trained, data)
    else:
        label_columns = schema.num_outputs if trained.label_inputs else 0
        model = build_encoder(trained, data, schema.num_outputs, label_columns)
    chosen = choose_device(device)
    best = load_best(model.to(chosen), run, source, trained.data)
    return TrainedModel(model, trained, schema, data, chosen, best["epoch"] + 1)


def predict(
    run: str | Path,
    data: str | Path | None = None,
    *,
    nodes: Any = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> NodePredictions:
    """Predict the classes of nodes with the best model of a run, with all neighbours.

    Args:
        run: the run folder.
        data: a graph with the same features, which may have other nodes and no labels; None for
            that of the run.
        nodes: ids of nodes, in any order, as the graph's source has them; or "train", "valid" or
            "test"; None or "all" for all nodes.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`.
        reporter: shows the progress; None shows nothing.

    Returns:
        The classes and probabilities of the M nodes, in the order of `nodes`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        TypeError: `memory` is not an integer.
        ValueError: the graph does not fit the model, a node is unknown, the run is of link
            prediction, an output is not finite, `memory` is below 2**20 or given without `scratch`,
            or the scratch folder has rows of another computation.
        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    indices: Array | None = None
    if isinstance(nodes, str):
        indices = None if nodes == "all" else split_indices(loaded.data, nodes)
    elif nodes is not None:
        indices = _node_indices(loaded, nodes)
    folder = None if scratch is None else Path(scratch)
    return predict_nodes(loaded, indices, reporter or NullReporter(), folder, memory)


def predict_links(
    run: str | Path,
    data: str | Path | None = None,
    *,
    pairs: Any,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of nodes with the best model of a link prediction run.

    Args:
        run: the run folder.
        data: see `predict`.
        pairs: (2, M) ids of the sources and the targets, as the graph's source has them.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`.
        reporter: shows the progress; None shows nothing.

    Returns:
        The scores of the M pairs, in the order of `pairs`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        TypeError: `memory` is not an integer.
        ValueError: the graph does not fit the model, a node is unknown, the run is not of link
            prediction, an output is not finite, `memory` is below 2**20 or given without `scratch`,
            or the scratch folder has rows of another computation.
        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    if len(pairs) != 2:
        raise ValueError(
            f"pairs has the length {len(pairs)}\n\nhint: pairs are (2, M) ids: sources, targets"
        )
    sources, targets = (_node_indices(loaded, ids) for ids in pairs)
    folder = None if scratch is None else Path(scratch)
    return predict_pairs(loaded, sources, targets, reporter or NullReporter(), folder, memory)


def predict_nodes(
    loaded: TrainedModel,
    nodes: Array | None,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
) -> NodePredictions:
    """Predict the classes of nodes with a loaded model, see `predict`.

    Args:
        loaded: the model, and the graph of N nodes.
        nodes: (M,) int64 node indices (0 to N - 1); None for all nodes.
        reporter: shows the progress.
        scratch, memory: see `gcnzc.inference`.
    """
    if loaded.config.task == "link":
        raise ValueError(
            "this is a link-prediction run, and predicts scores of pairs\n\n"
            "hint: --pairs FILE names the pairs (in Python predict_links); `gcnzc embed-nodes RUN "
            "--out FILE.npy` writes the embeddings of nodes"
        )
    with feature_rows(loaded) as table:
        logits = _outputs(loaded, loaded.model, table, nodes, reporter, scratch, memory)
    check_finite(logits)
    schema = loaded.schema
    if schema.is_multi_label:
        probabilities = logits.sigmoid()
        classes: Array = (logits > 0).long().numpy()
    else:
        probabilities = logits.softmax(dim=1)
        classes = logits.argmax(dim=1).numpy()
        if schema.classes is not None:
            classes = np.array(schema.classes, dtype=str)[classes]
    columns = list(map(str, schema.classes or range(schema.num_outputs)))
    return NodePredictions(
        get_node_ids(loaded.data, nodes), classes, probabilities.numpy(), columns, loaded.epoch
    )


def predict_pairs(
    loaded: TrainedModel,
    sources: Array,
    targets: Array,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of nodes with a loaded model, see `predict_links`.

    Args:
        loaded: the model, and the graph of N nodes.
        sources, targets: (M,) int64 node indices (0 to N - 1).
        reporter: shows the progress.
        scratch, memory: see `gcnzc.inference`.
    """
    if loaded.config.task != "link":
        raise ValueError(
            "this is a node-classification run, and predicts classes of nodes\n\n"
            "hint: omit --pairs (in Python use predict), or train with --task link"
        )
    if len(sources) != len(targets):
        raise ValueError(
            f"pairs have {len(sources):,} sources and {len(targets):,} targets\n\n"
            "hint: pairs are (2, M) ids"
        )
    nodes, places = np.unique(np.concatenate([sources, targets]), return_inverse=True)
    with feature_rows(loaded) as table:
        encoder = loaded.model.encoder
        rows = _outputs(loaded, encoder, table, nodes, reporter, scratch, memory)
    ends = torch.from_numpy(places.reshape(2, -1))
    scores = loaded.model.scores(rows, ends[0], ends[1])
    check_finite(scores)
    ids = [get_node_ids(loaded.data, nodes) for nodes in (sources, targets)]
    return LinkPredictions(ids[0], ids[1], scores.numpy(), loaded.epoch)


@contextmanager
def feature_rows(loaded: TrainedModel) -> Iterator[FeatureTable]:
    """The features that the model reads, until the end of the `with`."""
    where = loaded.config.features
    labels = None
    if loaded.config.label_inputs:
        schema = loaded.schema
        labels = LabelInputs(loaded.data, schema.num_outputs, schema.is_multi_label)
    with feature_table(loaded.data, where, loaded.device, Group()) as table:
        yield append_labels(table, labels)


def _outputs(
    loaded: TrainedModel,
    encoder: Model,
    table: FeatureTable,
    indices: Array | None,
    reporter: Reporter,
    scratch: Path | None,
    memory: int | None,
) -> Tensor:
    """Return the (M, C) outputs of nodes, which may be given several times."""
    with reporter.task("predict") as bar:
        return inference(
            encoder,
            loaded.data.graph,
            table,
            loaded.device,
            nodes=indices,
            progress=bar,
            scratch=scratch,
            memory=memory,
        )


def _node_indices(loaded: TrainedModel, nodes: Any) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of nodes, given their ids."""
    ids = nodes.cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iuUO"):
        raise ValueError(
            f"the ids are of shape {ids.shape} and type {ids.dtype}\n\n"
            "hint: ids are a 1-D array of integers or strings"
        )
    texts = np.array([str(each) for each in ids.tolist()], object)
    indices = loaded.node_index.numbers_of(texts)
    wrong = np.flatnonzero(indices < 0)
    if len(wrong):
        raise ValueError(
            f"{loaded.data.folder} has no node {texts[wrong[0]]!r} (at position {wrong[0]}); it "
            f"has {loaded.data.graph.num_nodes:,} nodes\n\n"
            "hint: ids are those of the graph's source, see mapping/nodes.csv in its folder; "
            "without that file they are the numbers from 0"
        )
    return indices


def delete_scratch(folder: Path | None) -> None:
    """Delete a scratch folder whose rows are not needed any more; None is valid."""
    if folder is not None:
        remove_scratch(folder)


def split_indices(data: Dataset, split: str) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of a split.

    Raises:
        ValueError: there is no such split, or it has no nodes.
    """
    if split not in SPLITS or len(data.split[split]) == 0:
        raise ValueError(
            f"{data.name} has no {split} nodes\n\n"
            "hint: the splits are train, valid and test, as far as the graph has them; without "
            "nodes, all are predicted"
        )
    return data.split[split].numpy()


def get_node_ids(data: Dataset, indices: Array | None) -> Array:
    """Return the (M,) ids of nodes, int64 or str.

    Args:
        data: the graph, with N nodes.
        indices: (M,) int64 node indices (0 to N - 1); None for all nodes.
    """
    ids = data.node_ids
    if ids is None:
        return np.arange(data.graph.num_nodes) if indices is None else indices
    integers = as_integers(ids)
    values = np.array(ids, dtype=str) if integers is None else integers
    return values if indices is None else values[indices]


def check_finite(outputs: Tensor) -> None:
    """Raise a ValueError if an output is NaN or infinite."""
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    chunks = columns.split(CHECKED_ROWS)
    wrong = sum(int((~torch.isfinite(chunk)).flatten(1).any(dim=1).sum()) for chunk in chunks)
    if wrong:
        raise ValueError(
            f"{wrong:,} of {len(outputs):,} predictions are NaN or infinite\n\n"
            "hint: check the features; `gcnzc info DATA --verify` reads all of them"
        )
