"""`gcnzc train --runs N`: train with several random seeds, in this process or with workers."""

from collections.abc import Mapping
from dataclasses import replace
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
from gcnzc.train.options import config_to_dict, option_name
from gcnzc.train.output_files import Unsaved, format_unsaved_error
from gcnzc.train.progress import Reporter
from gcnzc.train.repeated_runs import TrainOne, format_summary, repeat
from gcnzc.train.resume import FREE_ON_RESUME


class _WorkersFailed(Exception):
    """A worker of a run failed, and has reported its error."""


def train_several(config: TrainConfig, reporter: Reporter, is_debug: bool) -> int:
    """Run `gcnzc train --runs N`, and return the exit status."""
    if config.workers > 1:
        # the launcher handles signals itself
        return _train_several(config, reporter, lambda folder: _with_workers(folder, is_debug))
    with terminable(), report_compilation(reporter.say):
        return _train_several(config, reporter, lambda folder: _in_this_process(reporter))


def _train_several(config: TrainConfig, reporter: Reporter, runner: Any) -> int:
    data = config.data or builtin_graph.prepared(reporter)
    config = replace(config, data=data)
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
        words = _resumed_words(config, run) if config.resume else _new_words(config, folder, run)
        words += [DEBUG] if is_debug else []
        with result_lines_to_stderr():
            status = launch.launch(words, config.workers, run, config.restarts)
        if status:
            raise _WorkersFailed
        return files.read_json(run / run_folder.RESULT)

    return train_one


def _new_words(config: TrainConfig, folder: Path, run: Path) -> list[str]:
    options = {"--runs": 1, "--seed": config.seed, "--out": run}
    words = ["train", "--config", str(folder / run_folder.RUNS)]
    return words + [str(word) for option in options.items() for word in option]


def _resumed_words(config: TrainConfig, run: Path) -> list[str]:
    """Return the words that resume a run with the options that this command changes."""
    words = ["train", "--resume", str(run)]
    before, now = config_to_dict(run_folder.read_config(run)), config_to_dict(config)
    for name in sorted(FREE_ON_RESUME - {"data", "out", "resume", "config"}):
        value = now[name]
        if value != before[name]:
            is_flag = isinstance(value, bool)
            words.append(option_name(name if value or not is_flag else f"no_{name}"))
            words += [] if is_flag else [str(value)]
    return [*words[:1], str(config.data), *words[1:]]
