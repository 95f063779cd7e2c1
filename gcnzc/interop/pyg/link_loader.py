"""Drop-in replacement of PyG's `LinkNeighborLoader`."""

import math
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
    check_num_neighbors,
    check_supported,
    make_options,
    strip_type,
)
from gcnzc.interop.pyg.graph import to_csc
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import NumNeighborsStub, PygLoader
from gcnzc.system.arguments import check_kind, check_number, describe

# maximum of `neg_sampling_ratio`
MAX_NEGATIVES = 2**31


class LinkNeighborLoader(
    PygLoader,
    import_pyg().loader.LinkNeighborLoader,  # type: ignore[misc]
):
    """Drop-in replacement of `torch_geometric.loader.LinkNeighborLoader`.

    It has the same signature, and minibatches have the same fields, but the sampled neighbours and
    negative edges differ. With a `HeteroData`, the constructor returns a
    `HeteroLinkNeighborLoader`. Negative edges are sampled uniformly, or by the weights of a
    `NegativeSampling`; as in PyG, some may be edges of the graph. Negative edges depend on the
    seed, the epoch and the edges of the minibatch. As in PyG, the edges of the minibatch are not
    removed from the sampled neighbourhoods.

    Args:
        data: a `torch_geometric.data.Data` with `edge_index`, or a `HeteroData`. For the
            arguments that are not listed here see `gcnzc.interop.pyg.NeighborLoader`.
        num_neighbors: number of neighbours sampled at each hop; hop 1 samples neighbours of the
            edges' endpoints; -1 for all.
        edge_label_index: (2, E) the edges to iterate over. Default: the edges of `data`.
        edge_label: (E, ...) labels of these edges.
        neg_sampling: a `torch_geometric.sampler.NegativeSampling`, or a value from which PyG
            constructs one, such as "binary".
        neg_sampling_ratio: number of negative edges for each edge; PyG's older form of
            `NegativeSampling("binary", ratio)`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: PyG is not installed; raised on import.
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
        self.neg_sampling = cast_negative_sampling(neg_sampling, neg_sampling_ratio)
        self.input_id, self.is_sorted, self.edge_label = input_id, is_sorted, edge_label
        self.filter_per_worker = filter_per_worker
        # `data` may have these attributes from a split of its edges
        self._own_fields += ("edge_label_index", "edge_label_time")
        self._own_fields += ("seed_time",) if self._is_triplet else ("edge_label",)
        csc = to_csc(data, is_sorted)
        self.edge_label_index = edge_label_index
        edges = strip_type("edge_label_index", edge_label_index)
        self._edges = check_edges(csc.edge_index if edges is None else edges, csc.graph.num_nodes)
        self._labels = self._check_labels(edge_label)
        check_input_id(self.input_id, self._edges.shape[1])
        super().__init__(
            data,
            csc,
            self._edges,
            self._edges.shape[1],
            check_num_neighbors(num_neighbors, "LinkNeighborLoader"),
            transform,
            tables,
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
        return import_pyg().sampler.EdgeSamplerInput(self.input_id, src, dst, self._labels)

    @property
    def link_sampler(self) -> NumNeighborsStub:
        """An object with `num_neighbors`, for code that reads it."""
        return NumNeighborsStub(self.num_neighbors)

    @property
    def _is_triplet(self) -> bool:
        return self.neg_sampling is not None and self.neg_sampling.is_triplet()

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the edges with indices `seeds`, on the host."""
        src, dst = self._edges[:, seeds]
        negatives = self._sample_negatives(seeds, epoch)
        endpoints = torch.cat([src, *negatives[:-1], dst, *negatives[-1:]])
        nodes, local_ids = unique_with_inverse(endpoints)
        if self._is_triplet:
            fields = self._triplets(local_ids, len(seeds))
        else:
            fields = self._pairs(local_ids)
        fields |= {
            "input_id": seeds if self.input_id is None else self.input_id[seeds],
            "batch": None,
        }
        if not self._is_triplet:
            fields |= {"edge_label": self._labels_of(seeds, negatives), "edge_label_time": None}
        return self._sample_batch(nodes, epoch, fields)

    def _sample_negatives(self, indices: Tensor, epoch: int) -> list[Tensor]:
        """Sample negative edges: sources and destinations, or only destinations for triplets."""
        sampling, random = self.neg_sampling, generator(self._seed, epoch, indices)
        if sampling is None:
            return []
        count = math.ceil(len(indices) * sampling.amount)
        weights = [sampling.dst_weight]
        if not sampling.is_triplet():
            weights.insert(0, sampling.src_weight)
        return [self._sample_nodes(count, weight, random) for weight in weights]

    def _sample_nodes(self, count: int, weight: Tensor | None, random: torch.Generator) -> Tensor:
        num_nodes = self._graph.num_nodes
        if weight is None:
            return torch.randint(num_nodes, (count,), generator=random)
        if len(weight) != num_nodes:
            raise ValueError(
                f"neg_sampling has {len(weight)} weights for {num_nodes} nodes\n\n"
                "hint: one weight for each node"
            )
        return torch.multinomial(weight.cpu(), count, replacement=True, generator=random)

    @staticmethod
    def _pairs(local_ids: Tensor) -> dict[str, Any]:
        return {"edge_label_index": local_ids.view(2, -1)}

    @staticmethod
    def _triplets(local_ids: Tensor, num_pairs: int) -> dict[str, Any]:
        src, positive, negative = local_ids.tensor_split([num_pairs, 2 * num_pairs])
        return {
            "src_index": src,
            "dst_pos_index": positive,
            "dst_neg_index": negative.view(num_pairs, -1).squeeze(-1),
            "seed_time": None,
        }

    def _labels_of(self, indices: Tensor, negatives: list[Tensor]) -> Tensor | None:
        """Return the given labels of the edges (default 1), followed by 0 for each negative."""
        if self._labels is None and not negatives:
            return None
        labels = torch.ones(len(indices)) if self._labels is None else self._labels[indices]
        if negatives:
            zeros = labels.new_zeros((len(negatives[0]), *labels.shape[1:]))
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
                "edge_label was given with neg_sampling='triplet', but triplets have no labels\n\n"
                "hint: neg_sampling='binary', or no edge_label"
            )
        # as in PyG: label 0 is for the negatives, so labels that begin at 0 are shifted by 1
        has_label_zero = len(edge_label) > 0 and int(edge_label.min()) == 0
        is_shifted = self.neg_sampling is not None and has_label_zero
        return edge_label.cpu() + 1 if is_shifted else edge_label.cpu()


