"""Sample neighbours of seeds, hop by hop, and number the nodes of a minibatch.

Every destination of a hop keeps `fanout` of its in-edges, drawn uniformly without replacement by
Floyd's method (Bentley and Floyd, "A sample of brilliance", CACM 1987,
https://doi.org/10.1145/30401.315746), or all of them if it has no more. Word w of Philox becomes a
position below n as (w * n) >> 32, whose probabilities are within n / 2**32 of uniform, relatively.
The words depend on the seed, epoch, hop and node alone, so a node has the same neighbours in
whatever batch, order, thread or process it is drawn.

Letters: N nodes and E edges in the graph, L hops, S seeds, B nodes in a batch.
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
    NEED_INDPTR,
    NEED_NODES,
    NODES,
    SLOTS_PER_NODE,
    WRONG_NODE,
    enter,
    sample_hops,
)
from gcnzc.kernels.sample.exclude import ExcludedEdges
from gcnzc.kernels.structure.csc import VERIFY

ALL = -1  # the fan-out that keeps every neighbour


@dataclass(frozen=True)
class Sample:
    """A neighbourhood of L hops. Hop 0 is the seeds' own."""

    nodes: Tensor  # (B,) int64 ids in the graph, the seeds first, the others as they were met
    num_nodes: tuple[int, ...]  # (L + 1,) how many were known before each hop, and at the end
    indptr: tuple[Tensor, ...]  # L of (num_nodes[hop] + 1,) int64
    indices: tuple[Tensor, ...]  # L of (edges,) int32 places in `nodes`
    edge_ids: tuple[Tensor, ...] | None  # L of (edges,) int64 positions in the graph's indices


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
    """What `sample` must equal, bit for bit, with Python's own lists and dictionaries.

    `kept_edges` are the positions in `indices` that may be drawn, of each of the first nodes.
    """
    nodes = seeds.tolist()
    places = {node: place for place, node in reversed(list(enumerate(nodes)))}
    num_nodes, blocks = [len(nodes)], []
    for hop, fanout in enumerate(fanouts):
        ends, kept, sources = [0], [], []
        drawn_before = num_nodes[hop - 1] if once and hop > 0 else 0
        for place, node in enumerate(nodes[: num_nodes[hop]]):
            if place < drawn_before:
                ends.append(0)
                continue
            edges: Sequence[int] = range(*indptr[node : node + 2].tolist())
            if place < len(kept_edges):
                edges = kept_edges[place]
            drawn = _draw(len(edges), fanout, node, hop, seed, epoch)
            kept += [edges[position] for position in drawn]
            ends.append(len(kept))
        for source in (int(indices[edge]) for edge in kept):
            if source not in places:
                places[source] = len(nodes)
                nodes.append(source)
            sources.append(places[source])
        num_nodes.append(len(nodes))
        blocks.append((ends, sources, kept))
    indptrs, places_of_sources, edge_ids = zip(*blocks, strict=True)
    return Sample(
        torch.tensor(nodes, dtype=torch.int64),
        tuple(num_nodes),
        tuple(torch.tensor(ends, dtype=torch.int64) for ends in indptrs),
        tuple(torch.tensor(sources, dtype=torch.int32) for sources in places_of_sources),
        tuple(torch.tensor(kept, dtype=torch.int64) for kept in edge_ids),
    )


def _draw(degree: int, fanout: int, node: int, hop: int, seed: int, epoch: int) -> list[int]:
    """Positions below `degree`, in the order drawn."""
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


# A table with a slot for every node takes 4 B a node in every thread: 64 MB here, and 444 MB for
# the 111 M nodes of ogbn-papers100M, where the hash table takes 8 MB for batches of 400,000 nodes.
# Batches with the hash table take a third longer, on graphs of any size (bench/sample.py).
DIRECT_NODES = 2**24


MAX_NODES = 2**31 - 1  # local numbers are int32


MAX_DEGREE = 2**32 - 1  # positions are drawn from words of 32 bits


