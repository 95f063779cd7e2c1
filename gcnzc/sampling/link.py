"""Sample minibatches for link prediction: seed edges, negatives and their neighbourhoods.

The seeds of a loader are then indices of seed edges. Each minibatch has the pairs to score, their
end nodes as `batch.seeds`, and the sampled neighbourhood of these nodes. The seed edges can be
excluded from the neighbourhood, so that the model does not see the edges that it predicts.

Notation: E seed edges, S seeds, P pairs of a minibatch, K negatives for each edge.
"""

import copy
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeStore, EdgeType
from gcnzc.graph.times import as_times
from gcnzc.graph.values import to_array
from gcnzc.kernels.buffers import Allocate, Pool
from gcnzc.kernels.sample.exclude import find_edges, is_sorted, sort_columns
from gcnzc.sampling.batch import Block
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.sampling.negatives import Negatives, NegativeSampler
from gcnzc.sampling.neighbor import Sampler, check_range
from gcnzc.sampling.reverse_types import find_reverse_types
from gcnzc.system.arguments import (
    IdsLike,
    as_ids,
    check_choice,
    check_epoch,
    check_flag,
    check_integer,
    check_kind,
    check_seed,
    describe,
)

Exclude: TypeAlias = Literal["none", "self", "reverse"]

# draws are counted with 32 bits, and each negative takes up to 32 draws
MAX_NEGATIVES = 2**27 - 1


