"""The command that exports the best model of a run as a program for torch."""

import time

from gcnzc.cli.options import ExportConfig
from gcnzc.cli.output import print_json
from gcnzc.train.export import export_run
from gcnzc.train.hetero.export import export_hetero_run
from gcnzc.train.hetero.prediction import TrainedHeteroModel
from gcnzc.train.prediction import load_model
from gcnzc.train.progress import Reporter


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
