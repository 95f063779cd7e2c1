"""The `gcnzc` command: prints results as JSON on stdout, progress and messages on stderr.

Each subcommand has a config class with its options; see `gcnzc.cli.commands`. An error is printed
as an `error:` and a `hint:` line, with `--debug` after its traceback. The exit status is 0, 1 after
a failure, or 2 if the command line is not valid.
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

from gcnzc._version import VERSION

# before torch is imported
from gcnzc.cli import _openmp as _openmp
from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.commands import COMMANDS
from gcnzc.cli.commands.train import train_command
from gcnzc.cli.errors import (
    DEBUG,
    FAILED,
    MISUSED,
    PASSING,
    OutputClosed,
    UsageError,
    complain,
    message_of,
    terminable,
)
from gcnzc.cli.output import flushed_output, logged_with, warned_with
from gcnzc.cli.parser import check_outputs, parse
from gcnzc.cli.runs import train_several
from gcnzc.exchange import init_group, is_worker
from gcnzc.exchange.launch import read_ranks
from gcnzc.kernels.compilation import report_compilation
from gcnzc.system.bus_errors import handled_bus_errors
from gcnzc.system.eager_optimizers import skip_compiler_import
from gcnzc.train import run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.output_files import Unsaved
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.setup import choose_device
from gcnzc.train.strategy_checks import check_workers
from gcnzc.train.trainer import Interrupted, PeerFailed, SavedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if argv is None:  # a process of its own
        skip_compiler_import()
    given = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in given if word != DEBUG]
    if words in (["--version"], ["-V"]):
        print(f"gcnzc {VERSION}")
        return 0
    try:
        reporter = Reporter()
        with handled_bus_errors(lambda text: complain(text, FAILED)), warned_with(reporter.say):
            return _run(words, len(words) < len(given), reporter)
    except OutputClosed:
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if len(words) < len(given):
            traceback.print_exc()
        return complain(message_of(error), MISUSED if isinstance(error, UsageError) else FAILED)


def _run(words: Sequence[str], is_debug: bool, reporter: Reporter) -> int:
    """Run a command line and return the exit status."""
    if sys.stdout is None:
        raise UsageError(
            "stdout is closed, and results are printed there\n\n"
            "hint: redirect it to a file, or by > /dev/null"
        )
    with flushed_output():  # of the help
        config = parse(words)
    if isinstance(config, TrainConfig):
        _check_workers(config)
    if isinstance(config, TrainConfig) and is_worker():
        if config.runs > 1:
            raise UsageError(
                f"--runs {config.runs} with torchrun\n\n"
                "hint: use --workers, or start torchrun once for each --seed"
            )
        return work(config, reporter, is_debug)
    if isinstance(config, TrainConfig) and config.runs > 1:
        return train_several(config, reporter, is_debug)
    if isinstance(config, TrainConfig) and config.workers > 1:
        return start_workers(config, [*words, DEBUG] if is_debug else words, reporter)
    if config is not None:
        check_outputs(config)
        with terminable(), report_compilation(reporter.say), logged_with(reporter.say):
            COMMANDS[type(config)](config, reporter)
    return 0


def _check_workers(config: TrainConfig) -> None:
    """Check that the strategy supports the number of workers of this command.

    Raises:
        UsageError: it does not, or the launcher's environment variables are invalid.
    """
    try:
        check_workers(config, read_ranks()[1] if is_worker() else config.workers)
    except ValueError as error:
        raise UsageError(str(error)) from None


def start_workers(config: TrainConfig, words: Sequence[str], reporter: Reporter) -> int:
    """Run `gcnzc train --workers N`: start this command in each worker, and wait for them."""
    # generated here, and not by each worker
    data = config.data or builtin_graph.prepared(reporter)
    worker_words = list(words)
    if config.data is None:
        worker_words.append(str(data))
    with run_folder.chosen_folder(replace(config, data=data)) as folder:
        if config.resume is None and config.out is None:
            worker_words += ["--out", str(folder)]
        return launch.launch(worker_words, config.workers, folder, config.restarts)


REMEDY = "`gcnzc train --resume RUN` resumes the run from its last checkpoint"


def work(config: TrainConfig, reporter: Reporter, is_debug: bool = False) -> int:
    """Run `gcnzc train` as one of several workers, and return the exit status."""
    if launch.has_reported_fatal_error():
        return 0
    backend = "gloo" if choose_device(config.device).type == "cpu" else "auto"
    try:
        with init_group(backend, timeout_s=config.timeout_s, remedy=REMEDY) as group:
            worker_reporter = reporter if group.rank == 0 else NullReporter()
            if launch.is_closed_to_new_machines():
                worker_reporter.say(
                    "if a machine fails in this run, no other one can replace it: set "
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines to permit that"
                )
            train_command(config, worker_reporter, group)
    except PeerFailed:
        return 0 if launch.report_fatal_error() else FAILED
    except (ValueError, OSError, OverflowError, Interrupted, Unsaved) as error:
        if isinstance(error, SavedRun) and launch.may_be_restarted():
            reporter.say(error.format_restart())
            return FAILED
        if is_debug:
            traceback.print_exc()
        status = complain(message_of(error), FAILED)
        if isinstance(error, OSError) and error.errno in PASSING:
            return status
        # restarted workers would fail in the same way
        return 0 if launch.report_fatal_error() else status
    return 0


if __name__ == "__main__":
    sys.exit(main())
