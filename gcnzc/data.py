"""Graphs on disk as `Dataset`s, and files of other forms as prepared folders.

Letters: N nodes, E edges, D columns of features, T tasks.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from gcnzc.datasets import catalog, download, ogb, store
from gcnzc.datasets.npz import NpzGraph
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.ogb_link import OgbLinkGraph, is_link_layout
from gcnzc.datasets.rows import (
    CODES,
    Allocate,
    Array,
    Codes,
    Csr,
    Progress,
    Rows,
    converted,
    finite,
    in_memory,
    no_progress,
    normalized,
    rows_of_array,
    rows_of_csr,
    stored_dtype,
)
from gcnzc.datasets.source import (
    PARTS,
    LinkParts,
    Metric,
    Source,
    clean_labels,
    clean_links,
    clean_split,
    count_classes,
    guess,
    has_label,
    metric_of,
    node_dtype,
)
from gcnzc.datasets.store import Prepared
from gcnzc.edge_split import EdgeShares, split_edges, with_sorted_columns
from gcnzc.finite import are_finite
from gcnzc.graph import Duplicates, Graph, Loops
from gcnzc.kernels.edges import are_edges
from gcnzc.kernels.quantize import LARGEST, SCALE_COLUMNS, largest, quantize, scales_of
from gcnzc.table import FeatureTable
from gcnzc.wire import choose_pitch

FeatureDtype: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
]
ScaleKind: TypeAlias = Literal["row", "columns"]
# types whose numbers mean something with a scale only
SCALED = tuple(str(dtype).removeprefix("torch.") for dtype in LARGEST)


@dataclass(frozen=True)
class Links:
    """Edges to be foretold, part by part, and the pairs that they are judged against.

    Tensors are of the type of the graph's `indices`, and lie on the host.
    """

    edges: dict[str, Tensor]  # "train", "valid", "test": (2, E of the part) from, and to
    # "valid", "test": (2, Q) pairs that are no edges; if the metric is mrr, (E of the part, K)
    # destinations, each row for the source of one edge
    negatives: dict[str, Tensor]
    metric: str  # auc, mrr, or hits@K for a number K


@dataclass(frozen=True)
class Dataset:
    """A graph, what is known of its nodes, and which of them are for what.

    Tensors lie on the host. Those of a prepared folder are read-only maps of its files: writing to
    one ends the process, so copy first.
    """

    name: str
    graph: Graph
    # (N, D), rows contiguous; sparse CSR if kept so; None if there are none, or if they are codes
    # with scales, which only `table` turns into numbers
    features: Tensor | None
    labels: Tensor  # (N,) int64, -1 for none; several tasks: (N, T) int64, or float32 with NaN
    split: dict[str, Tensor]  # "train", "valid", "test": int64 ids of labelled nodes
    num_classes: int  # of each task
    metric: Metric
    best_accuracy: float | None  # what no model can pass, in [0, 1], where it is known
    folder: Path
    origin: dict[str, Any]  # where the files came from, and the choices made
    quantized: FeatureTable | None = None  # the features, if they are codes with scales
    # a split of edges; `graph` then has those of its training part, and others where the set does
    links: Links | None = None

    @cached_property
    def table(self) -> FeatureTable | None:
        """The features as a table, however they are stored; None if there are none."""
        if self.features is None:
            return self.quantized
        return FeatureTable(self.features)


@dataclass(frozen=True)
class _Choices:
    bidirected: bool | None
    self_loops: Loops | None
    duplicates: Duplicates | None
    allow_nan: bool


@dataclass(frozen=True)
class _Parts:
    """What `load` and `prepare` have in common: all but the features, read and checked."""

    graph: Graph
    labels: Array
    split: dict[str, Array]
    num_classes: int
    told: dict[str, Any]  # for meta.json: name, metric, choices, origin
    links: LinkParts | None = None


def load(
    path: str | Path,
    *,
    name: str | None = None,
    bidirected: bool | None = None,
    self_loops: Loops | None = None,
    duplicates: Duplicates | None = None,
    split: str | int | None = None,
    allow_nan: bool = False,
    allocate: Allocate = in_memory,
) -> Dataset:
    """Open a prepared folder, or read a folder in OGB's layout or an `.npz` into memory.

    A prepared folder is mapped: that takes no time and no memory, whatever its size.

    Args:
        path: the folder or archive.
        name: of the graph, as in the catalogue, whose settings it brings; what the files say if
            None. Not for prepared folders, which carry theirs.
        bidirected: add the reverse of every edge. None does what is usual: what the set's
            `add_inverse_edge` says, and both directions for ogbn-arxiv. A prepared folder is taken
            as it was prepared where a choice is None, and rebuilt in memory where it is not.
        self_loops: "keep", "add" or "remove"; None keeps.
        duplicates: "keep" or "remove"; None keeps, but for ogbn-arxiv.
        split: which, where there are several; see `OgbGraph` and `NpzGraph`.
        allow_nan: take features that are not finite.
        allocate: makes the memory that features are read into, as one row that is called "features"
            and has a size and a numpy dtype; plain memory unless asked otherwise.

    Raises:
        FileNotFoundError: there is no such folder, or a file in it is missing.
        ValueError: what the files hold is wrong; the message says what and where.
        RuntimeError: there is not enough memory to read it.
    """
    path = Path(path)
    choices = _Choices(bidirected, self_loops, duplicates, allow_nan)
    opened = _open(path, name, split)
    if opened is None:
        raise FileNotFoundError(
            f"no folder {path}\n\nhint: `gcnzc make {path}` writes a graph there, "
            f"`gcnzc prepare ogbn-arxiv {path} --download` gets one"
        )
    parts = _read(opened, choices, in_memory, no_progress)
    if isinstance(opened, Prepared):
        _refuse_nan(opened, allow_nan)
        features, quantized = _mapped_features(opened)
    else:
        quantized = None
        features = _features_in_memory(_rows(opened, None), allow_nan, allocate)
    told = parts.told
    return Dataset(
        name=told["name"],
        graph=parts.graph,
        features=features,
        labels=_tensor(parts.labels),
        split={part: _tensor(ids) for part, ids in parts.split.items()},
        num_classes=parts.num_classes,
        metric=told["metric"],
        best_accuracy=told["best_accuracy"],
        folder=path,
        origin=told["origin"] | {"options": told["options"], "split": told["split"]},
        quantized=quantized,
        links=None if parts.links is None else _tensors(parts.links),
    )


def prepare(
    source: str | Path | Source,
    dest: str | Path,
    *,
    name: str | None = None,
    download: bool = False,
    features: str | Path | Array | None = None,
    normalize_features: bool = False,
    sparse_features: bool = False,
    feature_dtype: FeatureDtype | None = None,
    scales: ScaleKind = "row",
    pitch_bytes: int | None = None,
    bidirected: bool | None = None,
    self_loops: Loops | None = None,
    duplicates: Duplicates | None = None,
    split: str | int | None = None,
    edge_split: EdgeShares | None = None,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Write a prepared folder, which `load` opens at once.

    Features pass through in chunks, so that memory does not grow with their table. Edges lie in
    nameless files beside the destination meanwhile; the graph itself is built in memory.

    Args:
        source: a folder in OGB's layout, an `.npz`, a prepared folder, or the name of one of OGB's
            sets, which is looked for in the folder `downloads` beside `dest`; or a source itself,
            as readers and generators make them.
        dest: the folder to write; must not exist, and is there only when all of it is.
        name: see `load`; this and `split` are of files only.
        download: get the named set from OGB if it is not there.
        features: (N, D), or the path of a `.npy` of them, to be put in the place of the source's.
        normalize_features: divide each row by the sum of its absolute values.
        sparse_features: keep features that come sparse as CSR, instead of making them dense.
        feature_dtype: None keeps float16, bfloat16 and codes as they are, and makes all else
            float32. int8, float8_e4m3fn and float8_e5m2 are codes with scales, made of finite
            numbers alone; `gcnzc.kernels.quantize` says how far they are from the numbers.
        scales: of such codes: one for each row; or for each 16 columns, for all rows, which takes
            a second pass over the features.
        pitch_bytes: distance of rows of dense features; 0 puts them side by side, and None chooses
            by what a GPU's reads cost, as `gcnzc.wire.choose_pitch` does.
        bidirected: see `load`; this and the next two are recorded.
        self_loops: see `load`.
        duplicates: see `load`.
        split: see `load`.
        edge_split: take edges out for validation and test, as `gcnzc.edge_split` does; a source
            that comes with a split of edges keeps it.
        allow_nan: take features that are not finite; the folder then says so.
        progress: called with what is done, how much, and of how much: bytes, rows or edges.

    Raises:
        FileNotFoundError: the source is not there.
        FileExistsError: `dest` is.
        ValueError: what the source holds is wrong; the message says what and where.
        RuntimeError: the disk is full, the network is not there, or another process writes `dest`.
    """
    dest = Path(dest)
    choices = _Choices(bidirected, self_loops, duplicates, allow_nan)
    opened: Source | Prepared | None
    if isinstance(source, str | Path):
        opened = _open(Path(source), name, split)
        if opened is None:
            opened = _open_named(str(source), dest.parent / "downloads", download, split, progress)
    else:
        opened = source
    if isinstance(opened, Prepared):
        # damage would otherwise be given a right checksum
        _verify_prepared(opened, progress)
        if features is None:
            _refuse_nan(opened, allow_nan)
    rows = _rows(opened, features)
    if rows is not None and normalize_features:
        rows = normalized(rows)
    form = None if rows is None else _form_of(rows, feature_dtype, scales)
    dtype = None if form is None else form.dtype
    sparse = _check_layout(rows, form, sparse_features, pitch_bytes)
    pitch, why = _pitch(rows, dtype, pitch_bytes)
    with store.building(dest, _needed_bytes(opened, rows, dtype, pitch, sparse)) as folder:
        allocate = store.scratch(folder)
        parts = _read(opened, choices, allocate, progress)
        if edge_split is not None and parts.links is None:
            parts = _with_split_edges(parts, edge_split)
        writer = store.Writer(folder, progress)
        writer.save("indptr.npy", parts.graph.indptr.numpy())
        writer.save("indices.npy", parts.graph.indices.numpy())
        writer.save("labels.npy", parts.labels)
        for part, ids in parts.split.items():
            writer.save(f"split/{part}.npy", ids)
        if parts.links is not None:
            for part, edges in parts.links.edges.items():
                writer.save(f"links/{part}.npy", edges)
            for part, pairs in parts.links.negatives.items():
                writer.save(f"links/{part}_negatives.npy", pairs)
        about_features = None
        if rows is not None and form is not None:
            write = _write_sparse if sparse else _write_codes if form.is_coded else _write_dense
            all_finite = write(writer, rows, form, pitch, allow_nan, allocate, progress)
            about_features = {
                "kind": "sparse" if sparse else "codes" if form.is_coded else "dense",
                "columns": rows.num_columns,
                "dtype": form.name,
                "pitch_bytes": None if sparse else pitch,
                "pitch_reason": None if sparse else why,
                "finite": all_finite,
                "normalized": normalize_features,
            }
            if form.is_coded:
                about_features |= {"scales": form.scales, "scale_columns": form.scale_columns}
            if features is not None:
                given = features if isinstance(features, str | Path) else "an array"
                parts.told["origin"]["features"] = str(given)
        mapping = opened.folder / "mapping" if isinstance(opened, Prepared) else opened.mapping
        if mapping is not None and mapping.is_dir():
            writer.copy(mapping, "mapping")
        writer.finish(
            {
                **parts.told,
                "num_nodes": parts.graph.num_nodes,
                "num_edges": parts.graph.num_edges,
                "num_classes": parts.num_classes,
                "num_tasks": 1 if parts.labels.ndim == 1 else parts.labels.shape[1],
                "num_labelled": int(np.count_nonzero(has_label(parts.labels))),
                "features": about_features,
                "links": None if parts.links is None else _about_links(parts.links, parts.graph),
            }
        )


