"""Neighbour sampling with PyG's semantics: each node is expanded once."""

from collections.abc import Sequence

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.sample import Sample, Workspace, sample
from gcnzc.sampling.neighbor import check_seeds
from gcnzc.system.arguments import check_fanouts, check_seed


class Draw:
    """Draws neighbourhoods; any number of threads may do so at once.

    Args:
        graph: on the host.
        num_neighbors: neighbours kept at each hop, that of the seeds first; -1 keeps all. Without
            any number only the seeds are drawn.
        seed: the key of every choice, an integer of 64 bits.

    Raises:
        ValueError: numbers of neighbours that mean nothing, or a seed of more bits.
    """

    def __init__(self, graph: Graph, num_neighbors: Sequence[int], seed: int) -> None:
        self.graph = graph
        self.num_hops = len(num_neighbors)
        # the sampler makes one hop at least: without any, one that draws nothing
        self.num_neighbors = check_fanouts("num_neighbors", num_neighbors or [0])
        self._seed = check_seed("seed", seed)
        # one for each thread that samples at this moment; append and pop need no lock
        self._idle: list[Workspace] = []

    def __call__(self, seeds: Tensor, epoch: int, pool: Pool) -> Sample:
        """The neighbourhood of `seeds`, in memory of `pool`.

        Args:
            seeds: (S,) int64 ids of nodes, on the host.
            epoch: in [0, 2**32).
            pool: lends the memory.

        Raises:
            ValueError: a seed that is no node.
        """
        workspace = self._idle.pop() if self._idle else Workspace()
        drawn = sample(
            self.graph.indptr,
            self.graph.indices,
            check_seeds("seeds", seeds, self.graph.num_nodes),
            self.num_neighbors,
            self._seed,
            epoch,
            edge_ids=True,
            once=True,
            workspace=workspace,
            empty=pool.empty,
        )
        self._idle.append(workspace)
        return drawn
