"""The command that plots training curves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gcnzc.cli.errors import UsageError
from gcnzc.cli.output import print_json
from gcnzc.train import run_folder
from gcnzc.train.plots import curves
from gcnzc.train.progress import Reporter

COMPARISON = "comparison.png"


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Plot loss, scores and epoch times of one or more runs in one image."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)"),
    ]
    """run folders that `gcnzc train` wrote; the folder of --runs stands for all of its runs"""
    out: Path | None = None
    """image to write; if not given, curves.png in the folder of the run, or for several runs,
    comparison.png beside the first one"""


def plot_command(config: PlotConfig, reporter: Reporter) -> None:
    """`gcnzc plot`."""
    if not config.runs:
        raise UsageError("no run is given\n\nhint: `gcnzc plot runs/NAME` plots a run")
    first = config.runs[0]
    if len(config.runs) == 1:
        default = first / run_folder.CURVES
    else:
        # "." and ".." have a parent only as absolute paths
        default = (first if first.name not in ("", "..") else first.resolve()).parent / COMPARISON
    out = config.out or default
    runs = [run for given in config.runs for run in run_folder.expand_runs(given)]
    curves(runs, out)
    print_json({"runs": [str(run) for run in runs], "picture": str(out)})
