"""Measure the accuracy and the speed of training in mixed precision, compared with float32.

    python -m bench.training.precision CASE [CASE ...] [--precisions bf16] [--seeds 5]
                                       [--options "OPTIONS"] [--archives FOLDER ...]
                                       [--splits FOLDER]

A CASE is a preset of `gcnzc train`, such as tuned/amazon_computers-gcn, or a graph of
`bench.training.accuracy`, whose first recipe it trains with. Each seed is trained in float32 and in
each of the other precisions, one after the other and in turns of order, so that a slow phase of the
machine affects all of them. Only the precision differs between the runs of a seed: initial weights,
order and samples are the same. The model with the best validation score is tested, in float32.

A record has the mean over the seeds of the difference of the test scores, in points, and its 95 %
interval by Student's t distribution. `passes` says whether the mean is within 0.2 points or its
interval contains 0. The time of an epoch is the median over the epochs of a run after the first,
which compiles kernels; `speedup` is the median over the seeds of the ratio of float32's time to it.
`has_instructions` says whether the processor, or the GPU, has instructions for the precision.
OPTIONS override those of the case and are recorded, such as a smaller number of epochs.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

from bench import harness
from bench.training import accuracy, presets
from bench.training.accuracy import ARCHIVES, MADE_BY, gcnzc, words_of
from gcnzc.system.machine import cpu_flags
from gcnzc.train.precision import FAST_FLAGS
from gcnzc.train.presets import preset_names, read_preset

PRECISIONS = ("bf16", "fp16", "tf32")
LIMIT_POINTS = 0.2  # of the mean difference


@dataclass(frozen=True)
class Case:
    """A graph, and the options that it is trained with."""

    name: str
    graph: str
    options: str
    prepare: str  # the command that creates the folder GRAPH
    is_preset: bool


def find_case(name: str) -> Case:
    """Return the case of a preset or a graph.

    Raises:
        ValueError: there is neither.
    """
    if name in preset_names():
        preset = read_preset(name)
        prepare = f"prepare ARCHIVE GRAPH {preset.prepare}".rstrip()
        return Case(name, preset.data, f"--preset {name}", prepare, is_preset=True)
    for recipe in accuracy.RECIPES:
        if recipe.graph == name:
            return Case(name, name, recipe.options, MADE_BY[name], is_preset=False)
    raise ValueError(
        f"{name} is neither a preset nor a graph with a recipe\n\n"
        f"hint: {', '.join(MADE_BY)}, or a name that `gcnzc help preset` lists"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each case, and return 1 if a difference does not pass, otherwise 0."""
    asked = parse(argv)
    lines = []
    for case in map(find_case, asked.cases):
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            split = prepare(case, asked, scratch)
            words = ["train", str(scratch / "graph"), *f"{case.options} {asked.options}".split()]
            found = train_all(words, asked.precisions, asked.seeds, scratch)
            lines += [
                compare(case, split, asked.options, name, found["float32"], found[name])
                for name in asked.precisions
            ]
    return int(not all(line["passes"] for line in lines))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="CASE", help="a preset or a graph")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2")
    parser.add_argument("--options", default="", help="options of `gcnzc train`, in one word")
    parser.add_argument("--archives", type=Path, nargs="+", default=[ARCHIVES])
    parser.add_argument("--splits", type=Path, help="folder of NAME.npz, for presets")
    asked = parser.parse_args(argv)
    if asked.seeds < 2:
        parser.error("an interval needs at least two seeds")
    for name in asked.cases:
        try:
            find_case(name)
        except ValueError as error:
            parser.error(str(error))
    return asked


def prepare(case: Case, asked: argparse.Namespace, scratch: Path) -> str:
    """Prepare the graph of a case in the folder `graph` of `scratch`; return the split's name."""
    if case.is_preset:
        preset = read_preset(case.name)
        archive, split = presets.with_split(preset, asked.archives, asked.splits, scratch)
    else:
        paths = [folder / case.graph / f"{case.graph}.npz" for folder in asked.archives]
        archive = next((path for path in paths if path.exists()), paths[0])
        split = "that of bench.training.accuracy"
    gcnzc(words_of(case.prepare, ARCHIVE=archive, GRAPH=scratch / "graph"))
    return split


def train_all(
    words: Sequence[str], precisions: Sequence[str], seeds: int, scratch: Path
) -> dict[str, list[dict[str, Any]]]:
    """Train each seed in each precision, and return the results by precision, in seed order."""
    names = ["float32", *precisions]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names if seed % 2 == 0 else reversed(names):
            out = scratch / f"{name}-{seed}"
            given = ["--precision", name, "--seed", str(seed), "--out", str(out)]
            result = json.loads(gcnzc([*words, *given]))
            epochs = [
                json.loads(line)["epoch_s"]
                for line in (out / "record.jsonl").read_text().splitlines()
            ]
            result["steady_epoch_s"] = statistics.median(epochs[1:] or epochs)
            found[name].append(result)
    return found


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by Student's t distribution."""
    mean, count = statistics.mean(values), len(values)
    width = float(student.ppf(0.975, count - 1)) * statistics.stdev(values) / count**0.5
    return mean - width, mean + width


def has_instructions(precision: str) -> bool:
    """Return whether the device of the runs has instructions for a precision."""
    if torch.cuda.is_available():
        return precision == "fp16" or torch.cuda.get_device_capability() >= (8, 0)
    return bool(FAST_FLAGS.get(precision, set()) & cpu_flags())


def compare(
    case: Case,
    split: str,
    options: str,
    precision: str,
    plain: Sequence[Mapping[str, Any]],
    mixed: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Record the paired differences of a precision and float32, one pair for each seed."""
    metric = plain[0]["metric"]
    scores = [[100 * result[f"test_{metric}"] for result in results] for results in (plain, mixed)]
    differences = [after - before for before, after in zip(*scores, strict=True)]
    mean, (low, high) = statistics.mean(differences), interval_of_mean(differences)
    times = [[result["steady_epoch_s"] for result in results] for results in (plain, mixed)]
    return harness.record(
        "precision",
        {"case": case.name, "graph": case.graph, "precision": precision, "options": options},
        split=split,
        model=plain[0]["model"],
        device=plain[0]["device"],
        metric=metric,
        seeds=len(differences),
        float32_percent=statistics.mean(scores[0]),
        test_percent=statistics.mean(scores[1]),
        difference_points=mean,
        interval_points=[round(low, 3), round(high, 3)],
        differences_points=[round(each, 3) for each in differences],
        passes=abs(mean) <= LIMIT_POINTS or low <= 0 <= high,
        float32_epoch_s=statistics.median(times[0]),
        epoch_s=statistics.median(times[1]),
        speedup=statistics.median(one / other for one, other in zip(*times, strict=True)),
        has_instructions=has_instructions(precision),
        epochs=[result["epochs"] for result in (*plain, *mixed)],
        made_by=f"gcnzc {case.prepare}",
        command=f"gcnzc train GRAPH {case.options} {options} --precision {precision}".replace(
            "  ", " "
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
