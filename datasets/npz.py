"""Read a dataset from an `.npz` archive of plain arrays.

- `edge_index`: (2, E) sources and targets;
- `node_label`: (N,), -1 for no label;
- features: `node_feat` (N, D), or the CSR arrays `feat_data`, `feat_indices`, `feat_indptr` and
  `feat_shape`;
- splits: `train_idx`, `valid_idx` and `test_idx`; with the prefix `made_` if the split is not
  the dataset's standard one; or several splits as `train_masks`, `val_masks` and `test_masks`,
  (splits, N) bool;
- neither `node_label` nor a split, in a graph to predict on or for link prediction, whose features
  give the number of nodes;
- `bidirected`: whether each edge is stored once and means both directions; OGB's name for this,
  `add_inverse_edge`, is read too.

Archives are read without pickle.
"""

from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import catalog
from gcnzc.datasets.member import Archive
from gcnzc.datasets.rows import Allocate, Array, Csr, Progress, Rows, rows_from_csr
from gcnzc.datasets.source import SPLITS, EdgeDefaults, Metric


class NpzGraph:
    """A dataset in an `.npz` archive, as a `gcnzc.datasets.source.Source`.

    Args:
        path: of the archive.
        name: of the dataset; None uses the name of the file. The catalogue provides the metric and
            the number of classes of names that it has.
        split: "standard", "made", or the index of a row of the masks; None uses the first of these
            that the archive has.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the archive is damaged or lacks an array, or has no such split.
    """

    best_accuracy: float | None = None
    mapping: Path | None = None

    def __init__(self, path: Path, name: str | None = None, split: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem
        self._archive = Archive(path)
        self._is_labelled = "node_label" in self._archive or bool(self._splits())
        rows_key = "node_feat" if "node_feat" in self._archive else "feat_indptr"
        sized_by = "node_label" if self._is_labelled or rows_key not in self._archive else rows_key
        for key in ("edge_index", sized_by):
            if key not in self._archive:
                raise ValueError(
                    f"{path} has no array {key}\n\n"
                    f"hint: it has {', '.join(self._archive.keys) or 'no arrays'}; required are "
                    "edge_index, node_label, train_idx, valid_idx and test_idx, or to predict only "
                    "edge_index and features"
                )
        self.num_nodes = self._length(sized_by) - (sized_by == "feat_indptr")
        self._edges = self._archive.member("edge_index")
        self.num_edges = self._edges.shape[-1] if self._edges.shape else 0
        if self.num_edges == 0:
            raise ValueError(
                f"{path} has no edges: edge_index has shape {self._edges.shape}\n\n"
                "hint: edges are (2, edges) integers: sources, then targets"
            )
        known = catalog.find(self.name, None if name else (self.num_nodes, self.num_edges))
        self._known = known
        self.num_classes = known.num_classes if known else None
        self.metric: Metric = known.metric if known else "accuracy"
        self.split_name = _choose_split(self._splits(), split, path)
        self.features = self._features()

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance: the archive, its licence, and the text of `origin.txt` in its folder."""
        fields: dict[str, Any] = {"format": "npz", "source": str(self.path)}
        if self._known:
            fields["licence"] = self._known.licence
        note = self.path.with_name("origin.txt")
        if note.is_file():
            fields["note"] = note.read_text(errors="replace")
        return fields

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return both directions if each edge is stored once; None if unknown."""
        if self._known and self._known.bidirect_directed:
            return EdgeDefaults(True, "remove", f"{self._known.name} is trained in both directions")
        given = {
            key: self._read_bool(key)
            for key in ("bidirected", "add_inverse_edge")
            if key in self._archive
        }
        if len(set(given.values())) > 1:
            raise ValueError(
                f"{self.path}: bidirected is {given['bidirected']}, but add_inverse_edge is "
                f"{given['add_inverse_edge']}\n\nhint: they mean the same; remove one of them"
            )
        for key, is_bidirected in given.items():
            return EdgeDefaults(is_bidirected, "keep", f"{key} is {is_bidirected}")
        return None

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """See `Source.edges`."""
        return self._edges.edges((self.num_nodes, self.num_nodes), allocate, progress)

    def labels(self) -> Array:
        """See `Source.labels`; -1 for all nodes if there are none."""
        if not self._is_labelled:
            return np.full(self.num_nodes, -1)
        return self._archive.array("node_label")

    def split(self) -> dict[str, Array]:
        """See `Source.split`; without nodes if there is none."""
        if self.split_name == "none":
            return {part: np.empty(0, np.int64) for part in SPLITS}
        if self.split_name.isdigit():
            masks = {"train": "train_masks", "valid": "val_masks", "test": "test_masks"}
            row = int(self.split_name)
            return {
                part: np.flatnonzero(self._archive.array(key)[row]) for part, key in masks.items()
            }
        prefix = "made_" if self.split_name == "made" else ""
        return {
            part: self._archive.array(f"{prefix}{part}_idx") for part in ("train", "valid", "test")
        }

    def _length(self, key: str) -> int:
        """Return the length of the first dimension of an array."""
        shape = self._archive.member(key).shape
        if not shape:
            raise ValueError(f"{self.path}: {key} is a scalar\n\nhint: {key} is an array")
        return int(shape[0])

    def _read_bool(self, key: str) -> bool:
        """Read an array of one element as a bool: true or false, yes or no, 1 or 0."""
        found = self._archive.array(key)
        word = str(found.reshape(-1)[0]).lower() if found.size == 1 else ""
        if found.dtype.kind == "S":
            word = word.removeprefix("b").strip("'")
        for value, words in ((True, ("true", "yes", "1")), (False, ("false", "no", "0"))):
            if word in words:
                return value
        raise ValueError(
            f"{self.path}: {key} is {found.tolist()!r:.100}, which is neither true nor false\n\n"
            "hint: true or false, yes or no, 1 or 0"
        )

    def _splits(self) -> list[str]:
        names = []
        if "train_idx" in self._archive:
            names.append("standard")
        if "made_train_idx" in self._archive:
            names.append("made")
        if "train_masks" in self._archive:
            count = self._length("train_masks")
            names += [str(number) for number in range(count)]
        return names

    def _features(self) -> Rows | None:
        if "node_feat" in self._archive:
            return self._archive.member("node_feat").rows()
        if "feat_data" not in self._archive:
            return None
        csr = Csr(
            self._archive.array("feat_indptr"),
            self._archive.array("feat_indices"),
            self._archive.array("feat_data"),
        )
        shape = self._archive.array("feat_shape").tolist()
        if not (
            isinstance(shape, list)
            and len(shape) == 2
            and all(type(size) is int for size in shape)
            and shape[0] == self.num_nodes == len(csr.indptr) - 1
        ):
            raise ValueError(
                f"{self.path}: feat_shape is {shape!r:.100} and feat_indptr has the shape "
                f"{csr.indptr.shape}, for {self.num_nodes:,} nodes\n\nhint: feat_shape is (nodes, "
                "columns), and feat_indptr has one more number than there are nodes"
            )
        num_columns = shape[1]
        return rows_from_csr(csr, num_columns, f"{self.path} (feat_data)")


def _choose_split(names: list[str], wanted: str | None, path: Path) -> str:
    if wanted is None:
        return names[0] if names else "none"
    if wanted not in names:
        known = ", ".join(names) or "none; add the node ids train_idx, valid_idx and test_idx"
        raise ValueError(f"{path} has no split {wanted}\n\nhint: it has {known}")
    return wanted
