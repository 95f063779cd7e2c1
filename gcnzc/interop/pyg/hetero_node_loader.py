"""Drop-in replacement of PyG's `NeighborLoader` for heterogeneous graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.options import CPU
from gcnzc.interop.pyg.arguments import check_common, make_options
from gcnzc.interop.pyg.hetero_arguments import (
    SamplingArguments,
    check_input_time,
    check_typed_nodes,
    check_typed_tables,
    times_crc32,
)
from gcnzc.interop.pyg.hetero_graph import to_typed_graph
from gcnzc.interop.pyg.hetero_minibatches import HeteroPygLoader, TypedLibraryBatch
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import PygLoader
from gcnzc.interop.pyg.node_loader import NeighborLoader
from gcnzc.interop.pyg.stores import is_store_pair
from gcnzc.system.arguments import check_kind


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

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
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
        tables: Mapping[Any, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        custom_cls = kwargs.pop("custom_cls", None)
        check_common(
            "NeighborLoader",
            transform=transform,
            is_sorted=is_sorted,
            filter_per_worker=filter_per_worker,
            tables=tables,
            transform_sampler_output=transform_sampler_output,
            neighbor_sampler=neighbor_sampler,
            custom_cls=None if is_store_pair(data) else custom_cls,
        )
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.input_nodes, self.input_id, self.input_time = input_nodes, input_id, input_time
        self.is_sorted, self.filter_per_worker = is_sorted, filter_per_worker
        arguments = SamplingArguments(
            replace,
            subgraph_type,
            directed,
            disjoint,
            temporal_strategy,
            time_attr,
            weight_attr,
        )
        source = self._open(data, custom_cls, arguments)
        check_kind("data", source, import_pyg().data.HeteroData, "torch_geometric.data.HeteroData")
        typed = to_typed_graph(source, time_attr, weight_attr, self._time_unit)
        self._node_type, self._nodes, self._ids = check_typed_nodes(
            input_nodes, input_id, typed.graph
        )
        self._times = check_input_time(input_time, typed, self._node_type, len(self._nodes))
        # a tensor keeps its dtype, as in PyG
        self._seed_time = input_time.cpu() if isinstance(input_time, Tensor) else self._times
        HeteroPygLoader.__init__(
            self,
            data,
            typed,
            self._nodes,
            len(self._nodes),
            num_neighbors,
            arguments.sampling(typed, num_neighbors),
            {"input_type": self._node_type, "input_time_crc32": times_crc32(self._times)},
            transform,
            check_typed_tables(tables, typed.graph),
            make_options(
                kwargs,
                "NeighborLoader",
                seed=seed,
                device=device,
                rank=rank,
                world_size=world_size,
                threads=threads,
                ahead=ahead,
            ),
        )

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
