"""The command that draws a run."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from gcnzc.cli.errors import Misuse
from gcnzc.cli.output import print_json
from gcnzc.train import run_folder
from gcnzc.train.plots import curves
from gcnzc.train.progress import Reporter


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw the curves of one run, or of several in one picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders that `gcnzc train` wrote"""
    out: Path | None = None
    """picture to write; curves.png in the first run if not given"""


def plot_command(config: PlotConfig, reporter: Reporter) -> None:
    """`gcnzc plot`."""
    if not config.runs:
        raise Misuse("no run to plot\n\nhint: gcnzc plot runs/NAME")
    out = config.out or config.runs[0] / run_folder.CURVES
    curves(config.runs, out)
    print_json({"runs": [str(run) for run in config.runs], "picture": str(out)})
