"""The interface of dataset readers, and validation of what they return.

Notation: N nodes, E edges as stored, T tasks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from gcnzc.datasets.names import Names
from gcnzc.datasets.rows import CHUNK_BYTES, Allocate, Array, Progress, Rows

Metric: TypeAlias = Literal["accuracy", "rocauc"]
SPLITS = ("train", "valid", "test")
# OGB's metric names, and the ones used here
METRICS: Mapping[str, Metric] = {"acc": "accuracy", "accuracy": "accuracy", "rocauc": "rocauc"}


@dataclass(frozen=True)
class EdgeSplitArrays:
    """Training, validation and test edges for link prediction, with negative edges, as arrays.

    Attributes:
        edges: "train", "valid" and "test": (2, E of the split) sources and targets.
        negatives: "valid" and "test": (2, Q) pairs of nodes without an edge. If `metric` is mrr,
            (E of the split, K) negative targets: row `i` is for the source of edge `i`.
        metric: "auc", "mrr", or "hits@K" with an integer K.
        name: of the split.
    """

    edges: Mapping[str, Array]
    negatives: Mapping[str, Array]
    metric: str
    name: str


@dataclass(frozen=True)
class EdgeDefaults:
    """Default edge options of a dataset, and the reason for them, which `meta.json` records."""

    bidirected: bool
    duplicates: Literal["keep", "remove"]
    reason: str


class Source(Protocol):
    """A dataset in files, or from a generator: cheap to open, read one array at a time."""

    @property
    def name(self) -> str:
        """Name of the dataset."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""

    @property
    def num_edges(self) -> int:
        """Number of edges as stored, E."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes of each task; None if the files do not contain it."""

    @property
    def metric(self) -> Metric:
        """Metric of the predictions."""

    @property
    def best_accuracy(self) -> float | None:
        """Upper bound for the accuracy of any model, in [0, 1], if the generator computes it."""

    @property
    def features(self) -> Rows | None:
        """Node features, one row per node; None if there are none."""

    @property
    def mapping(self) -> Path | Names | None:
        """Names of nodes and classes, or a folder of them to copy; None if there is none."""

    @property
    def split_name(self) -> str:
        """Name of the split that `split` reads."""

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance of the dataset, for `meta.json`."""

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return the default edge options; None if unknown, see `guess_edge_defaults`."""

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """Read the edges: (E,) sources and (E,) targets in [0, N).

        The dtype is int32 for fewer than 2**31 nodes, otherwise int64.
        """

    def labels(self) -> Array:
        """Read the labels as stored, (N,) or (N, T); `clean_labels` validates them."""

    def split(self) -> dict[str, Array]:
        """Read the node ids of the splits as stored; `clean_split` validates them."""


def guess_edge_defaults(ends: tuple[Array, Array]) -> EdgeDefaults:
    """Guess the default edge options from the edges that `Source.edges` returned.

    If all edges lead from the lower to the higher id, or all from the higher to the lower, the
    graph is assumed to be undirected with each edge stored once.
    """
    stored_once = is_one_way(*ends)
    found = "all edges point" if stored_once else "not all edges point"
    return EdgeDefaults(stored_once, "keep", f"{found} one way between lower and higher ids")


def is_one_way(sources: Array, destinations: Array) -> bool:
    """Whether all edges lead from the lower id to the higher, or all from the higher to the lower.

    Self loops count as both.
    """
    up = down = len(sources) > 0
    for begin in range(0, len(sources), CHUNK_BYTES):
        part = slice(begin, begin + CHUNK_BYTES)
        up = up and bool((sources[part] <= destinations[part]).all())
        down = down and bool((sources[part] >= destinations[part]).all())
    return up or down


def node_dtype(num_nodes: int) -> np.dtype:
    """Return the dtype of node ids: int32 for fewer than 2**31 nodes, otherwise int64."""
    return np.dtype(np.int32 if num_nodes < 2**31 else np.int64)


def allocate_ends(sizes: tuple[int, int], count: int, allocate: Allocate) -> tuple[Array, Array]:
    """Return arrays for the sources and targets of edges.

    Args:
        sizes: numbers of nodes of the types of the sources and of the targets.
        count: E.
        allocate: allocates the arrays.
    """
    return (
        allocate("sources", count, node_dtype(sizes[0])),
        allocate("destinations", count, node_dtype(sizes[1])),
    )


