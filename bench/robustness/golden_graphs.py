"""Entries of `bench.robustness.golden`: prepared folders of all readers of graphs."""

import contextlib
import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import gcnzc
from bench.harness import ROOT
from bench.ogb_folders import write_links, write_nodes
from gcnzc import Graph
from gcnzc.cli import main
from gcnzc.datasets.source import EdgeSplitArrays
from gcnzc.graph import Table, from_tables
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.graph.ogb import to_ogb
from gcnzc.interop.dgl import import_dgl

SEED = 1
SHARED_DATA = ROOT.parent / "shared" / "data"
NODES = 120
PARTS = ("train", "valid", "test")


class Skipped(Exception):
    """The graph of an entry is not on this machine."""


def graph(
    num_nodes: int = 3000, num_edges: int = 30000
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return (2, E) edges with popular nodes, (N, 20) features and (N,) labels of 5 classes."""
    random = np.random.default_rng(SEED)
    weights = 1 / np.arange(1, num_nodes + 1) ** 0.6
    weights /= weights.sum()
    ends = np.stack([random.choice(num_nodes, num_edges, p=weights) for _ in range(2)])
    features = random.standard_normal((num_nodes, 20)).astype(np.float32)
    return ends, features, random.integers(0, 5, num_nodes)


def run(*words: str) -> Any:
    """Run a command of `gcnzc` in this process, and return the JSON that it prints.

    Raises:
        RuntimeError: it failed.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    if status != 0:
        raise RuntimeError(f"gcnzc {' '.join(words[:2])}: {err.getvalue()[-300:]}")
    return json.loads(out.getvalue().splitlines()[-1])


def shared_data(path: str) -> Path:
    """Return the path of a file in `../shared/data`.

    Raises:
        Skipped: it does not exist.
    """
    if not (SHARED_DATA / path).exists():
        raise Skipped(f"no {SHARED_DATA / path}")
    return SHARED_DATA / path


ENDS, FEATURES, LABELS = graph(NODES, 900)
IDS = {part: np.arange(NODES)[i::3] for i, part in enumerate(PARTS)}
WORDS = np.array([PARTS[i % 3] for i in range(NODES)])
GIVEN = {"features": FEATURES, "labels": LABELS, "splits": IDS}
EDGES, X, Y = (torch.from_numpy(each) for each in (ENDS, FEATURES, LABELS))
MASKS = {f"{part}_mask": torch.from_numpy(part == WORDS) for part in PARTS}
# of edges from one of 50 authors to each destination of ENDS
WRITES = torch.stack([EDGES[0] % 50, EDGES[1]])


def archive(**changes: Any) -> str:
    """Write an archive of arrays."""
    split = {f"{part}_idx": ids for part, ids in IDS.items()}
    arrays = {"edge_index": ENDS, "node_feat": FEATURES, "node_label": LABELS, **split, **changes}
    np.savez("a.npz", **{name: array for name, array in arrays.items() if array is not None})
    return "a.npz"


def sparse_archive() -> str:
    """Write an archive of sparse features."""
    rows, columns = np.nonzero(FEATURES > 1)
    return archive(
        node_feat=None,
        feat_data=FEATURES[rows, columns],
        feat_indices=columns,
        feat_indptr=np.searchsorted(rows, np.arange(NODES + 1)),
        feat_shape=np.array(FEATURES.shape),
    )


def pyg_data() -> Any:
    """Return the graph as PyG's `Data`."""
    from torch_geometric.data import Data

    return Data(x=X, y=Y, edge_index=EDGES, **MASKS)


def pyg_file() -> str:
    """Write the file of a data set of PyG."""
    data = pyg_data()
    torch.save((data.to_dict(), None, type(data)), "data.pt")
    return "data.pt"


def dgl_graph() -> Any:
    """Return the graph as a `DGLGraph`."""
    made = import_dgl().graph(tuple(EDGES), num_nodes=NODES)
    made.ndata.update({"feat": X, "label": Y, **MASKS})
    return made


def networkx_graph() -> dict[str, Any]:
    """Return the graph of networkx, whose nodes have names."""
    import networkx

    made = networkx.Graph()
    made.add_nodes_from(f"n{i}" for i in range(NODES))
    made.add_edges_from([(f"n{a}", f"n{b}") for a, b in ENDS.T])
    return {"edges": made, **GIVEN}


def scipy_matrix() -> dict[str, Any]:
    """Return the graph as SciPy matrices."""
    from scipy import sparse

    matrix = sparse.csr_matrix((np.ones(ENDS.shape[1]), tuple(ENDS)), (NODES, NODES))
    return {"edges": matrix, **GIVEN, "features": sparse.csr_matrix(FEATURES)}


def tables(suffix: str) -> str:
    """Write tables of nodes and edges with names, which a TOML file describes."""
    names = np.array([f"n{i * 7 % NODES:03}" for i in range(NODES)])
    kinds = np.array(["cat", "dog", "eel", "fox", ""])[LABELS]
    nodes = pd.DataFrame({"name": names, "kind": kinds, "part": WORDS})
    nodes[["x1", "x2", "x0"]] = FEATURES[:, :3].round(3)
    edges = pd.DataFrame({"from": names[ENDS[0]], "weight": 1, "to": names[ENDS[1]]})
    for file, table in (("nodes", nodes), ("edges", edges)):
        if suffix == "parquet":
            table.to_parquet(f"{file}.parquet", index=False)
        else:
            separator = "," if suffix == "csv" else "\t"
            table.to_csv(f"{file}.{suffix}", sep=separator, index=False)
    Path("graph.toml").write_text(
        f'[edges]\nfile = "edges.{suffix}"\nsource = "from"\ntarget = "to"\nbidirected = true\n'
        f'[nodes]\nfile = "nodes.{suffix}"\nid = "name"\nfeatures = ["x2", "x*"]\n'
        'label = "kind"\nsplit = "part"\n'
    )
    return "graph.toml"


# by name of the file: the lines before the edges, and the number of the first node
EDGE_LISTS = {
    "edges.txt": ("# Nodes: 120\n# FromNodeId\tToNodeId\n", 0),
    "out.edges": ("% asym unweighted\n", 1),
    "edges.mtx.gz": (f"%%MatrixMarket matrix coordinate pattern general\n{NODES} {NODES} 900\n", 1),
}


def edge_list(file: str) -> str:
    """Write a list of edges as text, which a TOML file names."""
    head, first = EDGE_LISTS[file]
    text = (head + "".join(f"{a} {b}\n" for a, b in ENDS.T + first)).encode()
    Path(file).write_bytes(gzip.compress(text) if file.endswith(".gz") else text)
    Path("graph.toml").write_text(f'[edges]\nfile = "{file}"\nbidirected = false\n')
    return "graph.toml"


def ogb_layout(binary: bool) -> str:
    """Write OGB's layout."""
    write_nodes("ogb", ENDS, LABELS, IDS, features=FEATURES, binary=binary)
    return "ogb"


def ogb_links(ranked: bool) -> str:
    """Write the layout of OGB's link property datasets."""
    edges = dict(zip(PARTS, np.split(ENDS, [600, 700], axis=1), strict=True))
    random = np.random.default_rng(SEED)
    negatives = {
        part: random.integers(0, NODES, (edges[part].shape[1], 9) if ranked else (2, 50))
        for part in PARTS[1:]
    }
    links = EdgeSplitArrays(edges, negatives, "mrr" if ranked else "hits@20", "time")
    write_links("ogbl", edges["train"], NODES, links, features=FEATURES, add_inverse_edge=True)
    return "ogbl"


def typed_graph() -> Graph:
    """Return a graph with times, weights, and features of nodes and edges."""
    random = np.random.default_rng(SEED)
    paper = {"features": FEATURES, "labels": LABELS, "split": IDS, "time": 2000 + LABELS}
    cites = {"edge_index": ENDS, "weight": random.random(900, np.float32)}
    writes = {"edge_index": WRITES, "time": random.integers(0, 99, 900)}
    writes["features"] = random.standard_normal((900, 3)).astype(np.float32)
    edges = {("paper", "cites", "paper"): cites, ("author", "writes", "paper"): writes}
    return Graph.from_arrays({"author": 50, "paper": paper}, edges)


def typed_layout(binary: bool) -> str:
    """Write OGB's layout of a graph with several types."""
    to_ogb(typed_graph(), "typed", binary=binary)
    return "typed"


def typed_pyg() -> Graph:
    """Return a graph from PyG's `HeteroData`."""
    from torch_geometric.data import HeteroData

    data = HeteroData(
        author={"num_nodes": 50},
        paper={"x": X, "y": Y, **MASKS},
        author__writes__paper={"edge_index": WRITES, "time": torch.arange(900) % 31},
        paper__cites__paper={"edge_index": EDGES},
    )
    return Graph.from_pyg(data, time_attr="time")


def typed_dgl() -> Graph:
    """Return a graph from a heterogeneous graph of DGL."""
    edges = {
        ("author", "writes", "paper"): tuple(WRITES),
        ("paper", "cites", "paper"): tuple(EDGES),
    }
    made = import_dgl().heterograph(edges, {"author": 50, "paper": NODES})
    made.nodes["paper"].data.update({"feat": X, "label": Y, **MASKS})
    return Graph.from_dgl(made)


def dated_tables() -> Graph:
    """Return a graph from tables of users and their orders, whose times are dates."""
    users = pd.DataFrame({"id": np.arange(NODES) * 3 % 1000, "age": LABELS, "x": FEATURES[:, 0]})
    users["kind"] = pd.Categorical.from_codes(LABELS - 1, list("abcd"))
    users["part"] = WORDS
    orders = pd.DataFrame({"user": users["id"].to_numpy()[ENDS[0]], "price": ENDS[1]})
    orders["date"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(ENDS[1], unit="h")
    named = {
        "user": Table(users, "id", features=["x", "age"]),
        "order": Table(orders, None, {"user": "user"}, "date", ["price"]),
    }
    dates = {"valid": "2024-01-03", "test": "2024-01-04"}
    return from_tables(named, labels={"user": "kind"}, splits={"user": "part", "order": dates})


def behaviours() -> Graph:
    """Return the edges of ecomm_temporal, of four types with days."""
    with np.load(shared_data("ecomm_temporal/ecomm_temporal.npz")) as arrays:
        ends, kinds, days = (arrays[f"edge_{key}"] for key in ("index", "type", "time"))
        count = len(arrays["node_type"])
    edges = {
        ("any", f"does_{kind}", "any"): {"edge_index": ends[:, own], "time": days[own]}
        for kind in range(4)
        for own in (kinds == kind,)
    }
    return Graph.from_arrays({"any": count}, edges)


def generated(kind: str) -> str:
    """Write a graph with `gcnzc make`."""
    size = "--nodes 500 --edges 3000 --num-features 8 --classes 4 --seed 1"
    run("make", f"made-{kind}", "--kind", kind, *size.split())
    return f"made-{kind}"


def raw(*tensors: Any) -> Iterator[Any]:
    """Yield the dtype, shape and bytes of tensors or arrays."""
    for tensor in tensors:
        if tensor is None:
            yield None
            continue
        values = torch.as_tensor(tensor)
        yield f"{values.dtype} {tuple(values.shape)}"
        # a copy, because the strides of an empty tensor may have no bytes
        copy = torch.empty(values.shape, dtype=values.dtype).copy_(values)
        yield copy.reshape(-1).view(torch.uint8).numpy().view("V1")


def features_of(owner: Any) -> Iterator[Any]:
    """Yield the stored features of a dataset, or of nodes or edges of a type."""
    rows, codes = owner.features, owner.quantized
    if codes is not None:
        yield from (*raw(codes.rows, codes.scales), codes.scale_columns)
    elif rows is not None and rows.is_sparse_csr:
        yield from raw(rows.crow_indices(), rows.col_indices(), rows.values())
    elif rows is not None:
        yield from (*raw(rows), rows.stride(0))


def prepared(make: Callable[[], Any], **options: Any) -> Iterator[Any]:
    """Prepare a graph, and yield the arrays of the folder.

    Args:
        make: writes a graph to the current folder and returns its path, or returns a typed graph,
            another graph in memory, or the arguments of `gcnzc.prepare` for it.
        options: of `gcnzc.prepare`.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=before) as folder:
        os.chdir(folder)
        try:
            source = make()
            if isinstance(source, Graph):
                gcnzc.prepare(source, "out")
            else:
                given = source if isinstance(source, dict) else {"source": source}
                gcnzc.prepare(dest="out", **given, **options)
            is_typed = isinstance(source, Graph) or "typed" in str(source)
            yield from (typed_arrays_of if is_typed else arrays_of)("out")
        finally:
            os.chdir(before)


def arrays_of(folder: str) -> Iterator[Any]:
    """Yield the arrays of a prepared folder with one node type."""
    data = gcnzc.load(folder)
    yield from (data.num_classes, data.metric, data.node_ids)
    yield from (data.names.classes, data.names.features)
    yield from raw(data.graph.indptr, data.graph.indices, data.labels)
    yield from raw(*(data.split[part] for part in PARTS))
    yield from features_of(data)
    if data.links is not None:
        yield data.links.metric
        yield from raw(*(data.links.edges[part] for part in PARTS))
        yield from raw(*(data.links.negatives[part] for part in PARTS[1:]))


def typed_arrays_of(folder: str) -> Iterator[Any]:
    """Yield the arrays of a prepared folder with several node types."""
    graph = gcnzc.load(folder).graph
    yield graph.time_unit
    for name in graph.node_types:
        nodes = graph.nodes(name)
        yield from (name, nodes.num_nodes, nodes.keys)
        yield from raw(nodes.labels, nodes.time, *(nodes.split.get(part) for part in PARTS))
        yield from features_of(nodes)
    for edge_type in graph.edge_types:
        edges = graph.edges(edge_type)
        yield edge_type
        yield from raw(edges.indptr, edges.indices, edges.edge_ids, edges.time, edges.weight)
        yield from features_of(edges)


# by name: returns a graph, and the options of `gcnzc.prepare`
SOURCES: Mapping[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "npz": (archive, {}),
    "npz, sparse": (sparse_archive, {"sparse_features": True}),
    "npz, sparse to dense": (sparse_archive, {}),
    **{
        f"{dtype}, scales of {scales}": (archive, {"feature_dtype": dtype, "scales": scales})
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
        for scales in ("row", "columns")
    },
    **{dtype: (archive, {"feature_dtype": dtype}) for dtype in ("float16", "bfloat16")},
    "normalized": (archive, {"normalize_features": True, "pitch_bytes": 128}),
    "simple": (archive, {"bidirected": True, "self_loops": "add", "duplicates": "remove"}),
    "directed": (archive, {"bidirected": False, "self_loops": "remove"}),
    "links": (archive, {"edge_split": EdgeShares(0.1, 0.2, 3)}),
    "arrays": (lambda: {"edges": ENDS, **GIVEN}, {}),
    "pyg object": (pyg_data, {}),
    "pyg file": (pyg_file, {}),
    "dgl object": (dgl_graph, {}),
    "networkx": (networkx_graph, {}),
    "scipy": (scipy_matrix, {}),
    **{suffix: (partial(tables, suffix), {}) for suffix in ("csv", "tsv.gz", "parquet")},
    **{f"edge list {name}": (partial(edge_list, name), {}) for name in EDGE_LISTS},
    "ogb layout, text": (partial(ogb_layout, False), {}),
    "ogb layout, binary": (partial(ogb_layout, True), {"bidirected": True}),
    "ogb links": (partial(ogb_links, False), {}),
    "ogb links, ranked": (partial(ogb_links, True), {}),
    "typed arrays": (typed_graph, {}),
    "typed ogb layout, text": (partial(typed_layout, False), {}),
    "typed ogb layout, binary": (partial(typed_layout, True), {"bidirected": True}),
    "typed pyg object": (typed_pyg, {}),
    "typed dgl object": (typed_dgl, {}),
    "dated tables": (dated_tables, {}),
    **{f"made {kind}": (partial(generated, kind), {}) for kind in ("planted", "rmat", "typed")},
    "cora": (partial(shared_data, "cora/cora.npz"), {}),
    "citeseer, sparse": (partial(shared_data, "citeseer/citeseer.npz"), {"sparse_features": True}),
    "cora in ogb layout": (partial(shared_data, "ogb/cora"), {"normalize_features": True}),
    "tolokers in ogb layout": (partial(shared_data, "ogb/tolokers"), {"split": "rand"}),
    "arxiv in ogb layout": (partial(shared_data, "ogb/arxiv_nofeat"), {}),
    "ecomm_temporal": (behaviours, {}),
}
# by name: yields values for a checksum
ENTRIES: Mapping[str, Callable[[], Iterator[Any]]] = {
    name: partial(prepared, make, **options) for name, (make, options) in SOURCES.items()
}
