"""Read heterogeneous node property datasets, such as ogbn-mag, in OGB's layout.

    RELEASE_v1.txt
    raw/num-node-dict.csv.gz             a column for each node type, with a header
    raw/triplet-type-list.csv.gz         source, relation and destination of each edge type
    raw/relations/<src>___<rel>___<dst>/
        edge.csv.gz num-edge-list.csv.gz
        edge-feat.csv.gz edge_time.csv.gz edge_year.csv.gz edge_weight.csv.gz       optional
    raw/node-feat/<type>/
        node-feat.csv.gz node_time.csv.gz node_year.csv.gz                          optional
    raw/nodetype-has-label.csv.gz        a column for each node type, with a header
    raw/node-label/<type>/node-label.csv.gz
    raw/edge_index_dict.npz num_nodes_dict.npz num_edges_dict.npz node_feat_dict.npz
        edge_feat_dict.npz node_time_dict.npz ... node-label.npz    instead, in binary datasets
    split/<name>/nodetype-has-split.csv.gz
    split/<name>/<type>/train.csv.gz valid.csv.gz test.csv.gz, or split/<name>/split_dict.pt
    task.json                            only gcnzc: what OGB has in its master.csv

Years are times, too. Other additional files, such as the number of the relation in `edge_reltype`,
are not read. Layout: https://github.com/snap-stanford/ogb, `ogb/io`.

Notation: N nodes of a type, E edges of a type.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import csvgz
from gcnzc.datasets.hetero_arrays import EdgeType, HeteroArrays
from gcnzc.datasets.member import Archive
from gcnzc.datasets.ogb_layout import (
    Task,
    choose_split,
    find_task,
    is_link_layout,
    read_split_dict,
    release_names,
)
from gcnzc.datasets.rows import Allocate, Array, Progress, Rows, no_progress
from gcnzc.datasets.source import SPLITS, check_ends, node_dtype

JOIN = "___"
# files that only heterogeneous datasets have
_TEXT_FILES = ("triplet-type-list.csv.gz", "num-node-dict.csv.gz")
_BINARY_FILES = ("edge_index_dict.npz", "num_nodes_dict.npz")
# names of additional files with times, without `node_` and `edge_`
TIMES = ("time", "year")
_HINT = "hint: download or write the dataset again"


@dataclass(frozen=True)
class Known:
    """Settings of a dataset in OGB's `nodeproppred/master.csv`, and its number of nodes."""

    num_nodes: int
    num_classes: int
    split: str


KNOWN = {"ogbn-mag": Known(1_939_743, 349, "time")}


def is_hetero_name(name: str) -> bool:
    """Whether `name` is that of a heterogeneous node property dataset of OGB."""
    return name.lower().replace("_", "-") in KNOWN


def is_hetero_layout(folder: Path) -> bool:
    """Whether `folder` looks like a heterogeneous node property dataset in OGB's layout."""
    return any((folder / "raw" / name).is_file() for name in (*_TEXT_FILES, *_BINARY_FILES))


