"""Drop-in replacement of PyG's `LinkNeighborLoader`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.stores import NodeStore
from gcnzc.interop.inner_loader import LibraryBatch
from gcnzc.interop.options import CPU, generator
from gcnzc.interop.pyg.arguments import (
    check_common,
    check_edges,
    check_input_id,
    check_num_neighbors,
    make_options,
    strip_type,
)
from gcnzc.interop.pyg.graph import to_csc
from gcnzc.interop.pyg.hetero_arguments import (
    SamplingArguments,
    check_label_time,
    times_crc32,
)
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.link_seeds import LinkSeeds, link_seeds
from gcnzc.interop.pyg.minibatches import NumNeighborsStub, PygLoader
from gcnzc.interop.pyg.negatives import NegativeNodes
from gcnzc.interop.pyg.one_type import NODE, to_one_type
from gcnzc.interop.pyg.stores import is_store_pair
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
        edge_label_time: (E,) times of the edges, integers; required with `time_attr`. Neither a
            neighbourhood nor, if `time_attr` is of nodes, a negative node has later times. If all
            nodes are later, the earliest is the negative one, as in PyG.
        disjoint: sample a separate subgraph for each endpoint. The endpoints of an edge, and of its
            negatives, have the same number in `batch`. Temporal sampling always does.
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
        self.neg_sampling = cast_negative_sampling(neg_sampling, neg_sampling_ratio)
        self.input_id, self.is_sorted, self.edge_label = input_id, is_sorted, edge_label
        self.filter_per_worker = filter_per_worker
        # `data` may have these attributes from a split of its edges
        self._own_fields += ("edge_label_index", "edge_label_time")
        self._own_fields += ("seed_time",) if self._is_triplet else ("edge_label",)
        csc = to_csc(source, is_sorted and self._stores is None)
        self.edge_label_index = edge_label_index
        edges = strip_type("edge_label_index", edge_label_index)
        self._edges = check_edges(csc.edge_index if edges is None else edges, csc.graph.num_nodes)
        self._labels = self._check_labels(edge_label)
        num_items = self._edges.shape[1]
        check_input_id(self.input_id, num_items)
        hops = check_num_neighbors(num_neighbors, "LinkNeighborLoader")
        typed = None if arguments.is_plain else to_one_type(source, csc, time_attr, weight_attr)
        self.edge_label_time = edge_label_time
        self._set_times(edge_label_time, check_label_time(edge_label_time, typed, num_items))
        nodes = NodeStore(csc.graph.num_nodes) if typed is None else typed.graph.nodes(NODE)
        self._candidates = self._negative_nodes([nodes, nodes])
        super().__init__(
            data,
            csc,
            self._edges,
            num_items,
            hops,
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
            typed,
            None if typed is None else arguments.sampling(typed, hops),
            {} if typed is None else {"input_time_crc32": times_crc32(self._times)},
        )

    @property
    def input_data(self) -> Any:
        """The edges to iterate over, as PyG's `EdgeSamplerInput`."""
        src, dst = self._edges
        return import_pyg().sampler.EdgeSamplerInput(
            self.input_id, src, dst, self._labels, self._label_time
        )

    @property
    def link_sampler(self) -> NumNeighborsStub:
        """An object with `num_neighbors`, for code that reads it."""
        return NumNeighborsStub(self.num_neighbors)

    @property
    def _is_triplet(self) -> bool:
        return self.neg_sampling is not None and self.neg_sampling.is_triplet()

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the edges with indices `seeds`, on the host."""
        links = self._sample_links(seeds, epoch, (NODE, NODE))
        label_time = None if self._label_time is None else self._label_time[seeds]
        fields: dict[str, Any] = {
            "input_id": seeds if self.input_id is None else self.input_id[seeds],
            "batch": None,
        }
        if self._is_triplet:
            fields |= {
                "src_index": links.src,
                "dst_pos_index": links.positive,
                "dst_neg_index": links.negative_by_edge,
                "seed_time": label_time,
            }
        else:
            if label_time is not None:
                # negatives have the times of their edges
                label_time = label_time[links.edges[: len(links.src)]]
            fields |= {
                "edge_label_index": torch.stack([links.src, links.dst]),
                "edge_label": self._labels_of(seeds, len(links.src) - len(seeds)),
                "edge_label_time": label_time,
            }
        batch = self._sample_batch(links.nodes[NODE], epoch, fields, links.times)
        if links.disjoint:
            fields["batch"] = links.edges[fields["batch"]]
        return batch

    def _sample_links(self, indices: Tensor, epoch: int, node_types: tuple[str, str]) -> LinkSeeds:
        """Sample the negatives of the edges with some indices, and return the seeds.

        Args:
            indices: (S,) int64 on the host.
            epoch: in [0, 2**32).
            node_types: types of the sources and of the destinations.
        """
        times = None if self._times is None else self._times[indices]
        negatives: list[Tensor | None] = [None, None]
        if self.neg_sampling is not None:
            random = generator(self._seed, epoch, indices)
            # triplets have only negative destinations
            for end, nodes in enumerate(self._candidates):
                if end == 1 or not self._is_triplet:
                    negatives[end] = nodes.sample(
                        len(indices), self.neg_sampling.amount, times, random
                    )
        disjoint = times is not None or (self._sampling is not None and self._sampling.disjoint)
        return link_seeds(self._edges[:, indices], negatives, node_types, times, disjoint)

    def _set_times(self, given: Any, times: Tensor | None) -> None:
        self._times = times
        # a tensor keeps its dtype, as in PyG
        self._label_time = given.cpu() if isinstance(given, Tensor) else times

    def _negative_nodes(self, ends: Sequence[NodeStore]) -> list[NegativeNodes]:
        """Return the nodes from which negative sources and destinations are sampled."""
        sampling = self.neg_sampling
        weights = [None, None] if sampling is None else [sampling.src_weight, sampling.dst_weight]
        if self._is_triplet:
            weights[0] = None
        return [
            NegativeNodes(own.num_nodes, weight, own.time if self._times is not None else None)
            for own, weight in zip(ends, weights, strict=True)
        ]

    def _labels_of(self, indices: Tensor, num_negatives: int) -> Tensor | None:
        """Return the given labels of the edges (default 1), followed by 0 for each negative."""
        if self._labels is None and self.neg_sampling is None:
            return None
        labels = torch.ones(len(indices)) if self._labels is None else self._labels[indices]
        if num_negatives:
            labels = torch.cat([labels, labels.new_zeros((num_negatives, *labels.shape[1:]))])
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
