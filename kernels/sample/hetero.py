"""Sample neighbourhoods in heterogeneous graphs: by time, by weight, in disjoint subgraphs.

At each hop, each edge type samples in-edges of the nodes that the hop before found, in the order of
the edge types. The random words depend only on the seed, the epoch, the hop, the edge type and the
node, and for disjoint subgraphs on the node and the time of their seed. They do not depend on the
minibatch, on the thread, or on edges that are not eligible.

Notation: T node types, R edge types, L hops, S seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.buffers import Allocate
from gcnzc.kernels.sample import DIRECT_NODES, MAX_NODES
from gcnzc.kernels.sample.hetero_choice import subgraph_keys
from gcnzc.kernels.sample.hetero_columns import find_columns
from gcnzc.kernels.sample.hetero_cpu import induce_edges, sample_columns
from gcnzc.kernels.sample.hetero_graph import HeteroTables
from gcnzc.kernels.sample.hetero_layout import (
    BEGIN,
    COL,
    COUNT,
    EDGE,
    END,
    EPOCH,
    EXCLUDED,
    FIRST_KEY,
    HOP,
    IS_DISJOINT,
    IS_TEMPORAL,
    LAST,
    NODES,
    NUM_EXCLUDED,
    NUM_OPTIONS,
    NUM_OUT_COLUMNS,
    NUM_SAMPLED,
    NUM_TYPE_COLUMNS,
    REPLACE,
    ROW,
    SLOTS_PER_NODE,
    SUBGRAPHS,
    insert_nodes,
)

MAX_EDGES = 2**36  # of one type, in a batch
# the capacity of buffers by ("nodes" or "edges", type)
Capacities = dict[tuple[str, int], int]
IdArray = NDArray[np.int64]


@dataclass(frozen=True)
class HeteroOptions:
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
    """

    fanouts: tuple[tuple[int, ...], ...]
    replace: bool = False
    temporal: str | None = None
    disjoint: bool = False
    once: bool = True
    induced: bool = False
    edge_ids: bool = True


@dataclass(frozen=True, eq=False)
class HeteroSample:
    """A sampled neighbourhood; tuples have one element for each node type or edge type."""

    nodes: tuple[Tensor, ...]  # int64 ids, the seeds first, then in the order of sampling
    subgraphs: tuple[Tensor, ...] | None  # int64 numbers of the seeds that found the nodes
    rows: tuple[Tensor, ...]  # int64 positions of the sources in `nodes` of their type
    cols: tuple[Tensor, ...]  # int64 positions of the destinations
    edge_ids: tuple[Tensor, ...] | None  # int64
    num_nodes: tuple[tuple[int, ...], ...]  # L + 1 each: seeds, then new nodes of each hop
    num_edges: tuple[tuple[int, ...], ...] | None  # L each; None for induced subgraphs


class InvalidColumn(ValueError):
    """The in-edges of a node have offsets or sources out of range.

    Attributes:
        relation: number of the edge type.
        node: the destination; other columns of the same chunk may be the invalid ones.
    """

    def __init__(self, relation: int, node: int) -> None:
        super().__init__(f"edge type {relation} has invalid in-edges near node {node}")
        self.relation, self.node = relation, node


class HeteroWorkspace:
    """Buffers of one sampling thread that are reused between batches of one graph.

    The table from node keys to local ids is not cleared between batches: an entry is valid if its
    stamp, `base` plus the local id, is at least `base`, which increases from batch to batch.
    """

    def __init__(self) -> None:
        self.direct_table = np.zeros(0, np.int32)
        self.hash_table = np.zeros((2**10, 2), np.int64)
        self.base = 1
        # the largest sizes that batches needed so far, of buffers
        self.capacities: Capacities = {}

    def start(self, num_keys: int, disjoint: bool) -> None:
        """Prepare the table for a batch."""
        num_direct = num_keys if num_keys <= DIRECT_NODES and not disjoint else 0
        if num_direct != len(self.direct_table):
            self.direct_table = np.zeros(num_direct, np.int32)
        if num_direct and self.base > 2**30:
            self.direct_table[:], self.hash_table[:], self.base = 0, 0, 1

    def reserve(self, num_nodes: int) -> bool:
        """Make the hash table large enough; return whether it is new and has no nodes."""
        if len(self.direct_table) or len(self.hash_table) >= num_nodes * SLOTS_PER_NODE:
            return False
        num_slots = 1 << (num_nodes * SLOTS_PER_NODE - 1).bit_length()
        self.hash_table = np.zeros((num_slots, 2), np.int64)
        return True