def info(path: str | Path) -> dict[str, Any]:
    """What there is to know of a folder or archive without reading its arrays.

    Returns:
        name, kind ("prepared", "ogb" or "npz"), folder, num_nodes, num_edges (as stored),
        num_classes, metric, best_accuracy, features (None, or columns, dtype, bytes, ...), split,
        origin, links (whether edges are split, or how); of prepared folders also num_tasks,
        num_labelled, options, disk_bytes and version.

    Raises:
        FileNotFoundError: there is no such folder, or a file in it is missing.
        ValueError: it cannot be read.
    """
    path = Path(path)
    opened = _open(path, None, None)
    if opened is None:
        raise FileNotFoundError(f"no folder {path}\n\nhint: is the path right?")
    if isinstance(opened, Prepared):
        meta = dict(opened.meta)
        files = meta.pop("files")
        meta.pop("crc32", None)
        meta["disk_bytes"] = sum(entry["bytes"] for entry in files.values())
        meta["feature_bytes"] = sum(
            entry["bytes"] for file, entry in files.items() if file.startswith("features")
        )
        return {"kind": "prepared", "folder": str(path)} | meta
    rows = opened.features
    about_features = None
    if rows is not None:
        about_features = {
            "kind": "dense" if rows.csr is None else "sparse",
            "columns": rows.num_columns,
            "dtype": str(stored_dtype(rows, None)),
        }
    return {
        "kind": "ogb" if isinstance(opened, OgbGraph) else "npz",
        "folder": str(path),
        "name": opened.name,
        "num_nodes": opened.num_nodes,
        "num_edges": opened.num_edges,
        "num_classes": opened.num_classes,
        "metric": opened.metric,
        "best_accuracy": opened.best_accuracy,
        "features": about_features,
        "split": {"name": opened.split_name},
        "origin": opened.origin,
        "links": isinstance(opened, OgbLinkGraph),
    }


