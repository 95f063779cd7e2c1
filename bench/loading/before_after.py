"""Compare the speed of loading graphs without types between two checkouts of gcnzc.

    python -m bench.loading.before_after CHECKOUT [--rounds 9] [--cache data/bench]

CHECKOUT is of the commit before a change. The graph, the minibatches and the interleaving are those
of bench/loading/loader.py: in each round, the processes of both commits measure each loader with
the same seeds, one after the other in alternating order. Compared is the CPU time of all threads,
which depends little on other programs. A ratio above 1 means that this commit needs less; the
median of the ratios of all rounds is recorded.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench import harness
from bench.loading.loader import BATCH_SIZE, NODES, ROOT, SKIPPED, Rival, generated_graph

TIMED = 40  # batches


def main() -> None:
    """Measure both checkouts, and record a line for each loader."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cache", type=Path, default=ROOT / "data" / "bench")
    options = parser.parse_args()
    folder, checkout = generated_graph(options.cache), options.checkout.resolve()
    before, after = (
        Rival.start("ours", sys.executable, folder, work="homogeneous", root=root)
        for root in (checkout, ROOT)
    )
    for rival, root in ((before, checkout), (after, ROOT)):
        assert Path(rival.versions["gcnzc"]).is_relative_to(root), rival.versions
    random = np.random.default_rng()
    limit = NODES - (TIMED + SKIPPED) * BATCH_SIZE
    ratios: dict[str, list[float]] = {name: [] for name in after.configurations}
    for round_ in range(options.rounds):
        order = [before, after][:: 1 if round_ % 2 else -1]
        for name, found in ratios.items():
            begin = int(random.integers(limit))
            seconds = {
                id(rival): rival.measure(name, folder / "seeds.npy", begin, TIMED)["cpu_seconds"]
                for rival in order
            }
            found.append(seconds[id(before)] / seconds[id(after)])
    command = ["git", "describe", "--always"]
    commit = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    for name, found in ratios.items():
        harness.record(
            "before_after",
            {"loader": name, "before": commit.stdout.strip()},
            ratio=statistics.median(found),
            least=min(found),
            greatest=max(found),
            rounds=len(found),
        )


if __name__ == "__main__":
    main()
