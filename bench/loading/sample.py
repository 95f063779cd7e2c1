"""Measure neighbour sampling on one thread: minibatches per second and memory, by graph size.

    python -m bench.loading.sample [ROUNDS]

Two lookup tables from global to local node ids are compared: direct (one slot per node) and hashed
(`kernels/sample/__init__.py`). The graphs have 1 M to 111 M nodes; the largest is the size of
ogbn-papers100M. In every graph only 1 M nodes have edges, 20 M with a power-law degree
distribution, so that the minibatches have the same size on all graphs: 1024 seeds and fan-outs 15,
10, 5. The measurements of both tables are interleaved, on the same seeds.
"""

import sys
from functools import partial

import numpy as np
import torch

from bench.harness import record, side_by_side
from bench.loading.loader import BATCH_SIZE, ROOT, generated_graph
from gcnzc.kernels import sample
from gcnzc.kernels.buffers import Pool

FANOUTS = [5, 10, 15]  # from the seeds outward
GRAPH_NODES = [10**6, 16 * 10**6, 111 * 10**6]


def main() -> None:
    """Measure both tables on every graph size."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    folder = generated_graph(ROOT / "data" / "bench")
    indptr, indices, seeds = (
        np.load(folder / f"{name}.npy") for name in ("indptr", "indices", "seeds")
    )
    torch.set_num_threads(1)
    for num_nodes in GRAPH_NODES:
        ids = np.sort(np.random.default_rng(0).choice(num_nodes, len(seeds), replace=False))
        degrees = np.zeros(num_nodes, np.int64)
        degrees[ids] = np.diff(indptr)
        graph = (
            torch.from_numpy(np.concatenate([[0], degrees.cumsum()])),
            torch.from_numpy(ids.astype(np.int32)[indices]),
        )
        del degrees
        measure(num_nodes, graph, torch.from_numpy(ids[seeds]), rounds)


def measure(
    num_nodes: int, graph: tuple[torch.Tensor, torch.Tensor], seeds: torch.Tensor, rounds: int
) -> None:
    """Time both tables on one graph."""
    workspaces = {"direct": sample.Workspace(), "hashed": sample.Workspace()}
    pool, counts = Pool(), dict.fromkeys(workspaces, 0)
    kept = sample.DIRECT_NODES

    def batch(table: str) -> None:
        sample.DIRECT_NODES = num_nodes if table == "direct" else 0
        at = counts[table] % (len(seeds) // BATCH_SIZE)
        counts[table] += 1
        sample.sample(
            *graph,
            seeds[at * BATCH_SIZE : (at + 1) * BATCH_SIZE],
            FANOUTS,
            0,
            0,
            workspace=workspaces[table],
            empty=pool.empty,
        )

    timings = side_by_side({table: partial(batch, table) for table in workspaces}, rounds)
    sample.DIRECT_NODES = kept
    for table, timing in timings.items():
        space = workspaces[table]
        table_bytes = space.direct_table.nbytes + (
            space.hash_table.nbytes if table == "hashed" else 0
        )
        record(
            "sample",
            {"table": table, "graph_nodes": num_nodes, "batch_size": BATCH_SIZE},
            timing,
            batches_per_s=1 / timing.median_s,
            table_bytes=table_bytes,
        )


if __name__ == "__main__":
    main()