def verify(path: str | Path, progress: Progress = no_progress) -> None:
    """Read all of a folder or archive: checksums and edges of a prepared one, else every number.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: something is not what it should be; the message names the file.
    """
    path = Path(path)
    opened = _open(path, None, None)
    if opened is None:
        raise FileNotFoundError(f"no folder {path}\n\nhint: is the path right?")
    if isinstance(opened, Prepared):
        _verify_prepared(opened, progress)
        return
    _read(opened, _Choices(None, None, None, False), in_memory, progress)
    rows = _rows(opened, None)
    if rows is not None:
        for _ in converted(rows, stored_dtype(rows, None), False, in_memory, progress):
            pass


def _verify_prepared(opened: Prepared, progress: Progress) -> None:
    store.verify(opened.folder, progress)
    num_nodes, num_classes = len(opened.labels), opened.meta["num_classes"]
    where = str(opened.folder)
    _graph_of(opened).check()
    clean_labels(opened.labels, num_nodes, num_classes, where)
    if any(len(ids) for ids in opened.split.values()):
        clean_split(opened.split, opened.labels, where)
    if opened.csr is not None:
        rows_of_csr(opened.csr, opened.meta["features"]["columns"], where)
    if opened.links is not None:
        clean_links(opened.links, num_nodes, where)


