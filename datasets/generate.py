"""Generate a graph and write it in OGB's layout.

The kinds: `planted`, communities with a known best accuracy; `rmat`, hubs at any scale; `digits`,
small and real. Sizes may be those of a public graph, or a share of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from gcnzc.datasets import catalog, ogb
from gcnzc.datasets.digits import digits
from gcnzc.datasets.generated import SHARES, Generated
from gcnzc.datasets.planted import planted
from gcnzc.datasets.rmat import rmat
from gcnzc.datasets.rows import Progress, no_progress

__all__ = ["SHAPES", "Generated", "Shape", "digits", "generate", "like", "make", "planted", "rmat"]

Kind: TypeAlias = Literal["planted", "rmat", "digits"]

# nodes in train, valid and test, as published
_PART_SIZES = {
    "ogbn-arxiv": (90_941, 29_799, 48_603),
    "ogbn-products": (196_615, 39_323, 2_213_091),
    "ogbn-papers100M": (1_207_179, 125_265, 214_338),
    "reddit": (153_431, 23_831, 55_703),
}
SHAPES = tuple(_PART_SIZES)  # the graphs that `like` knows


@dataclass(frozen=True)
class Shape:
    """The size of a graph to be made."""

    num_nodes: int = 100_000
    num_edges: int = 1_000_000  # each once, to be used in both directions
    num_features: int = 100
    num_classes: int = 10
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)  # train, valid, test


def like(name: str, scale: float = 1.0) -> Shape:
    """The size of a public graph, or of a smaller or larger one like it.

    Args:
        name: one of `SHAPES`.
        scale: of nodes and edges, above 0. Features, classes and the shares of the parts stay.

    Raises:
        ValueError: the name is not known, or the scale is not positive.
    """
    if name not in _PART_SIZES:
        raise ValueError(f"no shape {name}\n\nhint: known are {', '.join(SHAPES)}")
    if not scale > 0:
        raise ValueError(f"scale is {scale}\n\nhint: 0.1 is a tenth")
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
    """A graph of one of the kinds, ready to be read part by part; nothing large is kept.

    Args:
        kind: planted, rmat or digits.
        shape: its size; of digits there is only one.
        seed: of every random choice.
        name: of the graph; that of its kind if None.
        threads: all cores if None.
        progress: told of the edges that are looked at for the best possible accuracy.

    Raises:
        ValueError: the kind is not known, or it cannot have this size.
    """
    shape = shape or Shape()
    sizes = shape.num_nodes, shape.num_edges, shape.num_features, shape.num_classes
    if min(sizes) < 1 or seed < 0:
        raise ValueError(
            f"nodes, edges, features and classes are {sizes}, the seed is {seed}\n\n"
            "hint: at least 1 of each, and a seed from 0"
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
    raise ValueError(f"no kind {kind}\n\nhint: one of planted, rmat, digits")


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
    """Generate a graph and write it in OGB's layout; the folder is there when all of it is.

    Args:
        path: the folder; must not exist. Its name becomes the graph's.
        kind: see `generate`, as `shape`, `seed` and `threads`.
        shape: its size.
        seed: of every random choice.
        binary: npz files, else csv.gz, which takes far longer.
        threads: all cores if None.
        progress: told of edges and rows of features.

    Returns:
        The graph that was written.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: see `generate`.
    """
    name = Path(path).absolute().name
    graph = generate(kind, shape, seed=seed, name=name, threads=threads, progress=progress)
    ogb.write_source(path, graph, binary=binary, progress=progress)
    return graph
