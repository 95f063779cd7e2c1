"""Read and write node property datasets in OGB's layout, without the `ogb` package.

    RELEASE_v1.txt
    raw/edge.csv.gz node-feat.csv.gz node-label.csv.gz num-node-list.csv.gz num-edge-list.csv.gz
    raw/data.npz node-label.npz                        instead, in binary datasets
    split/<type>/train.csv.gz valid.csv.gz test.csv.gz, or split_dict.pt
    mapping/                                           describes the nodes; copied, not read
    processed/                                         OGB's cache; not read
    task.json                                          only gcnzc: what OGB has in its master.csv

Metadata that the data files do not contain (number of classes, metric, whether each edge is stored
once) comes from `task.json`, otherwise from the `meta_dict.pt` that `ogb.io.DatasetSaver` writes,
otherwise from the catalogue. Layout and settings: https://github.com/snap-stanford/ogb, `ogb/io`
and `nodeproppred/master.csv`.

Notation: N nodes, E edges as stored, D columns of features, T tasks.
"""

import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gcnzc.datasets import catalog, csvgz
from gcnzc.datasets.member import Archive
from gcnzc.datasets.names import Names
from gcnzc.datasets.ogb_layout import (
    Task,
    check_edge_count,
    choose_split,
    find_task,
    is_link_layout,
    npz_member,
    read_edge_table,
    read_rows,
    read_split_dict,
    release_names,
)
from gcnzc.datasets.rows import (
    CHUNK_BYTES,
    Allocate,
    Array,
    Progress,
    Rows,
    as_bytes,
    no_progress,
)
from gcnzc.datasets.source import (
    SPLITS,
    EdgeDefaults,
    Source,
    guess_edge_defaults,
)
from gcnzc.datasets.store import atomic_folder, scratch_allocator

Ends: TypeAlias = tuple[Array, Array]

# files that only unsupported kinds of datasets have, and the kind
OTHER_KINDS = {
    "raw/triplet-type-list.csv.gz": "heterogeneous",
    "raw/num-node-dict.csv.gz": "heterogeneous",
    "raw/edge_index_dict.npz": "heterogeneous",
    "raw/num_nodes_dict.npz": "heterogeneous",
    "processed/paper": "heterogeneous",
    "raw/graph-label.csv.gz": "a graph-level dataset",
    "raw/graph-label.npz": "a graph-level dataset",
}


def is_layout(folder: Path) -> bool:
    """Whether `folder` looks like a dataset in OGB's layout, of any kind."""
    return (folder / "raw").is_dir() or any((folder / path).exists() for path in OTHER_KINDS)


