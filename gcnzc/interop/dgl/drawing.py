"""From items to the output of a DGL sampler, by gcnzc's sampler or by DGL's own.

Each gives what `graph_sampler.sample(graph, items)` does, with marks where data is to be put. What
gcnzc draws is keyed by seed, epoch, hop and node, and any number of threads draw at once; what DGL
draws comes from one thread, whose random numbers are set for each minibatch.
"""

import os
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gcnzc.interop.dgl.blocks import Blocks
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.interop.dgl.native_sampler import sampling_thread
from gcnzc.interop.options import generator, sorted_places
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.sample.exclude import ExcludedEdges
from gcnzc.sampling.neighbor import Sampler

Result = tuple[Any, ...]


class Maker(Protocol):
    """What makes minibatches of items."""

    def make(self, items: Tensor, epoch: int) -> Result:
        """What the DGL sampler would return for `items`, ids of nodes or edges, on the host."""


class NativeNodes:
    """Neighbourhoods of nodes, drawn by gcnzc.

    Args:
        blocks: of the graph.
        graph_sampler: a `dgl.dataloading.NeighborSampler` that `is_native`.
        seed: the key of every choice.
    """

    def __init__(self, blocks: Blocks, graph_sampler: Any, seed: int) -> None:
        self._blocks, self._graph_sampler = blocks, graph_sampler
        self._sampler = Sampler(blocks.columns.graph, graph_sampler.fanouts, seed, edge_ids=True)

    def make(self, items: Tensor, epoch: int) -> Result:
        """See `Maker`."""
        batch = self._sampler.sample(items, epoch)
        blocks = self._blocks.of(batch)
        nodes = blocks[0].srcdata[import_dgl().NID]
        return self._graph_sampler.assign_lazy_features((nodes, nodes[: len(items)], blocks))


class NativeEdges:
    """Edges, negatives and the neighbourhoods of their ends, drawn by gcnzc.

    Edges to be excluded are never drawn; DGL takes them out afterwards, and keeps fewer.

    Args:
        blocks: of the graph.
        graph_sampler: a `dgl.dataloading.EdgePredictionSampler` around one that `is_native`, which
            excludes nothing, the edges themselves, or these and their reverses.
        seed: the key of every choice.
    """

    def __init__(self, blocks: Blocks, graph_sampler: Any, seed: int) -> None:
        self._blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        inner = graph_sampler.sampler
        self._sampler = Sampler(blocks.columns.graph, inner.fanouts, seed, edge_ids=True)
        self._places = _inverse(blocks.columns.edge_ids)
        # DGL makes what it needs to find edges at the first time, which threads must not share
        blocks.graph.find_edges(torch.arange(min(1, blocks.graph.num_edges()), dtype=blocks.dtype))

    def make(self, items: Tensor, epoch: int) -> Result:
        """See `Maker`."""
        graph = self._blocks.graph
        items = items.to(self._blocks.dtype)
        src, dst = (ends.long() for ends in graph.find_edges(items))
        negatives = self._negatives(items, src, epoch)
        nodes, places = sorted_places(torch.cat([src, dst, *negatives]))
        of_src, of_dst, *of_negatives = places.tensor_split(_bounds([src, dst, *negatives]))
        pair_graph = self._blocks.pairs(nodes, of_src, of_dst, items)
        batch = self._sampler.sample(nodes, epoch, self._left_out(items, nodes))
        blocks = self._blocks.of(batch)
        inputs = blocks[0].srcdata[import_dgl().NID]
        _, _, blocks = self._graph_sampler.sampler.assign_lazy_features((inputs, None, blocks))
        pairs = [pair_graph]
        if negatives:
            pairs.append(self._blocks.pairs(nodes, of_negatives[0], of_negatives[1], None))
        return self._graph_sampler.assign_lazy_features((inputs, *pairs, blocks))

    def _negatives(self, items: Tensor, src: Tensor, epoch: int) -> list[Tensor]:
        """Their sources and destinations; nothing if none are asked for."""
        drawn = self._graph_sampler.negative_sampler
        graph = self._blocks.graph
        if drawn is None:
            return []
        if type(drawn) is import_dgl().dataloading.negative_sampler.Uniform:
            numbers = generator(self._seed, epoch, items)
            shape = (len(src) * drawn.k,)
            return [
                src.repeat_interleave(drawn.k),
                torch.randint(graph.num_nodes(), shape, generator=numbers),
            ]
        found = sample_with_dgl(lambda: drawn(graph, items), self._seed, epoch, items)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"{type(drawn).__name__} returned a {type(found).__name__}\n\n"
                "hint: a negative sampler returns sources and destinations of a graph without types"
            )
        return [ends.long() for ends in found]

    def _left_out(self, items: Tensor, nodes: Tensor) -> ExcludedEdges | None:
        """The edges to be excluded, in the columns of `nodes`, which ascend."""
        asked = self._graph_sampler
        edges = import_dgl().dataloading.base.find_exclude_eids(
            self._blocks.graph, items, asked.exclude, asked.reverse_eids
        )
        if edges is None:
            return None
        edges = torch.from_numpy(np.unique(edges.numpy()))
        # an id of no edge excludes nothing, as in DGL
        edges = edges[(edges >= 0) & (edges < self._blocks.graph.num_edges())]
        _, dst = self._blocks.graph.find_edges(edges.to(self._blocks.dtype))
        found = np.searchsorted(nodes.numpy(), dst.numpy())
        locals_ = torch.from_numpy(found).clamp(max=len(nodes) - 1)
        if not torch.equal(nodes[locals_], dst.long()):
            raise ValueError(
                "reverse_eids leads to an edge between other nodes than the edge asked for\n\n"
                "hint: reverse_eids[e] is the number of the edge back, from e's destination"
            )
        places = edges if self._places is None else self._places[edges.long()]
        return left_out(self._blocks.columns.graph.indptr.numpy(), nodes, locals_, places)


