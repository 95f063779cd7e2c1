"""Measure the seeds per second of gcnzc's loader of DGL's heterographs compared with DGL's loader.

    python -m bench.loading.heterograph [--rounds 5] [--cache data/bench]

The graph has 4 node types with 1 M nodes, 6 edge types with 20 M edges, power-law degrees, and 100
float32 features per node. Minibatches have 1024 seeds of one type and fan-outs 15, 10 from the
seeds for each edge type; the features of all types are prefetched. Each system runs in its own
process (`bench/rivals/`), and the measurements are interleaved as in `bench.loading.loader`.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

from bench import harness
from bench.loading.loader import BATCH_SIZE, ROOT, SEED, Rival, draw_nodes, power_law

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
PROMISED = 3.0


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "data" / "bench", help="folder for the graph"
    )
    options = parser.parse_args()
    folder = generated_graph(options.cache)
    rivals = [
        Rival.start(name, sys.executable, folder, work="load_heterograph")
        for name in ("ours", "dgl")
    ]
    cases = [(rival, name) for rival in rivals for name in rival.configurations]
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    random = np.random.default_rng()
    for round_ in range(options.rounds):
        first = round_ % len(cases)
        for rival, configuration in cases[first:] + cases[:first]:
            batches = TIMED[rival.name]
            begin = int(random.integers(NODES[SEED_TYPE] - (batches + SKIPPED) * BATCH_SIZE))
            seeds = folder / "seeds.npy"
            result = rival.measure(configuration, seeds, begin, batches, SKIPPED)
            results.setdefault((rival.name, configuration), []).append(result)
    record(rivals, results)


def record(rivals: list[Rival], results: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    """Record a line for each configuration, and one for the promised speed-up.

    Raises:
        RuntimeError: the systems sampled different numbers of edges.
    """
    best: dict[str, list[float]] = {}
    for rival in rivals:
        for configuration in rival.configurations:
            measured = results[rival.name, configuration]
            seconds = [result["seconds"] / result["batches"] for result in measured]
            fifths = statistics.quantiles(seconds, n=5)
            timing = harness.Timing(statistics.median(seconds), fifths[0], fifths[3], len(seconds))
            harness.record(
                "heterograph",
                {"system": rival.name, "way": configuration, "batch_size": BATCH_SIZE},
                timing,
                seeds_per_s=BATCH_SIZE / timing.median_s,
                nodes=statistics.mean(result["nodes"] for result in measured),
                edges=statistics.mean(result["edges"] for result in measured),
                **{f"rival_{name}": version for name, version in rival.versions.items()},
            )
            known = best.get(rival.name)
            if known is None or timing.median_s < statistics.median(known):
                best[rival.name] = seconds
    edges = {
        name: statistics.mean(
            r["edges"] for key, own in results.items() if key[0] == name for r in own
        )
        for name in best
    }
    if not 0.99 < edges["ours"] / edges["dgl"] < 1.01:
        raise RuntimeError(f"the systems sampled different numbers of edges: {edges}")
    ratios = [theirs / ours for ours, theirs in zip(best["ours"], best["dgl"], strict=True)]
    case = {"ratio": "ours / dgl", "promised": PROMISED, "rounds": len(ratios)}
    harness.record("heterograph", case, times=statistics.median(ratios), least_times=min(ratios))


if __name__ == "__main__":
    main()
