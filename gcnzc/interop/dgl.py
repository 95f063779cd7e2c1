"""DGL: the one door to it, and its neighbour sampler as a second engine.

DGL 2.1.0, the newest wheel, brings a part called GraphBolt that is compiled for single versions of
torch, up to 2.2.1, and `import dgl` fails where that part does. Nothing else in DGL needs it, so
`import_dgl` lets DGL find an empty module of that name where GraphBolt cannot work.
"""

import importlib.util
import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gcnzc.graph import Graph
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.sampler import Batch, Block, demand_fanouts, demand_seeds

GRAPHBOLT = "dgl.graphbolt"
INSTALL = (
    "pip install 'dgl==2.1.0'"
    if sys.version_info < (3, 13)
    else "DGL has no wheel for Python 3.13 and later: use Python 3.12, or gcnzc's own sampler"
)


def import_dgl() -> Any:
    """The module `dgl`, beside any version of torch.

    What DGL warns of while it is imported is not shown, and its file of settings is not written.
    Where GraphBolt works it is imported as usual; elsewhere `dgl.graphbolt` is an empty module.

    Raises:
        RuntimeError: DGL is not installed, or does not import for another reason.
    """
    if "dgl" not in sys.modules and importlib.util.find_spec("dgl") is None:
        raise RuntimeError(f"DGL is not installed\n\nhint: {INSTALL}")
    try:
        with warnings.catch_warnings(), _backend_named(), _graphbolt_where_it_works():
            warnings.simplefilter("ignore")
            import dgl
    except (ImportError, OSError) as error:
        raise RuntimeError(f"DGL does not import: {error}\n\nhint: {INSTALL}") from error
    if dgl.__version__.startswith("0."):
        # pip takes 0.1.3 where no newer wheel fits
        raise RuntimeError(f"DGL {dgl.__version__} is too old\n\nhint: {INSTALL}")
    return dgl


def graphbolt_works() -> bool:
    """Whether DGL's GraphBolt is compiled for this torch, and has the torchdata that it needs."""
    package, torchdata = (importlib.util.find_spec(name) for name in ("dgl", "torchdata"))
    if package is None or torchdata is None:
        return False
    version = torch.__version__.partition("+")[0]
    library = Path("graphbolt") / f"libgraphbolt_pytorch_{version}.so"
    return _holds(package, library) and _holds(torchdata, Path("datapipes"))


def _holds(package: Any, path: Path) -> bool:
    return any((Path(folder) / path).exists() for folder in package.submodule_search_locations)


@contextmanager
def _graphbolt_where_it_works() -> Iterator[None]:
    if "dgl" in sys.modules or graphbolt_works():
        yield
        return

    def refuse(name: str) -> Any:
        raise AttributeError(
            f"{GRAPHBOLT}.{name}: GraphBolt is not made for torch {torch.__version__}"
        )

    stub = ModuleType(GRAPHBOLT, "GraphBolt does not work here; gcnzc put this in its place.")
    stub.__getattr__ = refuse  # type: ignore[method-assign]
    sys.modules[GRAPHBOLT] = stub
    try:
        yield
    except BaseException:
        del sys.modules[GRAPHBOLT]
        raise
    sys.modules["dgl"].graphbolt = stub  # type: ignore[attr-defined]


@contextmanager
def _backend_named() -> Iterator[None]:
    # without it DGL writes its choice into the home folder, and prints that it did
    named = os.environ.get("DGLBACKEND")
    os.environ["DGLBACKEND"] = named or "pytorch"
    try:
        yield
    finally:
        if named is None:
            del os.environ["DGLBACKEND"]


@lru_cache(maxsize=1)
def _thread(pid: int) -> ThreadPoolExecutor:
    # DGL's random numbers belong to threads, in the order in which these first drew, so one thread
    # draws all of ours. Keyed by process: threads do not survive a fork.
    executor = ThreadPoolExecutor(1, thread_name_prefix="gcnzc-dgl")
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
        self.graph = graph
        self.fanouts = demand_fanouts(fanouts)
        self.seed = seed
        self._key = split_key(seed)
        self._dgl = import_dgl()
        self._sampler = self._dgl.dataloading.NeighborSampler(list(self.fanouts))
        offsets, sources = graph.indptr, graph.indices.long()
        self._graph = self._dgl.graph(("csc", (offsets, sources, [])), num_nodes=graph.num_nodes)

    def sample(self, seeds: Tensor, epoch: int) -> Batch:
        """The neighbourhood of `seeds`, without features and labels.

        Args:
            seeds: (S,) int64 or int32 ids, all different, on the host.
            epoch: in [0, 2**32).

        Raises:
            ValueError: a seed that is not a node, or that occurs twice, which DGL would give wrong
                blocks for; or an epoch out of range.
        """
        seeds = demand_seeds(seeds, self.graph.num_nodes)
        if len(seeds.unique()) < len(seeds):
            raise ValueError("a seed occurs twice in a batch\n\nhint: seeds.unique()")
        if not 0 <= epoch < 2**32:
            raise ValueError(f"epoch {epoch} is outside 0 to 2**32 - 1")
        return _thread(os.getpid()).submit(self._sample, seeds, epoch).result()

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
