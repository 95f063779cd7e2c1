"""Compare link prediction on a real graph with PyG's loader and model, over several seeds.

    python -m bench.training.link_prediction [--way NAME ...] [--seeds N] [--epochs N]
                             [--rivals FOLDER] [--archive FILE.npz] [--summary]

The edges are split by the command line, with one seed for all ways and runs; each run trains
GraphSAGE of two layers with batch normalisation and an MLP on products, keeps the model best on
the validation edges, and tests it with all neighbours. Ways:

    gcnzc           as `gcnzc train --task link` does: the minibatch's edges are in none of its
                    neighbourhoods, and negatives are no edges
    gcnzc, as PyG   --exclude none --no-strict-negatives, which is what PyG's loader does
    gcnzc, chance   as `gcnzc`, but which pairs of nodes have an edge was shuffled: nothing can
                    foretell them, and an area above 0.5 by more than chance would be a leak
    pyg             LinkNeighborLoader and SAGEConv, with the same sizes; FOLDER/pyg is the
                    environment, see bench/rivals/make_environments.sh
    pyg, drawn      the same, with batch normalisation over the nodes that neighbours were drawn
                    for, as layers that compute no others have it, and not over the outermost too

Every run is a line; --summary adds one for each way from the lines there are of these sizes, and
how far the ways differ, beside what chance makes of the seeds. Exit status 1 if the mean of `gcnzc`
stays below the target, if a way of PyG is better than one of ours by more than chance, or if
shuffled edges are foretold better than three standard deviations of an area without signal allow.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness
from gcnzc import cli

ROOT = Path(__file__).parents[3]
ARCHIVE = ROOT / "shared" / "data" / "amazon_photo" / "amazon_photo.npz"
RIVAL = Path(__file__).parents[1] / "rivals" / "pyg_link.py"
TARGET = 0.95
SIZES = {"hidden": 64, "fanouts": [5, 5], "batch_size": 2048, "lr": 0.003}
OURS = "train GRAPH --task link --model sage --layers 2 --batch-norm --dropout 0"
WAYS = {
    "gcnzc": "",
    "gcnzc, as PyG": "--exclude none --no-strict-negatives",
    "gcnzc, chance": "",
    "pyg": "all",
    "pyg, drawn": "drawn",
}
RIVALS = {"pyg", "pyg, drawn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rivals", type=Path, help="what make_environments.sh made")
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    parser.add_argument("--summary", action="store_true", help="of the lines there are")
    asked = parser.parse_args(argv)
    if RIVALS.intersection(asked.way) and not (asked.rivals or asked.summary):
        parser.error("--rivals FOLDER says where PyG is; or leave it out by --way")
    case = {"graph": asked.archive.stem, "model": "sage", "epochs": asked.epochs, **SIZES}
    if asked.summary:
        return summary(case)
    with tempfile.TemporaryDirectory() as folder:
        graphs = {way: Path(folder) / "graph" for way in asked.way}
        if "gcnzc, chance" in graphs:
            graphs["gcnzc, chance"] = Path(folder) / "chance"
            shuffle(asked.archive, Path(folder) / "chance.npz")
        for graph in set(graphs.values()):
            archive = asked.archive if graph.name == "graph" else graph.with_suffix(".npz")
            gcnzc(["prepare", str(archive), str(graph), "--task", "link"])
        for seed in asked.seeds:
            for way, graph in graphs.items():
                begin = time.perf_counter()
                if way in RIVALS:
                    found = by_pyg(graph, asked.rivals, WAYS[way], asked.epochs, seed)
                else:
                    found = by_gcnzc(graph, WAYS[way].split(), asked.epochs, seed)
                found.setdefault("run_s", time.perf_counter() - begin)
                harness.record("linkpred", {**case, "way": way, "seed": seed}, **found)
    return 0


def shuffle(archive: Path, out: Path) -> None:
    """Write the graph with as many edges between pairs of nodes that are drawn."""
    with np.load(archive) as read:
        arrays = dict(read)
    nodes, edges = len(arrays["node_label"]), arrays["edge_index"].shape[1]
    # both directions of each, as they are in the archive
    drawn = np.random.default_rng(0).integers(0, nodes, (2, edges // 2))
    arrays["edge_index"] = np.concatenate([drawn, drawn[::-1]], axis=1)
    arrays["add_inverse_edge"] = np.array(False)
    np.savez(out, **arrays)


def by_gcnzc(graph: Path, more: Sequence[str], epochs: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run of the command line."""
    words = [*OURS.split(), *more, "--epochs", str(epochs), "--seed", str(seed)]
    for name, value in SIZES.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    with tempfile.TemporaryDirectory() as runs:
        here = [str(graph) if word == "GRAPH" else word for word in words]
        result = json.loads(gcnzc([*here, "--out", str(Path(runs) / "run")]))
    kept = ("valid_auc", "test_auc", "best_epoch", "epoch_s", "sample_s", "gather_s", "compute_s")
    told = {key: result[key] for key in kept}
    told["judged"] = np.load(graph / "links" / "test.npy").shape[1]
    return told | {"command": f"gcnzc {' '.join(words)}"}


def by_pyg(graph: Path, rivals: Path, norm_over: str, epochs: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run of PyG, in its own environment."""
    options = json.dumps({**SIZES, "epochs": epochs, "seed": seed, "norm_over": norm_over})
    python = rivals / "pyg" / "bin" / "python"
    ran = subprocess.run(
        [python, RIVAL, graph, options], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def summary(case: dict[str, Any]) -> int:
    """Keep the mean of each way and their differences; the exit status."""
    path = harness.RESULTS / "linkpred.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    runs = {
        way: {
            line["seed"]: line
            for line in lines
            if line["way"] == way
            and "seed" in line
            and all(line[key] == value for key, value in case.items())
        }
        for way in WAYS
    }
    means = {}
    for way, by_seed in runs.items():
        values = [line["test_auc"] for line in by_seed.values()]
        if len(values) < 2 or way == "gcnzc, chance":
            continue
        means[way] = statistics.mean(values), statistics.stdev(values)
        harness.record(
            "linkpred",
            {**case, "way": f"mean of {way}"},
            test_auc=means[way][0],
            spread=means[way][1],
            seeds=sorted(by_seed),
            target=TARGET,
            reached=means[way][0] >= TARGET,
        )
    good = "gcnzc" in means and means["gcnzc"][0] >= TARGET
    for seed, line in runs["gcnzc, chance"].items():
        allowed = 3 * (1 / (6 * line["judged"])) ** 0.5
        above = line["test_auc"] - 0.5
        harness.record(
            "linkpred",
            {**case, "way": "gcnzc, chance - 0.5", "of_seed": seed},
            difference=above,
            allowed=allowed,
            within=abs(above) <= allowed,
        )
        good = good and above <= allowed
    for mine, theirs in itertools.product(("gcnzc", "gcnzc, as PyG"), sorted(RIVALS)):
        if mine in means and theirs in means:
            difference = means[mine][0] - means[theirs][0]
            spread = (means[mine][1] ** 2 + means[theirs][1] ** 2) ** 0.5
            harness.record(
                "linkpred",
                {**case, "way": f"{mine} - {theirs}"},
                difference=difference,
                spread=spread,
                within_spread=abs(difference) <= spread,
            )
            good = good and difference >= -spread
    return int(not good)


def gcnzc(words: Sequence[str]) -> str:
    """Run a command and return its stdout; its messages are shown only if it fails."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        status = cli.main(words)
    if status:
        print(f"gcnzc {' '.join(words)}\n{talk.getvalue()}", file=sys.stderr)
        raise SystemExit(status)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
