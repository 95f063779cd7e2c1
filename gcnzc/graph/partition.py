"""Partition a graph into parts with equal numbers of seeds and few edges between them.

The partition is multilevel, as in METIS (Karypis and Kumar, 1998,
https://doi.org/10.1137/S1064827595287997), with the coarsening and refinement by size-constrained
label propagation of Meyerhenke, Sanders and Schulz (2014, https://arxiv.org/abs/1402.3281):

1. Label propagation finds clusters that are small compared to a part. Each becomes one node of a
   coarser graph, and this repeats until the graph is small or hardly shrinks.
2. The nodes of the coarsest graph are assigned to parts, several times in random orders by a form
   of Fennel, and the best result is kept.
3. From level to level, label propagation moves nodes between the parts.
4. Nodes of low degree move from parts with too many seeds to the others.

Each round of label propagation reads every edge once.

Notation: N nodes, E edges, S seeds, P parts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.kernels.structure.clusters import Array, assign_labels, contract, propagate_labels
from gcnzc.system.arguments import IdsLike, as_ids, check_integer, check_kind, check_seed

# a cluster has at most 1 / CLUSTERS of the nodes and of the seeds of a part
CLUSTERS = 16
# coarsening ends at this many nodes per part, or if a level keeps more than this share of its nodes
COARSEST, SHRINKAGE = 64, 0.95
# rounds of label propagation that find clusters, and at most that refine parts
CLUSTER_ROUNDS, REFINE_ROUNDS = 3, 4
# assignments of the coarsest graph, of which the best is kept: at most TRIALS, and fewer if they
# would read more than TRIAL_EDGES edges together, but at least two
TRIALS, TRIAL_EDGES = 16, 2**26
# limits of a part while nodes move, relative to the mean number of nodes and of seeds
MAX_SIZE, MAX_LOAD = 1.1, 1.03
# edges that `cut_fraction` compares at once
EDGES_AT_ONCE = 2**24


@dataclass(frozen=True, eq=False)
class _Level:
    """A graph of one level; see `gcnzc.kernels.structure.clusters`."""

    indptr: Array  # (N + 1,) int64
    indices: Array  # (E,) int32 or int64, each edge in both directions
    weights: Array  # (E,) int64, or (0,) if all are 1
    size: Array  # (N,) int64 nodes of the given graph
    load: Array  # (N,) int64 seeds of the given graph

    @property
    def num_nodes(self) -> int:
        return len(self.size)

    def propagate(
        self, labels: Array, order: Array, max_sizes: Array, max_loads: Array, rounds: int
    ) -> None:
        """Propagate labels in at most `rounds` rounds, and stop early if no label changes."""
        graph = self.indptr, self.indices, self.weights
        for _ in range(rounds):
            given = *graph, order, self.size, self.load, max_sizes, max_loads
            if propagate_labels(*given, labels) == 0:
                return

    def order(self, random: np.random.Generator) -> Array:
        """Return the nodes by increasing degree; those of equal degree are in random order."""
        shuffled = random.permutation(self.num_nodes)
        return shuffled[np.argsort(np.diff(self.indptr)[shuffled], kind="stable")]

    def cut(self, labels: Array) -> int:
        """Return the sum of the weights of the edges between labels."""
        is_cut = np.repeat(labels, np.diff(self.indptr)) != labels[self.indices]
        return int(self.weights[is_cut].sum() if len(self.weights) else is_cut.sum())


def partition_graph(
    graph: Graph, num_parts: int, seeds: IdsLike | None = None, *, seed: int = 0
) -> Tensor:
    """Partition a graph into parts with equal numbers of seeds and few edges between the parts.

    The result depends only on the arguments, and is the same on every machine. Pass it to
    `gcnzc.Loader` with `seed_order="local"`.

    Args:
        graph: on the host. The direction of edges is ignored, and duplicates count once.
        num_parts: P, the number of parts.
        seeds: (S,) node ids, as a tensor, an array or a list; None for all nodes. An id may occur
            several times, such as the source of several seed edges.
        seed: random seed of the partition.

    Returns:
        (N,) int64 in [0, P): the part of each node. If the seeds are distinct, the numbers of seeds
        of two parts differ by at most one. If an id occurs several times, they may differ by more.
        A part has about N / P nodes, most often at most 10 % more.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or there are fewer seeds than parts.
    """
    check_kind("graph", graph, Graph, "a gcnzc.Graph")
    graph.check_untyped()
    num_parts = check_integer("num_parts", num_parts, 1)
    load = count_seeds(graph.num_nodes, seeds)
    random = np.random.Generator(np.random.Philox(key=check_seed("seed", seed) % 2**64))
    num_seeds = int(load.sum())
    if num_seeds < num_parts:
        raise ValueError(
            f"num_parts is {num_parts} for {num_seeds} seeds: some parts would have none"
        )
    if num_parts == 1:
        return torch.zeros(graph.num_nodes, dtype=torch.int64)
    both_ways = graph.rebuild(bidirected=True, self_loops="remove", duplicates="remove")
    finest = _Level(
        both_ways.indptr.numpy(),
        both_ways.indices.numpy(),
        np.empty(0, np.int64),
        np.ones(graph.num_nodes, np.int64),
        load,
    )
    levels, clusters = _coarsen(finest, num_parts, random)
    max_sizes = _limits(MAX_SIZE * graph.num_nodes, num_parts)
    max_loads = _limits(MAX_LOAD * num_seeds, num_parts)
    labels = _assign(levels[-1], max_sizes, max_loads, random)
    for level, cluster_of in zip(levels[-2::-1], clusters[::-1], strict=True):
        labels = labels[cluster_of]
        level.propagate(labels, level.order(random), max_sizes, max_loads, REFINE_ROUNDS)
    order, unlimited = finest.order(random), np.full(num_parts, graph.num_nodes)
    targets = np.diff(num_seeds * np.arange(num_parts + 1) // num_parts)
    finest.propagate(labels, order[load[order] > 0], unlimited, targets, 1)
    # nodes without seeds follow those that moved
    finest.propagate(labels, order, max_sizes, targets, 1)
    return torch.from_numpy(labels)


def _limits(total: float, num_parts: int) -> Array:
    return np.full(num_parts, int(np.ceil(total / num_parts)), np.int64)


def _coarsen(
    level: _Level, num_parts: int, random: np.random.Generator
) -> tuple[list[_Level], list[Array]]:
    """Return the levels from the finest on, and the clusters of the nodes of all but the last."""
    levels, clusters = [level], []
    most_clusters = num_parts * CLUSTERS
    max_size = int(level.size.sum()) // most_clusters
    max_load = max(int(level.load.sum()) // most_clusters, int(level.load.max()))
    while level.num_nodes > COARSEST * num_parts:
        labels = np.arange(level.num_nodes)
        limits = np.full((2, level.num_nodes), [[max_size], [max_load]], np.int64)
        level.propagate(labels, level.order(random), limits[0], limits[1], CLUSTER_ROUNDS)
        is_used = np.zeros(level.num_nodes, bool)
        is_used[labels] = True
        num_clusters = int(is_used.sum())
        if num_clusters > SHRINKAGE * level.num_nodes:
            break
        labels = (np.cumsum(is_used) - 1)[labels]
        coarse = contract(level.indptr, level.indices, level.weights, labels, num_clusters)
        sums = [
            np.bincount(labels, each, num_clusters).astype(np.int64)
            for each in (level.size, level.load)
        ]
        level = _Level(*coarse, *sums)
        levels.append(level)
        clusters.append(labels)
    return levels, clusters


def _assign(
    level: _Level, max_sizes: Array, max_loads: Array, random: np.random.Generator
) -> Array:
    """Return the best of several assignments of a level's nodes to parts."""
    found: list[tuple[int, int, Array]] = []
    for _ in range(min(TRIALS, max(2, TRIAL_EDGES // (len(level.indices) + 1)))):
        graph = level.indptr, level.indices, level.weights
        order = random.permutation(level.num_nodes)
        labels = assign_labels(*graph, order, level.size, level.load, max_sizes, max_loads)
        level.propagate(labels, order, max_sizes, max_loads, REFINE_ROUNDS)
        loads = np.bincount(labels, level.load, len(max_loads)).astype(np.int64)
        surplus = int((loads - max_loads).clip(min=0).sum())
        found.append((surplus, level.cut(labels), labels))
    return min(found, key=lambda each: each[:2])[2]


def merge_communities(communities: IdsLike, num_parts: int, seeds: IdsLike | None = None) -> Tensor:
    """Merge given communities of nodes into parts with about equal numbers of seeds.

    Communities are assigned by decreasing number of seeds, each to the part with the fewest seeds
    so far. A community is not divided, so the numbers of seeds differ if one is large.

    Args:
        communities: (N,) integers from 0, the community of each node.
        num_parts: P, the number of parts.
        seeds: see `partition_graph`.

    Returns:
        (N,) int64 in [0, P): the part of each node.

    Raises:
        ValueError: `communities` is not a vector of integers, or an argument is out of range.
    """
    hint = "the community of each node, numbered from 0"
    found = as_ids("communities", communities, hint).cpu().long()
    num_parts = check_integer("num_parts", num_parts, 1)
    if len(found) and int(found.min()) < 0:
        raise ValueError(f"communities has the value {int(found.min())}\n\nhint: {hint}")
    load = count_seeds(len(found), seeds)
    _, community_of = np.unique(found.numpy(), return_inverse=True)
    loads = np.bincount(community_of, load).astype(np.int64)
    part_of, sums = np.empty(len(loads), np.int64), np.zeros(num_parts, np.int64)
    for community in np.argsort(-loads, kind="stable"):
        part_of[community] = np.argmin(sums)
        sums[part_of[community]] += loads[community]
    return torch.from_numpy(part_of[community_of])


def cut_fraction(graph: Graph, parts: IdsLike) -> float:
    """Return the fraction of a graph's edges whose ends are in different parts.

    Args:
        graph: on the host.
        parts: (N,) integers, the part of each node.

    Raises:
        ValueError: `parts` is not a vector of integers with one element per node.
    """
    labels = as_ids("parts", parts, "the part of each node").cpu().numpy()
    if len(labels) != graph.num_nodes:
        raise ValueError(
            f"parts has {len(labels)} elements, but the graph has {graph.num_nodes} nodes"
        )
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    num_cut = 0
    for begin in range(0, graph.num_edges, EDGES_AT_ONCE):
        edges = np.arange(begin, min(begin + EDGES_AT_ONCE, graph.num_edges))
        targets = np.searchsorted(indptr, edges, side="right") - 1
        num_cut += int((labels[targets] != labels[indices[edges]]).sum())
    return num_cut / max(graph.num_edges, 1)


def count_seeds(num_nodes: int, seeds: IdsLike | None) -> Array:
    """Return how often each node is in `seeds`, (N,) int64; once for all nodes if None.

    Raises:
        ValueError: `seeds` is not a vector of node ids.
    """
    if seeds is None:
        return np.ones(num_nodes, np.int64)
    ids = as_ids("seeds", seeds, "a mask becomes ids by .nonzero().flatten()").cpu().numpy()
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_nodes:
        raise ValueError(
            f"seeds are from {ids.min()} to {ids.max()}, but there are {num_nodes} nodes"
        )
    return np.bincount(ids, minlength=num_nodes).astype(np.int64)