def check_ends(ends: Array, num_nodes: int, where: str, first: int = 0) -> None:
    """Check that node ids are in [0, num_nodes).

    Args:
        ends: (n,) sources or targets of n consecutive edges.
        num_nodes: N.
        where: name of the file in the message.
        first: index of the first of these edges, for the message.

    Raises:
        ValueError: an id is out of range.
    """
    if len(ends) == 0 or (ends.min() >= 0 and ends.max() < num_nodes):
        return
    place = int(np.flatnonzero((ends < 0) | (ends >= num_nodes))[0])
    raise ValueError(
        f"{where}: edge {first + place} has the node {ends[place]}, but nodes are 0 to "
        f"{num_nodes - 1}\n\nhint: ids start at 0; check the number of nodes in the dataset"
    )


def clean_edge_split(links: EdgeSplitArrays, num_nodes: int, where: str) -> EdgeSplitArrays:
    """Validate an edge split and convert its node ids to `node_dtype`.

    Raises:
        ValueError: a split is empty or has a wrong shape, or a node id is out of range.
    """
    dtype = node_dtype(num_nodes)

    def clean(ids: Array, what: str, rows: int, shape: str) -> Array:
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) != rows:
            raise ValueError(
                f"{where}: the {what} have the shape {ids.shape} and the type {ids.dtype}, not "
                f"{shape} of integers\n\nhint: download or write the dataset again"
            )
        if ids.size == 0:
            raise ValueError(
                f"{where}: there are no {what}\n\n"
                "hint: train, valid and test need edges, and valid and test also negatives"
            )
        check_ends(ids.reshape(-1), num_nodes, f"{where}: the {what}")
        return np.ascontiguousarray(ids, dtype)

    edges = {part: clean(links.edges[part], f"{part} edges", 2, "(2, edges)") for part in SPLITS}
    negatives = {}
    for part in SPLITS[1:]:
        rows, shape = 2, "(2, pairs)"
        if links.metric == "mrr":
            rows = edges[part].shape[1]
            shape = f"({rows}, negatives)"
        negatives[part] = clean(links.negatives[part], f"{part} negatives", rows, shape)
    return EdgeSplitArrays(edges, negatives, links.metric, links.name)


def clean_labels(raw: Array, num_nodes: int, num_classes: int | None, where: str) -> Array:
    """Validate labels and convert them to the format that training uses.

    Args:
        raw: (N,), (N, 1) or (N, T), integers or floating point; NaN or -1 for no label.
        num_nodes: N.
        num_classes: number of classes of each task; None accepts any classes.
        where: name of the labels in error messages.

    Returns:
        (N,) int64 in [-1, num_classes), -1 for no label; for several tasks (N, T) int64, or
        float32 with NaN for no label.

    Raises:
        ValueError: the shape is wrong, or a label is not a class.
    """
    if raw.dtype.kind not in "fiub":
        raise ValueError(
            f"{where}: the labels have the type {raw.dtype}\n\nhint: labels are integers; "
            "`labels, classes = pandas.Series(labels).factorize(sort=True)` numbers others"
        )
    if raw.ndim not in (1, 2) or len(raw) != num_nodes:
        raise ValueError(
            f"{where}: the labels have the shape {raw.shape} for {num_nodes:,} nodes"
            "\n\nhint: labels have one row for each node and one column for each task"
        )
    several = raw.ndim == 2 and raw.shape[1] > 1
    values = raw if several else raw.reshape(-1)
    absent = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    lowest = 0 if several else -1
    most = max_classes(num_nodes)
    if num_classes is not None and not 0 <= num_classes <= most:
        raise ValueError(
            f"{where}: {num_classes:,} classes for {num_nodes:,} nodes\n\n"
            "hint: the number of classes comes from the metadata of the dataset"
        )
    highest = (most if num_classes is None else num_classes) - 1
    with np.errstate(invalid="ignore"):
        wrong = (values < lowest) | (values > highest)
        if values.dtype.kind == "f":
            wrong |= (values != np.floor(values)) & ~absent
            wrong |= np.isinf(values)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        classes, source = f"0 to {highest}", "; the number of classes comes from the dataset"
        if num_classes is None:
            classes, source = f"classes start at 0 and are at most {highest}", ""
        if values.dtype.kind == "f" and values[place] != np.floor(values[place]):
            source = "; to predict numbers, pass them to gcnzc.Loader in a loop of your own"
        raise ValueError(
            f"{where}: node {place[0]} has the label {values[place]}, which is not a class "
            f"({classes})\n\nhint: NaN or -1 marks a node without a label{source}"
        )
    if several and _is_one_hot(values):
        raise ValueError(
            f"{where}: each row of the {raw.shape[1]} columns of labels has one 1, as in one-hot "
            "encoding\n\nhint: pass the class of each node, labels.argmax(axis=1); each column is "
            "a separate task"
        )
    if several:
        return values.astype(np.float32 if absent.any() else np.int64)
    return np.where(absent, -1, np.nan_to_num(values)).astype(np.int64)


