"""Sampled subgraphs as PyG's `HeteroData`, for the node loader and the link loader.

The neighbours are sampled by `gcnzc.sampling.HeteroSampler`. Threads sample, and gather the
attributes on the host. For a GPU, `gcnzc.loader.transfer.Transfer` copies them, and gathers the
features that the GPU reads in place, one attribute of each node type, on side streams. Further
attributes that the GPU reads in place, and those on GPUs, are gathered when the minibatch is
yielded.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.features.table import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.drop_in import NO_GRAPH, DropInLoader, LibraryBatch
from gcnzc.interop.pyg.hetero_arguments import (
    Sampling,
    SamplingArguments,
    check_typed_tables,
    times_crc32,
)
from gcnzc.interop.pyg.hetero_graph import (
    Key,
    TypedAttributes,
    TypedGraph,
    read_typed_attributes,
    to_typed_graph,
)
from gcnzc.interop.pyg.minibatches import Given, PygLoader
from gcnzc.interop.pyg.sampler import make_sampler
from gcnzc.loader.checks import check_loader_device
from gcnzc.sampling.batch import CopyTensors
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler


@dataclass
class TypedParts:
    """The parts of a minibatch by type, before it becomes a `HeteroData`."""

    ids: dict[Any, Tensor | None]  # node ids by node type, edge ids by edge type; on the host
    nodes: Mapping[str, Tensor]  # node ids by node type, on the device of the minibatch
    values: dict[Key, Any]
    prefetched: Mapping[str, tuple[str, Column]]  # see `TypedAttributes.prefetched`


@dataclass
class TypedLibraryBatch(LibraryBatch):
    """A minibatch of several node types, whose `parts` are `TypedParts`."""

    def node_ids(self) -> dict[str, Tensor]:
        """Return the ids of all nodes by node type."""
        return dict(self.parts.nodes)

    def copy_tensors(self, nodes: Mapping[str, Tensor], copy: CopyTensors) -> Self:
        """Return a minibatch with copies of the values on the host that are plain tensors.

        Args:
            nodes: copies of `node_ids`.
            copy: returns copies of tensors of one dtype.
        """
        parts: TypedParts = self.parts
        copies = {id(ids): nodes[kind] for kind, ids in parts.nodes.items()}
        by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
        for value in parts.values.values():
            if _is_plain(value) and id(value) not in copies:
                by_dtype.setdefault(value.dtype, {})[id(value)] = value
        for sources in by_dtype.values():
            copies |= zip(sources, copy([*sources.values()]), strict=True)
        values = {key: copies.get(id(value), value) for key, value in parts.values.items()}
        return replace(self, parts=replace(parts, nodes=nodes, values=values))

    def set_features(self, x: Mapping[str, Tensor]) -> None:
        """Set the features that `Loader` has gathered, by node type."""
        for kind, rows in x.items():
            name, column = self.parts.prefetched[kind]
            self.parts.values[kind, name] = rows.view(len(rows), *column.shape)


class HeteroPygLoader(PygLoader):
    """The base class of the PyG loaders of heterogeneous graphs, which yield `HeteroData`.

    Attributes of `data` with the name of a field that the loader sets itself are replaced, except
    `n_id` and `e_id`, which are sliced, as in PyG.
    """

    _typed: TypedGraph
    _sampling: Sampling
    _sampler: HeteroSampler

    def _init_typed_loader(
        self, given: Given, typed: TypedGraph, items: Tensor, settings: Mapping[str, int | str]
    ) -> None:
        """Create the loader.

        Args:
            given: the arguments.
            typed: the graph of the data.
            items: the (S,) nodes or (2, S) edges to iterate over; a state of others is rejected.
            settings: other settings that a state must have in common, as plain values.
        """
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.data, self.num_neighbors = given.data, given.num_neighbors
        self.transform, self._typed = given.transform, typed
        self._sampling = given.arguments.sampling(typed, given.num_neighbors)
        self.tables = check_typed_tables(given.tables, typed.graph)
        self._given_settings = {**settings, "input_time_crc32": times_crc32(self._times)}
        device = check_loader_device(given.options.device, None, 0.0)
        options = replace(given.options, device=device)
        DropInLoader.__init__(self, NO_GRAPH, items, items.shape[-1], options)
        self._sampler = self._make_sampler()
        self._last_values: dict[Key, Any] | None = None
        self._refresh_attributes()

    def _typed_graph(self, source: Any, arguments: SamplingArguments) -> TypedGraph:
        names = arguments.time_attr, arguments.weight_attr
        return to_typed_graph(source, *names, self._time_unit)

    def __repr__(self) -> str:
        # as PyG's loader, whose name users know
        names = {own: base.__name__ for base, own in self._hetero_classes.items()}
        return f"{names.get(type(self), type(self).__name__)}()"

    def _make_sampler(self) -> HeteroSampler:
        sampler = make_sampler(self._typed, self._sampling, self._seed)
        sampler.pool = self.pool
        return sampler

    def _refresh_attributes(self) -> None:
        if self._stores is not None:
            self._stored = self._stores.attributes(self._typed_tables.keys())
        data = self._sliced
        stores = (*data.node_stores, *data.edge_stores)
        current: dict[Key, Any] = {
            (s._key, name): value for s in stores for name, value in s.items()
        }
        current |= {("", name): value for name, value in data._global_store.items()}
        last = self._last_values
        same = last is not None and current.keys() == last.keys()
        if same and all(current[name] is value for name, value in (last or {}).items()):
            return
        self._last_values = None
        self._found: TypedAttributes = read_typed_attributes(
            data, self._typed.graph, self._typed_tables, self.device, self._locks
        )
        self._set_prefetched_tables(
            {
                kind: table
                for kind, (_, column) in self._found.prefetched.items()
                if (table := column.table) is not None
            }
        )
        # page-locked for a GPU
        self._sampler.pool = self.pool
        # after all that may raise an error, which the next epoch then raises again
        self._last_values = current

    @property
    def _typed_tables(self) -> Mapping[Key, FeatureTable]:
        return self.tables or {}

    def _sample_on_host(self, items: Tensor, epoch: int) -> Any:
        self._check_open()
        return self._assemble(self.sample(items, epoch))

    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        return self._assemble(batch)

    def _sample_typed(
        self,
        seeds: dict[str, Tensor],
        times: Any,
        epoch: int,
    ) -> tuple[HeteroBatch, TypedParts]:
        """Sample the subgraph of `seeds`, with the attributes that are gathered on the host.

        Args:
            seeds: node ids on the host, by node type.
            times: times of the seeds, as for `HeteroSampler.sample`.
            epoch: in [0, 2**32).
        """
        sampler: Any = self._sampler
        batch = sampler.sample(seeds, epoch, times)
        found, edge_ids = self._found, batch.edge_ids or {}
        # bidirectional subgraphs have no edge ids
        ids = batch.nodes | {each: edge_ids.get(each) for each in batch.indices}
        values = found.slice_on_host(ids)
        if self._stored is not None:
            values |= self._stored.gather(ids)
        for node_type, nodes in batch.nodes.items():
            if node_type in found.has_num_nodes:
                values[node_type, "num_nodes"] = len(nodes)
            if (node_type, "n_id") not in found:
                values.setdefault((node_type, "n_id"), nodes)
        for edge_type in batch.indices:
            values[edge_type, "edge_index"] = batch.edge_index(edge_type, self.pool.empty)
            if ids[edge_type] is not None and (edge_type, "e_id") not in found:
                values.setdefault((edge_type, "e_id"), ids[edge_type])
        for node_type, numbers in (batch.subgraphs or {}).items():
            values[node_type, "batch"] = numbers
        if batch.num_edges is not None:
            counts = (*batch.num_nodes.items(),), (*batch.num_edges.items(),)
            hops = self._sampling.num_hops
            for name, by_type, length in (
                ("num_sampled_nodes", counts[0], hops + 1),
                ("num_sampled_edges", counts[1], hops),
            ):
                values |= {(kind, name): list(own)[:length] for kind, own in by_type}
        return batch, TypedParts(ids, batch.nodes, values, found.prefetched)

    def _assemble(self, batch: LibraryBatch) -> Any:
        """Return the `HeteroData` of a sampled minibatch, on the device of its nodes."""
        parts: TypedParts = batch.parts
        found = self._found
        data = copy.copy(found.template)
        values = dict(parts.values)
        device = next(iter(parts.nodes.values())).device
        if device.type != "cpu":
            # what is not on the device already
            values = {
                key: value.to(device) if hasattr(value, "to") else value
                for key, value in values.items()
            }
        keys = found.read_in_place.keys() - values.keys()
        edges = {kind: ids.to(device) for kind, _ in keys if (ids := parts.ids[kind]) is not None}
        values |= found.gather_in_place(edges | {**parts.nodes}, keys)
        values |= found.slice_on_gpus(parts.ids)
        for (kind, name), value in values.items():
            data[kind][name] = value
        return data if self.transform is None else self.transform(data)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor on the host that can be copied element by element."""
    is_tensor = type(value) is Tensor and value.layout == torch.strided
    return is_tensor and value.device.type == "cpu"