_NOTHING = torch.empty(0, dtype=torch.int64)


class _Growing:
    """An int64 vector whose capacity grows; later batches start with the largest capacity."""

    def __init__(self, capacities: Capacities, key: tuple[str, int], empty: Allocate) -> None:
        self.capacities, self.key, self.empty = capacities, key, empty
        self.data = _NOTHING

    def reserve(self, length: int, used: int) -> int:
        """Make room for `length` elements, keep the first `used`, and return the address."""
        if length > len(self.data) or len(self.data) == 0:
            # a quarter more, to grow rarely
            capacity = max(length + length // 4, 16)
            self.capacities[self.key] = capacity
            larger = self.empty(capacity, torch.int64)
            larger[:used] = self.data[:used]
            self.data = larger
        return self.data.data_ptr()


def _allocate(buffers: Sequence[_Growing], empty: Allocate) -> None:
    """Give all buffers the capacity of earlier batches, in one allocation."""
    sizes = [buffer.capacities.get(buffer.key, 0) for buffer in buffers]
    for buffer, data in zip(buffers, empty(sum(sizes), torch.int64).split(sizes), strict=True):
        buffer.data = data


def _empty(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


class _Run:
    """The sampling of one batch."""

    def __init__(
        self,
        tables: HeteroTables,
        options: HeteroOptions,
        seeds: Sequence[tuple[int, Tensor]],
        seed_times: Tensor | None,
        epoch: int,
        excluded: Mapping[int, Tensor],
        workspace: HeteroWorkspace,
        empty: Allocate,
    ) -> None:
        self.tables, self.options, self.workspace = tables, options, workspace
        num_types, num_relations = len(tables.num_nodes), len(tables.relations)
        self.num_seeds = np.zeros(num_types, np.int64)
        self.types = np.zeros((num_types, NUM_TYPE_COLUMNS), np.int64)
        self.types[:, FIRST_KEY] = tables.first_keys
        self.outputs = np.zeros((num_relations, NUM_OUT_COLUMNS), np.int64)
        self.flags = np.zeros(NUM_OPTIONS, np.int64)
        self.flags[[REPLACE, LAST, IS_TEMPORAL, IS_DISJOINT, EPOCH]] = (
            options.replace,
            options.temporal == "last",
            options.temporal is not None,
            options.disjoint,
            epoch,
        )

        def buffers(kind: str, count: int) -> list[_Growing]:
            return [_Growing(workspace.capacities, (kind, i), empty) for i in range(count)]

        self.nodes = buffers("nodes", num_types)
        self.subgraphs = buffers("nodes", num_types if options.disjoint else 0)
        columns = [buffers("edges", num_relations) for _ in range(3 if options.edge_ids else 2)]
        self.edges = list(zip(*columns, strict=True))
        _allocate([*self.nodes, *self.subgraphs, *chain(*columns)], empty)
        self.seed_times = np.zeros(0, np.int64) if seed_times is None else seed_times.numpy()
        self.relations = tables.table
        if excluded:
            # the tables are those of all batches
            self.relations = tables.table.copy()
            for r, positions in excluded.items():
                own = positions.data_ptr(), len(positions)
                self.relations[r, [EXCLUDED, NUM_EXCLUDED]] = own
        self.tree_keys = np.zeros((1, 2), np.int64)
        workspace.start(tables.num_keys, options.disjoint)
        self._insert_seeds(seeds)

    def _insert_seeds(self, seeds: Sequence[tuple[int, Tensor]]) -> None:
        total = sum(len(ids) for _, ids in seeds)
        if self.options.disjoint:
            self.tree_keys = np.zeros((max(total, 1), 2), np.int64)
        first = 0
        for t, ids in seeds:
            count = len(ids)
            self._reserve_nodes(t, count)
            self.num_seeds[t] = self.types[t, COUNT] = count
            self.nodes[t].data[:count] = ids
            if self.options.disjoint:
                torch.arange(first, first + count, out=self.subgraphs[t].data[:count])
                subgraph_keys(
                    ids.numpy(),
                    self.seed_times[first : first + count],
                    *self.tables.type_keys[t],
                    self.tree_keys[first : first + count],
                )
            first += count
        self.workspace.reserve(total)
        self._insert()

    def _insert(self) -> None:
        insert_nodes(
            self.types,
            self.flags,
            self.tables.num_keys,
            self.workspace.base,
            self.workspace.direct_table,
            self.workspace.hash_table,
        )

    def _reserve_nodes(self, t: int, count: int) -> None:
        used = int(self.types[t, COUNT])
        self.types[t, NODES] = self.nodes[t].reserve(count + 1, used)
        if self.options.disjoint:
            self.types[t, SUBGRAPHS] = self.subgraphs[t].reserve(count + 1, used)

    def hop(self, hop: int, fanouts: IdArray) -> None:
        """Sample the edges of one hop."""
        tables, workspace = self.tables, self.workspace
        self.types[:, BEGIN] = self.types[:, END] if self.options.once else 0
        self.types[:, END] = self.types[:, COUNT]
        self.flags[HOP] = hop
        frontier = self.types[:, END] - self.types[:, BEGIN]
        widths = [int(frontier[relation.dst]) for relation in tables.relations]
        first = np.cumsum([0, *widths])
        begins, sizes = np.empty((2, int(first[-1])), np.int64)
        totals = np.zeros(len(tables.relations), np.int64)
        self._check(
            find_columns(
                self.relations,
                self.types,
                self.flags,
                fanouts,
                self.seed_times,
                first,
                begins,
                sizes,
                totals,
            )
        )
        self._reserve(totals)
        self._check(
            sample_columns(
                self.relations,
                self.types,
                self.flags,
                fanouts,
                self.tree_keys,
                first,
                begins,
                sizes,
                self.outputs,
                tables.num_keys,
                workspace.base,
                workspace.direct_table,
                workspace.hash_table,
            )
        )

    def _reserve(self, totals: IdArray) -> None:
        """Make room for the edges of a hop and the nodes that they may find."""
        bounds = self.types[:, COUNT].copy()
        for r, relation in enumerate(self.tables.relations):
            bounds[relation.src] += totals[r]
        if not self.options.disjoint:
            bounds = np.minimum(bounds, self.num_seeds + self.tables.num_nodes)
        edges = self.outputs[:, NUM_SAMPLED] + totals
        if int(bounds.max()) > MAX_NODES or int(edges.max(initial=0)) > MAX_EDGES:
            raise ValueError(
                f"a batch of {int(self.num_seeds.sum())} seeds may reach more than {MAX_NODES} "
                f"nodes or {MAX_EDGES} edges of one type\n\n"
                "hint: use fewer seeds or smaller fanouts"
            )
        for r, count in enumerate(edges.tolist()):
            self._reserve_edges(r, count)
        for t, bound in enumerate(bounds.tolist()):
            self._reserve_nodes(t, bound)
        if self.workspace.reserve(int(bounds.sum())):
            self._insert()

    def _reserve_edges(self, r: int, count: int) -> None:
        used = int(self.outputs[r, NUM_SAMPLED])
        for column, buffer in zip((ROW, COL, EDGE), self.edges[r], strict=False):
            self.outputs[r, column] = buffer.reserve(count, used)

    def induce(self) -> None:
        """Replace the sampled edges by all edges among the sampled nodes."""
        arguments: tuple[Any, ...] = (
            self.tables.num_keys,
            self.workspace.base,
            self.workspace.direct_table,
            self.workspace.hash_table,
        )
        tables = (self.relations, self.types, self.flags, self.seed_times)
        # count, then write
        self.outputs[:] = 0
        self._check(induce_edges(*tables, self.outputs, *arguments))
        for r, count in enumerate(self.outputs[:, NUM_SAMPLED].tolist()):
            for column, buffer in zip((ROW, COL, EDGE), self.edges[r], strict=False):
                self.outputs[r, column] = buffer.reserve(count, 0)
        self._check(induce_edges(*tables, self.outputs, *arguments))

    def _check(self, found: tuple[int, int]) -> None:
        if found[0] >= 0:
            raise InvalidColumn(*found)

    def sample(self, fanouts: IdArray) -> HeteroSample:
        """Sample all hops, and return the result."""
        nodes_before, edges_before = [np.zeros_like(self.num_seeds)], []
        nodes_before.append(self.types[:, COUNT].copy())
        edges_before.append(self.outputs[:, NUM_SAMPLED].copy())
        for hop in range(len(fanouts)):
            self.hop(hop, fanouts[hop])
            nodes_before.append(self.types[:, COUNT].copy())
            edges_before.append(self.outputs[:, NUM_SAMPLED].copy())
        if self.options.induced:
            self.induce()
        counts = self.types[:, COUNT].tolist()
        self.workspace.base += max([*counts, 1])
        num_edges = self.outputs[:, NUM_SAMPLED].tolist()
        rows, cols, *ids = (
            tuple(edges[i].data[:count] for edges, count in zip(self.edges, num_edges, strict=True))
            for i in range(3 if self.options.edge_ids else 2)
        )
        return HeteroSample(
            nodes=_views(self.nodes, counts),
            subgraphs=_views(self.subgraphs, counts) if self.options.disjoint else None,
            rows=rows,
            cols=cols,
            edge_ids=ids[0] if ids else None,
            num_nodes=_differences(nodes_before),
            num_edges=None if self.options.induced else _differences(edges_before),
        )


def _views(buffers: Sequence[_Growing], counts: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(buffer.data[:count] for buffer, count in zip(buffers, counts, strict=True))


def _differences(counts: Sequence[IdArray]) -> tuple[tuple[int, ...], ...]:
    new = [(after - before).tolist() for before, after in pairwise(counts)]
    # one row for each type, also without hops
    return tuple(tuple(row[t] for row in new) for t in range(len(counts[0])))


def sample_hetero(
    tables: HeteroTables,
    options: HeteroOptions,
    seeds: Sequence[tuple[int, Tensor]],
    epoch: int,
    *,
    seed_times: Tensor | None = None,
    excluded: Mapping[int, Tensor] | None = None,
    workspace: HeteroWorkspace | None = None,
    empty: Allocate = _empty,
) -> HeteroSample:
    """Sample the neighbourhood of seeds of one or several node types.

    Args:
        tables: the graph. Offsets and sources are checked where they are read.
        options: the fanouts, and how to sample.
        seeds: pairs of a node type and (S_t,) int64 ids on the host, contiguous, in
            [0, N_t), each type at most once. Without disjoint subgraphs, edges from a seed that
            occurs twice refer to its first position. Seeds are not checked.
        epoch: in [0, 2**32); the random choices differ between epochs.
        seed_times: (S,) int64 times of all seeds, in the order of `seeds`; for temporal sampling.
        excluded: by the number of the edge type (K,) int64 positions of edges that are not sampled,
            ascending, without duplicates, on the host.
        workspace: reused between calls for the same graph by one thread at a time.
        empty: allocates the tensors of the result.

    Raises:
        InvalidColumn: the graph has offsets or sources out of range.
        ValueError: the epoch is out of range, temporal sampling is not disjoint or has no times, or
            the batch could have 2**31 nodes of one type or more.
    """
    if not 0 <= epoch < 2**32:
        raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
    total = sum(len(ids) for _, ids in seeds)
    if options.temporal is not None and (
        not options.disjoint or seed_times is None or len(seed_times) != total
    ):
        raise ValueError(
            f"temporal sampling of {total} seeds without disjoint subgraphs or without their times"
        )
    if options.disjoint and total * tables.num_keys >= 2**62:
        raise ValueError(f"{total} seeds of a graph of {tables.num_keys} nodes are too many")
    fanouts = np.asarray(options.fanouts, np.int64).reshape(
        len(options.fanouts), len(tables.relations)
    )
    run = _Run(
        tables,
        options,
        seeds,
        seed_times if options.temporal is not None else None,
        epoch,
        excluded or {},
        workspace or HeteroWorkspace(),
        empty,
    )
    return run.sample(fanouts)