def _is_one_hot(labels: Array) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all())


def choose_metric(labels: Array, metric: Metric) -> Metric:
    """Return the metric for validated labels: several tasks use ROC AUC instead of accuracy."""
    return "rocauc" if labels.ndim == 2 and metric == "accuracy" else metric


def check_metric(metric: Metric, labels: Array, num_classes: int) -> Metric:
    """Check that a metric fits cleaned labels, and return it.

    Raises:
        ValueError: it is unknown, or does not fit.
    """
    several = labels.ndim == 2
    fits = several or num_classes == 2 if metric == "rocauc" else not several
    if metric not in METRICS.values() or not fits:
        known = f"{labels.shape[1]} tasks" if several else f"{num_classes} classes"
        raise ValueError(
            f"the metric {metric!r} does not fit labels of {known}\n\n"
            "hint: accuracy is of one task, rocauc of two classes or of several tasks"
        )
    return metric


def max_classes(num_nodes: int) -> int:
    """Return the largest plausible number of classes; more means that the file is damaged."""
    return max(num_nodes, 1 << 16)


def count_classes(labels: Array) -> int:
    """Return the number of classes of validated labels: the largest label + 1, at least 2."""
    if labels.ndim == 2 and labels.dtype.kind == "f":
        return max(2, int(np.nanmax(labels, initial=0)) + 1)
    return max(2, int(labels.max(initial=0)) + 1)


def has_label(labels: Array) -> Array:
    """Return a mask, (N,) bool, of the nodes with at least one label."""
    if labels.ndim == 1:
        return labels >= 0
    return np.asarray(~np.isnan(labels).all(axis=1))


def clean_split(
    split: Mapping[str, Array], labels: Array, where: str
) -> tuple[dict[str, Array], dict[str, int]]:
    """Validate the splits and remove nodes without a label.

    Returns:
        The int64 ids of each split, and the number of nodes that were removed from it.

    Raises:
        ValueError: a split is a mask, is empty or has an id out of range, or a node is in two
            splits or twice in one.
    """
    labelled = has_label(labels)
    owner = np.zeros(len(labels), np.uint8)  # 1 + index of the split of each node
    clean, num_dropped = {}, {}
    for number, part in enumerate(SPLITS, start=1):
        ids = np.asarray(split[part]).reshape(-1)
        if is_mask(ids, len(labels)):
            raise ValueError(
                f"{where}: the {part} split is a mask of type {ids.dtype} over the {len(labels):,} "
                "nodes\n\nhint: a split is a vector of node ids; convert it by "
                "numpy.flatnonzero(mask)"
            )
        if ids.dtype.kind not in "iu" and len(ids):
            raise ValueError(
                f"{where}: the {part} split has ids of type {ids.dtype}\n\n"
                "hint: a split is a vector of integer node ids"
            )
        ids = ids.astype(np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(labels)):
            wrong = ids[(ids < 0) | (ids >= len(labels))][0]
            raise ValueError(
                f"{where}: the {part} split contains node {wrong}, but nodes are 0 to "
                f"{len(labels) - 1}\n\nhint: ids start at 0"
            )
        check_once(ids, owner, number, where)
        clean[part] = ids[labelled[ids]]
        num_dropped[part] = len(ids) - len(clean[part])
        if len(clean[part]) == 0:
            reason = f": its {len(ids)} nodes have no label" if len(ids) else ""
            raise ValueError(
                f"{where}: the {part} split is empty{reason}\n\n"
                "hint: train, valid and test each need labelled nodes; a graph to predict on has "
                "neither labels nor splits"
            )
    return clean, num_dropped


def is_mask(ids: Array, num_nodes: int) -> bool:
    """Whether `ids` is a mask over all nodes: bool, or integers 0 and 1."""
    if ids.dtype.kind == "b":
        return True
    is_long = ids.dtype.kind in "iu" and len(ids) == num_nodes > 2
    return is_long and bool(((ids == 0) | (ids == 1)).all())


