"""Sampled neighbourhoods as PyG's `Data`, for node and link loaders.

Neighbours are drawn as PyG does, each node once and by numbers that count from the seeds, but by
gcnzc's sampler, whose choices are keyed by seed, epoch, hop and node.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.drop_in import Carrier, Minibatches
from gcnzc.interop.options import Options
from gcnzc.interop.pyg.graph import Attributes, Columns, attributes_of
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.neighbors import Draw
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample import Sample
from gcnzc.kernels.structure.coo import csc_to_coo
from gcnzc.sampling.batch import Block

_pool = Pool()


class DataMinibatches(Minibatches):
    """What the loaders of nodes and of links share: neighbourhoods as PyG's `Data`.

    Attributes of `data` that minibatches have others of, under the same names, are left out.

    Args:
        data: a `Data` with `edge_index`. Its attributes are looked at when an epoch begins.
        columns: its edges.
        items: what is iterated over.
        num_items: how many there are.
        num_neighbors: kept at each hop, that of the seeds first.
        transform: is given every minibatch, and what it returns is handed out.
        tables: of features, in the place of `data`'s attributes of those names.
        options: how items become minibatches.
    """

    _replaceable = ("data", "transform")
    _replaced: tuple[str, ...] = ("batch", "input_id", "num_sampled_nodes", "num_sampled_edges")

    def __init__(
        self,
        data: Any,
        columns: Columns,
        items: Tensor,
        num_items: int,
        num_neighbors: Sequence[int],
        transform: Callable[[Any], Any] | None,
        tables: Mapping[str, FeatureTable] | None,
        options: Options,
    ) -> None:
        # by the names of the arguments, as Lightning gives them to the loader that it makes anew
        self.data, self.num_neighbors, self.transform = data, num_neighbors, transform
        self.tables = tables
        super().__init__(columns.graph, items, num_items, options)
        self._columns = columns
        self._draw = Draw(columns.graph, num_neighbors, self._seed)
        self._seen: dict[str, Any] | None = None
        self._begin()

    def __call__(self, index: Tensor | Sequence[int]) -> Any:
        """The minibatch of some items, by their places, on the host; of the present epoch.

        Args:
            index: (S,) in [0, len(self.dataset)).
        """
        return self._on_host(torch.as_tensor(index, dtype=torch.int64), self.epoch)

    def filter_fn(self, out: Any) -> Any:
        """`out`, a minibatch that `collate_fn` made whole.

        PyG's loaders join neighbourhoods with attributes here.
        """
        return out

    @contextmanager
    def enable_multithreading(self, worker_threads: Any = None) -> Iterator[None]:
        """Nothing: there are no worker processes, whose threads it is for."""
        yield

    def _settings(self) -> dict[str, Any]:
        return {"num_neighbors": list(self.num_neighbors)}

    def _on_host(self, items: Tensor, epoch: int) -> Any:
        self._check_open()
        batch = self.sample(items, epoch)
        if "edge_index" not in batch.made:
            self._bring(batch)
        wide = self._attributes.wide
        if wide is not None:
            batch.x = wide.in_place(batch.nodes)
        return self._finished(batch)

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        self._draw = Draw(self._graph, self.num_neighbors, seed)

    def _begin(self) -> None:
        now = self.data.to_dict()
        seen = self._seen
        same = seen is not None and now.keys() == seen.keys()
        if same and all(now[name] is value for name, value in (seen or {}).items()):
            return
        self._seen = now
        self._attributes: Attributes = attributes_of(
            self.data, self._graph, self.tables or {}, self._replaced, self.device, self._locks
        )
        self._read_first(self._attributes.wide)

    def _carrier(self, seeds: Tensor, epoch: int, fields: dict[str, Any]) -> Carrier:
        """The neighbourhood of `seeds`, with the attributes that `gcnzc.Loader` does not gather."""
        drawn = self._draw(seeds, epoch, self.pool)
        assert drawn.edge_ids is not None, "it was asked for"
        nodes = list(drawn.num_nodes)[: self._draw.num_hops + 1]
        num_edges = [len(indices) for indices in drawn.indices][: self._draw.num_hops]
        places = [ids.numpy() for ids in drawn.edge_ids]
        fields |= {
            "num_sampled_nodes": [nodes[0], *(after - before for before, after in pairwise(nodes))],
            "num_sampled_edges": num_edges,
            "e_id": _list_places(torch.from_numpy(np.concatenate(places)), self._columns.order),
        }
        fields |= self._attributes.on_host(drawn.nodes, fields["e_id"])
        blocks = _blocks(drawn)
        if self.device.type == "cpu":
            # a GPU makes it of less than half the bytes
            fields["edge_index"] = edge_index_of(blocks)
        return Carrier(drawn.nodes, drawn.nodes[: len(seeds)], blocks, made=fields)

    def _handed_over(self, batch: Carrier) -> Any:
        if "edge_index" not in batch.made:
            self._bring(batch)
        return self._finished(batch)

    def _bring(self, batch: Carrier) -> None:
        """What `gcnzc.Loader` has not put on the GPU already."""
        fields, device = batch.made, batch.nodes.device
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = value.to(device)
        fields["edge_index"] = edge_index_of(batch.blocks)

    def _finished(self, batch: Carrier) -> Any:
        found, wide = self._attributes, self._attributes.wide
        data = copy.copy(found.template)
        if wide is not None:
            data[wide.name] = _shaped(batch.x, wide)
        if found.has_num_nodes:
            data.num_nodes = len(batch.nodes)
        fields = {"n_id": batch.nodes, **batch.made}
        fields |= found.on_gpus(batch.nodes, fields["e_id"])
        for name, value in fields.items():
            data[name] = value
        return data if self.transform is None else self.transform(data)


class NeighborCounts:
    """What code for PyG's loaders reads of their sampler.

    Args:
        num_neighbors: kept at each hop, that of the seeds first.
    """

    def __init__(self, num_neighbors: Sequence[int]) -> None:
        self.num_neighbors = import_pyg().sampler.base.NumNeighbors(list(num_neighbors))


def edge_index_of(blocks: Sequence[Block]) -> Tensor:
    """(2, E) int64 sources and destinations, hop by hop from the seeds, where the blocks lie."""
    num_edges = sum(block.num_edges for block in blocks)
    on_host = blocks[0].device.type == "cpu"
    empty = _pool.empty if on_host else partial(torch.empty, device=blocks[0].device)
    out = empty((2, num_edges), dtype=torch.int64)
    begin = drawn_before = 0
    for block in reversed(blocks):
        part = out[:, begin : begin + block.num_edges]
        # nodes of earlier hops have no edges at this one
        if on_host:
            csc_to_coo(block.indptr, block.indices, part, drawn_before)
        else:
            _edges_on_gpu(block, part, drawn_before)
        begin, drawn_before = begin + block.num_edges, block.num_dst
    return out


def _edges_on_gpu(block: Block, out: Tensor, first: int) -> None:
    out[0] = block.indices
    out[1] = torch.repeat_interleave(
        torch.arange(first, block.num_dst, device=out.device),
        block.indptr[first:].diff(),
        output_size=block.num_edges,
    )


def _blocks(drawn: Sample) -> tuple[Block, ...]:
    return tuple(
        Block(
            drawn.indptr[hop],
            drawn.indices[hop],
            num_src=drawn.num_nodes[hop + 1],
            num_dst=drawn.num_nodes[hop],
            nodes=drawn.nodes[: drawn.num_nodes[hop + 1]],
        )
        for hop in reversed(range(len(drawn.indices)))
    )


def _list_places(edges: Tensor, order: Column | None) -> Tensor:
    return edges if order is None else order.on_host(edges)


def _shaped(x: Tensor | None, column: Column) -> Tensor:
    assert x is not None, "the loader has its table"
    return x.view(len(x), *column.shape)
