"""Sampling engines of the DGL loader: gcnzc's sampler, or DGL's own.

Each engine returns the value of `graph_sampler.sample(graph, items)`, with DGL's `LazyFeature`s in
place of data. gcnzc's random choices depend on seed, epoch, hop and node, and several threads
sample at once. DGL samples in one thread, whose random generator is seeded for each minibatch.
"""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.stores import EdgeType
from gcnzc.interop.dgl.arguments import fanouts_by_type, find_edge_type, reverse_edges
from gcnzc.interop.dgl.blocks import BlockBuilder, Ends, convert_ids, with_weights
from gcnzc.interop.dgl.dgl_sampler import sampling_thread
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.interop.engine import make_sampler
from gcnzc.interop.options import generator, unique_with_inverse
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.sampling.neighbor import Sampler

Result = tuple[Any, ...]
EdgeItems: TypeAlias = Mapping[EdgeType, Tensor]


class Engine(Protocol):
    """Samples minibatches.

    Attributes:
        blocks: builds the minibatches; replaced in a copy of the engine when an epoch begins.
    """

    blocks: BlockBuilder

    def sample(self, items: Any, epoch: int) -> Result:
        """Return the DGL sampler's output for `items`, on the host.

        Args:
            items: int64 ids of nodes by node type, or of edges by edge type.
            epoch: in [0, 2**32).
        """


def _make_sampler(blocks: BlockBuilder, neighbor_sampler: Any, seed: int) -> Sampler:
    csc, weights = blocks.csc, neighbor_sampler.prob
    # DGL's fanouts begin with the input layer
    by_type = fanouts_by_type(blocks.graph, neighbor_sampler.fanouts)
    return make_sampler(
        csc if weights is None else with_weights(blocks.graph, csc, weights),
        {each: own[::-1] for each, own in by_type.items()},
        seed=seed,
        replace=neighbor_sampler.replace,
        weighted=weights is not None,
        once=False,
    )


