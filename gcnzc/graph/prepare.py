"""Write prepared folders: datasets in the format that `gcnzc.load` memory-maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import names, store
from gcnzc.datasets.generated import are_percentages
from gcnzc.datasets.ogb_hetero import is_hetero_layout, is_hetero_name
from gcnzc.datasets.rows import Array, Progress, Rows, no_progress, normalize_rows
from gcnzc.datasets.source import (
    SPLITS,
    EdgeSplitArrays,
    Metric,
    Source,
    check_metric,
    choose_metric,
    count_classes,
    has_label,
    node_dtype,
)
from gcnzc.datasets.store import HEADER_BYTES, Prepared
from gcnzc.graph import folder
from gcnzc.graph.arrays import from_arrays
from gcnzc.graph.edge_split import EdgeShares, split_edges, with_sorted_columns
from gcnzc.graph.graph import Duplicates, Graph, Loops
from gcnzc.graph.load import (
    GraphOptions,
    LoadedGraph,
    find_named,
    log_notes,
    open_named,
    open_source,
    read_graph,
    read_typed,
    refuse_nan,
    refuse_options,
    verify_prepared,
)
from gcnzc.graph.stored_features import (
    FeatureDtype,
    FeatureLayout,
    ScaleKind,
    StoredFormat,
    choose_format,
    feature_rows,
    write_features,
)
from gcnzc.kernels.sample.exclude import are_edges
from gcnzc.system.arguments import describe


def prepare(
    source: Any = None,
    dest: str | Path | None = None,
    *,
    edges: Any = None,
    labels: Any = None,
    splits: Any = None,
    num_nodes: int | None = None,
    metric: Metric | None = None,
    name: str | None = None,
    download: bool = False,
    features: Any = None,
    normalize_features: bool = False,
    sparse_features: bool = False,
    feature_dtype: FeatureDtype | None = None,
    scales: ScaleKind = "row",
    pitch_bytes: int | None = None,
    bidirected: bool | None = None,
    self_loops: Loops | None = None,
    duplicates: Duplicates | None = None,
    split: str | int | None = None,
    random_split: Sequence[int] | None = None,
    seed: int = 0,
    edge_split: EdgeShares | None = None,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Convert a dataset to a prepared folder, which `load` memory-maps.

    For a graph in memory, pass the folder as `dest` or as the only positional argument::

        gcnzc.prepare(dest="data/mine", edges=edge_index, features=x, labels=y, splits=splits)

    A `Graph` of several types, or one in OGB's layout, becomes a folder with all types. It is read
    into memory, and `bidirected` adds the reverse of every edge type; the default is not to.

    Dense features are converted in chunks, so that peak memory does not depend on their size.
    Sparse features and `.pt` files are read into memory. Edges are buffered in unlinked temporary
    files on the disk of `dest`; the graph itself is built in memory.

    Args:
        source: a folder in OGB's layout, also a heterogeneous one like ogbn-mag, an `.npz` archive,
            a `.toml` file that describes csv or parquet tables, a `.pt` file of PyG, a prepared
            folder, or the name of an OGB dataset, which is looked up in the folder `downloads` next
            to `dest`; or a graph in memory, as for `edges`.
        dest: the folder to write; must not exist. It appears atomically when it is complete.
        edges: a graph in memory: a tensor, an array, a pandas table, a SciPy matrix, or a graph of
            networkx, PyG or DGL. `gcnzc.graph.arrays.from_arrays` describes this argument,
            `labels`, `splits` and `num_nodes`. Replaces `source`; a single positional argument is
            then `dest`.
        labels: (N,) classes, -1 for none, or (N, T) tasks.
        splits: for a graph in memory: node ids or masks of "train", "valid" and "test".
        num_nodes: N, if features and labels do not determine it.
        metric: "accuracy" or "rocauc"; None uses the metric of the source.
        name: name of the dataset. For a graph in memory, the default is the name of the folder
            `dest`. For files, the name also selects the dataset's settings; see `load`.
        download: download the named dataset from OGB if it is not in `downloads`.
        features: (N, D) array, or the path of a `.npy` file of it, that replaces the features of
            the source; for a graph in memory also a pandas table or a SciPy matrix.
        normalize_features: divide each row by the sum of its absolute values.
        sparse_features: store sparse features of the source as CSR, instead of as a dense array.
        feature_dtype: dtype of the stored features. None converts to float32, but keeps float16,
            bfloat16 and quantized features that are not to be normalized. int8,
            float8_e4m3fn and float8_e5m2 are stored as codes with scales and require finite
            features; see `gcnzc.kernels.gather.quantize` for the quantization error.
        scales: "row" stores one scale for each row of codes; "columns" one for each block of 16
            columns, shared by all rows, which takes a second pass over the features.
        pitch_bytes: distance between the starts of consecutive rows of dense features, in bytes;
            0 stores them without padding. None pads rows to multiples of 128 B if it saves at least
            5 % of the PCIe requests for at most 10 % more memory, see
            `gcnzc.features.pcie_traffic.choose_pitch`.
        bidirected: see `load`; this and the next two are recorded in `meta.json`.
        self_loops: see `load`.
        duplicates: see `load`.
        split: name or index of the split to use, for files that contain several; see `load`.
        random_split: percentages of the nodes with a label in train, valid and test, such as (60,
            20, 20): divides them at random, and replaces the split of the source.
        seed: of `random_split`. Equal seeds, labels and ids of nodes have equal splits, also if
            nodes with names have another order.
        edge_split: hold out edges for validation and test, see `gcnzc.graph.split_edges`; ignored
            for a source that contains an edge split.
        allow_nan: accept features that are not finite; `meta.json` records whether there are any.
        progress: called as `progress(what, done, total)` with counts of bytes, rows or edges.

    Raises:
        FileNotFoundError: the source does not exist.
        FileExistsError: `dest` exists.
        TypeError: `source` and `edges` are both given or both missing, one of them has an
            unsupported type, or `dest` is missing.
        ValueError: the source is invalid; the message names the file and the value. Or an argument
            does not apply to this source.
        RuntimeError: the disk is full, the download failed, or another process is writing `dest`.
    """
    source, dest = _source_and_dest(source, dest, edges)
    if random_split is not None and (split is not None or splits is not None):
        raise ValueError("random_split replaces the split of the source\n\nhint: omit one of them")
    if random_split is not None and not are_percentages(random_split):
        raise ValueError(
            f"random_split is {random_split!r:.100}\n\nhint: percentages of the nodes in train, "
            "valid and test, such as 60,20,20, with a sum of at most 100"
        )
    if edges is not None or not _is_path_or_source(source):
        if split is not None:
            raise ValueError(
                f"split is {split!r:.100}, but a graph in memory has no named splits\n\n"
                "hint: splits= takes the node ids or masks of train, valid and test"
            )
        arrays = {"labels": labels, "splits": splits, "num_nodes": num_nodes, "metric": metric}
        feature_array = None if isinstance(features, str | Path) else features
        graph = source if edges is None else edges
        source = from_arrays(graph, feature_array, **arrays, name=name or dest.name)
        features = features if isinstance(features, str | Path) else None
    elif any(each is not None for each in (labels, splits, num_nodes)):
        raise ValueError(
            "labels, splits and num_nodes apply to a graph in memory, but the source is "
            f"{source}\n\nhint: pass the graph as edges= instead, or write the arrays into an .npz"
        )
    typed = source if _is_typed(source) else _find_typed(source, dest, download, progress)
    if typed is not None:
        refuse_options(
            typed,
            self_loops=(self_loops, "keep"),
            duplicates=(duplicates, "keep"),
            edge_split=(edge_split, None),
            features=(features, None),
            metric=(metric, None),
            normalize_features=(normalize_features, False),
            sparse_features=(sparse_features, False),
            random_split=(random_split, None),
        )
        # the folder of a download need not have the name of the dataset
        if name is None and isinstance(source, str) and typed != Path(source):
            name = source
        origin: dict[str, Any] = {}
        if isinstance(typed, Graph):
            if bidirected or split is not None:
                raise ValueError(f"{typed} has the edges and splits that it was built with")
            graph, origin = typed, _origin_of(typed)
            if name is not None:
                graph = graph.with_nodes(
                    {each: graph.nodes(each) for each in graph.node_types}, name
                )
        else:
            if store.is_hetero(typed):
                # otherwise the new folder would have valid checksums of damaged data
                folder.verify(typed, progress)
            graph, origin = read_typed(typed, name, split, bool(bidirected), allow_nan, progress)
        layout = FeatureLayout(feature_dtype, scales, False, pitch_bytes)
        folder.save(graph, dest, layout, origin, allow_nan=allow_nan, progress=progress)
        return
    dataset = source
    if isinstance(source, str | Path):
        dataset = _open(source, dest, name, split, download, progress)
    _write(
        dataset,
        dest,
        GraphOptions(bidirected, self_loops, duplicates, allow_nan, random_split, seed),
        _FeatureOptions(
            features,
            normalize_features,
            FeatureLayout(feature_dtype, scales, sparse_features, pitch_bytes),
        ),
        metric,
        edge_split,
        progress,
    )


