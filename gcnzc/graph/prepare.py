"""Writing a prepared folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import store
from gcnzc.datasets.rows import Progress, Rows, no_progress, normalized
from gcnzc.datasets.source import (
    PARTS,
    LinkParts,
    Metric,
    Source,
    check_metric,
    has_label,
    node_dtype,
)
from gcnzc.datasets.store import Prepared
from gcnzc.graph.arrays import from_arrays
from gcnzc.graph.edge_split import EdgeShares, split_edges, with_sorted_columns
from gcnzc.graph.graph import Duplicates, Graph, Loops
from gcnzc.graph.load import (
    Choices,
    Parts,
    feature_rows,
    open_named,
    open_source,
    read_parts,
    refuse_nan,
    verify_prepared,
)
from gcnzc.graph.stored_features import (
    FeatureDtype,
    ScaleKind,
    check_layout,
    form_of,
    pitch_of,
    write_codes,
    write_dense,
    write_sparse,
)
from gcnzc.kernels.sample.exclude import are_edges


def prepare(
    source: Any,
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
    edge_split: EdgeShares | None = None,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Write a prepared folder, which `load` opens at once.

    From a graph in memory, with the folder alone as position::

        gcnzc.prepare("data/mine", edges=edge_index, features=x, labels=y, splits=splits)

    Features pass through in chunks, so that memory does not grow with their table. Edges lie in
    nameless files beside the destination meanwhile; the graph itself is built in memory.

    Args:
        source: a folder in OGB's layout, an `.npz`, a prepared folder, or the name of one of OGB's
            sets, which is looked for in the folder `downloads` beside `dest`; or a graph in memory,
            as for `edges`; or, if `edges` is given, the folder to write.
        dest: the folder to write; must not exist, and is there only when all of it is.
        edges: of a graph in memory: a tensor, an array, a pandas table, a SciPy matrix, or a graph
            of networkx, PyG or DGL; see `gcnzc.graph.arrays.from_arrays`, also for the next three.
        labels: (N,) classes, -1 for none, or (N, T) tasks.
        splits: node ids or masks of "train", "valid" and "test".
        num_nodes: N, if features and labels do not tell it.
        metric: "accuracy" or "rocauc"; by default that of the source.
        name: see `load`; this and `split` are of files only.
        download: get the named set from OGB if it is not there.
        features: (N, D), or the path of a `.npy` of them, in place of the source's; of a graph in
            memory also a pandas table or a SciPy matrix.
        normalize_features: divide each row by the sum of its absolute values.
        sparse_features: keep features that come sparse as CSR, instead of making them dense.
        feature_dtype: None keeps float16, bfloat16 and codes as they are, and makes all else
            float32. int8, float8_e4m3fn and float8_e5m2 are codes with scales, made of finite
            numbers alone; `gcnzc.kernels.gather.quantize` says how far they are from the numbers.
        scales: of such codes: one for each row; or for each 16 columns, for all rows, which takes
            a second pass over the features.
        pitch_bytes: distance of rows of dense features; 0 puts them side by side, and None chooses
            by what a GPU's reads cost, as `gcnzc.features.pcie_traffic.choose_pitch` does.
        bidirected: see `load`; this and the next two are recorded.
        self_loops: see `load`.
        duplicates: see `load`.
        split: see `load`.
        edge_split: take edges out for validation and test, as `gcnzc.graph.edge_split` does; a
            source that comes with a split of edges keeps it.
        allow_nan: take features that are not finite; the folder then says so.
        progress: called with what is done, how much, and of how much: bytes, rows or edges.

    Raises:
        FileNotFoundError: the source is not there.
        FileExistsError: `dest` is.
        ValueError: what the source holds is wrong; the message says what and where.
        RuntimeError: the disk is full, the network is not there, or another process writes `dest`.
    """
    source, dest = _positions(source, dest, edges)
    if edges is not None or not _is_on_disk_or_source(source):
        memory = {"labels": labels, "splits": splits, "num_nodes": num_nodes, "metric": metric}
        in_memory = None if isinstance(features, str | Path) else features
        graph = source if edges is None else edges
        source = from_arrays(graph, in_memory, **memory, name=name or dest.name)
        features = features if isinstance(features, str | Path) else None
    elif any(each is not None for each in (labels, splits, num_nodes)):
        raise ValueError(
            f"labels, splits and num_nodes are of a graph in memory, not of {source}\n\n"
            "hint: give edges= too, or write the arrays into an .npz"
        )
    choices = Choices(bidirected, self_loops, duplicates, allow_nan)
    opened: Source | Prepared | None
    if isinstance(source, str | Path):
        opened = open_source(Path(source), name, split)
        if opened is None:
            opened = open_named(str(source), dest.parent / "downloads", download, split, progress)
    else:
        opened = source
    if isinstance(opened, Prepared):
        # damage would otherwise be given a right checksum
        verify_prepared(opened, progress)
        if features is None:
            refuse_nan(opened, allow_nan)
    rows = feature_rows(opened, features)
    if rows is not None and normalize_features:
        rows = normalized(rows)
    form = None if rows is None else form_of(rows, feature_dtype, scales)
    dtype = None if form is None else form.dtype
    sparse = check_layout(rows, form, sparse_features, pitch_bytes)
    pitch, why = pitch_of(rows, dtype, pitch_bytes)
    with store.building(dest, _needed_bytes(opened, rows, dtype, pitch, sparse)) as folder:
        allocate = store.scratch(folder)
        parts = read_parts(opened, choices, allocate, progress)
        if edge_split is not None and parts.links is None:
            parts = _with_split_edges(parts, edge_split)
        if metric is not None:
            parts.told["metric"] = check_metric(metric, parts.labels, parts.num_classes)
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
            write = write_sparse if sparse else write_codes if form.is_coded else write_dense
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


def _positions(source: Any, dest: str | Path | None, edges: Any) -> tuple[Any, Path]:
    """Return the source, None for a graph in memory, and the folder to write."""
    if edges is None and dest is not None:
        return source, Path(dest)
    if edges is not None and dest is None and isinstance(source, str | Path):
        return None, Path(source)
    raise TypeError(
        "prepare takes a source and the folder to write, or the folder and edges=\n\n"
        'hint: prepare("mine.npz", "data/mine"), or prepare("data/mine", edges=..., labels=...)'
    )


def _is_on_disk_or_source(source: Any) -> bool:
    return isinstance(source, str | Path) or hasattr(source, "split_name")


def _with_split_edges(parts: Parts, shares: EdgeShares) -> Parts:
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
