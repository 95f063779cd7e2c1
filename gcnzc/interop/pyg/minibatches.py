"""Sampled subgraphs as PyG's `Data`, for the node loader and the link loader.

As in PyG, each node occurs once in a minibatch or in a disjoint subgraph, and the seeds come first.
`PygSampler` samples the neighbours, or `HeteroSampler` with the options that only that has. The
choices of both depend on seed, epoch, hop and node, and in disjoint subgraphs on the subgraph's
seed.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.hetero.times import TimeUnit
from gcnzc.interop.column import Column
from gcnzc.interop.drop_in import DropInLoader, LibraryBatch, as_items
from gcnzc.interop.options import Options
from gcnzc.interop.pyg.arguments import check_common, make_options
from gcnzc.interop.pyg.graph import Attributes, CscEdges, read_attributes
from gcnzc.interop.pyg.hetero_arguments import Sampling, SamplingArguments, times_crc32
from gcnzc.interop.pyg.hetero_graph import TypedGraph
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.one_type import sample_one_type, to_one_type
from gcnzc.interop.pyg.sampler import PygSampler, make_sampler, settings_of
from gcnzc.interop.pyg.stores import StoredAttributes, has_types, is_store_pair, open_stores
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.structure.csc import csc_to_coo
from gcnzc.sampling.batch import Block
from gcnzc.sampling.hetero import HeteroSampler

_pool = Pool()

# the ids of the sampled edges, if `e_id` of a minibatch is an attribute of the data
_SAMPLED_EDGES = "_sampled_edges"


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of a loader.

    Attributes:
        source: has the graph: `data`, or the structure of a pair of stores.
        data: a `Data`, a `HeteroData`, or a pair of stores. Its attributes are read when an epoch
            begins.
        num_neighbors: as given by the user.
        arguments: about sampling.
        transform: function that is applied to each minibatch.
        tables: feature tables, which replace attributes of `data`.
        options: see `Options`.
    """

    source: Any
    data: Any
    num_neighbors: Any
    arguments: SamplingArguments
    transform: Any
    tables: Any
    options: Options


def one_type_of(given: Given, csc: CscEdges) -> TypedGraph | None:
    """Return the graph of a `Data` for `HeteroSampler`; None if `PygSampler` suffices."""
    arguments = given.arguments
    names = arguments.time_attr, arguments.weight_attr
    return None if arguments.is_plain else to_one_type(given.source, csc, *names)


