"""Sample the neighbourhoods of seeds as minibatches of blocks."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample import MAX_DEGREE, Workspace
from gcnzc.kernels.sample import sample as draw
from gcnzc.kernels.sample.exclude import ExcludedEdges
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


class Sampler:
    """Draws neighbourhoods of seeds; any number of threads may sample at once.

    Neighbours are drawn uniformly without replacement. A node with no more neighbours than its
    fan-out keeps them all, in stored order. What is drawn for a node depends on the seed, the epoch
    and the hop alone, and not on the batch, the threads, the workers or the device.

    Args:
        graph: on the host.
        fanouts: neighbours kept at each layer, input layer first, as in DGL: the last number is for
            the seeds. -1 keeps all.
        seed: the key of every choice, an integer of 64 bits.
        edge_ids: also give each edge's position in `graph.indices`.

    Attributes:
        pool: lends the memory of batches, which is on the host; a loader may put another here, from
            which copies to a GPU are fast.

    Raises:
        TypeError: an argument of another type.
        ValueError: no fan-outs, one below -1 or above 2**31 - 1, a seed of more than 64 bits, or a
            graph with a node of 2**32 neighbours.
    """

    def __init__(
        self, graph: Graph, fanouts: Sequence[int], seed: int = 0, edge_ids: bool = False
    ) -> None:
        check_graph(graph)
        self.graph = graph
        self.fanouts = check_fanouts("fanouts", fanouts)
        self.seed = check_seed("seed", seed)
        self.edge_ids = check_flag("edge_ids", edge_ids)
        _check_degrees(graph)
        self.pool = Pool()
        # one for each thread that samples at this moment; append and pop need no lock
        self._idle: list[Workspace] = []

    def __getstate__(self) -> dict[str, Any]:
        # a copy begins with memory of its own
        return self.__dict__ | {"pool": Pool(), "_idle": []}

    @property
    def settings(self) -> dict[str, Any]:
        """What decides which neighbours are drawn, by name, for the state of a loader."""
        return {"fanouts": list(self.fanouts), "sampler_seed": self.seed}

    def sample(self, seeds: IdsLike, epoch: int, without: ExcludedEdges | None = None) -> Batch:
        """The neighbourhood of `seeds`, without features and labels.

        Args:
            seeds: (S,) int64 or int32 ids, on the host: a tensor, an array or a list. One that
                occurs twice is computed twice, with the same neighbours, as in DGL; edges lead to
                its first place.
            epoch: in [0, 2**32); other epochs draw other neighbours.
            without: edges of the seeds' columns that are never drawn, see
                `gcnzc.kernels.sample.exclude`; the seeds are then all different.

        Returns:
            The batch, in memory that is used again once nothing refers to it.

        Raises:
            TypeError: seeds or epoch are of another type.
            ValueError: a seed that is not a node, or an epoch out of range.
        """
        begin = time.perf_counter()
        epoch = check_epoch("epoch", epoch)
        seeds = check_seeds("seeds", seeds, self.graph.num_nodes)
        workspace = self._idle.pop() if self._idle else Workspace()
        drawn = draw(
            self.graph.indptr,
            self.graph.indices,
            seeds,
            self.fanouts[::-1],
            self.seed,
            epoch,
            edge_ids=self.edge_ids,
            excluded=without,
            workspace=workspace,
            empty=self.pool.empty,
        )
        self._idle.append(workspace)
        blocks = tuple(
            Block(
                drawn.indptr[hop],
                drawn.indices[hop],
                num_src=drawn.num_nodes[hop + 1],
                num_dst=drawn.num_nodes[hop],
                nodes=drawn.nodes[: drawn.num_nodes[hop + 1]],
                graph=self.graph,
                edge_ids=drawn.edge_ids[hop] if drawn.edge_ids else None,
            )
            for hop in reversed(range(len(self.fanouts)))
        )
        seconds = time.perf_counter() - begin
        return Batch(drawn.nodes, drawn.nodes[: len(seeds)], blocks, times={"sample_s": seconds})


def check_graph(graph: object) -> None:
    """Check that `graph` is a `gcnzc.Graph`.

    Raises:
        TypeError: it is not.
    """
    check_kind(
        "graph",
        graph,
        Graph,
        "Graph.from_edges, from_csc, from_csr, from_dgl or from_pyg makes one",
    )


def check_seeds(name: str, seeds: IdsLike, num_nodes: int) -> Tensor:
    """Return ids of nodes, a tensor, an array or a list, as an int64 vector on the host.

    Raises:
        TypeError: they are nothing of these.
        ValueError: not a vector of int32 or int64 on the host, or one outside the graph.
    """
    ids = as_ids(name, seeds, "ids of nodes; a mask becomes ids by .nonzero().flatten()")
    if ids.device.type != "cpu":
        raise ValueError(f"{name} is {describe(seeds)} on {ids.device}\n\nhint: {name}.cpu()")
    check_range(name, ids, num_nodes, "the graph has {} nodes", "ids of nodes")
    return ids


def check_range(name: str, ids: Tensor, count: int, has: str, what: str) -> None:
    """Check that numbers are from 0 to below `count`.

    Args:
        name: of the argument.
        ids: on the host.
        count: how many there are.
        has: what says so, with {} for the count.
        what: the numbers are.

    Raises:
        ValueError: one is not.
    """
    if len(ids) == 0:
        return
    least, greatest = (int(bound) for bound in ids.aminmax())
    if least < 0 or greatest >= count:
        raise ValueError(
            f"{name} reach from {least} to {greatest}, but {has.format(count)}\n\n"
            f"hint: {name} are {what}, counted from 0"
        )


def _check_degrees(graph: Graph) -> None:
    # looking at every degree of a large graph takes a second, so only where one can be too large
    if graph.num_edges > MAX_DEGREE and int(graph.in_degrees().max()) > MAX_DEGREE:
        raise ValueError(f"a node has more than {MAX_DEGREE} in-edges, and cannot be sampled")
