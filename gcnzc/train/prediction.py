"""Predict classes of nodes and scores of pairs of nodes with the best model of a run.

Notation: M nodes or pairs, C outputs of the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from gcnzc.train.build import build_encoder
from gcnzc.train.config import TrainConfig
from gcnzc.train.evaluation import check_features, graph_of_run, load_best
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.prediction import (
    TrainedHeteroModel,
    check_prediction_options,
    load_hetero_model,
    predict_hetero_nodes,
    predict_hetero_pairs,
)
from gcnzc.train.inference import inference
from gcnzc.train.label_inputs import LabelInputs, append_labels
from gcnzc.train.layerwise.scratch import remove_scratch
from gcnzc.train.prediction_outputs import (
    Array,
    LinkPredictions,
    NodePredictions,
    build_predictions,
    check_finite,
    check_pairs,
    check_task,
    node_indices,
)
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run_folder import read_config
from gcnzc.train.schema import Schema, check_names, read_schema
from gcnzc.train.setup import choose_device, feature_table
from gcnzc.train.tasks.link import build_link_model


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

    @property
    def end_indices(self) -> tuple[KnownNodes, KnownNodes]:
        """The ids of the nodes that are sources of pairs, and of those that are targets."""
        return self.node_index, self.node_index


def load_model(
    run: Path, source: Path | None = None, device: str = "auto"
) -> TrainedModel | TrainedHeteroModel:
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
    if trained.model.is_hetero:
        return load_hetero_model(run, trained, source, device)
    source = source or graph_of_run(run, trained)
    schema = read_schema(run)
    data = load(source, allow_nan=trained.graph.allow_nan)
    check_names(schema, data, source)
    check_features(data, source)
    model: Model | LinkModel
    if trained.graph.task.name == "link":
        model = build_link_model(trained, data)
    else:
        label_columns = schema.num_outputs if trained.graph.label_inputs else 0
        model = build_encoder(trained, data, schema.num_outputs, label_columns)
    chosen = choose_device(device)
    best = load_best(model.to(chosen), run, source, trained.graph.data)
    return TrainedModel(model, trained, schema, data, chosen, best["epoch"] + 1)


def predict(
    run: str | Path,
    data: str | Path | None = None,
    *,
    nodes: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> NodePredictions:
    """Predict the classes of nodes with the best model of a run.

    All neighbours are read unless `fanouts` is given. In a heterogeneous graph, the nodes are those
    of the type that the model classifies, and a temporal run reads neighbours that are not later
    than the node.

    Args:
        run: the run folder.
        data: a graph with the same features, which may have other nodes and no labels; None for
            that of the run.
        nodes: ids of nodes, in any order, as the graph's source has them; or "train", "valid" or
            "test"; None or "all" for all nodes.
        fanouts: heterogeneous graphs: neighbours sampled per node and edge type, one number per
            layer, input layer first. None for all neighbours.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The classes and probabilities of the M nodes, in the order of `nodes`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        TypeError: `memory` is not an integer.
        ValueError: one of

            - the graph does not fit the model;
            - a node or a split is unknown, or a split has no nodes;
            - the run is of link prediction;
            - the run is temporal, and the nodes have no times;
            - an output is not finite;
            - `memory` is below 2**20 or given without `scratch`, or the scratch folder has rows of
              another computation;
            - `scratch` or `memory` is given for a heterogeneous graph, or `fanouts` for another
              graph;
            - `fanouts` is invalid, or does not have one number per layer.

        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    check_task(loaded.config.graph.task.name, has_pairs=False)
    indices: Array | None = None
    if isinstance(nodes, str):
        indices = None if nodes == "all" else split_indices(loaded.data, nodes)
    elif nodes is not None:
        indices = node_indices(loaded.node_index, nodes, loaded.data.folder)
    folder = None if scratch is None else Path(scratch)
    reporter = reporter or NullReporter()
    return predict_nodes(loaded, indices, reporter, folder, memory, fanouts=fanouts)