class NodeEngine:
    """Samples neighbourhoods of nodes with gcnzc's sampler.

    Args:
        blocks: builds the blocks of the graph.
        graph_sampler: a `dgl.dataloading.NeighborSampler` for which `is_native` is true.
        seed: determines all random choices.
    """

    def __init__(self, blocks: BlockBuilder, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler = blocks, graph_sampler
        self._sampler = _make_sampler(blocks, graph_sampler, seed)

    def sample(self, items: Mapping[str, Tensor], epoch: int) -> Result:
        """See `Engine`."""
        batch = self._sampler.sample(items, epoch)
        blocks = self.blocks.build(batch)
        outputs = {each: convert_ids(ids, self.blocks.dtype) for each, ids in items.items()}
        # a tensor if the graph has one node type, as in DGL
        inputs = blocks[0].srcdata[import_dgl().NID]
        return self._graph_sampler.assign_lazy_features((inputs, outputs, blocks))


class EdgeEngine:
    """Samples negative edges, and the neighbourhoods of all end points, with gcnzc's sampler.

    Excluded edges are never sampled. DGL removes them after sampling, so it returns fewer edges.

    Args:
        blocks: builds the blocks of the graph.
        graph_sampler: a `dgl.dataloading.EdgePredictionSampler` for which `is_native` is true.
        seed: determines all random choices.
    """

    def __init__(self, blocks: BlockBuilder, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        self._sampler = _make_sampler(blocks, graph_sampler.sampler, seed)
        self._reverse_edges = reverse_edges(blocks.graph, graph_sampler)

    def sample(self, items: EdgeItems, epoch: int) -> Result:
        """See `Engine`."""
        ends = {each: self._ends_of(each, ids) for each, ids in items.items()}
        given = [ends]
        if self._graph_sampler.negative_sampler is not None:
            given.append(self._negatives(items, ends, epoch))
        nodes, local = _compact(self.blocks.graph.ntypes, given)
        excluded = {
            each: self.blocks.csc.positions(each, ids)
            for each, ids in self._excluded_edges(items, ends).items()
        }
        batch = self._sampler.sample(nodes, epoch, exclude=excluded)
        blocks = self.blocks.build(batch)
        inputs = blocks[0].srcdata[import_dgl().NID]
        _, _, blocks = self._graph_sampler.sampler.assign_lazy_features((inputs, None, blocks))
        graphs = [
            self.blocks.build_pair_graph(nodes, own, edges)
            for own, edges in zip(local, (items, None), strict=False)
        ]
        return self._graph_sampler.assign_lazy_features((inputs, *graphs, blocks))

    def _ends_of(self, edge_type: EdgeType, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sources and destinations, int64, of edges given by DGL's ids."""
        edges = self.blocks.csc.graph.edges(edge_type)
        positions = self.blocks.csc.positions(edge_type, ids)
        dst = np.searchsorted(edges.indptr.numpy(), positions.numpy(), side="right") - 1
        return edges.indices[positions].long(), torch.from_numpy(dst)

    def _negatives(
        self, items: EdgeItems, ends: Ends, epoch: int
    ) -> dict[EdgeType, tuple[Tensor, Tensor]]:
        """Return sources and destinations of the negative edges by edge type."""
        sampler, graph = self._graph_sampler.negative_sampler, self.blocks.graph
        flat = torch.cat([*items.values()])
        if type(sampler) is import_dgl().dataloading.negative_sampler.Uniform:
            random = generator(self._seed, epoch, flat)
            return {
                each: (
                    src.repeat_interleave(sampler.k),
                    torch.randint(
                        graph.num_nodes(each[2]), (len(src) * sampler.k,), generator=random
                    ),
                )
                for each, (src, _) in ends.items()
            }
        given = self.blocks.to_dgl(items)
        found = sample_with_dgl(lambda: sampler(graph, given), self._seed, epoch, flat)
        return _check_negatives(type(sampler).__name__, found, graph)

    def _excluded_edges(self, items: EdgeItems, ends: Ends) -> dict[EdgeType, Tensor]:
        """Return DGL's ids of the excluded edges by edge type."""
        exclude = self._graph_sampler.exclude
        if exclude is None:
            return {}
        excluded = {each: [ids] for each, ids in items.items()}
        for each, ids in items.items():
            if each not in self._reverse_edges:
                continue
            other, reverse_ids = self._reverse_edges[each]
            reverse = ids if reverse_ids is None else reverse_ids[ids].long()
            # as in DGL, ids that are not edges exclude nothing
            is_edge = (reverse >= 0) & (reverse < self.blocks.graph.num_edges(other))
            reverse = reverse[is_edge]
            src, dst = self._ends_of(other, reverse)
            is_reverse = (src == ends[each][1][is_edge]) & (dst == ends[each][0][is_edge])
            if not bool(is_reverse.all()):
                place = int((~is_reverse).nonzero()[0])
                raise ValueError(
                    f"exclude={exclude!r}: edge {int(reverse[place])} of type {other} is not the "
                    f"reverse of edge {int(ids[is_edge][place])} of type {each}"
                )
            excluded.setdefault(other, []).append(reverse)
        return {each: torch.cat(parts) for each, parts in excluded.items()}


def _check_negatives(name: str, found: Any, graph: Any) -> dict[EdgeType, tuple[Tensor, Tensor]]:
    """Return the pairs of a negative sampler by edge type.

    Raises:
        ValueError: they are not sources and destinations by edge type, or not nodes.
    """
    if not isinstance(found, Mapping) and len(graph.canonical_etypes) == 1:
        found = {graph.canonical_etypes[0]: found}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} returned a {type(found).__name__}")
    negatives = {}
    for key, ends in found.items():
        each = find_edge_type(f"the result of {name}", graph, key)
        if not isinstance(ends, tuple) or len(ends) != 2 or len(ends[0]) != len(ends[1]):
            raise ValueError(f"{name} returned {type(ends).__name__} for {each}")
        negatives[each] = (ends[0].long(), ends[1].long())
        for ids, kind in zip(negatives[each], (each[0], each[2]), strict=True):
            count = graph.num_nodes(kind)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise ValueError(
                    f"{name} returned nodes from {int(ids.min())} to {int(ids.max())} for {each}, "
                    f"but {kind!r} has {count} nodes"
                )
    return negatives


def _compact(
    ntypes: Sequence[str], given: Sequence[Ends]
) -> tuple[dict[str, Tensor], list[dict[EdgeType, tuple[Tensor, Tensor]]]]:
    """Number the nodes of edges from 0.

    Args:
        ntypes: all node types.
        given: sources and destinations by edge type.

    Returns:
        The ids of the different nodes of each type, ascending, and the edges with indices of these
        in place of ids.
    """
    parts: dict[str, list[Tensor]] = {kind: [torch.empty(0, dtype=torch.int64)] for kind in ntypes}
    for edges in given:
        for each, ends in edges.items():
            for kind, ids in zip((each[0], each[2]), ends, strict=True):
                parts[kind].append(ids)
    nodes, local = {}, {}
    for kind, own in parts.items():
        nodes[kind], inverse = unique_with_inverse(torch.cat(own))
        local[kind] = iter(inverse.split([len(part) for part in own])[1:])
    return nodes, [
        {each: (next(local[each[0]]), next(local[each[2]])) for each in edges} for edges in given
    ]


class DglEngine:
    """Samples minibatches with a DGL sampler, in the one thread in which DGL samples.

    Args:
        blocks: holds the graph.
        graph_sampler: any DGL sampler.
        seed: seeds DGL's random generator, together with the epoch and the items.
    """

    def __init__(self, blocks: BlockBuilder, graph_sampler: Any, seed: int) -> None:
        self.blocks, self._graph_sampler, self._seed = blocks, graph_sampler, seed
        self._labor = _independent_labor_sampler(graph_sampler)

    def sample(self, items: Mapping[Any, Tensor], epoch: int) -> Result:
        """See `Engine`."""
        given, flat = self.blocks.to_dgl(items), torch.cat([*items.values()]).to(self.blocks.dtype)

        def sample() -> Result:
            if self._labor is not None:
                # it has its own random generator, whose state would depend on earlier minibatches
                self._labor.set_seed(_dgl_seed(self._seed, epoch, flat))
            return self._graph_sampler.sample(self.blocks.graph, given)

        first, outputs, *others = sample_with_dgl(sample, self._seed, epoch, flat)
        if isinstance(outputs, Tensor):
            outputs = dict(zip(items, [outputs], strict=True))
        return first, outputs, *others


def is_native(graph_sampler: Any) -> bool:
    """Whether gcnzc's sampler can replace this DGL sampler."""
    loading = import_dgl().dataloading
    if type(graph_sampler) is loading.EdgePredictionSampler:
        is_supported = graph_sampler.exclude in (None, "self", "reverse_id", "reverse_types")
        return is_supported and is_native(graph_sampler.sampler)
    is_neighbor = type(graph_sampler) in (
        loading.NeighborSampler,
        loading.MultiLayerFullNeighborSampler,
    )
    return is_neighbor and graph_sampler.edge_dir == "in"


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
