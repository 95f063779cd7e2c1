"""Measure the error of quantized features, and its effect on accuracy.

    python -m bench.data.quantize [GRAPH ...] [--forms FORM ...] [--seeds N] [--archives FOLDER]

A graph is prepared once as float32 and from that in every other form, and the first recipe of
bench/training/accuracy.py for it trains once a seed on each. Seeds draw the same initial weights,
neighbours and dropout whatever the form, so that differences from float32 are also taken seed by
seed. The error is that of the whole table, relative in the L2 norm. Without GRAPH those of
`GRAPHS`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.training import accuracy
from gcnzc.graph import load

GRAPHS = ("cora", "citeseer", "amazon_photo")
# of `gcnzc prepare`, and by how many points of accuracy a form may differ from float32, if stated
FORMS: dict[str, tuple[str, float | None]] = {
    "float32": ("--feature-dtype float32", None),
    "float16": ("--feature-dtype float16", 0.1),
    "bfloat16": ("--feature-dtype bfloat16", 0.1),
    "float8_e4m3fn": ("--feature-dtype float8_e4m3fn", None),
    "float8_e5m2": ("--feature-dtype float8_e5m2", None),
    "int8": ("--feature-dtype int8", 0.3),
    "int8-columns": ("--feature-dtype int8 --scales columns", 0.3),
}
USUAL = tuple(form for form in FORMS if form != "float8_e5m2")
# of a table that is compared at a time
PART_ROWS = 1000


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every form of the graphs asked for."""
    asked = options(argv)
    lines: list[dict[str, Any]] = []
    for graph in asked.graphs:
        recipe = next(recipe for recipe in accuracy.RECIPES if recipe.graph == graph)
        with tempfile.TemporaryDirectory() as folder:
            made, archive = Path(folder) / "made", asked.archives / graph / f"{graph}.npz"
            accuracy.gcnzc(accuracy.words_of(accuracy.MADE_BY[graph], ARCHIVE=archive, GRAPH=made))
            exact = None
            for form in asked.forms:
                stored = Path(folder) / form
                words = f"prepare MADE STORED {FORMS[form][0]}"
                accuracy.gcnzc(accuracy.words_of(words, MADE=made, STORED=stored))
                line = measure(recipe, form, stored, made, asked.seeds, exact)
                exact = exact or line["tests_percent"]
                lines.append(line)
    print_table(lines)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(accuracy.MADE_BY)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=known)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=USUAL, metavar="FORM")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on; at least 2")
    parser.add_argument("--archives", type=Path, default=accuracy.ARCHIVES)
    asked = parser.parse_args(argv)
    asked.graphs = list(dict.fromkeys(asked.graphs or GRAPHS))
    if unknown := [graph for graph in asked.graphs if graph not in accuracy.MADE_BY]:
        parser.error(f"no recipe for {', '.join(unknown)}; there are {known}")
    if asked.seeds < 2:
        parser.error("a spread needs at least two seeds")
    # what the others are compared with comes first
    asked.forms = list(dict.fromkeys(["float32", *asked.forms]))
    return asked


def measure(
    recipe: accuracy.Recipe,
    form: str,
    stored: Path,
    made: Path,
    seeds: int,
    exact: Sequence[float] | None,
) -> dict[str, Any]:
    """Train once a seed on one form of a graph, and record what that came to.

    Args:
        recipe: of the graph.
        form: of `FORMS`, in which `stored` is.
        stored: the prepared folder.
        made: that of the features as they are.
        seeds: how many.
        exact: test figures of float32 by seed, in percent; None for float32 itself.
    """
    words = f"train GRAPH {recipe.options}"
    results, begin = [], time.perf_counter()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as runs:
            here = ["--seed", str(seed), "--out", str(Path(runs) / "run")]
            run = accuracy.gcnzc([*accuracy.words_of(words, GRAPH=stored), *here])
            results.append(json.loads(run))
    metric = results[0]["metric"]
    tests = [100 * result[f"test_{metric}"] for result in results]
    mean, limit = statistics.mean(tests), FORMS[form][1]
    differences = [one - other for one, other in zip(tests, exact or tests, strict=True)]
    difference = statistics.mean(differences)
    about = load.info(stored)["features"]
    return harness.record(
        "quantize",
        {"graph": recipe.graph, "model": results[0]["model"], "form": form},
        metric=metric,
        relative_error=relative_error(made, stored),
        row_bytes=about["columns"] * getattr(torch, about["dtype"]).itemsize,
        test_percent=mean,
        spread_percent=statistics.stdev(tests),
        tests_percent=tests,
        # seed by seed; the mean is that of the two means' difference
        difference_percent=difference,
        difference_spread_percent=statistics.stdev(differences),
        limit_percent=limit,
        within=None if limit is None else abs(difference) <= limit,
        run_s=(time.perf_counter() - begin) / seeds,
        command=f"gcnzc {words}",
        made_by=f"gcnzc prepare GRAPH GRAPH {FORMS[form][0]}",
    )


def relative_error(made: Path, stored: Path) -> float:
    """Return the L2 norm of the difference of two folders' features, relative to the first's."""
    exact, found = load.load(made).table, load.load(stored).table
    assert exact is not None, "a graph with a recipe has features"
    assert found is not None, "and so has what is prepared of it"
    off = size = 0.0
    for begin in range(0, len(exact), PART_ROWS):
        ids = torch.arange(begin, min(begin + PART_ROWS, len(exact)))
        rows = exact.gather(ids).double()
        off += float((found.gather(ids).double() - rows).square().sum())
        size += float(rows.square().sum())
    return float((off / size) ** 0.5)


def print_table(lines: Iterable[dict[str, Any]]) -> None:
    """Print one row for each format."""
    print(
        f"\n{'graph':22}{'model':6}{'form':15}{'bytes/row':>10}{'error':>10}{'test %':>15}"
        f"{'- float32':>15}"
    )
    for line in lines:
        test = f"{line['test_percent']:.2f} ± {line['spread_percent']:.2f}"
        off = f"{line['difference_percent']:+.2f} ± {line['difference_spread_percent']:.2f}"
        told = ""
        if line["limit_percent"] is not None:
            told = f"  {'within' if line['within'] else 'NOT within'} {line['limit_percent']}"
        print(
            f"{line['graph']:22}{line['model']:6}{line['form']:15}{line['row_bytes']:>10,}"
            f"{line['relative_error']:>10.1e}{test:>15}{off:>15}{told}"
        )


if __name__ == "__main__":
    sys.exit(main())
