"""Open the best model of a run, with a graph to evaluate it on, to predict on or to export with.

Notation: N nodes of the graph, or of one type in a heterogeneous graph; M requested nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.names import as_integers
from gcnzc.datasets.numbering import KnownNodes
from gcnzc.exchange import Group
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.graph.load import load
from gcnzc.train import checkpoint
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset, load_hetero, load_unlabelled, open_tables
from gcnzc.train.hetero.edge_split import split_edges_of_run
from gcnzc.train.hetero.embeddings import embedded_types, load_embeddings
from gcnzc.train.hetero.inference import typed_outputs
from gcnzc.train.inference import inference
from gcnzc.train.label_inputs import LabelInputs, append_labels
from gcnzc.train.models import build_model
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run_folder import BEST, CONFIG, read_config
from gcnzc.train.schema import Schema, check_graph, read_schema, schema_of
from gcnzc.train.setup import choose_device, feature_table

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Trained:
    """The best model of a run, with a graph.

    The names of node types are empty for graphs of one type.

    Attributes:
        model: on `device`.
        config: options of the run.
        schema: what the model reads and predicts.
        data: a `Dataset` or a `HeteroDataset`.
        embeddings: of the node types without features.
        device: of the computation.
        epoch: of the model, from 1.
        is_own_graph: whether the graph is that of the run.
    """

    model: Any
    config: TrainConfig
    schema: Schema
    data: Any
    embeddings: Mapping[str, EmbeddingTable]
    device: torch.device
    epoch: int
    is_own_graph: bool

    @property
    def is_hetero(self) -> bool:
        """Whether the graph is heterogeneous."""
        return self.config.model.is_hetero

    @property
    def is_link(self) -> bool:
        """Whether the model predicts edges."""
        return self.config.graph.task.name == "link"

    @property
    def encoder(self) -> Any:
        """The GNN: the whole model, or in link prediction the part that computes embeddings."""
        return self.model.encoder if self.is_link else self.model

    @cached_property
    def graph(self) -> Any:
        """The graph for message passing, a `Graph`.

        In link prediction on the heterogeneous graph of the run, it is without the held-out edges,
        unless the run is temporal by the times of the edges.
        """
        if self.is_hetero and self.is_link and self.is_own_graph:
            return split_edges_of_run(self.config, self.data).graph
        return self.data.graph

    def num_nodes(self, node_type: str = "") -> int:
        """Return N, the number of nodes of a type."""
        graph = self.data.graph
        return int(graph.nodes(node_type).num_nodes if self.is_hetero else graph.num_nodes)

    def known_nodes(self, node_type: str) -> KnownNodes:
        """Return the ids of the nodes of a type."""
        ids = self.data.node_ids if not self.is_hetero else self.data.graph.nodes(node_type).keys
        if ids is not None and self.is_hetero:
            ids = ids.astype(str).astype(object)
        return KnownNodes(ids, self.num_nodes(node_type))

    def node_ids(self, indices: Array | None = None, node_type: str = "") -> Array:
        """Return the (M,) ids of nodes, int64 or str.

        Args:
            indices: (M,) int64 node indices (0 to N - 1); None for all nodes.
            node_type: of the nodes.
        """
        ids = self.data.graph.nodes(node_type).keys if self.is_hetero else self.data.node_ids
        if ids is None:
            return np.arange(self.num_nodes(node_type)) if indices is None else indices
        if not self.is_hetero:
            integers = as_integers(ids)
            ids = np.array(ids, dtype=str) if integers is None else integers
        values: Array = ids if indices is None else ids[indices]
        return values

    @contextmanager
    def open_features(self, *, has_labels: bool = True) -> Iterator[Any]:
        """Yield the features, a `FeatureTable` or `TypedTables`, in memory that the device reads.

        Args:
            has_labels: whether rows end in the labels of the training nodes if the model reads
                them, as `append_labels` returns.
        """
        if self.is_hetero:
            with open_tables(self.data.table, self.device, Group()) as tables:
                yield tables
            return
        labels, schema = None, self.schema
        if has_labels and self.config.graph.label_inputs:
            labels = LabelInputs(self.data, schema.num_outputs, schema.is_multi_label)
        where = self.config.loading.features.name
        with feature_table(self.data, where, self.device, Group()) as table:
            yield append_labels(table, labels)

    def outputs(
        self,
        reporter: Reporter | None,
        what: str,
        *,
        nodes: Array | None = None,
        node_type: str = "",
        layer: int | None = None,
        times: Tensor | None = None,
        fanouts: Sequence[int] | None = None,
        scratch: str | Path | None = None,
        memory: int | None = None,
    ) -> Tensor:
        """Compute the outputs of the encoder, or of one of its layers, for nodes of one type.

        Args:
            reporter: shows the progress; None shows nothing.
            what: name of the work, to show.
            nodes: (M,) int64 node indices (0 to N - 1), also several times; None for all nodes.
            node_type: of the nodes.
            layer: number of the layer, from 1; None for the output of the encoder.
            times: heterogeneous graphs: (M,) times of the nodes in a temporal run; None for their
                own.
            fanouts: heterogeneous graphs: neighbours per node and edge type, input layer first;
                None for all.
            scratch, memory: other graphs: see `gcnzc.inference`.

        Returns:
            (M, columns) on the host.
        """
        bars = reporter or NullReporter()
        with self.open_features() as table, bars.task(what) as bar:
            if not self.is_hetero:
                return inference(
                    self.encoder,
                    self.graph,
                    table,
                    self.device,
                    nodes=nodes,
                    layer=layer,
                    progress=bar,
                    scratch=scratch,
                    memory=memory,
                )
            ids = np.arange(self.num_nodes(node_type)) if nodes is None else nodes
            return typed_outputs(
                Evaluated(self.encoder, table, self.device, bar),
                self.config,
                self.graph,
                self.embeddings,
                (node_type, torch.from_numpy(ids)),
                layer=layer,
                fanouts=fanouts,
                times=times,
            )


def open_trained(
    run: Path,
    source: str | Path | None = None,
    device: str = "auto",
    *,
    config: TrainConfig | None = None,
    has_labels: bool = False,
) -> Trained:
    """Load the best model of a run, and a graph.

    Args:
        run: the run folder.
        source: the folder of the graph; None for that of the run.
        device: `auto`, `cpu` or `cuda`.
        config: the options to use in place of those of the run.
        has_labels: whether the graph must have what the run's task scores.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        ValueError: the graph does not fit the model.
    """
    config = config or read_config(run)
    path = Path(source) if source else _graph_of_run(run, config)
    schema = read_schema(run)
    data: Any
    if not config.model.is_hetero:
        data = load(path, allow_nan=config.graph.allow_nan)
    elif has_labels:
        data = load_hetero(config, path)
    else:
        data = load_unlabelled(config, path, schema.target)
    check_graph(schema, data, path)
    if has_labels and config.graph.task.name == "node":
        found = schema_of(data).num_outputs
        if found != schema.num_outputs:
            raise ValueError(
                f"{path} has {found} classes or columns of labels, but the model was trained with "
                f"{schema.num_outputs}\n\nhint: without DATA, the graph of the run is evaluated"
            )
    chosen = choose_device(device)
    model = build_model(config, data, schema).to(chosen)
    if (run / CONFIG).is_file() and not (run / BEST).exists():
        raise FileNotFoundError(
            f"the run in {run} has no evaluated model yet: it has no {BEST}\n\n"
            "hint: wait for its first evaluation, of epoch 1 or of --evaluate-every; if the run "
            f"was stopped, `gcnzc train --resume {run}` resumes it"
        )
    best = checkpoint.load_best(run)
    checkpoint.match(model, best["model"], run / BEST)
    embeddings = {}
    if isinstance(data, HeteroDataset):
        embeddings = load_embeddings(run, best["epoch"], embedded_types(model, data), data)
    return Trained(
        model, config, schema, data, embeddings, chosen, best["epoch"] + 1, source is None
    )


def _graph_of_run(run: Path, config: TrainConfig) -> Path:
    """Return the folder of the graph of a run.

    Raises:
        FileNotFoundError: it does not exist.
    """
    path = config.graph.data
    assert path is not None, "read_config has checked"
    if not path.exists():
        raise FileNotFoundError(
            f"the graph of the run in {run} is not at {path}\n\n"
            "hint: give its folder as DATA, or change to the folder in which the run was started"
        )
    return path
