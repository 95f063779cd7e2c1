"""Sample minibatches of pairs: edges, negatives, and their neighbourhoods.

A loader's seeds are then numbers of edges. Each batch has the pairs to be told apart, the nodes at
their ends as `batch.seeds`, and the neighbourhood of these, from which the edges that are asked for
can be left out, so that a model does not see what it is to foretell.

Letters: E target edges, S seeds, P pairs of a batch, K negatives for each edge.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample.exclude import ExcludedEdges, exclude_edges, is_sorted, sort_columns
from gcnzc.kernels.sample.negatives import in_batch_negatives, sample_negatives
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import Sampler, check_graph, check_range
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

Negatives: TypeAlias = Literal["uniform", "both", "in-batch"]


Exclude: TypeAlias = Literal["none", "self", "reverse"]


# draws are counted in 32 bits, with 32 tries each
MOST_NEGATIVES = 2**27 - 1


class LinkSampler:
    """Makes minibatches of pairs from numbers of edges; the `sampler` of a `gcnzc.Loader`.

    The loader's `seeds` are numbers of edges, in [0, E). Any number of threads may sample at once.
    What is drawn for an edge depends on the seed, the epoch and its number alone, and what is drawn
    for a node as in `gcnzc.Sampler`; only in-batch negatives depend on the batch.

    Args:
        graph: on the host; messages go along its edges. If its columns are not sorted, a sorted
            copy of its `indices` is made.
        edges: (2, E) int32 or int64 sources and destinations of the target edges, on the host; they
            need not be edges of `graph`.
        fanouts: as `gcnzc.Sampler` takes them.
        negatives: "uniform" keeps an edge's source and draws the destination from all nodes; "both"
            draws both ends; "in-batch" sets the source beside the destinations of the edges that
            follow in the batch.
        num_negatives: K; fewer where a batch has not so many edges that follow.
        strict: negatives are neither edges of `known` nor a node with itself: they are drawn again,
            and of in-batch ones those are left out.
        exclude: which edges never appear in a block: "none" of them, those that join a target edge
            of the batch ("self"), or these and the ones back ("reverse"). The draw is uniform,
            without replacement, over what is left. Equal edges are excluded with each other.
        known: the edges that negatives must not be; `graph` if None.
        seed: the key of every choice, an integer of 64 bits.
        edge_ids: also give each block's edges' positions in `graph.indices`.

    Raises:
        TypeError: an argument of another type.
        ValueError: edges that are none, or an argument that makes no sense.
    """

    def __init__(
        self,
        graph: Graph,
        edges: Tensor,
        fanouts: Sequence[int],
        *,
        negatives: Negatives = "uniform",
        num_negatives: int = 1,
        strict: bool = True,
        exclude: Exclude = "reverse",
        known: Graph | None = None,
        seed: int = 0,
        edge_ids: bool = False,
    ) -> None:
        check_graph(graph)
        check_choice("negatives", negatives, ("uniform", "both", "in-batch"))
        check_choice("exclude", exclude, ("none", "self", "reverse"))
        self.graph = graph
        self.edges = check_edges(edges, graph.num_nodes)
        self.negatives = negatives
        self.num_negatives = check_integer(
            "num_negatives", num_negatives, 0, MOST_NEGATIVES, "1 is the default; 0 draws none"
        )
        self.strict = check_flag("strict", strict)
        self.exclude = exclude
        self.seed = check_seed("seed", seed)
        edge_ids = check_flag("edge_ids", edge_ids)
        if known is not None:
            check_kind("known", known, Graph, "a gcnzc.Graph of the same nodes, or None")
        self._sorted, self._order = _sorted(graph, edge_ids and exclude != "none")
        if known is None or known is graph:
            self._known = self._sorted
        elif known.num_nodes != graph.num_nodes:
            raise ValueError(
                f"known is a graph of {known.num_nodes} nodes, not {graph.num_nodes}\n\n"
                "hint: both graphs number the same nodes"
            )
        else:
            self._known, _ = _sorted(known, False)
        # where nothing is excluded the stored order is as good
        drawn_from = graph if exclude == "none" else self._sorted
        self._sampler = Sampler(drawn_from, fanouts, seed, edge_ids)

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Input layer first."""
        return self._sampler.fanouts

    @property
    def num_items(self) -> int:
        """E: what a loader's seeds are numbers of."""
        return self.edges.shape[1]

    @property
    def settings(self) -> dict[str, Any]:
        """What decides which pairs and neighbours are drawn, by name, for a loader's state."""
        names = ("negatives", "num_negatives", "strict", "exclude")
        return self._sampler.settings | {name: getattr(self, name) for name in names}

    @property
    def pool(self) -> Pool:
        """Lends the memory of the neighbourhoods, as that of `gcnzc.Sampler`."""
        return self._sampler.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._sampler.pool = pool

    def sample(self, seeds: IdsLike, epoch: int) -> Batch:
        """The pairs of some edges, and the neighbourhood of their ends.

        Args:
            seeds: (S,) numbers of target edges, on the host: a tensor, an array or a list.
            epoch: in [0, 2**32); other epochs draw other negatives and neighbours.

        Returns:
            A batch without features. `pairs` is (2, P) int64 places in `seeds`, the edges first in
            the order asked for, then the negatives, those of one edge side by side; `y` is (P,)
            float32, 1 for the edges and 0 for the negatives. `seeds` are the ids of the nodes that
            occur, ascending.

        Raises:
            TypeError: seeds or epoch are of another type.
            ValueError: a number that is not an edge's, an epoch out of range, or an edge for which
                `strict` leaves no negative.
        """
        begin_s = time.perf_counter()
        epoch = check_epoch("epoch", epoch)
        items = _check_items(seeds, self.num_items)
        positives = self.edges[:, items]
        others = self._negatives(positives, items, epoch)
        pairs = torch.cat([positives, others], dim=1)
        nodes, places = pairs.unique(return_inverse=True)
        without = self._left_out(positives, nodes, places[:, : len(items)])
        batch = self._sampler.sample(nodes, epoch, without)
        if batch.blocks[0].graph is not self.graph:
            batch.blocks = tuple(self._of_the_graph(block) for block in batch.blocks)
        batch.pairs = places
        batch.y = torch.zeros(pairs.shape[1])
        batch.y[: len(items)] = 1
        batch.times["sample_s"] = time.perf_counter() - begin_s
        return batch

    def _of_the_graph(self, block: Block) -> Block:
        # drawn from the sorted copy
        ids = block.edge_ids
        if ids is not None and self._order is not None:
            ids = self._order[ids]
        return replace(block, graph=self.graph, edge_ids=ids)

    def _negatives(self, positives: Tensor, items: Tensor, epoch: int) -> Tensor:
        indptr, indices = self._known.indptr.numpy(), self._known.indices.numpy()
        count, strict = self.num_negatives, self.strict
        if self.negatives == "in-batch":
            return torch.from_numpy(
                in_batch_negatives(indptr, indices, positives.numpy(), count, strict)
            )
        sources, numbers = positives[0].numpy(), items.numpy()
        return torch.from_numpy(
            sample_negatives(
                *(indptr, indices, sources, numbers, count),
                *(self.negatives, strict, self.seed, epoch),
            )
        )

    def _left_out(self, positives: Tensor, nodes: Tensor, places: Tensor) -> ExcludedEdges | None:
        if self.exclude == "none":
            return None
        sources, locals_ = positives[0], places[1]
        if self.exclude == "reverse":
            sources, locals_ = positives.flatten(), places.flip(0).flatten()
        return exclude_edges(
            self._sorted.indptr.numpy(),
            self._sorted.indices.numpy(),
            nodes.numpy(),
            locals_.numpy(),
            sources.numpy(),
        )


