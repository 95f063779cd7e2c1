"""Read node property datasets in OGB's layout, without the `ogb` package.

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

from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import catalog, csvgz
from gcnzc.datasets.member import Archive
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
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Progress,
    Rows,
)
from gcnzc.datasets.source import (
    SPLITS,
    EdgeDefaults,
)

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
                    "gcnzc.load read heterogeneous ones"
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
