"""Sample minibatches for link prediction in heterogeneous graphs.

Notation: E seed edges, S seeds of a minibatch, P pairs of a minibatch, K negatives for each edge.
"""

import copy
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeStore, EdgeType
from gcnzc.graph.times import as_times
from gcnzc.graph.values import to_array
from gcnzc.kernels.buffers import Allocate, Pool
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler
from gcnzc.sampling.hetero_negatives import HeteroNegativeSampler
from gcnzc.sampling.link import MAX_NEGATIVES
from gcnzc.sampling.neighbor import check_range
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


class HeteroLinkSampler:
    """Sample pairs of one edge type and their neighbourhoods; `sample` is thread-safe.

    Pass it as the `sampler` of a `gcnzc.Loader`, whose seeds then are indices of the
    seed edges, in [0, E). The negatives of an edge depend only on the random seed, the epoch and
    the index of the edge.

    With a temporal sampler, a seed edge has the time t that `times` has for it, whatever `time` of
    the sampler is. Its neighbourhood has times of at most t - 1: it contains neither the edge nor
    edges of the same time. Its negatives have the same neighbourhood times. They are nodes that are
    not later than t, if their node type has times and `time` is "node" or "both".

    In neighbourhoods, edges of this type without times that count are as late as their sources if
    `time` counts those of nodes, and always visible otherwise. Seed edges are then removed from
    their own neighbourhoods as without times, see `exclude`.

    Args:
        sampler: samples the neighbourhoods of the end nodes; directional.
        edge_type: of the pairs: a triple, or the name of a unique relation.
        edges: (2, E) sources and destinations of the seed edges. Default: those of the graph, in
            the order of the edge ids.
        times: (E,) times of the seed edges, for a temporal sampler: integers in the unit of the
            graph's times; or dates, which are rounded down to this unit, if `graph.time_unit` is
            set. Default: those of the graph's edges; required if they have none.
        num_negatives: K, the negatives of each edge: its source with random destinations.
        strict: reject negatives that are edges of the graph.
        exclude: edges that are removed from the sampled neighbourhoods: "none", the seed edges of
            the minibatch ("self"), or also their reverse edges ("reverse"). Default: "reverse", and
            "none" with a temporal sampler for which the times of these edges count. A node with a
            removed edge has one neighbour less.
        reverse_types: edge types of the reverse edges, from which the reverses of seed edges are
            removed where they exist. Default: the types whose edges are reverses of all
            edges of `edge_type` or of almost all; and those that are named like the reverse of
            `edge_type`, such as `rev_buys` or `buys_rev` for `buys`, and have some of its reverse
            edges.
        known: graph with the edges of `edge_type` that are not valid negatives. Default: that of
            the sampler.
        seed: 64-bit integer key of the negatives.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: one of

            - an edge type is unknown;
            - an edge is out of range;
            - times are missing;
            - an option is invalid;
            - with a temporal sampler, a reverse type has no times: its later edges would be
              sampled;
            - with a temporal sampler, all nodes are later than an edge: it has no negative.
    """

    def __init__(
        self,
        sampler: HeteroSampler,
        edge_type: EdgeType | str,
        edges: Any = None,
        *,
        times: Any = None,
        num_negatives: int = 1,
        strict: bool = True,
        exclude: Exclude | None = None,
        reverse_types: Sequence[EdgeType | str] | None = None,
        known: Graph | None = None,
        seed: int = 0,
    ) -> None:
        check_kind("sampler", sampler, HeteroSampler, "HeteroSampler(graph, [10, 10])")
        if sampler.subgraph_type != "directional":
            raise ValueError(
                f"the sampler's subgraph_type is {sampler.subgraph_type!r}\n\nhint: 'directional'"
            )
        self._sampler, self.graph = sampler, sampler.graph
        self.edge_type = self.graph.edge_type(edge_type)
        self.edges = self._check_edges(edges)
        self.times = self._check_times(times, is_own=edges is None)
        self.num_negatives = check_integer(
            "num_negatives", num_negatives, 0, MAX_NEGATIVES, "1 is the default; 0 draws none"
        )
        self.strict = check_flag("strict", strict)
        if exclude is None:
            exclude = "reverse"
            own_times, _ = self.graph.times(self.edge_type, sampler.time)
            if sampler.temporal is not None and own_times is not None:
                self._check_reverse_times(reverse_types)
                exclude = "none"
        check_choice("exclude", exclude, ("none", "self", "reverse"))
        self.exclude = exclude
        if exclude != "reverse":
            self.reverse_types: list[EdgeType] = []
        elif reverse_types is None:
            self.reverse_types = find_reverse_types(self.graph, self.edge_type)
        else:
            self.reverse_types = [self._check_reverse(each) for each in reverse_types]
        self.seed = check_seed("seed", seed)
        self._negatives = self._build_negatives(self.graph if known is None else known)

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

    @property
    def pool(self) -> Pool:
        """Buffer pool for minibatches, see `HeteroSampler`."""
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
        times = b"" if self.times is None else self.times.numpy().tobytes()
        return self._sampler.settings | {
            "edge_type": "__".join(self.edge_type),
            "edges_crc32": zlib.crc32(self.edges.numpy().tobytes()),
            "edge_times_crc32": zlib.crc32(times),
            "num_negatives": self.num_negatives,
            "strict": self.strict,
            "exclude": self.exclude,
            "reverse_types": ["__".join(each) for each in self.reverse_types],
            "negatives_seed": self.seed,
            **({"first_negative": first} if (first := self._negatives.first) else {}),
        }

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

    def with_negatives(self, first: int, count: int) -> "HeteroLinkSampler":
        """Return a sampler of a part of the negatives of each edge: `count` of them from `first`.

        A sampler with many negatives for each edge can thus be divided: together, the parts have
        the same negatives as the whole.
        """
        part, part._negatives = copy.copy(self), copy.copy(self._negatives)
        part.num_negatives = part._negatives.num_negatives = count
        part._negatives.first = self._negatives.first + first
        return part

    def sample(self, seeds: IdsLike, epoch: int) -> HeteroBatch:
        """Sample negatives for seed edges and the neighbourhoods of all end nodes.

        Args:
            seeds: (S,) indices of seed edges, on the host.
            epoch: in [0, 2**32); each epoch has its own negatives and neighbours.

        Returns:
            A minibatch with `pairs`, the S edges in the given order and then the negatives, grouped
            by edge; and with `y`. Without disjoint subgraphs its seeds are the distinct end
            nodes, in ascending order; otherwise every end of every pair.

        Raises:
            TypeError: seeds or epoch have the wrong type.
            ValueError: a seed is not in [0, E), or no valid negative was found with `strict`.
        """
        begin_s = time.perf_counter()
        epoch = check_epoch("epoch", epoch)
        items = as_ids("seeds", seeds, "indices of the seed edges")
        hint = "indices of seed edges; torch.arange(sampler.num_items) for all of them"
        check_range("seeds", items, self.num_items, "there are {} seed edges", hint)
        positives = self.edges[:, items]
        own_times = None if self.times is None else self.times[items]
        negatives = self._negatives.sample(positives, items, own_times, epoch)
        ends = torch.cat([positives, negatives], dim=1)
        source, _, target = self.edge_type
        times = None
        if own_times is not None:
            # strictly before the edge
            before = own_times - 1
            times = torch.cat([before, before.repeat_interleave(self.num_negatives)])
        if self._sampler.options.disjoint:
            batch, pairs = self._sample_disjoint(ends, times, epoch)
        else:
            seeds_of, pairs = _unique_ends(ends, source, target)
            batch = self._sampler.sample(seeds_of, epoch)
        batch.pairs = self.pool.empty(pairs.shape, pairs.dtype).copy_(pairs)
        batch.y = self.pool.empty(ends.shape[1]).zero_()
        batch.y[: len(items)] = 1
        self._exclude(batch, positives)
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
        both = None if times is None else torch.cat([times, times])
        return self._sampler.sample(seeds, epoch, both), pairs

    def _excluded(self) -> Iterator[tuple[EdgeType, bool]]:
        """Yield the edge types to remove edges of, and whether they are reverse ones."""
        if self.exclude != "none":
            yield self.edge_type, False
        for each in self.reverse_types:
            yield each, True

    def _exclude(self, batch: HeteroBatch, positives: Tensor) -> None:
        """Remove the seed edges of a minibatch from its sampled edges."""
        for edge_type, is_reverse in self._excluded():
            ends = positives.flip(0) if is_reverse else positives
            row, col = batch.edge_index(edge_type)
            count = self.graph.nodes(edge_type[2]).num_nodes
            keys = batch.nodes[edge_type[0]][row] * count + batch.nodes[edge_type[2]][col]
            kept = torch.isin(keys, ends[0] * count + ends[1], invert=True)
            if not bool(kept.all()):
                _keep_edges(batch, edge_type, kept, self.pool.empty)

    def _check_edges(self, edges: Any) -> Tensor:
        name = f"edges of {self.edge_type}"
        if edges is None:
            found = self.graph.edges(self.edge_type).edge_index()
        else:
            # a copy, since torch does not support read-only memory
            found = torch.from_numpy(np.array(to_array(name, edges)))
            if found.ndim != 2 or len(found) != 2 or found.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} are {describe(edges)}\n\n"
                    "hint: (2, E) of int32 or int64: row 0 sources, row 1 destinations"
                )
            found = found.long().contiguous()
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

    def _build_negatives(self, known: Graph) -> HeteroNegativeSampler:
        check_kind("known", known, Graph, "a Graph with the same nodes, or None")
        for end in self.edge_type[::2]:
            if known.nodes(end).num_nodes != self.graph.nodes(end).num_nodes:
                raise ValueError(
                    f"known has {known.nodes(end).num_nodes} nodes of type {end!r}, not "
                    f"{self.graph.nodes(end).num_nodes}"
                )
        node_times = None
        if self.times is not None and self._sampler.time != "edge":
            node_times = self.graph.nodes(self.edge_type[2]).time
        negatives = HeteroNegativeSampler(
            known, self.edge_type, self.num_negatives, self.strict, self.seed, node_times
        )
        if self.times is not None:
            negatives.check_eligible(self.edges, self.times)
        return negatives

    def _check_reverse(self, given: EdgeType | str) -> EdgeType:
        edge_type = self.graph.edge_type(given)
        if edge_type[::2] != self.edge_type[::-2]:
            raise ValueError(
                f"reverse_types has {edge_type}, which does not go from {self.edge_type[2]!r} to "
                f"{self.edge_type[0]!r}\n\nhint: the reverse edges of {self.edge_type}"
            )
        return edge_type


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
