"""The command that exports the best model of a run as a program for torch."""

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from gcnzc.cli.output import print_json
from gcnzc.train.export import export_run
from gcnzc.train.hetero.export import export_hetero_run
from gcnzc.train.hetero.prediction import TrainedHeteroModel
from gcnzc.train.options import check_options
from gcnzc.train.prediction import load_model
from gcnzc.train.progress import Reporter


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export the best model of a run as a program that torch runs without gcnzc.

    Writes a .pt2 file with torch.export, compares its outputs with the model's, and prints one JSON
    line. The program takes the blocks of a minibatch as plain tensors. Embeddings of node types
    without features are written to a file beside it, with the suffix .embeddings.npz.
    """

    run: tyro.conf.Positional[Path]
    """run folder that `gcnzc train` wrote"""
    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph with the same features, on which the outputs are compared; the graph of the
    run if not given"""
    out: Path
    """.pt2 file to write; torch.export.load reads it"""

    def __post_init__(self) -> None:
        check_options(self)


def export_command(config: ExportConfig, reporter: Reporter) -> None:
    """`gcnzc export`."""
    began = time.perf_counter()
    loaded = load_model(config.run, config.data, "cpu")
    is_replaced = config.out.exists()
    with reporter.task("export"):
        if isinstance(loaded, TrainedHeteroModel):
            description = export_hetero_run(loaded, config.out)
        else:
            description = export_run(loaded, config.out)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "out": str(config.out),
            **description,
            "best_epoch": loaded.epoch,
            "seconds": time.perf_counter() - began,
        }
    )
