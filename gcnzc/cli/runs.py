"""`gcnzc train --runs N`: train with several random seeds, in this process or with workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.commands.train import summary_lines
from gcnzc.cli.errors import DEBUG
from gcnzc.cli.output import print_json, result_lines_to_stderr
from gcnzc.system import files
from gcnzc.train import run as train_run
from gcnzc.train import run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.output_files import Unsaved, format_unsaved_error
from gcnzc.train.progress import Reporter
from gcnzc.train.repeated_runs import format_summary, repeat


class _WorkersFailed(Exception):
    """Workers of a run failed or were stopped, and have reported that."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def train_several(config: TrainConfig, reporter: Reporter, is_debug: bool) -> int:
    """Run `gcnzc train --runs N`, and return the exit status."""

    def train_here(own: TrainConfig, run: Path) -> Mapping[str, Any]:
        result = train_run.train(own, run, reporter)
        for line in summary_lines(result, run):
            reporter.say(line)
        return result

    def train_with_workers(own: TrainConfig, run: Path) -> Mapping[str, Any]:
        place = "--resume" if own.run.resume else "--out"
        options = {"--config": folder / run_folder.RUNS, "--runs": 1, "--seed": own.loading.seed}
        words = ["train", *(str(word) for pair in options.items() for word in pair)]
        words += [place, str(run)] + [DEBUG] * is_debug
        with result_lines_to_stderr():
            status = launch.launch(words, own.run.workers, run, own.run.restarts)
        if status:
            raise _WorkersFailed(status)
        return files.read_json(run / run_folder.RESULT)

    config = config.replace(data=config.graph.data or builtin_graph.prepared(reporter))
    train_one = train_with_workers if config.run.workers > 1 else train_here
    try:
        with run_folder.chosen_folder(config) as folder:
            line = repeat(config, folder, train_one, reporter)
    except _WorkersFailed as failure:
        return failure.status
    reporter.say(format_summary(line))
    print_json(line)
    if line["unsaved"]:
        raise Unsaved(format_unsaved_error(folder, line["unsaved"]))
    return 0
