"""Graphs in memory as sources of `prepare`: arrays, and the objects of other libraries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.datasets.names import Names, read_names
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Csr,
    Progress,
    QuantizedRows,
    Rows,
    rows_from_array,
    rows_from_codes,
    rows_from_csr,
)
from gcnzc.datasets.source import SPLITS, EdgeDefaults, Metric, check_ends, node_dtype, part_of
from gcnzc.datasets.tables import END_NAMES
from gcnzc.graph.folder import rows_of
from gcnzc.graph.graph import Graph
from gcnzc.graph.values import split_of_words
from gcnzc.system.arguments import check_integer, describe

# edge defaults for graph objects that store edge directions
AS_STORED = EdgeDefaults(False, "keep", "a graph object whose edges have directions")
HINT = (
    "hint: edges are a (2, E) tensor or array of node ids, a pair (sources, targets), a pandas "
    "table of two columns, a SciPy matrix, or a graph of networkx, PyG or DGL"
)

NUMBER_IDS = (
    "node ids are integers; `ids, edges = numpy.unique(edges, return_inverse=True)` numbers other "
    "ids of a (2, E) array, or of numpy.array(table).T, and node i is then ids[i]"
)


@dataclass
class ArrayGraph:
    """A graph in memory; a `gcnzc.datasets.source.Source`. See `from_arrays`."""

    name: str
    num_nodes: int
    ends: tuple[Array, Array]
    features: Rows | None
    node_labels: Array
    parts: dict[str, Array]
    metric: Metric
    split_name: str
    default: EdgeDefaults | None = None
    origin: dict[str, Any] = field(default_factory=lambda: {"format": "arrays"})
    num_classes: int | None = None
    best_accuracy: float | None = None
    mapping: Names | None = None
    # what the graph object says of its edges and a prepared folder does not store
    edge_values: tuple[str, ...] = ()

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.ends[0])

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return the defaults of graph objects; None for edges given as arrays or tables."""
        return self.default

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """See `Source.edges`."""
        dtype = node_dtype(self.num_nodes)
        found = []
        for which, ids in zip(("sources", "destinations"), self.ends, strict=True):
            check_ends(ids, self.num_nodes, f"{self.name}: {which}")
            out = allocate(which, len(ids), dtype)
            out[:] = ids
            found.append(out)
        progress("edges", self.num_edges, self.num_edges)
        return found[0], found[1]

    def labels(self) -> Array:
        """See `Source.labels`."""
        return self.node_labels

    def split(self) -> dict[str, Array]:
        """See `Source.split`."""
        return self.parts


