"""Measure the error of quantized features, and its effect on accuracy.

    python -m bench.data.quantize [GRAPH ...] [--forms FORM ...] [--seeds N] [--archives FOLDER]

Each graph is prepared as float32, and from that in every other number format. The graph's first
recipe in bench/training/accuracy.py trains on each format, once per seed. A seed determines the
same initial weights, sampled neighbours and dropout for all formats, so that differences from
float32 are also computed per seed. The error is the L2 norm of the difference of the feature
tables, relative to the L2 norm of the float32 table. Without GRAPH, the graphs of `GRAPHS` are
measured.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.training import accuracy
from gcnzc.graph import load

GRAPHS = ("cora", "citeseer", "amazon_photo")
# name of a format to its options of `gcnzc prepare`, and the largest documented difference of the
# accuracy from float32, in percentage points, or None
FORMATS: dict[str, tuple[str, float | None]] = {
    "float32": ("--feature-dtype float32", None),
    "float16": ("--feature-dtype float16", 0.1),
    "bfloat16": ("--feature-dtype bfloat16", 0.1),
    "float8_e4m3fn": ("--feature-dtype float8_e4m3fn", None),
    "float8_e5m2": ("--feature-dtype float8_e5m2", None),
    "int8": ("--feature-dtype int8", 0.3),
    "int8-columns": ("--feature-dtype int8 --scales columns", 0.3),
}
DEFAULT_FORMATS = tuple(name for name in FORMATS if name != "float8_e5m2")
# rows of a table that are compared at a time
CHUNK_ROWS = 1000


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the formats and graphs of the command line."""
    options = parse(argv)
    for graph in options.graphs:
        recipe = next(recipe for recipe in accuracy.RECIPES if recipe.graph == graph)
        with tempfile.TemporaryDirectory() as folder:
            exact_folder = Path(folder) / "exact"
            archive = options.archives / graph / f"{graph}.npz"
            words = accuracy.words_of(accuracy.MADE_BY[graph], ARCHIVE=archive, GRAPH=exact_folder)
            accuracy.gcnzc(words)
            exact = None
            for form in options.forms:
                stored = Path(folder) / form
                command = f"prepare EXACT STORED {FORMATS[form][0]}"
                accuracy.gcnzc(accuracy.words_of(command, EXACT=exact_folder, STORED=stored))
                line = measure(recipe, form, stored, exact_folder, options.seeds, exact)
                exact = exact or line["tests_percent"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = accuracy.parser_of(__doc__)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMATS, default=DEFAULT_FORMATS, help="number formats"
    )
    options = accuracy.parse(parser, argv, accuracy.MADE_BY, GRAPHS)
    # first, since the others are compared with it
    options.forms = list(dict.fromkeys(["float32", *options.forms]))
    return options


def measure(
    recipe: accuracy.Recipe,
    form: str,
    stored: Path,
    exact_folder: Path,
    seeds: int,
    exact: Sequence[float] | None,
) -> dict[str, Any]:
    """Train once per seed on one format of a graph, and record the results.

    Args:
        recipe: options of training on the graph.
        form: name of the format of `stored`, a key of `FORMATS`.
        stored: prepared folder with features in this format.
        exact_folder: prepared folder with the original features.
        seeds: number of seeds.
        exact: test scores with float32 by seed, in percent; None for float32 itself.
    """
    words = f"train GRAPH {recipe.options}"
    results = accuracy.train_each_seed(accuracy.words_of(words, GRAPH=stored), seeds)
    scores = accuracy.scores_of(results)
    tests = [100 * result[f"test_{scores['metric']}"] for result in results]
    limit = FORMATS[form][1]
    differences = [one - other for one, other in zip(tests, exact or tests, strict=True)]
    difference = statistics.mean(differences)
    features = load.info(stored)["features"]
    return harness.record(
        "quantize",
        {"graph": recipe.graph, "model": results[0]["model"], "form": form},
        **scores | {"tests_percent": tests},
        relative_error=relative_error(exact_folder, stored),
        row_bytes=features["columns"] * getattr(torch, features["dtype"]).itemsize,
        # per seed; the mean of the differences equals the difference of the means
        difference_percent=difference,
        difference_spread_percent=statistics.stdev(differences),
        limit_percent=limit,
        within=None if limit is None else abs(difference) <= limit,
        command=f"gcnzc {words}",
        made_by=f"gcnzc prepare GRAPH GRAPH {FORMATS[form][0]}",
    )


def relative_error(exact_folder: Path, stored: Path) -> float:
    """Return the L2 norm of the difference of two folders' features, relative to the first's."""
    exact, quantized = load.load(exact_folder).table, load.load(stored).table
    assert exact is not None, "graphs with a recipe have features"
    assert quantized is not None, "preparing keeps the features"
    difference = total = 0.0
    for begin in range(0, len(exact), CHUNK_ROWS):
        ids = torch.arange(begin, min(begin + CHUNK_ROWS, len(exact)))
        rows = exact.gather(ids).double()
        difference += float((quantized.gather(ids).double() - rows).square().sum())
        total += float(rows.square().sum())
    return float((difference / total) ** 0.5)


if __name__ == "__main__":
    main()