def _graph_of(opened: Prepared) -> Graph:
    # reading all of it would take time; whoever reads a number of it checks that
    return Graph(opened.indptr, opened.indices, check=False)


def _check_split(opened: Prepared) -> None:
    """Demand that the parts name labelled nodes, and that their labels are classes."""
    num_classes = opened.meta["num_classes"]
    hint = f"hint: `gcnzc info {opened.folder} --verify` says what is damaged"
    for part, ids in opened.split.items():
        _demand_nodes(opened, ids, f"the {part} part names")
        labels = opened.labels[ids]
        wrong = labels[~np.isnan(labels) & ~((labels >= 0) & (labels < num_classes))]
        if len(wrong):
            raise ValueError(
                f"{opened.folder}: a node of the {part} part has the label {wrong[0]}, but classes "
                f"are 0 to {num_classes - 1}\n\n{hint}"
            )


def _check_links(opened: Prepared) -> None:
    """Demand that held-out edges and negatives are between nodes."""
    if opened.links is None:
        return
    for part, ends in opened.links.edges.items():
        _demand_nodes(opened, ends, f"the {part} edges have")
    for part, ends in opened.links.negatives.items():
        _demand_nodes(opened, ends, f"the {part} negatives have")


def _demand_nodes(opened: Prepared, ids: Array, what: str) -> None:
    num_nodes = len(opened.labels)
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num_nodes):
        return
    outside = ids[(ids < 0) | (ids >= num_nodes)]
    raise ValueError(
        f"{opened.folder}: {what} the node {outside[0]}, but nodes are 0 to {num_nodes - 1}\n\n"
        f"hint: `gcnzc info {opened.folder} --verify` says what is damaged"
    )


