"""Predict with the best model of a run on a heterogeneous graph.

Outputs are computed in minibatches, with all neighbours or with sampled ones.

Notation: M nodes or pairs, C outputs of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcnzc.datasets.numbering import KnownNodes
from gcnzc.exchange import Group
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.graph import HeteroGraph
from gcnzc.graph.hetero.times import as_times, describe_wrong_time, parse_times
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.sampling.hetero_link import HeteroLinkSampler
from gcnzc.train.config import TrainConfig, check_fanouts
from gcnzc.train.evaluation import graph_of_run, load_best
from gcnzc.train.hetero.data import HeteroDataset, load_unlabelled, open_tables
from gcnzc.train.hetero.edge_split import split_edges_of_run
from gcnzc.train.hetero.embeddings import embedded_types, load_embeddings
from gcnzc.train.hetero.encoder import build_hetero_encoder, build_hetero_sampler, choose_fanouts
from gcnzc.train.hetero.inference import hetero_outputs, node_outputs, with_embeddings
from gcnzc.train.hetero.link_model import build_hetero_link_model
from gcnzc.train.prediction_outputs import (
    Array,
    LinkPredictions,
    NodePredictions,
    build_predictions,
    check_finite,
)
from gcnzc.train.progress import Reporter
from gcnzc.train.schema import Schema, check_names, read_schema
from gcnzc.train.setup import choose_device

# pairs of a minibatch: each pair has two seeds
SAMPLED_PAIRS, WHOLE_PAIRS = 1024, 256


@dataclass(frozen=True)
class TrainedHeteroModel:
    """The best model of a run on a heterogeneous graph, with a graph to predict on.

    Attributes:
        model: on `device`; of node classification, or a `HeteroLinkModel`.
        config: options of the run.
        schema: what the model reads and predicts.
        data: the graph.
        graph: for message passing; in link prediction without the held-out edges of the run, unless
            other data are given, or the run is temporal by the times of the edges.
        embeddings: of the node types without features.
        device: of the computation.
        epoch: of the model, from 1.
    """

    model: Any
    config: TrainConfig
    schema: Schema
    data: HeteroDataset
    graph: HeteroGraph
    embeddings: Mapping[str, EmbeddingTable]
    device: torch.device
    epoch: int

    @property
    def is_temporal(self) -> bool:
        """Whether neighbours are not later than what is predicted."""
        return self.config.graph.is_temporal

    @cached_property
    def node_index(self) -> KnownNodes:
        """The ids of the nodes of the target."""
        return self._known_nodes(self.data.target)

    @cached_property
    def end_indices(self) -> tuple[KnownNodes, KnownNodes]:
        """The ids of the nodes that are sources of pairs, and of those that are destinations."""
        assert self.data.edge_type is not None, "the run is of link prediction"
        source, _, destination = self.data.edge_type
        sources = self._known_nodes(source)
        return sources, sources if source == destination else self._known_nodes(destination)

    def _known_nodes(self, node_type: str) -> KnownNodes:
        keys = self.graph.nodes(node_type).keys
        ids = None if keys is None else keys.astype(str).astype(object)
        return KnownNodes(ids, self.graph.num_nodes(node_type))

    def node_ids(self, node_type: str, indices: Array | None = None) -> Array:
        """Return the (M,) ids of nodes of a type, int64 or str.

        Args:
            node_type: of the nodes.
            indices: (M,) int64 node indices (0 to N - 1); None for all N nodes.
        """
        keys = self.graph.nodes(node_type).keys
        if keys is None:
            return np.arange(self.graph.num_nodes(node_type)) if indices is None else indices
        return keys if indices is None else keys[indices]

    def fanouts(self, given: Sequence[int] | None) -> Sequence[int]:
        """Return the given fanouts, input layer first; all neighbours if None."""
        return choose_fanouts(given, self.config.layers)

    def inputs(self, batch: HeteroBatch) -> dict[str, Tensor]:
        """Return the features of a minibatch, with rows of embeddings."""
        return with_embeddings(batch, self.embeddings)


def load_hetero_model(
    run: Path, trained: TrainConfig, source: Path | None, device: str
) -> TrainedHeteroModel:
    """Load the best model of a run, and a graph; see `gcnzc.train.prediction.load_model`.

    Raises:
        FileNotFoundError: there is no graph, or no file of embeddings.
        ValueError: the graph does not fit the model.
    """
    path = source or graph_of_run(run, trained)
    schema = read_schema(run)
    data = load_unlabelled(trained, path, schema.target)
    check_names(schema, data, path)
    model: nn.Module
    if trained.graph.task.name == "link":
        model = build_hetero_link_model(trained, data)
    else:
        model = build_hetero_encoder(trained, data, schema.num_outputs, data.target)
    chosen = choose_device(device)
    best = load_best(model.to(chosen), run, path, trained.graph.data)
    names = embedded_types(model, data)
    embeddings = load_embeddings(run, best["epoch"], names, data)
    graph = data.graph
    if trained.graph.task.name == "link" and source is None:
        graph = split_edges_of_run(trained, data).graph
    return TrainedHeteroModel(
        model, trained, schema, data, graph, embeddings, chosen, best["epoch"] + 1
    )


@contextmanager
def open_feature_tables(loaded: TrainedHeteroModel) -> Iterator[Mapping[str, FeatureTable]]:
    """Yield the feature tables by node type that the model reads, page-locked for a GPU."""
    with open_tables(loaded.data.table, loaded.device, Group()) as tables:
        yield tables.tables


def check_prediction_options(
    loaded: TrainedHeteroModel,
    scratch: Path | None,
    memory: int | None,
    fanouts: Sequence[int] | None,
) -> None:
    """Check options of a prediction.

    Raises:
        ValueError: `scratch` or `memory` is given, or `fanouts` do not fit the model.
    """
    if scratch is not None or memory is not None:
        raise ValueError(
            "--scratch or --memory is given, but layer outputs of heterogeneous graphs are not "
            "stored\n\n"
            "hint: omit --scratch and --memory (in Python `scratch` and `memory`)"
        )
    if fanouts is None:
        return
    check_fanouts(fanouts, "--fanouts")
    if len(fanouts) != loaded.config.layers:
        raise ValueError(
            f"{len(fanouts)} fanouts ({','.join(map(str, fanouts))}) for {loaded.config.layers} "
            "layers\n\nhint: give one number per layer, input layer first"
        )


def predict_hetero_nodes(
    loaded: TrainedHeteroModel,
    nodes: Array | None,
    reporter: Reporter,
    fanouts: Sequence[int] | None = None,
) -> NodePredictions:
    """Predict the classes of nodes of the target, see `gcnzc.train.predict`.

    Args:
        loaded: the model, and the graph with N nodes of the target.
        nodes: (M,) int64 node indices (0 to N - 1); None for all nodes.
        reporter: shows the progress.
        fanouts: neighbours per node and edge type, input layer first; None for all.

    Raises:
        ValueError: an output is not finite, or the run is temporal, and the nodes have no times.
    """
    target = loaded.data.target
    ids = np.arange(loaded.graph.num_nodes(target)) if nodes is None else nodes
    with open_feature_tables(loaded) as tables, reporter.task("predict") as bar:
        logits = node_outputs(
            loaded.model,
            build_hetero_sampler(loaded.config, loaded.graph, loaded.fanouts(fanouts)),
            (target, torch.from_numpy(ids)),
            tables,
            lambda model, batch: model(batch.blocks, loaded.inputs(batch)),
            num_columns=loaded.schema.num_outputs,
            device=loaded.device,
            is_sampled=fanouts is not None,
            threads=loaded.config.loading.threads or None,
            progress=bar,
        )
    return build_predictions(logits, loaded.node_ids(target, nodes), loaded.schema, loaded.epoch)


def predict_hetero_pairs(
    loaded: TrainedHeteroModel,
    sources: Array,
    targets: Array,
    reporter: Reporter,
    times: Any = None,
    fanouts: Sequence[int] | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of the edge type of a run, see `gcnzc.train.predict_links`.

    Args:
        loaded: the model and the graph.
        sources, targets: (M,) int64 node indices of the pairs.
        reporter: shows the progress.
        times: (M,) times of the pairs, or one for all: integers, or dates, which are rounded down;
            None for a time after all nodes and edges.
        fanouts: neighbours per node and edge type, input layer first; None for all.

    Raises:
        ValueError: a score is not finite, or times are given and the run is not temporal.
    """
    assert loaded.data.edge_type is not None, "the run is of link prediction"
    source, _, target = loaded.data.edge_type
    ids = loaded.node_ids(source, sources), loaded.node_ids(target, targets)
    check_time(loaded, times)
    if not len(sources):
        return LinkPredictions(*ids, np.empty(0, np.float32), loaded.epoch)
    if loaded.is_temporal and times is None:
        times = time_after_all(loaded.graph)
    if times is not None and np.ndim(times) == 0:
        times = np.full(len(sources), convert_time(loaded, times))
    sampler = HeteroLinkSampler(
        build_hetero_sampler(loaded.config, loaded.graph, loaded.fanouts(fanouts)),
        loaded.data.edge_type,
        np.stack([sources, targets]),
        times=times,
        num_negatives=0,
        strict=False,
        exclude="none",
        seed=loaded.config.loading.seed,
    )

    def compute(model: nn.Module, batch: HeteroBatch) -> Tensor:
        logits: Tensor = model(batch.blocks, loaded.inputs(batch), batch.pairs)
        return logits[:, None]

    with open_feature_tables(loaded) as tables, reporter.task("predict") as bar:
        loader = HeteroLoader(
            sampler,
            None,
            WHOLE_PAIRS if fanouts is None else SAMPLED_PAIRS,
            tables=tables,
            device=loaded.device,
            threads=loaded.config.loading.threads or None,
        )
        scores = hetero_outputs(loaded.model, loader, compute, 1, bar)[:, 0]
    check_finite(scores)
    return LinkPredictions(*ids, scores.numpy(), loaded.epoch)


