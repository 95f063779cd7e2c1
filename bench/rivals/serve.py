"""Serve the timings of one system, from a process in the Python environment of that system.

Requests and responses are lines of JSON on stdin and stdout. Only one process works at a time: the
others wait for their next request, without active threads or workers.
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

# samples minibatches of consecutive seeds, and yields the numbers of nodes and edges of each
Configuration = Callable[[np.ndarray], Iterator[tuple[int, int]]]


def arrays(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return offsets (N + 1,) int64, sources (E,) int32 and features (N, D) float32."""
    return tuple(
        np.load(Path(folder) / f"{name}.npy") for name in ("indptr", "indices", "features")
    )


def serve(make: Callable[[str], tuple[dict[str, Configuration], dict[str, str]]]) -> None:
    """Respond to requests until stdin ends.

    Args:
        make: function from the folder of the graph to the configurations by name, and to the
            versions of the libraries by name.
    """
    # libraries may print: send their output to stderr, and responses to the original stdout
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    configurations, versions = make(sys.argv[1])
    response = {"configurations": list(configurations), "versions": versions}
    print(json.dumps(response), file=responses, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seeds = np.load(request["seeds"])[request["begin"] : request["end"]]
        batches = configurations[request["configuration"]](seeds)
        print(json.dumps(time_batches(batches, request["skip"])), file=responses, flush=True)


def time_batches(batches: Iterator[tuple[int, int]], skip: int) -> dict[str, float]:
    """Return the seconds from batch number `skip` to the last one, and the mean batch sizes.

    The first `skip` batches are not timed, since threads and workers start during them.
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
