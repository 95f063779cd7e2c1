"""Drop-in replacement of PyG's `NeighborLoader`, for graphs with and without types."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.drop_in import LibraryBatch
from gcnzc.interop.options import CPU
from gcnzc.interop.pyg.arguments import check_nodes, check_num_neighbors
from gcnzc.interop.pyg.graph import to_csc
from gcnzc.interop.pyg.hetero_arguments import (
    SamplingArguments,
    check_times,
    check_typed_nodes,
)
from gcnzc.interop.pyg.hetero_graph import TypedGraph
from gcnzc.interop.pyg.hetero_minibatches import HeteroPygLoader, TypedLibraryBatch
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import Given, NumNeighborsStub, PygLoader, one_type_of
from gcnzc.interop.pyg.one_type import NODE
from gcnzc.system.arguments import check_kind


class NeighborLoader(PygLoader, import_pyg().loader.NeighborLoader):  # type: ignore[misc]
    """Drop-in replacement of `torch_geometric.loader.NeighborLoader`.

    It has the same signature and is an instance of PyG's class. Minibatches have the same fields,
    but the sampled neighbours differ. The positional arguments and `input_id` are PyG's, `kwargs`
    are those of torch's `DataLoader`, and the other keyword arguments are gcnzc's.
    docs/reference/drop_in_loaders.md lists the supported ones; an unsupported one raises an error
    with its name.

    With a `HeteroData`, the constructor returns a `HeteroNeighborLoader`.

    Args:
        data: a `torch_geometric.data.Data` with `edge_index`, or a `HeteroData`.
        num_neighbors: number of neighbours to sample at each hop, beginning with the hop from
            the seed nodes; -1 for all.
        input_nodes: ids or a mask of the nodes to iterate over. Default: all nodes.
        input_time: (S,) times of the input nodes, integers. Default: `time_attr` of the nodes.
        replace: sample with replacement.
        subgraph_type: "directional" has the sampled edges; "bidirectional" also their reverses,
            with the ids and attributes of the edges that they are the reverses of; "induced" all
            edges among the sampled nodes.
        disjoint: sample a separate subgraph for each seed node, whose number is in `batch`.
            Temporal sampling always does.
        temporal_strategy: "uniform" samples from the edges that are not later than the time of
            the seed node, "last" takes the latest of them.
        time_attr: attribute of the nodes, or of the edges, with times, which are integers.
        weight_attr: attribute of the edges with weights, in proportion to which neighbours are
            sampled.
        transform: function that is applied to each minibatch.
        is_sorted: assume that `edge_index[1]` is ascending, without a check.
        directed: False is the same as `subgraph_type="induced"`.
        seed: random seed of the shuffling and the sampling; a 64-bit integer. Default: drawn from
            torch's random generator, or 0 if `world_size` is above 1.
        device: device of the minibatches. For a GPU, the loader page-locks `data.x` until
            `close()`, and the GPU reads it in host memory.
        rank, world_size: the nodes are divided among the ranks. By default all nodes are yielded,
            with one warning if torch.distributed has several ranks.
        threads: number of threads that prepare minibatches. Default: `num_workers` if above 0, else
            one per core up to four; ranks on one machine share its cores.
        ahead: maximum number of prefetched minibatches.
        tables: feature tables by name, which replace attributes of `data`, for tables that the
            caller page-locked, quantized or cached.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: PyG is not installed; raised on import.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: list[int],
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        seed: int | None = None,
        device: torch.device | str = CPU,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
        ahead: int | None = None,
        tables: Mapping[str, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.input_nodes, self.input_id, self.input_time = input_nodes, input_id, input_time
        self.is_sorted, self.filter_per_worker = is_sorted, filter_per_worker
        arguments = SamplingArguments(
            *(replace, subgraph_type, directed, disjoint),
            *(temporal_strategy, time_attr, weight_attr),
        )
        options = {"seed": seed, "device": device, "rank": rank, "world_size": world_size}
        self._open(
            "NeighborLoader",
            data,
            num_neighbors,
            arguments,
            kwargs,
            {**options, "threads": threads, "ahead": ahead},
            transform=transform,
            tables=tables,
            transform_sampler_output=transform_sampler_output,
            neighbor_sampler=neighbor_sampler,
        )

    def _read(self, given: Given) -> None:
        self._own_fields += ("batch_size", "seed_time")
        csc = to_csc(given.source, self.is_sorted and self._stores is None)
        self._nodes, self._ids = check_nodes(self.input_nodes, self.input_id, csc.graph.num_nodes)
        hops = check_num_neighbors(given.num_neighbors, "NeighborLoader")
        typed = one_type_of(given, csc)
        self._set_times(typed, NODE)
        self._init_loader(given, csc, self._nodes, hops, typed)

    def _set_times(self, typed: TypedGraph | None, node_type: str) -> None:
        given = self.input_time
        self._times = check_times("input_time", given, typed, len(self._nodes), node_type)
        # a tensor keeps its dtype, as in PyG
        self._seed_time = given.cpu() if isinstance(given, Tensor) else self._times

    @property
    def input_data(self) -> Any:
        """The nodes to iterate over, as PyG's `NodeSamplerInput`."""
        return import_pyg().sampler.NodeSamplerInput(self._ids, self._nodes, self._seed_time)

    @property
    def node_sampler(self) -> NumNeighborsStub:
        """An object with `num_neighbors`, for code such as `BasicGNN.inference`."""
        return NumNeighborsStub(self.num_neighbors)

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the input nodes with indices `seeds`, on the host."""
        fields: dict[str, Any] = {
            "input_id": seeds if self._ids is None else self._ids[seeds],
            "batch_size": len(seeds),
            "batch": None,
            "seed_time": None if self._seed_time is None else self._seed_time[seeds],
        }
        times = None if self._times is None else self._times[seeds]
        return self._sample_batch(self._nodes[seeds], epoch, fields, times)


class HeteroNeighborLoader(HeteroPygLoader, NeighborLoader):
    """A `NeighborLoader` of a `HeteroData`; `NeighborLoader(data, ...)` returns one.

    Minibatches are `HeteroData` with the fields of PyG's. Subclasses of loaders of `HeteroData`
    are derived from this class. The arguments that are not listed here are those of
    `gcnzc.interop.pyg.NeighborLoader`.

    Args:
        data: a `torch_geometric.data.HeteroData` whose edge types have `edge_index`.
        num_neighbors: number of neighbours to sample at each hop, beginning with the hop from
            the seed nodes, -1 for all: a list for all edge types, a dict of lists by edge type, or
            PyG's `NumNeighbors`.
        input_nodes: a node type, whose nodes are iterated over; or a pair of a node type and ids, a
            mask, or None.
        input_time: (S,) times of the input nodes: integers, or dates with `as_stores` of a graph
            with a time unit. Default: `time_attr` of the nodes.
        replace: sample with replacement.
        subgraph_type: "directional", "bidirectional" or "induced".
        disjoint: sample a separate subgraph for each seed node, whose number is in `batch`.
            Temporal sampling always does.
        temporal_strategy: "uniform" samples from the edges that are not later than the time of
            the seed node, "last" takes the latest of them.
        time_attr: attribute of node types, or of edge types, with times, which are integers. Types
            without it are always visible.
        weight_attr: attribute of edge types with weights, in proportion to which neighbours are
            sampled. Neighbours of other edge types are sampled uniformly.
        directed: False is the same as `subgraph_type="induced"`.
        device: device of the minibatches. For a GPU, the loader page-locks the attributes `x` until
            `close()`, and the GPU reads them in host memory. Other attributes are copied.
        tables: feature tables by pairs of type and name, such as `("paper", "x")`, which replace
            attributes of `data`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: PyG is not installed; raised on import.
    """

    def _read(self, given: Given) -> None:
        kind = import_pyg().data.HeteroData
        check_kind("data", given.source, kind, "torch_geometric.data.HeteroData")
        typed = self._typed_graph(given.source, given.arguments)
        self._node_type, self._nodes, self._ids = check_typed_nodes(
            self.input_nodes, self.input_id, typed.graph
        )
        self._set_times(typed, self._node_type)
        self._init_typed_loader(given, typed, self._nodes, {"input_type": self._node_type})

    @property
    def input_data(self) -> Any:
        """The nodes to iterate over, as PyG's `NodeSamplerInput`."""
        return import_pyg().sampler.NodeSamplerInput(
            self._ids, self._nodes, self._seed_time, self._node_type
        )

    def sample(self, seeds: Tensor, epoch: int) -> TypedLibraryBatch:
        """Sample the minibatch of the input nodes with indices `seeds`, on the host."""
        nodes, node_type = self._nodes[seeds], self._node_type
        times = None if self._times is None else self._times[seeds]
        batch, parts = self._sample_typed({node_type: nodes}, times, epoch)
        parts.values |= {
            (node_type, "input_id"): seeds if self._ids is None else self._ids[seeds],
            (node_type, "seed_time"): None if self._seed_time is None else self._seed_time[seeds],
            (node_type, "batch_size"): len(seeds),
        }
        return TypedLibraryBatch(batch.nodes[node_type], nodes, (), parts=parts)


PygLoader._hetero_classes[NeighborLoader] = HeteroNeighborLoader
