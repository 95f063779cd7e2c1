"""Opening datasets: prepared folders, archives and named graphs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import catalog, download, ogb, store
from gcnzc.datasets.npz import NpzGraph
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.ogb_link import OgbLinkGraph, is_link_layout
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Progress,
    Rows,
    converted,
    in_memory,
    no_progress,
    rows_of_array,
    rows_of_csr,
    stored_dtype,
)
from gcnzc.datasets.source import (
    PARTS,
    LinkParts,
    Source,
    clean_labels,
    clean_links,
    clean_split,
    count_classes,
    guess,
    metric_of,
)
from gcnzc.datasets.store import Prepared
from gcnzc.graph.dataset import Dataset, Links
from gcnzc.graph.edge_split import with_sorted_columns
from gcnzc.graph.graph import Duplicates, Graph, Loops
from gcnzc.graph.stored_features import features_in_memory, mapped_features, to_tensor


@dataclass(frozen=True)
class Choices:
    """Options of a graph that `None` takes from the source."""

    bidirected: bool | None
    self_loops: Loops | None
    duplicates: Duplicates | None
    allow_nan: bool


@dataclass(frozen=True)
class Parts:
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
    choices = Choices(bidirected, self_loops, duplicates, allow_nan)
    opened = open_source(path, name, split)
    if opened is None:
        raise FileNotFoundError(
            f"no folder {path}\n\nhint: `gcnzc make {path}` writes a graph there, "
            f"`gcnzc prepare ogbn-arxiv {path} --download` gets one"
        )
    parts = read_parts(opened, choices, in_memory, no_progress)
    if isinstance(opened, Prepared):
        refuse_nan(opened, allow_nan)
        features, quantized = mapped_features(opened)
    else:
        quantized = None
        features = features_in_memory(feature_rows(opened, None), allow_nan, allocate)
    told = parts.told
    return Dataset(
        name=told["name"],
        graph=parts.graph,
        features=features,
        labels=to_tensor(parts.labels),
        split={part: to_tensor(ids) for part, ids in parts.split.items()},
        num_classes=parts.num_classes,
        metric=told["metric"],
        best_accuracy=told["best_accuracy"],
        folder=path,
        origin=told["origin"] | {"options": told["options"], "split": told["split"]},
        quantized=quantized,
        links=None if parts.links is None else _tensors(parts.links),
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
    opened = open_source(path, None, None)
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
    opened = open_source(path, None, None)
    if opened is None:
        raise FileNotFoundError(f"no folder {path}\n\nhint: is the path right?")
    if isinstance(opened, Prepared):
        verify_prepared(opened, progress)
        return
    read_parts(opened, Choices(None, None, None, False), in_memory, progress)
    rows = feature_rows(opened, None)
    if rows is not None:
        for _ in converted(rows, stored_dtype(rows, None), False, in_memory, progress):
            pass


def verify_prepared(opened: Prepared, progress: Progress) -> None:
    """Check a prepared folder's checksums, graph, labels and splits."""
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
        _check_nodes(opened, ids, f"the {part} part names")
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
        _check_nodes(opened, ends, f"the {part} edges have")
    for part, ends in opened.links.negatives.items():
        _check_nodes(opened, ends, f"the {part} negatives have")


def _check_nodes(opened: Prepared, ids: Array, what: str) -> None:
    num_nodes = len(opened.labels)
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num_nodes):
        return
    outside = ids[(ids < 0) | (ids >= num_nodes)]
    raise ValueError(
        f"{opened.folder}: {what} the node {outside[0]}, but nodes are 0 to {num_nodes - 1}\n\n"
        f"hint: `gcnzc info {opened.folder} --verify` says what is damaged"
    )


def open_source(path: Path, name: str | None, split: str | int | None) -> Source | Prepared | None:
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


def open_named(
    name: str, folder: Path, may_download: bool, split: str | int | None, progress: Progress
) -> Source:
    """Open a dataset by its name, downloading it if that is allowed."""
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


def read_parts(
    opened: Source | Prepared, choices: Choices, allocate: Allocate, progress: Progress
) -> Parts:
    """Read the graph, labels and splits of an opened source."""
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
    return Parts(graph, labels, split, num_classes, told, links)


def _tensors(links: LinkParts) -> Links:
    return Links(
        {part: to_tensor(edges) for part, edges in links.edges.items()},
        {part: to_tensor(pairs) for part, pairs in links.negatives.items()},
        links.metric,
    )


def _reread(opened: Prepared, choices: Choices) -> Parts:
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
    return Parts(graph, opened.labels, opened.split, meta["num_classes"], told, opened.links)


def refuse_nan(opened: Prepared, allow_nan: bool) -> None:
    """Raise if a prepared folder has features that are not finite, unless they are allowed."""
    told = opened.meta["features"]
    if told is not None and not told["finite"] and not allow_nan:
        raise ValueError(
            f"{opened.folder} was prepared with features that are not finite\n\n"
            "hint: mend the features, or allow such numbers with --allow-nan"
        )


def feature_rows(opened: Source | Prepared, given: str | Path | Array | None) -> Rows | None:
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
    if rows is not None and rows.num_columns == 0:
        raise ValueError(
            f"{rows.where} has features of 0 columns for {num_nodes:,} nodes\n\n"
            "hint: features have at least one column; a graph without features has no such array"
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
