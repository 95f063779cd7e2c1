"""DGL's neighbour sampler as a sampler of `gcnzc.Loader`."""

import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.interop.dgl.importing import import_dgl
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import check_graph, check_seeds
from gcnzc.system.arguments import IdsLike, check_epoch, check_fanouts, check_seed
from gcnzc.system.threads import use_batch_scheduling

# the thread by process, since threads do not survive a fork
_threads: dict[int, ThreadPoolExecutor] = {}
_lock = ForkSafeLock()


def sampling_thread(pid: int) -> ThreadPoolExecutor:
    """Return the one thread in which DGL samples; `pid` is the caller's process."""
    # DGL has a random generator per thread, seeded by the order in which threads first use it, so
    # all sampling uses one thread.
    with _lock:
        found = _threads.get(pid)
        if found is None:
            found = ThreadPoolExecutor(
                1, thread_name_prefix="gcnzc-dgl", initializer=use_batch_scheduling
            )
            # for the OpenMP library of DGL, which may be another than torch's
            found.submit(import_dgl().utils.set_num_threads, 1).result()
            _threads.clear()
            _threads[pid] = found
        return found


class DglSampler:
    """Samples with `dgl.dataloading.NeighborSampler`, as an alternative to `gcnzc.Sampler`.

    DGL gets the graph with int64 ids, since its blocks are corrupt on int32 graphs from the second
    batch on; int32 ids are copied to int64 (8 B per edge). The order of nodes is that of
    `gcnzc.Sampler`: the seeds first, and in each block the destinations before the other sources.

    Batches depend only on the seed, the epoch and the seed nodes, if no other thread of the process
    has used DGL's random generator before. All sampling of a process runs in one thread, which any
    number of threads may call.

    Args:
        graph: on the host.
        fanouts: number of neighbours sampled at each layer, input layer first; -1 for all.
        seed: a 64-bit integer.

    Raises:
        ValueError: a fanout or the seed is out of range.
        ImportError: DGL is not installed.
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int], seed: int = 0) -> None:
        check_graph(graph)
        self.graph = graph
        self.fanouts = check_fanouts("fanouts", fanouts)
        self.seed = check_seed("seed", seed)
        self._key = split_key(self.seed)
        self._dgl = import_dgl()
        self._sampler = self._dgl.dataloading.NeighborSampler(list(self.fanouts))
        graph.check()  # DGL does not check ids
        offsets, sources = graph.indptr, graph.indices.long()
        self._graph = self._dgl.graph(("csc", (offsets, sources, [])), num_nodes=graph.num_nodes)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the sampled neighbours, for the state of a loader."""
        return {"fanouts": list(self.fanouts), "sampler_seed": self.seed, "drawn_by": "dgl"}

    def sample(self, seeds: IdsLike, epoch: int) -> Batch:
        """Sample the subgraph of `seeds`, without features and labels.

        Args:
            seeds: (S,) int64 or int32 node ids without duplicates, on the host.
            epoch: in [0, 2**32).

        Raises:
            ValueError: a seed is not a node, or occurs twice (DGL would return wrong blocks), or
                the epoch is out of range.
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
        self._dgl.seed(word >> 1)  # DGL's seeds have 31 bits
        nodes, _, blocks = self._sampler.sample(self._graph, seeds)
        converted = tuple(self._to_block(block, nodes) for block in blocks)
        times = {"sample_s": time.perf_counter() - begin_s}
        return Batch(nodes, nodes[: len(seeds)], converted, times=times)

    def _to_block(self, block: Any, nodes: Tensor) -> Block:
        # a block's sources are a prefix of the batch's nodes, since destinations come first
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
