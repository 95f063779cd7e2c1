"""Measure accuracy and memory of GCN models of 2 to 100 layers in full-batch training.

    python -m bench.training.depth [--graph cora] [--layers N ...] [--seeds 3] [--epochs 100]
                                   [--archives FOLDER]

Each depth is trained with three kinds of layers, all with layer normalization and with linear
projections of inputs and outputs:

- `plain`: without residual connections;
- `linear`: a linear projection of a layer's input is added to its output (`residual`);
- `pre-activation`: a layer's input itself is added to its output (`pre_activation`, `residual`).

The model with the best validation score is tested. A record has the mean and standard deviation of
the test scores over the seeds, the median time of an epoch, and the peak memory of a training
process, libraries included. The exit status is 1 if a pre-activation model of at least 100 layers
is below 75 %, otherwise 0.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.training.accuracy import ARCHIVES, MADE_BY, gcnzc, scores_of, words_of

LAYERS = (2, 4, 8, 16, 32, 64, 100)
TARGET_PERCENT, TARGET_LAYERS = 75.0, 100
KINDS = {
    "plain": "",
    "linear": ",residual=true",
    "pre-activation": ",pre_activation=true,residual=true",
}
MODEL = "gcn:norm=layer,input_linear=true,output_linear=true,input_dropout=0.5"
OPTIONS = (
    "--batch-size all --hidden 128 --dropout 0.5 --optimizer adam:weight_decay=0.01 --lr 0.002 "
    "--evaluate-every 5"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each kind and depth, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="cora", choices=sorted(MADE_BY))
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, at least 2")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of NAME/NAME.npz")
    asked = parser.parse_args(argv)
    if asked.seeds < 2:
        parser.error("a standard deviation needs at least two seeds")
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "graph")
        archive = asked.archives / asked.graph / f"{asked.graph}.npz"
        gcnzc(words_of(MADE_BY[asked.graph], ARCHIVE=archive, GRAPH=prepared))
        for layers in asked.layers:
            for kind in asked.kinds:
                line = measure(asked.graph, kind, layers, prepared, asked.seeds, asked.epochs)
                is_low = line["test_percent"] < TARGET_PERCENT
                if kind == "pre-activation" and layers >= TARGET_LAYERS and is_low:
                    status = 1
    return status


def measure(
    graph: str, kind: str, layers: int, prepared: Path, seeds: int, epochs: int
) -> dict[str, Any]:
    """Train once per seed, each in a process of its own, and record scores, time and memory."""
    fanouts = ",".join(["-1"] * layers)
    options = f"--model {MODEL}{KINDS[kind]} {OPTIONS} --fanouts {fanouts} --epochs {epochs}"
    words = words_of(f"train GRAPH {options}", GRAPH=prepared)
    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as runs:
            own = ["--seed", str(seed), "--out", str(Path(runs, "run"))]
            command = [sys.executable, "-m", "gcnzc", *words, *own]
            begin = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results.append(found | {"run_s": time.perf_counter() - begin})
    epoch_s = statistics.median(result["epoch_s"] for result in results)
    return harness.record(
        "depth",
        {"graph": graph, "kind": kind, "layers": layers},
        **scores_of(results) | {"epochs": epochs, "epoch_s": epoch_s},
        peak_memory_bytes=max(result["peak_memory_bytes"] for result in results),
        made_by=f"gcnzc {MADE_BY[graph]}",
        command=f"gcnzc train GRAPH {options}",
    )


if __name__ == "__main__":
    sys.exit(main())
