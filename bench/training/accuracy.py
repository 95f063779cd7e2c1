"""Measure the accuracy of models trained on real graphs, over several seeds.

    python -m bench.training.accuracy [GRAPH ...] [--sampler gcnzc dgl none] [--seeds N]
                                     [--archives FOLDER]

Each result is measured by the gcnzc commands that are recorded with it; only the seed differs
between runs. The graph is prepared, a model trains on minibatches of sampled neighbours, or with
the sampler `none` on the whole graph, and the model with the best validation score is tested with
all neighbours. Without GRAPH, all graphs are measured. The exit status is 1 if a mean is below its
target.

FOLDER contains archives NAME/NAME.npz for `gcnzc prepare`; the graph `digits` needs none.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from gcnzc import cli

ARCHIVES = Path(__file__).parents[3] / "shared" / "data"
SAMPLERS = ("gcnzc", "dgl", "none")


@dataclass(frozen=True)
class Recipe:
    """The options of a training run, and its target."""

    graph: str
    target_percent: float  # mean test accuracy, or area under the ROC curve, over the seeds
    options: str  # of `gcnzc train`

    @property
    def is_full_batch(self) -> bool:
        """Whether it trains on the whole graph, without a sampler."""
        return "--batch-size all" in self.options

    @property
    def model(self) -> str:
        """The kind of model, and whether labels are among its inputs."""
        kind = self.options.split()[1].partition(":")[0]
        return f"{kind}, label inputs" if "label_inputs" in self.options else kind


# commands that create the folder GRAPH; graphs with bag-of-words features and few labels reach a
# higher accuracy with normalized features
PREPARE = "prepare ARCHIVE GRAPH"
NORMALIZED = f"{PREPARE} --normalize-features"
MADE_BY = {
    "cora": NORMALIZED,
    "citeseer": NORMALIZED,
    "amazon_computers": PREPARE,
    "amazon_photo": PREPARE,
    "coauthor_cs": PREPARE,
    "coauthor_physics": PREPARE,
    "tolokers": PREPARE,
    "digits": "make GRAPH --kind digits",
    "ogbn_arxiv_structure": f"{PREPARE} --embed 128",
}

# a batch has all training nodes, so an epoch is one step; evaluating the 500 validation nodes only
# every fifth step is faster, and makes it less likely that an early epoch is the best by chance
STEPS = "--lr 0.01 --optimizer adam:weight_decay=5e-4 --epochs 200 --evaluate-every 5"
WHOLE = "--fanouts -1,-1 --batch-size all"
PLANETOID, PLANETOID_FULL = f"{STEPS} --fanouts 10,10", f"{STEPS} {WHOLE}"
WORDS = "input_dropout=0.5 --hidden 64 --dropout 0.5"
ATTENTION = (
    "heads=8,output_heads=1,skip=false,input_dropout=0.6,attention_dropout=0.6 "
    "--hidden 8 --dropout 0.6"
)
AMAZON = "sage:norm=batch --fanouts 10,10 --hidden 128 --batch-size 512 --epochs 30"
# about as many steps
AMAZON_FULL = f"sage:norm=batch {WHOLE} --hidden 128 --epochs 300 --evaluate-every 10"
# rows have 27 and 34 KB: small fan-outs limit the bytes that are gathered per batch
COAUTHOR = "sage --fanouts 5,5 --hidden 64 --batch-size 256"
ARXIV = "sage:norm=batch --fanouts 10,10 --hidden 256"

RECIPES = (
    Recipe("cora", 80.5, f"--model gcn:{WORDS} {PLANETOID} --batch-size 140"),
    Recipe("cora", 81.0, f"--model gat:{ATTENTION} {PLANETOID} --batch-size 140"),
    Recipe("cora", 79.0, f"--model sage:{WORDS} {PLANETOID} --batch-size 140"),
    Recipe("citeseer", 69.5, f"--model gcn:{WORDS} {PLANETOID} --batch-size 120"),
    Recipe("amazon_computers", 88.5, f"--model {AMAZON}"),
    Recipe("amazon_photo", 93.5, f"--model {AMAZON}"),
    Recipe("coauthor_cs", 93.0, f"--model {COAUTHOR} --epochs 10"),
    Recipe("coauthor_physics", 95.5, f"--model {COAUTHOR} --epochs 5"),
    Recipe(
        "tolokers",
        81.0,
        "--model sage:norm=batch --fanouts 10,10,10 --hidden 128 --dropout 0.2 "
        "--batch-size 512 --epochs 100 --patience 25",
    ),
    Recipe(
        "digits",
        96.0,
        "--model sage:norm=batch --fanouts 10,10 --hidden 64 --lr 0.01 "
        "--batch-size 128 --epochs 40 --patience 15",
    ),
    Recipe(
        "ogbn_arxiv_structure",
        66.0,
        f"--model {ARXIV} --epochs 8",
    ),
    Recipe(
        "ogbn_arxiv_structure",
        70.0,
        f"--model {ARXIV} --epochs 16 --schedule cosine --task node:label_inputs=0.5",
    ),
    Recipe("cora", 81.5, f"--model gcn:{WORDS} {PLANETOID_FULL}"),
    Recipe("cora", 81.0, f"--model gat:{ATTENTION} {PLANETOID_FULL}"),
    Recipe("cora", 79.0, f"--model sage:{WORDS} {PLANETOID_FULL}"),
    Recipe("citeseer", 70.7, f"--model gcn:{WORDS} {PLANETOID_FULL}"),
    Recipe("amazon_photo", 93.5, f"--model {AMAZON_FULL}"),
    Recipe("amazon_computers", 88.5, f"--model {AMAZON_FULL}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every recipe of the requested graphs, and return the exit status."""
    asked = options(argv)
    lines = []
    for graph in asked.graphs:
        # prepared again for each run, so that results never depend on files of earlier code
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / graph
            words = words_of(MADE_BY[graph], ARCHIVE=asked.archives / graph / f"{graph}.npz")
            gcnzc(words_of(words, GRAPH=prepared))
            for recipe in RECIPES:
                if recipe.graph != graph:
                    continue
                samplers = [
                    name for name in asked.sampler if (name == "none") == recipe.is_full_batch
                ]
                lines += measure(recipe, prepared, samplers, asked.seeds)
    return int(any(not line["reached"] for line in lines))


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--sampler", nargs="+", choices=SAMPLERS, default=SAMPLERS[:1])
    return parse(parser, argv, MADE_BY)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of benchmarks that train on graphs over several seeds."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("graphs", nargs="*", metavar="GRAPH")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2")
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of NAME/NAME.npz")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    known: Iterable[str],
    default: Iterable[str] | None = None,
) -> argparse.Namespace:
    """Parse a command line, and check its graphs and number of seeds.

    Args:
        parser: see `parser_of`.
        argv: the words; None for those of this process.
        known: names of graphs that may be measured.
        default: graphs to measure if the command line names none; all by default.
    """
    asked, known = parser.parse_args(argv), list(known)
    if unknown := [graph for graph in asked.graphs if graph not in known]:
        parser.error(f"no recipe for {', '.join(unknown)}; there are {', '.join(known)}")
    if asked.seeds < 2:
        parser.error("a standard deviation needs at least two seeds")
    asked.graphs = list(dict.fromkeys(asked.graphs or default or known))
    return asked


