"""Measure the seeds per second of gcnzc's loader of DGL's heterographs compared with DGL's loader.

    python -m bench.loading.heterograph [--rounds 5] [--cache data/bench]

The graph has 4 node types with 1 M nodes, 6 edge types with 20 M edges, power-law degrees, and 100
float32 features per node. Minibatches have 1024 seeds of one type and fan-outs 15, 10 from the
seeds for each edge type; the features of all types are prefetched. Each system runs in its own
process (`bench/rivals/`), and the measurements are interleaved as in `bench.loading.loader`.
"""

import json
import statistics
import sys
from pathlib import Path

import numpy as np

from bench.loading.loader import (
    SEED,
    Rival,
    draw_nodes,
    measure_rounds,
    parser_of,
    power_law,
    record_case,
    record_ratio,
)

NODES = {"user": 400_000, "item": 300_000, "shop": 50_000, "tag": 250_000}
EDGES = {
    ("user", "buys", "item"): 5_000_000,
    ("item", "bought-by", "user"): 5_000_000,
    ("user", "follows", "user"): 4_000_000,
    ("shop", "sells", "item"): 1_500_000,
    ("tag", "of", "item"): 2_500_000,
    ("item", "has", "tag"): 2_000_000,
}
SEED_TYPE, COLUMNS = "item", 100
# batches timed per round for each system, and untimed batches before them
TIMED, SKIPPED = {"ours": 30, "dgl": 8}, 4


def generated_graph(cache: Path) -> Path:
    """Return the folder of the graph, which is generated if it is missing."""
    folder = cache / f"heterograph-{sum(NODES.values())}-{sum(EDGES.values())}-{SEED}"
    if not (folder / "seeds.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(SEED)
        ends = {}
        for kind, count in NODES.items():
            ends[kind] = power_law(count, random)
            features = random.standard_normal((count, COLUMNS), np.float32)
            np.save(folder / f"{kind}_features.npy", features)
        for (src, name, dst), count in EDGES.items():
            for end, kind in (("src", src), ("dst", dst)):
                np.save(folder / f"{name}_{end}.npy", draw_nodes(ends[kind], count, random))
        meta = {"nodes": NODES, "edges": [*EDGES], "seeds": SEED_TYPE}
        (folder / "meta.json").write_text(json.dumps(meta))
        np.save(folder / "seeds.npy", random.permutation(NODES[SEED_TYPE]))
    return folder


def main() -> None:
    """Measure both systems and record their times."""
    options = parser_of(__doc__, rivals=None).parse_args()
    folder = generated_graph(options.cache)
    rivals = [
        Rival.start(name, sys.executable, folder, work="load_heterograph")
        for name in ("ours", "dgl")
    ]
    cases = [(rival, name) for rival in rivals for name in rival.configurations]
    results = measure_rounds(cases, folder / "seeds.npy", options.rounds, TIMED, SKIPPED)
    seconds = {
        (rival.name, name): record_case("heterograph", rival, name, results)
        for rival, name in cases
    }
    edges = [
        statistics.mean(
            each["edges"]
            for (name, _), own in results.items()
            if name == rival.name
            for each in own
        )
        for rival in rivals
    ]
    if not 0.99 < edges[0] / edges[1] < 1.01:
        raise RuntimeError(f"the systems sampled different numbers of edges: {edges}")
    times = ([seconds[case] for case in seconds if case[0] == rival.name] for rival in rivals)
    record_ratio("heterograph", "ours / dgl", *times)


if __name__ == "__main__":
    main()
