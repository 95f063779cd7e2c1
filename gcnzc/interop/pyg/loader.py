"""Drop-in replacements of PyG's `NeighborLoader` and `LinkNeighborLoader`.

As in PyG, each node occurs once in a minibatch or in a disjoint subgraph, and the seeds come first.
Threads sample, and gather the attributes on the host. For a GPU, `gcnzc.loader.transfer.Transfer`
copies them, and gathers the features that the GPU reads in place, one attribute of each node type,
on side streams. Further attributes that the GPU reads in place, and those on GPUs, are gathered
when the minibatch is yielded.
"""

import copy
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.drop_in import DropInLoader, LibraryBatch, as_items
from gcnzc.interop.options import CPU, generator, make_options
from gcnzc.interop.pyg.arguments import (
    CHECKS,
    OWN,
    check_input_edges,
    check_input_id,
    check_input_nodes,
    check_times,
    check_typed_tables,
)
from gcnzc.interop.pyg.graph import Attributes, Key, read_attributes
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.links import LinkSeeds, NegativeNodes, cast_negative_sampling, link_seeds
from gcnzc.interop.pyg.sampler import ARGUMENTS, NeighborSampler
from gcnzc.interop.pyg.stores import StoredAttributes, is_store_pair, open_stores
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.system.arguments import check_kind, describe

# the edges of a type in a minibatch for a GPU, which converts them to `edge_index`
INDPTR, INDICES = "_indptr", "_indices"


