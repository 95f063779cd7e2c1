"""Sample multi-hop neighbourhoods of seed nodes: by edge type, time and weight, or disjoint.

With edge types, the semantics are those of PyG's `NeighborLoader`: at each hop, every edge type
samples in-edges of the nodes that the hops before found.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.graph import Graph, TimeKind, damage_error
from gcnzc.graph.stores import EdgeType, NodeStore
from gcnzc.graph.times import as_times
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.philox import split_key
from gcnzc.kernels.sample import HopSampler, Options, Sample
from gcnzc.kernels.sample.graph import (
    RELATION_KEY,
    TYPE_KEY,
    GraphTables,
    InvalidColumn,
    Relation,
    derive_key,
)
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.bidirectional import to_bidirectional
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.system.arguments import (
    IdsLike,
    as_ids,
    check_choice,
    check_epoch,
    check_fanouts,
    check_flag,
    check_kind,
    check_seed,
    describe,
)

Strategy: TypeAlias = Literal["uniform", "last"]
SubgraphType: TypeAlias = Literal["directional", "bidirectional", "induced"]

Fanouts: TypeAlias = dict[EdgeType, tuple[int, ...]]
DEFAULT = "default"


def check_type_fanouts(graph: Graph, value: Any, name: str = "fanouts") -> Fanouts:
    """Return the fanouts of each edge type of `graph`.

    Args:
        graph: without edge types, there are no fanouts, and minibatches have only the seeds.
        value: a list for all edge types, or a dict by edge type: a triple, the name of a relation,
            or the names joined by "__". The key "default" is for edge types that are not in it.
        name: of the argument.

    Raises:
        TypeError: fanouts are not integers.
        ValueError: an edge type is unknown, missing or given twice, or the numbers of hops differ.
    """
    if not isinstance(value, Mapping):
        fanouts = check_fanouts(name, value)
        return dict.fromkeys(graph.edge_types, fanouts)
    given: Fanouts = {}
    default = None
    for key, own in value.items():
        fanouts = check_fanouts(f"{name}[{key!r:.100}]", own)
        if key == DEFAULT:
            default = fanouts
            continue
        try:
            edge_type = graph.edge_type(tuple(key) if isinstance(key, list) else key)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if edge_type in given:
            raise ValueError(f"{name} has edge type {edge_type} twice\n\nhint: remove one")
        given[edge_type] = fanouts
    missing = [each for each in graph.edge_types if each not in given]
    if missing and default is None:
        raise ValueError(
            f"{name} has no edge type {missing[0]}\n\n"
            f"hint: {name}[{missing[0]}] = [0, ...] samples none of its edges; the key "
            "'default' is for all others"
        )
    found = {each: given.get(each, default or ()) for each in graph.edge_types}
    first, num_hops = next(((each, len(own)) for each, own in found.items()), (None, 0))
    for each, own in found.items():
        if len(own) != num_hops:
            raise ValueError(
                f"{name} has {num_hops} hops for edge type {first}, but {len(own)} for "
                f"{each}: the number of hops must be the same across all edge types"
            )
    return found


class SamplerProtocol(Protocol):
    """A sampler that `gcnzc.Loader` accepts: `gcnzc.Sampler`, `LinkSampler` or another engine.

    For a graph with types, the loader passes seeds as a pair of a node type and ids. If the sampler
    has an attribute `temporal` that is not None, `sample` also gets the times of the seeds.

    Optional attributes:

    - `thread_safe`: if False, the loader calls `sample` from one thread at a time.
    - `num_items`: the seeds are indices in [0, num_items), for example of edges, not node ids.
    - `pool`: a buffer pool of `gcnzc.kernels.buffers`; a loader for a GPU replaces it by one of
      page-locked memory.
    - `settings`: a dict of plain values that determine the samples. The loader saves it in its
      state dict, and loads a state dict only if the settings are equal.

    If a minibatch already has labels, the loader keeps them.
    """

    def sample(self, seeds: Tensor, epoch: int) -> Batch:
        """Sample the neighbourhood of `seeds` for an epoch; features are added by the loader."""


class Sampler:
    """Sample multi-hop in-neighbourhoods of seed nodes; `sample` is thread-safe.

    By default, neighbours are sampled uniformly without replacement. A node with at most `fanout`
    eligible in-edges keeps all of them, in stored order.

    The sampled neighbours of a node depend only on its eligible in-edges, the random seed, the
    epoch, the hop, the edge type and its fanout; in disjoint subgraphs also on the node and the
    time of their seed. They depend neither on the minibatch, threads, ranks and device, nor on
    edges that are later than the time of the seed.

    Args:
        graph: on the host.
        fanouts: number of neighbours at each layer, input layer first, as in DGL: the last one is
            for the seeds. -1 takes all neighbours, 0 none. For a graph with types, a list for all
            edge types, or a dict with a list of the same length for each edge type, whose key
            "default" is for edge types that are not in it.
        seed: random seed, a 64-bit integer.
        edge_ids: also return the ids of the sampled edges: positions in `graph.indices`, or the
            edge ids of a graph with types.
        replace: sample with replacement: each node gets as many edges as its fanout, if it has any.
        weighted: sample in proportion to the weights of edges, for the edge types that have
            weights. Edges of weight 0 are never sampled.
        disjoint: sample a separate subgraph for each seed. Temporal sampling always does.
        temporal: "uniform" samples from the edges that are not later than the time of the seed;
            "last" takes the latest of them, for edge types with times, and of those with a weight
            above 0 if `weighted` is set. The time of the seed holds for all hops; the seeds
            themselves are always part of it. None ignores times.
        time: times that count: "edge", "node" (an edge is as late as its source), or "both" (the
            later of these). Edge types without such times are always visible, even if other types
            have times.
        subgraph_type: "directional" returns the sampled edges; "bidirectional" adds their reverses,
            for edge types whose reverse type exists; "induced" returns all edges, not later than
            the time of the seed, among the sampled nodes.
        once: sample in-edges of each node only at the hop after the one that found it, as PyG does;
            otherwise at all later hops, as DGL does, so that each hop is a complete block.

    Attributes:
        pool: buffer pool for minibatches, on the host. A loader for a GPU replaces it by a pool of
            page-locked memory, so that copies to the GPU are fast. Other attributes are options, to
            be read only: the sampler does not notice changes of them.
        is_plain: whether it samples a graph without types uniformly, without replacement.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a fanout, an edge type, a seed or an option is invalid, a node has 2**32
            in-edges or more, the graph has no weights or no times, or its columns are not sorted by
            time, see `Graph.sort_by_time`.
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int] | Mapping[Any, Sequence[int]],
        seed: int = 0,
        edge_ids: bool = False,
        *,
        replace: bool = False,
        weighted: bool = False,
        disjoint: bool = False,
        temporal: Strategy | None = None,
        time: TimeKind = "both",
        subgraph_type: SubgraphType = "directional",
        once: bool = False,
    ) -> None:
        check_graph(graph)
        self.graph = graph
        self.fanouts: Any
        if self.has_types:
            self.fanouts = by_type = check_type_fanouts(graph, fanouts)
        else:
            self.fanouts = check_fanouts("fanouts", fanouts)
            by_type = dict.fromkeys(graph.edge_types, self.fanouts)
        self.seed = check_seed("seed", seed)
        self.edge_ids = check_flag("edge_ids", edge_ids)
        check_choice("subgraph_type", subgraph_type, ("directional", "bidirectional", "induced"))
        if temporal is not None:
            check_choice("temporal", temporal, ("uniform", "last"))
            graph.check_time_order(time)
        self.temporal, self.time, self.subgraph_type = temporal, time, subgraph_type
        self.weighted = check_flag("weighted", weighted)
        if self.weighted and all(graph.edges(each).weight is None for each in graph.edge_types):
            raise ValueError(
                f"weighted is True, but no edge type of {graph} has weights\n\n"
                "hint: from_pyg(data, weight_attr='weight'), or weight= of the edges"
            )
        replace = check_flag("replace", replace)
        disjoint = check_flag("disjoint", disjoint) or temporal is not None
        self.is_plain = not (self.has_types or replace or self.weighted or disjoint) and (
            subgraph_type == "directional"
        )
        self.options = Options(
            # from the seeds outward
            fanouts=tuple(zip(*(own[::-1] for own in by_type.values()), strict=True)),
            replace=replace,
            temporal=temporal,
            disjoint=disjoint,
            once=check_flag("once", once),
            induced=subgraph_type == "induced",
            edge_ids=self.edge_ids,
            own_loops=self.is_plain,
        )
        self.pool = Pool()
        self._hops = HopSampler(self._make_tables(), self.options)

    @property
    def has_types(self) -> bool:
        """Whether the graph has types of nodes and edges."""
        return self.graph.has_types

    def with_graph(self, graph: Graph) -> Self:
        """Return a sampler of another graph of the same types."""
        other = copy.copy(self)
        other.graph = graph
        other._hops = HopSampler(other._make_tables(), self.options)
        return other

    def _make_tables(self) -> GraphTables:
        graph = self.graph
        numbers = {name: number for number, name in enumerate(graph.node_types)}
        relations = []
        for edge_type in graph.edge_types:
            store = graph.edges(edge_type)
            ends = numbers[edge_type[0]], numbers[edge_type[2]]
            if self.is_plain:
                key = split_key(self.seed)
                relations.append(Relation(*ends, store.indptr, store.indices, key))
                continue
            edge_time, node_time = (None, None)
            if self.temporal is not None:
                edge_time, node_time = graph.times(edge_type, self.time)
            relations.append(
                Relation(
                    *ends,
                    store.indptr,
                    store.indices,
                    derive_key(self.seed, RELATION_KEY, *edge_type),
                    store.edge_ids,
                    edge_time,
                    node_time,
                    store.weight if self.weighted else None,
                )
            )
        sizes = [graph.nodes(name).num_nodes for name in graph.node_types]
        type_keys = [derive_key(self.seed, TYPE_KEY, name) for name in graph.node_types]
        return GraphTables(sizes, relations, type_keys)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has its own buffer pool and workspaces, its arrays have other addresses, and its
        # graph has no features
        stores = {name: self.graph.nodes(name) for name in self.graph.node_types}
        nodes = {name: NodeStore(own.num_nodes, time=own.time) for name, own in stores.items()}
        return self.__dict__ | {"graph": self.graph.with_nodes(nodes), "pool": None, "_hops": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.pool = Pool()
        self._hops = HopSampler(self._make_tables(), self.options)

    @property
    def settings(self) -> dict[str, Any]:
        """Options that determine the sampled neighbours, for the loader's state dict."""
        fanouts: Any = list(self.fanouts)
        if self.has_types:
            fanouts = {"__".join(each): list(own) for each, own in self.fanouts.items()}
        return {
            "fanouts": fanouts,
            "sampler_seed": self.seed,
            "replace": self.options.replace,
            "weighted": self.weighted,
            "disjoint": self.options.disjoint,
            "temporal": self.temporal,
            "time": self.time,
            "subgraph_type": self.subgraph_type,
            "once": self.options.once,
        }

    def sample(
        self,
        seeds: IdsLike | Mapping[str, IdsLike] | tuple[str, IdsLike],
        epoch: int,
        seed_times: Any = None,
        *,
        exclude: IdsLike | Mapping[EdgeType, IdsLike] | None = None,
    ) -> Any:
        """Sample the neighbourhood of seeds.

        Args:
            seeds: (S,) int64 or int32 node ids, on the host: a tensor, an array or a list. For a
                graph with types, a dict of ids by node type, or a pair of a type and ids. As in
                DGL, a seed that occurs twice gets two rows with the same neighbours, without
                disjoint subgraphs; edges whose source is that seed refer to its first row, except
                for self loops in a graph without types, which refer to the row of their
                destination.
            epoch: in [0, 2**32); the sampled neighbours differ between epochs.
            seed_times: for temporal sampling (S,) times of all seeds in their order, or a dict like
                `seeds`: integers in the unit of the graph's times; or dates, which are rounded down
                to this unit, if `graph.time_unit` is set. None uses the times of the seed nodes.
            exclude: positions in `graph.indices` of edges that are not sampled at any hop, such as
                the edges whose existence is to be predicted. For a graph with types, edge ids by
                edge type. Neighbours are sampled among the other edges.

        Returns:
            A minibatch without features and labels: a `Batch`, or for seeds by node type a
            `HeteroBatch`. Its buffers return to `pool` when nothing refers to them any more.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a type is unknown, a seed is not a node of its type, an excluded edge is not
                an edge of its type, the epoch is out of range, there are no seeds by type or no
                times, or the graph has an invalid offset or source, see `Graph.check`.
        """
        epoch = check_epoch("epoch", epoch)
        if isinstance(seeds, Mapping) or self.has_types or _is_pair(seeds):
            return self._sample_types(seeds, epoch, seed_times, exclude)
        if self.subgraph_type != "directional":
            raise ValueError(
                f"{self.subgraph_type} subgraphs have no blocks\n\nhint: {{'node': seeds}} returns "
                "a HeteroBatch"
            )
        given: Any = seeds
        ids = check_seeds("seeds", given, self.graph.num_nodes)
        times = self._check_times({self.graph.node_types[0]: ids}, seed_times)
        return self.sample_checked(ids, epoch, self._check_edges(exclude), times)

    def sample_checked(
        self, seeds: Tensor, epoch: int, excluded: Tensor | None, times: Tensor | None = None
    ) -> Batch:
        """Return what `sample` does for node ids without types, which need no check.

        Args:
            seeds: (S,) int64 node ids, contiguous, on the host.
            epoch: in [0, 2**32).
            excluded: ascending positions in `graph.indices`, without duplicates.
            times: (S,) int64 times of the seeds, for temporal sampling.
        """
        begin_s = time.perf_counter()
        by_type = {} if excluded is None else {0: excluded}
        sampled = self._sample_hops([(0, seeds)], epoch, times, by_type)
        (nodes,), (indptr,), (indices,) = sampled.nodes, sampled.indptr, sampled.indices
        num_nodes = [own for (own,) in sampled.num_nodes]
        num_edges = [own for (own,) in sampled.num_edges]
        num_columns = [num_dst + 1 for num_dst in num_nodes[:-1]]
        of_edges = [indices, *(sampled.edge_ids or ())]
        columns: Sequence[Tensor]
        if self.options.once:
            # the edges of a block include those of the hops before
            columns = [indptr[:count] for count in num_columns]
            edges: Any = [[vector[:end] for end in num_edges[1:]] for vector in of_edges]
        else:
            columns = indptr.split_with_sizes(num_columns)
            sizes = [after - before for before, after in pairwise(num_edges)]
            edges = [vector.split_with_sizes(sizes) for vector in of_edges]
        ids = edges[1] if sampled.edge_ids else [None] * len(columns)
        hops = zip(columns, edges[0], pairwise(num_nodes), ids, strict=True)
        blocks = [
            Block(offsets, sources, num_src, num_dst, nodes[:num_src], self.graph, edge_ids)
            for offsets, sources, (num_dst, num_src), edge_ids in hops
        ]
        blocks.reverse()
        spent = {"sample_s": time.perf_counter() - begin_s}
        return Batch(nodes, nodes[: num_nodes[0]], tuple(blocks), times=spent)

    def _sample_hops(
        self,
        seeds: Sequence[tuple[int, Tensor]],
        epoch: int,
        times: Tensor | None,
        excluded: Mapping[int, Tensor],
    ) -> Sample:
        try:
            return self._hops.sample(
                seeds, epoch, seed_times=times, excluded=excluded, empty=self.pool.empty
            )
        except InvalidColumn as error:
            edge_type = self.graph.edge_types[error.relation]
            raise damage_error(self.graph, error.array, error.wrong, edge_type) from None

    def _sample_types(self, seeds: Any, epoch: int, seed_times: Any, exclude: Any) -> HeteroBatch:
        begin_s = time.perf_counter()
        given, numbers = self._check_seeds(seeds), self.graph.node_types
        times = self._check_times(given, seed_times)
        by_number = [(numbers.index(name), ids) for name, ids in given.items()]
        sampled = self._sample_hops(by_number, epoch, times, self._positions(exclude))
        batch = self._to_batch(sampled, given, times)
        if self.subgraph_type == "bidirectional":
            to_bidirectional(batch, keep_ids=not self.has_types)
        batch.times["sample_s"] = time.perf_counter() - begin_s
        return batch

    def _check_seeds(self, seeds: Any) -> dict[str, Tensor]:
        if _is_pair(seeds):
            seeds = {seeds[0]: seeds[1]}
        if not isinstance(seeds, Mapping):
            raise TypeError(f"seeds is {describe(seeds)}, not a dict of ids by node type")
        if not seeds:
            raise ValueError(
                f"seeds is {describe(seeds)} with no node types\n\nhint: {{'paper': ids}}"
            )
        return {
            name: check_seeds(
                f"seeds of node type {name!r}", ids, self.graph.nodes(name).num_nodes
            ).contiguous()
            for name, ids in seeds.items()
        }

    def _positions(self, exclude: Mapping[EdgeType, IdsLike] | None) -> dict[int, Tensor]:
        """Return the ascending positions of excluded edges, by the number of their edge type."""
        if exclude is None:
            return {}
        check_kind("exclude", exclude, Mapping, "a dict of edge ids by edge type")
        found: dict[int, Tensor] = {}
        for key, given in exclude.items():
            edge_type = self.graph.edge_type(key)
            edges, name = self.graph.edges(edge_type), f"edge ids of exclude[{edge_type}]"
            ids = as_ids(name, given, "edge ids; convert a mask with .nonzero().flatten()").cpu()
            reason = "there are {} edges of this type"
            check_range(name, ids, edges.num_edges, reason, "ids of edges of the graph")
            if edges.positions is not None:
                ids = edges.positions[ids]
            number = self.graph.edge_types.index(edge_type)
            if number in found:
                # given by its triple and by the name of its relation
                ids = torch.cat([found[number], ids])
            # NumPy's sort is several times as fast as torch's in one thread
            found[number] = torch.from_numpy(np.unique(ids.numpy()))
        return {number: positions for number, positions in found.items() if len(positions)}

    def _check_edges(self, edges: Any) -> Tensor | None:
        if edges is None:
            return None
        positions = as_ids("exclude", edges, "positions in graph.indices").cpu()
        reason, meaning = "the graph has {} edges", "positions in graph.indices"
        check_range("exclude", positions, self.graph.num_edges, reason, meaning)
        # NumPy's sort is several times as fast as torch's in one thread
        return torch.from_numpy(np.unique(positions.numpy()))

    def _check_times(self, seeds: Mapping[str, Tensor], given: Any) -> Tensor | None:
        """Return the times of all seeds in their order; None without temporal sampling."""
        if self.temporal is None:
            if given is not None:
                raise ValueError("seed_times are given, but the sampler ignores times")
            return None
        total, unit = sum(map(len, seeds.values())), self.graph.time_unit
        if given is not None and not isinstance(given, Mapping):
            return as_times("seed_times", given, total, unit, is_limit=True)
        parts = [torch.empty(0, dtype=torch.int64)]
        for name, ids in seeds.items():
            if given is not None:
                if name not in given:
                    raise ValueError(f"seed_times has no times for node type {name!r}")
                name_of_times = f"seed_times of {name!r}"
                parts.append(as_times(name_of_times, given[name], len(ids), unit, is_limit=True))
                continue
            own = self.graph.nodes(name).time
            if own is None:
                raise ValueError(
                    f"the seeds of node type {name!r} have no times, since the type has none"
                )
            parts.append(own[ids])
        unknown = [name for name in given or () if name not in seeds]
        if unknown:
            raise ValueError(f"seed_times has the node type {unknown[0]!r}, but seeds does not")
        return torch.cat(parts)

    def _to_batch(
        self, sampled: Sample, seeds: Mapping[str, Tensor], times: Tensor | None
    ) -> HeteroBatch:
        node_types, edge_types = self.graph.metadata()
        nodes = dict(zip(node_types, sampled.nodes, strict=True))
        ids, subgraphs = sampled.edge_ids, sampled.subgraphs
        zeros = [0] * len(node_types)
        num_nodes = _differences([zeros, *sampled.num_nodes])
        num_edges = None if self.options.induced else _differences(sampled.num_edges)
        return HeteroBatch(
            nodes=nodes,
            seeds={name: nodes[name][: len(own)] for name, own in seeds.items()},
            indptr=dict(zip(edge_types, sampled.indptr, strict=True)),
            indices=dict(zip(edge_types, sampled.indices, strict=True)),
            edge_ids=None if ids is None else dict(zip(edge_types, ids, strict=True)),
            num_nodes=dict(zip(node_types, num_nodes, strict=True)),
            num_edges=None if num_edges is None else dict(zip(edge_types, num_edges, strict=True)),
            subgraphs=None if subgraphs is None else dict(zip(node_types, subgraphs, strict=True)),
            seed_times=times,
            once=self.options.once,
        )


def _differences(counts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return for each type the differences between consecutive counts of all types."""
    own = zip(*counts, strict=True)
    return [tuple(after - before for before, after in pairwise(each)) for each in own]


def _is_pair(seeds: object) -> bool:
    return isinstance(seeds, tuple) and len(seeds) == 2 and isinstance(seeds[0], str)


def check_graph(graph: object) -> None:
    """Raise a TypeError if `graph` is not a `gcnzc.Graph`."""
    check_kind("graph", graph, Graph, "Graph.from_edges, from_csc, from_csr, from_dgl or from_pyg")


def check_seeds(name: str, seeds: IdsLike, num_nodes: int) -> Tensor:
    """Check node ids, a tensor, an array or a list; return them as an int64 vector on the host.

    Raises:
        TypeError: `seeds` has another type.
        ValueError: not a vector of int32 or int64 on the host, or an id is out of range.
    """
    ids = as_ids(name, seeds, "node ids; convert a mask with .nonzero().flatten()")
    if ids.device.type != "cpu":
        raise ValueError(f"{name} is {describe(seeds)} on {ids.device}\n\nhint: {name}.cpu()")
    check_range(name, ids, num_nodes, "the graph has {} nodes", "node ids")
    return ids


def check_range(name: str, ids: Tensor, count: int, reason: str, meaning: str) -> None:
    """Check that all ids are in [0, count).

    Args:
        name: name of the argument.
        ids: integers on the host.
        count: upper bound.
        reason: end of the message, with {} for `count`, such as "the graph has {} nodes".
        meaning: what the ids are, for the hint, such as "node ids".

    Raises:
        ValueError: an id is out of range.
    """
    if not ids.numel():
        return
    least, greatest = map(int, ids.aminmax())
    if least < 0 or greatest >= count:
        raise ValueError(
            f"{name} are from {least} to {greatest}, but {reason.format(count)}\n\n"
            f"hint: {name} are {meaning}, starting at 0"
        )
