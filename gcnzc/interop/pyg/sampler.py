"""Neighbour sampling with PyG's semantics: the neighbours of each node are sampled once."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.interop.pyg.hetero_arguments import Sampling
from gcnzc.interop.pyg.hetero_graph import TypedGraph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample import HopSampler, Options, Sample
from gcnzc.kernels.sample.graph import one_type_tables
from gcnzc.loader.state import plain_settings
from gcnzc.sampling.hetero import HeteroSampler
from gcnzc.sampling.neighbor import check_seeds, invalid_graph_errors
from gcnzc.system.arguments import check_fanouts, check_seed


class PygSampler:
    """Samples subgraphs in which each node occurs once; several threads may call it at once.

    Args:
        graph: on the host.
        num_neighbors: number of neighbours sampled at each hop, first that of the seeds; -1 for
            all. If empty, a subgraph has only the seeds.
        seed: random seed, which determines all random choices; a 64-bit integer.

    Raises:
        ValueError: a number of neighbours is below -1, or `seed` has more than 64 bits.
    """

    def __init__(self, graph: Graph, num_neighbors: Sequence[int], seed: int) -> None:
        self.graph = graph
        self.num_hops = len(num_neighbors)
        # a sampler has at least one hop: without any, one hop of no neighbours
        fanouts = check_fanouts("num_neighbors", num_neighbors or [0])
        tables = one_type_tables(graph.indptr, graph.indices, check_seed("seed", seed))
        options = Options(tuple((fanout,) for fanout in fanouts), own_loops=True)
        self._hops = HopSampler(tables, options)

    def __call__(self, seeds: Tensor, epoch: int, pool: Pool) -> Sample:
        """Sample the subgraph of `seeds`, in memory of `pool`.

        Args:
            seeds: (S,) int64 node ids, on the host.
            epoch: in [0, 2**32).
            pool: allocates the memory.

        Raises:
            ValueError: a seed is not a node.
        """
        seeds = check_seeds("seeds", seeds, self.graph.num_nodes)
        with invalid_graph_errors(self.graph):
            return self._hops.sample([(0, seeds)], epoch, empty=pool.empty)


def make_sampler(typed: TypedGraph, sampling: Sampling, seed: int) -> HeteroSampler:
    """Return the sampler of a heterogeneous graph."""
    return HeteroSampler(
        typed.graph,
        sampling.num_neighbors,
        seed=seed,
        replace=sampling.replace,
        weighted=sampling.weighted,
        disjoint=sampling.disjoint,
        temporal=sampling.temporal,
        time=typed.time or "both",
        subgraph_type=sampling.subgraph_type,
    )


def settings_of(sampler: HeteroSampler, sampling: Sampling) -> dict[str, Any]:
    """Return the settings of a sampler for a loader's state, except the seed, as plain values."""
    settings = sampler.settings | {"subgraph_type": sampling.subgraph_type}
    # the seed is a setting of the loader
    del settings["sampler_seed"]
    return dict(plain_settings(settings))
