"""Drop-in replacement of PyG's `LinkNeighborLoader` for heterogeneous graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.options import CPU
from gcnzc.interop.pyg.arguments import (
    check_common,
    check_input_id,
    make_options,
)
from gcnzc.interop.pyg.hetero_arguments import (
    SamplingArguments,
    check_label_time,
    check_typed_edges,
    check_typed_tables,
    times_crc32,
)
from gcnzc.interop.pyg.hetero_graph import Key, to_typed_graph
from gcnzc.interop.pyg.hetero_minibatches import HeteroPygLoader, TypedLibraryBatch
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.link_loader import LinkNeighborLoader, cast_negative_sampling
from gcnzc.interop.pyg.link_seeds import LinkSeeds
from gcnzc.interop.pyg.minibatches import PygLoader
from gcnzc.interop.pyg.stores import is_store_pair
from gcnzc.system.arguments import check_kind


class HeteroLinkNeighborLoader(HeteroPygLoader, LinkNeighborLoader):
    """A `LinkNeighborLoader` of a `HeteroData`; `LinkNeighborLoader(data, ...)` returns one.

    Minibatches are `HeteroData` with the fields of PyG's. Subclasses of loaders of `HeteroData`
    are derived from this class. The arguments that are not listed here are those of
    `gcnzc.interop.pyg.HeteroNeighborLoader` and `gcnzc.interop.pyg.LinkNeighborLoader`.

    Args:
        data: a `torch_geometric.data.HeteroData` whose edge types have `edge_index`.
        edge_label_index: an edge type, whose edges are iterated over; or a pair of an edge type and
            (2, E) edges, or None. The edge type of given edges need not be in `data`.
        edge_label_time: (E,) times of the edges: integers, or dates with `as_stores` of a graph
            with a time unit; required with `time_attr`. Neither a neighbourhood nor a negative node
            has later times, if `time_attr` is of nodes. If all nodes are later, the earliest is the
            negative one, as in PyG.
        disjoint: sample a separate subgraph for each endpoint. The endpoints of an edge, and of its
            negatives, have the same number in `batch`. Temporal sampling always does.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: PyG is not installed; raised on import.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
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
            "LinkNeighborLoader",
            transform=transform,
            is_sorted=is_sorted,
            filter_per_worker=filter_per_worker,
            tables=tables,
            transform_sampler_output=transform_sampler_output,
            neighbor_sampler=neighbor_sampler,
            custom_cls=None if is_store_pair(data) else custom_cls,
        )
        self.neg_sampling = cast_negative_sampling(neg_sampling, neg_sampling_ratio)
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.edge_label_index, self.edge_label = edge_label_index, edge_label
        self.edge_label_time, self.input_id = edge_label_time, input_id
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
        self._edge_type, self._edges = check_typed_edges(edge_label_index, source, typed.graph)
        num_items = self._edges.shape[1]
        self._labels = self._check_labels(edge_label)
        check_input_id(input_id, num_items)
        self._set_times(edge_label_time, check_label_time(edge_label_time, typed, num_items))
        ends = [typed.graph.nodes(node_type) for node_type in self._edge_type[::2]]
        self._candidates = self._negative_nodes(ends)
        HeteroPygLoader.__init__(
            self,
            data,
            typed,
            self._edges,
            num_items,
            num_neighbors,
            arguments.sampling(typed, num_neighbors),
            {
                "input_type": "__".join(self._edge_type),
                "input_time_crc32": times_crc32(self._times),
            },
            transform,
            check_typed_tables(tables, typed.graph),
            make_options(
                kwargs,
                "LinkNeighborLoader",
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
        """The edges to iterate over, as PyG's `EdgeSamplerInput`."""
        src, dst = self._edges
        return import_pyg().sampler.EdgeSamplerInput(
            self.input_id, src, dst, self._labels, self._label_time, self._edge_type
        )

    def sample(self, seeds: Tensor, epoch: int) -> TypedLibraryBatch:
        """Sample the minibatch of the edges with indices `seeds`, on the host."""
        edge_type = self._edge_type
        links = self._sample_links(seeds, epoch, (edge_type[0], edge_type[2]))
        batch, parts = self._sample_typed(links.nodes, links.times, epoch)
        for kind, numbers in (batch.subgraphs or {}).items():
            parts.values[kind, "batch"] = links.edges[numbers]
        input_id = seeds if self.input_id is None else self.input_id[seeds]
        parts.values[edge_type, "input_id"] = input_id
        label_time = None if self._label_time is None else self._label_time[seeds]
        if self._is_triplet:
            parts.values |= self._typed_triplets(links, label_time)
        else:
            parts.values |= {
                (edge_type, "edge_label_index"): torch.stack([links.src, links.dst]),
                (edge_type, "edge_label"): self._labels_of(seeds, len(links.src) - len(seeds)),
                # negatives have the times of their edges
                (edge_type, "edge_label_time"): (
                    None if label_time is None else label_time[links.edges[: len(links.src)]]
                ),
            }
        first = edge_type[0]
        return TypedLibraryBatch(batch.nodes[first], links.nodes[first], (), parts=parts)

    def _typed_triplets(self, links: LinkSeeds, times: Tensor | None) -> dict[Key, Any]:
        first, _, last = edge_type = self._edge_type
        return {
            (first, "src_index"): links.src,
            (last, "dst_pos_index"): links.positive,
            (last, "dst_neg_index"): links.negative_by_edge,
            (first, "seed_time"): times,
            (last, "seed_time"): times,
            # attributes of the data, from a split of its edges
            (edge_type, "edge_label_index"): None,
            (edge_type, "edge_label_time"): None,
        }


PygLoader._hetero_classes[LinkNeighborLoader] = HeteroLinkNeighborLoader
