"""Open datasets: prepared folders, OGB folders, `.npz`, `.toml` and `.pt` files, named graphs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcnzc.datasets import catalog, download, ogb, store
from gcnzc.datasets.generated import split_labelled
from gcnzc.datasets.names import Names, NamesFolder, read_names
from gcnzc.datasets.npz import NpzGraph
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.ogb_hetero import OgbHetero, is_hetero_layout
from gcnzc.datasets.ogb_layout import is_link_layout
from gcnzc.datasets.ogb_link import OgbLinkGraph
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Progress,
    allocate_in_memory,
    convert_chunks,
    no_progress,
    rows_from_csr,
    stored_dtype,
)
from gcnzc.datasets.source import (
    SPLITS,
    EdgeDefaults,
    EdgeSplitArrays,
    Source,
    choose_metric,
    clean_edge_split,
    clean_labels,
    clean_split,
    count_classes,
    describe_gap,
    guess_edge_defaults,
    has_label,
)
from gcnzc.datasets.store import Prepared
from gcnzc.datasets.table_graph import TableGraph, is_table
from gcnzc.graph import folder
from gcnzc.graph import ogb as typed_ogb
from gcnzc.graph.arrays import ArrayGraph, note_of_values
from gcnzc.graph.dataset import Dataset, EdgeSplit
from gcnzc.graph.edge_split import with_sorted_columns
from gcnzc.graph.graph import NODE, Duplicates, Graph, Loops
from gcnzc.graph.ogb import from_hetero_arrays, origin_of
from gcnzc.graph.pyg_file import read_pyg_file
from gcnzc.graph.stored_features import (
    feature_rows,
    map_features,
    read_features,
    to_tensor,
    to_tensors,
)
from gcnzc.graph.stores import NodeStore

_log = logging.getLogger("gcnzc")


@dataclass(frozen=True)
class GraphOptions:
    """Options for building the graph; None uses the default of the dataset."""

    bidirected: bool | None
    self_loops: Loops | None
    duplicates: Duplicates | None
    allow_nan: bool
    random_split: Sequence[int] | None = None  # percentages of the splits
    seed: int = 0


@dataclass(frozen=True)
class LoadedGraph:
    """A dataset without its features, read and validated."""

    graph: Graph
    labels: Array
    split: dict[str, Array]
    num_classes: int
    metadata: dict[str, Any]  # for meta.json: name, metric, best_accuracy, split, options, origin
    links: EdgeSplitArrays | None = None
    notes: tuple[str, ...] = ()  # what the user may not expect of the graph, one line each


def load(
    path: str | Path,
    *,
    name: str | None = None,
    bidirected: bool | None = None,
    self_loops: Loops | None = None,
    duplicates: Duplicates | None = None,
    split: str | int | None = None,
    allow_nan: bool = False,
    allocate: Allocate = allocate_in_memory,
) -> Dataset:
    """Load a dataset from a prepared folder, a folder in OGB's layout, or a file.

    A prepared folder is memory-mapped, which takes no time and no memory at any size. The other
    formats are read into memory.

    Args:
        path: the folder; or an `.npz` archive, a `.toml` that names csv or parquet tables, or a
            `.pt` file of PyG.
        name: name of the dataset in the catalogue, which provides its metric, number of classes
            and edge defaults; None uses the name in the files. Ignored for prepared folders, which
            contain these settings.
        bidirected: add the reverse of every edge. None uses the default of the dataset: its
            `add_inverse_edge`, both directions for ogbn-arxiv, or, if the dataset has no such
            setting, both directions if all edges go from lower to higher ids, or all from higher
            to lower. For a prepared folder, None
            keeps the graph as it was prepared; any other value of this and of the next two options
            rebuilds the graph in memory.
        self_loops: "keep", "add" or "remove"; None keeps them.
        duplicates: "keep" or "remove"; None keeps them, except for ogbn-arxiv.
        split: name or index of the split, if there are several; see `OgbGraph` and `NpzGraph`. It
            selects which nodes `Dataset.split` contains.
        allow_nan: accept features that are not finite.
        allocate: allocates the memory for the features: `allocate("features", size, dtype)` returns
            a writable (size,) numpy array. The default is pageable host memory. Not called for a
            prepared folder.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        ValueError: the files are invalid; the message names the file and the value.
        RuntimeError: there is not enough memory.
    """
    path = Path(path)
    if store.is_hetero(path) or is_hetero_layout(path):
        refuse_options(path, self_loops=(self_loops, "keep"), duplicates=(duplicates, "keep"))
        typed = read_typed(path, name, split, bool(bidirected), allow_nan, no_progress)
        return _typed_dataset(*typed, path)
    options = GraphOptions(bidirected, self_loops, duplicates, allow_nan)
    source = open_source(path, name, split)
    if source is None:
        raise FileNotFoundError(
            f"no folder {path}\n\nhint: `gcnzc make {path}` writes a graph there, "
            f"`gcnzc prepare ogbn-arxiv {path} --download` gets one"
        )
    loaded = read_graph(source, options, allocate_in_memory, no_progress)
    log_notes(loaded)
    if isinstance(source, Prepared):
        refuse_nan(source, allow_nan)
        features, quantized = map_features(source)
    else:
        quantized = None
        features = read_features(feature_rows(source, None), allow_nan, allocate)
    metadata = loaded.metadata
    nodes = NodeStore(
        loaded.graph.num_nodes,
        features,
        quantized,
        to_tensor(loaded.labels),
        to_tensors(loaded.split),
        names=_names_of(source),
    )
    return Dataset(
        loaded.graph.with_nodes({NODE: nodes}, metadata["name"]),
        NODE,
        num_classes=loaded.num_classes,
        metric=metadata["metric"],
        best_accuracy=metadata["best_accuracy"],
        folder=path,
        origin=metadata["origin"] | {"options": metadata["options"], "split": metadata["split"]},
        links=None if loaded.links is None else _edge_split_tensors(loaded.links),
    )


def read_typed(
    path: Path,
    name: str | None,
    split: str | int | None,
    reverse: bool,
    allow_nan: bool,
    progress: Progress,
) -> tuple[Graph, dict[str, Any]]:
    """Return a graph of several types from a prepared folder or OGB's layout, and its origin."""
    if store.is_hetero(path):
        if reverse or split is not None:
            raise ValueError(
                f"{path} is prepared: edges and splits are those that it was prepared with\n\n"
                "hint: prepare it again from its source, with --bidirected or --split"
            )
        return folder.load(path), folder.info(path)["origin"]
    arrays = OgbHetero(path, name, None if split is None else str(split)).read(progress)
    graph = from_hetero_arrays(arrays, str(path), reverse=reverse, allow_nan=allow_nan)
    return graph, origin_of(arrays, reverse)