class LinkSampler:
    """Sample pairs of one edge type and their neighbourhoods; `sample` is thread-safe.

    Pass it as the `sampler` of a `gcnzc.Loader`, whose seeds then are indices of the seed edges, in
    [0, E). The negatives of an edge depend only on the random seed, the epoch and the index of the
    edge, and the neighbours of a node as in its sampler; only in-batch negatives depend on the
    other edges of the minibatch.

    With a temporal sampler, a seed edge has the time t that `times` has for it, whatever `time` of
    the sampler is. Its neighbourhood has times of at most t - 1: it contains neither the edge nor
    edges of the same time. Its negatives have the same neighbourhood times. They are nodes that are
    not later than t, if their node type has times and `time` is "node" or "both".

    In neighbourhoods, edges of this type without times that count are as late as their sources if
    `time` counts those of nodes, and always visible otherwise. Seed edges are then removed from
    their own neighbourhoods as without times, see `exclude`.

    Args:
        sampler: samples the neighbourhoods of the end nodes; directional. Of a graph without
            types whose columns are not sorted, a sorted copy of `indices` is sampled.
        edges: (2, E) sources and destinations of the seed edges, which need not be edges of the
            graph. Default: those of the graph, in the order of the edge ids.
        edge_type: of the pairs: a triple, or the name of a unique relation. Default: the only one.
        times: (E,) times of the seed edges, for a temporal sampler: integers in the unit of the
            graph's times; or dates, which are rounded down to this unit, if `graph.time_unit` is
            set. Default: those of the graph's edges; required if they have none.
        negatives: "uniform" keeps the source of an edge and draws the destination from all nodes;
            "both" draws both end nodes; "in-batch" pairs the source with the destinations of the
            following edges of the minibatch. Edges between two node types, and a temporal sampler,
            require "uniform".
        num_negatives: K, the negatives of each edge. In-batch sampling returns fewer if fewer edges
            follow.
        strict: reject negatives that are edges of `known` or self loops: draw again, or drop them
            for in-batch negatives.
        exclude: the edges that are excluded from the neighbourhoods: "none", the seed edges of the
            minibatch ("self"), or also their reverse edges ("reverse"). All duplicates of an
            excluded edge are excluded. Default: "reverse", and "none" with a temporal sampler for
            which the times of these edges count. In a graph without types, neighbours are sampled
            from the remaining edges, if the sampler is plain. Otherwise excluded edges are removed
            from the sampled ones, so that a node with a removed edge has one neighbour less.
        reverse_types: of a graph with types, edge types of the reverse edges, from which the
            reverses of seed edges are removed where they exist. Default: the types whose edges are
            reverses of all edges of `edge_type` or of almost all; and those that are named like the
            reverse of `edge_type`, such as `rev_buys` or `buys_rev` for `buys`, and have some of
            its reverse edges.
        known: graph with the edges of `edge_type` that are not valid negatives. Default: that of
            the sampler.
        seed: 64-bit integer key of the negatives.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: one of

            - an edge type is unknown;
            - an edge is out of range, or there are none;
            - times are missing;
            - an option is invalid;
            - with a temporal sampler, a reverse type has no times: its later edges would be
              sampled;
            - with a temporal sampler, all nodes are later than an edge: it has no negative.
    """

    def __init__(
        self,
        sampler: Sampler,
        edges: Any = None,
        edge_type: EdgeType | str | None = None,
        *,
        times: Any = None,
        negatives: Negatives = "uniform",
        num_negatives: int = 1,
        strict: bool = True,
        exclude: Exclude | None = None,
        reverse_types: Sequence[EdgeType | str] | None = None,
        known: Graph | None = None,
        seed: int = 0,
    ) -> None:
        check_kind("sampler", sampler, Sampler, "gcnzc.Sampler(graph, fanouts)")
        if sampler.subgraph_type != "directional":
            raise ValueError(
                f"the sampler's subgraph_type is {sampler.subgraph_type!r}\n\nhint: 'directional'"
            )
        self._sampler, self.graph = sampler, sampler.graph
        self.edge_type = self.graph.edge_type(edge_type)
        self.edges = self._check_edges(edges)
        self.times = self._check_times(times, is_own=edges is None)
        check_choice("negatives", negatives, get_args(Negatives))
        self.negatives = negatives
        self.num_negatives = check_integer(
            "num_negatives", num_negatives, 0, MAX_NEGATIVES, "1 is the default; 0 draws none"
        )
        self.strict = check_flag("strict", strict)
        self.exclude, self.reverse_types = self._check_exclude(exclude, reverse_types)
        self.seed = check_seed("seed", seed)
        # the graph that is sampled from, and the positions of its edges in `graph`
        self._sampled, self._order = self.graph, None
        if sampler.is_plain and self.exclude != "none":
            # sorted columns are needed to find the excluded edges
            self._sampled, self._order = _sort_columns(self.graph, sampler.edge_ids)
            if self._sampled is not self.graph:
                self._sampler = sampler.with_graph(self._sampled)
        self._negatives = self._build_negatives(self._sampled if known is None else known)

    @property
    def fanouts(self) -> Any:
        """Numbers of neighbours, see the sampler."""
        return self._sampler.fanouts

    @property
    def pool(self) -> Pool:
        """Buffer pool for minibatches, see `gcnzc.Sampler`."""
        return self._sampler.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._sampler.pool = pool

    @property
    def num_items(self) -> int:
        """Number of seed edges, E; the loader's seeds are in [0, E)."""
        return self.edges.shape[1]

    @property
    def settings(self) -> dict[str, Any]:
        """Options that determine the sampled pairs and neighbours, for a loader's state dict."""
        edges_crc32, edge_times_crc32 = self._checksums
        return self._sampler.settings | {
            "edge_type": "__".join(self.edge_type),
            "edges_crc32": edges_crc32,
            "edge_times_crc32": edge_times_crc32,
            "negatives": self.negatives,
            "num_negatives": self.num_negatives,
            "strict": self.strict,
            "exclude": self.exclude,
            "reverse_types": ["__".join(each) for each in self.reverse_types],
            "negatives_seed": self.seed,
            **({"first_negative": first} if (first := self._negatives.first) else {}),
        }

    @cached_property
    def _checksums(self) -> tuple[int, int]:
        times = b"" if self.times is None else self.times.numpy().data
        return zlib.crc32(self.edges.numpy().data), zlib.crc32(times)

    def check_negatives(self, edges: Tensor | None = None, times: Tensor | None = None) -> None:
        """Check that edges have negatives, which `sample` otherwise finds out one by one.

        Args:
            edges: (2, E) of the edge type. Default: the seed edges.
            times: (E,) of `edges`, for a temporal sampler.

        Raises:
            ValueError: an edge has no negative: all destinations are later than it, or with
                `strict`, its source has an edge to each of those that are not.
        """
        if edges is None:
            edges, times = self.edges, self.times
        self._negatives.check_negatives(edges, times)

    def with_negatives(self, first: int, count: int) -> "LinkSampler":
        """Return a sampler of a part of the negatives of each edge: `count` of them from `first`.

        A sampler with many negatives for each edge can thus be divided: together, the parts have
        the same negatives as the whole.
        """
        part, part._negatives = copy.copy(self), copy.copy(self._negatives)
        part.num_negatives = part._negatives.num_negatives = count
        part._negatives.first = self._negatives.first + first
        return part

    def sample(self, seeds: IdsLike, epoch: int) -> Any:
        """Sample negatives for seed edges and the neighbourhoods of all end nodes.

        Args:
            seeds: (S,) indices of seed edges, on the host: a tensor, an array or a list.
            epoch: in [0, 2**32); each epoch has its own negatives and neighbours.

        Returns:
            A `Batch` if the sampler is plain and otherwise a `HeteroBatch`, without features.
            `pairs` are the S edges in the given order and then the negatives, grouped by edge; `y`
            is (P,) float32, 1 for edges and 0 for negatives.
            Without disjoint subgraphs the seeds are the distinct end nodes, in ascending order;
            otherwise every end of every pair.

        Raises:
            TypeError: seeds or epoch have the wrong type.
            ValueError: a seed is not in [0, E), the epoch is out of range, or no valid negative was
                found for an edge with `strict`.
        """
        begin_s = time.perf_counter()
        epoch = check_epoch("epoch", epoch)
        items = self._check_items(seeds)
        positives = self.edges[:, items]
        times = None if self.times is None else self.times[items]
        negatives = self._negatives.sample(positives, items, times, epoch)
        ends = torch.cat([positives, negatives], dim=1)
        batch: Any
        if self._sampler.is_plain:
            nodes, pairs = ends.unique(return_inverse=True)
            batch = self._sampler.sample_checked(nodes, epoch, self._excluded_edges(positives))
            batch.blocks = tuple(self._restore_graph(block) for block in batch.blocks)
        elif self._sampler.options.disjoint:
            batch, pairs = self._sample_disjoint(ends, times, epoch)
            self._remove(batch, positives)
        else:
            by_type, pairs = _unique_ends(ends, self.edge_type[0], self.edge_type[2])
            batch = self._sampler.sample(by_type, epoch)
            self._remove(batch, positives)
        batch.pairs = self.pool.empty(pairs.shape, pairs.dtype).copy_(pairs)
        batch.y = self.pool.empty(ends.shape[1]).zero_()
        batch.y[: len(items)] = 1
        batch.times["sample_s"] = time.perf_counter() - begin_s
        return batch

    def _sample_disjoint(
        self, ends: Tensor, times: Tensor | None, epoch: int
    ) -> tuple[HeteroBatch, Tensor]:
        source, _, target = self.edge_type
        places = torch.arange(ends.shape[1])
        if source == target:
            seeds = {source: ends.flatten()}
            pairs = torch.stack([places, places + ends.shape[1]])
        else:
            seeds = {source: ends[0], target: ends[1]}
            pairs = torch.stack([places, places])
        if times is not None:
            # strictly before the edge
            before = times - 1
            times = torch.cat([before, before.repeat_interleave(self.num_negatives)]).repeat(2)
        return self._sampler.sample(seeds, epoch, times), pairs

    def _excluded_edges(self, positives: Tensor) -> Tensor | None:
        """Return the positions of excluded edges in the sorted columns of a graph of one type."""
        if self.exclude == "none":
            return None
        ends = positives
        if self.exclude == "reverse":
            ends = torch.cat([positives, positives.flip(0)], dim=1)
        indptr, indices = self._sampled.indptr.numpy(), self._sampled.indices.numpy()
        return torch.from_numpy(find_edges(indptr, indices, *ends.numpy()))

    def _restore_graph(self, block: Block) -> Block:
        if block.graph is self.graph:
            return block
        # the block was sampled from the sorted copy
        ids = block.edge_ids
        if ids is not None and self._order is not None:
            ids = self._order[ids]
        return replace(block, graph=self.graph, edge_ids=ids)

    def _remove(self, batch: HeteroBatch, positives: Tensor) -> None:
        """Remove the seed edges of a minibatch from its sampled edges."""
        for edge_type, is_reverse in self._removed():
            ends = positives.flip(0) if is_reverse else positives
            row, col = batch.edge_index(edge_type)
            count = self.graph.nodes(edge_type[2]).num_nodes
            keys = batch.nodes[edge_type[0]][row] * count + batch.nodes[edge_type[2]][col]
            kept = torch.isin(keys, ends[0] * count + ends[1], invert=True)
            if not bool(kept.all()):
                _keep_edges(batch, edge_type, kept, self.pool.empty)

    def _removed(self) -> Iterator[tuple[EdgeType, bool]]:
        """Yield the edge types to remove edges of, and whether they are reverse ones."""
        if self.exclude != "none":
            yield self.edge_type, False
        for each in self.reverse_types:
            yield each, True

    def _check_items(self, seeds: IdsLike) -> Tensor:
        items = as_ids("seeds", seeds, "the seeds of a LinkSampler are indices of its seed edges")
        if items.device.type != "cpu":
            raise ValueError(f"seeds is {describe(seeds)} on {items.device}\n\nhint: seeds.cpu()")
        hint = "indices of seed edges; torch.arange(sampler.num_items) for all of them"
        check_range("seeds", items, self.num_items, "there are {} seed edges", hint)
        return items

    def _check_edges(self, edges: Any) -> Tensor:
        name = f"edges of {self.edge_type}"
        if edges is None:
            found = self.graph.edges(self.edge_type).edge_index()
        else:
            found = edges
            if not isinstance(edges, Tensor):
                array = to_array(name, edges)
                # a copy, since torch does not support read-only memory
                is_number = array.dtype.kind in "iuf"
                found = torch.from_numpy(np.array(array)) if is_number else torch.empty(0)
            if found.ndim != 2 or len(found) != 2 or found.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} are {describe(edges)}\n\nhint: (2, E) of int32 or int64: row 0 "
                    "sources, row 1 destinations; transpose OGB's (E, 2) with .T"
                )
            found = found.cpu().long().contiguous()
        if found.shape[1] == 0:
            raise ValueError(f"{name} are empty\n\nhint: is the split empty?")
        for end, ids in zip(self.edge_type[::2], found, strict=True):
            reason = f"node type {end!r} has {{}} nodes"
            check_range(name, ids, self.graph.nodes(end).num_nodes, reason, "node ids")
        return found

    def _check_times(self, times: Any, *, is_own: bool) -> Tensor | None:
        if self._sampler.temporal is None:
            if times is not None:
                raise ValueError("times are given, but the sampler ignores times")
            return None
        if times is None and is_own:
            times = edge_times(self.graph, self.edge_type)
        if times is None:
            raise ValueError(
                f"temporal sampling needs the time of each seed edge of {self.edge_type}"
            )
        return as_times("times", times, self.num_items, self.graph.time_unit, is_limit=True)

    def _check_exclude(
        self, exclude: Exclude | None, given: Sequence[EdgeType | str] | None
    ) -> tuple[Exclude, list[EdgeType]]:
        """Return which edges are excluded, and the edge types with reverse edges."""
        if exclude is None:
            exclude = "reverse"
            if self.times is not None:
                own_times, _ = self.graph.times(self.edge_type, self._sampler.time)
                if own_times is not None:
                    self._check_reverse_times(given)
                    exclude = "none"
        check_choice("exclude", exclude, get_args(Exclude))
        if exclude != "reverse" or self._sampler.is_plain:
            return exclude, []
        if not self._sampler.has_types:
            return exclude, [self.edge_type]
        if given is None:
            return exclude, find_reverse_types(self.graph, self.edge_type)
        return exclude, [self._check_reverse(each) for each in given]

    def _check_reverse_times(self, given: Sequence[EdgeType | str] | None) -> None:
        if all(self.graph.edges(each).time is not None for each in self.graph.edge_types):
            return
        found = find_reverse_types(self.graph, self.edge_type) if given is None else given
        for each in map(self._check_reverse, found):
            if self.graph.edges(each).time is None:
                raise ValueError(
                    f"the edges {each} are the reverses of {self.edge_type}, but have no times, so "
                    "a temporal sampler samples the reverse of the edge itself and of later edges"
                    "\n\n"
                    f"hint: give {each} the times of {self.edge_type}, or reverse_types=[] (gcnzc "
                    "train: --task link:reverse_types=none) if they are not reverses"
                )

    def _check_reverse(self, given: EdgeType | str) -> EdgeType:
        edge_type = self.graph.edge_type(given)
        if edge_type[::2] != self.edge_type[::-2]:
            raise ValueError(
                f"reverse_types has {edge_type}, which does not go from {self.edge_type[2]!r} to "
                f"{self.edge_type[0]!r}\n\nhint: the reverse edges of {self.edge_type}"
            )
        return edge_type

    def _build_negatives(self, known: Graph) -> NegativeSampler:
        check_kind("known", known, Graph, "a gcnzc.Graph with the same nodes, or None")
        source, _, target = self.edge_type
        for end in (source, target):
            expected, found = (each.nodes(end).num_nodes for each in (self.graph, known))
            if expected != found:
                raise ValueError(f"known has {found} nodes of type {end!r}, not {expected}")
        if self.negatives != "uniform" and (source != target or self.times is not None):
            raise ValueError(
                f"negatives is {self.negatives!r}, but {self.edge_type} has two node types, or the "
                "sampler is temporal\n\nhint: negatives='uniform'"
            )
        node_times = None
        if self.times is not None and self._sampler.time != "edge":
            node_times = self.graph.nodes(target).time
        negatives = NegativeSampler(
            known,
            self.edge_type,
            self.negatives,
            self.num_negatives,
            self.strict,
            self.seed,
            node_times,
        )
        if self.times is not None:
            negatives.check_eligible(self.edges, self.times)
        return negatives


