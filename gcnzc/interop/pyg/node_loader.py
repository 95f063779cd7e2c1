"""Drop-in replacement of PyG's `NeighborLoader`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.drop_in import Carrier
from gcnzc.interop.options import CPU
from gcnzc.interop.pyg.arguments import (
    check_common,
    check_nodes,
    check_num_neighbors,
    check_supported,
    options_of,
)
from gcnzc.interop.pyg.graph import columns_of
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import DataMinibatches, NeighborCounts


class NeighborLoader(DataMinibatches, import_pyg().loader.NeighborLoader):  # type: ignore[misc]
    """`torch_geometric.loader.NeighborLoader`, with its arguments and its minibatches.

    It is an instance of PyG's class. The arguments up to `directed` are PyG's, and so are
    `input_id` and those of torch's `DataLoader`; docs/reference/drop_in_loaders.md lists those that
    are supported. Unsupported ones raise an error that names them. The others are gcnzc's.

    Args:
        data: a `torch_geometric.data.Data` with `edge_index`.
        num_neighbors: kept at each hop, that of the seeds first; -1 keeps all.
        input_nodes: ids or a mask of the nodes to iterate over; all if None.
        transform: is given every minibatch, and what it returns is handed out.
        is_sorted: trust that `edge_index[1]` ascends.
        seed: orders the nodes and draws the neighbours; an integer of 64 bits. If None, it is drawn
            from torch's random numbers, or is 0 if `world_size` is above 1.
        device: where minibatches are handed out; with a GPU it reads `data.x` in place.
        rank, world_size: this rank and how many there are; each takes its share. If None, this
            loader gives all nodes, and warns once if torch.distributed has several ranks.
        threads: that make minibatches; `num_workers` if that is above 0, else one per core, but
            four at most; workers of one machine share its cores.
        ahead: minibatches that are begun or ready at most, besides the one that is handed out.
        tables: of features, in the place of `data`'s attributes of those names; for tables that
            are page-locked, quantised or cached by the caller.

    Raises:
        TypeError: an argument of another type.
        ValueError: what is not supported, named; or what makes no sense.
        RuntimeError: there is no PyG.
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
        check_supported(
            "NeighborLoader",
            input_time=input_time,
            replace=replace,
            subgraph_type=getattr(subgraph_type, "value", subgraph_type),
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            time_attr=time_attr,
            weight_attr=weight_attr,
            transform_sampler_output=transform_sampler_output,
            neighbor_sampler=neighbor_sampler,
            directed=directed,
            custom_cls=kwargs.pop("custom_cls", None),
        )
        check_common(transform, is_sorted, filter_per_worker, tables)
        self._replaced += ("batch_size", "seed_time")
        columns = columns_of(data, is_sorted)
        self.input_nodes, self.input_id, self.is_sorted = input_nodes, input_id, is_sorted
        self.filter_per_worker = filter_per_worker
        self._nodes, self._ids = check_nodes(input_nodes, input_id, columns.graph.num_nodes)
        super().__init__(
            data,
            columns,
            self._nodes,
            len(self._nodes),
            check_num_neighbors(num_neighbors, "NeighborLoader"),
            transform,
            tables,
            options_of(
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
        return import_pyg().sampler.NodeSamplerInput(self._ids, self._nodes)

    @property
    def node_sampler(self) -> NeighborCounts:
        """Has `num_neighbors`, for code such as `BasicGNN.inference`."""
        return NeighborCounts(self.num_neighbors)

    def sample(self, seeds: Tensor, epoch: int) -> Carrier:
        """For `gcnzc.Loader`: a minibatch of the input nodes at the places `seeds`, on the host."""
        fields: dict[str, Any] = {
            "input_id": seeds if self._ids is None else self._ids[seeds],
            "batch_size": len(seeds),
            "batch": None,
            "seed_time": None,
        }
        return self._carrier(self._nodes[seeds], epoch, fields)