class PygLoader(DropInLoader):
    """The base class of the PyG loaders, which yields sampled subgraphs as `Data` or `HeteroData`.

    Attributes of the data with the name of a field that the loader sets itself are replaced. As in
    PyG, `n_id` and `e_id` of the data are sliced like its other attributes, and replace the ids of
    the sampled nodes and edges.

    The constructors are those of the subclasses, which call `_open`.
    """

    _replaceable = ("data", "transform")
    # fields of minibatches, which replace attributes of a `Data`
    _own_fields: tuple[str, ...] = ("batch", "input_id", "num_sampled_nodes", "num_sampled_edges")
    data: Any
    transform: Callable[[Any], Any] | None
    input_id: Tensor | None
    # the type of the items
    _kind: Any
    # the times of the items, and those of minibatches
    _times: Tensor | None
    _own_times: Tensor | None
    # the attributes that a feature store gathers; None if `data` is not a pair of stores
    _stored: StoredAttributes | None = None

    def _open(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a constructor, and create the loader.

        Args:
            arguments: of the constructor by name; those of torch's `DataLoader` in "kwargs".
        """
        given = {name: value for name, value in arguments.items() if name != "self"}
        kwargs = dict(given.pop("kwargs"))
        given["custom_cls"] = kwargs.pop("custom_cls", None)
        given |= {name: check(name, given[name]) for name, check in CHECKS.items()}
        if given["custom_cls"] is not None and not is_store_pair(given["data"]):
            raise ValueError("gcnzc's loader does not support custom_cls, except with stores")
        own = {name: given[name] for name in OWN}
        # Lightning reads these attributes to reconstruct the loader
        vars(self).update({name: value for name, value in given.items() if name not in OWN})
        names = given["time_attr"], given["weight_attr"]
        self._stores = open_stores(self.data, given["custom_cls"], names)
        self._sampler = NeighborSampler(
            self._sliced,
            given["num_neighbors"],
            **{name: given[name] for name in ARGUMENTS},
            time_unit=None if self._stores is None else self._stores.time_unit,
        )
        self._csc = self._sampler.csc
        items = self._read_items()
        self._typed_tables = check_typed_tables(given["tables"], self._csc)
        super().__init__(items, items.shape[-1], make_options(type(self).__name__, kwargs, **own))
        self._sampler = self._sampler.with_seed(self._seed)
        self._last_values: dict[Key, Any] | None = None
        self._refresh_attributes()

    @abstractmethod
    def _read_items(self) -> Tensor:
        """Check the items and what was given with them; return the (S,) nodes or (2, S) edges."""

    def __call__(self, index: Tensor | Sequence[int]) -> Any:
        """Return the minibatch of some items in the current epoch, on the host.

        Args:
            index: (S,) indices of the items, in [0, len(self.dataset)).

        Raises:
            TypeError: an index is not an integer.
            IndexError: an index is out of range.
        """
        return self._sample_on_host(as_items(index, self.num_items, "index"), self.epoch)

    @property
    def input_type(self) -> Any:
        """The type of the nodes, or edges, to iterate over; None for a `Data`."""
        return self._kind if self._csc.is_typed else None

    @property
    def node_sampler(self) -> NeighborSampler:
        """The sampler, as PyG's loaders have it; some of PyG's code reads its `num_neighbors`."""
        return self._sampler

    link_sampler = node_sampler

    def filter_fn(self, out: Any) -> Any:
        """Return `out` unchanged, since `collate_fn` returns complete minibatches.

        PyG's loaders add the attributes to a sampled subgraph here.
        """
        return out

    @contextmanager
    def enable_multithreading(self, worker_threads: Any = None) -> Iterator[None]:
        """Do nothing: there are no worker processes whose number of threads could be set."""
        yield

    @property
    def _sliced(self) -> Any:
        """The data whose attributes are sliced to minibatches, besides those of a feature store."""
        return self.data if self._stores is None else self._stores.structure

    def _settings(self) -> dict[str, Any]:
        times = b"" if self._times is None else self._times.numpy().tobytes()
        names = [self._kind] if isinstance(self._kind, str) else self._kind
        of_items = {"input_type": "__".join(names), "input_time_crc32": zlib.crc32(times)}
        return self._sampler.settings | of_items

    def _set_seed(self, seed: int) -> None:
        super()._set_seed(seed)
        self._sampler = self._sampler.with_seed(seed)

    def _refresh_attributes(self) -> None:
        data, excluded = self._sliced, () if self._csc.is_typed else self._own_fields
        if self._stores is not None:
            names = {*self._typed_tables, *excluded}
            self._stored = self._stores.attributes(names)
        current = {(store._key, name): own for store in data.stores for name, own in store.items()}
        last = self._last_values
        same = last is not None and current.keys() == last.keys()
        if same and all(current[key] is value for key, value in (last or {}).items()):
            return
        self._last_values = None
        self._found: Attributes = read_attributes(
            data, self._csc.graph, self._typed_tables, self.device, self._locks, excluded
        )
        self._set_prefetched(self._found.prefetched)
        # page-locked for a GPU
        self._sampler.pool = self.pool
        # after all that may raise an error, which the next epoch then raises again
        self._last_values = current

    def _to_library(self, batch: HeteroBatch, fields: Mapping[Key, Any]) -> LibraryBatch:
        """Return a sampled subgraph, with the attributes that are gathered on the host.

        Args:
            batch: the subgraph.
            fields: further values of the minibatch.
        """
        found, positions = self._found, batch.edge_ids or {}
        # bidirectional subgraphs of several types have no edge ids
        ids: dict[Any, Tensor | None] = {**batch.nodes}
        for each in batch.indices:
            ids[each] = self._csc.ids(each, positions[each]) if each in positions else None
        values: dict[Key, Any] = found.slice_on_host(ids)
        if self._stored is not None:
            values |= self._stored.gather(ids)
        for kind, own in ids.items():
            name = "n_id" if isinstance(kind, str) else "e_id"
            if own is not None and (kind, name) not in found:
                values.setdefault((kind, name), own)
            if isinstance(kind, str):
                if kind in found.has_num_nodes:
                    values[kind, "num_nodes"] = len(batch.nodes[kind])
            elif self.device.type == "cpu" or kind in batch.reordered or not batch.is_prefix:
                values[kind, "edge_index"] = batch.edge_index(kind, self.pool.empty)
            else:
                # they have less than half the bytes of `edge_index`
                values[kind, INDPTR], values[kind, INDICES] = batch.csc(kind)
        values |= {(kind, "batch"): own for kind, own in (batch.subgraphs or {}).items()}
        for name, by_type in self._sampler.num_sampled(batch).items():
            values |= {(kind, name): own for kind, own in by_type.items()}
        values |= fields
        return LibraryBatch.of(batch.nodes, values, found.prefetched, parts=ids)

    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        """Return the `Data` or `HeteroData` of a minibatch, on the device of its nodes."""
        found, values = self._found, dict(batch.values)
        data = copy.copy(found.template)
        device = batch.device
        if device.type != "cpu":
            # what is not on the device already
            values = {
                key: value.to(device) if hasattr(value, "to") else value
                for key, value in values.items()
            }
        for kind in [kind for kind, name in values if name == INDPTR]:
            values[kind, "edge_index"] = _edge_index(
                values.pop((kind, INDPTR)), values.pop((kind, INDICES))
            )
        if found.read_in_place:
            keys = found.read_in_place.keys() - values.keys()
            of_edges = {kind: ids for kind, _ in keys if (ids := batch.parts[kind]) is not None}
            ids = {kind: own.to(device) for kind, own in of_edges.items()} | {**batch.by_type}
            values |= found.gather_in_place(ids, keys)
        values |= found.slice_on_gpus(batch.parts)
        for (kind, name), value in values.items():
            (data[kind] if self._csc.is_typed else data)[name] = value
        return data if self.transform is None else self.transform(data)


def _edge_index(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the (2, E) int64 edges of a CSC on its device."""
    out = torch.empty((2, len(indices)), dtype=torch.int64, device=indices.device)
    out[0] = indices
    out[1] = torch.repeat_interleave(indptr.diff(), output_size=len(indices))
    return out


class NeighborLoader(PygLoader, import_pyg().loader.NeighborLoader):  # type: ignore[misc]
    """Drop-in replacement of `torch_geometric.loader.NeighborLoader`.

    It has the same signature and is an instance of PyG's class. Minibatches have the same fields,
    but the sampled neighbours differ. The positional arguments and `input_id` are PyG's, `kwargs`
    are those of torch's `DataLoader`, and the other keyword arguments are gcnzc's.
    docs/reference/drop_in_loaders.md lists the supported ones; an unsupported one raises an error
    with its name.

    Args:
        data: a `torch_geometric.data.Data` with `edge_index`; a `HeteroData` whose edge types have
            `edge_index`; or a pair of a `FeatureStore` and a `GraphStore`.
        num_neighbors: number of neighbours to sample at each hop, beginning with the hop from
            the seed nodes, -1 for all: a list for all edge types, a dict of lists by edge type, or
            PyG's `NumNeighbors`.
        input_nodes: ids or a mask of the nodes to iterate over. Default: all nodes. With types, a
            node type, or a pair of a node type and ids, a mask, or None.
        input_time: (S,) times of the input nodes: integers, or dates with `as_stores` of a graph
            with a time unit. Default: `time_attr` of the nodes.
        replace: sample with replacement.
        subgraph_type: "directional" has the sampled edges; "bidirectional" also their reverses,
            without types with the ids and attributes of the edges that they are the reverses of;
            "induced" all edges among the sampled nodes.
        disjoint: sample a separate subgraph for each seed node, whose number is in `batch`.
            Temporal sampling always does.
        temporal_strategy: "uniform" samples from the edges that are not later than the time of
            the seed node, "last" takes the latest of them.
        time_attr: attribute of nodes, or of edges, with times, which are integers. Types without it
            are always visible.
        weight_attr: attribute of edges with weights, in proportion to which neighbours are sampled.
            Neighbours of edge types without it are sampled uniformly.
        transform: function that is applied to each minibatch.
        is_sorted, filter_per_worker: without effect.
        directed: False is the same as `subgraph_type="induced"`.
        seed: random seed of the shuffling and the sampling; a 64-bit integer. Default: drawn from
            torch's random generator, or 0 if `world_size` is above 1.
        device: device of the minibatches. For a GPU, the loader page-locks the attributes `x` until
            `close()`, and the GPU reads them in host memory. Other attributes are copied.
        rank, world_size: the nodes are divided among the ranks. By default all nodes are yielded,
            with one warning if torch.distributed has several ranks.
        threads: number of threads that prepare minibatches. Default: `num_workers` if above 0, else
            one per core up to four; ranks on one machine share its cores.
        ahead: maximum number of prefetched minibatches.
        tables: feature tables by name, or with types by pairs such as `("paper", "x")`, which
            replace attributes of `data`, for tables that the caller page-locked, quantized or
            cached.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or is not supported; the message names it.
        ImportError: PyG is not installed; raised on import.
    """

    _own_fields = (*PygLoader._own_fields, "batch_size", "seed_time")
    input_nodes: Any
    input_time: Any

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
        self._open(locals())

    def _read_items(self) -> Tensor:
        found = check_input_nodes(self.input_nodes, self.input_id, self._csc)
        self._kind, self._nodes, self._ids = found
        self._times, self._own_times = check_times(
            "input_time", self.input_time, self._csc, len(self._nodes), self._kind
        )
        return self._nodes

    @property
    def input_data(self) -> Any:
        """The nodes to iterate over, as PyG's `NodeSamplerInput`."""
        return import_pyg().sampler.NodeSamplerInput(
            self._ids, self._nodes, self._own_times, self.input_type
        )

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the input nodes with indices `seeds`, on the host."""
        kind = self._kind
        times = None if self._times is None else self._times[seeds]
        batch = self._sampler.sample({kind: self._nodes[seeds]}, epoch, times)
        fields = {
            (kind, "input_id"): seeds if self._ids is None else self._ids[seeds],
            (kind, "seed_time"): None if self._own_times is None else self._own_times[seeds],
            (kind, "batch_size"): len(seeds),
        }
        return self._to_library(batch, fields)


class LinkNeighborLoader(
    PygLoader,
    import_pyg().loader.LinkNeighborLoader,  # type: ignore[misc]
):
    """Drop-in replacement of `torch_geometric.loader.LinkNeighborLoader`.

    It has the same signature, and minibatches have the same fields, but the sampled neighbours and
    negative edges differ. Negative edges are sampled uniformly, or by the weights of a
    `NegativeSampling`; as in PyG, some may be edges of the graph. Negative edges depend on the
    seed, the epoch and the edges of the minibatch. As in PyG, the edges of the minibatch are not
    removed from the sampled neighbourhoods.

    Args:
        data: see `gcnzc.interop.pyg.NeighborLoader`, also for the arguments that are not listed
            here.
        num_neighbors: number of neighbours sampled at each hop; hop 1 samples neighbours of the
            edges' endpoints; -1 for all.
        edge_label_index: (2, E) the edges to iterate over. Default: the edges of `data`. With
            types, an edge type, or a pair of an edge type, which need not be in `data`, and edges
            or None.
        edge_label: (E, ...) labels of these edges.
        edge_label_time: (E,) times of the edges: integers, or dates with `as_stores` of a graph
            with a time unit; required with `time_attr`. Neither a neighbourhood nor, if `time_attr`
            is of nodes, a negative node has later times. If all nodes are later, the earliest is
            the negative one, as in PyG.
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
        self._open(locals())

    def _read_items(self) -> Tensor:
        self.neg_sampling: Any = cast_negative_sampling(self.neg_sampling, self.neg_sampling_ratio)
        # `data` may have these attributes from a split of its edges
        self._own_fields += ("edge_label_index", "edge_label_time")
        self._own_fields += ("seed_time",) if self._is_triplet else ("edge_label",)
        found = check_input_edges(self.edge_label_index, self._sliced, self._csc)
        self._kind, self._edges = found
        num_items = self._edges.shape[1]
        self._labels = self._check_labels(self.edge_label, num_items)
        check_input_id(self.input_id, num_items)
        given = self.edge_label_time
        self._times, self._own_times = check_times("edge_label_time", given, self._csc, num_items)
        self._candidates = self._negative_nodes()
        return self._edges

    @property
    def input_data(self) -> Any:
        """The edges to iterate over, as PyG's `EdgeSamplerInput`."""
        return import_pyg().sampler.EdgeSamplerInput(
            self.input_id, *self._edges, self._labels, self._own_times, self.input_type
        )

    @property
    def _is_triplet(self) -> bool:
        return self.neg_sampling is not None and self.neg_sampling.is_triplet()

    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample the minibatch of the edges with indices `seeds`, on the host."""
        first, _, last = kind = self._kind
        links = self._sample_links(seeds, epoch)
        batch = self._sampler.sample(links.nodes, epoch, links.times)
        fields: dict[Key, Any] = {
            (each, "batch"): links.edges[own] for each, own in (batch.subgraphs or {}).items()
        }
        fields[kind, "input_id"] = seeds if self.input_id is None else self.input_id[seeds]
        times = None if self._own_times is None else self._own_times[seeds]
        if self._is_triplet:
            fields |= {
                (first, "src_index"): links.src,
                (last, "dst_pos_index"): links.positive,
                (last, "dst_neg_index"): links.negative_by_edge,
                (first, "seed_time"): times,
                (last, "seed_time"): times,
                # attributes of the data, from a split of its edges
                (kind, "edge_label_index"): None,
                (kind, "edge_label_time"): None,
            }
        else:
            fields |= {
                (kind, "edge_label_index"): torch.stack([links.src, links.dst]),
                (kind, "edge_label"): self._labels_of(seeds, len(links.src) - len(seeds)),
                # negatives have the times of their edges
                (kind, "edge_label_time"): (
                    None if times is None else times[links.edges[: len(links.src)]]
                ),
            }
        return self._to_library(batch, fields)

    def _sample_links(self, indices: Tensor, epoch: int) -> LinkSeeds:
        """Sample the negatives of the edges with some indices, and return the seeds.

        Args:
            indices: (S,) int64 on the host.
            epoch: in [0, 2**32).
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
        ends, disjoint = (self._kind[0], self._kind[2]), self._sampler.disjoint
        return link_seeds(self._edges[:, indices], negatives, ends, times, disjoint)

    def _negative_nodes(self) -> list[NegativeNodes]:
        """Return the nodes from which negative sources and destinations are sampled."""
        sampling = self.neg_sampling
        weights = [None, None] if sampling is None else [sampling.src_weight, sampling.dst_weight]
        if self._is_triplet:
            weights[0] = None
        ends = [self._csc.graph.nodes(each) for each in self._kind[::2]]
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

    def _check_labels(self, edge_label: Tensor | None, num_items: int) -> Tensor | None:
        if edge_label is None:
            return None
        check_kind("edge_label", edge_label, Tensor, "a tensor with a label for each edge")
        if edge_label.ndim == 0 or len(edge_label) != num_items:
            raise ValueError(f"edge_label is {describe(edge_label)} for {num_items} edges")
        if self._is_triplet:
            raise ValueError(
                "edge_label was given with neg_sampling='triplet', but triplets have no labels"
            )
        # as in PyG: label 0 is for the negatives, so labels that begin at 0 are shifted by 1
        has_label_zero = len(edge_label) > 0 and int(edge_label.min()) == 0
        is_shifted = self.neg_sampling is not None and has_label_zero
        return edge_label.cpu() + 1 if is_shifted else edge_label.cpu()
