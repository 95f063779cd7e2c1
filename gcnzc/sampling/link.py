"""Sample minibatches for link prediction: seed edges, negatives and their neighbourhoods.

The seeds of a loader are then indices of seed edges. Each minibatch has the pairs to score, their
end nodes as `batch.seeds`, and the sampled neighbourhood of these nodes. The seed edges can be
excluded from the neighbourhood, so that the model does not see the edges that it predicts.

Notation: E seed edges, S seeds, P pairs of a minibatch, K negatives for each edge.
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
from gcnzc.kernels.sample.exclude import find_edges, is_sorted, sort_columns
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


# draws are counted with 32 bits, and each negative takes up to 32 draws
MAX_NEGATIVES = 2**27 - 1


class LinkSampler:
    """Sample minibatches for link prediction; pass it as the `sampler` of a `gcnzc.Loader`.

    The loader's `seeds` are indices of seed edges, in [0, E). `sample` may be called from several
    threads at once. The negatives of an edge depend only on the random seed, the epoch and the
    index of the edge, and the neighbours of a node as in `gcnzc.Sampler`; only in-batch negatives
    depend on the other edges of the minibatch.

    Args:
        graph: the message-passing graph, on the host. If its columns are not sorted, the sampler
            makes a sorted copy of its `indices`.
        edges: (2, E) int32 or int64 sources and targets of the seed edges, on the host; they
            need not be edges of `graph`.
        fanouts: see `gcnzc.Sampler`.
        negatives: "uniform" keeps the source of an edge and draws the target from all nodes;
            "both" draws both end nodes; "in-batch" pairs the source with the targets of the
            following edges of the minibatch.
        num_negatives: K. In-batch sampling returns fewer if fewer edges follow.
        strict: reject negatives that are edges of `known` or self loops: draw again, or drop them
            for in-batch negatives.
        exclude: the edges that are excluded from the blocks: "none", the seed edges of the
            minibatch ("self"), or the seed edges and their reverse edges ("reverse"). Neighbours
            are sampled uniformly without replacement from the remaining edges. All duplicates of an
            excluded edge are excluded.
        known: graph of the edges that are not valid negatives; `graph` if None.
        seed: 64-bit integer key of the random choices.
        edge_ids: also return the positions in `graph.indices` of the edges of each block.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `edges` is empty or invalid, or another argument is out of range.
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
            "num_negatives", num_negatives, 0, MAX_NEGATIVES, "1 is the default; 0 draws none"
        )
        self.strict = check_flag("strict", strict)
        self.exclude = exclude
        self.seed = check_seed("seed", seed)
        edge_ids = check_flag("edge_ids", edge_ids)
        if known is not None:
            check_kind("known", known, Graph, "a gcnzc.Graph of the same nodes, or None")
        self._sorted, self._order = _sort_columns(graph, edge_ids and exclude != "none")
        if known is None or known is graph:
            self._known = self._sorted
        elif known.num_nodes != graph.num_nodes:
            raise ValueError(f"known is a graph of {known.num_nodes} nodes, not {graph.num_nodes}")
        else:
            self._known, _ = _sort_columns(known, False)
        # sorted columns are needed only to find the excluded edges
        sampled_graph = graph if exclude == "none" else self._sorted
        self._sampler = Sampler(sampled_graph, fanouts, seed, edge_ids)

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Number of neighbours sampled at each layer, input layer first."""
        return self._sampler.fanouts

    @property
    def num_items(self) -> int:
        """Number of seed edges, E; the loader's seeds are in [0, E)."""
        return self.edges.shape[1]

    @property
    def settings(self) -> dict[str, Any]:
        """Options that determine the sampled pairs and neighbours, for the loader's state dict."""
        names = ("negatives", "num_negatives", "strict", "exclude")
        return self._sampler.settings | {name: getattr(self, name) for name in names}

    @property
    def pool(self) -> Pool:
        """Buffer pool for the sampled subgraphs, see `gcnzc.Sampler`."""
        return self._sampler.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._sampler.pool = pool

    def sample(self, seeds: IdsLike, epoch: int) -> Batch:
        """Sample negatives for seed edges and the neighbourhood of all end nodes.

        Args:
            seeds: (S,) indices of seed edges, on the host: a tensor, an array or a list.
            epoch: in [0, 2**32); each epoch has its own negatives and neighbours.

        Returns:
            A minibatch without features. `seeds` are the distinct end nodes of all pairs, in
            ascending order. `pairs` is (2, P) int64 positions in `seeds`: the S edges in the given
            order, then the negatives, grouped by edge. `y` is (P,) float32, 1 for edges and 0 for
            negatives.

        Raises:
            TypeError: seeds or epoch have the wrong type.
            ValueError: a seed is not in [0, E), the epoch is out of range, or no valid negative was
                found for an edge with `strict`.
        """
        begin_s = time.perf_counter()
        epoch = check_epoch("epoch", epoch)
        items = _check_items(seeds, self.num_items)
        positives = self.edges[:, items]
        negatives = self._sample_negatives(positives, items, epoch)
        pairs = torch.cat([positives, negatives], dim=1)
        nodes, positions = pairs.unique(return_inverse=True)
        batch = self._sampler.sample_checked(nodes, epoch, self._excluded_edges(positives))
        if batch.blocks[0].graph is not self.graph:
            batch.blocks = tuple(self._restore_graph(block) for block in batch.blocks)
        batch.pairs = positions
        batch.y = torch.zeros(pairs.shape[1])
        batch.y[: len(items)] = 1
        batch.times["sample_s"] = time.perf_counter() - begin_s
        return batch

    def _restore_graph(self, block: Block) -> Block:
        # the block was sampled from the sorted copy
        ids = block.edge_ids
        if ids is not None and self._order is not None:
            ids = self._order[ids]
        return replace(block, graph=self.graph, edge_ids=ids)

    def _sample_negatives(self, positives: Tensor, items: Tensor, epoch: int) -> Tensor:
        indptr, indices = self._known.indptr.numpy(), self._known.indices.numpy()
        count, strict = self.num_negatives, self.strict
        if self.negatives == "in-batch":
            return torch.from_numpy(
                in_batch_negatives(indptr, indices, positives.numpy(), count, strict)
            )
        sources = positives[0].numpy()
        return torch.from_numpy(
            sample_negatives(
                *(indptr, indices, sources, items.numpy(), count),
                *(self.negatives, strict, self.seed, epoch),
            )
        )

    def _excluded_edges(self, positives: Tensor) -> Tensor | None:
        if self.exclude == "none":
            return None
        sources, targets = positives
        if self.exclude == "reverse":
            sources, targets = positives.flatten(), positives.flip(0).flatten()
        indptr, indices = self._sorted.indptr.numpy(), self._sorted.indices.numpy()
        return torch.from_numpy(find_edges(indptr, indices, sources.numpy(), targets.numpy()))