def from_arrays(
    edges: Any,
    features: Any = None,
    labels: Any = None,
    splits: Any = None,
    *,
    num_nodes: int | None = None,
    metric: Metric | None = None,
    name: str = "graph",
) -> ArrayGraph:
    """Describe a graph in memory for `prepare`.

    Arrays and CPU tensors are not copied before `prepare` writes them. Lists, networkx graphs, GPU
    tensors and boolean masks are converted, which copies them.

    Args:
        edges: (2, E) node ids, sources then targets; a pair of (E,) ids; a pandas table of two
            columns; a SciPy matrix (N, N) whose stored elements are edges from row to column; a
            networkx graph, whose nodes are numbered in their order; a `Graph`, a PyG `Data` or a
            DGL graph of one node type, whose features, labels and masks are the defaults of the
            arguments.
            The edges of a directed graph object have the directions that are stored. For edges
            from arrays, tables or matrices, `prepare` adds the reverse edges by default if all
            edges go from a lower to a higher id, or all the other way.
        features: (N, D) numbers, also a tensor of bfloat16; a pandas table; or a SciPy matrix,
            which is kept sparse until `prepare` decides; None for a graph without features.
        labels: (N,) classes, -1 or NaN for none; or (N, T) tasks.
        splits: for "train", "valid" and "test", or another common name such as "val_mask", node
            ids or (N,) masks; or an (N,) array with one of these words for each node. Without
            labels and splits, the graph serves for predictions and for link prediction.
        num_nodes: N; by default the length of features and labels, which must be equal; without
            them, the largest id plus one.
        metric: "accuracy" or "rocauc"; by default accuracy, and ROC AUC for several tasks.
        name: the graph's.

    Raises:
        TypeError: an argument is of an unknown type.
        ValueError: sizes do not match, only one of labels and splits is given, elements of an array
            are masked, or the ids of a networkx graph are 0 to N - 1 in another order.
    """
    found = _read_object(edges)
    features = found.get("features") if features is None else features
    if features is None and hasattr(edges, "canonical_etypes"):
        _refuse_other_features(edges)
    labels = found.get("labels") if labels is None else labels
    splits = found.get("splits") if splits is None else splits
    ends = found["ends"]
    rows = _rows(features)
    values = None if labels is None else _array(labels, "labels")
    lengths = {
        what: length
        for what, length in (
            ("features", None if rows is None else rows.num_rows),
            ("labels", None if values is None else len(values)),
            ("nodes", found.get("num_nodes")),
        )
        if length is not None
    }
    if num_nodes is not None:
        lengths = {"num_nodes": check_integer("num_nodes", num_nodes, 1), **lengths}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{count:,} {what}" for what, count in lengths.items())
        raise ValueError(
            f"{name}: the numbers of nodes differ: {given}\n\n"
            "hint: features and labels have one row for each node, in the order of the node ids"
        )
    largest = max((int(ids.max()) + 1 for ids in ends if len(ids)), default=0)
    count = next(iter(lengths.values()), largest)
    is_multi_label = values is not None and values.ndim == 2 and values.shape[1] > 1
    return ArrayGraph(
        name,
        count,
        ends,
        rows,
        np.full(count, -1) if values is None else values,
        dict.fromkeys(SPLITS, np.empty(0, np.int64)) if splits is None else _parts(splits, count),
        metric or ("rocauc" if is_multi_label else "accuracy"),
        "given",
        found.get("default"),
        mapping=found.get("mapping"),
        edge_values=names_of_values(found.get("edge_values", {})),
    )


def _read_object(edges: Any) -> dict[str, Any]:
    """Return `ends`, and what else the object of another library has, by argument names."""
    # of its base classes, too: users derive classes from those of networkx
    libraries = {kind.__module__.split(".")[0] for kind in type(edges).__mro__}
    if isinstance(edges, Graph):
        edges.check_untyped()
        nodes = edges.nodes()
        sources, targets = edges.coo()
        stored = nodes.names
        return {
            "ends": (sources.numpy(), targets.numpy()),
            "num_nodes": nodes.num_nodes,
            "default": AS_STORED,
            "features": rows_of(nodes.features, nodes.quantized, "features"),
            "labels": nodes.labels,
            "splits": nodes.split or None,
            "mapping": stored if isinstance(stored, Names) else read_names(stored),
        }
    if "networkx" in libraries:
        return _from_networkx(edges)
    if "pandas" in libraries:
        names = _columns_of_ends(edges)
        ends = _ends([edges[name].to_numpy() for name in names])
        return {"ends": ends, "edge_values": values_of_table(edges, names)}
    if hasattr(edges, "tocoo") and hasattr(edges, "shape"):
        matrix = edges.tocoo()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"edges is a matrix of shape {matrix.shape}, which is not square")
        return {
            "ends": (matrix.row, matrix.col),
            "num_nodes": int(matrix.shape[0]),
            "edge_values": {"the elements of the matrix": matrix.data},
        }
    if hasattr(edges, "canonical_etypes"):
        return _from_dgl(edges)
    if any(kind.__name__ in ("Dataset", "DGLDataset") for kind in type(edges).__mro__):
        raise TypeError(f"edges is {describe(edges)}, not a graph\n\nhint: dataset[0] is the first")
    if hasattr(edges, "edge_types") and hasattr(edges, "to_homogeneous"):
        raise ValueError(
            f"the PyG data has node types {edges.node_types} and edge types {edges.edge_types}\n\n"
            "hint: a prepared folder has one type of each; data.to_homogeneous() merges them"
        )
    if hasattr(edges, "edge_index") and hasattr(edges, "num_nodes"):
        return _from_pyg(edges)
    return {"ends": _ends(edges)}


