"""Drop-in replacement of PyG's `LinkNeighborLoader`.

Letters: P edges and K negatives of a minibatch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.drop_in import Carrier
from gcnzc.interop.options import CPU, generator, sorted_places
from gcnzc.interop.pyg.arguments import (
    check_common,
    check_ids,
    check_num_neighbors,
    check_supported,
    options_of,
    without_type,
)
from gcnzc.interop.pyg.graph import columns_of
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import DataMinibatches, NeighborCounts
from gcnzc.system.arguments import check_kind, check_number, describe

# negatives for each edge
MOST = 2**31


class LinkNeighborLoader(
    DataMinibatches,
    import_pyg().loader.LinkNeighborLoader,  # type: ignore[misc]
):
    """`torch_geometric.loader.LinkNeighborLoader`, with its arguments and its minibatches.

    Negatives are drawn uniformly, or by the weights of a `NegativeSampling`, and as in PyG they may
    be edges. They depend on the seed, the epoch and the edges of the minibatch. The edges asked for
    stay in the neighbourhoods, as in PyG.

    Args:
        data: as of `gcnzc.interop.pyg.NeighborLoader`, as all that is not named here.
        num_neighbors: kept at each hop, that of the edges' ends first; -1 keeps all.
        edge_label_index: (2, E) the edges to iterate over; those of `data` if None.
        edge_label: (E, ...) their labels.
        neg_sampling: a `torch_geometric.sampler.NegativeSampling`, or what that is made of.
        neg_sampling_ratio: negatives for each edge, an older way to say "binary" of it.

    Raises:
        TypeError: an argument of another type.
        ValueError: what is not supported, named; or what makes no sense.
        RuntimeError: there is no PyG.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: list[int],
        edge_label_index: Tensor | None = None,
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
        tables: Mapping[str, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        check_supported(
            "LinkNeighborLoader",
            edge_label_time=edge_label_time,
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
        self.neg_sampling = _negative_sampling(neg_sampling, neg_sampling_ratio)
        self.input_id, self.is_sorted, self.edge_label = input_id, is_sorted, edge_label
        self.filter_per_worker = filter_per_worker
        # the whole graph may have those of a split
        self._replaced += ("edge_label_index", "edge_label_time")
        self._replaced += ("seed_time",) if self._is_triplet else ("edge_label",)
        columns = columns_of(data, is_sorted)
        self.edge_label_index = edge_label_index
        edges = without_type("edge_label_index", edge_label_index)
        self._edges = _check_edges(
            columns.edge_index if edges is None else edges, columns.graph.num_nodes
        )
        self._labels = self._check_labels(edge_label)
        check_ids(self.input_id, self._edges.shape[1])
        super().__init__(
            data,
            columns,
            self._edges,
            self._edges.shape[1],
            check_num_neighbors(num_neighbors, "LinkNeighborLoader"),
            transform,
            tables,
            options_of(
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
        return import_pyg().sampler.EdgeSamplerInput(self.input_id, src, dst, self._labels)

    @property
    def link_sampler(self) -> NeighborCounts:
        """Has `num_neighbors`."""
        return NeighborCounts(self.num_neighbors)

    @property
    def _is_triplet(self) -> bool:
        return self.neg_sampling is not None and self.neg_sampling.is_triplet()

    def sample(self, seeds: Tensor, epoch: int) -> Carrier:
        """For `gcnzc.Loader`: a minibatch of the edges at the places `seeds`, on the host."""
        src, dst = self._edges[:, seeds]
        others = self._negatives(seeds, epoch)
        ends = torch.cat([src, *others[:-1], dst, *others[-1:]])
        nodes, places = sorted_places(ends)
        fields = self._triplets(places, len(seeds)) if self._is_triplet else self._pairs(places)
        fields |= {
            "input_id": seeds if self.input_id is None else self.input_id[seeds],
            "batch": None,
        }
        if not self._is_triplet:
            fields |= {"edge_label": self._labels_of(seeds, others), "edge_label_time": None}
        return self._carrier(nodes, epoch, fields)

    def _negatives(self, places: Tensor, epoch: int) -> list[Tensor]:
        """The ends of K negatives: sources and destinations, or destinations alone of triplets."""
        drawn, numbers = self.neg_sampling, generator(self._seed, epoch, places)
        if drawn is None:
            return []
        count = math.ceil(len(places) * drawn.amount)
        weights = [drawn.dst_weight] if drawn.is_triplet() else [drawn.src_weight, drawn.dst_weight]
        return [self._nodes(count, weight, numbers) for weight in weights]

    def _nodes(self, count: int, weight: Tensor | None, numbers: torch.Generator) -> Tensor:
        num_nodes = self._graph.num_nodes
        if weight is None:
            return torch.randint(num_nodes, (count,), generator=numbers)
        if len(weight) != num_nodes:
            raise ValueError(
                f"{len(weight)} weights in neg_sampling for {num_nodes} nodes\n\nhint: one for each"
            )
        return torch.multinomial(weight.cpu(), count, replacement=True, generator=numbers)

    @staticmethod
    def _pairs(places: Tensor) -> dict[str, Any]:
        return {"edge_label_index": places.view(2, -1)}

    @staticmethod
    def _triplets(places: Tensor, num_pairs: int) -> dict[str, Any]:
        src, positive, negative = places.tensor_split([num_pairs, 2 * num_pairs])
        return {
            "src_index": src,
            "dst_pos_index": positive,
            "dst_neg_index": negative.view(num_pairs, -1).squeeze(-1),
            "seed_time": None,
        }

    def _labels_of(self, places: Tensor, others: list[Tensor]) -> Tensor | None:
        """Of the edges as given, and 0 of the negatives."""
        if self._labels is None and not others:
            return None
        labels = torch.ones(len(places)) if self._labels is None else self._labels[places]
        if others:
            zeros = labels.new_zeros((len(others[0]), *labels.shape[1:]))
            labels = torch.cat([labels, zeros])
        return labels

    def _check_labels(self, edge_label: Tensor | None) -> Tensor | None:
        if edge_label is None:
            return None
        check_kind("edge_label", edge_label, Tensor, "a tensor with a label for each edge")
        if edge_label.ndim == 0 or len(edge_label) != self._edges.shape[1]:
            raise ValueError(
                f"edge_label is {describe(edge_label)} for {self._edges.shape[1]} edges\n\n"
                "hint: one label for each edge of edge_label_index"
            )
        if self._is_triplet:
            raise ValueError(
                "edge_label with triplets of neg_sampling, which have no labels\n\n"
                "hint: neg_sampling='binary', or no edge_label"
            )
        # 0 is for the negatives
        taken = self.neg_sampling is not None and len(edge_label) and int(edge_label.min()) == 0
        return edge_label.cpu() + 1 if taken else edge_label.cpu()


def _negative_sampling(given: Any, ratio: Any) -> Any:
    """PyG's `NegativeSampling` of two arguments, of which the second is the older one."""
    kind = import_pyg().sampler.NegativeSampling
    if ratio is not None:
        hint = "negatives for each edge, 0 or more"
        ratio = check_number("neg_sampling_ratio", ratio, lambda ratio: 0 <= ratio < MOST, hint)
    try:
        return kind("binary", ratio) if ratio else kind.cast(given)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"neg_sampling is {describe(given)}: {error or type(error).__name__}\n\n"
            "hint: 'binary', 'triplet', or a torch_geometric.sampler.NegativeSampling"
        ) from error


def _check_edges(edges: Any, num_nodes: int) -> Tensor:
    hint = "a tensor of shape (2, E) and int64, sources above destinations"
    check_kind("edge_label_index", edges, Tensor, hint)
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"edge_label_index is of {edges.dtype} and shape {tuple(edges.shape)}\n\n"
            "hint: (2, E) of int64, sources above destinations"
        )
    if edges.shape[1]:
        least, greatest = (int(bound) for bound in edges.aminmax())
        if least < 0 or greatest >= num_nodes:
            raise ValueError(
                f"edge_label_index reaches from {least} to {greatest}, but the data has "
                f"{num_nodes} nodes\n\nhint: nodes are counted from 0"
            )
    return edges.cpu().long()
