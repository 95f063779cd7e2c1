"""Drop-in replacement of `dgl.dataloading.DataLoader`.

Minibatches have the form of DGL's for the same sampler: input nodes, output nodes and blocks,
or input nodes, pair graphs and blocks. Blocks and graphs are DGL's classes.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.dgl.arguments import (
    check_graph,
    check_items,
    check_kinds,
    check_sampler,
    find_type,
    reverse_edges,
)
from gcnzc.interop.dgl.blocks import BlockBuilder, Kind, fill_lazy_features, is_typed
from gcnzc.interop.dgl.engines import DglEngine, EdgeEngine, Engine, NodeEngine, is_native
from gcnzc.interop.dgl.importing import check_cuda, import_dgl
from gcnzc.interop.drop_in import DropInLoader, LibraryBatch, rank_and_world_size
from gcnzc.interop.options import check_tables, make_options
from gcnzc.system.arguments import check_flag, check_seed


class _Dgl:
    """Imports DGL when it is unpickled, since `import dgl` alone fails with a current torch."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return import_dgl, ()


class _Version:
    """A tensor as it is now: equal until it is replaced, or changed in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.number = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Version)
            and self.tensor is other.tensor
            and self.number == other.number
        )


class DataLoader(DropInLoader):
    """Drop-in replacement of `dgl.dataloading.DataLoader`.

    It takes the same arguments and yields the same minibatches. The arguments up to `gpu_cache` are
    DGL's, `kwargs` are those of torch's `DataLoader`, and the others are gcnzc's.
    docs/reference/drop_in_loaders.md lists the supported ones; an unsupported one raises an error
    with its name.

    Args:
        graph: a `dgl.DGLGraph` on the host, with any number of node types and edge types.
        indices: ids of the nodes to iterate over, or of the edges, if `graph_sampler` is an edge
            prediction sampler; without duplicates. With several types, a dict of ids by type:
            minibatches are of the ids of all types together, so that one has several types.
        graph_sampler: a DGL sampler of blocks, or `as_edge_prediction_sampler` around one.
        device: device of the minibatches. Default: the host. A GPU reads the first of
            `prefetch_node_feats` in place in host memory; it needs a build of DGL with CUDA.
        use_ddp: share the items among the ranks of torch's default process group.
        ddp_seed: the random seed with `use_ddp`, if `seed` is None.
        use_uva: the default of `device` is "cuda"; features are read in place with or without it.
        sampler_library: "gcnzc" samples with gcnzc's sampler if it can replace `graph_sampler`
            (uniform in-neighbours without replacement; with several types also with replacement and
            by weight), else with DGL; "dgl" always samples with DGL.
        seed: random seed of the shuffling and the sampling; a 64-bit integer. Default: drawn from
            torch's random generator, or 0 if `world_size` is above 1.
        rank, world_size: ranks share the items. By default, without `use_ddp`, all items are
            yielded, with one warning if torch.distributed has several ranks.
        threads: number of threads that prepare minibatches. Default: `num_workers` if above 0, else
            one per core up to four; ranks on one machine share its cores.
        ahead: maximum number of prefetched minibatches.
        tables: feature tables by name, which replace node data of the graph. With several types, by
            type and name, such as `("paper", "feat")`, also of edge types.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: DGL is not installed.
        RuntimeError: DGL does not support the GPU of `device`.
    """

    _library = _Dgl()

    def __init__(
        self,
        graph: Any,
        indices: Any,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        use_prefetch_thread: bool | None = None,
        use_alternate_streams: bool | None = None,
        pin_prefetcher: bool | None = None,
        use_uva: bool = False,
        gpu_cache: Any = None,
        *,
        sampler_library: Literal["gcnzc", "dgl"] = "gcnzc",
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
        ahead: int | None = None,
        tables: Mapping[Any, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        check_graph(graph)
        check_sampler(graph_sampler, sampler_library)
        use_ddp, use_uva = check_flag("use_ddp", use_ddp), check_flag("use_uva", use_uva)
        ddp_seed = check_seed("ddp_seed", ddp_seed)
        check_tables(tables)
        # DGL's loader does not support `collate_fn` either
        for name, value in (("collate_fn", kwargs.get("collate_fn")), ("gpu_cache", gpu_cache)):
            if value:
                raise ValueError(f"DataLoader does not support {name}")
        if isinstance(kwargs.get("sampler"), str):
            raise ValueError(f"sampler is {kwargs['sampler']!r}, not an order of indices")
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.graph, self.indices, self.graph_sampler = graph, indices, graph_sampler
        self.shuffle, self.use_uva, self.tables = shuffle, use_uva, tables
        self.use_ddp, self.ddp_seed = use_ddp, ddp_seed
        if use_ddp and world_size is None:
            rank, world_size = rank_and_world_size()
        kwargs |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle}
        options = make_options(
            "DataLoader",
            kwargs,
            seed=ddp_seed if seed is None and use_ddp else seed,
            rank=rank,
            world_size=world_size,
            threads=threads,
            ahead=ahead,
            device=("cuda" if use_uva else "cpu") if device is None else device,
        )
        if options.device.type == "cuda":
            check_cuda(options.device)
        self._tables = _tables_by_type(graph, tables)
        self._is_edges = isinstance(graph_sampler, import_dgl().dataloading.EdgePredictionSampler)
        self._items = check_items(indices, graph, self._is_edges)
        is_ours = sampler_library == "gcnzc" and is_native(graph_sampler)
        self.sampler_library: str = "gcnzc" if is_ours else "dgl"
        self._blocks = self._create_builder()
        super().__init__(self._items.ids, len(self._items.ids), options)
        self._weights: dict[Kind, Any] | None = None
        self._engine = self._create_engine(self._blocks)
        self._columns: dict[tuple[Kind, str], Column] = {}
        self._refresh_attributes()

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the items with indices `seeds`, on the host."""
        result = self._engine.sample(self._items.select(seeds), epoch)
        blocks, prefetched = result[-1], self._prefetched
        for layer, block in enumerate(blocks):
            # the loader gathers the prefetched columns for the input nodes, in the first block
            exclude = prefetched if layer == 0 else {}
            fill_lazy_features(block, partial(self._gather_lazy, exclude))
        for pair_graph in result[1:-1] if self._is_edges else ():
            fill_lazy_features(pair_graph, partial(self._gather_lazy, {}))
        inputs: dict[str, Tensor] = {}
        if self.device.type != "cpu":
            name = import_dgl().NID
            inputs = {
                kind: blocks[0].srcnodes[kind].data[name].long() for kind in self.graph.ntypes
            }
        return LibraryBatch.of(inputs, {}, prefetched, parts=result)

    def _create_builder(self) -> BlockBuilder:
        """Check that the items fit the graph as it is now, and return its builder of blocks."""
        check_graph(self.graph)
        check_items(self._items.by_type, self.graph, self._is_edges)
        if self._is_edges:
            reverse_edges(self.graph, self.graph_sampler, self._items.by_type)
        return BlockBuilder(self.graph)

    def _refresh_attributes(self) -> None:
        names = self._prefetch_names()
        # new objects, since epochs in progress use the old ones
        has_other_edges = self._blocks.is_outdated
        blocks = self._create_builder() if has_other_edges else self._blocks.with_current_data()
        if has_other_edges or self._weights != self._current_weights():
            engine = self._create_engine(blocks)
        else:
            engine = copy.copy(self._engine)
            engine.blocks = blocks
        # after all that may raise an error, which the next epoch then raises again
        self._blocks, self._engine = blocks, engine
        self._columns = {} if has_other_edges else dict(self._columns)
        for (kind, name), column in list(self._columns.items()):
            data = self._data(kind)
            has_table = (kind, name) in self._tables
            if not has_table and not (name in data and column.rows is data[name]):
                del self._columns[kind, name]
        # created here and not by the threads, since DGL's data cannot be read by several threads
        for argument_names in names.values():
            for kind, name in argument_names:
                self._column(kind, name)
        self._prefetched: dict[str, tuple[str, Column]] = {}
        for kind, name in names["prefetch_node_feats"]:
            column = self._column(kind, name)
            if column.is_read_in_place and kind not in self._prefetched:
                column.lock()
                self._prefetched[str(kind)] = name, column
        self._set_prefetched(self._prefetched)

    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        *parts, blocks = batch.parts
        if batch.device.type != "cpu":
            parts = [_to_device(part, batch.device) for part in parts]
            blocks = [block.to(batch.device) for block in blocks]
        if not self._is_edges and not isinstance(self.indices, Mapping):
            # as in DGL, output nodes are a dictionary if the indices were given as one
            (parts[1],) = parts[1].values()
        for (kind, name), rows in batch.values.items():
            blocks[0].srcnodes[kind].data[name] = rows
        return (*parts, blocks)

    def _sample_on_host(self, items: Tensor, epoch: int) -> Any:
        if self._blocks.is_outdated:
            with self._refreshing:
                self._refresh_attributes()
        return super()._sample_on_host(items, epoch)

    def _settings(self) -> dict[str, Any]:
        inner = _block_sampler(self.graph_sampler)
        return {
            "graph_sampler": type(self.graph_sampler).__name__,
            "types": [f"{kind}: {len(ids)}" for kind, ids in self._items.by_type.items()],
            # they may be dictionaries by edge type
            "fanouts": [str(fanout) for fanout in getattr(inner, "fanouts", ())],
            "replace": int(getattr(inner, "replace", False)),
            "prob": str(getattr(inner, "prob", None)),
        }

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        # also of the weights, which the engine reads
        self._blocks = self._blocks.with_current_data()
        self._engine = self._create_engine(self._blocks)

    def _current_weights(self) -> dict[Kind, Any]:
        """Return the sampling weights that an engine of gcnzc's reads, by edge type."""
        name = getattr(_block_sampler(self.graph_sampler), "prob", None)
        if self.sampler_library == "dgl" or name is None:
            return {}
        data = {each: self._data(each) for each in self.graph.canonical_etypes}
        return {each: _Version(own[name]) for each, own in data.items() if name in own}

    def _create_engine(self, blocks: BlockBuilder) -> Engine:
        # until the engine is created, no weights count as read
        self._weights, weights = None, self._current_weights()
        engine: Callable[..., Engine] = EdgeEngine if self._is_edges else NodeEngine
        if self.sampler_library == "dgl":
            engine = DglEngine
        created = engine(blocks, self.graph_sampler, self._seed)
        self._weights = weights
        return created

    def _gather_lazy(
        self, exclude: Mapping[Any, tuple[str, Column]], kind: Kind, name: str, ids: Tensor
    ) -> Tensor | None:
        if kind in exclude and name == exclude[kind][0]:
            return None
        return self._column(kind, name).gather_on_device(ids)

    def _column(self, kind: Kind, name: str) -> Column:
        found = self._columns.get((kind, name))
        if found is None:
            rows = self._tables.get((kind, name))
            if rows is None:
                rows = self._data(kind)[name]
            is_nodes = isinstance(kind, str)
            count = self.graph.num_nodes(kind) if is_nodes else self.graph.num_edges(kind)
            found = Column(name, rows, count, self.device, self._locks)
            self._columns[kind, name] = found
        return found

    def _data(self, kind: Kind) -> Any:
        return (self.graph.nodes if isinstance(kind, str) else self.graph.edges)[kind].data

    def _prefetch_names(self) -> dict[str, list[tuple[Kind, str]]]:
        """Return the types and names of the data that each argument of the sampler prefetches.

        Raises:
            ValueError: the graph does not have the data.
        """
        inner, graph = _block_sampler(self.graph_sampler), self.graph
        found = {
            argument: check_kinds(argument, graph, getattr(inner, argument), is_edges)
            for argument, is_edges in (
                ("prefetch_node_feats", False),
                ("prefetch_labels", False),
                ("prefetch_edge_feats", True),
            )
        }
        if self._is_edges:
            names = self.graph_sampler.prefetch_labels
            found["prefetch_labels"] += check_kinds("prefetch_labels", graph, names, True)
        for argument, keys in found.items():
            for kind, name in keys:
                of_tables = [table for own, table in self._tables if own == kind]
                existing = [*self._data(kind), *of_tables]
                if name in existing:
                    continue
                raise ValueError(
                    f"{argument} has {name!r}, but the graph's data of type {kind!r} has "
                    f"{', '.join(map(repr, existing)) or 'nothing'}"
                )
        return found