def measure(
    recipe: Recipe, prepared: Path, samplers: Iterable[str], seeds: int
) -> list[dict[str, Any]]:
    """Train once per seed with each sampler, and record the results of each."""
    lines = []
    for sampler in samplers:
        words = f"train GRAPH {recipe.options}"
        if not recipe.is_full_batch:
            words += f" --sampler {sampler}"
        scores = scores_of(train_each_seed(words_of(words, GRAPH=prepared), seeds))
        line = harness.record(
            "accuracy",
            {"graph": recipe.graph, "model": recipe.model, "sampler": sampler},
            **scores,
            target_percent=recipe.target_percent,
            reached=scores["test_percent"] >= recipe.target_percent,
            made_by=f"gcnzc {MADE_BY[recipe.graph]}",
            command=f"gcnzc {words}",
        )
        lines.append(line)
    return lines


def train_each_seed(words: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Run a command of training once per seed, and return the results, with the time of a run."""
    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as runs:
            begin = time.perf_counter()
            found = gcnzc([*words, "--seed", str(seed), "--out", str(Path(runs) / "run")])
            results.append(json.loads(found) | {"run_s": time.perf_counter() - begin})
    return results


def scores_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a record: scores over the seeds, epochs, times and parameters."""
    metric = results[0]["metric"]
    tests, valids = (
        [100 * result[f"{part}_{metric}"] for result in results] for part in ("test", "valid")
    )
    return {
        "metric": metric,
        "test_percent": statistics.mean(tests),
        "spread_percent": statistics.stdev(tests),
        "tests_percent": [round(test, 2) for test in tests],
        "valid_percent": statistics.mean(valids),
        "best_epochs": [result["best_epoch"] for result in results],
        "epochs": [result["epochs"] for result in results],
        "run_s": statistics.mean(result["run_s"] for result in results),
        "epoch_s": statistics.mean(result["epoch_s"] for result in results),
        "parameters": results[0]["parameters"],
    }


def gcnzc(words: Sequence[str]) -> str:
    """Run a command and return its stdout; its messages are shown only if it fails."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        status = cli.main(words)
    if status:
        print(f"gcnzc {' '.join(words)}\n{talk.getvalue()}", file=sys.stderr)
        raise SystemExit(status)
    return out.getvalue()


def words_of(command: str | Sequence[str], **paths: Path) -> list[str]:
    """Return the arguments of a command, with the names of `paths` replaced by the paths."""
    words = command.split() if isinstance(command, str) else command
    return [str(paths.get(word, word)) for word in words]


if __name__ == "__main__":
    sys.exit(main())