def _ends(edges: Any) -> tuple[Array, Array]:
    if isinstance(edges, tuple | list) and len(edges) == 2:
        pair = [_array(ids, "edges") for ids in edges]
    else:
        array = _array(edges, "edges")
        if array.ndim != 2 or len(array) != 2:
            raise ValueError(
                f"edges has shape {array.shape}\n\n{HINT}; edges.T turns (E, 2) into (2, E)"
            )
        pair = [array[0], array[1]]
    if any(ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)) for ids in pair):
        types = " and ".join(f"{ids.dtype} of shape {ids.shape}" for ids in pair)
        raise ValueError(f"edges has {types}\n\n{HINT}; {NUMBER_IDS}")
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"edges has {len(pair[0]):,} sources and {len(pair[1]):,} targets\n\n{HINT}"
        )
    return pair[0], pair[1]


def _columns_of_ends(table: Any) -> tuple[Any, Any]:
    columns = list(getattr(table, "columns", []))
    names = next((pair for pair in END_NAMES if set(pair) <= set(columns)), None)
    if names is None and len(columns) == 2:
        names = columns[0], columns[1]
    if names is None:
        raise ValueError(
            f"edges is a table with the columns {', '.join(map(str, columns))}\n\n"
            "hint: give two columns, or name them source and target"
        )
    return names


def _from_networkx(graph: Any) -> dict[str, Any]:
    number = {node: place for place, node in enumerate(graph.nodes)}
    if set(number) == set(range(len(number))) and list(number) != sorted(number):
        first = ", ".join(map(str, list(number)[:3]))
        raise ValueError(
            f"the networkx graph has the nodes 0 to {len(number) - 1} in another order: {first}, "
            "... Rows of features and labels may be in the order of the ids or in this one\n\n"
            "hint: for the order of the ids, add the nodes before the edges, "
            "graph.add_nodes_from(range(N)); for this order, pass "
            "networkx.convert_node_labels_to_integers(graph)"
        )
    # not `graph.edges` itself, which also has the keys of a multigraph's edges
    pairs = [[number[u], number[v]] for u, v in graph.edges()]
    ends = np.array(pairs, np.int64).reshape(-1, 2).T
    default = AS_STORED
    if not graph.is_directed():
        default = EdgeDefaults(True, "keep", "a networkx graph without directions")
    ids = np.array([str(node) for node in number], object)
    is_numbered = all(node == place for node, place in number.items())
    # nodes of different types may have the same text
    mapping = None if is_numbered or len(set(ids)) < len(ids) else Names(nodes=ids)
    return {
        "ends": (ends[0], ends[1]),
        "num_nodes": len(number),
        "default": default,
        "mapping": mapping,
        "edge_values": values_of_networkx(graph),
    }


def _from_pyg(data: Any) -> dict[str, Any]:
    if data.edge_index is None:
        raise ValueError("the PyG data has no edge_index\n\nhint: Data(edge_index=...)")
    return {
        "ends": _ends(data.edge_index),
        "num_nodes": int(data.num_nodes),
        "default": AS_STORED,
        "features": getattr(data, "x", None),
        "labels": getattr(data, "y", None),
        "splits": _masks(data.to_dict()),
        "edge_values": values_of_pyg(data.to_dict()),
    }


