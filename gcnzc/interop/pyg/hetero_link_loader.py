"""Drop-in replacement of PyG's `LinkNeighborLoader` for heterogeneous graphs."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.drop_in import LibraryBatch
from gcnzc.interop.options import CPU, generator, unique_with_inverse
from gcnzc.interop.pyg.arguments import (
    check_common,
    check_input_id,
    check_supported,
    make_options,
)
from gcnzc.interop.pyg.hetero_arguments import (
    check_label_time,
    check_sampling,
    check_typed_edges,
    check_typed_tables,
)
from gcnzc.interop.pyg.hetero_graph import Key, to_typed_graph
from gcnzc.interop.pyg.hetero_minibatches import HeteroPygLoader
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.link_loader import LinkNeighborLoader, cast_negative_sampling
from gcnzc.interop.pyg.minibatches import PygLoader
from gcnzc.interop.pyg.negatives import NegativeNodes
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
        edge_label_time: (E,) times of the edges, integers; required with `time_attr`. Neither a
            neighbourhood nor a negative node has later times, if `time_attr` is of nodes. If all
            nodes are later, the earliest is the negative one, as in PyG.
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
        check_supported(
            "LinkNeighborLoader",
            transform_sampler_output=transform_sampler_output,
            neighbor_sampler=neighbor_sampler,
            custom_cls=kwargs.pop("custom_cls", None),
        )
        check_common(transform, is_sorted, filter_per_worker, tables)
        check_kind("data", data, import_pyg().data.HeteroData, "torch_geometric.data.HeteroData")
        self.neg_sampling = cast_negative_sampling(neg_sampling, neg_sampling_ratio)
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.edge_label_index, self.edge_label = edge_label_index, edge_label
        self.edge_label_time, self.input_id = edge_label_time, input_id
        self.replace, self.subgraph_type, self.directed = replace, subgraph_type, directed
        self.disjoint, self.temporal_strategy = disjoint, temporal_strategy
        self.time_attr, self.weight_attr = time_attr, weight_attr
        self.is_sorted, self.filter_per_worker = is_sorted, filter_per_worker
        typed = to_typed_graph(data, time_attr, weight_attr)
        sampling = check_sampling(
            typed,
            num_neighbors,
            replace=replace,
            subgraph_type=subgraph_type,
            directed=directed,
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            weight_attr=weight_attr,
        )
        self._edge_type, self._edges = check_typed_edges(edge_label_index, data, typed.graph)
        num_items = self._edges.shape[1]
        self._labels = self._check_labels(edge_label)
        check_input_id(input_id, num_items)
        self._times = check_label_time(edge_label_time, typed, num_items)
        # a tensor keeps its dtype, as in PyG
        self._label_time = self._times
        if isinstance(edge_label_time, Tensor):
            self._label_time = edge_label_time.cpu()
        self._candidates = [
            NegativeNodes(
                typed.graph.num_nodes(node_type),
                weight,
                typed.graph.nodes(node_type).time if self._times is not None else None,
            )
            for node_type, weight in zip(self._edge_type[::2], self._weights(), strict=True)
        ]
        times = b"" if self._times is None else self._times.numpy().tobytes()
        HeteroPygLoader.__init__(
            self,
            data,
            typed,
            self._edges,
            num_items,
            num_neighbors,
            sampling,
            {"input_type": "__".join(self._edge_type), "input_time_crc32": zlib.crc32(times)},
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

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the edges with indices `seeds`, on the host."""
        num_pairs, edge_type = len(seeds), self._edge_type
        negatives = self._negatives_by_end(seeds, epoch)
        ends = [
            torch.cat([own, *(() if others is None else (others,))])
            for own, others in zip(self._edges[:, seeds], negatives, strict=True)
        ]
        is_one_type = edge_type[0] == edge_type[2]
        by_type = (
            {edge_type[0]: torch.cat(ends)}
            if is_one_type
            else dict(zip(edge_type[::2], ends, strict=True))
        )
        # the number of the edge that each endpoint or negative node belongs to
        edges = [torch.arange(len(own)) % max(num_pairs, 1) for own in ends]
        times = None if self._times is None else self._times[seeds][torch.cat(edges)]
        is_disjoint = self._sampling.disjoint or times is not None
        if is_disjoint:
            nodes = by_type
            local = [torch.arange(len(own)) for own in by_type.values()]
        else:
            unique = {kind: unique_with_inverse(own) for kind, own in by_type.items()}
            nodes = {kind: found for kind, (found, _) in unique.items()}
            local = [inverse for _, inverse in unique.values()]
        batch, parts = self._sample_typed(nodes, times, epoch)
        for kind, numbers in (batch.subgraphs or {}).items():
            parts.values[kind, "batch"] = torch.cat(edges)[numbers]
        src, dst = local[0].split([len(own) for own in ends]) if is_one_type else local
        input_id = seeds if self.input_id is None else self.input_id[seeds]
        parts.values[edge_type, "input_id"] = input_id
        label_time = None if self._label_time is None else self._label_time[seeds]
        if self._is_triplet:
            parts.values |= self._typed_triplets(src, dst, num_pairs, is_disjoint, label_time)
        else:
            given = [own for own in negatives if own is not None]
            parts.values |= {
                (edge_type, "edge_label_index"): torch.stack([src, dst]),
                (edge_type, "edge_label"): self._labels_of(seeds, given),
                # negatives have the times of their edges
                (edge_type, "edge_label_time"): (
                    None if label_time is None else label_time[edges[0]]
                ),
            }
        first = edge_type[0]
        return LibraryBatch(batch.nodes[first], nodes[first], (), parts=parts)

    def _typed_triplets(
        self, src: Tensor, dst: Tensor, num_pairs: int, is_disjoint: bool, times: Tensor | None
    ) -> dict[Key, Any]:
        positive, negative = dst[:num_pairs], dst[num_pairs:]
        # in disjoint subgraphs node i is a negative of edge i % num_pairs, as in PyG
        by_edge = negative.view(-1, num_pairs).t() if is_disjoint else negative.view(num_pairs, -1)
        first, _, last = edge_type = self._edge_type
        return {
            (first, "src_index"): src,
            (last, "dst_pos_index"): positive,
            (last, "dst_neg_index"): by_edge.reshape(num_pairs, -1).squeeze(-1),
            (first, "seed_time"): times,
            (last, "seed_time"): times,
            # attributes of the data, from a split of its edges
            (edge_type, "edge_label_index"): None,
            (edge_type, "edge_label_time"): None,
        }

    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        sampling = self.neg_sampling
        return (None, None) if sampling is None else (sampling.src_weight, sampling.dst_weight)

    def _negatives_by_end(self, indices: Tensor, epoch: int) -> tuple[Tensor | None, Tensor | None]:
        """Sample the negative sources, None for triplets, and the negative destinations."""
        if self.neg_sampling is None:
            return None, None
        random = generator(self._seed, epoch, indices)
        times = None if self._times is None else self._times[indices]
        amount = self.neg_sampling.amount
        src, dst = self._candidates
        sources = None if self._is_triplet else src.sample(len(indices), amount, times, random)
        return sources, dst.sample(len(indices), amount, times, random)


PygLoader._hetero_classes[LinkNeighborLoader] = HeteroLinkNeighborLoader
