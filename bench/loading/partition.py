"""Partition graphs, and count the edges between parts and the nodes that a worker reads.

    python -m bench.loading.partition GRAPH.npz ...

For each graph and number of workers, a record has the fraction of the edges that connect different
parts of `gcnzc.graph.partition_graph` and of random parts, and the fraction of the nodes that the
minibatches of one epoch of worker 0 contain, with the seed orders local and shuffled. Nothing is
timed.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import gcnzc
from bench.harness import record
from gcnzc.graph import cut_fraction, partition_graph

WORKERS = [2, 4, 8]
FANOUTS, BATCH_SIZE = [15, 10], 256


def main() -> None:
    """Record all graphs of the command line."""
    for path in map(Path, sys.argv[1:]):
        data = gcnzc.load(path)
        for workers in WORKERS:
            _record_graph(data, workers)


def _record_graph(data: gcnzc.Dataset, workers: int) -> None:
    graph, seeds = data.graph, data.split["train"]
    parts = partition_graph(graph, workers, seeds)
    of_seeds = torch.bincount(parts[seeds], minlength=workers)
    shuffled = np.random.default_rng(0).permutation(graph.num_nodes) % workers
    record(
        "partition",
        {"graph": data.name, "workers": workers},
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        cut_percent=100 * cut_fraction(graph, parts),
        random_cut_percent=100 * cut_fraction(graph, shuffled),
        fewest_seeds=int(of_seeds.min()),
        most_seeds=int(of_seeds.max()),
        largest_part_percent=100 * int(parts.bincount().max()) / graph.num_nodes,
        read_percent=_read_percent(data, workers, seed_order="local", parts=parts),
        shuffled_read_percent=_read_percent(data, workers),
    )


def _read_percent(data: gcnzc.Dataset, workers: int, **order: object) -> float:
    """Return the percentage of the nodes that one epoch of worker 0 reads."""
    loader = gcnzc.Loader(
        *(data.graph, None, data.split["train"], FANOUTS, BATCH_SIZE),
        world_size=workers,
        threads=1,
        **order,
    )
    nodes = torch.cat([batch.nodes for batch in loader]).unique()
    return 100 * len(nodes) / data.graph.num_nodes


if __name__ == "__main__":
    main()
