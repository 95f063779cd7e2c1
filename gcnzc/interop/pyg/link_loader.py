"""Drop-in replacement of PyG's `LinkNeighborLoader`, for graphs with and without types."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.stores import NodeStore
from gcnzc.interop.drop_in import LibraryBatch
from gcnzc.interop.options import CPU, generator, unique_with_inverse
from gcnzc.interop.pyg.arguments import (
    check_edges,
    check_input_id,
    check_num_neighbors,
    strip_type,
)
from gcnzc.interop.pyg.graph import to_csc
from gcnzc.interop.pyg.hetero_arguments import (
    SamplingArguments,
    check_times,
    check_typed_edges,
)
from gcnzc.interop.pyg.hetero_graph import Key, TypedGraph
from gcnzc.interop.pyg.hetero_minibatches import HeteroPygLoader, TypedLibraryBatch
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.minibatches import Given, NumNeighborsStub, PygLoader, one_type_of
from gcnzc.interop.pyg.one_type import NODE
from gcnzc.system.arguments import check_kind, check_number, describe


class NegativeNodes:
    """The nodes of one type, from which negative nodes are sampled with replacement.

    Args:
        num_nodes: N.
        weight: (N,) weights, at least 0. Default: the same for all nodes.
        times: (N,) int64 times of the nodes; None if they have none.

    Raises:
        ValueError: there is not one weight for each node.
    """

    def __init__(self, num_nodes: int, weight: Tensor | None, times: Tensor | None) -> None:
        if weight is not None and len(weight) != num_nodes:
            raise ValueError(f"neg_sampling has {len(weight)} weights for {num_nodes} nodes")
        self.num_nodes, self.weight = num_nodes, None if weight is None else weight.cpu()
        self._order = self._times = None
        if times is not None:
            self._times, self._order = times.sort(stable=True)
            if self.weight is not None:
                self._totals = self.weight.double()[self._order].cumsum(0)

    def sample(
        self, num_edges: int, amount: float, times: Tensor | None, random: torch.Generator
    ) -> Tensor:
        """Sample `ceil(num_edges * amount)` nodes, (M,) int64; node i is of edge i % num_edges.

        Args:
            num_edges: S.
            amount: negatives for each edge.
            times: (S,) int64 times of the edges. If all nodes are later, the earliest is sampled.
            random: generates the random numbers.
        """
        count = math.ceil(num_edges * amount)
        if times is None or self._times is None or self._order is None:
            if self.weight is None:
                return torch.randint(self.num_nodes, (count,), generator=random)
            return torch.multinomial(self.weight, count, replacement=True, generator=random)
        uniform = torch.rand(count, generator=random, dtype=torch.float64)
        limits = times[torch.arange(count) % max(num_edges, 1)]
        # the nodes that are not later are the first ones by time
        num_eligible = torch.searchsorted(self._times, limits, right=True)
        last = (num_eligible - 1).clamp(min=0)
        if self.weight is None:
            chosen = (uniform * num_eligible).long()
        else:
            chosen = torch.searchsorted(self._totals, uniform * self._totals[last], right=True)
        return self._order[torch.minimum(chosen, last)]


@dataclass(frozen=True)
class LinkSeeds:
    """The seeds of a minibatch of S edges; tensors are int64 on the host.

    Without disjoint subgraphs each node is one seed. In disjoint subgraphs each endpoint is a seed
    of its own.

    Attributes:
        nodes: ids of the seeds, by node type.
        src: positions in the seeds of the sources of the edges, then of the negative ones.
        dst: positions of the destinations.
        edges: for each source and then each destination, the number in [0, S) of its edge, or of
            the edge that it is a negative of. In disjoint subgraphs of each seed.
        times: times of the seeds, for temporal sampling.
        num_edges: S.
        disjoint: whether each endpoint is a seed of its own.
    """

    nodes: dict[str, Tensor]
    src: Tensor
    dst: Tensor
    edges: Tensor
    times: Tensor | None
    num_edges: int
    disjoint: bool

    @property
    def positive(self) -> Tensor:
        """Positions of the destinations of the edges, (S,)."""
        return self.dst[: self.num_edges]

    @property
    def negative_by_edge(self) -> Tensor:
        """Positions of the negative destinations, (S,) or (S, A) for A negatives of each edge."""
        negative = self.dst[self.num_edges :]
        # in disjoint subgraphs node i is a negative of edge i % S, as in PyG
        by_edge = (
            negative.view(-1, self.num_edges).t()
            if self.disjoint
            else negative.view(self.num_edges, -1)
        )
        return by_edge.reshape(self.num_edges, -1).squeeze(-1)


def link_seeds(
    edges: Tensor,
    negatives: Sequence[Tensor | None],
    node_types: tuple[str, str],
    times: Tensor | None,
    disjoint: bool,
) -> LinkSeeds:
    """Return the seeds of a minibatch.

    Args:
        edges: (2, S) the edges of the minibatch.
        negatives: negative sources and negative destinations; None for none.
        node_types: types of the sources and of the destinations.
        times: (S,) times of the edges, for temporal sampling, which is always disjoint.
        disjoint: make each endpoint a seed of its own.
    """
    num_edges = edges.shape[1]
    ends = [
        own if others is None else torch.cat([own, others])
        for own, others in zip(edges, negatives, strict=True)
    ]
    is_one_type = node_types[0] == node_types[1]
    nodes = (
        {node_types[0]: torch.cat(ends)}
        if is_one_type
        else dict(zip(node_types, ends, strict=True))
    )
    numbers = torch.cat([torch.arange(len(own)) % max(num_edges, 1) for own in ends])
    if disjoint:
        local = [torch.arange(len(own)) for own in nodes.values()]
    else:
        unique = {kind: unique_with_inverse(own) for kind, own in nodes.items()}
        nodes = {kind: found for kind, (found, _) in unique.items()}
        local = [inverse for _, inverse in unique.values()]
    src, dst = local[0].split([len(own) for own in ends]) if is_one_type else local
    seed_times = None if times is None else times[numbers]
    return LinkSeeds(nodes, src, dst, numbers, seed_times, num_edges, disjoint)


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
        # named like the arguments: Lightning reads these attributes to reconstruct the loader
        self.edge_label_index, self.edge_label = edge_label_index, edge_label
        self.edge_label_time, self.input_id = edge_label_time, input_id
        self.is_sorted, self.filter_per_worker = is_sorted, filter_per_worker
        arguments = SamplingArguments(
            *(replace, subgraph_type, directed, disjoint),
            *(temporal_strategy, time_attr, weight_attr),
        )
        self.neg_sampling = cast_negative_sampling(neg_sampling, neg_sampling_ratio)
        options = {"seed": seed, "device": device, "rank": rank, "world_size": world_size}
        self._open(
            "LinkNeighborLoader",
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
        # `data` may have these attributes from a split of its edges
        self._own_fields += ("edge_label_index", "edge_label_time")
        self._own_fields += ("seed_time",) if self._is_triplet else ("edge_label",)
        csc = to_csc(given.source, self.is_sorted and self._stores is None)
        edges = strip_type("edge_label_index", self.edge_label_index)
        self._edges = check_edges(csc.edge_index if edges is None else edges, csc.graph.num_nodes)
        hops = check_num_neighbors(given.num_neighbors, "LinkNeighborLoader")
        typed = one_type_of(given, csc)
        nodes = NodeStore(csc.graph.num_nodes) if typed is None else typed.graph.nodes(NODE)
        self._read_items(typed, [nodes, nodes])
        self._init_loader(given, csc, self._edges, hops, typed)

    def _read_items(self, typed: TypedGraph | None, ends: Sequence[NodeStore]) -> None:
        """Check what was given with the edges; `ends` are the nodes of sources and destinations."""
        self._labels = self._check_labels(self.edge_label)
        num_items = self._edges.shape[1]
        check_input_id(self.input_id, num_items)
        given = self.edge_label_time
        self._times = check_times("edge_label_time", given, typed, num_items)
        # a tensor keeps its dtype, as in PyG
        self._label_time = given.cpu() if isinstance(given, Tensor) else self._times
        self._candidates = self._negative_nodes(ends)

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
                f"edge_label is {describe(edge_label)} for {self._edges.shape[1]} edges"
            )
        if self._is_triplet:
            raise ValueError(
                "edge_label was given with neg_sampling='triplet', but triplets have no labels"
            )
        # as in PyG: label 0 is for the negatives, so labels that begin at 0 are shifted by 1
        has_label_zero = len(edge_label) > 0 and int(edge_label.min()) == 0
        is_shifted = self.neg_sampling is not None and has_label_zero
        return edge_label.cpu() + 1 if is_shifted else edge_label.cpu()


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

    def _read(self, given: Given) -> None:
        kind = import_pyg().data.HeteroData
        check_kind("data", given.source, kind, "torch_geometric.data.HeteroData")
        typed = self._typed_graph(given.source, given.arguments)
        self._edge_type, self._edges = check_typed_edges(
            self.edge_label_index, given.source, typed.graph
        )
        self._read_items(typed, [typed.graph.nodes(each) for each in self._edge_type[::2]])
        settings = {"input_type": "__".join(self._edge_type)}
        self._init_typed_loader(given, typed, self._edges, settings)

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
            f"neg_sampling is {describe(given)}: {error or type(error).__name__}"
        ) from error