def from_attributes(
    attributes: Mapping[str, Any], name: str = "graph", split: str | None = None
) -> ArrayGraph:
    """Describe a graph by the attributes of a PyG `Data`, as a dict.

    Args:
        attributes: `edge_index`, and `x`, `y` and masks, as far as there are any.
        name: the graph's.
        split: the column of masks with several splits.

    Raises:
        ValueError: sizes do not match, or there is no such split.
    """
    masks = _masks(attributes)
    has_many_splits = masks is not None and any(
        _array(each, "mask").ndim == 2 for each in masks.values()
    )
    if masks is not None and has_many_splits:
        columns = {part: np.atleast_2d(_array(each, part).T) for part, each in masks.items()}
        count = max(len(each) for each in columns.values())
        if split is None or not split.isdecimal() or int(split) >= count:
            raise ValueError(
                f"{name} has {count} splits, 0 to {count - 1}; split is {split}\n\n"
                "hint: choose one with split=0 (--split 0)"
            )
        # a mask of one column is the same in all splits
        masks = {part: each[int(split) % len(each)] for part, each in columns.items()}
    elif split is not None:
        raise ValueError(f"{name} has no split {split}\n\nhint: it has one; omit split")
    num_nodes = attributes.get("num_nodes")
    graph = from_arrays(
        attributes["edge_index"],
        attributes.get("x"),
        attributes.get("y"),
        masks,
        num_nodes=None if num_nodes is None else int(num_nodes),
        name=name,
    )
    graph.default = AS_STORED
    graph.edge_values = names_of_values(values_of_pyg(attributes))
    return graph