def _open(path: Path, name: str | None, split: str | int | None) -> Source | Prepared | None:
    """What lies at `path`; None if nothing does."""
    wanted = None if split is None else str(split)
    if path.is_file():
        if path.suffix == ".npz":
            return NpzGraph(path, name, wanted)
        raise ValueError(f"{path} is no .npz archive\n\nhint: give a folder or an .npz archive")
    if not path.is_dir():
        return None
    if store.is_prepared(path):
        prepared = store.open_folder(path)
        if wanted not in (None, prepared.meta["split"]["name"]):
            raise ValueError(
                f"{path} was prepared with the split {prepared.meta['split']['name']}, not "
                f"{wanted}\n\nhint: prepare it again from {prepared.meta['origin'].get('source')}"
            )
        return prepared
    if ogb.is_layout(path):
        return _open_ogb(path, name, wanted)
    raise ValueError(
        f"{path} is no graph: it has neither meta.json nor raw/\n\n"
        "hint: give a prepared folder, or one in OGB's layout"
    )


def _open_named(
    name: str, folder: Path, may_download: bool, split: str | int | None, progress: Progress
) -> Source:
    if "/" in name:
        raise FileNotFoundError(
            f"no folder {name}\n\nhint: is the path right? OGB's sets go by names like ogbn-arxiv"
        )
    remote = download.lookup(name)
    unpacked = folder / remote.folder_name
    if not unpacked.is_dir() and not may_download:
        known = catalog.find(remote.name)
        size = f"about {known.download_bytes:,} bytes" if known and known.download_bytes else "it"
        raise FileNotFoundError(
            f"no folder {name}, and {remote.name} is not in {folder}\n\n"
            f"hint: --download gets {size} from {remote.url}"
        )
    unpacked = download.fetch(remote, folder, progress)
    return _open_ogb(unpacked, remote.name, None if split is None else str(split))


def _open_ogb(path: Path, name: str | None, split: str | None) -> OgbGraph:
    kind = OgbLinkGraph if is_link_layout(path) else OgbGraph
    return kind(path, name, split)


def _read(
    opened: Source | Prepared, choices: _Choices, allocate: Allocate, progress: Progress
) -> _Parts:
    if isinstance(opened, Prepared):
        return _reread(opened, choices)
    labels = clean_labels(
        opened.labels(), opened.num_nodes, opened.num_classes, f"{opened.name}: labels"
    )
    where = f"{opened.name}: split {opened.split_name}"
    links = None
    if isinstance(opened, OgbLinkGraph):
        links = clean_links(opened.links(), opened.num_nodes, where)
        split, lost = opened.split(), dict.fromkeys(PARTS, 0)
    else:
        split, lost = clean_split(opened.split(), labels, where)
    ends = opened.edges(allocate, progress)
    usual = opened.usual() or guess(ends)
    bidirected = usual.bidirected if choices.bidirected is None else choices.bidirected
    # what is usual of equal edges belongs to what is usual of directions
    removes = choices.bidirected is None and usual.duplicates == "remove"
    options: dict[str, Any] = {
        "bidirected": bidirected,
        "because": usual.because if choices.bidirected is None else "asked for",
        "self_loops": choices.self_loops or "keep",
        "duplicates": choices.duplicates or ("remove" if removes else "keep"),
    }
    progress("graph", 0, opened.num_edges)
    graph = Graph.from_edges(
        *ends,
        opened.num_nodes,
        bidirected=bidirected,
        self_loops=options["self_loops"],
        duplicates=options["duplicates"],
    )
    progress("graph", opened.num_edges, opened.num_edges)
    told = {
        "name": opened.name,
        "metric": metric_of(labels, opened.metric),
        "best_accuracy": opened.best_accuracy,
        "split": {
            "name": opened.split_name,
            **{part: len(split[part]) for part in PARTS},
            "dropped_without_label": lost,
        },
        "options": options,
        "origin": opened.origin,
    }
    num_classes = opened.num_classes or (0 if links is not None else count_classes(labels))
    if links is not None:
        graph = with_sorted_columns(graph)
    return _Parts(graph, labels, split, num_classes, told, links)


def _with_split_edges(parts: _Parts, shares: EdgeShares) -> _Parts:
    graph, links = split_edges(parts.graph, shares, parts.told["name"])
    return replace(parts, graph=graph, links=links)


