"""Measure the training steps of gcnzc on the CPU, compared with DGL and PyG and with their floor.

    python -m bench.training.steps [--rivals FOLDER] [--rounds 5] [--kinds sage,gcn,gat]
                                   [--cache data/bench]

A step loads a minibatch and trains with it: sampling, features, forward and backward pass, and
torch's Adam. Each system uses its own loader and its own layers, with the same sizes: a graph of
ogbn-arxiv's shape with reverse edges, minibatches of 1024 seeds with fan-outs 15, 10, 5, and models
of three layers with 256 columns (GAT: 4 heads of 64) and dropout 0.5. gcnzc's loader samples ahead
on its own threads; DGL and PyG are measured with 0 and with 1 worker, and the faster one counts.
gcnzc keeps freed memory in the process, as `gcnzc train` does. DGL is measured without this setting
and with it. Each system runs in its own process (`bench/rivals/`), as in
`bench.loading.loader`; PyG needs the environment of `--rivals`. The measurements are interleaved.

The floor of a step is the time of its matrix products alone, at the sizes of mean minibatches, plus
the time to move its rows once: to read the input rows of each layer, to write its output rows, and
the same for their gradients, at the bandwidth of copying a large tensor. A layer's product is
counted after the aggregation, where it has one row per target; each head of GAT projects its own
sums, which together have the operations of one such product.
"""

import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.loading.loader import Rival, measure_rounds, parser_of, record_case
from bench.rivals.serve import BATCH_SIZE, FANOUTS
from bench.rivals.steps import CLASSES, HIDDEN
from bench.training.aggregate import power_law
from bench.training.layers import ARXIV_EDGES, ARXIV_NODES
from gcnzc.graph.graph import Graph
from gcnzc.sampling.neighbor import Sampler

COLUMNS, SEED = 128, 0
# steps timed per round for each system, and untimed ones before them
TIMED, SKIPPED = {"ours": 16, "dgl": 10, "pyg": 3}, 3


def generated_graph(cache: Path) -> Path:
    """Return the folder of the graph, which is generated if it is missing."""
    folder = cache / f"arxiv-{ARXIV_NODES}-{ARXIV_EDGES}-{SEED}"
    if not (folder / "seeds.npy").exists():
        graph = power_law(ARXIV_NODES, ARXIV_EDGES)
        graph = graph.rebuild(bidirected=True, self_loops="remove", duplicates="remove")
        random = np.random.default_rng(SEED)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "indptr.npy", graph.indptr.numpy())
        np.save(folder / "indices.npy", graph.indices.numpy())
        features = random.standard_normal((ARXIV_NODES, COLUMNS), np.float32)
        np.save(folder / "features.npy", features)
        np.save(folder / "seeds.npy", random.permutation(ARXIV_NODES))
    return folder


def layer_sizes(folder: Path, batches: int = 8) -> list[tuple[int, int]]:
    """Return the mean numbers of sources and targets of each layer, input layer first."""
    graph = Graph(*(np.load(folder / f"{name}.npy") for name in ("indptr", "indices")), check=False)
    seeds = torch.from_numpy(np.load(folder / "seeds.npy")[: batches * BATCH_SIZE])
    sampler = Sampler(graph, FANOUTS)
    sampled = [sampler.sample(ids, epoch=0).blocks for ids in seeds.split(BATCH_SIZE)]
    return [
        (
            round(statistics.mean(blocks[index].num_src for blocks in sampled)),
            round(statistics.mean(blocks[index].num_dst for blocks in sampled)),
        )
        for index in range(len(FANOUTS))
    ]


def products(kind: str, sizes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the sizes (n, k, m) of all products (n, k) @ (k, m) of a step, with the gradients."""
    widths = [COLUMNS, HIDDEN, HIDDEN, CLASSES]
    found = []
    for index, (_, targets) in enumerate(sizes):
        columns, out = widths[index], widths[index + 1]
        rows = [targets, targets] if kind == "sage" else [targets]
        for each in rows:
            found += [(each, columns, out), (columns, each, out)]
            if index > 0:
                found.append((each, out, columns))
    return found


def products_s(shapes: list[tuple[int, int, int]], calls: int) -> float:
    """Return the time of products, the sum of the medians."""
    total_s = 0.0
    for n, k, m in shapes:
        a, b, out = torch.randn(n, k), torch.randn(k, m), torch.empty(n, m)
        timing = harness.measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), calls=calls)
        total_s += timing.median_s
    return total_s


def moved_bytes(sizes: list[tuple[int, int]]) -> int:
    """Return the bytes of the rows that a step reads and writes at least once."""
    widths = [COLUMNS, HIDDEN, HIDDEN, CLASSES]
    elements = 2 * sizes[0][0] * COLUMNS  # the gathered features are read and written
    for index, (sources, targets) in enumerate(sizes):
        rows = sources * widths[index] + targets * widths[index + 1]
        gradients = targets * widths[index + 1] + (sources * widths[index] if index else 0)
        elements += rows + gradients
    return 4 * elements


def copy_bandwidth(calls: int) -> float:
    """Return the bytes per second that copying a large tensor reads and writes."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 8 * len(source) / harness.measure(lambda: target.copy_(source), calls=calls).median_s


def record_floor(kind: str, sizes: list[tuple[int, int]], step_s: float, bandwidth: float) -> None:
    """Record the floor of a kind of step, and the share of it in our step."""
    shapes = products(kind, sizes)
    gemm_s = products_s(shapes, 5)
    rows_s = moved_bytes(sizes) / bandwidth
    harness.record(
        "steps",
        {"floor_of": kind},
        gemm_ms=1e3 * gemm_s,
        gflops=sum(2 * n * k * m for n, k, m in shapes) / gemm_s / 1e9,
        rows_ms=1e3 * rows_s,
        step_ms=1e3 * step_s,
        share_of_floor=(gemm_s + rows_s) / step_s,
    )


def main() -> None:
    """Measure all systems, and record their times, the ratios and the floor."""
    parser = parser_of(__doc__, rivals=False)
    parser.add_argument("--kinds", default="sage,gcn,gat")
    options = parser.parse_args()
    folder = generated_graph(options.cache)
    pythons = {"ours": sys.executable, "dgl": sys.executable}
    if options.rivals:
        pythons["pyg"] = str(options.rivals / "pyg" / "bin" / "python")
    rivals = [Rival.start(name, python, folder, work="train") for name, python in pythons.items()]
    sizes, bandwidth = layer_sizes(folder), copy_bandwidth(5)
    for kind in options.kinds.split(","):
        cases = [
            (rival, name)
            for rival in rivals
            for name in rival.configurations
            if name.partition(",")[0] == kind
        ]
        # the first round is not counted: it compiles kernels
        measure_rounds(cases, folder / "seeds.npy", 1, TIMED, SKIPPED)
        results = measure_rounds(cases, folder / "seeds.npy", options.rounds, TIMED, SKIPPED)
        medians = {
            (rival.name, name): statistics.median(
                record_case("steps", rival, name, results, kind=kind)
            )
            for rival, name in cases
        }
        own_s = min(each for (system, _), each in medians.items() if system == "ours")
        record_floor(kind, sizes, own_s, bandwidth)


if __name__ == "__main__":
    main()
