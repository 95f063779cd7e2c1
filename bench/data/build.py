"""Measure the time and the memory of generating a graph and of building its CSC.

Each case runs in its own process, so that its peak memory is measured separately:

    python -m bench.data.build                    all cases, recorded in results/build.jsonl
    python -m bench.data.build --edges 1000000    the same with fewer edges
    python -m bench.data.build --only generate    cases whose method contains this word

`peak_bytes` is the peak of the resident memory during the case, minus the resident memory before
it. For a build, the edge list (two int64 arrays) is resident before it, so `peak_bytes` counts the
result and temporary memory, but not the edge list. `peak_over_result` is `peak_bytes` divided by
the bytes of `indptr` and `indices`. There are two baselines: a copy of the edge list, which is a
lower bound of the time, since every build must read all edges and write as many; and scipy's
conversion of a COO matrix to CSC.

`generate` generates the edges in chunks and discards them. `make` also generates labels and
features, computes the best possible accuracy, and writes files in OGB's layout. The peak of `make`
includes pages of memory-mapped files, which the kernel can drop. `edges_per_s` counts the edges of
the list; training later uses each of them in both directions.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
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
    """Measure all cases, each in a new process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--only", default="", help="a part of the method's name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure_case(json.loads(args.case))))
        return
    for case in cases(args.edges):
        if args.only not in case["way"]:
            continue
        words = [sys.executable, "-m", "bench.data.build", "--case", json.dumps(case)]
        result = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        timing = Timing(**result.pop("timing"))
        record("build", case, timing, edges_per_s=case["edges"] / timing.median_s, **result)


def cases(num_edges: int) -> list[dict[str, Any]]:
    """Return the cases to measure: a method, under the key "way", and a graph."""
    nodes = {"uniform": num_edges // 100, "rmat": num_edges // 100, "sparse": num_edges}
    builds = [
        {"way": method, "graph": graph, "nodes": nodes[graph], "edges": num_edges}
        for method, graph in [
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
        {"way": "generate", "graph": graph, "nodes": num_edges // 10, "edges": num_edges}
        | {"threads": count}
        for graph in ("rmat", "planted")
        for count in (1, 2)
    ]
    writes = [
        {"way": "make", "graph": graph, "nodes": num_edges // 25, "edges": num_edges, "threads": 2}
        for graph in ("rmat", "planted")
    ]
    return [*builds, *generates, *writes]


def measure_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one case, after a small case that compiles the functions it calls."""
    method, graph, threads = case["way"], case["graph"], case.get("threads", 2)
    torch.set_num_threads(threads)
    prepare = prepare_generation if method in ("generate", "make") else prepare_build
    prepare(method, graph, 1000, 10_000, threads)()
    function = prepare(method, graph, case["nodes"], case["edges"], threads)
    before = reset_peak()
    result_bytes = function()
    peak_bytes = resident_bytes("VmHWM") - before
    timing = measure(function, calls=CALLS, warmup=0)
    result = {"timing": asdict(timing), "peak_bytes": peak_bytes}
    if result_bytes:
        result["peak_over_result"] = peak_bytes / result_bytes
    return result


def prepare_build(
    method: str, graph: str, nodes: int, edges: int, threads: int
) -> Callable[[], int]:
    """Return a function that builds a graph from an edge list and returns its bytes."""
    src, dst = edge_list(graph, nodes, edges)

    def size_of(built: Graph) -> int:
        return built.indptr.nbytes + built.indices.nbytes

    if method == "copy":
        return lambda: sum(end.nbytes for end in [src.copy(), dst.copy()])
    if method == "scipy":
        ones = np.ones(edges, np.int8)
        pairs = src.astype(np.int32), dst.astype(np.int32)

        def convert() -> int:
            matrix = scipy.sparse.coo_array((ones, pairs), (nodes, nodes)).tocsc()
            return matrix.indptr.nbytes + matrix.indices.nbytes

        return convert
    if method == "check":
        built = Graph.from_edges(src, dst, nodes)
        return lambda: size_of(Graph(built.indptr, built.indices))
    if method == "build from CSR":
        rows = Graph.from_edges(dst, src, nodes)
        return lambda: size_of(Graph.from_csr(rows.indptr, rows.indices))
    options: dict[str, Any] = {
        "build": {},
        "build without duplicates": {"duplicates": "remove"},
        "build in both directions": {"bidirected": True},
    }[method]
    return lambda: size_of(Graph.from_edges(src, dst, nodes, **options))


def prepare_generation(
    method: str, graph: str, nodes: int, edges: int, threads: int
) -> Callable[[], int]:
    """Return a function that generates a graph, and returns 0."""
    if method == "make":
        shape = Shape(nodes, edges, 16, 40)

        def write() -> int:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                make(Path(folder) / graph, graph, shape, threads=threads)
            return 0

        return write
    generator = (rmat if graph == "rmat" else planted)(nodes, edges, 16, 40, threads=threads)

    def generate() -> int:
        for _ in generator.edge_chunks():
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


def reset_peak() -> int:
    """Reset the peak to the bytes of memory that are resident now, and return them."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    main()