class OgbGraph:
    """A node property dataset in OGB's layout, as a `gcnzc.datasets.source.Source`.

    Args:
        folder: contains `raw/` and `split/`.
        name: of the dataset in the catalogue; None uses the name in the folder.
        split: name of a folder in `split/`; None uses the dataset's default split, or the only one.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the dataset is of an unsupported kind, has no such split, or is damaged.
    """

    has_links = False  # whether it is a link property dataset

    def __init__(self, folder: Path, name: str | None = None, split: str | None = None) -> None:
        self.folder = folder
        self._raw = folder / "raw"
        if name is not None:
            catalog.refuse_other_kinds(name, links=self.has_links)
        self._refuse_other_kinds()
        self.binary = (self._raw / "data.npz").is_file()
        self._archive = Archive(self._raw / "data.npz") if self.binary else None
        self.num_nodes = self._read_count("num_nodes_list", "num-node-list.csv.gz")
        self.num_edges = self._read_count("num_edges_list", "num-edge-list.csv.gz")
        self._known: catalog.Entry | None = None
        self._task = self._find_task(name)
        self.name = self._task.name
        self.num_classes = self._task.num_classes
        self.metric = self._task.metric
        self.best_accuracy = self._task.best_accuracy
        self.split_name = choose_split(folder, split, self._task.split)
        self.features = self._features()

    @property
    def mapping(self) -> Path | None:
        """OGB's folder that describes the nodes, if there is one."""
        path = self.folder / "mapping"
        return path if path.is_dir() else None

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance: the folder, its release notes, licence and the origin in its metadata."""
        fields: dict[str, Any] = {"format": "ogb", "source": str(self.folder)}
        releases = sorted(self.folder.glob("RELEASE_v*.txt"))
        if releases:
            fields["release"] = releases[-1].stem
            fields["note"] = releases[-1].read_text(errors="replace")
        if self._known:
            fields["licence"] = self._known.licence
        return fields | (self._task.origin or {})

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return both directions if OGB or its examples add inverse edges; None if unknown."""
        if self._known and self._known.bidirect_directed:
            return EdgeDefaults(True, "remove", f"{self._known.name} is trained in both directions")
        stated = self._task.add_inverse_edge
        return (
            None
            if stated is None
            else EdgeDefaults(stated, "keep", f"add_inverse_edge is {stated}")
        )

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """See `Source.edges`."""
        sizes = self.num_nodes, self.num_nodes
        if self._archive:
            member = self._archive.member("edge_index")
            check_edge_count(member.where, member.shape[-1:], self.num_edges)
            return member.edges(sizes, allocate, progress)
        path = self._raw / "edge.csv.gz"
        return read_edge_table(path, sizes, self.num_edges, allocate, progress)

    def labels(self) -> Array:
        """See `Source.labels`."""
        if self.binary:
            return Archive(self._raw / "node-label.npz").array("node_label")
        # an empty line is a missing label
        return csvgz.read_table(self._raw / "node-label.csv.gz")

    def split(self) -> dict[str, Array]:
        """See `Source.split`."""
        folder = self.folder / "split" / self.split_name
        if (folder / "split_dict.pt").is_file():
            split = read_split_dict(folder / "split_dict.pt", by_type=False)
            return {part: np.asarray(split[part]) for part in SPLITS}
        return {part: csvgz.read_column(folder / f"{part}.csv.gz") for part in SPLITS}

    def _refuse_other_kinds(self) -> None:
        for path, kind in OTHER_KINDS.items():
            if (self.folder / path).exists():
                raise ValueError(
                    f"{self.folder} is {kind}: it has {path}\n\n"
                    "hint: homogeneous node property datasets are supported; gcnzc prepare and "
                    "gcnzc.graph.Graph.from_ogb read heterogeneous ones"
                )
        if is_link_layout(self.folder):
            raise ValueError(
                f"{self.folder} is a link property dataset: it has no node labels\n\n"
                "hint: gcnzc.datasets.ogb_link reads it"
            )

    def _read_count(self, key: str, file: str) -> int:
        text = self._raw / file
        counts = self._archive.array(key) if self._archive else csvgz.read_column(text)
        if len(counts) != 1:
            raise ValueError(
                f"{self.folder} contains {len(counts):,} graphs: it is a graph-level dataset\n\n"
                "hint: node property datasets of one graph are supported"
            )
        return int(counts[0])

    def _find_task(self, name: str | None) -> Task:
        # an explicit name is trusted; a name in the files must match the sizes in the catalogue
        sizes = None if name else (self.num_nodes, self.num_edges)
        for known_as in [name] if name else [self.folder.name, *release_names(self.folder)]:
            self._known = self._known or catalog.find(known_as, sizes)
        if task := find_task(self.folder, name):
            return task
        known = self._known
        if known is None:
            return Task(name or self.folder.name)
        return Task(
            known.name,
            known.num_classes,
            known.metric,
            known.stored == "once",
            known.split,
        )

    def _features(self) -> Rows | None:
        if self._archive:
            key = "node_feat"
            return self._archive.member(key).rows() if key in self._archive else None
        path = self._raw / "node-feat.csv.gz"
        return read_rows(path, self.num_nodes) if path.is_file() else None


