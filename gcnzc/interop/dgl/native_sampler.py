"""DGL's neighbour sampler behind gcnzc's interface of samplers."""

import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import check_graph, check_seeds
from gcnzc.system.arguments import IdsLike, check_epoch, check_fanouts, check_seed
from gcnzc.system.threads import lower_priority


@lru_cache(maxsize=1)
def sampling_thread(pid: int) -> ThreadPoolExecutor:
    """The one thread of process `pid`, the caller's own, in which DGL draws random numbers."""
    # DGL's random numbers belong to threads, in the order in which these first drew, so one thread
    # draws all of ours. Keyed by process: threads do not survive a fork.
    executor = ThreadPoolExecutor(1, thread_name_prefix="gcnzc-dgl", initializer=lower_priority)
    # which is for another OpenMP than torch's, if DGL brings one
    executor.submit(import_dgl().utils.set_num_threads, 1).result()
    return executor


class DglSampler:
    """`dgl.dataloading.NeighborSampler` in our form, for the place of `gcnzc.Sampler`.

    The graph is handed to DGL with int64 ids, since DGL's blocks are corrupt on int32 graphs from
    the second batch on; 8 B an edge are copied where ours are int32. The order of nodes is DGL's:
    the seeds first, and every block's destinations before its other sources, as in ours.

    Batches are the same for the same seed, epoch and seeds, in any order, and in every process in
    which no other thread drew random numbers by DGL before. To that end one thread does all
    sampling of the process; any number of threads may ask.

    Args:
        graph: on the host.
        fanouts: neighbours kept at each layer, input layer first; -1 keeps all.
        seed: an integer of 64 bits.

    Raises:
        ValueError: fan-outs or seed mean nothing.
        RuntimeError: there is no DGL.
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int], seed: int = 0) -> None:
        check_graph(graph)
        self.graph = graph
        self.fanouts = check_fanouts("fanouts", fanouts)
        self.seed = check_seed("seed", seed)
        self._key = split_key(self.seed)
        self._dgl = import_dgl()
        self._sampler = self._dgl.dataloading.NeighborSampler(list(self.fanouts))
        graph.check()  # DGL trusts every number
        offsets, sources = graph.indptr, graph.indices.long()
        self._graph = self._dgl.graph(("csc", (offsets, sources, [])), num_nodes=graph.num_nodes)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides which neighbours are drawn, by name, for the state of a loader."""
        return {"fanouts": list(self.fanouts), "sampler_seed": self.seed, "drawn_by": "dgl"}

    def sample(self, seeds: IdsLike, epoch: int) -> Batch:
        """The neighbourhood of `seeds`, without features and labels.

        Args:
            seeds: (S,) int64 or int32 ids, all different, on the host.
            epoch: in [0, 2**32).

        Raises:
            ValueError: a seed that is not a node, or that occurs twice, which DGL would give wrong
                blocks for; or an epoch out of range.
        """
        seeds = check_seeds("seeds", seeds, self.graph.num_nodes)
        epoch = check_epoch("epoch", epoch)
        if len(seeds.unique()) < len(seeds):
            raise ValueError("a seed occurs twice in a batch\n\nhint: seeds.unique()")
        return sampling_thread(os.getpid()).submit(self._sample, seeds, epoch).result()

    def _sample(self, seeds: Tensor, epoch: int) -> Batch:
        begin_s = time.perf_counter()
        counter = (zlib.crc32(seeds.numpy().tobytes()), len(seeds), 0, epoch)
        word = int(philox4x32_reference(*counter, *self._key)[0])
        self._dgl.seed(word >> 1)  # DGL takes 31 bits
        nodes, _, blocks = self._sampler.sample(self._graph, seeds)
        ours = tuple(self._converted(block, nodes) for block in blocks)
        times = {"sample_s": time.perf_counter() - begin_s}
        return Batch(nodes, nodes[: len(seeds)], ours, times=times)

    def _converted(self, block: Any, nodes: Tensor) -> Block:
        # sources of an inner block are the destinations of the outer one, and these come first
        indptr, indices, order = block.adj_tensors("csc")
        return Block(
            indptr,
            indices.int(),
            num_src=block.num_src_nodes(),
            num_dst=block.num_dst_nodes(),
            nodes=nodes[: block.num_src_nodes()],
            graph=self.graph,
            edge_ids=block.edata[self._dgl.EID][order],
        )
