"""Run a command whose options are parsed, in this process or in workers that it starts."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.commands.train import train_command
from gcnzc.cli.errors import (
    DEBUG,
    FAILED,
    PASSING,
    UsageError,
    complain,
    report,
    terminable,
    usage_error,
)
from gcnzc.cli.options import COMMANDS
from gcnzc.cli.output import logged_with, warned_with
from gcnzc.cli.runs import train_several
from gcnzc.exchange import init_group, is_worker
from gcnzc.exchange.launch import read_ranks
from gcnzc.kernels.compilation import report_compilation
from gcnzc.system.bus_errors import handled_bus_errors
from gcnzc.system.eager_optimizers import skip_compiler_import
from gcnzc.train import run_folder
from gcnzc.train.build import check_options
from gcnzc.train.config import TrainConfig
from gcnzc.train.errors import Interrupted, PeerFailed, SavedRun
from gcnzc.train.options import Options
from gcnzc.train.output_files import Unsaved
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.setup import choose_device


def execute(
    command: str, config: Options, words: Sequence[str], *, is_debug: bool, is_process: bool
) -> int:
    """Run a command and return the exit status.

    Args:
        command: its name.
        config: its options.
        words: the command line, for workers.
        is_debug: whether workers print the tracebacks of errors.
        is_process: whether this process runs nothing else.
    """
    if is_process:
        skip_compiler_import()
    reporter = Reporter()
    with handled_bus_errors(lambda text: complain(text, FAILED)), warned_with(reporter.say):
        if isinstance(config, TrainConfig):
            _check(config)
            if is_worker():
                return work(config, reporter, is_debug)
        with terminable(), _watched(reporter):
            if isinstance(config, TrainConfig):
                return _train(config, words, reporter, is_debug)
            module, _, name = COMMANDS[command][1].partition(":")
            getattr(import_module(module), name)(config, reporter)
    return 0


@contextmanager
def _watched(reporter: Reporter) -> Iterator[None]:
    """Within the `with`, show what the package logs, and that kernels are compiled."""
    with report_compilation(reporter.say), logged_with(reporter.say):
        yield


def _check(config: TrainConfig) -> None:
    """Check what `gcnzc train` can check before it reads the graph.

    Raises:
        UsageError: an option is not valid.
    """
    try:
        check_options(config, read_ranks()[1] if is_worker() else config.run.workers)
    except (TypeError, ValueError) as error:
        raise usage_error(error, "train") from None
    runs, out = config.training.runs, config.run.out
    if is_worker() and runs > 1:
        raise UsageError(
            f"--runs {runs} with torchrun\n\n"
            "hint: use --workers, or start torchrun once for each --seed"
        )
    if not is_worker() and out is not None and out.is_file():
        raise UsageError(f"--out: {out} is a file\n\nhint: give a new folder, or omit --out")


def _train(config: TrainConfig, words: Sequence[str], reporter: Reporter, is_debug: bool) -> int:
    """Run `gcnzc train`, not as a worker."""
    if config.training.runs > 1:
        return train_several(config, reporter, is_debug)
    if config.run.workers > 1:
        return start_workers(config, [*words, DEBUG] if is_debug else words, reporter)
    train_command(config, reporter)
    return 0


def start_workers(config: TrainConfig, words: Sequence[str], reporter: Reporter) -> int:
    """Run `gcnzc train --workers N`: start this command in each worker, and wait for them."""
    # generated here, and not by each worker
    data = config.graph.data or builtin_graph.prepared(reporter)
    worker_words = list(words)
    if config.graph.data is None:
        worker_words.append(str(data))
    with run_folder.chosen_folder(config.replace(data=data)) as folder:
        if config.run.resume is None and config.run.out is None:
            worker_words += ["--out", str(folder)]
        return launch.launch(worker_words, config.run.workers, folder, config.run.restarts)


REMEDY = "`gcnzc train --resume RUN` resumes the run from its last checkpoint"


def work(config: TrainConfig, reporter: Reporter, is_debug: bool = False) -> int:
    """Run `gcnzc train` as one of several workers, and return the exit status."""
    if launch.has_reported_fatal_error():
        return 0
    backend = "gloo" if choose_device(config.run.device).type == "cpu" else "auto"
    try:
        with init_group(backend, timeout_s=config.run.timeout_s, remedy=REMEDY) as group:
            worker_reporter = reporter if group.rank == 0 else NullReporter()
            if launch.is_closed_to_new_machines():
                worker_reporter.say(
                    "if a machine fails in this run, no other one can replace it: set "
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines to permit that"
                )
            with _watched(worker_reporter):
                train_command(config, worker_reporter, group)
    except PeerFailed:
        return 0 if launch.report_fatal_error() else FAILED
    except (ValueError, OSError, OverflowError, Interrupted, Unsaved) as error:
        if isinstance(error, SavedRun) and launch.may_be_restarted():
            reporter.say(f"{error}, unless the launcher restarts the workers, which does so")
            return FAILED
        if is_debug:
            traceback.print_exc()
        status = report(error)
        if isinstance(error, OSError) and error.errno in PASSING:
            return status
        # restarted workers would fail in the same way
        return 0 if launch.report_fatal_error() else status
    return 0