def cast_negative_sampling(given: Any, ratio: Any) -> Any:
    """Return PyG's `NegativeSampling` for the arguments `neg_sampling` and `neg_sampling_ratio`."""
    NegativeSampling = import_pyg().sampler.NegativeSampling
    if ratio is not None:
        hint = "negatives for each edge, 0 or more"
        ratio = check_number(
            "neg_sampling_ratio", ratio, lambda ratio: 0 <= ratio < MAX_NEGATIVES, hint
        )
    try:
        return NegativeSampling("binary", ratio) if ratio else NegativeSampling.cast(given)
    # what `cast` raises for values that it cannot convert
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"neg_sampling is {describe(given)}: {error or type(error).__name__}\n\n"
            "hint: 'binary', 'triplet', or a torch_geometric.sampler.NegativeSampling"
        ) from error


def check_edges(edges: Any, num_nodes: int) -> Tensor:
    """Return the edges to iterate over, (2, E) int64 on the host.

    Raises:
        TypeError: `edges` is not a tensor.
        ValueError: it has another shape or dtype, or ids that are not below `num_nodes`.
    """
    hint = "an int64 tensor of shape (2, E), with sources in row 0 and destinations in row 1"
    check_kind("edge_label_index", edges, Tensor, hint)
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"edge_label_index is of {edges.dtype} and shape {tuple(edges.shape)}\n\n"
            "hint: (2, E) and int64, with sources in row 0 and destinations in row 1"
        )
    if edges.shape[1]:
        least, greatest = (int(bound) for bound in edges.aminmax())
        if least < 0 or greatest >= num_nodes:
            raise ValueError(
                f"edge_label_index reaches from {least} to {greatest}, but the data has "
                f"{num_nodes} nodes\n\nhint: nodes are counted from 0"
            )
    return edges.cpu().long()
