"""Measure the time and the memory of generating a graph and of building its CSC.

Each case runs in a process of its own, so that its peak of memory is its own:

    python -m bench.data.build                    all cases, recorded in results/build.jsonl
    python -m bench.data.build --edges 1000000    the same on fewer edges
    python -m bench.data.build --only generate    those whose way has this word

`peak_bytes` of a build is what was resident at most while it ran, less what was resident before,
when the edge list (two int64 arrays) was there already: so it counts the result, all that lies
beside it, and not the list. `peak_over_result` divides it by the bytes of `indptr` and `indices`.
Two ways are there to compare with: a copy of the edge list (no way of building can be faster than
reading the edges and writing as many), and scipy's conversion of its COO matrix.
Of `generate` everything that comes to be resident counts while the edges go by in chunks. `make` is
the same with labels, features, the best possible accuracy and files in OGB's layout; resident are
then also the pages of the files that it maps, which the system may take back. `edges_per_s` counts
the edges of the list, each of which is used in both directions later.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch

from bench.harness import Timing, measure, record
from gcnzc.datasets.generate import Shape, make, planted, rmat
from gcnzc.graph.graph import Graph

CALLS = 3


def main() -> None:
    """Run all cases, or in a process of its own the one that is told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--only", default="", help="a part of the way's name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run(**json.loads(args.case))))
        return
    for case in cases(args.edges):
        if args.only not in case["way"]:
            continue
        words = [sys.executable, "-m", "bench.data.build", "--case", json.dumps(case)]
        told = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        timing = Timing(**told.pop("timing"))
        record("build", case, timing, edges_per_s=case["edges"] / timing.median_s, **told)


def cases(num_edges: int) -> list[dict[str, Any]]:
    """Return the cases to measure: a way of building, and a graph."""
    nodes = {"uniform": num_edges // 100, "rmat": num_edges // 100, "sparse": num_edges}
    builds = [
        {"way": way, "graph": graph, "nodes": nodes[graph], "edges": num_edges}
        for way, graph in [
            ("copy", "rmat"),
            ("scipy", "rmat"),
            ("build", "uniform"),
            ("build", "rmat"),
            ("build", "sparse"),
            ("build without duplicates", "rmat"),
            ("build in both directions", "rmat"),
            ("build from CSR", "rmat"),
            ("check", "rmat"),
        ]
    ]
    generates = [
        {"way": way, "graph": graph, "nodes": num_edges // 10, "edges": num_edges, "threads": count}
        for way, graph in [("generate", "rmat"), ("generate", "planted")]
        for count in (1, 2)
    ]
    writes = [
        {"way": "make", "graph": graph, "nodes": num_edges // 25, "edges": num_edges, "threads": 2}
        for graph in ("rmat", "planted")
    ]
    return [*builds, *generates, *writes]


def run(way: str, graph: str, nodes: int, edges: int, threads: int = 2) -> dict[str, Any]:
    """Time one case, after a small one that compiles what it needs."""
    torch.set_num_threads(threads)
    prepare = generating if threads_matter(way) else building
    prepare(way, graph, 1000, 10_000, threads)()
    deed = prepare(way, graph, nodes, edges, threads)
    before = forget_peak()
    result_bytes = deed()
    peak_bytes = resident("VmHWM") - before
    timing = measure(deed, calls=CALLS, warmup=0)
    told = {"timing": asdict(timing), "peak_bytes": peak_bytes}
    if result_bytes:
        told["peak_over_result"] = peak_bytes / result_bytes
    return told


def threads_matter(way: str) -> bool:
    """Whether the way makes edges, and does not begin with a list of them."""
    return way in ("generate", "make")


def building(way: str, graph: str, nodes: int, edges: int, threads: int) -> Callable[[], int]:
    """Return a function that builds a graph from an edge list and returns its bytes."""
    src, dst = edge_list(graph, nodes, edges)

    def size_of(built: Graph) -> int:
        return built.indptr.nbytes + built.indices.nbytes

    if way == "copy":
        return lambda: sum(end.nbytes for end in [src.copy(), dst.copy()])
    if way == "scipy":
        ones = np.ones(edges, np.int8)
        pairs = src.astype(np.int32), dst.astype(np.int32)

        def convert() -> int:
            matrix = scipy.sparse.coo_array((ones, pairs), (nodes, nodes)).tocsc()
            return matrix.indptr.nbytes + matrix.indices.nbytes

        return convert
    if way == "check":
        built = Graph.from_edges(src, dst, nodes)
        return lambda: size_of(Graph(built.indptr, built.indices))
    if way == "build from CSR":
        rows = Graph.from_edges(dst, src, nodes)
        return lambda: size_of(Graph.from_csr(rows.indptr, rows.indices))
    choices: dict[str, Any] = {
        "build": {},
        "build without duplicates": {"duplicates": "remove"},
        "build in both directions": {"bidirected": True},
    }[way]
    return lambda: size_of(Graph.from_edges(src, dst, nodes, **choices))


def generating(way: str, graph: str, nodes: int, edges: int, threads: int) -> Callable[[], int]:
    """Return a function that generates the edges of a graph and discards them."""
    if way == "make":
        shape = Shape(nodes, edges, 16, 40)

        def write() -> int:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                make(Path(folder) / graph, graph, shape, threads=threads)
            return 0

        return write
    generator = rmat if graph == "rmat" else planted
    made = generator(nodes, edges, 16, 40, threads=threads)

    def generate() -> int:
        for _ in made.edge_chunks():
            pass
        return 0

    return generate


def edge_list(graph: str, nodes: int, edges: int) -> np.ndarray:
    """Return random edges, (2, edges) int64."""
    if graph == "rmat":
        ends = np.empty((2, edges), np.int64)
        done = 0
        for chunk in rmat(nodes, edges, 1, 2).edge_chunks():
            ends[:, done : done + chunk.shape[1]] = chunk
            done += chunk.shape[1]
        return ends
    return np.random.default_rng(0).integers(0, nodes, (2, edges))


def forget_peak() -> int:
    """Set the peak of memory to what is resident now, and tell it."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    main()
