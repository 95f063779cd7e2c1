"""Sample multi-hop neighbourhoods of seed nodes as minibatches of blocks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph, damage_error
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample import HopSampler, Options
from gcnzc.kernels.sample.graph import InvalidColumn, one_type_tables
from gcnzc.sampling.batch import Batch, Block
from gcnzc.system.arguments import (
    IdsLike,
    as_ids,
    check_epoch,
    check_fanouts,
    check_flag,
    check_kind,
    check_seed,
    describe,
)


class SamplerProtocol(Protocol):
    """A sampler that `gcnzc.Loader` accepts: `gcnzc.Sampler`, `LinkSampler` or another engine.

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

    Neighbours are sampled uniformly without replacement. A node with at most `fanout` in-edges
    keeps all of them, in stored order. The sampled neighbours of a node depend only on the graph,
    the random seed, the epoch, the hop, the fanout and, for seed nodes, `without`, and not on the
    minibatch, threads, ranks or device.

    Args:
        graph: on the host.
        fanouts: number of neighbours at each layer, input layer first, as in DGL: the last one is
            for the seeds. -1 takes all neighbours.
        seed: random seed, a 64-bit integer.
        edge_ids: also return the positions in `graph.indices` of the edges of each block.

    Attributes:
        pool: buffer pool for minibatches, on the host. A loader for a GPU replaces it by a pool of
            page-locked memory, so that copies to the GPU are fast.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no fanouts, a fanout below -1 or above 2**31 - 1, a seed of more than 64 bits,
            or a node with 2**32 in-edges or more.
    """

    def __init__(
        self, graph: Graph, fanouts: Sequence[int], seed: int = 0, edge_ids: bool = False
    ) -> None:
        check_graph(graph)
        self.graph = graph
        self.fanouts = check_fanouts("fanouts", fanouts)
        self.seed = check_seed("seed", seed)
        self.edge_ids = check_flag("edge_ids", edge_ids)
        self.pool = Pool()
        self._hops = self._make_hops()

    def _make_hops(self) -> HopSampler:
        options = Options(
            tuple((fanout,) for fanout in reversed(self.fanouts)),
            once=False,
            edge_ids=self.edge_ids,
            own_loops=True,
        )
        tables = one_type_tables(self.graph.indptr, self.graph.indices, self.seed)
        return HopSampler(tables, options)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has its own buffer pool and workspaces, and its arrays have other addresses
        return self.__dict__ | {"pool": None, "_hops": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.pool, self._hops = Pool(), self._make_hops()

    @property
    def settings(self) -> dict[str, Any]:
        """Options that determine the sampled neighbours, for the loader's state dict."""
        return {"fanouts": list(self.fanouts), "sampler_seed": self.seed}

    def sample(self, seeds: IdsLike, epoch: int, without: IdsLike | None = None) -> Batch:
        """Sample the neighbourhood of `seeds`.

        Args:
            seeds: (S,) int64 or int32 node ids, on the host: a tensor, an array or a list. As in
                DGL, a seed that occurs twice gets two rows with the same neighbours; edges whose
                source is that seed refer to its first row, except for self loops, which refer to
                the row of their destination.
            epoch: in [0, 2**32); the sampled neighbours differ between epochs.
            without: positions in `graph.indices` of edges that are not sampled at any hop.

        Returns:
            A minibatch without features and labels. Its buffers return to `pool` when nothing
            refers to them any more.

        Raises:
            TypeError: seeds or epoch have the wrong type.
            ValueError: a seed is not a node id, `without` has a position that is not an edge, the
                epoch is out of range, or the graph has an invalid offset or source, see
                `Graph.check`.
        """
        epoch = check_epoch("epoch", epoch)
        seeds = check_seeds("seeds", seeds, self.graph.num_nodes)
        excluded = None if without is None else self._check_edges(without)
        return self.sample_checked(seeds, epoch, excluded)

    def sample_checked(self, seeds: Tensor, epoch: int, excluded: Tensor | None) -> Batch:
        """Return what `sample` does, for arguments that need no check.

        Args:
            seeds: (S,) int64 node ids, contiguous, on the host.
            epoch: in [0, 2**32).
            excluded: ascending positions in `graph.indices`, without duplicates.
        """
        begin_s = time.perf_counter()
        by_type = {} if excluded is None else {0: excluded}
        with invalid_graph_errors(self.graph):
            sampled = self._hops.sample(
                [(0, seeds)], epoch, excluded=by_type, empty=self.pool.empty
            )
        (nodes,), (indptr,), (indices,) = sampled.nodes, sampled.indptr, sampled.indices
        num_nodes = [own for (own,) in sampled.num_nodes]
        num_edges = [own for (own,) in sampled.num_edges]
        sizes = [after - before for before, after in pairwise(num_edges)]
        ids: Sequence[Tensor | None] = [None] * len(sizes)
        if sampled.edge_ids:
            ids = sampled.edge_ids[0].split_with_sizes(sizes)
        columns = indptr.split_with_sizes([num_dst + 1 for num_dst in num_nodes[:-1]])
        hops = zip(columns, indices.split_with_sizes(sizes), pairwise(num_nodes), ids, strict=True)
        blocks = [
            Block(offsets, sources, num_src, num_dst, nodes[:num_src], self.graph, edge_ids)
            for offsets, sources, (num_dst, num_src), edge_ids in hops
        ]
        blocks.reverse()
        sample_s = time.perf_counter() - begin_s
        times = {"sample_s": sample_s}
        return Batch(nodes, nodes[: num_nodes[0]], tuple(blocks), times=times)

    def _check_edges(self, edges: IdsLike) -> Tensor:
        positions = as_ids("without", edges, "positions in graph.indices").cpu()
        reason, meaning = "the graph has {} edges", "positions in graph.indices"
        check_range("without", positions, self.graph.num_edges, reason, meaning)
        # NumPy's sort is several times as fast as torch's in one thread
        return torch.from_numpy(np.unique(positions.numpy()))


@contextmanager
def invalid_graph_errors(graph: Graph) -> Iterator[None]:
    """Name the file in errors about invalid values of `graph`, if it is mapped from files."""
    try:
        yield
    except InvalidColumn as error:
        raise damage_error(graph, error.array, error.wrong) from None


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