def NodeDataLoader(
    g: Any,
    nids: Any,
    graph_sampler: Any,
    device: torch.device | str | None = None,
    use_ddp: bool = False,
    ddp_seed: int = 0,
    *,
    load_input: Mapping[str, Tensor] | None = None,
    load_output: Mapping[str, Tensor] | None = None,
    async_load: bool = False,
    **kwargs: Any,
) -> DataLoader:
    """Return a `DataLoader` of nodes, for scripts written for DGL before 2.0.

    Args:
        g, nids: `graph` and `indices` of `DataLoader`.
        graph_sampler, device, use_ddp, ddp_seed, kwargs: as for `DataLoader`.
        load_input, load_output: further node data by name, (N, ...); the graph must have one type
            of nodes.
        async_load: without effect.

    Raises:
        TypeError, ValueError: as for `DataLoader`.
    """
    if load_input or load_output:
        g = g.local_var()
        g.ndata.update({**(load_input or {}), **(load_output or {})})
    return DataLoader(g, nids, graph_sampler, device, use_ddp, ddp_seed, **kwargs)


def EdgeDataLoader(
    g: Any,
    eids: Any,
    graph_sampler: Any,
    device: torch.device | str | None = None,
    use_ddp: bool = False,
    ddp_seed: int = 0,
    *,
    exclude: Any = None,
    reverse_eids: Any = None,
    reverse_etypes: Any = None,
    negative_sampler: Any = None,
    g_sampling: None = None,
    **kwargs: Any,
) -> DataLoader:
    """Return a `DataLoader` of edges, for scripts written for DGL before 2.0.

    Args:
        g, eids: `graph` and `indices` of `DataLoader`.
        graph_sampler: a DGL sampler of blocks, or `as_edge_prediction_sampler` around one.
        device, use_ddp, ddp_seed, kwargs: as for `DataLoader`.
        exclude, reverse_eids, reverse_etypes, negative_sampler: arguments of
            `dgl.dataloading.as_edge_prediction_sampler`, which is called with a sampler of blocks.
        g_sampling: not supported.

    Raises:
        TypeError, ValueError: as for `DataLoader`.
    """
    if g_sampling is not None:
        raise ValueError("EdgeDataLoader does not support g_sampling; use exclude")
    loading = import_dgl().dataloading
    if isinstance(graph_sampler, loading.BlockSampler):
        graph_sampler = loading.as_edge_prediction_sampler(
            graph_sampler, exclude, reverse_eids, reverse_etypes, negative_sampler
        )
    return DataLoader(g, eids, graph_sampler, device, use_ddp, ddp_seed, **kwargs)


def _block_sampler(graph_sampler: Any) -> Any:
    return getattr(graph_sampler, "sampler", graph_sampler)


def _tables_by_type(graph: Any, tables: Any) -> dict[tuple[Kind, str], FeatureTable]:
    """Return tables by type and name; by name if the graph has one type of nodes and of edges."""
    found: dict[tuple[Kind, str], FeatureTable] = {}
    for key, table in (tables or {}).items():
        if not is_typed(graph):
            found[graph.ntypes[0], key] = table
            continue
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[1], str):
            raise ValueError(f"tables has the key {key!r:.200}, not a pair of a type and a name")
        kind, name = key
        found[find_type("tables", graph, kind, kind not in graph.ntypes), name] = table
    return found


def _to_device(part: Any, device: torch.device) -> Any:
    """Copy ids, a dict of ids by type, or a graph to a device."""
    if isinstance(part, Mapping):
        return {kind: ids.to(device) for kind, ids in part.items()}
    return part.to(device)