def _find_typed(source: Any, dest: Path, download: bool, progress: Progress) -> Path | None:
    """Return the folder of a graph of several types; None for any other source."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    if not path.exists() and is_hetero_name(str(source)):
        return find_named(str(source), dest.parent / "downloads", download, progress)
    return path if is_hetero_layout(path) or store.is_hetero(path) else None


@dataclass(frozen=True)
class _FeatureOptions:
    """Options of the stored features."""

    given: str | Path | Array | None  # replaces the features of the source
    normalize: bool
    layout: FeatureLayout


def _open(
    source: str | Path,
    dest: Path,
    name: str | None,
    split: str | int | None,
    download: bool,
    progress: Progress,
) -> Source | Prepared:
    """Open the dataset at a path, or the OGB dataset with that name."""
    opened = open_source(Path(source), name, split, progress)
    if opened is not None:
        return opened
    return open_named(str(source), dest.parent / "downloads", download, split, progress)


def _write(
    opened: Source | Prepared,
    dest: Path,
    options: GraphOptions,
    features: _FeatureOptions,
    metric: Metric | None,
    edge_split: EdgeShares | None,
    progress: Progress,
) -> None:
    """Write the prepared folder of an open dataset; see `prepare`."""
    if isinstance(opened, Prepared):
        # otherwise the new folder would have valid checksums of damaged data
        verify_prepared(opened, progress)
        if features.given is None:
            refuse_nan(opened, options.allow_nan)
    rows = feature_rows(opened, features.given)
    if rows is not None and features.normalize:
        rows = normalize_rows(rows)
    storage = None if rows is None else choose_format(rows, features.layout)
    with store.atomic_folder(dest, _needed_bytes(opened, rows, storage)) as partial:
        allocate = store.scratch_allocator(partial)
        loaded = read_graph(opened, options, allocate, progress)
        if edge_split is not None and loaded.links is None:
            loaded = _with_split_edges(loaded, edge_split)
        if metric is not None:
            loaded.metadata["metric"] = check_metric(metric, loaded.labels, loaded.num_classes)
        writer = store.Writer(partial, progress)
        _write_graph(writer, loaded)
        feature_metadata = None
        if rows is not None and storage is not None:
            all_finite = write_features(
                writer, rows, storage, options.allow_nan, allocate, progress
            )
            feature_metadata = storage.describe(
                rows.num_columns, finite=all_finite, normalized=features.normalize
            )
            if features.given is not None:
                is_path = isinstance(features.given, str | Path)
                loaded.metadata["origin"]["features"] = (
                    str(features.given) if is_path else "an array"
                )
        _write_mapping(writer, opened, keeps_features=features.given is None)
        writer.finish(
            {
                **loaded.metadata,
                "num_nodes": loaded.graph.num_nodes,
                "num_edges": loaded.graph.num_edges,
                "num_classes": loaded.num_classes,
                "num_tasks": 1 if loaded.labels.ndim == 1 else loaded.labels.shape[1],
                "num_labelled": int(np.count_nonzero(has_label(loaded.labels))),
                "features": feature_metadata,
                "links": None
                if loaded.links is None
                else _edge_split_metadata(loaded.links, loaded.graph),
            }
        )
    log_notes(loaded)


def _write_graph(writer: store.Writer, loaded: LoadedGraph) -> None:
    """Write the arrays of the graph, its labels and its splits."""
    writer.save("indptr.npy", loaded.graph.indptr.numpy())
    writer.save("indices.npy", loaded.graph.indices.numpy())
    writer.save("labels.npy", loaded.labels)
    for part, ids in loaded.split.items():
        writer.save(f"split/{part}.npy", ids)
    if loaded.links is not None:
        for part, edges in loaded.links.edges.items():
            writer.save(f"links/{part}.npy", edges)
        for part, pairs in loaded.links.negatives.items():
            writer.save(f"links/{part}_negatives.npy", pairs)


def _source_and_dest(source: Any, dest: str | Path | None, edges: Any) -> tuple[Any, Path]:
    """Return the source and the folder to write; the source is None if `edges` is given."""
    if edges is not None and dest is None and isinstance(source, str | Path):
        source, dest = None, source
    hint = 'prepare("mine.npz", "data/mine"), or prepare(dest="data/mine", edges=..., labels=...)'
    if source is not None and edges is not None:
        raise TypeError(
            f"prepare was given both edges and a source, {describe(source)}\n\nhint: {hint}"
        )
    if source is None and edges is None:
        raise TypeError(f"prepare was given neither a source nor edges\n\nhint: {hint}")
    if dest is None:
        given = "edges" if source is None else f"a source, {describe(source)},"
        raise TypeError(
            f"prepare was given {given} but no dest, the folder to write\n\nhint: {hint}"
        )
    return source, Path(dest)


def _is_path_or_source(source: Any) -> bool:
    """Whether `source` is a path, a name or a `Source`, rather than edges or a graph object."""
    is_path = isinstance(source, str | Path)
    return is_path or _is_typed(source) or hasattr(source, "split_name")


def _origin_of(graph: Graph) -> dict[str, Any]:
    """Return the number of classes and the metric of a graph in memory, if one type has classes."""
    labelled = [each for each in graph.node_types if graph.nodes(each).labels is not None]
    if len(labelled) != 1:
        return {}
    nodes = graph.nodes(labelled[0])
    assert nodes.labels is not None
    labels = nodes.labels.numpy()
    if labels.ndim == 1 and labels.dtype.kind == "f":
        return {}
    has_names = labels.ndim == 1 and nodes.classes is not None
    return {
        "num_classes": len(nodes.classes or ()) if has_names else count_classes(labels),
        "metric": choose_metric(labels, "accuracy"),
    }


def _is_typed(source: Any) -> bool:
    return isinstance(source, Graph) and source.has_types


def _with_split_edges(loaded: LoadedGraph, shares: EdgeShares) -> LoadedGraph:
    graph, links = split_edges(loaded.graph, shares, loaded.metadata["name"])
    return replace(loaded, graph=graph, links=links)


def _edge_split_metadata(links: EdgeSplitArrays, graph: Graph) -> dict[str, Any]:
    """Describe an edge split for meta.json: its sizes, and how many held-out edges are in `graph`.

    A held-out edge counts once if the graph contains it or its reverse.
    """
    about: dict[str, Any] = {"name": links.name, "metric": links.metric}
    about |= {part: links.edges[part].shape[1] for part in SPLITS}
    sorted_graph = with_sorted_columns(graph)
    arrays = sorted_graph.indptr.numpy(), sorted_graph.indices.numpy()
    for part in SPLITS[1:]:
        src, dst = links.edges[part]
        is_in_graph = are_edges(*arrays, src, dst) | are_edges(*arrays, dst, src)
        about[f"{part}_in_graph"] = int(is_in_graph.sum())
    return about


def _write_mapping(writer: store.Writer, opened: Source | Prepared, keeps_features: bool) -> None:
    """Write or copy the names of nodes and classes, and of features unless they are replaced."""
    mapping = opened.folder / names.FOLDER if isinstance(opened, Prepared) else opened.mapping
    if isinstance(mapping, names.Names):
        writer.save_names(mapping if keeps_features else replace(mapping, features=None))
    elif mapping is not None and mapping.is_dir():
        leave_out = () if keeps_features else (names.FILES["features"][0],)
        writer.copy(mapping, names.FOLDER, leave_out)


def _needed_bytes(
    opened: Source | Prepared, rows: Rows | None, storage: StoredFormat | None
) -> list[int]:
    """Estimate the file sizes at the peak of disk use.

    These are the temporary edge files, or the files of the folder if they are larger: the temporary
    files are freed before the folder's arrays are written. The estimate ignores edges that will be
    added or removed, because their number is not known yet.
    """
    temporary: list[int] = []
    if isinstance(opened, Prepared):
        num_nodes, edge_bytes = len(opened.labels), opened.indices.nbytes
    else:
        num_nodes = opened.num_nodes
        edge_bytes = opened.num_edges * node_dtype(num_nodes).itemsize
        temporary = [edge_bytes, edge_bytes]
    arrays = [8 * (num_nodes + 1), edge_bytes, 8 * num_nodes]
    if rows is not None and storage is not None:
        if storage.is_sparse and rows.csr is not None:
            count = len(rows.csr.values)
            arrays += [4 * num_nodes, 4 * count, count * storage.dtype.itemsize]
        else:
            arrays.append(num_nodes * storage.pitch_bytes)
    return max([HEADER_BYTES + size for size in arrays], temporary, key=sum)