def _unique_ends(ends: Tensor, source: str, target: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the distinct end nodes by type, and the positions of the pairs among them."""
    if source == target:
        nodes, positions = ends.unique(return_inverse=True)
        return {source: nodes}, positions
    sources, rows = ends[0].unique(return_inverse=True)
    targets, columns = ends[1].unique(return_inverse=True)
    return {source: sources, target: targets}, torch.stack([rows, columns])


def _keep_edges(batch: HeteroBatch, edge_type: EdgeType, kept: Tensor, empty: Allocate) -> None:
    """Remove the edges of a type for which `kept`, (E_r,) bool, is False."""
    assert batch.num_edges is not None, "the constructor requires directional subgraphs"
    numbers = [int(own.sum()) for own in kept.split(list(batch.num_edges[edge_type]))]
    # the removed edges before each edge
    removed = torch.cat([kept.new_zeros(1, dtype=torch.int64), (~kept).cumsum(0)])
    offsets, begin = [], 0
    for hop in (-1,) if batch.is_prefix else range(len(numbers)):
        indptr, indices = batch.csc(edge_type, hop)
        offsets.append(indptr - (removed[begin + indptr] - removed[begin]))
        begin += len(indices)
    batch.indptr[edge_type] = torch.cat(offsets)
    batch.num_edges[edge_type] = tuple(numbers)
    for each in (batch.indices, batch.edge_ids or {}):
        if edge_type in each:
            out = empty(sum(numbers), each[edge_type].dtype)
            each[edge_type] = torch.masked_select(each[edge_type], kept, out=out)


def edge_times(graph: Graph, edge_type: EdgeType) -> Tensor | None:
    """Return the (E,) times of the edges of a type in the order of the edge ids; None without."""
    store: EdgeStore = graph.edges(edge_type)
    if store.time is None or store.edge_ids is None:
        return store.time
    ordered = torch.empty_like(store.time)
    ordered[store.edge_ids] = store.time
    return ordered


def _sort_columns(graph: Graph, order: bool) -> tuple[Graph, Tensor | None]:
    """Return the graph with sorted columns and, with `order`, the edges' positions in `graph`."""
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if is_sorted(indptr, indices):
        return graph, None
    sources, positions = sort_columns(indptr, indices, order=order)
    edge_order = None if positions is None else torch.from_numpy(positions)
    return Graph(np.asarray(indptr), sources, check=False), edge_order
