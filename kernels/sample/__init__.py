"""Neighbour sampling: sample in-edges of the seeds hop by hop, and relabel the sampled nodes.

For each destination of a hop, `fanout` of its in-edges are sampled uniformly without replacement
with Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987,
https://doi.org/10.1145/30401.315746), or all of them if there are no more. A random word w of
Philox gives the position (w * n) >> 32 below n, whose probability differs from 1 / n by a factor of
at most 1 +- n / 2**32. The random words depend only on the seed, epoch, hop and node, so the
sampled neighbours of a node do not depend on its batch, the order of the seeds, the thread or the
process.

Notation: N nodes and E edges in the graph, L hops, S seeds, B nodes in a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.sample.cpu import (
    INVALID_NODE,
    NEED_INDPTR,
    NEED_NODES,
    NODES,
    SLOTS_PER_NODE,
    insert_nodes,
    sample_hops,
)
from gcnzc.kernels.sample.exclude import ExcludedEdges
from gcnzc.kernels.structure.csc import VERIFY_HINT

ALL = -1  # the fanout that takes all neighbours


@dataclass(frozen=True)
class Sample:
    """A sampled neighbourhood of L hops. The destinations of hop 0 are the seeds."""

    nodes: Tensor  # (B,) int64 ids in the graph, the seeds first, then in the order of sampling
    num_nodes: tuple[int, ...]  # (L + 1,) nodes before each hop, and after the last one
    indptr: tuple[Tensor, ...]  # L tensors of (num_nodes[hop] + 1,) int64
    indices: tuple[Tensor, ...]  # L tensors of (edges,) int32 local ids: positions in `nodes`
    edge_ids: tuple[Tensor, ...] | None  # L tensors of (edges,) int64 positions in the graph


def sample_reference(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int],
    seed: int,
    epoch: int,
    kept_edges: Sequence[Sequence[int]] = (),
    once: bool = False,
) -> Sample:
    """Reference for `sample` with `edge_ids=True`, in plain Python; the results are equal.

    `kept_edges[i]` has the positions in `indices` that may be sampled for seed `i`, at every hop.
    All in-edges of the other nodes may be sampled.
    """
    nodes = seeds.tolist()
    local_ids = {node: position for position, node in reversed(list(enumerate(nodes)))}
    num_nodes, blocks = [len(nodes)], []
    for hop, fanout in enumerate(fanouts):
        offsets, kept, owners, sources = [0], [], [], []
        num_sampled_before = num_nodes[hop - 1] if once and hop > 0 else 0
        for position, node in enumerate(nodes[: num_nodes[hop]]):
            if position < num_sampled_before:
                offsets.append(0)
                continue
            edges: Sequence[int] = range(*indptr[node : node + 2].tolist())
            if position < len(kept_edges):
                edges = kept_edges[position]
            sampled_positions = _sample_positions(len(edges), fanout, node, hop, seed, epoch)
            kept += [edges[position] for position in sampled_positions]
            owners += [position] * len(sampled_positions)
            offsets.append(len(kept))
        for source, owner in zip((int(indices[edge]) for edge in kept), owners, strict=True):
            if source not in local_ids:
                local_ids[source] = len(nodes)
                nodes.append(source)
            sources.append(owner if source == nodes[owner] else local_ids[source])
        num_nodes.append(len(nodes))
        blocks.append((offsets, sources, kept))
    indptrs, places_of_sources, edge_ids = zip(*blocks, strict=True)
    return Sample(
        torch.tensor(nodes, dtype=torch.int64),
        tuple(num_nodes),
        tuple(torch.tensor(offsets, dtype=torch.int64) for offsets in indptrs),
        tuple(torch.tensor(sources, dtype=torch.int32) for sources in places_of_sources),
        tuple(torch.tensor(kept, dtype=torch.int64) for kept in edge_ids),
    )


def _sample_positions(
    degree: int, fanout: int, node: int, hop: int, seed: int, epoch: int
) -> list[int]:
    """Return positions below `degree`, in the order in which they are sampled."""
    if fanout == ALL or degree <= fanout:
        return list(range(degree))
    quads = np.arange((fanout + 3) // 4)
    counter = (quads, node & 0xFFFFFFFF, (node >> 32) | (hop << 16), epoch)
    words = np.stack(philox4x32_reference(*counter, *split_key(seed)), axis=1).ravel().tolist()
    chosen: list[int] = []
    for word, last in zip(words, range(degree - fanout, degree), strict=False):
        position = word * (last + 1) >> 32
        chosen.append(last if position in chosen else position)
    return chosen


# Graphs with more nodes use a hash table. A direct table takes 4 B per node in every thread: 64 MB
# for this many nodes, and 444 MB for the 111 M nodes of ogbn-papers100M, where the hash table takes
# 8 MB for batches of 400,000 nodes, but sampling with it takes longer.
DIRECT_NODES = 2**24


MAX_NODES = 2**31 - 1  # local ids are int32


MAX_DEGREE = 2**32 - 1  # a position is computed from a 32-bit random word


class Workspace:
    """Buffers of one sampling thread that are reused between batches.

    The tables from node ids to local ids are not cleared between batches: a slot is valid if its
    stamp is at least `base`, which increases from batch to batch, also between graphs. Both tables
    use the same `base`, so it may restart only when both are empty.
    """

    def __init__(self) -> None:
        self.direct_table = np.zeros(0, np.int32)
        self.hash_table = np.zeros(2**12, np.int64)
        self.base = 1
        # None instead of False: numba compiles the code for None without the branch
        self.has_wide_ids: bool | None = None
        # the largest sizes that batches needed so far, to allocate large enough buffers at once
        self.capacity_indptr = self.capacity_nodes = self.capacity_edges = 1024

    def start(self, graph_nodes: int) -> None:
        """Prepare the tables for a batch: allocate or clear them where necessary."""
        self.has_wide_ids = True if graph_nodes > 2**32 else None
        num_direct = graph_nodes if graph_nodes <= DIRECT_NODES else 0
        if num_direct != len(self.direct_table):
            self.direct_table = np.zeros(num_direct, np.int32)
        stamps = 2**31 if num_direct else 2**32
        if self.base + min(graph_nodes, MAX_NODES) >= stamps:
            self.direct_table[:], self.hash_table[:], self.base = 0, 0, 1

    def reserve(self, num_nodes: int, nodes: NDArray[np.int64], count: int) -> int:
        """Make the hash table large enough for `num_nodes`, and insert the first `count` nodes.

        Returns:
            The number of nodes that were inserted, see `insert_nodes`.
        """
        if len(self.hash_table) < num_nodes * SLOTS_PER_NODE and not len(self.direct_table):
            num_slots = 1 << (num_nodes * SLOTS_PER_NODE - 1).bit_length()
            self.hash_table, self.base = np.zeros(num_slots, np.int64), 1
        inserted: int = insert_nodes(
            self.direct_table, self.hash_table, self.base, nodes, count, self.has_wide_ids
        )
        return inserted


class _Buffers:
    """The output buffers of a batch, with capacity for the largest batch so far."""

    def __init__(
        self,
        workspace: Workspace,
        empty: Callable[[int, torch.dtype], Tensor],
        num_seeds: int,
        edge_ids: bool,
    ) -> None:
        self.workspace, self.empty, self.has_edge_ids = workspace, empty, edge_ids
        self.nodes = empty(max(workspace.capacity_nodes, num_seeds), torch.int64)
        self.indptr = empty(workspace.capacity_indptr, torch.int64)
        self.indices = empty(workspace.capacity_edges, torch.int32)
        self.edge_ids = empty(workspace.capacity_edges if edge_ids else 0, torch.int64)

    def numpy(self) -> tuple[NDArray[np.integer], ...]:
        """Return the buffers as arrays, in the order of `sample_hops`."""
        return (
            self.nodes.numpy(),
            self.indptr.numpy(),
            self.indices.numpy(),
            self.edge_ids.numpy(),
        )

    def grow(self, progress: NDArray[np.int64]) -> None:
        """Grow the buffers to the needed sizes and a quarter more, to grow them rarely."""
        workspace = self.workspace
        needed_indptr, needed_nodes, needed_edges = (
            (progress[NEED_INDPTR:] * 1.25).astype(int).tolist()
        )
        workspace.capacity_indptr = max(workspace.capacity_indptr, needed_indptr)
        workspace.capacity_nodes = max(workspace.capacity_nodes, needed_nodes)
        workspace.capacity_edges = max(workspace.capacity_edges, needed_edges)
        self.nodes = self._grow(self.nodes, workspace.capacity_nodes)
        self.indptr = self._grow(self.indptr, workspace.capacity_indptr)
        self.indices = self._grow(self.indices, workspace.capacity_edges)
        if self.has_edge_ids:
            self.edge_ids = self._grow(self.edge_ids, workspace.capacity_edges)

    def to_sample(self, num_nodes: list[int], num_edges: list[int]) -> Sample:
        """Return views of the written parts of the buffers, for each hop."""
        indptr, indices, edge_ids, first = [], [], [], 0
        for count, (begin, end) in zip(num_nodes, pairwise(num_edges), strict=False):
            # a hop has one offset more than destinations
            indptr.append(self.indptr[first : first + count + 1])
            first += count + 1
            indices.append(self.indices[begin:end])
            if self.has_edge_ids:
                edge_ids.append(self.edge_ids[begin:end])
        return Sample(
            self.nodes[: num_nodes[-1]],
            tuple(num_nodes),
            tuple(indptr),
            tuple(indices),
            tuple(edge_ids) if self.has_edge_ids else None,
        )

    def _grow(self, buffer: Tensor, length: int) -> Tensor:
        if length <= len(buffer):
            return buffer
        larger = self.empty(length, buffer.dtype)
        larger[: len(buffer)] = buffer
        return larger


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


class InvalidGraph(ValueError):
    """`indptr` or `indices` has a value out of range.

    Attributes:
        array: "indptr" or "indices".
        wrong: what is wrong.
    """

    def __init__(self, array: str, wrong: str) -> None:
        super().__init__(f"{wrong}\n\n{VERIFY_HINT}")
        self.array, self.wrong = array, wrong


def _damage(indptr: Tensor, indices: Tensor, node: int) -> InvalidGraph:
    num_nodes, num_edges = len(indptr) - 1, len(indices)
    begin, end = indptr[node : node + 2].tolist()
    if not 0 <= begin <= end <= num_edges:
        return InvalidGraph(
            "indptr",
            f"the edges into node {node} are numbered from {begin} to {end}, but the graph has "
            f"{num_edges} edges",
        )
    column = indices[begin:end]
    invalid_ids = column[(column < 0) | (column >= num_nodes)][:4].tolist()
    return InvalidGraph(
        "indices",
        f"node {node} has the in-neighbours {invalid_ids} in a graph of {num_nodes} nodes",
    )


def sample(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    seed: int,
    epoch: int,
    *,
    edge_ids: bool = False,
    excluded: ExcludedEdges | None = None,
    once: bool = False,
    workspace: Workspace | None = None,
    empty: Callable[[int, torch.dtype], Tensor] = _empty,
) -> Sample:
    """Sample the neighbourhood of `seeds`.

    Args:
        indptr: (N + 1,) int64, non-decreasing, on the CPU.
        indices: (E,) int32 or int64 in [0, N), on the CPU. The elements that are read of `indptr`
            and `indices` are checked, since they may be mapped from a damaged file.
        seeds: (S,) int64 in [0, N). They are not checked: an id out of range reads out of bounds. A
            seed that occurs twice is two destinations with the same neighbours; edges from it refer
            to its first position, except for self loops, which refer to their destination.
        fanouts: L numbers of neighbours, from the seeds outward; -1 takes all neighbours.
        seed: 64-bit seed of the random choices.
        epoch: in [0, 2**32); the random choices differ between epochs.
        edge_ids: also return the position of every edge in `indices`.
        excluded: edges of the seeds' columns that are not sampled at any hop, from
            `gcnzc.kernels.sample.exclude.exclude_edges` for the same `seeds`, which must be
            distinct.
        once: sample in-edges of each node only at the hop after the one that found it, as PyG does.
            The destinations of a hop are still all nodes found before it, some without edges.
        workspace: reused between calls, which saves time; used by one thread at a time.
        empty: allocates the tensors of the result.

    Raises:
        ValueError: the epoch or seed is out of range, the batch could have 2**31 nodes or more
            (each edge of the next destinations may lead to a new node), or the graph has offsets or
            ids out of range.
    """
    if workspace is None:
        workspace = Workspace()
    if not 0 <= epoch < 2**32:
        raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
    num_hops, num_seeds = len(fanouts), len(seeds)
    out = _Buffers(workspace, empty, num_seeds, edge_ids)
    out.nodes[:num_seeds] = seeds
    workspace.start(len(indptr) - 1)
    has_duplicates = workspace.reserve(num_seeds, out.nodes.numpy(), num_seeds) < num_seeds
    num_nodes, num_edges = np.zeros((2, num_hops + 1), np.int64)
    progress = np.zeros(8, np.int64)
    progress[INVALID_NODE] = -1
    num_nodes[0] = progress[NODES] = num_seeds
    key = np.array([*split_key(seed), epoch], np.uint64)
    excluded_arrays = (
        None if excluded is None else (excluded.first, excluded.kept_before, excluded.removed)
    )
    try:
        while not sample_hops(
            indptr.numpy(),
            indices.numpy(),
            np.asarray(fanouts, np.int64),
            key,
            excluded_arrays,
            once,
            has_duplicates,
            workspace.direct_table,
            workspace.hash_table,
            workspace.base,
            workspace.has_wide_ids,
            out.numpy(),
            progress,
            num_nodes,
            num_edges,
        ):
            if progress[INVALID_NODE] >= 0:
                raise _damage(indptr, indices, int(progress[INVALID_NODE]))
            if progress[NEED_NODES] > MAX_NODES:
                raise ValueError(
                    f"a batch of {num_seeds} seeds with fanouts {list(fanouts)} may reach more "
                    f"than {MAX_NODES} nodes\n\nhint: use fewer seeds or smaller fanouts"
                )
            out.grow(progress)
            workspace.reserve(int(progress[NEED_NODES]), out.nodes.numpy(), int(progress[NODES]))
    finally:
        # also after a failure, so that its nodes count as those of an earlier batch
        workspace.base += int(progress[NODES])
    return out.to_sample(num_nodes.tolist(), num_edges.tolist())
