"""`gcnzc train --runs N`: train with several random seeds, in this process or with workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.commands.train import summary_lines
from gcnzc.cli.errors import DEBUG, FAILED, terminable
from gcnzc.cli.output import print_json, result_lines_to_stderr
from gcnzc.kernels.compilation import report_compilation
from gcnzc.system import files
from gcnzc.train import run as train_run
from gcnzc.train import run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import rows
from gcnzc.train.output_files import Unsaved, format_unsaved_error
from gcnzc.train.progress import Reporter
from gcnzc.train.repeated_runs import TrainOne, format_summary, repeat
from gcnzc.train.values import shown


class _WorkersFailed(Exception):
    """A worker of a run failed, and has reported its error."""


def train_several(config: TrainConfig, reporter: Reporter, is_debug: bool) -> int:
    """Run `gcnzc train --runs N`, and return the exit status."""
    if config.run.workers > 1:
        # the launcher handles signals itself
        return _train_several(config, reporter, lambda folder: _with_workers(folder, is_debug))
    with terminable(), report_compilation(reporter.say):
        return _train_several(config, reporter, lambda folder: _in_this_process(reporter))


def _train_several(config: TrainConfig, reporter: Reporter, runner: Any) -> int:
    data = config.graph.data or builtin_graph.prepared(reporter)
    config = config.replace(data=data)
    try:
        with run_folder.chosen_folder(config) as folder:
            line = repeat(config, folder, runner(folder), reporter)
    except _WorkersFailed:
        return FAILED
    reporter.say(format_summary(line))
    print_json(line)
    if line["unsaved"]:
        raise Unsaved(format_unsaved_error(folder, line["unsaved"]))
    return 0


def _in_this_process(reporter: Reporter) -> TrainOne:
    def train_one(config: TrainConfig, run: Path) -> Mapping[str, Any]:
        result = train_run.train(config, run, reporter)
        for line in summary_lines(result, run):
            reporter.say(line)
        return result

    return train_one


def _with_workers(folder: Path, is_debug: bool) -> TrainOne:
    """Return a function that launches the workers of one run after the other."""

    def train_one(config: TrainConfig, run: Path) -> Mapping[str, Any]:
        words = (
            _resumed_words(config, run) if config.run.resume else _new_words(config, folder, run)
        )
        words += [DEBUG] if is_debug else []
        with result_lines_to_stderr():
            status = launch.launch(words, config.run.workers, run, config.run.restarts)
        if status:
            raise _WorkersFailed
        return files.read_json(run / run_folder.RESULT)

    return train_one


def _new_words(config: TrainConfig, folder: Path, run: Path) -> list[str]:
    options = {"--runs": 1, "--seed": config.loading.seed, "--out": run}
    words = ["train", "--config", str(folder / run_folder.RUNS)]
    return words + [str(word) for option in options.items() for word in option]


def _resumed_words(config: TrainConfig, run: Path) -> list[str]:
    """Return the words that resume a run with the options that this command changes."""
    words = ["train", "--resume", str(run)]
    before = run_folder.read_config(run)
    for name, row in rows(TrainConfig).items():
        value = config[name]
        is_kept = not row.free or name in ("data", "out", "resume", "config")
        if not is_kept and value != before[name]:
            is_flag = isinstance(value, bool)
            words.append(row.flag if value or not is_flag else f"--no-{row.flag[2:]}")
            words += [] if is_flag else [shown(value)]
    return [*words[:1], str(config.graph.data), *words[1:]]