class Workspace:
    """What one thread needs to sample, kept from batch to batch.

    The tables from ids to local numbers are never emptied: stamps grow from batch to batch.
    """

    def __init__(self) -> None:
        self.direct = np.zeros(0, np.int32)
        self.hashed = np.zeros(2**12, np.int64)
        self.base = 1
        self.wide: bool | None = None
        # entries that batches needed so far, so that buffers are large enough at once
        self.room_indptr = self.room_nodes = self.room_edges = 1024

    def start(self, graph_nodes: int) -> None:
        """Make tables for a graph, free of the batch before."""
        self.wide = True if graph_nodes > 2**32 else None
        num_direct = graph_nodes if graph_nodes <= DIRECT_NODES else 0
        if num_direct != len(self.direct):
            self.direct, self.base = np.zeros(num_direct, np.int32), 1
        stamps = 2**31 if num_direct else 2**32
        if self.base + min(graph_nodes, MAX_NODES) >= stamps:
            self.direct[:], self.hashed[:], self.base = 0, 0, 1

    def make_room(self, num_nodes: int, nodes: NDArray[np.int64], known: int) -> None:
        """Let the hash table take `num_nodes`, and number the first `known` of `nodes`."""
        if len(self.hashed) < num_nodes * SLOTS_PER_NODE and not len(self.direct):
            num_slots = 1 << (num_nodes * SLOTS_PER_NODE - 1).bit_length()
            self.hashed, self.base = np.zeros(num_slots, np.int64), 1
        enter(self.direct, self.hashed, self.base, nodes, known, self.wide)


class _Buffers:
    """Where a batch is written, with room for what batches needed so far."""

    def __init__(
        self,
        workspace: Workspace,
        empty: Callable[[int, torch.dtype], Tensor],
        num_seeds: int,
        edge_ids: bool,
    ) -> None:
        self.workspace, self.empty, self.with_edge_ids = workspace, empty, edge_ids
        self.nodes = empty(max(workspace.room_nodes, num_seeds), torch.int64)
        self.indptr = empty(workspace.room_indptr, torch.int64)
        self.indices = empty(workspace.room_edges, torch.int32)
        self.edge_ids = empty(workspace.room_edges if edge_ids else 0, torch.int64)

    def numpy(self) -> tuple[NDArray[np.integer], ...]:
        """As `_sample` takes them."""
        parts = self.nodes, self.indptr, self.indices, self.edge_ids
        return tuple(part.numpy() for part in parts)

    def enlarge(self, progress: NDArray[np.int64]) -> None:
        """Make room for what is needed by now, and a quarter more, so that few batches ask."""
        space = self.workspace
        need_indptr, need_nodes, need_edges = (progress[NEED_INDPTR:] * 1.25).astype(int).tolist()
        space.room_indptr = max(space.room_indptr, need_indptr)
        space.room_nodes = max(space.room_nodes, need_nodes)
        space.room_edges = max(space.room_edges, need_edges)
        self.nodes = self._enlarged(self.nodes, space.room_nodes)
        self.indptr = self._enlarged(self.indptr, space.room_indptr)
        self.indices = self._enlarged(self.indices, space.room_edges)
        if self.with_edge_ids:
            self.edge_ids = self._enlarged(self.edge_ids, space.room_edges)

    def cut(self, num_nodes: list[int], num_edges: list[int]) -> Sample:
        """What was written, hop by hop."""
        firsts = [hop + sum(num_nodes[:hop]) for hop in range(len(num_nodes) - 1)]
        edges = [slice(begin, end) for begin, end in pairwise(num_edges)]
        return Sample(
            self.nodes[: num_nodes[-1]],
            tuple(num_nodes),
            tuple(
                self.indptr[first : first + count + 1]
                for first, count in zip(firsts, num_nodes, strict=False)
            ),
            tuple(self.indices[of_hop] for of_hop in edges),
            tuple(self.edge_ids[of_hop] for of_hop in edges) if self.with_edge_ids else None,
        )

    def _enlarged(self, part: Tensor, length: int) -> Tensor:
        if length <= len(part):
            return part
        larger = self.empty(length, part.dtype)
        larger[: len(part)] = part
        return larger


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


