"""The commands that generate, prepare and describe graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from gcnzc.cli.output import print_json
from gcnzc.datasets import generate
from gcnzc.datasets.source import describe_missing
from gcnzc.graph import load, prepare
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.graph.graph import Graph
from gcnzc.graph.hetero.graph import HeteroGraph
from gcnzc.graph.hetero.prepare import is_hetero_source
from gcnzc.train.options import at_least, at_most, check_options
from gcnzc.train.progress import Reporter

# of ogbn-papers100M, these are a hundred billion nodes
MAX_SCALE = 1000


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """Write a synthetic graph, or a small real one, in OGB's layout."""

    path: tyro.conf.Positional[Path]
    """folder to write"""
    kind: Literal["planted", "rmat", "digits", "typed"] = "planted"
    """planted communities, with a known best accuracy; an R-MAT graph with power-law degrees; a
    nearest-neighbour graph of handwritten digits; or a heterogeneous graph with times, 4 node types
    and 6 edge types, with a known best accuracy"""
    like: Literal["ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "reddit"] | None = None
    """use the numbers of nodes, edges, features and classes of this graph"""
    scale: float = 1.0
    """with --like: multiply the numbers of nodes and edges by this"""
    nodes: int = 100_000
    """number of nodes, of all types"""
    edges: int = 1_000_000
    """number of undirected edges; with --kind typed, of edges of all types"""
    num_features: int = 100
    """features per node"""
    classes: int = 10
    """number of classes"""
    seed: int = 0
    """random seed"""

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("nodes", "edges", "num_features", "classes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        at_most(MAX_SCALE, "scale", self.scale)
        if self.kind == "typed" and self.like is not None:
            raise ValueError(
                f"--like {self.like} is a homogeneous graph, but --kind is typed\n\n"
                "hint: --nodes and --edges"
            )
        if not self.scale > 0:
            raise ValueError(f"--scale must be above 0, got {self.scale}\n\nhint: 0.1 is a tenth")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Convert a graph to a prepared folder, which is memory-mapped and shared by all workers.

    SOURCE is a folder in OGB's layout, a .npz archive, a .toml that names csv or parquet tables, a
    .pt file of PyG, a prepared folder, or the name of an OGB dataset together with --download.
    """

    source: tyro.conf.Positional[str]
    """graph to prepare"""
    dest: tyro.conf.Positional[Path]
    """folder to write"""
    download: bool = False
    """download the OGB dataset SOURCE first, to the folder `downloads` next to DEST"""
    features: Path | None = None
    """.npy of shape (nodes, columns) to use as features instead of those of SOURCE"""
    feature_dtype: Literal[
        "auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
    ] = "auto"
    """dtype of the stored features; auto keeps float16, bfloat16 and quantized features, and
    converts other dtypes to float32. float8 and int8 values are stored with scales, and are
    dequantized when they are gathered"""
    scales: Literal["row", "columns"] = "row"
    """float8 and int8 features: one scale per row, or one per block of 16 columns, shared by all
    rows"""
    normalize_features: bool = False
    """divide each row of features by the sum of its absolute values, as is common for bags of
    words"""
    sparse_features: bool = False
    """keep sparse features sparse; without it, they are stored dense"""
    pitch_bytes: int | None = None
    """bytes from the start of one row of features to the start of the next; 0 stores rows without
    padding; the most efficient pitch for the PCIe bus if not given"""
    bidirected: Literal["auto", "yes", "no"] = "auto"
    """add the reverse of every edge; auto uses the setting of SOURCE; if SOURCE has none, it adds
    them if all edges go from lower to higher node ids, or all from higher to lower. For a
    heterogeneous graph, yes adds the reverse of every edge type"""
    self_loops: Literal["keep", "add", "remove"] = "keep"
    """keep self loops as they are, leave exactly one at every node (add), or remove all"""
    duplicates: Literal["auto", "keep", "remove"] = "auto"
    """keep or remove duplicate edges; auto uses the setting of SOURCE, or keeps them"""
    split: str | None = None
    """name or number of the split to use, if SOURCE has several"""
    metric: Literal["as-is", "accuracy", "rocauc"] = "as-is"
    """metric of node classification; as-is uses that of SOURCE"""
    task: Literal["as-is", "link"] = "as-is"
    """link holds out edges for validation and test, unless SOURCE has a split of its edges"""
    valid_edges: float = 0.05
    """with --task link: fraction of the edges to hold out for validation"""
    test_edges: float = 0.1
    """with --task link: fraction of the edges to hold out for test"""
    seed: int = 0
    """with --task link: random seed that selects the held-out edges"""
    allow_nan: bool = False
    """accept features that are NaN or infinite"""

    def __post_init__(self) -> None:
        check_options(self)
        at_least(0, "seed", self.seed)
        if self.pitch_bytes is not None:
            at_least(0, "pitch_bytes", self.pitch_bytes)
        at_least(0, "valid_edges", self.valid_edges)
        at_least(0, "test_edges", self.test_edges)
        # checks that the shares leave edges to train on
        EdgeShares(self.valid_edges, self.test_edges)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Compute node features from the edges of a graph, and write it as a prepared folder."""

    source: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file"""
    dest: tyro.conf.Positional[Path]
    """folder to write"""
    dims: int = 128
    """features per node"""
    seed: int = 0
    """random seed"""

    def __post_init__(self) -> None:
        check_options(self)
        at_least(1, "dims", self.dims)
        at_least(0, "seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    """Print the sizes, dtypes, options and source of a graph as one JSON line."""

    data: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file"""
    verify: bool = False
    """first read and check all of the data; for a prepared folder, also the checksums"""


def make_command(config: MakeConfig, reporter: Reporter) -> None:
    """`gcnzc make`."""
    shape = generate.Shape(config.nodes, config.edges, config.num_features, config.classes)
    if config.like is not None:
        shape = generate.like(config.like, config.scale)
    with reporter.stages(f"make {config.path}") as progress:
        if config.kind == "typed":
            generate.make_typed(config.path, shape, seed=config.seed, progress=progress)
        else:
            generate.make(config.path, config.kind, shape, seed=config.seed, progress=progress)
    reporter.say(f"wrote {config.path}")
    print_json(load.info(config.path))


def prepare_command(config: PrepareConfig, reporter: Reporter) -> None:
    """`gcnzc prepare`."""
    choices = {"yes": True, "no": False}
    shares = EdgeShares(config.valid_edges, config.test_edges, config.seed)
    with reporter.stages(f"prepare {config.dest}") as progress:
        prepare.prepare(
            config.source,
            config.dest,
            download=config.download,
            features=config.features,
            sparse_features=config.sparse_features,
            normalize_features=config.normalize_features,
            feature_dtype=None if config.feature_dtype == "auto" else config.feature_dtype,
            scales=config.scales,
            pitch_bytes=config.pitch_bytes,
            bidirected=choices.get(config.bidirected),
            self_loops=config.self_loops,
            duplicates=None if config.duplicates == "auto" else config.duplicates,
            split=config.split,
            metric=None if config.metric == "as-is" else config.metric,
            edge_split=shares if config.task == "link" else None,
            allow_nan=config.allow_nan,
            progress=progress,
        )
    reporter.say(f"wrote {config.dest}")
    if is_hetero_source(config.dest):
        graph = HeteroGraph.load(config.dest)
        for each in graph.node_types:
            labels = graph.nodes(each).labels
            if labels is not None and (missing := describe_missing(labels.numpy())):
                reporter.say(f"node type {each!r}: {missing}")
        print_json(load.info(config.dest))
        return
    loaded = load.load(config.dest, allow_nan=True)
    has_split = any(len(ids) for ids in loaded.split.values())
    if has_split and (missing := describe_missing(loaded.labels.numpy())):
        dropped = sum((loaded.origin["split"].get("dropped_without_label") or {}).values())
        removed = f"; {dropped:,} of these nodes were removed from the splits"
        reporter.say(f"{missing}{removed if dropped else ''}")
    if unused := _unused_columns(loaded.origin):
        reporter.say(f"columns that are not used: {unused}")
    if config.bidirected == "auto" and _is_mostly_one_way(loaded.graph):
        reporter.say(
            "most edges have no reverse edge: the graph was stored as directed; --bidirected yes "
            "adds the reverse of every edge"
        )
    print_json(load.info(config.dest))


def _unused_columns(origin: Mapping[str, Any]) -> str:
    """Return the columns of tables that were not read, by file."""
    unused = origin.get("unused_columns", {})
    return ", ".join(f"{', '.join(columns)} of {file}" for file, columns in unused.items())


def _is_mostly_one_way(graph: Graph) -> bool:
    """Whether most of about 1,000 evenly spaced edges have no reverse edge."""
    edges = torch.arange(0, graph.num_edges, max(1, graph.num_edges // 1000))
    sources = graph.indices[edges].tolist()
    targets = (torch.searchsorted(graph.indptr, edges, right=True) - 1).tolist()
    found = 0
    for source, target in zip(sources, targets, strict=True):
        begin, end = graph.indptr[source : source + 2].tolist()
        found += bool((graph.indices[begin:end] == target).any())
    return found < len(edges) / 2


def embed_command(config: EmbedConfig, reporter: Reporter) -> None:
    """`gcnzc embed`."""
    # on use: it imports SciPy's sparse matrices, which no other command needs
    from gcnzc.datasets.embed import embed

    graph = load.load(config.source).graph
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    with reporter.stages(f"embed {config.source}") as progress:
        rows = embed(indptr, indices, config.dims, seed=config.seed, progress=progress)
        prepare.prepare(config.source, config.dest, features=rows, progress=progress)
    reporter.say(f"wrote {config.dest}")
    print_json(load.info(config.dest))


def info_command(config: InfoConfig, reporter: Reporter) -> None:
    """`gcnzc info`."""
    if config.verify:
        with reporter.stages(f"verify {config.data}") as progress:
            load.verify(config.data, progress)
        reporter.say("all checksums match")
    print_json(load.info(config.data))