class OgbHetero:
    """A heterogeneous node property dataset in OGB's layout: sizes now, arrays by `read`.

    Args:
        folder: contains `raw/` and `split/`.
        name: of the dataset; None uses the name in the folder.
        split: name of a folder in `split/`; None uses the dataset's default split, or the only one.

    Attributes:
        num_nodes: N of each node type.
        num_edges: E of each edge type.
        name: of the dataset.
        num_classes: number of classes of each task; None if the files do not contain it.
        best_accuracy: upper bound for the accuracy of any model, if the dataset is generated.
        split_name: name of the split.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, there is no such split, or it is a link property dataset.
    """

    def __init__(self, folder: Path, name: str | None = None, split: str | None = None) -> None:
        self.folder = folder
        self._raw = folder / "raw"
        if is_link_layout(folder):
            raise ValueError(
                f"{folder} is a heterogeneous link property dataset: it has no node labels\n\n"
                "hint: its split of the edges is not supported; HeteroGraph.from_arrays takes the "
                "arrays of raw/, and gcnzc train --task link holds out edges itself"
            )
        self.binary = any((self._raw / name).is_file() for name in _BINARY_FILES)
        self.num_nodes, self.num_edges = self._read_sizes()
        self._task = self._find_task(name)
        self.name, self.num_classes = self._task.name, self._task.num_classes
        self.best_accuracy = self._task.best_accuracy
        self.split_name = choose_split(folder, split, self._task.split)

    def _find_task(self, name: str | None) -> Task:
        for known_as in [name] if name else [self.folder.name, *release_names(self.folder)]:
            known = KNOWN.get(known_as.replace("_", "-"))
            # a name in the files must match the sizes
            if known and (name or known.num_nodes == sum(self.num_nodes.values())):
                own = Task(known_as, known.num_classes, split=known.split)
                return find_task(self.folder, name) or own
        return find_task(self.folder, name) or Task(name or self.folder.name)

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance: the folder, and the origin in its metadata."""
        return {"format": "ogb", "source": str(self.folder)} | (self._task.origin or {})

    def read(self, progress: Progress = no_progress) -> HeteroArrays:
        """Read the arrays; features are read when their chunks are requested.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or an id is out of range; the message names the file.
        """
        edges = {each: self._edges(each, progress) for each in self.num_edges}
        return HeteroArrays(
            self.name,
            self.num_nodes,
            edges,
            node_features=self._node_features(),
            edge_features=self._edge_features(),
            labels=self._labels(),
            split=self._split(),
            node_time=self._node_times(),
            edge_time=self._edge_times(),
            edge_weight=self._edge_weights(),
            num_classes=self.num_classes,
            metric=self._task.metric,
            split_name=self.split_name,
            best_accuracy=self.best_accuracy,
            origin=self.origin,
        )

    # sizes

    def _read_sizes(self) -> tuple[dict[str, int], dict[EdgeType, int]]:
        if self.binary:
            archive = Archive(self._raw / "num_nodes_dict.npz")
            nodes = {each: _count(archive.array(each), archive.path) for each in archive.keys}
            archive = Archive(self._raw / "num_edges_dict.npz")
            types = {_parse_type(key, archive.path): key for key in archive.keys}
            edges = {each: _count(archive.array(key), archive.path) for each, key in types.items()}
        else:
            path = self._raw / "num-node-dict.csv.gz"
            nodes = {each: _count(values, path) for each, values in csvgz.read_header(path).items()}
            path = self._raw / "triplet-type-list.csv.gz"
            edges = {}
            for words in csvgz.read_words(path, 3):
                own = self._folder_of((words[0], words[1], words[2])) / "num-edge-list.csv.gz"
                edges[words[0], words[1], words[2]] = _count(csvgz.read_column(own), own)
        for each in edges:
            unknown = [end for end in (each[0], each[2]) if end not in nodes]
            if unknown:
                raise ValueError(
                    f"{self.folder}: edge type {each} has the node type {unknown[0]!r}, which has "
                    f"no number of nodes\n\nhint: the node types are {', '.join(nodes)}"
                )
        return dict(sorted(nodes.items())), dict(sorted(edges.items()))

    def _folder_of(self, edge_type: EdgeType) -> Path:
        return self._raw / "relations" / JOIN.join(edge_type)

    # edges and nodes

    def _edges(self, edge_type: EdgeType, progress: Progress) -> tuple[Array, Array]:
        sizes = self.num_nodes[edge_type[0]], self.num_nodes[edge_type[2]]
        count = self.num_edges[edge_type]
        if self.binary:
            path = self._raw / "edge_index_dict.npz"
            table = Archive(path).array(JOIN.join(edge_type))
            if table.ndim != 2 or table.shape[0] != 2 or table.dtype.kind not in "iu":
                raise ValueError(
                    f"{path}: the edges of {edge_type} have shape {table.shape} and type "
                    f"{table.dtype}\n\nhint: (2, edges) integers"
                )
            chunks: Iterable[Array] = [table.T]
        else:
            path = self._folder_of(edge_type) / "edge.csv.gz"
            chunks = csvgz.read_integers(path, 2)
        ends = np.empty(count, node_dtype(sizes[0])), np.empty(count, node_dtype(sizes[1]))
        done = 0
        for chunk in chunks:
            stop = done + len(chunk)
            for end, ids, size, kind in zip(
                ends, chunk.T, sizes, (edge_type[0], edge_type[2]), strict=True
            ):
                check_ends(ids, size, f"{path}, edge type {edge_type}, node type {kind!r}", done)
                if stop <= count:
                    end[done:stop] = ids
            done = stop
            progress(f"edges {edge_type[1]}", done, count)
        if done != count:
            raise ValueError(
                f"{path} has {done:,} edges of type {edge_type}, but the stored number of edges is "
                f"{count:,}\n\n{_HINT}"
            )
        return ends

    def _node_features(self) -> dict[str, Rows]:
        if self.binary:
            return {
                self._node_type(key, where): rows
                for key, rows, where in self._members("node_feat_dict")
            }
        found = {}
        for each, count in self.num_nodes.items():
            path = self._raw / "node-feat" / each / "node-feat.csv.gz"
            if path.is_file():
                found[each] = _rows_of(path, count)
        return found

    def _edge_features(self) -> dict[EdgeType, Rows]:
        if self.binary:
            return {
                self._edge_type(key, where): rows
                for key, rows, where in self._members("edge_feat_dict")
            }
        found = {}
        for each, count in self.num_edges.items():
            path = self._folder_of(each) / "edge-feat.csv.gz"
            if path.is_file():
                found[each] = _rows_of(path, count)
        return found

    def _members(self, name: str) -> Iterator[tuple[str, Rows, Path]]:
        path = self._raw / f"{name}.npz"
        if path.is_file():
            archive = Archive(path)
            for key in archive.keys:
                yield key, archive.member(key).rows(), path

    def _node_times(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for what in TIMES:
            if self.binary:
                for own, values, where in self._vectors(f"node_{what}_dict"):
                    each = self._node_type(own, where)
                    found.setdefault(each, _times(values, self.num_nodes[each], where))
                continue
            for each, count in self.num_nodes.items():
                path = self._raw / "node-feat" / each / f"node_{what}.csv.gz"
                if path.is_file():
                    found.setdefault(each, _times(csvgz.read_column(path), count, path))
        return found

    def _edge_times(self) -> dict[EdgeType, Array]:
        found: dict[EdgeType, Array] = {}
        for what in TIMES:
            if self.binary:
                for own, values, where in self._vectors(f"edge_{what}_dict"):
                    each = self._edge_type(own, where)
                    found.setdefault(each, _times(values, self.num_edges[each], where))
                continue
            for each, count in self.num_edges.items():
                path = self._folder_of(each) / f"edge_{what}.csv.gz"
                if path.is_file():
                    found.setdefault(each, _times(csvgz.read_column(path), count, path))
        return found

    def _edge_weights(self) -> dict[EdgeType, Array]:
        found = {}
        if self.binary:
            for own, values, where in self._vectors("edge_weight_dict"):
                each = self._edge_type(own, where)
                found[each] = _column(values, self.num_edges[each], where)
            return found
        for each, count in self.num_edges.items():
            path = self._folder_of(each) / "edge_weight.csv.gz"
            if path.is_file():
                found[each] = _column(csvgz.read_table(path), count, path)
        return found

    def _vectors(self, name: str) -> Iterator[tuple[str, Array, Path]]:
        path = self._raw / f"{name}.npz"
        if path.is_file():
            archive = Archive(path)
            for key in archive.keys:
                yield key, archive.array(key), path

    def _node_type(self, name: str, where: Path) -> str:
        if name not in self.num_nodes:
            raise ValueError(
                f"{where} has the node type {name!r}\n\n"
                f"hint: the node types are {', '.join(self.num_nodes)}"
            )
        return name

    def _edge_type(self, name: str, where: Path) -> EdgeType:
        found = _parse_type(name, where)
        if found not in self.num_edges:
            raise ValueError(
                f"{where} has the edge type {found}\n\n"
                f"hint: the edge types are {', '.join(map(str, self.num_edges))}"
            )
        return found

    # labels and splits

    def _labels(self) -> dict[str, Array]:
        if self.binary:
            archive = Archive(self._raw / "node-label.npz")
            return {
                self._node_type(key, archive.path): self._check_labels(
                    key, archive.array(key), archive.path
                )
                for key in archive.keys
            }
        path = self._raw / "nodetype-has-label.csv.gz"
        found = {}
        for each in self._marked(path):
            own = self._raw / "node-label" / each / "node-label.csv.gz"
            # an empty line is a missing label
            found[each] = self._check_labels(each, csvgz.read_table(own), own)
        return found

    def _check_labels(self, node_type: str, labels: Array, path: Path) -> Array:
        if len(labels) != self.num_nodes[node_type]:
            raise ValueError(
                f"{path} has {len(labels):,} labels for {self.num_nodes[node_type]:,} nodes of "
                f"type {node_type!r}\n\n{_HINT}"
            )
        return labels

    def _split(self) -> dict[str, dict[str, Array]]:
        folder = self.folder / "split" / self.split_name
        path = folder / "split_dict.pt"
        found: dict[str, dict[str, Array]]
        if path.is_file():
            fields = read_split_dict(path, by_type=True)
            found = {
                part: {
                    self._node_type(str(each), path): np.asarray(ids)
                    for each, ids in fields[part].items()
                }
                for part in SPLITS
            }
        else:
            path = folder
            marked = self._marked(folder / "nodetype-has-split.csv.gz")
            found = {
                part: {each: csvgz.read_column(folder / each / f"{part}.csv.gz") for each in marked}
                for part in SPLITS
            }
        for part, by_type in found.items():
            for each, ids in by_type.items():
                _check_ids(ids, self.num_nodes[each], f"{path}: the {part} split of {each!r}")
        return found

    def _marked(self, path: Path) -> list[str]:
        """Return the node types with True in a file with a header."""
        return [self._node_type(each, path) for each, is_set in csvgz.read_flags(path) if is_set]


def _parse_type(name: str, path: Path) -> EdgeType:
    parts = name.split(JOIN)
    if len(parts) != 3:
        raise ValueError(
            f"{path} has the edge type {name!r}\n\n"
            f"hint: source, relation and destination joined by {JOIN!r}"
        )
    return parts[0], parts[1], parts[2]


def _count(values: Array, path: Path) -> int:
    """Return the number of nodes or edges in a dataset of one graph."""
    if values.shape != (1,) or values.dtype.kind not in "iu" or values[0] < 0:
        raise ValueError(
            f"{path} has the numbers {values.tolist()!r:.100}\n\n"
            "hint: one number of nodes or edges for each type; datasets of several graphs are not "
            "supported"
        )
    return int(values[0])


def _rows_of(path: Path, count: int) -> Rows:
    columns = csvgz.count_columns(path)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        return csvgz.read(path, np.float64, columns)

    # values are parsed as float64, then rounded, as in OGB
    return Rows(count, columns, np.dtype(np.float64), chunks, str(path))


def _column(values: Array, count: int, path: Path) -> Array:
    if values.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"{path} has shape {values.shape}\n\n"
            f"hint: one column with a value for each of {count:,} nodes or edges"
        )
    return values.reshape(count)


def _times(values: Array, count: int, path: Path) -> Array:
    column = _column(values, count, path)
    if column.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = column == column.astype(np.int64)
        if not whole.all():
            raise ValueError(
                f"{path} has the time {column[~whole][0]}\n\nhint: times are integers, without gaps"
            )
    return column.astype(np.int64)


def _check_ids(ids: Array, count: int, where: str) -> None:
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(
            f"{where} has shape {ids.shape} and type {ids.dtype}\n\nhint: a vector of node ids"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        wrong = ids[(ids < 0) | (ids >= count)][0]
        raise ValueError(
            f"{where} contains node {wrong}, but nodes are 0 to {count - 1}\n\n"
            "hint: ids start at 0 in each type"
        )