class PygLoader(DropInLoader):
    """The base class of the PyG loaders, which yields sampled subgraphs as PyG's `Data`.

    Attributes of `data` with the name of an attribute that the loader sets itself, such as
    `input_id`, are ignored. As in PyG, `n_id` and `e_id` of `data` are sliced like its other
    attributes, and replace the ids of the sampled nodes and edges.

    The constructors are those of the subclasses, which call `_open`.
    """

    _replaceable = ("data", "transform")
    _own_fields: tuple[str, ...] = (
        "batch",
        "input_id",
        "num_sampled_nodes",
        "num_sampled_edges",
    )
    # the times of the items
    _times: Tensor | None
    is_sorted: bool
    filter_per_worker: bool | None
    # the attributes that a feature store gathers; None if `data` is not a pair of stores
    _stored: StoredAttributes | None = None
    # the classes for `HeteroData`, by the classes of which they are the replacements
    _hetero_classes: ClassVar[dict[type, type]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Select the class by the type of the data, except for the subclasses of users."""
        data = args[0] if args else kwargs.get("data")
        is_hetero = isinstance(data, import_pyg().data.HeteroData)
        is_hetero = is_hetero or (is_store_pair(data) and has_types(data))
        selected = cls._hetero_classes.get(cls, cls) if is_hetero else cls
        return cast(Self, super().__new__(selected, *args, **kwargs))

    def _init_loader(
        self,
        given: Given,
        csc: CscEdges,
        items: Tensor,
        num_neighbors: Sequence[int],
        typed: TypedGraph | None,
    ) -> None:
        """Create the loader.

        Args:
            given: the arguments.
            csc: the edges of the data as CSC.
            items: the (S,) nodes or (2, S) edges to iterate over.
            num_neighbors: number of neighbours sampled at each hop, first that of the seeds.
            typed: the graph that `HeteroSampler` samples from; None for `PygSampler`.
        """
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.data, self.num_neighbors, self.transform = given.data, num_neighbors, given.transform
        self.tables, self._typed = given.tables, typed
        self._sampling: Sampling | None = None
        self._given_settings: Mapping[str, int | str] = {}
        if typed is not None:
            self._sampling = given.arguments.sampling(typed, num_neighbors)
            self._given_settings = {"input_time_crc32": times_crc32(self._times)}
        DropInLoader.__init__(self, csc.graph, items, items.shape[-1], given.options)
        self._csc = csc
        self._sampler = self._make_sampler()
        self._last_attributes: dict[str, Any] | None = None
        self._refresh_attributes()

    def __call__(self, index: Tensor | Sequence[int]) -> Any:
        """Return the minibatch of some items in the current epoch, on the host.

        Args:
            index: (S,) indices of the items, in [0, len(self.dataset)).

        Raises:
            TypeError: an index is not an integer.
            IndexError: an index is out of range.
        """
        return self._sample_on_host(as_items(index, self.num_items, "index"), self.epoch)

    @property
    def input_type(self) -> Any:
        """The type of the nodes, or edges, to iterate over; None for a `Data`."""
        return cast(Any, self).input_data.input_type

    def filter_fn(self, out: Any) -> Any:
        """Return `out` unchanged, since `collate_fn` returns complete minibatches.

        PyG's loaders add the attributes to a sampled subgraph here.
        """
        return out

    @contextmanager
    def enable_multithreading(self, worker_threads: Any = None) -> Iterator[None]:
        """Do nothing: there are no worker processes whose number of threads could be set."""
        yield

    def _open(
        self,
        loader_name: str,
        data: Any,
        num_neighbors: Any,
        arguments: SamplingArguments,
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        *,
        transform: Any,
        tables: Any,
        **unsupported: Any,
    ) -> None:
        """Check the arguments of both loaders, and create the loader.

        Args:
            loader_name: for error messages.
            data, num_neighbors, transform, tables: as given by the user.
            arguments: about sampling.
            kwargs: of the loader; `custom_cls` is removed.
            options: gcnzc's own arguments, as fields of `Options`.
            unsupported: see `check_common`.
        """
        custom_cls = kwargs.pop("custom_cls", None)
        check_common(
            loader_name,
            transform=transform,
            is_sorted=self.is_sorted,
            filter_per_worker=self.filter_per_worker,
            tables=tables,
            **unsupported,
            custom_cls=None if is_store_pair(data) else custom_cls,
        )
        arguments.keep_in(self)
        self.custom_cls = custom_cls
        names = (arguments.time_attr, arguments.weight_attr)
        self._stores = open_stores(data, custom_cls, names)
        source = data if self._stores is None else self._stores.structure
        checked = make_options(kwargs, loader_name, **options)
        self._read(Given(source, data, num_neighbors, arguments, transform, tables, checked))

    @abstractmethod
    def _read(self, given: Given) -> None:
        """Read the graph and the items, and create the loader."""

    @property
    def _time_unit(self) -> TimeUnit | None:
        """The unit of the times of the data, if it is known."""
        return None if self._stores is None else self._stores.time_unit

    @property
    def _sliced(self) -> Any:
        """The data whose attributes are sliced to minibatches, besides those of a feature store."""
        return self.data if self._stores is None else self._stores.structure

    def _make_sampler(self) -> PygSampler | HeteroSampler:
        if self._typed is None or self._sampling is None:
            return PygSampler(self._graph, self.num_neighbors, self._seed)
        sampling = self._sampling
        if sampling.subgraph_type == "bidirectional":
            # `sample_one_type` adds the reverses, with the ids of their edges
            sampling = replace(sampling, subgraph_type="directional")
        return make_sampler(self._typed, sampling, self._seed)

    def _settings(self) -> dict[str, Any]:
        if isinstance(self._sampler, HeteroSampler) and self._sampling is not None:
            return settings_of(self._sampler, self._sampling) | dict(self._given_settings)
        return {"num_neighbors": list(self.num_neighbors)}

    def _sample_on_host(self, items: Tensor, epoch: int) -> Any:
        self._check_open()
        batch = self.sample(items, epoch)
        if "edge_index" not in batch.parts:
            self._copy_to_device(batch)
        prefetched = self._attributes.prefetched
        if prefetched is not None:
            batch.x = prefetched.gather_on_device(batch.nodes)
        return self._finish(batch)

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        self._sampler = self._make_sampler()

    def _refresh_attributes(self) -> None:
        if self._stores is not None:
            self._stored = self._stores.attributes({*(self.tables or ()), *self._own_fields})
        current, last = self._sliced.to_dict(), self._last_attributes
        same = last is not None and current.keys() == last.keys()
        if same and all(current[name] is value for name, value in (last or {}).items()):
            return
        self._last_attributes = None
        self._attributes: Attributes = read_attributes(
            self._sliced,
            self._graph,
            self.tables or {},
            self._own_fields,
            self.device,
            self._locks,
        )
        self._set_prefetched_column(self._attributes.prefetched)
        # after all that may raise an error, which the next epoch then raises again
        self._last_attributes = current

    def _sample_batch(
        self, seeds: Tensor, epoch: int, fields: dict[str, Any], times: Tensor | None = None
    ) -> LibraryBatch:
        """Sample the subgraph of `seeds`, with the attributes that `Loader` does not gather.

        Args:
            seeds: (S,) node ids on the host.
            epoch: in [0, 2**32).
            fields: of the minibatch.
            times: (S,) times of the seeds, for temporal sampling.
        """
        if isinstance(self._sampler, HeteroSampler):
            assert self._sampling is not None, "`_make_sampler` uses it"
            nodes, found = sample_one_type(self._sampler, self._sampling, seeds, times, epoch)
            fields |= found
            self._add_attributes(fields, nodes)
            return LibraryBatch(nodes, nodes[: len(seeds)], (), parts=fields)
        subgraph = self._sampler(seeds, epoch, self.pool)
        assert subgraph.edge_ids is not None, "requested by PygSampler"
        (nodes,), (edge_ids,) = subgraph.nodes, subgraph.edge_ids
        num_hops = self._sampler.num_hops
        num_nodes = [own for (own,) in subgraph.num_nodes]
        num_edges = [own for (own,) in subgraph.num_edges]
        fields |= {
            "num_sampled_nodes": np.diff(num_nodes[: num_hops + 1], prepend=0).tolist(),
            "num_sampled_edges": np.diff(num_edges[: num_hops + 1]).tolist(),
            "e_id": _original_edge_ids(edge_ids, self._csc.order),
        }
        self._add_attributes(fields, nodes)
        # all edges: the destinations are the nodes that were known before the last hop
        block = Block(
            subgraph.indptr[0], subgraph.indices[0], len(nodes), num_nodes[-2], nodes=nodes
        )
        if self.device.type == "cpu":
            # the block has less than half the bytes of `edge_index`, so a GPU gets it, and converts
            # it itself
            fields["edge_index"] = edge_index_of(block)
        return LibraryBatch(nodes, nodes[: len(seeds)], (block,), parts=fields)

    def _add_attributes(self, fields: dict[str, Any], nodes: Tensor) -> None:
        """Add the attributes on the host of the nodes and of the edges `e_id`."""
        edges = fields["e_id"]
        fields |= self._attributes.slice_on_host(nodes, edges)
        if self._stored is not None:
            fields |= self._stored.gather({None: nodes})
        if fields["e_id"] is not edges:
            # attributes on GPUs are sliced later, by the ids of the sampled edges
            fields[_SAMPLED_EDGES] = edges

    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        if self.device.type != "cpu":
            self._copy_to_device(batch)
        return self._finish(batch)

    def _copy_to_device(self, batch: LibraryBatch) -> None:
        """Copy the remaining parts to the device; `gcnzc.Loader` has copied nodes, blocks and x."""
        fields, device = batch.parts, batch.nodes.device
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = value.to(device)
        if "edge_index" not in fields:
            (block,) = batch.blocks
            fields["edge_index"] = edge_index_of(block)

    def _finish(self, batch: LibraryBatch) -> Any:
        found, prefetched = self._attributes, self._attributes.prefetched
        data = copy.copy(found.template)
        if prefetched is not None:
            data[prefetched.name] = _restore_shape(batch.x, prefetched)
        if found.has_num_nodes:
            data.num_nodes = len(batch.nodes)
        fields = {"n_id": batch.nodes, **batch.parts}
        edges = fields.pop(_SAMPLED_EDGES, fields["e_id"])
        fields |= found.slice_on_gpus(batch.nodes, edges)
        for name, value in fields.items():
            data[name] = value
        return data if self.transform is None else self.transform(data)


class NumNeighborsStub:
    """Stands in for a PyG sampler, of which other code reads only `num_neighbors`.

    Args:
        num_neighbors: number of neighbours sampled at each hop, first that of the seeds; or a dict
            of these by edge type; or PyG's `NumNeighbors`.
    """

    def __init__(self, num_neighbors: Any) -> None:
        NumNeighbors = import_pyg().sampler.base.NumNeighbors
        if not isinstance(num_neighbors, NumNeighbors):
            is_typed = isinstance(num_neighbors, Mapping)
            num_neighbors = NumNeighbors(num_neighbors if is_typed else list(num_neighbors))
        self.num_neighbors = num_neighbors


def edge_index_of(block: Block) -> Tensor:
    """Return the edges of a block, (2, E) int64 in the order of the destinations, on its device."""
    shape = (2, block.num_edges)
    if block.device.type == "cpu":
        out = _pool.empty(shape, dtype=torch.int64)
        return csc_to_coo(block.indptr, block.indices, out)
    out = torch.empty(shape, dtype=torch.int64, device=block.device)
    out[0] = block.indices
    out[1] = torch.repeat_interleave(block.indptr.diff(), output_size=block.num_edges)
    return out


def _original_edge_ids(edges: Tensor, order: Column | None) -> Tensor:
    return edges if order is None else order.gather_in_thread(edges)


def _restore_shape(x: Tensor | None, column: Column) -> Tensor:
    assert x is not None, "the loader has no table"
    return x.view(len(x), *column.shape)