def check_edges(edges: Tensor, num_nodes: int) -> Tensor:
    """Check seed edges; return them as (2, E) int64, contiguous, on the host.

    Raises:
        TypeError: `edges` is not a tensor.
        ValueError: wrong shape or dtype, no edges, or a node id out of range.
    """
    if isinstance(edges, np.ndarray):
        edges = torch.from_numpy(edges.copy())
    check_kind("edges", edges, Tensor, "(2, E) of int32 or int64: row 0 sources, row 1 targets")
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"edges have shape {tuple(edges.shape)} and dtype {edges.dtype}\n\n"
            "hint: (2, E) of int32 or int64: row 0 sources, row 1 targets; transpose OGB's "
            "(E, 2) with .T"
        )
    if edges.shape[1] == 0:
        raise ValueError("no seed edges\n\nhint: is the split empty?")
    edges = edges.cpu().long().contiguous()
    least, greatest = (int(bound) for bound in edges.aminmax())
    if least < 0 or greatest >= num_nodes:
        raise ValueError(
            f"node ids in edges are from {least} to {greatest}, but the graph has {num_nodes} nodes"
        )
    return edges


def _sort_columns(graph: Graph, order: bool) -> tuple[Graph, Tensor | None]:
    """Return the graph with sorted columns and, with `order`, the edges' positions in `graph`."""
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if is_sorted(indptr, indices):
        return graph, None
    sources, positions = sort_columns(indptr, indices, order=order)
    edge_order = None if positions is None else torch.from_numpy(positions)
    return Graph(np.asarray(indptr), sources, check=False), edge_order


def _check_items(seeds: IdsLike, num_items: int) -> Tensor:
    items = as_ids("seeds", seeds, "the seeds of a LinkSampler are indices of its seed edges")
    if items.device.type != "cpu":
        raise ValueError(f"seeds is {describe(seeds)} on {items.device}\n\nhint: seeds.cpu()")
    hint = "indices of seed edges; torch.arange(sampler.num_items) for all of them"
    check_range("seeds", items, num_items, "there are {} seed edges", hint)
    return items