def time_after_all(graph: HeteroGraph) -> int:
    """Return a time that is later than all nodes and edges of a graph; 0 without times."""
    times = [graph.nodes(name).time for name in graph.node_types]
    times += [graph.edges(each).time for each in graph.edge_types]
    return 1 + max((int(own.max()) for own in times if own is not None and len(own)), default=-1)


def check_time(loaded: TrainedHeteroModel, time: Any) -> None:
    """Check that a time, or several, are given only for a temporal run; None means not given.

    Raises:
        ValueError: a time is given, and the run is not temporal.
    """
    if time is not None and not loaded.is_temporal:
        raise ValueError(
            "a time is given, but the run has --temporal none, and reads neighbours of any time"
            "\n\nhint: omit --time (in Python `time` or `times`)"
        )


def convert_time(loaded: TrainedHeteroModel, time: Any) -> int:
    """Return a time, an integer or a date, as an integer in the unit of the graph's times.

    Raises:
        ValueError: it is a date, and the unit is not known.
    """
    return int(as_times("time", [time], 1, loaded.graph.time_unit, is_limit=True))


def parse_time(loaded: TrainedHeteroModel, text: str) -> int:
    """Return the time that `--time` gives: an integer, or a date if the graph has a time unit.

    Raises:
        ValueError: the text is not a time or could be two times, see `parse_times`, or the run is
            not temporal.
    """
    check_time(loaded, text)
    unit = loaded.graph.time_unit
    times, wrong = parse_times([text], unit)
    if wrong is not None:
        raise describe_wrong_time(f"--time {text}", text, unit)
    return int(times[0])
