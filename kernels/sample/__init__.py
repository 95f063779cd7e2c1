"""Neighbour sampling: sample in-edges of the seeds hop by hop, and relabel the sampled nodes.

At each hop, each edge type samples in-edges of the nodes that are known before the hop, in the
order of the edge types. For each destination, `fanout` of its eligible in-edges are sampled
uniformly without replacement with Floyd's algorithm (Bentley and Floyd, "A sample of brilliance",
CACM 1987, https://doi.org/10.1145/30401.315746), or all of them if there are no more; by weight
and with replacement on request. A random word w of Philox gives the position (w * n) >> 32 below n,
whose probability differs from 1 / n by a factor of at most 1 +- n / 2**32. The random words depend
only on the key of the edge type, epoch, hop and node, and for disjoint subgraphs on the node and
the time of their seed. The sampled neighbours of a node do not depend on its batch, the order of
the seeds, the thread, the process, or edges that are not eligible.

Notation: T node types, R edge types, L hops, S seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import gcnzc.kernels.sample.layout as field
from gcnzc.kernels.buffers import Allocate
from gcnzc.kernels.sample.choose import subgraph_keys
from gcnzc.kernels.sample.graph import ADDRESSES, GraphTables
from gcnzc.kernels.sample.hops import SLOTS_PER_NODE, sample_hops

ALL = -1  # the fanout that takes all neighbours

# Graphs with more nodes use a hash table. A direct table takes 4 B per node in every thread: 64 MB
# for this many nodes, and 444 MB for the 111 M nodes of ogbn-papers100M, where the hash table takes
# 8 MB for batches of 400,000 nodes, but sampling with it takes longer.
DIRECT_NODES = 2**24

HASHED_NODES = 2**32  # graphs with more nodes use a hash table of 64-bit keys

MAX_NODES = 2**31 - 1  # local ids are int32

MAX_EDGES = 2**36  # of one type, in a batch

# the largest regions of one type in a batch; a node is also written when it is not new
LIMITS = {field.NEED_NODES: MAX_NODES + 1, field.NEED_INDPTR: 2**62, field.NEED_EDGES: MAX_EDGES}

LINE_ELEMENTS = 16  # int32 elements of a cache line

IdArray = NDArray[np.int64]
Seeds: TypeAlias = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class Options:
    """How to sample.

    Attributes:
        fanouts: L tuples of R numbers of neighbours, from the seeds outward; -1 takes all.
        replace: sample with replacement.
        temporal: "uniform" or "last" takes only edges that are not later than the time of the
            subgraph's seed; None ignores times. "last" takes the latest edges.
        disjoint: sample a separate subgraph for each seed. Required by `temporal`.
        once: sample in-edges of each node only at the hop after the one that found it, as PyG does;
            otherwise at all later hops, as DGL does.
        induced: return all eligible edges among the sampled nodes.
        edge_ids: also return the ids of the edges.
        own_loops: a self loop of a seed that occurs twice refers to its destination, not to the
            first position of the seed.
    """

    fanouts: tuple[tuple[int, ...], ...]
    replace: bool = False
    temporal: str | None = None
    disjoint: bool = False
    once: bool = True
    induced: bool = False
    edge_ids: bool = True
    own_loops: bool = False


@dataclass(eq=False)
class Sample:
    """A sampled neighbourhood; tuples have one element for each node type or edge type.

    Attributes:
        nodes: int64 ids, the seeds first, then in the order of sampling.
        subgraphs: int64 numbers of the seeds that found the nodes, if they are disjoint.
        indptr: int64 offsets. With `is_prefix` those of one CSC over all destinations, of which
            each hop's is a prefix; otherwise those of each hop, one after another.
        indices: int32 positions of the sources in `nodes` of their type.
        edge_ids: int64 ids of the edges, in the order of `indices`, if they were asked for.
        num_nodes: L + 1 lists of T numbers of nodes: before each hop, and at the end.
        num_edges: L + 1 lists of R numbers of edges, likewise.
        is_prefix: see `indptr`.
    """

    nodes: tuple[Tensor, ...]
    subgraphs: tuple[Tensor, ...] | None
    indptr: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]
    edge_ids: tuple[Tensor, ...] | None
    num_nodes: list[list[int]]
    num_edges: list[list[int]]
    is_prefix: bool


class Workspace:
    """Tables of one thread from nodes to local ids, and the layout of its batches.

    Stamps start again when they would exceed their width, see `gcnzc.kernels.sample.hops`.
    """

    def __init__(self, graph: GraphTables, disjoint: bool) -> None:
        is_wide = disjoint or graph.num_keys > HASHED_NODES
        is_direct = graph.num_keys <= DIRECT_NODES and not is_wide
        self.direct_table = np.zeros(graph.num_keys if is_direct else 0, np.int32)
        self.hash_table = np.zeros(0 if is_direct or is_wide else 2**10, np.int64)
        self.wide_table = np.zeros((2**10 if is_wide else 0, 2), np.int64)
        self.base, self.end = 1, 2**31 if is_direct else 2**62 if is_wide else 2**32
        self._graph_table = graph.table()
        self.relations, self.types = self._graph_table.copy(), graph.types.copy()
        # the capacities of the regions of nodes, offsets and edges
        self.set_capacities(
            *(np.full(len(each), 64) for each in (self.types, self.relations, self.relations))
        )

    @property
    def tables(self) -> tuple[NDArray[np.signedinteger], ...]:
        """The direct table, the hash table and that of wide keys, of which two are empty."""
        return self.direct_table, self.hash_table, self.wide_table

    def set_capacities(self, *capacities: IdArray) -> None:
        """Set the layout of batches: first elements and capacities of all regions."""
        # each region begins at a cache line of its own
        self.capacities = [-(-each // LINE_ELEMENTS) * LINE_ELEMENTS for each in capacities]
        self.sizes = [int(each.sum()) for each in self.capacities]
        firsts = [np.cumsum(each) - each for each in self.capacities]
        # after the nodes
        firsts[1] += self.sizes[0]
        self.first = [each.tolist() for each in firsts]
        for kind, (table, first, capacity) in enumerate(
            (
                (self.types, field.NODE_FIRST, field.NODE_CAPACITY),
                (self.relations, field.INDPTR_FIRST, field.INDPTR_CAPACITY),
                (self.relations, field.EDGE_FIRST, field.EDGE_CAPACITY),
            )
        ):
            table[:, first], table[:, capacity] = firsts[kind], self.capacities[kind]

    def start(self, graph: GraphTables, max_nodes: int, seeds: Seeds, total: int) -> None:
        """Make room for the seeds of a batch, and for stamps of at most `max_nodes` other nodes."""
        given = graph.table()
        if given is not self._graph_table:
            self._graph_table = given
            self.relations[:, [*ADDRESSES.values()]] = given[:, [*ADDRESSES.values()]]
        nodes, offsets, edges = self.capacities
        if any(ids.numel() >= nodes[t] for t, ids in seeds):
            nodes = nodes.copy()
            for t, ids in seeds:
                nodes[t] = max(nodes[t], ids.numel() + 1)
            self.set_capacities(nodes, offsets, edges)
        if self.base + min(max_nodes, MAX_NODES) + total >= self.end:
            for table in self.tables:
                table[:] = 0
            self.base = 1
        if not len(self.direct_table):
            self.grow_table(total * SLOTS_PER_NODE)

    def grow_table(self, num_slots: int) -> None:
        """Make room in the hash table; a new one has none of the known nodes."""
        if num_slots <= max(map(len, self.tables)):
            return
        num_slots, self.base = 1 << (num_slots - 1).bit_length(), 1
        if len(self.wide_table):
            self.wide_table = np.zeros((num_slots, 2), np.int64)
        else:
            self.hash_table = np.zeros(num_slots, np.int64)

    def exclude(self, excluded: Mapping[int, Tensor]) -> None:
        """Set the positions of excluded edges, by the number of their edge type."""
        for r, positions in excluded.items():
            self.relations[r, field.EXCLUDED] = positions.data_ptr()
            self.relations[r, field.NUM_EXCLUDED] = positions.numel()


class _Arenas:
    """The vectors of a batch, with regions for each node type and edge type; see `sample_hops`."""

    def __init__(self, workspace: Workspace, options: Options, empty: Allocate) -> None:
        self.workspace, self.options, self.empty = workspace, options, empty
        # the largest regions that were too small, and the capacities before
        self.needed: list[IdArray] = []
        self.capacities = workspace.capacities
        self._allocate()

    def _allocate(self) -> None:
        num_nodes, num_offsets, num_edges = self.workspace.sizes
        self.ids = self.empty(num_nodes + num_offsets, torch.int64)
        self.indices = self.empty(num_edges, torch.int32)
        self.edge_ids = self.trees = _NONE
        edge_ids = trees = _NO_IDS
        if self.options.edge_ids:
            self.edge_ids = self.empty(num_edges, torch.int64)
            edge_ids = self.edge_ids.numpy()
        if self.options.disjoint:
            self.trees = self.empty(num_nodes, torch.int64)
            trees = self.trees.numpy()
        # in the order of `sample_hops`
        self.arrays = self.ids.numpy(), self.indices.numpy(), edge_ids, trees

    def grow(self, status: int, where: int, needed: int, known: IdArray, filled: IdArray) -> None:
        """Move the regions to larger vectors; the one that is too small doubles."""
        old, first, before = self.arrays, self.workspace.first, self.workspace.capacities
        kind = (field.NEED_NODES, field.NEED_INDPTR, field.NEED_EDGES).index(status)
        capacities = [each.copy() for each in before]
        capacities[kind][where] = min(2 * needed, LIMITS[status])
        self.needed = self.needed or [np.zeros_like(each) for each in capacities]
        self.needed[kind][where] = needed
        self.workspace.set_capacities(*capacities)
        self._allocate()
        counts = known, before[1], filled
        for vector, place in ((0, 0), (0, 1), (1, 2), (2, 2), (3, 0)):
            source, target = old[vector], self.arrays[vector]
            ranges = (first[place], self.workspace.first[place], counts[place])
            for a, b, count in zip(*ranges, strict=True) if len(source) else ():
                target[b : b + count] = source[a : a + count]

    def views(self, vector: Tensor, kind: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the first elements of each region: of node types (0), offsets (1) or edges (2)."""
        ranges = zip(self.workspace.first[kind], counts, strict=True)
        return tuple(vector[begin : begin + count] for begin, count in ranges)

    def set_later_capacities(self, *used: IdArray) -> None:
        """Give later batches a quarter more than this one needed, whose regions were too small."""
        wanted = [np.maximum(*both) for both in zip(self.needed, used, strict=True)]
        limits = zip(self.capacities, wanted, LIMITS.values(), strict=True)
        self.workspace.set_capacities(
            *(np.maximum(old, np.minimum(each + each // 4, limit)) for old, each, limit in limits)
        )


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


class HopSampler:
    """Samples neighbourhoods in a graph of one or many types; `sample` is thread-safe.

    Args:
        graph: the graph.
        options: how to sample.
    """

    def __init__(self, graph: GraphTables, options: Options) -> None:
        self.graph, self.options = graph, options
        shape = len(options.fanouts), len(graph.relations)
        self._fanouts = np.asarray(options.fanouts, np.int64).reshape(shape)
        self._flags = np.zeros(field.NUM_OPTIONS, np.int64)
        self._flags[[field.ONCE, field.REPLACE, field.OWN_LOOPS]] = (
            options.once,
            options.replace,
            options.own_loops,
        )
        self._flags[[field.DISJOINT, field.NUM_KEYS]] = options.disjoint, graph.num_keys
        self._flags[field.TEMPORAL] = {None: 0, "uniform": field.UNIFORM, "last": field.LAST}[
            options.temporal
        ]
        self._destinations = [each.dst for each in graph.relations]
        # of a batch, without the seeds
        self._max_nodes = MAX_NODES if options.disjoint else max(graph.num_nodes, default=0)
        # workspaces that no thread is using; `append` and `pop` of a list are atomic
        self._idle: list[Workspace] = []

    def sample(
        self,
        seeds: Seeds,
        epoch: int,
        *,
        seed_times: Tensor | None = None,
        excluded: Mapping[int, Tensor] | None = None,
        empty: Allocate = _empty,
    ) -> Sample:
        """Sample the neighbourhood of seeds of one or several node types.

        Args:
            seeds: pairs of a node type and (S_t,) int64 ids on the host, contiguous, in [0, N_t),
                each type at most once. They are not checked. Without disjoint subgraphs, a seed
                that occurs twice is two destinations with the same neighbours, and edges from it
                refer to its first position, see `Options.own_loops`.
            epoch: in [0, 2**32); the random choices differ between epochs.
            seed_times: (S,) int64 times of all seeds, in the order of `seeds`; for temporal
                sampling.
            excluded: by the number of the edge type (K,) int64 positions of edges that are not
                sampled, ascending, without duplicates, on the host.
            empty: allocates the tensors of the result.

        Raises:
            InvalidColumn: the graph has offsets or sources out of range. The elements that are read
                are checked, since they may be mapped from a damaged file.
            ValueError: the epoch is out of range, temporal sampling is not disjoint or has no
                times, or the batch could have 2**31 nodes of one type or more.
        """
        graph, options = self.graph, self.options
        if not 0 <= epoch < 2**32:
            raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
        total = sum(ids.numel() for _, ids in seeds)
        if options.temporal is not None and (
            not options.disjoint or seed_times is None or len(seed_times) != total
        ):
            raise ValueError(
                f"temporal sampling of {total} seeds without disjoint subgraphs or their times"
            )
        if options.disjoint and total * graph.num_keys >= 2**62:
            raise ValueError(f"{total} seeds of a graph of {graph.num_keys} nodes are too many")
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(graph, options.disjoint)
        workspace.start(graph, self._max_nodes, seeds, total)
        if excluded:
            workspace.exclude(excluded)
        arenas = _Arenas(workspace, options, empty)
        seed_data = self._place_seeds(arenas, seeds, seed_times, total)
        flags = self._flags.copy()
        flags[field.INSERT], flags[field.EPOCH] = 1, epoch
        known = np.zeros(len(graph.num_nodes), np.int64)
        for t, ids in seeds:
            known[t] = ids.numel()
        num_nodes, num_edges = self._run(self._fanouts, flags, seed_data, arenas, known)
        counts = num_nodes.tolist()
        known, filled = num_nodes[-1], num_edges[-1]
        num_hops = len(self._fanouts)
        if options.induced:
            flags[field.INDUCED], flags[field.INSERT] = 1, 0
            every = np.full((1, len(graph.relations)), ALL)
            _, num_edges = self._run(every, flags, seed_data, arenas, known)
            filled, num_offsets = num_edges[-1], [each + 1 for each in counts[-1]]
        elif not num_hops:
            num_offsets = [int(options.once)] * len(known)
        elif options.once:
            num_offsets = [each + 1 for each in counts[-2]]
        else:
            num_offsets = [sum(each) + num_hops for each in zip(*counts[:-1], strict=True)]
        workspace.base += max([*counts[-1], 1])
        offsets, edges = [num_offsets[t] for t in self._destinations], filled.tolist()
        sampled = Sample(
            nodes=arenas.views(arenas.ids, 0, counts[-1]),
            subgraphs=arenas.views(arenas.trees, 0, counts[-1]) if options.disjoint else None,
            indptr=arenas.views(arenas.ids, 1, offsets),
            indices=arenas.views(arenas.indices, 2, edges),
            edge_ids=arenas.views(arenas.edge_ids, 2, edges) if options.edge_ids else None,
            num_nodes=counts,
            num_edges=num_edges.tolist(),
            is_prefix=options.once or options.induced,
        )
        if arenas.needed:
            arenas.set_later_capacities(known + 1, np.asarray(offsets), filled)
        if excluded:
            workspace.exclude(dict.fromkeys(excluded, _NONE))
        self._idle.append(workspace)
        return sampled

    def _run(
        self,
        fanouts: IdArray,
        flags: IdArray,
        seed_data: tuple[IdArray, IdArray],
        arenas: "_Arenas",
        num_seeds: IdArray,
    ) -> tuple[IdArray, IdArray]:
        """Call the kernel until it is done; return the nodes and edges before each hop."""
        graph, workspace = self.graph, arenas.workspace
        num_nodes = np.zeros((len(fanouts) + 1, len(num_seeds)), np.int64)
        num_edges = np.zeros((len(fanouts) + 1, len(graph.relations)), np.int64)
        num_nodes[0] = num_nodes[-1] = num_seeds
        progress = np.zeros(field.NUM_PROGRESS, np.int64)
        progress[field.DESTINATION] = -1
        while True:
            flags[field.BASE] = workspace.base
            sample_hops(
                workspace.relations,
                workspace.types,
                fanouts,
                flags,
                workspace.tables,
                seed_data,
                arenas.arrays,
                (num_nodes, num_edges),
                progress,
            )
            status, where, needed, _, r, destination = progress.tolist()
            if status == field.DONE:
                return num_nodes, num_edges
            if status == field.INVALID_COLUMN:
                t = graph.relations[r].dst
                begin = workspace.first[0][t]
                end = begin + min(int(num_nodes[-1, t]), destination + field.CHUNK_DESTINATIONS)
                raise graph.find_damage(r, arenas.ids[begin + destination : end])
            if status == field.NEED_SLOTS:
                workspace.grow_table(needed)
                flags[field.INSERT] = 1
                continue
            if needed > LIMITS[status]:
                raise ValueError(
                    f"a batch of {int(num_nodes[0].sum())} seeds may reach more than {MAX_NODES} "
                    f"nodes or {MAX_EDGES} edges of one type\n\n"
                    "hint: use fewer seeds or smaller fanouts"
                )
            arenas.grow(status, where, needed, num_nodes[-1], num_edges[-1])

    def _place_seeds(
        self,
        arenas: "_Arenas",
        seeds: Seeds,
        seed_times: Tensor | None,
        total: int,
    ) -> tuple[IdArray, IdArray]:
        """Write the seeds to their regions; return key words and times of disjoint subgraphs."""
        is_disjoint, is_temporal = self.options.disjoint, self.options.temporal is not None
        keys = np.zeros((max(total, 1), 2), np.int64) if is_disjoint else _NO_KEYS
        times = seed_times.numpy() if is_temporal and seed_times is not None else _NO_IDS
        nodes, *_, trees = arenas.arrays
        first = 0
        for t, ids in seeds:
            given, last = ids.numpy(), first + ids.numel()
            begin = arenas.workspace.first[0][t]
            nodes[begin : begin + len(given)] = given
            if is_disjoint:
                trees[begin : begin + len(given)] = np.arange(first, last)
                key = self.graph.type_keys[t]
                subgraph_keys(given, times[first:last], *key, keys[first:last])
            first = last
        return keys, times


_NONE = torch.empty(0, dtype=torch.int64)
_NO_IDS = np.zeros(0, np.int64)
_NO_KEYS = np.zeros((1, 2), np.int64)
