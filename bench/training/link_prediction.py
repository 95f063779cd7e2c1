"""Compare link prediction on a real graph with PyG's loader and model, over several seeds.

    python -m bench.training.link_prediction [--way METHOD ...] [--seeds SEED ...] [--epochs N]
                             [--rivals FOLDER] [--archive FILE.npz]

`gcnzc prepare --task link` splits the edges, with one seed for all methods and runs. Each run
trains a two-layer GraphSAGE model with batch normalization and an MLP decoder on the product of two
embeddings, keeps the model with the best validation AUC, and tests it with all neighbours. Methods:

    gcnzc           the defaults of `gcnzc train --task link`: seed edges are excluded from
                    message passing, and negative samples are never edges
    gcnzc, as PyG   link:exclude=none,strict=false, the behaviour of PyG's loader
    gcnzc, chance   as `gcnzc`, on random edges, which cannot be predicted; an AUC above 0.5 by
                    more than chance would show leakage of held-out edges
    pyg             PyG's LinkNeighborLoader and SAGEConv, with the same hyperparameters; FOLDER/pyg
                    is its environment, created by bench/rivals/make_environments.sh
    pyg, drawn      as `pyg`, with batch normalization only over the nodes whose neighbours were
                    sampled, as in block-based layers, instead of over all nodes

Each run is recorded as a line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness
from bench.training.accuracy import gcnzc

ROOT = Path(__file__).parents[3]
ARCHIVE = ROOT / "shared" / "data" / "amazon_photo" / "amazon_photo.npz"
RIVAL = Path(__file__).parents[1] / "rivals" / "pyg_link.py"
SIZES = {"hidden": 64, "fanouts": [5, 5], "batch_size": 2048, "lr": 0.003}
OURS = "train GRAPH --model sage:norm=batch --dropout 0"
METHODS = {
    "gcnzc": "--task link",
    "gcnzc, as PyG": "--task link:exclude=none,strict=false",
    "gcnzc, chance": "--task link",
    "pyg": "all",
    "pyg, drawn": "drawn",
}
RIVALS = {"pyg", "pyg, drawn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rivals", type=Path, help="folder of make_environments.sh")
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    options = parser.parse_args(argv)
    if RIVALS.intersection(options.way) and not options.rivals:
        parser.error("PyG needs --rivals FOLDER; or name other methods with --way")
    case = {"graph": options.archive.stem, "model": "sage", "epochs": options.epochs, **SIZES}
    with tempfile.TemporaryDirectory() as folder:
        graphs = {method: Path(folder) / "graph" for method in options.way}
        if "gcnzc, chance" in graphs:
            graphs["gcnzc, chance"] = Path(folder) / "chance"
            shuffle(options.archive, Path(folder) / "chance.npz")
        for graph in set(graphs.values()):
            archive = options.archive if graph.name == "graph" else graph.with_suffix(".npz")
            gcnzc(["prepare", str(archive), str(graph), "--task", "link"])
        for seed in options.seeds:
            for method, graph in graphs.items():
                begin = time.perf_counter()
                if method in RIVALS:
                    found = run_pyg(graph, options.rivals, METHODS[method], options.epochs, seed)
                else:
                    found = run_gcnzc(graph, METHODS[method].split(), options.epochs, seed)
                found.setdefault("run_s", time.perf_counter() - begin)
                harness.record("linkpred", {**case, "way": method, "seed": seed}, **found)
    return 0


def shuffle(archive: Path, out: Path) -> None:
    """Write a copy of the graph whose edges are replaced by as many random ones."""
    with np.load(archive) as read:
        arrays = dict(read)
    nodes, edges = len(arrays["node_label"]), arrays["edge_index"].shape[1]
    # both directions of each, as they are in the archive
    random = np.random.default_rng(0).integers(0, nodes, (2, edges // 2))
    arrays["edge_index"] = np.concatenate([random, random[::-1]], axis=1)
    arrays["add_inverse_edge"] = np.array(False)
    np.savez(out, **arrays)


def run_gcnzc(graph: Path, more: Sequence[str], epochs: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run of the command line."""
    words = [*OURS.split(), *more, "--epochs", str(epochs), "--seed", str(seed)]
    for name, value in SIZES.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    with tempfile.TemporaryDirectory() as runs:
        here = [str(graph) if word == "GRAPH" else word for word in words]
        result = json.loads(gcnzc([*here, "--out", str(Path(runs) / "run")]))
    kept = ("valid_auc", "test_auc", "best_epoch", "epoch_s", "sample_s", "gather_s", "compute_s")
    figures = {key: result[key] for key in kept}
    figures["judged"] = np.load(graph / "links" / "test.npy").shape[1]
    return figures | {"command": f"gcnzc {' '.join(words)}"}


def run_pyg(graph: Path, rivals: Path, norm_over: str, epochs: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run of PyG, in its own environment."""
    options = json.dumps({**SIZES, "epochs": epochs, "seed": seed, "norm_over": norm_over})
    python = rivals / "pyg" / "bin" / "python"
    ran = subprocess.run(
        [python, RIVAL, graph, options], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
