"""Drop-in replacement of `dgl.dataloading.DataLoader`.

A minibatch is what DGL's loader yields for the same sampler: input nodes, output nodes and blocks,
or input nodes, pair graphs and blocks, which are DGL's own blocks and graphs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.dgl.arguments import check_graph, check_items, check_sampler
from gcnzc.interop.dgl.blocks import Blocks, fill
from gcnzc.interop.dgl.drawing import DglMaker, Maker, NativeEdges, NativeNodes, is_native
from gcnzc.interop.dgl.importing import check_cuda, import_dgl
from gcnzc.interop.drop_in import Carrier, Minibatches
from gcnzc.interop.options import Options, check_tables, torch_options
from gcnzc.interop.ranks import rank_and_world_size
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_device, check_flag, check_seed


class _Dgl:
    """Imports DGL where it is unpickled: `import dgl` alone fails beside a current torch."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return import_dgl, ()


class DataLoader(Minibatches):
    """`dgl.dataloading.DataLoader`, with its arguments and its minibatches.

    The arguments up to `gpu_cache` are DGL's, and so are those of torch's `DataLoader`;
    docs/reference/drop_in_loaders.md lists those that are supported. Unsupported ones raise an
    error that names them. The others are gcnzc's.

    Args:
        graph: a `dgl.DGLGraph` with one type of nodes and one of edges, on the host.
        indices: ids of nodes to iterate over, or of edges, if `graph_sampler` is for edges; all
            different.
        graph_sampler: a DGL sampler of blocks, or `as_edge_prediction_sampler` around one.
        device: where minibatches are handed out; on the host if None. A GPU, for which DGL's build
            must have CUDA, reads the first of `prefetch_node_feats` in place.
        use_ddp: share the items among the ranks of torch's default process group.
        ddp_seed: the seed with `use_ddp`, if `seed` is None.
        use_uva: as `device="cuda"`, if that is None: features are always read in place.
        drawn_by: "gcnzc" lets gcnzc draw for the samplers that it can draw for, in-neighbours
            uniformly without replacement, and DGL for others; "dgl" lets DGL draw for all.
        seed: orders the items and draws; an integer of 64 bits. If None, it is drawn from torch's
            random numbers, or is 0 if `world_size` is above 1.
        rank, world_size: this rank and how many there are; each takes its share. If None, without
            `use_ddp`, this loader gives all items, and warns once if torch.distributed has several
            ranks.
        threads: that make minibatches; `num_workers` if that is above 0, else one per core, but
            four at most; workers of one machine share its cores.
        ahead: minibatches that are begun or ready at most, besides the one that is handed out.
        tables: of features, in the place of the graph's node data of those names.

    Raises:
        TypeError: an argument of another type.
        ValueError: what is not supported, named; or what makes no sense.
        RuntimeError: there is no DGL; or minibatches are to go to a GPU, for which it has no CUDA.
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
        drawn_by: Literal["gcnzc", "dgl"] = "gcnzc",
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
        ahead: int | None = None,
        tables: Mapping[str, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        check_graph(graph)
        check_sampler(graph_sampler, drawn_by)
        use_ddp, use_uva = check_flag("use_ddp", use_ddp), check_flag("use_uva", use_uva)
        ddp_seed = check_seed("ddp_seed", ddp_seed)
        check_tables(tables)
        if kwargs.pop("collate_fn", None) is not None:
            # DGL's loader does not take it either
            raise ValueError(
                "DataLoader does not support collate_fn\n\nhint: change each minibatch in the loop"
            )
        if gpu_cache:
            raise ValueError(
                "DataLoader does not support gpu_cache\n\n"
                "hint: tables={'feat': table} with a table of gcnzc.cached"
            )
        if batch_size is None:
            raise ValueError("DataLoader does not support batch_size=None\n\nhint: batch_size=1")
        num_workers, torchs, left = torch_options(kwargs, "DataLoader")
        if isinstance(torchs.get("sampler"), str):
            raise ValueError(
                f"sampler is {torchs['sampler']!r}\n\n"
                "hint: drawn_by='dgl' lets DGL draw; sampler orders the indices"
            )
        if left:
            raise TypeError(f"DataLoader has no argument {', '.join(sorted(left))}")
        # by the names of the arguments, as Lightning gives them to the loader that it makes anew
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
            torchs=torchs,
        )
        if options.device.type == "cuda":
            check_cuda(options.device)
        self._tables = tables or {}
        self._blocks = Blocks(graph)
        self._is_edges = isinstance(graph_sampler, import_dgl().dataloading.EdgePredictionSampler)
        self._items = check_items(indices, graph, self._is_edges)
        super().__init__(self._blocks.columns.graph, self._items, len(self._items), options)
        self.drawn_by: str = "gcnzc" if drawn_by == "gcnzc" and is_native(graph_sampler) else "dgl"
        self._maker = self._made_maker()
        self._columns: dict[tuple[bool, str], Column] = {}
        self._begin()

    def sample(self, seeds: Tensor, epoch: int) -> Carrier:
        """For `gcnzc.Loader`: a minibatch of the items at the places `seeds`, on the host."""
        result = self._maker.make(self._items[seeds], epoch)
        blocks = result[-1]
        wide = self._wide
        for place, block in enumerate(blocks):
            fill(block, partial(self._gathered, wide if place == 0 else None))
        for part in result[1:-1]:
            if not isinstance(part, Tensor):
                fill(part, partial(self._gathered, None))
        nodes = result[0].long()
        return Carrier(nodes, nodes[:0], (_nothing(nodes),), made=result)

    def _begin(self) -> None:
        asked = self._check_names()
        self._blocks.renew()
        for (of_nodes, name), column in list(self._columns.items()):
            data = self._data(of_nodes)
            given = of_nodes and name in self._tables
            if not given and not (name in data and column.rows is data[name]):
                del self._columns[of_nodes, name]
        # here, since DGL's columns are not to be read by two threads
        for of_nodes, name in asked:
            self._column(of_nodes, name)
        names = _names(_block_sampler(self.graph_sampler).prefetch_node_feats)
        columns = (self._column(True, name) for name in names)
        self._wide = next((column for column in columns if column.is_prefetched), None)
        self._read_first(self._wide)

    def _handed_over(self, batch: Carrier) -> Any:
        if self.device.type != "cpu":
            *parts, blocks = batch.made
            parts = [part.to(self.device) for part in parts]
            batch.made = (*parts, [block.to(self.device) for block in blocks])
        return self._finished(batch)

    def _on_host(self, items: Tensor, epoch: int) -> Any:
        self._check_open()
        batch = self.sample(items, epoch)
        if self._wide is not None:
            batch.x = self._wide.in_place(batch.nodes)
        return self._finished(batch)

    def _finished(self, batch: Carrier) -> Any:
        *parts, blocks = batch.made
        if isinstance(self.indices, Mapping) and not self._is_edges:
            # as DGL, which hands out what it was given
            (name,) = self.indices
            parts[1] = {name: parts[1]}
        wide = self._wide
        if wide is not None:
            assert batch.x is not None, "the loader has its table"
            blocks[0].srcdata[wide.name] = batch.x.view(len(batch.x), *wide.shape)
        return (*parts, blocks)

    def _settings(self) -> dict[str, Any]:
        fanouts = getattr(_block_sampler(self.graph_sampler), "fanouts", ())
        # by edge type they may be dictionaries
        are_plain = all(isinstance(fanout, int) for fanout in fanouts)
        settings: dict[str, Any] = {"fanouts": list(fanouts)} if fanouts and are_plain else {}
        return settings | {"graph_sampler": type(self.graph_sampler).__name__}

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        self._maker = self._made_maker()

    def _made_maker(self) -> Maker:
        make: Callable[..., Maker] = NativeEdges if self._is_edges else NativeNodes
        if self.drawn_by == "dgl":
            make = DglMaker
        return make(self._blocks, self.graph_sampler, self._seed)

    def _gathered(
        self, wide: Column | None, of_nodes: bool, name: str, ids: Tensor
    ) -> Tensor | None:
        # the sources of the outermost block are what `gcnzc.Loader` gathers rows of
        if wide is not None and of_nodes and name == wide.name:
            return None
        return self._column(of_nodes, name).in_place(ids)

    def _column(self, of_nodes: bool, name: str) -> Column:
        found = self._columns.get((of_nodes, name))
        if found is None:
            rows = self._tables.get(name) if of_nodes else None
            if rows is None:
                rows = self._data(of_nodes)[name]
            count = self.graph.num_nodes() if of_nodes else self.graph.num_edges()
            found = Column(name, rows, count, self.device, self._locks)
            self._columns[of_nodes, name] = found
        return found

    def _data(self, of_nodes: bool) -> Any:
        return self.graph.ndata if of_nodes else self.graph.edata

    def _check_names(self) -> list[tuple[bool, str]]:
        """Look at the names that are to be fetched, before any thread does.

        Returns:
            Each, behind whether it is of nodes.
        """
        inner = _block_sampler(self.graph_sampler)
        of_nodes = [*self.graph.ndata, *self._tables]
        of_edges = list(self.graph.edata)
        asked: list[tuple[str, Any, list[str]]] = [
            ("prefetch_node_feats", inner.prefetch_node_feats, of_nodes),
            ("prefetch_labels", inner.prefetch_labels, of_nodes),
            ("prefetch_edge_feats", inner.prefetch_edge_feats, of_edges),
        ]
        if self._is_edges:
            asked.append(("prefetch_labels", self.graph_sampler.prefetch_labels, of_edges))
        found = []
        for what, names, there in asked:
            for name in _names(names):
                found.append((there is of_nodes, name))
                if name not in there:
                    kind = "node" if there is of_nodes else "edge"
                    raise ValueError(
                        f"{what} asks for {name!r}, but the graph's {kind} data has "
                        f"{', '.join(map(repr, there)) or 'nothing'}\n\n"
                        f"hint: graph.{kind[0]}data[{name!r}] = ..."
                    )
        return found


def _block_sampler(graph_sampler: Any) -> Any:
    return getattr(graph_sampler, "sampler", graph_sampler)


def _names(asked: Any) -> list[str]:
    """Names of data, which may be given by the one type of nodes or edges that there is."""
    if isinstance(asked, Mapping):
        return [name for names in asked.values() for name in names]
    return list(asked or [])


def _nothing(nodes: Tensor) -> Block:
    # a batch that is sent to a GPU has blocks, and DGL moves its own
    empty = torch.empty(0, dtype=torch.int32)
    return Block(torch.zeros(1, dtype=torch.int64), empty, num_src=0, num_dst=0, nodes=nodes[:0])
