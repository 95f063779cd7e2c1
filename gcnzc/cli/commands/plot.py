"""The command that plots training curves."""

from gcnzc.cli.options import PlotConfig
from gcnzc.cli.output import print_json
from gcnzc.train import run_folder
from gcnzc.train.plots import curves
from gcnzc.train.progress import Reporter

COMPARISON = "comparison.png"


def plot_command(config: PlotConfig, reporter: Reporter) -> None:
    """`gcnzc plot`."""
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
