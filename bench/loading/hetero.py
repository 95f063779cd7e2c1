"""Measure the seeds per second of gcnzc's loader of heterogeneous graphs compared with PyG's.

    python -m bench.loading.hetero --rivals FOLDER [--rounds 5] [--cache data/bench]

The graph has 4 node types and 6 edge types with power-law degree distributions, 1 M nodes with 64
float32 features and a time each, and 20 M edges. Minibatches have 1024 seeds of one type and
fan-outs 15, 10 for every edge type; also with temporal sampling by the times of the nodes, which is
disjoint. Each system gets the same arrays as a PyG `HeteroData`, runs in its own process
(`bench/rivals/`), and yields minibatches with features. PyG's environment is created by
`bench/rivals/make_environments.sh`. PyG samples with pyg-lib where that is installed, and otherwise
with torch-sparse, which has no temporal sampling.

The measurements are interleaved, see bench/loading/loader.py. The speed-up is the median over the
rounds of the ratio between the fastest configurations.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import harness
from bench.loading.loader import (
    Rival,
    draw_nodes,
    measure_rounds,
    parser_of,
    power_law,
    record_case,
    record_ratio,
)
from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeType

NODES = {"paper": 550_000, "author": 400_000, "institution": 10_000, "field": 40_000}
EDGES = {
    ("author", "writes", "paper"): 5_000_000,
    ("paper", "rev_writes", "author"): 5_000_000,
    ("paper", "cites", "paper"): 5_000_000,
    ("institution", "employs", "author"): 1_000_000,
    ("field", "of", "paper"): 2_000_000,
    ("paper", "rev_of", "field"): 2_000_000,
}
COLUMNS, LATEST, SEED = 64, 1000, 0
# batches timed per round, and untimed batches before them
TIMED, SKIPPED = {"hetero_ours": 20, "hetero_pyg": 10}, 4


def generated_graph(cache: Path) -> Path:
    """Return the folder of the graph, which is generated if it is missing."""
    folder = cache / f"hetero-{sum(NODES.values())}-{sum(EDGES.values())}-{SEED}"
    if not (folder / "seeds.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(SEED)
        ends = {}
        for name, count in NODES.items():
            ends[name] = power_law(count, random)
            features = random.standard_normal((count, COLUMNS), np.float32)
            np.save(folder / f"{name}.x.npy", features)
            np.save(folder / f"{name}.time.npy", random.integers(LATEST, size=count))
        for edge_type, count in EDGES.items():
            pair = [draw_nodes(ends[name], count, random) for name in edge_type[::2]]
            np.save(folder / f"{'.'.join(edge_type)}.npy", sorted_edges(folder, edge_type, pair))
        np.save(folder / "seeds.npy", random.permutation(NODES["paper"]))
    return folder


def sorted_edges(folder: Path, edge_type: EdgeType, pair: list[Any]) -> Any:
    """Return edges sorted by destination and by the time of the source, as PyG's sampler needs."""
    nodes = {name: {"time": np.load(folder / f"{name}.time.npy")} for name in edge_type[::2]}
    edges = Graph.from_arrays(nodes, {edge_type: pair}).edges(edge_type)
    targets = torch.arange(len(edges.indptr) - 1).repeat_interleave(edges.indptr.diff())
    return torch.stack([edges.indices.long(), targets]).numpy()


def main() -> None:
    """Measure both systems and record their times."""
    options = parser_of(__doc__, rivals=True).parse_args()
    harness.check_code_is_committed()
    folder = generated_graph(options.cache)
    python = str(options.rivals.resolve() / "pyg" / "bin" / "python")
    rivals = [
        Rival.start("hetero_ours", sys.executable, folder),
        Rival.start("hetero_pyg", python, folder),
    ]
    cases = [(rival, name) for rival in rivals for name in rival.configurations]
    results = measure_rounds(cases, folder / "seeds.npy", options.rounds, TIMED, SKIPPED)
    seconds = {
        (rival.name, name): record_case("hetero_loader", rival, name, results)
        for rival, name in cases
    }
    for kind in ("uniform", "temporal"):
        ours, theirs = (
            [own for (name, way), own in seconds.items() if name == rival.name and kind in way]
            for rival in rivals
        )
        if theirs:
            record_ratio("hetero_loader", f"pyg / ours, {kind}", ours, theirs)


if __name__ == "__main__":
    main()
