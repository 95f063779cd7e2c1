"""Sampling with PyG's arguments and semantics, as a sampler of PyG's own loaders too."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.graph import NODE
from gcnzc.graph.times import TimeUnit
from gcnzc.interop.engine import CscGraph, make_sampler
from gcnzc.interop.pyg.graph import to_csc
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.stores import StoredData, is_store_pair
from gcnzc.kernels.buffers import Pool
from gcnzc.loader.state import plain_settings
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.sampling.neighbor import DEFAULT, check_type_fanouts
from gcnzc.system.arguments import check_choice, check_flag, check_seed, describe

_sampler = import_pyg().sampler


def _check_attribute(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {describe(value)}, not the name of an attribute")
    return value


def _check_subgraph_type(name: str, value: Any) -> str:
    # a member of PyG's enumeration, or its value
    value = getattr(value, "value", value)
    check_choice(name, value, ("directional", "bidirectional", "induced"))
    return str(value)


def _check_strategy(name: str, value: Any) -> str:
    check_choice(name, value, ("uniform", "last"))
    return str(value)


# PyG's arguments about sampling; each function returns the checked value
ARGUMENTS = {
    "replace": check_flag,
    "subgraph_type": _check_subgraph_type,
    "directed": check_flag,
    "disjoint": check_flag,
    "temporal_strategy": _check_strategy,
    "time_attr": _check_attribute,
    "weight_attr": _check_attribute,
}


class NeighborSampler(import_pyg().sampler.BaseSampler):  # type: ignore[misc]
    """Drop-in replacement of `torch_geometric.sampler.NeighborSampler`.

    It is a sampler for PyG's `NodeLoader(node_sampler=...)` and `LinkLoader(link_sampler=...)`. The
    sampled neighbours depend on `seed` and on torch's random numbers, so that
    `torch.manual_seed` makes them reproducible. `NeighborLoader` and `LinkNeighborLoader` also
    prefetch minibatches in threads, and resume.

    Args:
        data: a `Data`, a `HeteroData`, or a pair of a `FeatureStore` and a `GraphStore`.
        num_neighbors, subgraph_type, replace, disjoint: see `gcnzc.interop.pyg.NeighborLoader`.
        temporal_strategy, time_attr, weight_attr, directed: likewise.
        is_sorted, share_memory: without effect.
        seed: random seed of the sampling; a 64-bit integer.
        time_unit: of the times of the data, to which dates are converted; None if it is not known.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or does not fit the data.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        *,
        seed: int = 0,
        time_unit: TimeUnit | None = None,
    ) -> None:
        arguments = locals()
        given = {name: check(name, arguments[name]) for name, check in ARGUMENTS.items()}
        if is_store_pair(data):
            stores = StoredData(data[0], data[1], None, (time_attr, weight_attr))
            data, time_unit = stores.structure, stores.time_unit
        self.csc: CscGraph = to_csc(data, time_attr, weight_attr, time_unit)
        fanouts, self.num_hops = _fanouts(self.csc, num_neighbors)
        self._num_neighbors = num_neighbors
        self._options = {
            "num_neighbors": fanouts,
            "replace": given["replace"],
            "weighted": weight_attr is not None,
            "disjoint": given["disjoint"],
            "temporal": None if self.csc.time is None else given["temporal_strategy"],
            "time": self.csc.time or "both",
            # `directed=False` is PyG's older form of this argument
            "subgraph_type": given["subgraph_type"] if given["directed"] else "induced",
        }
        self._engine = make_sampler(self.csc, **self._options, seed=check_seed("seed", seed))

    def with_seed(self, seed: int) -> Self:
        """Return this sampler with another random seed."""
        other = copy.copy(self)
        other._engine = make_sampler(self.csc, **self._options, seed=seed)
        other.pool = self.pool
        return other

    @property
    def num_neighbors(self) -> Any:
        """The numbers of neighbours as PyG's `NumNeighbors`."""
        given = self._num_neighbors
        if isinstance(given, _sampler.base.NumNeighbors):
            return given
        return _sampler.base.NumNeighbors(given if isinstance(given, Mapping) else list(given))

    @property
    def pool(self) -> Pool:
        """Buffer pool for minibatches, on the host."""
        return self._engine.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._engine.pool = pool

    @property
    def disjoint(self) -> bool:
        """Whether each seed has a subgraph of its own."""
        return self._engine.options.disjoint

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for a loader's state, except the seed, as plain values."""
        settings = self._engine.settings | {"subgraph_type": self._options["subgraph_type"]}
        # the seed is a setting of the loader
        del settings["sampler_seed"]
        # from the seeds outward
        fanouts = settings.pop("fanouts")
        by_type = fanouts if self.csc.is_typed else {"": fanouts}
        settings["num_neighbors"] = {each: own[::-1] for each, own in by_type.items()}
        return dict(plain_settings(settings))

    def sample(self, seeds: Mapping[str, Tensor], epoch: int, times: Any = None) -> HeteroBatch:
        """Sample the subgraph of seeds; the edges are given by their positions in `csc`.

        Args:
            seeds: node ids on the host, by node type.
            epoch: in [0, 2**32).
            times: times of the seeds, as for `gcnzc.Sampler.sample`.
        """
        return self._engine.sample(seeds, epoch, times)

    def num_sampled(self, batch: HeteroBatch) -> dict[str, dict[Any, list[int]]]:
        """Return PyG's numbers of sampled nodes and edges by type and hop, if they are known."""
        if batch.num_edges is None:
            return {}
        hops = self.num_hops
        nodes = {each: list(own)[: hops + 1] for each, own in batch.num_nodes.items()}
        edges = {each: list(own)[:hops] for each, own in batch.num_edges.items()}
        return {"num_sampled_nodes": nodes, "num_sampled_edges": edges}

    def sample_from_nodes(self, index: Any, **kwargs: Any) -> Any:
        """Sample the subgraph of nodes, for PyG's `NodeLoader`."""
        return _sampler.neighbor_sampler.node_sample(index, self._sample_output)

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        """Sample the subgraph of the ends of edges, for PyG's `LinkLoader`."""
        graph, has_types = self.csc.graph, self.csc.is_typed
        sizes = {each: graph.nodes(each).num_nodes for each in graph.node_types}
        times = {each: graph.nodes(each).time for each in graph.node_types}
        times = {each: own for each, own in times.items() if own is not None}
        return _sampler.neighbor_sampler.edge_sample(
            index,
            self._sample_output,
            sizes if has_types else sizes[NODE],
            self.disjoint,
            times or None if has_types else times.get(NODE),
            neg_sampling,
        )

    def _sample_output(self, seeds: Any, times: Any) -> Any:
        """Return a subgraph as PyG's output of a sampler, of typed or untyped seeds."""
        has_types, epoch = self.csc.is_typed, int(torch.randint(2**32, ()))
        batch = self.sample(seeds if has_types else {NODE: seeds}, epoch, times)
        edges = {each: batch.edge_index(each) for each in batch.indices}
        ids = batch.edge_ids or {}
        found: dict[str, Any] = {
            "node": batch.nodes,
            "row": {each: own[0] for each, own in edges.items()},
            "col": {each: own[1] for each, own in edges.items()},
            "edge": {e: None if e not in ids else self.csc.ids(e, ids[e]) for e in batch.indices},
            "batch": batch.subgraphs,
            **self.num_sampled(batch),
        }
        if has_types:
            return _sampler.HeteroSamplerOutput(**found)
        # the only value of each
        plain = {name: own and next(iter(own.values())) for name, own in found.items()}
        return _sampler.SamplerOutput(**plain)


def _fanouts(csc: CscGraph, given: Any) -> tuple[Any, int]:
    """Return the numbers of neighbours for a sampler, and the number of hops."""
    if isinstance(given, _sampler.base.NumNeighbors):
        default = given.default
        given = given.values
        if default is not None:
            given = {**given, DEFAULT: default}
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 0:
        # a sampler needs at least one hop: without any, one hop of no neighbours
        return [0], 0
    if isinstance(given, Mapping) and not csc.is_typed:
        raise ValueError(f"num_neighbors is {describe(given)}, but a Data has no edge types")
    if isinstance(given, Mapping):
        # PyG also writes edge types without the relation "to"
        given = {
            (key[0], "to", key[1]) if isinstance(key, tuple) and len(key) == 2 else key: own
            for key, own in given.items()
        }
    found = check_type_fanouts(csc.graph, given, "num_neighbors")
    return given, len(next(iter(found.values()), ()))