def _about_links(links: LinkParts, graph: Graph) -> dict[str, Any]:
    """For meta.json: how many there are, and how many of those to foretell the graph has anyway."""
    told: dict[str, Any] = {"name": links.name, "metric": links.metric}
    told |= {part: links.edges[part].shape[1] for part in PARTS}
    sorted_graph = with_sorted_columns(graph)
    arrays = sorted_graph.indptr.numpy(), sorted_graph.indices.numpy()
    for part in PARTS[1:]:
        sources, targets = links.edges[part]
        there = are_edges(*arrays, sources, targets) | are_edges(*arrays, targets, sources)
        told[f"{part}_in_graph"] = int(there.sum())
    return told


def _tensors(links: LinkParts) -> Links:
    return Links(
        {part: _tensor(edges) for part, edges in links.edges.items()},
        {part: _tensor(pairs) for part, pairs in links.negatives.items()},
        links.metric,
    )


def _reread(opened: Prepared, choices: _Choices) -> _Parts:
    _check_split(opened)
    _check_links(opened)
    graph = _graph_of(opened).rebuilt(
        bidirected=bool(choices.bidirected),
        self_loops=choices.self_loops or "keep",
        duplicates=choices.duplicates or "keep",
    )
    meta = opened.meta
    told = {key: meta[key] for key in ("name", "metric", "best_accuracy", "split")}
    told["origin"] = dict(meta["origin"])
    asked = {
        key: value
        for key, value in vars(choices).items()
        if key != "allow_nan" and value is not None
    }
    told["options"] = meta["options"] | asked
    return _Parts(graph, opened.labels, opened.split, meta["num_classes"], told, opened.links)


def _refuse_nan(opened: Prepared, allow_nan: bool) -> None:
    told = opened.meta["features"]
    if told is not None and not told["finite"] and not allow_nan:
        raise ValueError(
            f"{opened.folder} was prepared with features that are not finite\n\n"
            "hint: mend the features, or allow such numbers with --allow-nan"
        )


def _rows(opened: Source | Prepared, given: str | Path | Array | None) -> Rows | None:
    """The features to prepare: those given, else those of the source."""
    rows: Rows | None
    if given is None:
        rows = opened.rows if isinstance(opened, Prepared) else opened.features
    elif isinstance(given, str | Path):
        rows = rows_of_array(_open_npy(Path(given)), str(given))
    else:
        rows = rows_of_array(np.asarray(given), "features")
    num_nodes = len(opened.labels) if isinstance(opened, Prepared) else opened.num_nodes
    if rows is not None and rows.num_rows != num_nodes:
        raise ValueError(
            f"{rows.where} has {rows.num_rows:,} rows of features for {num_nodes:,} nodes\n\n"
            "hint: there is one row for each node, in the order of the node ids"
        )
    return rows


def _open_npy(path: Path) -> Array:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}\n\nhint: give the path of a .npy of features")
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is no .npy of numbers: {error}\n\nhint: `numpy.save` writes one"
        ) from None
    return array


@dataclass(frozen=True)
class _Form:
    """How features are stored."""

    dtype: np.dtype  # of the file
    name: str  # of the type of its numbers
    scales: ScaleKind | None = None  # of codes
    scale_columns: int | None = None
    codes: Codes | None = None  # to be taken over as they are

    @property
    def is_coded(self) -> bool:
        """Whether the file's type is another than that of its numbers, or numbers have scales."""
        return self.name in CODES


def _form_of(rows: Rows, wanted: FeatureDtype | None, scales: ScaleKind) -> _Form:
    name, dtype = wanted, stored_dtype(rows, wanted)
    if wanted is None and rows.codes is not None:
        name = cast(FeatureDtype, rows.codes.dtype)
    if scales == "columns" and wanted not in SCALED:
        raise ValueError(
            f"{wanted or 'features as they are'} and scales of columns do not go together\n\n"
            f"hint: the types that are scaled are {', '.join(SCALED)}"
        )
    if name is None or name not in CODES:
        return _Form(dtype, str(dtype))
    if wanted is None and rows.codes is not None and rows.codes.scales is not None:
        per = rows.codes.scale_columns
        return _Form(dtype, name, "row" if per is None else "columns", per, rows.codes)
    if name not in SCALED:
        return _Form(dtype, name)
    return _Form(dtype, name, scales, SCALE_COLUMNS if scales == "columns" else None)


