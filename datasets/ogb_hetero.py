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

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import csvgz
from gcnzc.datasets.member import Archive, Member
from gcnzc.datasets.ogb_layout import (
    Task,
    check_edge_count,
    choose_split,
    find_task,
    is_link_layout,
    read_edge_table,
    read_rows,
    read_split_dict,
    release_names,
)
from gcnzc.datasets.rows import Array, Progress, Rows, allocate_in_memory, no_progress
from gcnzc.datasets.source import SPLITS, EdgeType, HeteroArrays

JOIN = "___"
# files that only heterogeneous datasets have
_TEXT_FILES = ("triplet-type-list.csv.gz", "num-node-dict.csv.gz")
_BINARY_FILES = ("edge_index_dict.npz", "num_nodes_dict.npz")
# names of additional files with times, without `node_` and `edge_`
TIMES = ("time", "year")


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
                "hint: its split of the edges is not supported; Graph.from_arrays takes the "
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
            node_features=self._features("node"),
            edge_features=self._features("edge"),
            labels=self._labels(),
            split=self._split(),
            node_time=self._times("node"),
            edge_time=self._times("edge"),
            edge_weight=self._weights(),
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
            member = Archive(self._raw / "edge_index_dict.npz").member(JOIN.join(edge_type))
            check_edge_count(member.where, member.shape[-1:], count)
            return member.edges(sizes, allocate_in_memory, progress)
        path = self._folder_of(edge_type) / "edge.csv.gz"
        return read_edge_table(path, sizes, count, allocate_in_memory, progress)

    def _values(self, kind: str, name: str) -> Iterator[tuple[Any, int, Path, Member | None]]:
        """Yield the types that have values for their nodes or edges.

        Args:
            kind: "node" or "edge".
            name: of the values: "feat", "time", "year" or "weight".

        Yields:
            The type, its number of nodes or edges, the file, and the array in it; None for text.
        """
        sizes: dict[Any, int] = dict(self.num_nodes if kind == "node" else self.num_edges)
        if self.binary:
            path = self._raw / f"{kind}_{name}_dict.npz"
            archive = Archive(path) if path.is_file() else None
            for key in archive.keys if archive else ():
                each = self._type_of(kind, key, path)
                yield each, sizes[each], path, Member(path, key)
            return
        file = f"{kind}-feat.csv.gz" if name == "feat" else f"{kind}_{name}.csv.gz"
        for each, count in sizes.items():
            folder = self._raw / "node-feat" / each if kind == "node" else self._folder_of(each)
            if (folder / file).is_file():
                yield each, count, folder / file, None

    def _features(self, kind: str) -> dict[Any, Rows]:
        return {
            each: read_rows(path, count) if member is None else member.rows()
            for each, count, path, member in self._values(kind, "feat")
        }

    def _times(self, kind: str) -> dict[Any, Array]:
        found: dict[Any, Array] = {}
        for name in TIMES:
            for each, count, path, member in self._values(kind, name):
                values = csvgz.read_column(path) if member is None else member.in_memory()
                found.setdefault(each, _as_times(values, count, path))
        return found

    def _weights(self) -> dict[EdgeType, Array]:
        found = {}
        for each, count, path, member in self._values("edge", "weight"):
            values = csvgz.read_table(path) if member is None else member.in_memory()
            found[each] = _column(values, count, path)
        return found

    def _type_of(self, kind: str, name: str, where: Path) -> Any:
        """Return the node type or edge type of a name in a file."""
        found = name if kind == "node" else _parse_type(name, where)
        types: list[Any] = list(self.num_nodes if kind == "node" else self.num_edges)
        if found not in types:
            raise ValueError(
                f"{where} has the {kind} type {found!r}\n\n"
                f"hint: the {kind} types are {', '.join(map(str, types))}"
            )
        return found

    # labels and splits

    def _labels(self) -> dict[str, Array]:
        if self.binary:
            archive = Archive(self._raw / "node-label.npz")
            return {
                self._type_of("node", key, archive.path): archive.array(key) for key in archive.keys
            }
        marked = self._marked(self._raw / "nodetype-has-label.csv.gz")
        # an empty line is a missing label
        return {
            each: csvgz.read_table(self._raw / "node-label" / each / "node-label.csv.gz")
            for each in marked
        }

    def _split(self) -> dict[str, dict[str, Array]]:
        folder = self.folder / "split" / self.split_name
        path = folder / "split_dict.pt"
        if path.is_file():
            fields = read_split_dict(path, by_type=True)
            return {
                part: {
                    self._type_of("node", str(each), path): np.asarray(ids)
                    for each, ids in fields[part].items()
                }
                for part in SPLITS
            }
        marked = self._marked(folder / "nodetype-has-split.csv.gz")
        return {
            part: {each: csvgz.read_column(folder / each / f"{part}.csv.gz") for each in marked}
            for part in SPLITS
        }

    def _marked(self, path: Path) -> list[str]:
        """Return the node types with True in a file with a header."""
        return [
            self._type_of("node", each, path) for each, is_set in csvgz.read_flags(path) if is_set
        ]


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


def _column(values: Array, count: int, path: Path) -> Array:
    if values.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"{path} has shape {values.shape}\n\n"
            f"hint: one column with a value for each of {count:,} nodes or edges"
        )
    return values.reshape(count)


def _as_times(values: Array, count: int, path: Path) -> Array:
    column = _column(values, count, path)
    if column.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = column == column.astype(np.int64)
        if not whole.all():
            raise ValueError(
                f"{path} has the time {column[~whole][0]}\n\nhint: times are integers, without gaps"
            )
    return column.astype(np.int64)