def _typed_dataset(graph: Graph, origin: dict[str, Any], path: Path) -> Dataset:
    labelled = [each for each in graph.node_types if graph.nodes(each).labels is not None]
    return Dataset(
        graph,
        labelled[0] if len(labelled) == 1 else "",
        num_classes=origin.get("num_classes") or 0,
        metric=origin.get("metric", "accuracy"),
        best_accuracy=origin.get("best_accuracy"),
        folder=path,
        origin=origin,
    )


def refuse_options(source: object, **options: tuple[Any, Any]) -> None:
    """Check that options are None or have their defaults for a graph of several types."""
    for name, (value, default) in options.items():
        if value is not None and value is not default and value != default:
            raise ValueError(
                f"{name} is {value!r:.100}, but {source} has a graph of several types\n\n"
                "hint: leave it out; name, split, feature_dtype, scales, pitch_bytes, allow_nan "
                "and bidirected, which adds reverse edge types, apply to such graphs"
            )


def log_notes(loaded: LoadedGraph) -> None:
    """Log what the user may not expect of a graph."""
    for note in loaded.notes:
        _log.warning("%s", note)


def _names_of(source: Source | Prepared) -> Names | NamesFolder | None:
    if isinstance(source, Prepared):
        return NamesFolder.find(source.folder, source.meta["files"])
    return source.mapping if isinstance(source.mapping, Names) else None