class DglMaker:
    """Minibatches drawn by a DGL sampler, in the one thread that DGL draws in.

    Args:
        blocks: of the graph.
        graph_sampler: of any kind.
        seed: of which, with epoch and items, DGL's random numbers are made.
    """

    def __init__(self, blocks: Blocks, graph_sampler: Any, seed: int) -> None:
        self._blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        self._labor = _labor_of(graph_sampler)

    def make(self, items: Tensor, epoch: int) -> Result:
        """See `Maker`."""
        items = items.to(self._blocks.dtype)

        def make() -> Result:
            if self._labor is not None:
                # it has random numbers of its own, which go on from minibatch to minibatch
                self._labor.set_seed(_word(self._seed, epoch, items))
            return self._graph_sampler.sample(self._blocks.graph, items)

        return sample_with_dgl(make, self._seed, epoch, items)


def is_native(graph_sampler: Any) -> bool:
    """Whether gcnzc's sampler draws what this DGL sampler does."""
    loading = import_dgl().dataloading
    if type(graph_sampler) is loading.EdgePredictionSampler:
        known = graph_sampler.exclude in (None, "self", "reverse_id")
        return known and is_native(graph_sampler.sampler)
    return (
        type(graph_sampler) in (loading.NeighborSampler, loading.MultiLayerFullNeighborSampler)
        and graph_sampler.edge_dir == "in"
        and graph_sampler.prob is None
        and not graph_sampler.replace
        # by edge type they may be dictionaries
        and all(isinstance(fanout, int) for fanout in graph_sampler.fanouts)
    )


def sample_with_dgl(make: Callable[[], Any], seed: int, epoch: int, items: Tensor) -> Any:
    """What `make` returns, in DGL's thread, with random numbers for these items."""

    def seeded() -> Any:
        import_dgl().seed(_word(seed, epoch, items))
        return make()

    return sampling_thread(os.getpid()).submit(seeded).result()


def left_out(indptr: np.ndarray, nodes: Tensor, locals_: Tensor, places: Tensor) -> ExcludedEdges:
    """Single edges to be left out of columns, as `gcnzc.kernels.sample` takes them.

    Args:
        indptr: (N + 1,) int64 of the graph.
        nodes: (S,) int64 columns.
        locals_: (K,) int64 in [0, S): the column of each edge, by its place in `nodes`.
        places: (K,) int64 places of the edges in the graph, all different.
    """
    # by place in the graph would not do: `nodes` come in any order
    order = np.lexsort((places.numpy(), locals_.numpy()))
    column, place = locals_.numpy()[order], places.numpy()[order]
    first = np.searchsorted(column, np.arange(len(nodes) + 1))
    rank = np.arange(len(column)) - first[column]
    kept_before = place - indptr[nodes.numpy()[column]] - rank
    return ExcludedEdges(first.astype(np.int64), kept_before.astype(np.int64), rank + 1)


def _word(seed: int, epoch: int, items: Tensor) -> int:
    counter = (zlib.crc32(items.contiguous().numpy().data), len(items), 0, epoch)
    # DGL takes 31 bits
    return int(philox4x32_reference(*counter, *split_key(seed))[0]) >> 1


def _labor_of(graph_sampler: Any) -> Any:
    """The sampler that is a LaborSampler whose minibatches are to share nothing, if any is."""
    loading = import_dgl().dataloading
    inner = getattr(graph_sampler, "sampler", graph_sampler)
    alone = isinstance(inner, loading.LaborSampler) and int(inner.cnt[1]) == 1
    return inner if alone else None


def _inverse(edge_ids: Tensor | None) -> Tensor | None:
    if edge_ids is None:
        return None
    places = torch.empty(len(edge_ids), dtype=torch.int64)
    places[edge_ids.long()] = torch.arange(len(edge_ids))
    return places


def _bounds(parts: list[Tensor]) -> list[int]:
    return np.cumsum([len(part) for part in parts])[:-1].tolist()
