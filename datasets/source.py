"""The interface of readers, and the checks of what they return, for all formats.

Letters: N nodes, E edges as stored, T tasks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Allocate, Array, Progress, Rows

Metric: TypeAlias = Literal["accuracy", "rocauc"]
PARTS = ("train", "valid", "test")
# OGB's words for the metrics that are known here
METRICS: Mapping[str, Metric] = {"acc": "accuracy", "accuracy": "accuracy", "rocauc": "rocauc"}


@dataclass(frozen=True)
class LinkParts:
    """Edges that are to be foretold, and the pairs that they are judged against."""

    edges: Mapping[str, Array]  # "train", "valid", "test": (2, E of the part)
    # "valid", "test": (2, Q) pairs that are no edges; if `metric` is mrr, (E of the part, K)
    # destinations, each row for the source of one edge
    negatives: Mapping[str, Array]
    metric: str  # auc, mrr, or hits@K for a number K
    name: str  # of the split


@dataclass(frozen=True)
class EdgeDefaults:
    """What is usually done with the edges of a set, and why."""

    bidirected: bool
    duplicates: Literal["keep", "remove"]
    because: str


class Source(Protocol):
    """A graph in some files: cheap to open, read part by part."""

    @property
    def name(self) -> str:
        """What the graph is called."""

    @property
    def num_nodes(self) -> int:
        """N."""

    @property
    def num_edges(self) -> int:
        """E."""

    @property
    def num_classes(self) -> int | None:
        """Classes of each task; None if the files do not say."""

    @property
    def metric(self) -> Metric:
        """How predictions are judged."""

    @property
    def best_accuracy(self) -> float | None:
        """What no model can pass, in [0, 1], where the generator of a graph knows it."""

    @property
    def features(self) -> Rows | None:
        """One row a node; None if the graph has no features."""

    @property
    def mapping(self) -> Path | None:
        """A folder that says what the nodes are: kept, not read."""

    @property
    def split_name(self) -> str:
        """Which of its splits is read."""

    @property
    def origin(self) -> dict[str, Any]:
        """Where the files come from."""

    def usual(self) -> EdgeDefaults | None:
        """What is usually done with the edges; None if nothing tells, see `guess`."""

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """(E,) sources and (E,) destinations in [0, N), int32 below 2**31 nodes, else int64."""

    def labels(self) -> Array:
        """(N,) or (N, T) as stored, for `clean_labels`."""

    def split(self) -> dict[str, Array]:
        """Ids of the parts as stored, for `clean_split`."""


def guess(ends: tuple[Array, Array]) -> EdgeDefaults:
    """What to do with edges of which nothing is told, as `Source.edges` gave them.

    Each edge is taken to be stored once, and to be meant both ways, if all of them point from the
    lower id to the higher, or all the other way.
    """
    once = one_way(*ends)
    found = "all edges point" if once else "not all edges point"
    return EdgeDefaults(once, "keep", f"{found} one way between lower and higher ids")


def one_way(sources: Array, destinations: Array) -> bool:
    """Whether all edges point from the lower id to the higher, or all the other way."""
    up = down = len(sources) > 0
    for begin in range(0, len(sources), CHUNK_BYTES):
        part = slice(begin, begin + CHUNK_BYTES)
        up = up and bool((sources[part] <= destinations[part]).all())
        down = down and bool((sources[part] >= destinations[part]).all())
    return up or down


def node_dtype(num_nodes: int) -> np.dtype:
    """The type that ids of nodes are kept in."""
    return np.dtype(np.int32 if num_nodes < 2**31 else np.int64)


def check_ends(ends: Array, num_nodes: int, where: str, first: int = 0) -> None:
    """Demand node ids in [0, num_nodes); `first` is the edge of the first one, for the message.

    Raises:
        ValueError: one is not.
    """
    if len(ends) == 0 or (ends.min() >= 0 and ends.max() < num_nodes):
        return
    place = int(np.flatnonzero((ends < 0) | (ends >= num_nodes))[0])
    raise ValueError(
        f"{where}: edge {first + place} has the node {ends[place]}, but nodes are 0 to "
        f"{num_nodes - 1}\n\nhint: ids count from 0; the number of nodes is stored beside the edges"
    )


def clean_links(links: LinkParts, num_nodes: int, where: str) -> LinkParts:
    """The same with every id looked at, in the type that ids of nodes are kept in.

    Raises:
        ValueError: a part is empty or of another shape, or an end is no node.
    """
    dtype = node_dtype(num_nodes)

    def clean(ids: Array, what: str, rows: int, form: str) -> Array:
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) != rows:
            raise ValueError(
                f"{where}: the {what} have the shape {ids.shape} and the type {ids.dtype}, not "
                f"{form} of integers\n\nhint: get or write the set again"
            )
        if ids.size == 0:
            raise ValueError(
                f"{where}: there are no {what}\n\n"
                "hint: edges are needed in each of train, valid and test, and negatives beside them"
            )
        check_ends(ids.reshape(-1), num_nodes, f"{where}: the {what}")
        return np.ascontiguousarray(ids, dtype)

    edges = {part: clean(links.edges[part], f"{part} edges", 2, "(2, edges)") for part in PARTS}
    negatives = {}
    for part in PARTS[1:]:
        rows, form = 2, "(2, pairs)"
        if links.metric == "mrr":
            rows = edges[part].shape[1]
            form = f"({rows}, negatives)"
        negatives[part] = clean(links.negatives[part], f"{part} negatives", rows, form)
    return LinkParts(edges, negatives, links.metric, links.name)


def clean_labels(raw: Array, num_nodes: int, num_classes: int | None, where: str) -> Array:
    """Labels as they are trained on.

    Args:
        raw: (N,), (N, 1) or (N, T), integers or floating point; NaN where there is none.
        num_nodes: N.
        num_classes: classes of each task; None takes what is there.
        where: named in errors.

    Returns:
        (N,) int64 in [-1, num_classes), -1 where there is no label; for several tasks (N, T),
        int64, or float32 with NaN where there is no label.

    Raises:
        ValueError: sizes do not match, or a label is no class.
    """
    if raw.ndim not in (1, 2) or len(raw) != num_nodes or raw.dtype.kind not in "fiub":
        raise ValueError(
            f"{where} has labels of shape {raw.shape} and type {raw.dtype} for {num_nodes:,} nodes"
            "\n\nhint: there is one row for each node, one column for each task"
        )
    several = raw.ndim == 2 and raw.shape[1] > 1
    values = raw if several else raw.reshape(-1)
    absent = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    lowest = 0 if several else -1
    most = most_classes(num_nodes)
    if num_classes is not None and not 0 <= num_classes <= most:
        raise ValueError(
            f"{where}: {num_classes:,} classes for {num_nodes:,} nodes\n\n"
            "hint: the number of classes comes from the file beside the graph"
        )
    highest = (most if num_classes is None else num_classes) - 1
    with np.errstate(invalid="ignore"):
        wrong = (values < lowest) | (values > highest)
        if values.dtype.kind == "f":
            wrong |= (values != np.floor(values)) & ~absent
            wrong |= np.isinf(values)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        classes = f"0 to {highest}"
        if num_classes is None:
            classes = f"classes count from 0, to {highest} at most"
        raise ValueError(
            f"{where}: node {place[0]} has the label {values[place]}, which is no class "
            f"({classes})\n\nhint: NaN or -1 marks a node without a label; the number of classes "
            "comes from the file beside the graph or from its name"
        )
    if several and _is_one_hot(values):
        raise ValueError(
            f"{where}: each row of the {raw.shape[1]} columns of labels has one 1, as if they were "
            "one-hot classes\n\nhint: give the class of each node, labels.argmax(axis=1); each "
            "column is a task of its own"
        )
    if several:
        return values.astype(np.float32 if absent.any() else np.int64)
    return np.where(absent, -1, np.nan_to_num(values)).astype(np.int64)


def _is_one_hot(labels: Array) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all())


def metric_of(labels: Array, metric: Metric) -> Metric:
    """Return the metric of cleaned labels: several tasks have no accuracy, but a ROC AUC each."""
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


def most_classes(num_nodes: int) -> int:
    """More classes than this are a damaged number: a class needs nodes, but in small examples."""
    return max(num_nodes, 1 << 16)


def count_classes(labels: Array) -> int:
    """Classes that occur in cleaned labels, counted from 0."""
    if labels.ndim == 2 and labels.dtype.kind == "f":
        return max(2, int(np.nanmax(labels, initial=0)) + 1)
    return max(2, int(labels.max(initial=0)) + 1)


def has_label(labels: Array) -> Array:
    """(N,) bool: whether a node has at least one label."""
    if labels.ndim == 1:
        return labels >= 0
    return np.asarray(~np.isnan(labels).all(axis=1))


def clean_split(
    split: Mapping[str, Array], labels: Array, where: str
) -> tuple[dict[str, Array], dict[str, int]]:
    """The parts without the nodes that have no label, and how many each lost.

    Raises:
        ValueError: a part is a mask or empty, or names what is no node, or a node is named twice.
    """
    labelled = has_label(labels)
    owner = np.zeros(len(labels), np.uint8)
    clean, lost = {}, {}
    for number, part in enumerate(PARTS, start=1):
        ids = np.asarray(split[part]).reshape(-1)
        if _is_mask(ids, len(labels)):
            raise ValueError(
                f"{where}: the {part} part is a mask of type {ids.dtype} over the {len(labels):,} "
                "nodes\n\nhint: a part is a list of node ids; numpy.flatnonzero(mask) gives them"
            )
        if ids.dtype.kind not in "iu" and len(ids):
            raise ValueError(
                f"{where}: the {part} part has numbers of type {ids.dtype}\n\n"
                "hint: a part is a list of node ids"
            )
        ids = ids.astype(np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(labels)):
            wrong = ids[(ids < 0) | (ids >= len(labels))][0]
            raise ValueError(
                f"{where}: the {part} part names the node {wrong}, but nodes are 0 to "
                f"{len(labels) - 1}\n\nhint: ids count from 0"
            )
        _check_once(ids, owner, number, where)
        clean[part] = ids[labelled[ids]]
        lost[part] = len(ids) - len(clean[part])
        if len(clean[part]) == 0:
            reason = f": its {len(ids)} nodes have no label" if len(ids) else ""
            raise ValueError(
                f"{where}: the {part} part is empty{reason}\n\n"
                "hint: training needs nodes in each of train, valid and test"
            )
    return clean, lost


def _is_mask(ids: Array, num_nodes: int) -> bool:
    """Whether there is a truth value, of any type, for each node."""
    if ids.dtype.kind == "b":
        return True
    is_long = ids.dtype.kind in "iu" and len(ids) == num_nodes > 2
    return is_long and bool(((ids == 0) | (ids == 1)).all())


def _check_once(ids: Array, owner: Array, number: int, where: str) -> None:
    taken = owner[ids]
    if taken.any():
        node = int(ids[np.flatnonzero(taken)[0]])
        raise ValueError(
            f"{where}: node {node} is in the {PARTS[owner[node] - 1]} part and in the "
            f"{PARTS[number - 1]} part; {np.count_nonzero(taken):,} nodes are\n\n"
            "hint: the parts of a split must not overlap"
        )
    owner[ids] = number
    if np.count_nonzero(owner == number) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise ValueError(
            f"{where}: the {PARTS[number - 1]} part names the node {values[counts > 1][0]} twice"
            "\n\nhint: a part names each of its nodes once"
        )
