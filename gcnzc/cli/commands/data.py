"""The commands that generate, prepare and describe graphs."""

from collections.abc import Mapping
from typing import Any

import torch

from gcnzc.cli.options import InfoConfig, MakeConfig, PrepareConfig
from gcnzc.cli.output import print_json
from gcnzc.datasets import generate
from gcnzc.datasets.source import describe_missing
from gcnzc.graph import load, prepare
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.graph.graph import Graph
from gcnzc.train.progress import Reporter


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
    features = _embed(config, reporter) if config.embed is not None else config.features
    with reporter.stages(f"prepare {config.dest}") as progress:
        prepare.prepare(
            config.source,
            config.dest,
            download=config.download,
            features=features,
            sparse_features=config.sparse_features,
            normalize_features=config.normalize_features,
            feature_dtype=None if config.feature_dtype == "auto" else config.feature_dtype,
            scales=config.scales,
            pitch_bytes=config.pitch_bytes,
            bidirected=choices.get(config.bidirected),
            self_loops=config.self_loops,
            duplicates=None if config.duplicates == "auto" else config.duplicates,
            split=config.split,
            random_split=config.random_split or None,
            seed=config.seed,
            metric=None if config.metric == "as-is" else config.metric,
            edge_split=shares if config.task == "link" else None,
            allow_nan=config.allow_nan,
            progress=progress,
        )
    reporter.say(f"wrote {config.dest}")
    loaded = load.load(config.dest, allow_nan=True)
    graph = loaded.graph
    if graph.has_types:
        for each in graph.node_types:
            labels = graph.nodes(each).labels
            if labels is not None and (missing := describe_missing(labels.numpy())):
                reporter.say(f"node type {each!r}: {missing}")
        print_json(load.info(config.dest))
        return
    has_split = any(len(ids) for ids in loaded.split.values())
    if has_split and (missing := describe_missing(loaded.labels.numpy())):
        dropped = sum((loaded.origin["split"].get("dropped_without_label") or {}).values())
        removed = f"; {dropped:,} of these nodes were removed from the splits"
        reporter.say(f"{missing}{removed if dropped else ''}")
    if unused := _unused_columns(loaded.origin):
        reporter.say(f"columns that are not used: {unused}")
    if config.bidirected == "auto" and _is_mostly_one_way(graph):
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


def _embed(config: PrepareConfig, reporter: Reporter) -> Any:
    """Return features of the nodes that are computed from the edges of a graph."""
    # on use: it imports SciPy's sparse matrices, which nothing else needs
    from gcnzc.datasets.embed import embed

    assert config.embed is not None, "the caller has checked"
    graph = load.load(config.source).graph
    graph.check_untyped()
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    with reporter.stages(f"embed {config.source}") as progress:
        return embed(indptr, indices, config.embed, seed=config.seed, progress=progress)


def info_command(config: InfoConfig, reporter: Reporter) -> None:
    """`gcnzc info`."""
    if config.verify:
        with reporter.stages(f"verify {config.data}") as progress:
            load.verify(config.data, progress)
        reporter.say("all checksums match")
    print_json(load.info(config.data))