def check_once(ids: Array, owner: Array, number: int, where: str) -> None:
    """Mark the nodes of a split in `owner`, and check that none is marked already or occurs twice.

    Args:
        ids: of the nodes.
        owner: (N,) 1 + the index of the split of each node, or 0; is changed.
        number: 1 + the index of this split.
        where: name of the splits in messages.

    Raises:
        ValueError: a node is in two splits, or twice in this one.
    """
    taken = owner[ids]
    if taken.any():
        node = int(ids[np.flatnonzero(taken)[0]])
        raise ValueError(
            f"{where}: node {node} is in the {SPLITS[owner[node] - 1]} split and in the "
            f"{SPLITS[number - 1]} split ({np.count_nonzero(taken):,} overlapping nodes)\n\n"
            "hint: train, valid and test must be disjoint"
        )
    owner[ids] = number
    if np.count_nonzero(owner == number) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise ValueError(
            f"{where}: the {SPLITS[number - 1]} split contains node {values[counts > 1][0]} twice"
            "\n\nhint: the ids of a split must be unique"
        )


_NAMES = {
    "train": ("train", "training", "trn"),
    "valid": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
_PART_OF = {name: part for part, names in _NAMES.items() for name in names}
_AROUND = re.compile(r"^(?:is_|in_|mask_)|(?:_mask|_masks|_idx|_nodes|_set|_split)$")


def part_of(name: object) -> str | None:
    """Return "train", "valid" or "test" for a common name of it; None for other names.

    Such names are "train", "train_mask", "is_train", "val", "validation_mask", "dev" and "testing",
    in upper or lower case.
    """
    word = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    for _ in range(2):
        word = _AROUND.sub("", word)
    return _PART_OF.get(word)


# a label that means none is at least this far from the classes
LEAST_GAP = 10


def describe_missing(labels: Array) -> str:
    """Return how many labels are missing; "" if none is.

    Args:
        labels: (N,) or (N, T); -1 or NaN for no label.
    """
    is_missing = np.isnan(labels) if labels.dtype.kind == "f" else labels < 0
    count = np.count_nonzero(is_missing)
    return f"{count:,} of {labels.size:,} labels are missing" if count else ""


def describe_gap(labels: Array) -> str:
    """Return a warning of gaps in the class numbers, as with a class 255 for no label; else "".

    There are gaps if at most a tenth of the classes from 0 to the largest have a label, or if
    most of the others are between two classes.

    Args:
        labels: (N,) or (N, T) of cleaned labels. Labels of several tasks are not checked.
    """
    if labels.ndim != 1 or labels.dtype.kind != "i":
        return ""
    classes = np.flatnonzero(np.bincount(labels + 1)[1:])
    if not len(classes):
        return ""
    gaps = np.diff(classes, prepend=-1) - 1
    place, count = int(gaps.argmax()), int(classes[-1]) + 1
    is_wide = gaps[place] >= LEAST_GAP and 2 * gaps[place] > gaps.sum()
    if not is_wide and count < LEAST_GAP * len(classes):
        return ""
    after = int(classes[place if is_wide else -1])
    between = f", and none from {after - int(gaps[place])} to {after - 1}" if is_wide else ""
    remedy = "number the classes from 0"
    if place or not is_wide:
        remedy = (
            f"if {after} means no label, replace it by -1, or in the .toml of tables set "
            f"missing = [{after}]; otherwise {remedy}"
        )
    return (
        f"the labels have {len(classes):,} different classes{between}, but the model predicts "
        f"{count:,}; {remedy}"
    )


EdgeType: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class HeteroArrays:
    """A heterogeneous graph as arrays by node type and by edge type.

    Attributes:
        name: of the dataset.
        num_nodes: N of each node type, in the order of the types.
        edges: (E,) sources and (E,) destinations of each edge type, in the order of the types.
        node_features: (N, D) of node types.
        edge_features: (E, D) of edge types.
        labels: (N,) or (N, T) labels of node types; -1 or NaN for no label.
        split: for "train", "valid" and "test" node ids by node type.
        node_time: (N,) integers of node types.
        edge_time: (E,) integers of edge types.
        edge_weight: (E,) sampling weights of edge types.
        num_classes: number of classes of each task; None if it is not known.
        metric: of the predictions.
        split_name: name of the split.
        best_accuracy: upper bound for the accuracy of any model, if known.
        origin: provenance of the dataset.
    """

    name: str
    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]
    node_features: Mapping[str, Rows] = field(default_factory=dict)
    edge_features: Mapping[EdgeType, Rows] = field(default_factory=dict)
    labels: Mapping[str, Array] = field(default_factory=dict)
    split: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    node_time: Mapping[str, Array] = field(default_factory=dict)
    edge_time: Mapping[EdgeType, Array] = field(default_factory=dict)
    edge_weight: Mapping[EdgeType, Array] = field(default_factory=dict)
    num_classes: int | None = None
    metric: Metric = "accuracy"
    split_name: str = "random"
    best_accuracy: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
