"""Generate datasets and write them in OGB's layout.

The kinds are `planted`, communities with a known upper bound for the accuracy; `rmat`, power-law
degrees at any scale; and `digits`, small real data. Sizes can be those of a public dataset, scaled.
`make_typed` writes a heterogeneous graph with times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from gcnzc.datasets import catalog, ogb_write
from gcnzc.datasets.generated import SPLIT_SHARES, Generated, digits, planted, rmat
from gcnzc.datasets.rows import Progress, no_progress
from gcnzc.datasets.source import HeteroArrays
from gcnzc.datasets.typed import typed

__all__ = [
    *("SHAPES", "Generated", "Shape", "digits", "generate", "like", "make", "make_typed"),
    *("planted", "rmat", "typed"),
]

Kind: TypeAlias = Literal["planted", "rmat", "digits"]

# published numbers of nodes in train, valid and test
_PART_SIZES = {
    "ogbn-arxiv": (90_941, 29_799, 48_603),
    "ogbn-products": (196_615, 39_323, 2_213_091),
    "ogbn-papers100M": (1_207_179, 125_265, 214_338),
    "reddit": (153_431, 23_831, 55_703),
}
SHAPES = tuple(_PART_SIZES)  # names that `like` accepts


@dataclass(frozen=True)
class Shape:
    """The size of a graph to generate."""

    num_nodes: int = 100_000
    num_edges: int = 1_000_000  # undirected edges, each stored once
    num_features: int = 100
    num_classes: int = 10
    shares: Mapping[str, float] = field(default_factory=lambda: SPLIT_SHARES)  # of each split


def like(name: str, scale: float = 1.0) -> Shape:
    """Return the size of a public dataset, scaled.

    Args:
        name: one of `SHAPES`.
        scale: factor for the numbers of nodes and edges, above 0. Features, classes and the shares
            of the splits are not scaled.

    Raises:
        ValueError: the name is unknown, or the scale is not positive.
    """
    if name not in _PART_SIZES:
        raise ValueError(f"no shape {name}\n\nhint: choose one of {', '.join(SHAPES)}")
    if not scale > 0:
        raise ValueError(f"scale is {scale}\n\nhint: it must be above 0; 0.1 is a tenth")
    entry, sizes = catalog.get(name), _PART_SIZES[name]
    num_edges = entry.num_edges // (2 if entry.stored == "both" else 1)
    return Shape(
        max(entry.num_classes, 3, round(entry.num_nodes * scale)),
        max(1, round(num_edges * scale)),
        entry.num_features,
        entry.num_classes,
        {
            part: size / entry.num_nodes
            for part, size in zip(("train", "valid", "test"), sizes, strict=True)
        },
    )


def generate(
    kind: Kind,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    name: str | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> Generated:
    """Generate a dataset; edges and features are computed in chunks when they are read.

    Args:
        kind: "planted", "rmat" or "digits".
        shape: size of the graph; ignored for digits.
        seed: of all random choices.
        name: of the dataset; None uses the kind.
        threads: number of threads; None uses all cores.
        progress: called with the edges processed to compute the best possible accuracy.

    Raises:
        ValueError: the kind is unknown, or cannot have this size.
    """
    shape = shape or Shape()
    sizes = shape.num_nodes, shape.num_edges, shape.num_features, shape.num_classes
    if min(sizes) < 1 or seed < 0:
        raise ValueError(
            f"nodes, edges, features and classes are {sizes}, the seed is {seed}\n\n"
            "hint: sizes are at least 1, and the seed is at least 0"
        )
    name = name or kind
    if kind == "planted":
        return planted(
            *sizes, seed=seed, shares=shape.shares, name=name, threads=threads, progress=progress
        )
    if kind == "rmat":
        return rmat(*sizes, seed=seed, shares=shape.shares, name=name, threads=threads)
    if kind == "digits":
        return digits(seed=seed, name=name)
    raise ValueError(f"no kind {kind}\n\nhint: choose one of planted, rmat, digits")


def make(
    path: str | Path,
    kind: Kind,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    binary: bool = True,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> Generated:
    """Generate a dataset and write it in OGB's layout; the folder is created atomically.

    Args:
        path: the folder; must not exist. Its name becomes the name of the dataset.
        kind: see `generate`.
        shape: see `generate`.
        seed: of all random choices.
        binary: write npz files instead of csv.gz, which is much slower.
        threads: number of threads; None uses all cores.
        progress: called with counts of edges and feature rows.

    Returns:
        The dataset.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: see `generate`.
    """
    name = Path(path).absolute().name
    graph = generate(kind, shape, seed=seed, name=name, threads=threads, progress=progress)
    ogb_write.write_source(path, graph, binary=binary, progress=progress)
    return graph


def make_typed(
    path: str | Path,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    binary: bool = True,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> HeteroArrays:
    """Generate a typed graph with times and write it in OGB's layout; see `typed`.

    Args:
        path: the folder; must not exist. Its name becomes the name of the dataset.
        shape: size of the graph; the shares of the splits are those of `typed`.
        seed: of all random choices.
        binary: write npz files instead of csv.gz, which is much slower.
        threads: number of threads; None uses all cores.
        progress: called with counts of edges and feature rows.

    Returns:
        The graph.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: the graph cannot have this size.
    """
    shape, name = shape or Shape(), Path(path).absolute().name
    sizes = shape.num_nodes, shape.num_edges, shape.num_features, shape.num_classes
    graph = typed(*sizes, seed=seed, name=name, threads=threads, progress=progress)
    ogb_write.write_typed(path, graph, binary=binary, progress=progress)
    return graph