def write_source(
    path: str | Path, source: Source, *, binary: bool = True, progress: Progress = no_progress
) -> None:
    """Write a node property dataset in OGB's layout; the folder is created atomically.

    Features are written in chunks and edges are buffered in temporary files, so that neither has to
    fit into memory. OGB's own reader does not support edges that are stored once in binary
    datasets.

    Args:
        path: the folder; must not exist.
        source: the dataset.
        binary: write uncompressed npz files instead of csv.gz.
        progress: called with counts of edges and feature rows.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: the number of feature rows is not N.
    """
    path = Path(path)
    features = source.features
    if features is not None and features.num_rows != source.num_nodes:
        raise ValueError(
            f"write: {features.num_rows:,} rows of features for {source.num_nodes:,} nodes\n\n"
            "hint: features have one row for each node"
        )
    # edges and features are in one file
    needed = 16 * source.num_edges
    if features is not None:
        needed += features.num_rows * features.num_columns * features.dtype.itemsize
    with atomic_folder(path, [needed] if binary else []) as folder:
        allocate = scratch_allocator(folder)
        labels = source.labels().reshape(source.num_nodes, -1)
        ends = source.edges(allocate, progress)
        task = {
            "name": source.name,
            "num tasks": labels.shape[1],
            "num classes": source.num_classes or max(2, int(np.nanmax(labels, initial=0)) + 1),
            "task type": "multiclass classification",
            "eval metric": "acc" if source.metric == "accuracy" else source.metric,
            "add_inverse_edge": str(
                (source.edge_defaults() or guess_edge_defaults(ends)).bidirected
            ),
            "split": source.split_name,
            "binary": str(binary),
            "best_accuracy": source.best_accuracy,
            "origin": source.origin,
        }
        for part in ("raw", "processed", f"split/{source.split_name}"):
            (folder / part).mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text(f"# Release note for {source.name}\n\n### v1\n")
        (folder / "task.json").write_text(json.dumps(task, indent=1) + "\n")
        if isinstance(source.mapping, Names):
            (folder / "mapping").mkdir()
            for file, table in source.mapping.files().items():
                table.to_csv(folder / "mapping" / file, index=False)
        elif source.mapping is not None:
            shutil.copytree(source.mapping, folder / "mapping")
        for part, ids in source.split().items():
            csvgz.write(folder / f"split/{source.split_name}/{part}.csv.gz", [ids.reshape(-1, 1)])
        writer = _write_binary if binary else _write_text
        chunks = None if features is None else _check_row_count(features, allocate, progress)
        writer(folder / "raw", ends, labels, features, chunks)


def meta_dict(path: str | Path) -> dict[str, Any]:
    """Return the `meta_dict` for OGB's `NodePropPredDataset` to open a folder of `write_source`."""
    task = json.loads((Path(path) / "task.json").read_text())
    return {
        **{key: task[key] for key in ("num tasks", "num classes", "task type", "eval metric")},
        **{key: task[key] for key in ("add_inverse_edge", "split", "binary")},
        "version": 1,
        "dir_path": str(path),
        "download_name": Path(path).name,
        "url": "",
        "is hetero": "False",
        "has_node_attr": "True",
        "has_edge_attr": "False",
        "additional node files": "None",
        "additional edge files": "None",
    }


def _write_binary(
    raw: Path, ends: Ends, labels: Array, features: Rows | None, chunks: Iterable[Array] | None
) -> None:
    num_edges = len(ends[0])
    with zipfile.ZipFile(raw / "data.npz", "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with npz_member(archive, "edge_index", (2, num_edges), np.dtype(np.int64)) as file:
            for end in ends:
                for begin in range(0, num_edges, CHUNK_BYTES // 8):
                    ids = np.asarray(end[begin : begin + CHUNK_BYTES // 8], np.int64)
                    file.write(as_bytes(ids))
        for key, count in (("num_nodes_list", len(labels)), ("num_edges_list", num_edges)):
            with npz_member(archive, key, (1,), np.dtype(np.int64)) as file:
                file.write(np.int64(count).tobytes())
        if features is not None and chunks is not None:
            shape = features.num_rows, features.num_columns
            with npz_member(archive, "node_feat", shape, features.dtype) as file:
                for chunk in chunks:
                    file.write(as_bytes(chunk))
    np.savez_compressed(raw / "node-label.npz", node_label=labels)


def _check_row_count(features: Rows, allocate: Allocate, progress: Progress) -> Iterator[Array]:
    done = 0
    for chunk in features.chunks(allocate):
        done += len(chunk)
        progress("features", done, features.num_rows)
        yield chunk.astype(features.dtype, copy=False)
    if done != features.num_rows:
        raise ValueError(
            f"write: {done:,} rows of features for {features.num_rows:,} nodes\n\n"
            "hint: the chunks must have one row for each node in total"
        )


def _write_text(
    raw: Path, ends: Ends, labels: Array, features: Rows | None, chunks: Iterable[Array] | None
) -> None:
    step = CHUNK_BYTES // 16
    csvgz.write(
        raw / "edge.csv.gz",
        (
            np.stack([end[begin : begin + step] for end in ends], axis=1)
            for begin in range(0, len(ends[0]), step)
        ),
    )
    csvgz.write(raw / "num-node-list.csv.gz", [np.array([[len(labels)]])])
    csvgz.write(raw / "num-edge-list.csv.gz", [np.array([[len(ends[0])]])])
    csvgz.write(raw / "node-label.csv.gz", [labels])
    if chunks is not None:
        csvgz.write(raw / "node-feat.csv.gz", chunks)
