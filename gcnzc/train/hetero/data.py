"""The heterogeneous graph of a run, with the labels and splits of its target."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import gcnzc
from gcnzc.datasets.names import Names
from gcnzc.datasets.source import check_metric, choose_metric
from gcnzc.datasets.store import AGAIN, is_hetero, is_prepared, read_meta
from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.folder import check_targets
from gcnzc.graph.folder import info as read_info
from gcnzc.graph.graph import Graph, TimeKind
from gcnzc.graph.stores import EdgeType, NodeStore
from gcnzc.train.config import HETERO_MODELS, TrainConfig
from gcnzc.train.shared_data import load_shared, share_copy


@dataclass(frozen=True)
class TypedTables:
    """The features of all node types that have some, in host memory."""

    tables: Mapping[str, FeatureTable]

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return torch.device("cpu")

    def gathered_bytes(self, nodes: Mapping[str, Tensor]) -> int:
        """Return the bytes of the rows that were gathered for the nodes of a minibatch."""
        return sum(len(nodes[name]) * table.row_bytes for name, table in self.tables.items())


@contextmanager
def open_tables(tables: TypedTables, device: torch.device, group: Group) -> Iterator[TypedTables]:
    """Provide features in memory that a device can read: page-locked for a GPU.

    Sparse features remain as they are, because the CPU gathers them.

    Args:
        tables: the features of a graph, the same on all workers.
        device: of the minibatches.
        group: all workers; those of a machine share one copy if the driver needs a copy.

    Raises:
        RuntimeError, WorkerLost: as `gcnzc.pinned` and `gcnzc.train.shared_data.share_copy` do.
    """
    with ExitStack() as locks:
        found = dict(tables.tables)
        for name, table in tables.tables.items():
            if device.type == "cuda" and not table.is_sparse:
                found[name] = locks.enter_context(pinned(share_copy(table, group)))
        yield TypedTables(found)


@dataclass(frozen=True)
class HeteroDataset:
    """A heterogeneous graph, and what a run predicts on it.

    Attributes:
        graph: memory-mapped from `folder`.
        target: the node type whose nodes are classified; empty in link prediction.
        labels: of the nodes of the target, as in `gcnzc.Dataset`.
        split: "train", "valid", "test": int64 ids of labelled nodes of the target.
        num_classes: of each label column.
        metric: selects the best model.
        folder: of the graph.
    """

    graph: Graph
    target: str
    labels: Tensor
    split: dict[str, Tensor]
    num_classes: int
    metric: str
    folder: Path
    edge_type: EdgeType | None = None
    """in link prediction, of the edges to predict"""
    reverse_types: Sequence[EdgeType] | None = None
    """in link prediction, of their reverse edges; None to find them"""
    best_accuracy: float | None = None
    links: None = None

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.graph.name

    @cached_property
    def names(self) -> Names:
        """Names of the classes of the target; features have none."""
        return Names(classes=self.graph.nodes(self.target).classes) if self.target else Names()

    @cached_property
    def table(self) -> TypedTables:
        """The features by node type."""
        found = {name: self.graph.nodes(name).table for name in self.graph.node_types}
        return TypedTables({name: table for name, table in found.items() if table is not None})


def load_data(config: TrainConfig, group: Group) -> Dataset | HeteroDataset:
    """Load the graph of a run on all workers, as `load_shared` does.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `load_shared` does.
        ValueError: the model is for graphs with another number of node types.
    """
    path = config.graph.data
    assert path is not None, "`train` has checked"
    if not config.model.is_hetero:
        if is_hetero(path):
            raise ValueError(
                f"--model {config.model.model.name} is for graphs of one node type, and {path} has "
                f"several\n\nhint: use --model {' or '.join(HETERO_MODELS)}"
            )
        return load_shared(path, group, allow_nan=config.graph.allow_nan)
    group.set_status(0, "loading")
    with joint_work(group):
        return load_hetero(config, path)


def load_hetero(config: TrainConfig, path: Path) -> HeteroDataset:
    """Memory-map the heterogeneous graph of a run.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: the graph has one node type, or no labels for the task, or no times that count,
            or is damaged.
    """
    _check_folder(config, path)
    graph = _open_graph(config, path)
    if config.graph.task.name == "link":
        return _data_of_links(config, graph, path)
    target = _find_target(config, graph, path)
    nodes = graph.nodes(target)
    assert nodes.labels is not None, "`_find_target` has checked"
    # loading does not read them
    check_targets(f"{path}, node type {target!r}", nodes)
    labels = nodes.labels
    if labels.is_floating_point() and labels.ndim == 1:
        raise ValueError(
            f"the labels of node type {target!r} in {path} are floating-point numbers, and there "
            "is no task of regression\n\nhint: integers are classes; (N, T) columns of 0 and 1 are "
            "several labels"
        )
    split = {name: _labelled(nodes, labels, name) for name in ("train", "valid", "test")}
    for name in ("valid", "test") if len(split["train"]) else ():
        if not len(split[name]):
            raise ValueError(
                f"no node of type {target!r} in the {name} split of {path} has a label\n\n"
                "hint: Graph.from_arrays takes the train, valid and test split of a type"
            )
    num_classes = 2 if labels.ndim == 2 else _count_classes(nodes, labels, path)
    stored = read_info(path)["origin"].get("metric", "accuracy")
    metric = check_metric(choose_metric(labels.numpy(), stored), labels.numpy(), num_classes)
    return HeteroDataset(graph, target, labels, split, num_classes, metric, path)


def _count_classes(nodes: NodeStore, labels: Tensor, path: Path) -> int:
    """Return the number of classes, some of which may have a name but no nodes."""
    last = max(int(labels.max()), 0)
    if nodes.classes is None:
        return last + 1
    if last >= len(nodes.classes):
        raise ValueError(
            f"{path} has {len(nodes.classes)} names of classes, and the label {last}\n\n"
            "hint: prepare the folder again from its source"
        )
    return len(nodes.classes)


def load_unlabelled(config: TrainConfig, path: Path, target: str | None) -> HeteroDataset:
    """Memory-map a graph to predict on, which needs no labels.

    Args:
        config: options of the run.
        path: folder of the graph.
        target: the node type that the model classifies; None to find it as `load_hetero` does.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: the graph has one node type, or does not have the type to predict, or no times
            that count.
    """
    _check_folder(config, path)
    graph = _open_graph(config, path)
    if config.graph.task.name == "link":
        return _data_of_links(config, graph, path)
    target = target or _find_target(config, graph, path)
    if target not in graph.node_types:
        raise ValueError(
            f"{path} has no nodes of type {target!r}, which the model classifies\n\n"
            f"hint: the node types are {', '.join(graph.node_types)}"
        )
    none = torch.full((graph.nodes(target).num_nodes,), -1)
    split = dict(graph.nodes(target).split)
    return HeteroDataset(graph, target, none, split, 1, "accuracy", path)


def _check_folder(config: TrainConfig, path: Path) -> None:
    """Check that a folder has a heterogeneous graph."""
    if not path.exists():
        raise FileNotFoundError(
            f"there is no folder {path}\n\nhint: gcnzc.prepare(graph, dest) writes one"
        )
    if not is_hetero(path):
        if is_prepared(path):
            # a damaged folder has no kind, and this names its file
            read_meta(path)
        if any((path / kind / "0").is_dir() for kind in ("nodes", "edges")):
            raise FileNotFoundError(
                f"{path} has folders of a heterogeneous graph, but no meta.json\n\n{AGAIN}"
            )
        raise ValueError(
            f"--model {config.model.model.name} is for graphs with several node types, and {path} "
            "has no prepared graph of this kind\n\n"
            "hint: `gcnzc prepare` and gcnzc.prepare(graph, dest) write one; other graphs have "
            "other models, such as sage"
        )


def _open_graph(config: TrainConfig, path: Path) -> Graph:
    """Memory-map a graph; in a temporal run, its columns are sorted by the times that count.

    A folder's columns are sorted for `both`. Columns that are not sorted for the option `time`
    are copied to memory.

    Raises:
        ValueError: the option `time` of --temporal is edge or node, and there are no such times.
    """
    graph = gcnzc.load(path).graph
    kind = config.graph.time_kind
    if kind == "both":
        return graph
    if not _has_times(graph, kind):
        of = {"edge": "edge", "node": "source of an edge"}[kind]
        other: TimeKind = "node" if kind == "edge" else "edge"
        name = config.graph.temporal.name
        has_other = _has_times(graph, other)
        remedy = f"--temporal {name}:time={other}" if has_other else "omit --temporal"
        raise ValueError(
            f"--temporal {config.graph.temporal}: no {of} in {path} has a time\n\nhint: {remedy}"
        )
    return graph.sort_by_time(kind)


def _has_times(graph: Graph, kind: TimeKind) -> bool:
    """Whether an edge type has times of a kind, "edge" or "node"."""
    return any(graph.times(each, kind) != (None, None) for each in graph.edge_types)


def _data_of_links(config: TrainConfig, graph: Graph, path: Path) -> HeteroDataset:
    edge_type = _find_edge_type(config, graph)
    none = torch.full((1,), -1)
    reverse_types = _parse_reverse_types(config, graph, edge_type)
    return HeteroDataset(
        graph, "", none, {}, 1, "mrr", path, edge_type, reverse_types=reverse_types
    )


def _find_target(config: TrainConfig, graph: Graph, path: Path) -> str:
    """Return the node type to classify."""
    labelled = [name for name in graph.node_types if graph.nodes(name).labels is not None]
    target: str = config.graph.task["target"]
    if target:
        if target not in graph.node_types:
            raise ValueError(
                f"--task node:target={target}: {path} has no such node type\n\n"
                f"hint: the node types are {', '.join(graph.node_types)}"
            )
        if target not in labelled:
            raise ValueError(
                f"--task node:target={target}: these nodes of {path} have no labels\n\n"
                f"hint: labels are of {', '.join(labelled) or 'no node type'}"
            )
        return target
    if len(labelled) != 1:
        raise ValueError(
            f"{path} has {len(labelled)} node types with labels\n\n"
            f"hint: --task node:target={' or target='.join(labelled)}"
            if labelled
            else f"no node type of {path} has labels to train on\n\n"
            "hint: Graph.from_arrays takes labels and split of a node type"
        )
    return labelled[0]


def _find_edge_type(config: TrainConfig, graph: Graph) -> EdgeType:
    """Return the type of the edges to predict."""
    given: str = config.graph.task["edge_type"]
    if not given:
        if len(graph.edge_types) != 1:
            raise ValueError(
                f"{graph.name} has {len(graph.edge_types)} edge types to predict\n\nhint: "
                f"--task link:edge_type={' or '.join(','.join(each) for each in graph.edge_types)}"
            )
        return graph.edge_types[0]
    parts = tuple(part.strip() for part in given.split(","))
    try:
        return graph.edge_type(parts if len(parts) == 3 else given)
    except ValueError as error:
        raise ValueError(f"--task link:edge_type={given}: {error}") from None


def _parse_reverse_types(
    config: TrainConfig, graph: Graph, edge_type: EdgeType
) -> list[EdgeType] | None:
    """Return the given edge types of the reverse edges; None to find them."""
    given: str = config.graph.task["reverse_types"]
    if given in ("auto", "none"):
        return None if given == "auto" else []
    names = [name.strip() for name in given.split(",")]
    found: list[EdgeType] = []
    while names:
        # three names are an edge type if the graph has it, and otherwise relations
        triple = "__".join(names[:3])
        size = 3 if triple in map("__".join, graph.edge_types) else 1
        try:
            other = graph.edge_type(triple if size == 3 else names[0])
        except ValueError as error:
            raise ValueError(f"--task link:reverse_types={given}: {error}") from None
        if other[::2] != edge_type[::-2]:
            raise ValueError(
                f"--task link:reverse_types={given}: {other} does not go from {edge_type[2]!r} to "
                f"{edge_type[0]!r}\n\nhint: give the reverse edges of {edge_type}; none if there "
                "are none"
            )
        if other not in found:
            found.append(other)
        names = names[size:]
    return found


def _labelled(nodes: NodeStore, labels: Tensor, name: str) -> Tensor:
    """Return the nodes of a split that have a label."""
    ids = nodes.split.get(name, torch.empty(0, dtype=torch.int64))
    if labels.is_floating_point():
        return ids[~torch.isnan(labels[ids]).all(dim=1)]
    known = labels[ids] >= 0
    return ids[known if labels.ndim == 1 else known.any(dim=1)]
