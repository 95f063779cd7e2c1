"""Serve timings of a system from a process in its own environment.

Requests and answers are lines of JSON on stdin and stdout. Only one process works at a time: while
the others wait for their next request they have no threads or workers that do anything.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FANOUTS = [15, 10, 5]  # input layer first
BATCH_SIZE = 1024
COLUMNS = 100

# a way makes batches of consecutive seeds, and yields each one's numbers of nodes and edges
Way = Callable[[np.ndarray], Iterator[tuple[int, int]]]


def arrays(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return offsets (N + 1,) int64, sources (E,) int32 and features (N, D) float32."""
    return tuple(
        np.load(Path(folder) / f"{name}.npy") for name in ("indptr", "indices", "features")
    )


def serve(make: Callable[[str], tuple[dict[str, Way], dict[str, str]]]) -> None:
    """Answer requests until stdin ends.

    Args:
        make: from the folder of the graph to the ways by name, and the versions of what they use.
    """
    # libraries may print; only answers go to the real stdout
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ways, versions = make(sys.argv[1])
    print(json.dumps({"ways": list(ways), "versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seeds = np.load(request["seeds"])[request["begin"] : request["end"]]
        answer = timed(ways[request["way"]](seeds), request["skip"])
        print(json.dumps(answer), file=answers, flush=True)


def timed(batches: Iterator[tuple[int, int]], skip: int) -> dict[str, float]:
    """Return the seconds from batch `skip` to the last one, and the mean sizes of all batches.

    The first batches pay for the start of threads and workers.
    """
    arrived_s, sizes = [], []
    for size in batches:
        arrived_s.append(time.perf_counter())
        sizes.append(size)
    nodes, edges = np.mean(sizes, axis=0)
    timed_batches = len(arrived_s) - skip
    return {
        "seconds": arrived_s[-1] - arrived_s[skip - 1],
        "batches": timed_batches,
        "nodes": float(nodes),
        "edges": float(edges),
    }