def predict_links(
    run: str | Path,
    data: str | Path | None = None,
    *,
    pairs: Any,
    times: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of nodes with the best model of a link prediction run.

    All neighbours are read unless `fanouts` is given. In a heterogeneous graph, the pairs are of
    the edge type that the model predicts. Held-out edges of the run are not in the neighbourhoods,
    unless `data` is given, or the run is temporal by the times of the edges.

    Args:
        run: the run folder.
        data: see `predict`.
        pairs: (2, M) ids of the sources and the targets, as the graph's source has them.
        times: of the pairs, for temporal runs: (M,) integers in the unit of the graph's times, or
            one for all; or dates, if `graph.time_unit` is set. Neighbours are earlier. None for a
            time after all nodes and edges.
        fanouts: see `predict`.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The scores of the M pairs, in the order of `pairs`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        TypeError: `memory` is not an integer.
        ValueError: one of

            - the graph does not fit the model;
            - `pairs` are not (2, M), or a node is unknown;
            - the run is not of link prediction;
            - `times` are given, and the run is not temporal, or they are not M times;
            - an output is not finite;
            - `memory` is below 2**20 or given without `scratch`, or the scratch folder has rows of
              another computation;
            - `scratch` or `memory` is given for a heterogeneous graph, or `times` or `fanouts` for
              another graph;
            - `fanouts` is invalid, or does not have one number per layer.

        OSError: the disk of the scratch folder is full.
    """
    loaded = load_model(Path(run), None if data is None else Path(data), device)
    check_task(loaded.config.graph.task.name, has_pairs=True)
    if len(pairs) != 2:
        raise ValueError(
            f"pairs has the length {len(pairs)}\n\nhint: pairs are (2, M) ids: sources, targets"
        )
    sources, targets = (
        node_indices(known, ids, loaded.data.folder)
        for known, ids in zip(loaded.end_indices, pairs, strict=True)
    )
    folder = None if scratch is None else Path(scratch)
    reporter = reporter or NullReporter()
    return predict_pairs(
        loaded, sources, targets, reporter, folder, memory, times=times, fanouts=fanouts
    )


def predict_nodes(
    loaded: TrainedModel | TrainedHeteroModel,
    nodes: Array | None,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
    *,
    fanouts: Sequence[int] | None = None,
) -> NodePredictions:
    """Predict the classes of nodes with a loaded model, see `predict`.

    Args:
        loaded: the model, and the graph of N nodes.
        nodes: (M,) int64 node indices (0 to N - 1); None for all nodes.
        reporter: shows the progress.
        scratch, memory: see `gcnzc.inference`.
        fanouts: see `predict`.
    """
    check_task(loaded.config.graph.task.name, has_pairs=False)
    if isinstance(loaded, TrainedHeteroModel):
        check_prediction_options(loaded, scratch, memory, fanouts)
        return predict_hetero_nodes(loaded, nodes, reporter, fanouts)
    reject_hetero_options(fanouts=fanouts)
    with feature_rows(loaded) as table:
        logits = _outputs(loaded, loaded.model, table, nodes, reporter, scratch, memory)
    return build_predictions(logits, get_node_ids(loaded.data, nodes), loaded.schema, loaded.epoch)


def predict_pairs(
    loaded: TrainedModel | TrainedHeteroModel,
    sources: Array,
    targets: Array,
    reporter: Reporter,
    scratch: Path | None = None,
    memory: int | None = None,
    *,
    times: Any = None,
    fanouts: Sequence[int] | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of nodes with a loaded model, see `predict_links`.

    Args:
        loaded: the model, and the graph of N nodes.
        sources, targets: (M,) int64 node indices (0 to N - 1).
        reporter: shows the progress.
        scratch, memory: see `gcnzc.inference`.
        times, fanouts: see `predict_links`.
    """
    check_task(loaded.config.graph.task.name, has_pairs=True)
    check_pairs(sources, targets)
    if isinstance(loaded, TrainedHeteroModel):
        check_prediction_options(loaded, scratch, memory, fanouts)
        return predict_hetero_pairs(loaded, sources, targets, reporter, times, fanouts)
    reject_hetero_options(times=times, fanouts=fanouts)
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
    where = loaded.config.loading.features.name
    labels = None
    if loaded.config.graph.label_inputs:
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


def reject_hetero_options(**given: object) -> None:
    """Raise a ValueError if an option of heterogeneous graphs is given; None means not given."""
    for name, value in given.items():
        if value is not None:
            # the command line has `--time`, one value for all pairs
            option = f"--{'time' if name == 'times' else name}".replace("_", "-")
            raise ValueError(
                f"{option} (in Python `{name}`) is given, and the model of the run is for graphs "
                f"of one node type\n\nhint: omit {option}, which is for heterogeneous graphs"
            )


def delete_scratch(folder: Path | None) -> None:
    """Delete a scratch folder whose rows are not needed any more; None is valid."""
    if folder is not None:
        remove_scratch(folder)


def split_indices(data: Dataset | HeteroDataset, split: str) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of a split.

    Raises:
        ValueError: there is no such split, or it has no nodes.
    """
    if split not in SPLITS or not len(data.split.get(split, ())):
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