def _check_layout(
    rows: Rows | None, form: _Form | None, sparse: bool, pitch_bytes: int | None
) -> bool:
    """Demand that the features can be kept as asked; whether they are kept sparse."""
    if rows is None or form is None:
        return False
    dtype = form.dtype
    if sparse and form.is_coded:
        raise ValueError(
            f"sparse features cannot be kept as {form.name}\n\n"
            "hint: leave out --sparse-features, or keep them as float16"
        )
    if sparse and rows.csr is None:
        raise ValueError(
            f"{rows.where} has dense features, which cannot be kept sparse\n\n"
            "hint: leave out --sparse-features"
        )
    if pitch_bytes and (
        sparse or pitch_bytes < _row_bytes(rows, dtype) or pitch_bytes % dtype.itemsize
    ):
        raise ValueError(
            f"rows of {_row_bytes(rows, dtype)} bytes of {dtype} cannot lie {pitch_bytes} bytes "
            "apart\n\nhint: the pitch of dense rows is at least their size, and whole numbers fit"
        )
    return sparse


def _pitch(rows: Rows | None, dtype: np.dtype | None, pitch_bytes: int | None) -> tuple[int, str]:
    """How far apart rows are to lie, and why."""
    if rows is None or dtype is None:
        return 0, ""
    row_bytes = _row_bytes(rows, dtype)
    if pitch_bytes is None and row_bytes:
        return choose_pitch(row_bytes, dtype.itemsize)
    return pitch_bytes or row_bytes, "as asked"


def _row_bytes(rows: Rows, dtype: np.dtype) -> int:
    return rows.num_columns * dtype.itemsize


def _needed_bytes(
    opened: Source | Prepared, rows: Rows | None, dtype: np.dtype | None, pitch: int, sparse: bool
) -> int:
    """What the folder and the files of the edges take at least."""
    if isinstance(opened, Prepared):
        num_nodes, num_edges = len(opened.labels), len(opened.indices)
        edges = num_edges * opened.indices.itemsize
    else:
        num_nodes, num_edges = opened.num_nodes, opened.num_edges
        edges = 3 * num_edges * node_dtype(num_nodes).itemsize
    needed = edges + 16 * num_nodes
    if rows is not None and dtype is not None:
        if sparse and rows.csr is not None:
            needed += len(rows.csr.values) * (dtype.itemsize + 4) + 4 * num_nodes
        else:
            needed += num_nodes * pitch
    return needed


