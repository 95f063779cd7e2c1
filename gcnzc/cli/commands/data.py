"""The commands that make and describe datasets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from gcnzc.cli.output import print_json
from gcnzc.datasets import generate
from gcnzc.datasets.embed import embed
from gcnzc.graph import load, prepare
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.graph.graph import Graph
from gcnzc.train.options import at_least, at_most, check_numbers
from gcnzc.train.progress import Reporter

# of the largest graph, a hundred billion nodes
MOST_SCALE = 1000


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """Write a synthetic graph, or a small real one, in OGB's layout."""

    path: tyro.conf.Positional[Path]
    """folder to make"""
    kind: Literal["planted", "rmat", "digits"] = "planted"
    """communities with a known best accuracy; a power-law graph for scale; handwritten digits"""
    like: Literal["ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "reddit"] | None = None
    """take the numbers of nodes, edges, features and classes from this graph"""
    scale: float = 1.0
    """with --like: the share of its nodes and edges"""
    nodes: int = 100_000
    """number of nodes"""
    edges: int = 1_000_000
    """number of edges, each stored once"""
    num_features: int = 100
    """features of a node"""
    classes: int = 10
    """number of classes"""
    seed: int = 0
    """seed of every random choice"""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("nodes", "edges", "num_features", "classes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        at_most(MOST_SCALE, "scale", self.scale)
        if not self.scale > 0:
            raise ValueError(f"--scale must be above 0, got {self.scale}\n\nhint: 0.1 is a tenth")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn a graph into a prepared folder, which opens at once and is shared between workers.

    SOURCE is a folder in OGB's layout, a .npz archive, a prepared folder, or the name of an OGB
    dataset together with --download.
    """

    source: tyro.conf.Positional[str]
    """what to prepare"""
    dest: tyro.conf.Positional[Path]
    """folder to make"""
    download: bool = False
    """fetch the OGB dataset SOURCE first, into the folder `downloads` beside DEST"""
    features: Path | None = None
    """a .npy of (nodes, columns) to use as the features"""
    feature_dtype: Literal[
        "as-is", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
    ] = "as-is"
    """type of the stored features; those of one byte have scales, which a gather multiplies by"""
    scales: Literal["row", "columns"] = "row"
    """of features of one byte: a scale for each row, or for each 16 columns"""
    normalize_features: bool = False
    """scale each row of features to the sum 1, as is usual for bags of words"""
    sparse_features: bool = False
    """keep features that are stored sparse as they are"""
    pitch_bytes: int | None = None
    """distance from one row of features to the next; 0 is side by side; chosen if not given"""
    bidirected: Literal["auto", "yes", "no"] = "auto"
    """add the reverse of every edge; auto takes the default of SOURCE"""
    self_loops: Literal["keep", "add", "remove"] = "keep"
    """what to do with edges from a node to itself"""
    duplicates: Literal["auto", "keep", "remove"] = "auto"
    """edges that are stored more than once; auto takes the default of SOURCE"""
    split: str | None = None
    """which of several splits: its name or number"""
    metric: Literal["as-is", "accuracy", "rocauc"] = "as-is"
    """metric of predictions; as-is takes that of SOURCE"""
    task: Literal["as-is", "link"] = "as-is"
    """link: take edges out for validation and test, if they are not split already"""
    valid_edges: float = 0.05
    """with --task link: the share of the edges for validation"""
    test_edges: float = 0.1
    """with --task link: the share of the edges for test"""
    seed: int = 0
    """with --task link: the seed that says which edges"""
    allow_nan: bool = False
    """accept features that are NaN or infinite"""

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least(0, "seed", self.seed)
        if self.pitch_bytes is not None:
            at_least(0, "pitch_bytes", self.pitch_bytes)
        at_least(0, "valid_edges", self.valid_edges)
        at_least(0, "test_edges", self.test_edges)
        # says what else is wrong with them
        EdgeShares(self.valid_edges, self.test_edges)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Give a graph features made from its edges alone, as a prepared folder."""

    source: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout, or a .npz archive"""
    dest: tyro.conf.Positional[Path]
    """folder to make"""
    dims: int = 128
    """columns of the embedding"""
    seed: int = 0
    """seed of every random choice"""

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least(1, "dims", self.dims)
        at_least(0, "seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    """Say what a graph is: sizes, types, options and origin, as JSON."""

    data: tyro.conf.Positional[Path]
    """folder of a graph"""
    verify: bool = False
    """read everything and compare the checksums"""


def make_command(config: MakeConfig, reporter: Reporter) -> None:
    """`gcnzc make`."""
    shape = generate.Shape(config.nodes, config.edges, config.num_features, config.classes)
    if config.like is not None:
        shape = generate.like(config.like, config.scale)
    with reporter.stages(f"make {config.path}") as progress:
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
            feature_dtype=None if config.feature_dtype == "as-is" else config.feature_dtype,
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
    loaded = load.load(config.dest, allow_nan=True)
    if config.bidirected == "auto" and _is_mostly_one_way(loaded.graph):
        reporter.say(
            "most edges lack their reverse: the graph is taken as directed; --bidirected yes adds "
            "the reverse of each edge"
        )
    print_json(load.info(config.dest))


def _is_mostly_one_way(graph: Graph) -> bool:
    """Whether most of up to 1,000 edges, evenly apart, have no reverse."""
    places = torch.arange(0, graph.num_edges, max(1, graph.num_edges // 1000))
    sources = graph.indices[places].tolist()
    targets = (torch.searchsorted(graph.indptr, places, right=True) - 1).tolist()
    found = 0
    for source, target in zip(sources, targets, strict=True):
        begin, end = graph.indptr[source : source + 2].tolist()
        found += bool((graph.indices[begin:end] == target).any())
    return found < len(places) / 2


def embed_command(config: EmbedConfig, reporter: Reporter) -> None:
    """`gcnzc embed`."""
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
        reporter.say("every checksum is right")
    print_json(load.info(config.data))
