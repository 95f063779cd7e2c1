"""The command that exports the best model of a run as a program for torch."""

import time

from gcnzc.cli.options import ExportConfig
from gcnzc.cli.output import print_json
from gcnzc.train.export import export_run
from gcnzc.train.progress import Reporter
from gcnzc.train.trained import open_trained


def export_command(config: ExportConfig, reporter: Reporter) -> None:
    """`gcnzc export`."""
    began = time.perf_counter()
    trained = open_trained(config.run, config.data, "cpu")
    is_replaced = config.out.exists()
    with reporter.task("export"):
        description = export_run(trained, config.out)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "out": str(config.out),
            **description,
            "best_epoch": trained.epoch,
            "seconds": time.perf_counter() - began,
        }
    )