def _write_dense(
    writer: store.Writer,
    rows: Rows,
    form: _Form,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write the rows; whether all of them were finite."""
    all_finite, dtype = True, form.dtype

    def looked_at() -> Iterator[Array]:
        nonlocal all_finite
        for chunk in converted(rows, dtype, allow_nan, allocate, progress):
            if allow_nan and all_finite:
                all_finite = bool(np.isfinite(chunk).all())
            yield chunk

    writer.save_rows("features.npy", rows, dtype, pitch_bytes, looked_at())
    return all_finite


def _write_codes(
    writer: store.Writer,
    rows: Rows,
    form: _Form,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write codes, and their scales if they have any; whether all numbers were finite."""
    if form.codes is not None and form.codes.scales is not None:
        kept = rows_of_array(form.codes.array, rows.where)
        writer.save_rows("features.npy", kept, form.dtype, pitch_bytes, kept.chunks(allocate))
        writer.save("features_scales.npy", form.codes.scales)
        return True
    all_finite, dtype, per = True, getattr(torch, form.name), form.scale_columns
    scales = torch.empty(0)
    if form.scales == "row":
        scales = torch.from_numpy(allocate("scales", rows.num_rows, np.float32))
    elif per is not None:
        most = torch.zeros(-(-rows.num_columns // per))
        for chunk in _exact_chunks(rows, form, allow_nan, allocate, progress):
            most = torch.maximum(most, largest(chunk, per))
        scales = scales_of(most, dtype)

    def coded() -> Iterator[Array]:
        nonlocal all_finite
        done = 0
        for chunk in _exact_chunks(rows, form, allow_nan, allocate, progress):
            part = slice(done, done + len(chunk))
            if form.scales is None:
                codes = chunk.to(dtype)
                all_finite = all_finite and bool(are_finite(chunk))
                _demand_in_range(codes, chunk, form, rows.where, done)
            elif per is None:
                scales[part] = scales_of(largest(chunk), dtype)
                codes = quantize(chunk, scales[part], dtype)
            else:
                codes = quantize(chunk, scales, dtype, per)
            done = part.stop
            # numpy knows integers of the same width
            integers = torch.int8 if dtype.itemsize == 1 else torch.int16
            yield codes.view(integers).numpy().view(form.dtype)

    writer.save_rows("features.npy", rows, form.dtype, pitch_bytes, coded())
    if form.scales is not None:
        writer.save("features_scales.npy", scales.numpy())
    return all_finite


def _exact_chunks(
    rows: Rows, form: _Form, allow_nan: bool, allocate: Allocate, progress: Progress
) -> Iterator[Tensor]:
    """The rows as float32, which are finite if they are to have scales."""
    done = 0
    for chunk in converted(rows, np.dtype(np.float32), allow_nan, allocate, progress):
        if allow_nan and form.scales is not None and not (good := np.isfinite(chunk)).all():
            row, column = (int(i) for i in np.argwhere(~good)[0])
            raise ValueError(
                f"{rows.where}: {chunk[row, column]} in row {done + row}, column {column}, but "
                f"{form.name} with scales holds finite numbers alone\n\n"
                "hint: mend the features, or keep them as float16"
            )
        done += len(chunk)
        yield _tensor(np.ascontiguousarray(chunk))


def _demand_in_range(codes: Tensor, chunk: Tensor, form: _Form, where: str, first_row: int) -> None:
    bad = codes.isinf() & chunk.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: {float(chunk[row, column])} in row {first_row + row} is too large for "
            f"{form.name}\n\nhint: keep the features as float32, or scale them"
        )


def _write_sparse(
    writer: store.Writer,
    rows: Rows,
    form: _Form,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write the CSR parts; whether all values were finite."""
    assert rows.csr is not None
    csr = rows.csr
    values = finite(csr.values, form.dtype, allow_nan, rows.where)
    # torch wants one type for both
    kind = np.int32 if max(len(values), rows.num_columns) < 2**31 else np.int64
    writer.save("features_indptr.npy", csr.indptr.astype(kind, copy=False))
    writer.save("features_indices.npy", csr.indices.astype(kind, copy=False))
    writer.save("features_values.npy", values)
    return not allow_nan or bool(np.isfinite(values).all())


def _features_in_memory(rows: Rows | None, allow_nan: bool, allocate: Allocate) -> Tensor | None:
    if rows is None:
        return None
    dtype = stored_dtype(rows, None)
    table = allocate("features", rows.num_rows * rows.num_columns, dtype)
    table = table.reshape(rows.num_rows, rows.num_columns)
    done = 0
    for chunk in converted(rows, dtype, allow_nan, in_memory, no_progress):
        table[done : done + len(chunk)] = chunk
        done += len(chunk)
    return _tensor(table)


def _mapped_features(opened: Prepared) -> tuple[Tensor | None, FeatureTable | None]:
    """The features if they are numbers, and the table of them if they are codes with scales."""
    if opened.csr is not None:
        columns = opened.meta["features"]["columns"]
        return _sparse(opened.csr, len(opened.labels), columns), None
    if opened.codes is not None:
        codes = opened.codes
        # not every torch knows integers without a sign
        integers = codes.array.view(f"i{codes.array.itemsize}")
        numbers = _tensor(integers).view(getattr(torch, codes.dtype))
        if codes.scales is None:
            return numbers, None
        return None, FeatureTable(numbers, _tensor(codes.scales), codes.scale_columns)
    return None if opened.features is None else _tensor(opened.features), None


def _sparse(csr: Csr, num_rows: int, num_columns: int) -> Tensor:
    size = (num_rows, num_columns)
    indptr, indices, values = _tensor(csr.indptr), _tensor(csr.indices), _tensor(csr.values)
    with warnings.catch_warnings():
        # torch says once that sparse CSR is in beta
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)


def _tensor(array: Array) -> Tensor:
    """A tensor on the memory of `array`, which may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