def info(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a dataset without reading its arrays.

    Returns:
        A dict with name, kind ("prepared", "ogb", "npz", "tables" or "pyg"), folder, num_nodes,
        num_edges (as stored), num_classes, metric, best_accuracy, features (None, or a dict with
        kind, columns, dtype, ...), split, origin and links (whether there is an edge split; for
        prepared folders its description). For prepared folders also num_tasks, num_labelled,
        options, disk_bytes, feature_bytes and version. For a prepared folder of a heterogeneous
        graph, kind is "hetero", and for one in OGB's layout "ogb-hetero"; see
        `gcnzc.graph.folder.info` and `gcnzc.graph.ogb.info`.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        ValueError: the files are invalid.
    """
    path = Path(path)
    if store.is_hetero(path):
        return folder.info(path)
    if is_hetero_layout(path):
        return typed_ogb.info(path)
    source = open_source(path, None, None)
    if source is None:
        raise FileNotFoundError(f"no folder {path}\n\nhint: is the path right?")
    if isinstance(source, Prepared):
        meta = dict(source.meta)
        files = meta.pop("files")
        meta.pop("crc32")
        meta["disk_bytes"] = sum(entry["bytes"] for entry in files.values())
        meta["feature_bytes"] = sum(
            entry["bytes"] for file, entry in files.items() if file.startswith("features")
        )
        return {"kind": "prepared", "folder": str(path)} | meta
    rows = source.features
    about_features = None
    if rows is not None:
        about_features = {
            "kind": "dense" if rows.csr is None else "sparse",
            "columns": rows.num_columns,
            "dtype": str(stored_dtype(rows, None)),
        }
    return {
        "kind": "ogb" if isinstance(source, OgbGraph) else source.origin["format"],
        "folder": str(path),
        "name": source.name,
        "num_nodes": source.num_nodes,
        "num_edges": source.num_edges,
        "num_classes": source.num_classes,
        "metric": source.metric,
        "best_accuracy": source.best_accuracy,
        "features": about_features,
        "split": {"name": source.split_name},
        "origin": source.origin,
        "links": isinstance(source, OgbLinkGraph),
    }


def verify(path: str | Path, progress: Progress = no_progress) -> None:
    """Read and validate a whole dataset.

    Of a prepared folder, check the checksums, graph, labels and splits; of other formats, check
    every value.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or invalid; the message names it.
    """
    path = Path(path)
    if store.is_hetero(path):
        folder.verify(path, progress)
        return
    if is_hetero_layout(path):
        from_hetero_arrays(OgbHetero(path).read(progress), str(path))
        return
    source = open_source(path, None, None)
    if source is None:
        raise FileNotFoundError(f"no folder {path}\n\nhint: is the path right?")
    if isinstance(source, Prepared):
        verify_prepared(source, progress)
        return
    read_graph(source, GraphOptions(None, None, None, False), allocate_in_memory, progress)
    rows = feature_rows(source, None)
    if rows is not None:
        for _ in convert_chunks(
            rows, stored_dtype(rows, None), False, allocate_in_memory, progress
        ):
            pass


def verify_prepared(source: Prepared, progress: Progress) -> None:
    """Check the checksums, graph, labels and splits of a prepared folder."""
    store.verify(source.folder, progress)
    num_nodes, num_classes = len(source.labels), source.meta["num_classes"]
    where = str(source.folder)
    _mapped_graph(source).check()
    clean_labels(source.labels, num_nodes, num_classes, where)
    if any(len(ids) for ids in source.split.values()):
        clean_split(source.split, source.labels, where)
    if source.csr is not None:
        rows_from_csr(source.csr, source.meta["features"]["columns"], where)
    if source.links is not None:
        clean_edge_split(source.links, num_nodes, where)


def _mapped_graph(source: Prepared) -> Graph:
    graph = Graph(source.indptr, source.indices, check=False)
    graph.folder = source.folder
    return graph


def _check_split(source: Prepared) -> None:
    """Check that node ids of the splits are in range and that their labels are valid classes."""
    num_classes = source.meta["num_classes"]
    hint = f"hint: `gcnzc info {source.folder} --verify` reports what is damaged"
    for part, ids in source.split.items():
        _check_nodes(source, ids, f"the {part} split contains")
        labels = source.labels[ids]
        wrong = labels[~np.isnan(labels) & ~((labels >= 0) & (labels < num_classes))]
        if len(wrong):
            raise ValueError(
                f"{source.folder}: a node of the {part} split has the label {wrong[0]}, but "
                f"classes are 0 to {num_classes - 1}\n\n{hint}"
            )


def _check_links(source: Prepared, links: EdgeSplitArrays) -> None:
    """Check that the node ids of split edges and of negatives are in range."""
    for part, ends in links.edges.items():
        _check_nodes(source, ends, f"the {part} edges contain")
    for part, ends in links.negatives.items():
        _check_nodes(source, ends, f"the {part} negatives contain")


def _check_nodes(source: Prepared, ids: Array, context: str) -> None:
    num_nodes = len(source.labels)
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num_nodes):
        return
    outside = ids[(ids < 0) | (ids >= num_nodes)]
    raise ValueError(
        f"{source.folder}: {context} the node {outside[0]}, but nodes are 0 to {num_nodes - 1}\n\n"
        f"hint: `gcnzc info {source.folder} --verify` reports what is damaged"
    )


def open_source(
    path: Path, name: str | None, split: str | int | None, progress: Progress = no_progress
) -> Source | Prepared | None:
    """Open the dataset at `path`; return None if the path does not exist."""
    wanted = None if split is None else str(split)
    if path.is_file():
        return _open_file(path, name, wanted, progress)
    if path.suffix in (".npz", ".toml", ".pt") and not path.exists():
        raise FileNotFoundError(f"no file {path}\n\nhint: is the path right?")
    if not path.is_dir():
        return None
    if store.is_prepared(path):
        prepared = store.open_folder(path, read_only=torch.cuda.is_available())
        found, source = prepared.meta["split"]["name"], prepared.meta["origin"].get("source")
        if wanted not in (None, found):
            wrong = f"{path} was prepared with the split {found}, not {wanted}"
            raise ValueError(f"{wrong}\n\nhint: prepare it again from {source}")
        return prepared
    if ogb.is_layout(path):
        return _open_ogb(path, name, wanted)
    raise ValueError(
        f"{path} is not a dataset: it has neither meta.json nor raw/\n\n"
        "hint: give a prepared folder, or one in OGB's layout"
    )


def open_named(
    name: str, folder: Path, may_download: bool, split: str | int | None, progress: Progress
) -> Source:
    """Open a homogeneous OGB dataset by its name, and download it if `may_download`."""
    unpacked = find_named(name, folder, may_download, progress)
    return _open_ogb(unpacked, download.lookup(name).name, None if split is None else str(split))


def find_named(name: str, folder: Path, may_download: bool, progress: Progress) -> Path:
    """Return the folder of the OGB dataset of a name, and download it if `may_download`."""
    if "/" in name:
        raise FileNotFoundError(
            f"no folder {name}\n\nhint: is the path right? OGB datasets have names like ogbn-arxiv"
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
    return download.fetch(remote, folder, progress)


def _open_file(path: Path, name: str | None, split: str | None, progress: Progress) -> Source:
    if path.suffix == ".npz":
        return NpzGraph(path, name, split)
    if path.suffix == ".toml":
        return TableGraph(path, name, progress)
    if path.suffix == ".pt":
        return read_pyg_file(path, name, split)
    hint = "give a folder, an .npz archive, a .toml that names tables, or a .pt file of PyG"
    if is_table(path):
        hint = (
            f'write a file graph.toml with the lines [edges] and file = "{path.name}", and give '
            "that; [nodes] names the table of nodes"
        )
    raise ValueError(f"{path} is not a dataset\n\nhint: {hint}")


def _open_ogb(path: Path, name: str | None, split: str | None) -> OgbGraph:
    kind = OgbLinkGraph if is_link_layout(path) else OgbGraph
    return kind(path, name, split)


def read_graph(
    source: Source | Prepared, options: GraphOptions, allocate: Allocate, progress: Progress
) -> LoadedGraph:
    """Read and validate the graph, labels and splits of a dataset."""
    if isinstance(source, Prepared):
        return _reload_prepared(source, options)
    labels = clean_labels(
        source.labels(), source.num_nodes, source.num_classes, f"{source.name}: labels"
    )
    where = f"{source.name}: split {source.split_name}"
    links = None
    if isinstance(source, OgbLinkGraph):
        links = clean_edge_split(source.links(), source.num_nodes, where)
    split, about_split = _choose_split(source, labels, options)
    num_dropped = dict.fromkeys(SPLITS, 0)
    # a graph without labels and splits serves for predictions and for link prediction
    has_parts = any(len(ids) for ids in split.values())
    is_labelled = bool(has_label(labels).any())
    if links is None and has_parts != is_labelled:
        missing, key = ("labels", "label") if has_parts else ("split", "split")
        raise ValueError(
            f"{source.name}: the nodes have no {missing}\n\nhint: give both labels and a split, or "
            f"neither for a graph to predict on; in a .toml, {key} in [nodes] names the column; "
            "--random-split 60,20,20, or random_split = [60, 20, 20], divides nodes with labels"
        )
    if links is None and is_labelled:
        split, num_dropped = clean_split(split, labels, where)
    ends = source.edges(allocate, progress)
    edge_defaults = source.edge_defaults() or guess_edge_defaults(ends)
    bidirected = edge_defaults.bidirected if options.bidirected is None else options.bidirected
    # the default for duplicates applies only together with the default for directions
    removes_duplicates = options.bidirected is None and edge_defaults.duplicates == "remove"
    edge_options: dict[str, Any] = {
        "bidirected": bidirected,
        "because": edge_defaults.reason if options.bidirected is None else "asked for",
        "self_loops": options.self_loops or "keep",
        "duplicates": options.duplicates or ("remove" if removes_duplicates else "keep"),
    }
    progress("graph", 0, source.num_edges)
    graph = Graph.from_edges(
        *ends,
        source.num_nodes,
        bidirected=bidirected,
        self_loops=edge_options["self_loops"],
        duplicates=edge_options["duplicates"],
    )
    progress("graph", source.num_edges, source.num_edges)
    metadata = {
        "name": source.name,
        "metric": choose_metric(labels, source.metric),
        "best_accuracy": source.best_accuracy,
        "split": about_split | _describe_sizes(split, num_dropped),
        "options": edge_options,
        "origin": source.origin,
    }
    num_classes = source.num_classes or (count_classes(labels) if is_labelled else 0)
    if links is not None:
        graph = with_sorted_columns(graph)
    notes = _notes(source, edge_defaults, options)
    if source.num_classes is None and (gap := describe_gap(labels)):
        notes = (*notes, f"{source.name}: {gap}")
    return LoadedGraph(graph, labels, split, num_classes, metadata, links, notes)


def _choose_split(
    source: Source | Prepared, labels: Array, options: GraphOptions
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the node ids of each split, those of the files or random ones, and its name."""
    percentages = options.random_split
    if percentages is None and isinstance(source, TableGraph):
        percentages = source.random_split
    if percentages is not None:
        names = _names_of(source)
        if isinstance(names, NamesFolder):
            names = read_names(names, ("nodes",))
        ids = None if names is None else names.nodes
        about = {"name": "random", "percentages": [*percentages], "seed": options.seed}
        return split_labelled(labels, percentages, options.seed, ids), about
    if isinstance(source, Prepared):
        return source.split, dict(source.meta["split"])
    return source.split(), {"name": source.split_name}


def _describe_sizes(split: Mapping[str, Array], dropped: Mapping[str, int]) -> dict[str, Any]:
    return {part: len(split[part]) for part in SPLITS} | {"dropped_without_label": dict(dropped)}


def _notes(source: Source, used: EdgeDefaults, options: GraphOptions) -> tuple[str, ...]:
    notes = []
    is_guess = options.bidirected is None and source.edge_defaults() is None
    if is_guess and used.bidirected:
        notes.append(
            f"the reverse of every edge was added, because {used.reason}; bidirected=False "
            "(--bidirected no) stores the edges without their reverses"
        )
    if isinstance(source, ArrayGraph) and source.edge_values:
        notes.append(note_of_values(source.edge_values))
    if isinstance(source, TableGraph):
        notes += source.notes
    return tuple(notes)


def _edge_split_tensors(links: EdgeSplitArrays) -> EdgeSplit:
    return EdgeSplit(to_tensors(links.edges), to_tensors(links.negatives), links.metric)


def _reload_prepared(source: Prepared, options: GraphOptions) -> LoadedGraph:
    _check_split(source)
    if source.links is not None:
        _check_links(source, source.links)
    graph = _mapped_graph(source).rebuild(
        bidirected=bool(options.bidirected),
        self_loops=options.self_loops or "keep",
        duplicates=options.duplicates or "keep",
    )
    meta = source.meta
    metadata = {key: meta[key] for key in ("name", "metric", "best_accuracy")}
    split, metadata["split"] = _choose_split(source, source.labels, options)
    if options.random_split is not None:
        metadata["split"] |= _describe_sizes(split, dict.fromkeys(SPLITS, 0))
    metadata["origin"] = dict(meta["origin"])
    metadata["options"] = dict(meta["options"])
    for key in ("bidirected", "self_loops", "duplicates"):
        if (value := getattr(options, key)) is not None:
            metadata["options"][key] = value
    return LoadedGraph(graph, source.labels, split, meta["num_classes"], metadata, source.links)


def refuse_nan(source: Prepared, allow_nan: bool) -> None:
    """Raise a ValueError if a prepared folder has non-finite features and `allow_nan` is False."""
    features = source.meta["features"]
    if features is not None and not features["finite"] and not allow_nan:
        raise ValueError(
            f"{source.folder} was prepared with features that are not finite\n\nhint: repair the "
            "features; `gcnzc prepare` and `gcnzc train` accept them with --allow-nan"
        )