def _describe_damage(indptr: Tensor, indices: Tensor, node: int) -> str:
    num_nodes, num_edges = len(indptr) - 1, len(indices)
    begin, end = indptr[node : node + 2].tolist()
    if not 0 <= begin <= end <= num_edges:
        return (
            f"the edges into node {node} are numbered from {begin} to {end}, but the graph has "
            f"{num_edges} edges\n\n{VERIFY}"
        )
    column = indices[begin:end]
    wrong = column[(column < 0) | (column >= num_nodes)][:4].tolist()
    return f"node {node} has the in-neighbours {wrong} in a graph of {num_nodes} nodes\n\n{VERIFY}"


def sample(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    seed: int,
    epoch: int,
    *,
    edge_ids: bool = False,
    without: ExcludedEdges | None = None,
    once: bool = False,
    workspace: Workspace | None = None,
    empty: Callable[[int, torch.dtype], Tensor] = _empty,
) -> Sample:
    """Draw the neighbourhood of `seeds`.

    Args:
        indptr: (N + 1,) int64, monotone, on the CPU.
        indices: (E,) int32 or int64, in [0, N), on the CPU. What is read of both is checked, since
            they may be mapped from a damaged file.
        seeds: (S,) int64 in [0, N), not checked: one outside reads foreign memory. One that occurs
            twice is two destinations with the same neighbours; edges lead to its first place.
        fanouts: L numbers, from the seeds outward; -1 keeps all neighbours.
        seed: the key of every choice, below 2**64.
        epoch: in [0, 2**32); another epoch makes other choices.
        edge_ids: also give the position of every edge in `indices`.
        without: edges of the seeds' columns that are never drawn, at any hop, as
            `gcnzc.kernels.sample.exclude.left_out` gives them for `seeds`, all different.
        once: draw for each node at the hop after the one that met it, and at no other, as PyG does;
            hops still have all nodes met before them as destinations, some without an edge.
        workspace: kept from call to call, it saves time; used by one thread at a time.
        empty: gives the memory of the result.

    Raises:
        ValueError: an epoch or seed out of range, a batch of 2**31 nodes, or a neighbour or a range
            of neighbours outside the graph.
    """
    if workspace is None:
        workspace = Workspace()
    if not 0 <= epoch < 2**32:
        raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
    num_hops, num_seeds = len(fanouts), len(seeds)
    out = _Buffers(workspace, empty, num_seeds, edge_ids)
    out.nodes[:num_seeds] = seeds
    workspace.start(len(indptr) - 1)
    workspace.make_room(num_seeds, out.nodes.numpy(), num_seeds)
    num_nodes, num_edges = np.zeros((2, num_hops + 1), np.int64)
    progress = np.zeros(8, np.int64)
    progress[WRONG_NODE] = -1
    num_nodes[0] = progress[NODES] = num_seeds
    key = np.array([*split_key(seed), epoch], np.uint64)
    left = None if without is None else (without.first, without.kept_before, without.removed)
    try:
        while not sample_hops(
            indptr.numpy(),
            indices.numpy(),
            np.asarray(fanouts, np.int64),
            key,
            left,
            once,
            workspace.direct,
            workspace.hashed,
            workspace.base,
            workspace.wide,
            out.numpy(),
            progress,
            num_nodes,
            num_edges,
        ):
            if progress[WRONG_NODE] >= 0:
                raise ValueError(_describe_damage(indptr, indices, int(progress[WRONG_NODE])))
            if progress[NEED_NODES] > MAX_NODES:
                raise ValueError(
                    f"a batch of {num_seeds} seeds with fan-outs {list(fanouts)} reaches more than "
                    f"{MAX_NODES} nodes\n\nhint: use fewer seeds or smaller fan-outs"
                )
            out.enlarge(progress)
            workspace.make_room(int(progress[NEED_NODES]), out.nodes.numpy(), int(progress[NODES]))
    finally:
        # also what a batch that failed has entered is of an earlier batch now
        workspace.base += int(progress[NODES])
    return out.cut(num_nodes.tolist(), num_edges.tolist())
