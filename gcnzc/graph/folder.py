"""Write heterogeneous graphs to prepared folders, and memory-map them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.datasets import store
from gcnzc.datasets.names import FOLDER as NAMES_FOLDER
from gcnzc.datasets.names import NamesFolder
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Csr,
    Progress,
    QuantizedRows,
    Rows,
    no_progress,
    rows_from_array,
    rows_from_codes,
    rows_from_csr,
)
from gcnzc.datasets.store import HEADER_BYTES, HETERO_VERSION, front_of
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.graph.stored_features import (
    FeatureLayout,
    choose_format,
    features_to_tensors,
    to_tensor,
    write_features,
)
from gcnzc.graph.stores import EdgeStore, NodeStore
from gcnzc.graph.values import check_classes, check_parts


def save(
    graph: Graph,
    dest: Path,
    layout: FeatureLayout,
    origin: Mapping[str, Any],
    *,
    allow_nan: bool,
    progress: Progress,
) -> None:
    """Write a prepared folder, which `load` memory-maps; see `gcnzc.prepare`.

    The folder appears atomically when it is complete, and `meta.json` has a checksum of each file.

    Args:
        graph: is checked first.
        dest: the folder to write; must not exist.
        layout: of the features of nodes; those of edges are stored with the default dtype.
        origin: provenance of the graph, for `meta.json`.
        allow_nan: accept features that are not finite.
        progress: called as `progress(what, done, total)`.

    Raises:
        FileExistsError: `dest` exists.
        ValueError: features are not finite, or `layout` does not apply to them.
        RuntimeError: the disk is full, or another process is writing `dest`.
    """
    graph.check()
    with store.atomic_folder(dest, _needed_bytes(graph)) as folder:
        writer = store.Writer(folder, progress)
        allocate = store.scratch_allocator(folder)
        nodes, edges = [], []
        for number, name in enumerate(graph.node_types):
            own = writer.within(front_of("nodes", number))
            nodes.append(_save_nodes(own, name, graph.nodes(name), layout, allow_nan, allocate))
        for number, edge_type in enumerate(graph.edge_types):
            own = writer.within(front_of("edges", number))
            edges.append(_save_edges(own, edge_type, graph.edges(edge_type), allow_nan, allocate))
        about = {"format": "hetero"} | dict(origin)
        meta = {"name": graph.name, "nodes": nodes, "edges": edges, "origin": about}
        meta |= {} if graph.time_unit is None else {"time_unit": graph.time_unit}
        writer.finish(meta, HETERO_VERSION)


def _needed_bytes(graph: Graph) -> list[int]:
    """Return the sizes of the files except for names and features.

    The stored dtype of features may be smaller than the graph's.
    """
    found: list[Tensor | None] = []
    for node_type in graph.node_types:
        nodes = graph.nodes(node_type)
        found += [nodes.labels, nodes.time, *nodes.split.values()]
    for edge_type in graph.edge_types:
        own = graph.edges(edge_type)
        found += [own.indptr, own.indices, own.edge_ids, own.time, own.weight]
    return [HEADER_BYTES + array.nbytes for array in found if array is not None]


def _save_nodes(
    writer: store.Writer,
    name: str,
    nodes: NodeStore,
    layout: FeatureLayout,
    allow_nan: bool,
    allocate: Allocate,
) -> dict[str, Any]:
    labels = None
    if nodes.labels is not None:
        writer.save("labels.npy", nodes.labels.numpy())
        labels = {"shape": list(nodes.labels.shape), "dtype": str(nodes.labels.numpy().dtype)}
    for part, ids in nodes.split.items():
        writer.save(f"split_{part}.npy", ids.numpy())
    if nodes.time is not None:
        writer.save("time.npy", nodes.time.numpy())
    if isinstance(nodes.names, NamesFolder):
        for file in nodes.names.checksums:
            nodes.names.verify(file)
        writer.copy(nodes.names.path / NAMES_FOLDER, NAMES_FOLDER)
    elif nodes.names is not None:
        writer.save_names(nodes.names)
    rows = rows_of(nodes.features, nodes.quantized, f"features of node type {name!r}")
    return {
        "type": name,
        "num_nodes": nodes.num_nodes,
        "features": _save_features(writer, rows, layout, allow_nan, allocate),
        "labels": labels,
        "split": {part: len(ids) for part, ids in nodes.split.items()},
        "time": nodes.time is not None,
    }


def _save_edges(
    writer: store.Writer,
    edge_type: tuple[str, str, str],
    edges: EdgeStore,
    allow_nan: bool,
    allocate: Allocate,
) -> dict[str, Any]:
    for what in ("indptr", "indices", "edge_ids", "time", "weight"):
        array = getattr(edges, what)
        if array is not None:
            writer.save(f"{what}.npy", array.numpy())
    rows = rows_of(edges.features, edges.quantized, f"features of edge type {edge_type}")
    return {
        "type": list(edge_type),
        "num_edges": edges.num_edges,
        "features": _save_features(writer, rows, FeatureLayout(), allow_nan, allocate),
        "edge_ids": edges.edge_ids is not None,
        "time": edges.time is not None,
        "weight": edges.weight is not None,
    }


def rows_of(features: Tensor | None, quantized: FeatureTable | None, where: str) -> Rows | None:
    """Return the features of a type as `Rows`; None without features."""
    if quantized is not None:
        scales = None if quantized.scales is None else quantized.scales.numpy()
        return _coded(quantized.rows, scales, quantized.scale_columns, where)
    if features is None:
        return None
    if features.layout == torch.sparse_csr:
        parts = (features.crow_indices(), features.col_indices(), features.values())
        csr = Csr(*(part.numpy() for part in parts))
        return rows_from_csr(csr, features.shape[1], where)
    if features.dtype == torch.bfloat16:
        return _coded(features, None, None, where)
    return rows_from_array(features.numpy(), where)


def _coded(codes: Tensor, scales: Array | None, per: int | None, where: str) -> Rows:
    # numpy has no such dtypes
    integers = codes.view(torch.int8 if codes.dtype.itemsize == 1 else torch.int16).numpy()
    name = str(codes.dtype).removeprefix("torch.")
    unsigned = integers if name == "int8" else integers.view(f"u{integers.itemsize}")
    return rows_from_codes(QuantizedRows(unsigned, name, scales, per), where)


def _save_features(
    writer: store.Writer,
    rows: Rows | None,
    layout: FeatureLayout,
    allow_nan: bool,
    allocate: Allocate,
) -> dict[str, Any] | None:
    if rows is None:
        return None
    own = FeatureLayout(layout.dtype, layout.scales, rows.csr is not None, layout.pitch_bytes)
    storage = choose_format(rows, own)
    finite = write_features(writer, rows, storage, allow_nan, allocate, no_progress)
    return storage.describe(rows.num_columns, finite=finite, normalized=False)


def load(folder: str | Path) -> Graph:
    """Memory-map a prepared folder of a heterogeneous graph.

    Offsets and sources are checked where they are sampled; `verify` checks everything. Writes to
    the tensors change the memory of this process, and not the folder; on a machine with a GPU, the
    features and the structure are read-only, see `gcnzc.Dataset`.

    Raises:
        FileNotFoundError: the folder or a file does not exist.
        ValueError: the folder is damaged or has a graph of one type.
    """
    folder = Path(folder)
    meta, arrays = store.open_hetero(folder, read_only=torch.cuda.is_available())
    nodes, edges = {}, {}
    for number, own in enumerate(meta["nodes"]):
        front = front_of("nodes", number)
        features, quantized = _features(folder, arrays, own, own["num_nodes"], front)
        nodes[own["type"]] = NodeStore(
            own["num_nodes"],
            features,
            quantized,
            _tensor(arrays, f"{front}labels.npy"),
            {part: to_tensor(arrays[f"{front}split_{part}.npy"]) for part in own["split"]},
            _tensor(arrays, f"{front}time.npy"),
            NamesFolder.find(folder, meta["files"], front),
        )
    for number, own in enumerate(meta["edges"]):
        front = front_of("edges", number)
        features, quantized = _features(folder, arrays, own, own["num_edges"], front)
        source, relation, target = own["type"]
        edges[source, relation, target] = EdgeStore(
            to_tensor(arrays[f"{front}indptr.npy"]),
            to_tensor(arrays[f"{front}indices.npy"]),
            _tensor(arrays, f"{front}edge_ids.npy"),
            features=features,
            quantized=quantized,
            time=_tensor(arrays, f"{front}time.npy"),
            weight=_tensor(arrays, f"{front}weight.npy"),
        )
    graph = Graph.from_stores(
        nodes, edges, name=meta["name"], time_unit=meta.get("time_unit"), check=False
    )
    graph.folder = folder
    return graph


def info(folder: str | Path) -> dict[str, Any]:
    """Return the metadata of a prepared folder of a heterogeneous graph.

    Returns:
        A dict with kind, "hetero", folder, name, num_nodes and num_edges of all types together,
        nodes and edges, a list of dicts by type, time_unit if it is known, origin, disk_bytes and
        version.
    """
    meta = store.read_meta(Path(folder), HETERO_VERSION)
    files = meta.pop("files")
    meta.pop("crc32")
    meta["num_nodes"] = sum(own["num_nodes"] for own in meta["nodes"])
    meta["num_edges"] = sum(own["num_edges"] for own in meta["edges"])
    meta["disk_bytes"] = sum(entry["bytes"] for entry in files.values())
    return {"kind": "hetero", "folder": str(folder)} | meta


def _features(
    folder: Path, arrays: dict[str, Array], own: dict[str, Any], count: int, front: str
) -> tuple[Tensor | None, FeatureTable | None]:
    fields = own["features"]
    opened = store.open_features(folder, arrays, fields, front)
    return features_to_tensors(opened, 0 if fields is None else fields["columns"], count)


def _tensor(arrays: dict[str, Array], name: str) -> Tensor | None:
    return to_tensor(arrays[name]) if name in arrays else None


def verify(folder: str | Path, progress: Progress = no_progress) -> None:
    """Check the checksums of a prepared folder, and all values of its graph.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged; the message names it.
    """
    store.verify(Path(folder), progress, HETERO_VERSION)
    graph = load(folder)
    graph.check()
    for name in graph.node_types:
        check_targets(f"{folder}, node type {name!r}", graph.nodes(name))


def check_targets(where: str, nodes: NodeStore) -> None:
    """Check the labels and the split of a node type, which loading does not read.

    Raises:
        ValueError: a label is not a class, or a node of the split is out of range or in two parts.
    """
    for part, ids in nodes.split.items():
        if np.any(ids.numpy() < 0) or np.any(ids.numpy() >= nodes.num_nodes):
            raise ValueError(
                f"{where}: the {part} split has ids out of range\n\n"
                f"hint: ids are from 0 to {nodes.num_nodes - 1}"
            )
    if nodes.labels is not None:
        check_classes(f"{where}: labels", nodes.labels.numpy())
    check_parts(f"{where}: split", nodes.split, nodes.num_nodes)