def check_edges(edges: Tensor, num_nodes: int) -> Tensor:
    """`edges` as (2, E) int64, contiguous, on the host.

    Raises:
        TypeError: no tensor.
        ValueError: another shape or dtype, none at all, or an end that is no node.
    """
    if isinstance(edges, np.ndarray):
        edges = torch.from_numpy(edges.copy())
    check_kind("edges", edges, Tensor, "(2, E) of int32 or int64, sources above destinations")
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"edges of shape {tuple(edges.shape)} and type {edges.dtype}\n\n"
            "hint: (2, E) of int32 or int64, sources above destinations; OGB's (E, 2) becomes that "
            "by .T"
        )
    if edges.shape[1] == 0:
        raise ValueError("no target edges\n\nhint: is the split empty?")
    edges = edges.cpu().long().contiguous()
    least, greatest = (int(bound) for bound in edges.aminmax())
    if least < 0 or greatest >= num_nodes:
        raise ValueError(
            f"the ends of edges reach from {least} to {greatest}, but the graph has {num_nodes} "
            "nodes\n\nhint: nodes are counted from 0"
        )
    return edges


def _sorted(graph: Graph, order: bool) -> tuple[Graph, Tensor | None]:
    """The graph with sorted columns, and, asked for, where its edges stand in `graph`."""
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if is_sorted(indptr, indices):
        return graph, None
    sources, places = sort_columns(indptr, indices, order=order)
    found = None if places is None else torch.from_numpy(places)
    return Graph(np.asarray(indptr), sources, check=False), found


def _check_items(seeds: IdsLike, num_items: int) -> Tensor:
    items = as_ids("seeds", seeds, "a LinkSampler's seeds are numbers of its target edges")
    if items.device.type != "cpu":
        raise ValueError(f"seeds is {describe(seeds)} on {items.device}\n\nhint: seeds.cpu()")
    what = "numbers of edges, torch.arange(sampler.num_items) for all of them"
    check_range("seeds", items, num_items, "there are {} target edges", what)
    return items
