"""Drop-in replacement of `dgl.dataloading.DataLoader`.

Minibatches have the form of DGL's for the same sampler: input nodes, output nodes and blocks,
or input nodes, pair graphs and blocks. Blocks and graphs are DGL's classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gcnzc._moved import renamed_arguments, renamed_attribute
from gcnzc.features.table import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.dgl.arguments import check_graph, check_items, check_sampler
from gcnzc.interop.dgl.blocks import BlockBuilder, fill_lazy_features
from gcnzc.interop.dgl.engines import DglEngine, EdgeEngine, Engine, NodeEngine, is_native
from gcnzc.interop.dgl.importing import check_cuda, import_dgl
from gcnzc.interop.drop_in import DropInLoader, LibraryBatch
from gcnzc.interop.options import Options, check_tables, split_options
from gcnzc.interop.ranks import rank_and_world_size
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_device, check_flag, check_seed


class _Dgl:
    """Imports DGL when it is unpickled, since `import dgl` alone fails with a current torch."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return import_dgl, ()


class DataLoader(DropInLoader):
    """Drop-in replacement of `dgl.dataloading.DataLoader`.

    It takes the same arguments and yields the same minibatches. The arguments up to `gpu_cache` are
    DGL's, `kwargs` are those of torch's `DataLoader`, and the others are gcnzc's.
    docs/reference/drop_in_loaders.md lists the supported ones; an unsupported one raises an error
    with its name.

    Args:
        graph: a `dgl.DGLGraph` with one node type and one edge type, on the host.
        indices: ids of the nodes to iterate over, or of the edges, if `graph_sampler` is an edge
            prediction sampler; without duplicates.
        graph_sampler: a DGL sampler of blocks, or `as_edge_prediction_sampler` around one.
        device: device of the minibatches. Default: the host. A GPU reads the first of
            `prefetch_node_feats` in place in host memory; it needs a build of DGL with CUDA.
        use_ddp: share the items among the ranks of torch's default process group.
        ddp_seed: the random seed with `use_ddp`, if `seed` is None.
        use_uva: the default of `device` is "cuda"; features are read in place with or without it.
        sampler_library: "gcnzc" samples with gcnzc's sampler if it can replace `graph_sampler`
            (uniform in-neighbours without replacement), else with DGL; "dgl" always samples with
            DGL.
        seed: random seed of the shuffling and the sampling; a 64-bit integer. Default: drawn from
            torch's random generator, or 0 if `world_size` is above 1.
        rank, world_size: ranks share the items. By default, without `use_ddp`, all items are
            yielded, with one warning if torch.distributed has several ranks.
        threads: number of threads that prepare minibatches. Default: `num_workers` if above 0, else
            one per core up to four; ranks on one machine share its cores.
        ahead: maximum number of prefetched minibatches.
        tables: feature tables by name, which replace node data of the graph.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: DGL is not installed.
        RuntimeError: DGL does not support the GPU of `device`.
    """

    _library = _Dgl()
    # old name, until 0.3
    drawn_by = renamed_attribute("drawn_by", "sampler_library")

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
        tables: Mapping[str, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        check_graph(graph)
        check_sampler(graph_sampler, sampler_library)
        use_ddp, use_uva = check_flag("use_ddp", use_ddp), check_flag("use_uva", use_uva)
        ddp_seed = check_seed("ddp_seed", ddp_seed)
        check_tables(tables)
        if kwargs.pop("collate_fn", None) is not None:
            # DGL's loader does not support it either
            raise ValueError(
                "DataLoader does not support collate_fn\n\n"
                "hint: transform each minibatch in the training loop"
            )
        if gpu_cache:
            raise ValueError(
                "DataLoader does not support gpu_cache\n\n"
                "hint: tables={'feat': table} with a table of gcnzc.cached"
            )
        if batch_size is None:
            raise ValueError("DataLoader does not support batch_size=None\n\nhint: batch_size=1")
        num_workers, dataloader_options, rest = split_options(kwargs, "DataLoader")
        if isinstance(dataloader_options.get("sampler"), str):
            raise ValueError(
                f"sampler is {dataloader_options['sampler']!r}\n\n"
                "hint: sampler_library='dgl' samples neighbours with DGL; sampler orders the "
                "indices"
            )
        if rest:
            raise TypeError(f"DataLoader has no argument {', '.join(sorted(rest))}")
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.graph, self.indices, self.graph_sampler = graph, indices, graph_sampler
        self.shuffle, self.use_uva, self.tables = shuffle, use_uva, tables
        self.use_ddp, self.ddp_seed = use_ddp, ddp_seed
        if use_ddp and world_size is None:
            rank, world_size = rank_and_world_size()
        options = Options(
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=ddp_seed if seed is None and use_ddp else seed,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            threads=threads,
            ahead=ahead,
            device=check_device(
                "device", ("cuda" if use_uva else "cpu") if device is None else device
            ),
            dataloader_options=dataloader_options,
        )
        if options.device.type == "cuda":
            check_cuda(options.device)
        self._tables = tables or {}
        self._blocks = BlockBuilder(graph)
        self._is_edges = isinstance(graph_sampler, import_dgl().dataloading.EdgePredictionSampler)
        self._items = check_items(indices, graph, self._is_edges)
        super().__init__(self._blocks.csc.graph, self._items, len(self._items), options)
        self.sampler_library: str = (
            "gcnzc" if sampler_library == "gcnzc" and is_native(graph_sampler) else "dgl"
        )
        self._engine = self._create_engine()
        self._columns: dict[tuple[bool, str], Column] = {}
        self._refresh_attributes()

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the items with indices `seeds`, on the host."""
        result = self._engine.sample(self._items[seeds], epoch)
        blocks = result[-1]
        prefetched = self._prefetched
        for layer, block in enumerate(blocks):
            # the loader gathers the prefetched column for the input nodes, in the first block
            exclude = prefetched if layer == 0 else None
            fill_lazy_features(block, partial(self._gather_lazy, exclude))
        for nodes_or_graph in result[1:-1]:
            if not isinstance(nodes_or_graph, Tensor):
                fill_lazy_features(nodes_or_graph, partial(self._gather_lazy, None))
        nodes = result[0].long()
        return LibraryBatch(nodes, nodes[:0], (_empty_block(nodes),), parts=result)

    def _refresh_attributes(self) -> None:
        names = self._prefetch_names()
        self._blocks.refresh_data()
        for (is_nodes, name), column in list(self._columns.items()):
            data = self._data(is_nodes)
            has_table = is_nodes and name in self._tables
            if not has_table and not (name in data and column.rows is data[name]):
                del self._columns[is_nodes, name]
        # created before the threads start, since DGL's data cannot be read by several threads
        for is_nodes, name in names:
            self._column(is_nodes, name)
        node_names = _names(_block_sampler(self.graph_sampler).prefetch_node_feats)
        columns = (self._column(True, name) for name in node_names)
        self._prefetched = next((column for column in columns if column.is_prefetched), None)
        self._set_prefetched_column(self._prefetched)

    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        if self.device.type != "cpu":
            *parts, blocks = batch.parts
            parts = [part.to(self.device) for part in parts]
            batch.parts = (*parts, [block.to(self.device) for block in blocks])
        return self._finish(batch)

    def _sample_on_host(self, items: Tensor, epoch: int) -> Any:
        self._check_open()
        batch = self.sample(items, epoch)
        if self._prefetched is not None:
            batch.x = self._prefetched.gather_on_device(batch.nodes)
        return self._finish(batch)

    def _finish(self, batch: LibraryBatch) -> Any:
        *parts, blocks = batch.parts
        if isinstance(self.indices, Mapping) and not self._is_edges:
            # as in DGL, output nodes are a dictionary if the indices were given as one
            (name,) = self.indices
            parts[1] = {name: parts[1]}
        prefetched = self._prefetched
        if prefetched is not None:
            assert batch.x is not None, "the loader has its table"
            blocks[0].srcdata[prefetched.name] = batch.x.view(len(batch.x), *prefetched.shape)
        return (*parts, blocks)

    def _settings(self) -> dict[str, Any]:
        fanouts = getattr(_block_sampler(self.graph_sampler), "fanouts", ())
        # fanouts may be dictionaries by edge type
        are_plain = all(isinstance(fanout, int) for fanout in fanouts)
        settings: dict[str, Any] = {"fanouts": list(fanouts)} if fanouts and are_plain else {}
        return settings | {"graph_sampler": type(self.graph_sampler).__name__}

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        self._engine = self._create_engine()

    def _create_engine(self) -> Engine:
        engine: Callable[..., Engine] = EdgeEngine if self._is_edges else NodeEngine
        if self.sampler_library == "dgl":
            engine = DglEngine
        return engine(self._blocks, self.graph_sampler, self._seed)

    def _gather_lazy(
        self, exclude: Column | None, is_nodes: bool, name: str, ids: Tensor
    ) -> Tensor | None:
        if exclude is not None and is_nodes and name == exclude.name:
            return None
        return self._column(is_nodes, name).gather_on_device(ids)

    def _column(self, is_nodes: bool, name: str) -> Column:
        found = self._columns.get((is_nodes, name))
        if found is None:
            rows = self._tables.get(name) if is_nodes else None
            if rows is None:
                rows = self._data(is_nodes)[name]
            count = self.graph.num_nodes() if is_nodes else self.graph.num_edges()
            found = Column(name, rows, count, self.device, self._locks)
            self._columns[is_nodes, name] = found
        return found

    def _data(self, is_nodes: bool) -> Any:
        return self.graph.ndata if is_nodes else self.graph.edata

    def _prefetch_names(self) -> list[tuple[bool, str]]:
        """Return the names of the data that the sampler prefetches, and check that they exist.

        Returns:
            For each name whether it is of nodes, and the name.
        """
        inner = _block_sampler(self.graph_sampler)
        node_names = [*self.graph.ndata, *self._tables]
        edge_names = list(self.graph.edata)
        arguments: list[tuple[str, Any, list[str]]] = [
            ("prefetch_node_feats", inner.prefetch_node_feats, node_names),
            ("prefetch_labels", inner.prefetch_labels, node_names),
            ("prefetch_edge_feats", inner.prefetch_edge_feats, edge_names),
        ]
        if self._is_edges:
            arguments.append(("prefetch_labels", self.graph_sampler.prefetch_labels, edge_names))
        found = []
        for argument, names, existing in arguments:
            for name in _names(names):
                found.append((existing is node_names, name))
                if name not in existing:
                    kind = "node" if existing is node_names else "edge"
                    raise ValueError(
                        f"{argument} has {name!r}, but the graph's {kind} data has "
                        f"{', '.join(map(repr, existing)) or 'nothing'}\n\n"
                        f"hint: graph.{kind[0]}data[{name!r}] = ..."
                    )
        return found


DataLoader.__init__ = renamed_arguments(  # type: ignore[method-assign]
    {"drawn_by": "sampler_library"}
)(DataLoader.__init__)


def _block_sampler(graph_sampler: Any) -> Any:
    return getattr(graph_sampler, "sampler", graph_sampler)


def _names(argument: Any) -> list[str]:
    """Return the names of data in a sampler's argument, a list or a dictionary by type."""
    if isinstance(argument, Mapping):
        return [name for names in argument.values() for name in names]
    return list(argument or [])


def _empty_block(nodes: Tensor) -> Block:
    # `gcnzc.Loader` needs a block to copy a batch to a GPU; the DGL blocks are copied by DGL
    empty = torch.empty(0, dtype=torch.int32)
    return Block(torch.zeros(1, dtype=torch.int64), empty, num_src=0, num_dst=0, nodes=nodes[:0])