def _masks(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the masks of the parts among attributes; None unless there are all three."""
    masks = {
        part: value
        for key, value in attributes.items()
        if str(key).endswith("_mask") and value is not None
        for part in [part_of(key)]
        if part is not None
    }
    return masks if set(masks) == set(SPLITS) else None


def _from_dgl(graph: Any) -> dict[str, Any]:
    if len(graph.ntypes) != 1 or len(graph.etypes) != 1:
        raise ValueError(
            f"the DGL graph has node types {graph.ntypes} and edge types {graph.etypes}\n\n"
            "hint: a prepared folder has one type of each; graph[etype] selects one"
        )
    return {
        "ends": _ends(graph.edges(order="eid")),
        "num_nodes": int(graph.num_nodes()),
        "default": AS_STORED,
        "features": graph.ndata.get("feat"),
        "labels": graph.ndata.get("label"),
        "splits": _masks(graph.ndata),
        "edge_values": values_of_dgl(graph),
    }


def _refuse_other_features(graph: Any) -> None:
    """Raise if a DGL graph without the node data `feat` seems to have features by another name."""
    for key, value in graph.ndata.items():
        if key != "label" and value.ndim == 2 and value.is_floating_point():
            raise ValueError(
                f"the DGL graph has no node data 'feat', but {key!r} of shape {tuple(value.shape)}"
                f"\n\nhint: features=graph.ndata[{key!r}]; or graph.ndata.pop({key!r}) for a graph "
                "without features"
            )


def _rows(features: Any) -> Rows | None:
    if features is None or isinstance(features, Rows):
        return features
    if hasattr(features, "tocsr") and hasattr(features, "shape"):
        matrix = features.tocsr()
        csr = Csr(matrix.indptr, matrix.indices, matrix.data)
        return rows_from_csr(csr, int(matrix.shape[1]), "features")
    if isinstance(features, Tensor) and features.dtype == torch.bfloat16 and features.ndim == 2:
        # numpy has no bfloat16
        bits = _array(features.contiguous().view(torch.int16), "features").view(np.uint16)
        return rows_from_codes(QuantizedRows(bits, "bfloat16", None, None), "features")
    array = _array(features, "features")
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise ValueError(
            f"features has shape {array.shape}, type {array.dtype}, not (N, D) numbers"
        )
    return rows_from_array(array, "features")


def _parts(splits: Any, num_nodes: int) -> dict[str, Array]:
    if not isinstance(splits, Mapping):
        found = split_of_words("splits", splits, num_nodes)
        return {part: ids.numpy() for part, ids in found.items()}
    named = {part_of(key): value for key, value in splits.items()}
    if set(named) != set(SPLITS) or len(named) < len(splits):
        raise ValueError(
            f"splits has {', '.join(map(str, splits)) or 'nothing'}\n\n"
            'hint: it has "train", "valid" and "test"'
        )
    return {part: _ids(named[part], part, num_nodes) for part in SPLITS}


def _ids(given: Any, part: str, num_nodes: int) -> Array:
    array = _array(given, f"splits[{part!r}]")
    if array.dtype.kind != "b":
        return array
    if array.shape != (num_nodes,):
        raise ValueError(
            f"splits[{part!r}] is a mask of shape {array.shape} for {num_nodes:,} nodes\n\n"
            "hint: a mask is (N,); for a mask with several columns, select one: mask[:, 0]"
        )
    return np.flatnonzero(array)


def _array(values: Any, name: str) -> Array:
    array = _as_numpy(values, name)
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeError(f"{name} is {describe(values)}\n\nhint: a tensor, an array or a list")
    if np.ma.is_masked(array):
        raise ValueError(
            f"{np.ma.count_masked(array):,} elements of {name} are masked\n\n"
            "hint: remove them, or replace them with array.filled(value)"
        )
    return np.asarray(array)


def _as_numpy(values: Any, name: str) -> Any:
    """Return the numpy array of a tensor, a list or a pandas object; others unchanged."""
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu().numpy()
        if isinstance(values, Sequence) and not isinstance(values, str):
            return np.asarray(values, None if values else np.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        # a sparse tensor, a dtype that numpy lacks, or rows of different lengths
        raise ValueError(
            f"{name} is {describe(values)}, which cannot be converted to a NumPy array: {error}\n\n"
            "hint: a dense tensor or array; tensor.to_dense() of a sparse tensor, and "
            "tensor.float() of a dtype that numpy lacks"
        ) from error
    to_numpy = getattr(values, "to_numpy", None)
    return values if to_numpy is None else to_numpy()


# attributes of a PyG `Data`
PYG_NAMES = ("edge_weight", "edge_attr")


def names_of_values(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the values that distinguish edges: those that are not all 1.

    Args:
        values: weights or features of the edges by name; None for a name without values.
    """
    return tuple(name for name, each in values.items() if each is not None and not _are_one(each))


def note_of_values(names: tuple[str, ...]) -> str:
    """Return the message that these values are not stored."""
    return (
        f"not stored: {', '.join(names)}; a prepared folder has no weights and no features of "
        "edges, so all edges count the same"
    )


def values_of_networkx(graph: Any) -> dict[str, Any]:
    """Return the weights of the edges of a networkx graph; an edge without one has weight 1."""
    return {"weight": [weight for *_, weight in graph.edges(data="weight", default=1)]}


def values_of_pyg(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights and features of the edges of a PyG `Data`, as a dict."""
    return {name: attributes.get(name) for name in PYG_NAMES}


def values_of_dgl(graph: Any) -> dict[str, Any]:
    """Return the edge data of a DGL graph, except ids of DGL's and masks."""
    return {
        f"edata[{name!r}]": value
        for name, value in graph.edata.items()
        if not name.startswith("_") and not name.endswith("_mask")
    }


def values_of_table(table: Any, ends: tuple[Any, Any]) -> dict[str, Any]:
    """Return the columns of a pandas table of edges, except those of their ends."""
    columns = [column for column in table.columns if column not in ends]
    return {f"column {column}": table[column].to_numpy() for column in columns}


def _are_one(values: Any) -> bool:
    if isinstance(values, Tensor):
        return values.layout == torch.strided and bool((values == 1).all())
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        return False
    return array.dtype.kind in "biuf" and bool((array == 1).all())
