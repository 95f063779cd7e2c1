"""Measure the accuracy of models trained on real graphs, over several seeds.

    python -m bench.training.accuracy [GRAPH ...] [--sampler gcnzc dgl none] [--seeds N]
                                     [--archives FOLDER]

Each result is measured by the gcnzc commands that are recorded with it; only the seed differs
between runs. The graph is prepared, a model trains on minibatches of sampled neighbours, or with
the sampler `none` on the whole graph, and the model with the best validation score is tested with
all neighbours. Without GRAPH, all graphs are measured. With the samplers of gcnzc and DGL, their
difference is compared with the standard deviation over the seeds. The exit status is 1 if a mean is
below its target.

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
        kind = self.options.split()[1]
        return f"{kind}, label inputs" if "--label-inputs" in self.options else kind


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
    "ogbn_arxiv_structure": "embed ARCHIVE GRAPH --dims 128",
}

# a batch has all training nodes, so an epoch is one step; evaluating the 500 validation nodes only
# every fifth step is faster, and makes it less likely that an early epoch is the best by chance
STEPS = "--layers 2 --lr 0.01 --weight-decay 5e-4 --epochs 200 --evaluate-every 5"
PLANETOID, PLANETOID_FULL = f"{STEPS} --fanouts 10,10", f"{STEPS} --batch-size all"
WORDS = "--hidden 64 --dropout 0.5 --input-dropout 0.5"
ATTENTION = (
    "--hidden 8 --heads 8 --output-heads 1 --no-skip "
    "--dropout 0.6 --input-dropout 0.6 --attention-dropout 0.6"
)
AMAZON = "--layers 2 --fanouts 10,10 --hidden 128 --norm batch --batch-size 512 --epochs 30"
# about as many steps
AMAZON_FULL = (
    "--layers 2 --hidden 128 --norm batch --batch-size all --epochs 300 --evaluate-every 10"
)
# rows have 27 and 34 KB: small fan-outs limit the bytes that are gathered per batch
COAUTHOR = "--layers 2 --fanouts 5,5 --hidden 64 --batch-size 256"
ARXIV = "--layers 2 --fanouts 10,10 --hidden 256 --norm batch"

RECIPES = (
    Recipe("cora", 80.5, f"--model gcn {PLANETOID} {WORDS} --batch-size 140"),
    Recipe("cora", 81.0, f"--model gat {PLANETOID} {ATTENTION} --batch-size 140"),
    Recipe("cora", 79.0, f"--model sage {PLANETOID} {WORDS} --batch-size 140"),
    Recipe("citeseer", 69.5, f"--model gcn {PLANETOID} {WORDS} --batch-size 120"),
    Recipe("amazon_computers", 88.5, f"--model sage {AMAZON}"),
    Recipe("amazon_photo", 93.5, f"--model sage {AMAZON}"),
    Recipe("coauthor_cs", 93.0, f"--model sage {COAUTHOR} --epochs 10"),
    Recipe("coauthor_physics", 95.5, f"--model sage {COAUTHOR} --epochs 5"),
    Recipe(
        "tolokers",
        81.0,
        "--model sage --layers 3 --fanouts 10,10,10 --hidden 128 --norm batch --dropout 0.2 "
        "--batch-size 512 --epochs 100 --patience 25",
    ),
    Recipe(
        "digits",
        96.0,
        "--model sage --layers 2 --fanouts 10,10 --hidden 64 --norm batch --lr 0.01 "
        "--batch-size 128 --epochs 40 --patience 15",
    ),
    Recipe(
        "ogbn_arxiv_structure",
        66.0,
        f"--model sage {ARXIV} --epochs 8",
    ),
    Recipe(
        "ogbn_arxiv_structure",
        70.0,
        f"--model sage {ARXIV} --epochs 16 --schedule cosine --label-inputs 0.5",
    ),
    Recipe("cora", 81.5, f"--model gcn {PLANETOID_FULL} {WORDS}"),
    Recipe("cora", 81.0, f"--model gat {PLANETOID_FULL} {ATTENTION}"),
    Recipe("cora", 79.0, f"--model sage {PLANETOID_FULL} {WORDS}"),
    Recipe("citeseer", 70.7, f"--model gcn {PLANETOID_FULL} {WORDS}"),
    Recipe("amazon_photo", 93.5, f"--model sage {AMAZON_FULL}"),
    Recipe("amazon_computers", 88.5, f"--model sage {AMAZON_FULL}"),
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
    print_table(lines)
    return int(any(not line["reached"] for line in lines))


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=", ".join(MADE_BY))
    parser.add_argument("--sampler", nargs="+", choices=SAMPLERS, default=SAMPLERS[:1])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2")
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of NAME/NAME.npz")
    asked = parser.parse_args(argv)
    unknown = [graph for graph in asked.graphs if graph not in MADE_BY]
    if unknown:
        parser.error(f"no recipe for {', '.join(unknown)}; there are {', '.join(MADE_BY)}")
    if asked.seeds < 2:
        parser.error("a standard deviation needs at least two seeds")
    asked.graphs = list(dict.fromkeys(asked.graphs)) or list(MADE_BY)
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
        results, seconds = [], []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as runs:
                here = ["--seed", str(seed), "--out", str(Path(runs) / "run")]
                begin = time.perf_counter()
                results.append(json.loads(gcnzc([*words_of(words, GRAPH=prepared), *here])))
                seconds.append(time.perf_counter() - begin)
        lines.append(record(recipe, sampler, f"gcnzc {words}", results, seconds))
    if len(lines) == 2:
        compare(*lines)
    return lines


def record(
    recipe: Recipe,
    sampler: str,
    command: str,
    results: Sequence[dict[str, Any]],
    seconds: Sequence[float],
) -> dict[str, Any]:
    """Record the mean and standard deviation over the seeds."""
    metric = results[0]["metric"]
    tests = [100 * result[f"test_{metric}"] for result in results]
    valids = [100 * result[f"valid_{metric}"] for result in results]
    mean = statistics.mean(tests)
    return harness.record(
        "accuracy",
        {"graph": recipe.graph, "model": recipe.model, "sampler": sampler},
        metric=metric,
        test_percent=mean,
        spread_percent=statistics.stdev(tests),
        target_percent=recipe.target_percent,
        reached=mean >= recipe.target_percent,
        tests_percent=[round(test, 2) for test in tests],
        valid_percent=statistics.mean(valids),
        best_epochs=[result["best_epoch"] for result in results],
        epochs=[result["epochs"] for result in results],
        run_s=statistics.mean(seconds),
        epoch_s=statistics.mean(result["epoch_s"] for result in results),
        parameters=results[0]["parameters"],
        made_by=f"gcnzc {MADE_BY[recipe.graph]}",
        command=command,
    )


def compare(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Record the difference of two samplers, and the standard deviation of the difference."""
    spread = (ours["spread_percent"] ** 2 + other["spread_percent"] ** 2) ** 0.5
    difference = ours["test_percent"] - other["test_percent"]
    harness.record(
        "accuracy",
        {
            "graph": ours["graph"],
            "model": ours["model"],
            "sampler": f"{ours['sampler']} - {other['sampler']}",
        },
        difference_percent=difference,
        spread_percent=spread,
        within_spread=abs(difference) <= spread,
    )


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


def print_table(lines: Iterable[dict[str, Any]]) -> None:
    """Print one row for each result."""
    print(f"\n{'graph':22}{'model':7}{'sampler':9}{'test %':>15}{'target':>8}{'per run':>9}")
    for line in lines:
        test = f"{line['test_percent']:.2f} ± {line['spread_percent']:.2f}"
        missed = "" if line["reached"] else "  missed"
        print(
            f"{line['graph']:22}{line['model']:7}{line['sampler']:9}{test:>15}"
            f"{line['target_percent']:>8}{line['run_s']:>7.1f} s{missed}"
        )


if __name__ == "__main__":
    sys.exit(main())
