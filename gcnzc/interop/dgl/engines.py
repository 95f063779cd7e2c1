"""Sampling engines of the DGL loader: gcnzc's sampler, or DGL's own.

Each engine returns the value of `graph_sampler.sample(graph, items)`, with DGL's `LazyFeature`s in
place of data. gcnzc's random choices depend on seed, epoch, hop and node, and several threads
sample at once. DGL samples in one thread, whose random generator is seeded for each minibatch.
"""

import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gcnzc.interop.dgl.blocks import BlockBuilder, invert_edge_ids
from gcnzc.interop.dgl.dgl_sampler import sampling_thread
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.interop.options import generator, unique_with_inverse
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.sampling.neighbor import Sampler

Result = tuple[Any, ...]


class Engine(Protocol):
    """Samples minibatches.

    Attributes:
        blocks: builds the minibatches; replaced in a copy of the engine when an epoch begins.
    """

    blocks: Any

    def sample(self, items: Any, epoch: int) -> Result:
        """Return the DGL sampler's output for `items`, on the host.

        Args:
            items: int64 ids of nodes or edges; a dict by type if the graph has several types.
            epoch: in [0, 2**32).
        """


class NodeEngine:
    """Samples neighbourhoods of nodes with gcnzc's sampler.

    Args:
        blocks: builds the blocks of the graph.
        graph_sampler: a `dgl.dataloading.NeighborSampler` for which `is_native` is true.
        seed: determines all random choices.
    """

    def __init__(self, blocks: BlockBuilder, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler = blocks, graph_sampler
        self._sampler = Sampler(blocks.csc.graph, graph_sampler.fanouts, seed, edge_ids=True)

    def sample(self, items: Tensor, epoch: int) -> Result:
        """See `Engine`."""
        batch = self._sampler.sample(items, epoch)
        blocks = self.blocks.build(batch)
        nodes = blocks[0].srcdata[import_dgl().NID]
        return self._graph_sampler.assign_lazy_features((nodes, nodes[: len(items)], blocks))


class EdgeEngine:
    """Samples negative edges, and the neighbourhoods of all end points, with gcnzc's sampler.

    Excluded edges are never sampled. DGL removes them after sampling, so it returns fewer edges.

    Args:
        blocks: builds the blocks of the graph.
        graph_sampler: a `dgl.dataloading.EdgePredictionSampler` for which `is_native` is true. It
            excludes nothing, the edges of the minibatch, or these and their reverse edges.
        seed: determines all random choices.
    """

    def __init__(self, blocks: BlockBuilder, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        inner = graph_sampler.sampler
        self._sampler = Sampler(blocks.csc.graph, inner.fanouts, seed, edge_ids=True)
        ids = blocks.csc.edge_ids
        self._positions = None if ids is None else invert_edge_ids(ids)
        # the first call creates DGL's index of edges, which is not safe in several threads
        blocks.graph.find_edges(torch.arange(min(1, blocks.graph.num_edges()), dtype=blocks.dtype))

    def sample(self, items: Tensor, epoch: int) -> Result:
        """See `Engine`."""
        graph = self.blocks.graph
        items = items.to(self.blocks.dtype)
        src, dst = (ends.long() for ends in graph.find_edges(items))
        negatives = self._negatives(items, src, epoch)
        nodes, local = unique_with_inverse(torch.cat([src, dst, *negatives]))
        src, dst, *negatives = local.tensor_split(_split_points([src, dst, *negatives]))
        pair_graph = self.blocks.build_pair_graph(nodes, src, dst, items)
        batch = self._sampler.sample(nodes, epoch, self._excluded_edges(items))
        blocks = self.blocks.build(batch)
        inputs = blocks[0].srcdata[import_dgl().NID]
        _, _, blocks = self._graph_sampler.sampler.assign_lazy_features((inputs, None, blocks))
        pairs = [pair_graph]
        if negatives:
            pairs.append(self.blocks.build_pair_graph(nodes, negatives[0], negatives[1], None))
        return self._graph_sampler.assign_lazy_features((inputs, *pairs, blocks))

    def _negatives(self, items: Tensor, src: Tensor, epoch: int) -> list[Tensor]:
        """Return sources and destinations of the negative edges; [] without a negative sampler."""
        sampler = self._graph_sampler.negative_sampler
        graph = self.blocks.graph
        if sampler is None:
            return []
        if type(sampler) is import_dgl().dataloading.negative_sampler.Uniform:
            random = generator(self._seed, epoch, items)
            shape = (len(src) * sampler.k,)
            return [
                src.repeat_interleave(sampler.k),
                torch.randint(graph.num_nodes(), shape, generator=random),
            ]
        found = sample_with_dgl(lambda: sampler(graph, items), self._seed, epoch, items)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"{type(sampler).__name__} returned a {type(found).__name__}, not two tensors"
            )
        return [ends.long() for ends in found]

    def _excluded_edges(self, items: Tensor) -> Tensor | None:
        """Return the positions of the excluded edges."""
        sampler = self._graph_sampler
        if sampler.exclude == "reverse_id":
            self._check_reverse_ids(items)
        edges = import_dgl().dataloading.base.find_exclude_eids(
            self.blocks.graph, items, sampler.exclude, sampler.reverse_eids
        )
        if edges is None:
            return None
        # as in DGL, ids that are not edges exclude nothing
        edges = edges[(edges >= 0) & (edges < self.blocks.graph.num_edges())].long()
        return edges if self._positions is None else self._positions[edges]

    def _check_reverse_ids(self, items: Tensor) -> None:
        graph = self.blocks.graph
        reverse = self._graph_sampler.reverse_eids[items.long()].to(items.dtype)
        # as in DGL, ids that are not edges exclude nothing
        is_edge = (reverse >= 0) & (reverse < graph.num_edges())
        items, reverse = items[is_edge], reverse[is_edge]
        (src, dst), ends = graph.find_edges(items), graph.find_edges(reverse)
        is_reverse = (ends[0] == dst) & (ends[1] == src)
        check_reverse_pairs(is_reverse, items, reverse, "reverse_eids", REVERSE_ID_HINT)


REVERSE_ID_HINT = "reverse_eids[e] is the id of the edge from e's destination to e's source"


def check_reverse_pairs(
    is_reverse: Tensor,
    ids: Tensor,
    reverse: Tensor,
    argument: str,
    hint: str,
    types: tuple[str, str] = ("", ""),
) -> None:
    """Check that edges are the reverses of others.

    Args:
        is_reverse: (P,) whether they are.
        ids: (P,) ids of the others.
        reverse: (P,) ids of the reverse edges.
        argument: the argument that has the reverse edges, for the message.
        hint: for the message.
        types: what follows the ids in the message.

    Raises:
        ValueError: one is not.
    """
    if not bool(is_reverse.all()):
        place = int((~is_reverse).nonzero()[0])
        raise ValueError(
            f"{argument}: edge {int(reverse[place])}{types[1]} is not the reverse of edge "
            f"{int(ids[place])}{types[0]}\n\nhint: {hint}"
        )


class DglEngine:
    """Samples minibatches with a DGL sampler, in the one thread in which DGL samples.

    Args:
        blocks: a `BlockBuilder` or `HeteroBlockBuilder`, which holds the graph.
        graph_sampler: any DGL sampler.
        seed: seeds DGL's random generator, together with the epoch and the items.
    """

    def __init__(self, blocks: Any, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        self._labor = _independent_labor_sampler(graph_sampler)

    def sample(self, items: Any, epoch: int) -> Result:
        """See `Engine`."""
        if isinstance(items, Mapping):
            items = {kind: ids.to(self.blocks.dtype) for kind, ids in items.items()}
            flat = torch.cat([*items.values()])
        else:
            flat = items = items.to(self.blocks.dtype)

        def sample() -> Result:
            if self._labor is not None:
                # it has its own random generator, whose state would depend on earlier minibatches
                self._labor.set_seed(_dgl_seed(self._seed, epoch, flat))
            return self._graph_sampler.sample(self.blocks.graph, items)

        return sample_with_dgl(sample, self._seed, epoch, flat)


def is_native(graph_sampler: Any, is_typed: bool) -> bool:
    """Whether gcnzc's sampler can replace this DGL sampler.

    Args:
        graph_sampler: a DGL sampler.
        is_typed: whether the graph has several types of nodes or edges.
    """
    loading = import_dgl().dataloading
    if type(graph_sampler) is loading.EdgePredictionSampler:
        is_supported = graph_sampler.exclude in (None, "self", "reverse_id", "reverse_types")
        return is_supported and is_native(graph_sampler.sampler, is_typed)
    return (
        type(graph_sampler) in (loading.NeighborSampler, loading.MultiLayerFullNeighborSampler)
        and graph_sampler.edge_dir == "in"
        and (
            is_typed
            or (
                graph_sampler.prob is None
                and not graph_sampler.replace
                # by edge type they may be dictionaries
                and all(isinstance(fanout, int) for fanout in graph_sampler.fanouts)
            )
        )
    )


def sample_with_dgl(sample: Callable[[], Any], seed: int, epoch: int, items: Tensor) -> Any:
    """Call `sample` in DGL's thread, with DGL's generator seeded for these items."""

    def seeded() -> Any:
        import_dgl().seed(_dgl_seed(seed, epoch, items))
        return sample()

    return sampling_thread(os.getpid()).submit(seeded).result()


def _dgl_seed(seed: int, epoch: int, items: Tensor) -> int:
    counter = (zlib.crc32(items.contiguous().numpy().data), len(items), 0, epoch)
    # DGL's seeds have 31 bits
    return int(philox4x32_reference(*counter, *split_key(seed))[0]) >> 1


def _independent_labor_sampler(graph_sampler: Any) -> Any:
    """Return the LaborSampler if its minibatches are sampled independently, else None."""
    loading = import_dgl().dataloading
    inner = getattr(graph_sampler, "sampler", graph_sampler)
    is_independent = isinstance(inner, loading.LaborSampler) and int(inner.cnt[1]) == 1
    return inner if is_independent else None


def _split_points(parts: list[Tensor]) -> list[int]:
    return np.cumsum([len(part) for part in parts])[:-1].tolist()
