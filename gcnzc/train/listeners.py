"""The callbacks of each run: the best model, records, TensorBoard, progress.

Those for statistics, traces, results and checkpoints are in `epoch_stats`, `tracing`, `results` and
`checkpointing`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from gcnzc.datasets.source import SPLITS
from gcnzc.system.array_file import verify_arrays
from gcnzc.system.files import append_whole
from gcnzc.train import checkpoint, record
from gcnzc.train.callbacks import Callback
from gcnzc.train.epoch_stats import Statistics
from gcnzc.train.errors import StopTraining
from gcnzc.train.results import format_drop_warning, format_epoch
from gcnzc.train.run_folder import BEST, BOARD, RECORD, WORKERS, best_rows
from gcnzc.train.state import Run
from gcnzc.train.tensorboard import EventFile
from gcnzc.train.weight_average import format_average_warning


class Best(Callback):
    """Keeps the weights with the best validation score, and stops a run without progress."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """epoch, validation score and scores of the best model, and on the first worker its
        weights (`model`); empty before the first evaluation"""
        self.is_written = False

    def on_start(self, run: Run) -> None:
        """See `Callback`; a run that was resumed after its end has nothing left to do."""
        run.best = {name: value for name, value in self.state.items() if name != "model"}
        if run.embeddings is not None and run.best:
            run.on_first(lambda: self._check_rows(run))
        if not run.in_epoch:
            self.check_patience(run)

    def on_evaluate(self, run: Run) -> None:
        """See `Callback`."""
        assert run.evaluated is not None, "the event follows an evaluation"
        valid = run.scores[run.task.metric]["valid"]
        if math.isnan(valid) and not run.best:
            run.reporter.say(
                f"the validation {run.task.metric} is not defined, since the labels of the "
                "validation split have a single class: the model of the first evaluation remains "
                "the best one"
            )
        if not run.best or valid > run.best["valid"]:
            run.best = {"epoch": run.epoch, "valid": valid, "scores": run.scores}
            # without its rows the model is of no use: the files of the best one before it remain
            has_rows = run.embeddings is None or run.embeddings.keep_best(run.files, run.epoch)
            if run.is_first and has_rows:
                weights = run.evaluated.state_dict()
                model = {name: value.clone() for name, value in weights.items()}
                self.state, self.is_written = {**run.best, "model": model}, False

    def on_record(self, run: Run) -> None:
        """See `Callback`."""
        self.write(run)
        self.check_patience(run)

    def check_patience(self, run: Run) -> None:
        """Stop the run if it has not improved for --patience evaluations.

        Raises:
            StopTraining: it has not.
        """
        patience, epoch = run.config.training.patience, run.best.get("epoch", 0)
        later = [line for line in run.lines[epoch + 1 :] if f"valid_{run.task.metric}" in line]
        if patience and len(later) >= patience and run.epoch < run.config.training.epochs:
            found = "evaluation" if patience == 1 else f"{patience} evaluations"
            raise StopTraining(
                f"--patience {patience}: the last {found} found no better model than that of epoch "
                f"{epoch + 1}"
            )

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self.write(run)

    def _check_rows(self, run: Run) -> None:
        try:
            verify_arrays(best_rows(run.folder, run.best["epoch"]))
        except (OSError, ValueError) as error:
            cause = str(error).partition("\n\n")[0]
            run.reporter.say(
                f"warning: the best model is lost: {cause}; none can be evaluated until an epoch "
                "is better"
            )

    def write(self, run: Run) -> None:
        """Write the best model on the first worker, also if its file was removed."""
        path = run.folder / BEST
        if run.is_first and self.state and not (self.is_written and path.exists()):
            self.is_written = run.files.attempt(BEST, partial(checkpoint.save, path, self.state))

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`; the file of the best model may be newer than a checkpoint."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.state = dict(state)


class Record(Callback):
    """Writes record.jsonl, and with several workers workers.jsonl, with lines for each epoch.

    Args:
        statistics: of the epoch.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.num_written = self.num_worker_lines = 0

    def on_start(self, run: Run) -> None:
        """See `Callback`; the checkpoint has all lines, so this also repairs a damaged file."""
        path = run.folder / WORKERS
        self.workers = record.Journal(path)
        if run.is_first and (run.lines or (run.folder / RECORD).exists()):
            self.write(run)
            if path.exists():
                record.rewrite(path, record.read(path)[: self.num_worker_lines])

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        workers = self.statistics.workers
        if not run.is_first or len(workers) == 1:
            return  # record.jsonl has the same figures
        self.num_worker_lines += len(workers)
        for worker, stats in enumerate(workers):
            line = {"epoch": run.epoch, "worker": worker, **stats.seconds.all()}
            line |= {"seeds": stats.seeds, "steps": stats.steps, "bytes_sent": stats.bytes_sent}
            if stats.minibatches:
                line["dropped_share"] = stats.dropped_share
            self.workers.pending += record.to_line(line)

    def on_record(self, run: Run) -> None:
        """See `Callback`."""
        if self.num_written == len(run.lines):
            self.num_written = 0  # the line of the last epoch has changed
        self.on_end(run)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            run.files.attempt(WORKERS, self.workers.append)
            run.files.attempt(RECORD, lambda: self.write(run))

    def write(self, run: Run) -> None:
        """Write the lines that the file does not have yet; all of them to one that was removed."""
        path = run.folder / RECORD
        if self.num_written and path.exists():
            append_whole(path, b"".join(map(record.to_line, run.lines[self.num_written :])))
        else:
            record.rewrite(path, run.lines)
        self.num_written = len(run.lines)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"worker_lines": self.num_worker_lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.num_worker_lines = state["worker_lines"]


class Board(Callback):
    """Writes the numbers of the record for TensorBoard."""

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        self.events = EventFile(run.folder / BOARD, run.reporter.say)

    def on_record(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            numbers = {tag_of(key): value for key, value in run.line.items() if key != "epoch"}
            numbers.setdefault("train/lr", run.optimizer.param_groups[0]["lr"])
            self.events.add(run.epoch, numbers)
            run.files.attempt(BOARD, self.events.append)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            run.files.attempt(BOARD, self.events.append)


def tag_of(key: str) -> str:
    """Return the tag of a value of the record, such as valid/accuracy; seconds are in time/."""
    if key.endswith("_s"):
        return f"time/{key}"
    group, _, name = key.partition("_")
    is_score = group in ("minibatch", *SPLITS) and name
    return f"{group}/{name}" if is_score else key if "/" in key else f"train/{key}"


class Progress(Callback):
    """Shows the progress within an epoch, and a line after it.

    Args:
        statistics: of the epoch.
        stack: closes the progress bar of an epoch that ends with an error.
    """

    def __init__(self, statistics: Statistics, stack: ExitStack) -> None:
        self.statistics, self.stack = statistics, stack
        self.bar = ExitStack()
        self.advance: Callable[..., object] | None = None

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if self.advance is None:
            title = f"epoch {run.epoch + 1}/{run.config.training.epochs}"
            self.bar = self.stack.enter_context(ExitStack())
            self.advance = self.bar.enter_context(run.reporter.task(title))
        figures = partial(self.statistics.own.format_progress, run.task.has_accuracy)
        self.advance(run.step + 1, run.num_steps, figures)

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        self.bar.close()
        self.advance = None

    def on_record(self, run: Run) -> None:
        """See `Callback`."""
        run.reporter.say(format_epoch(run.line, run.config.training.epochs))
        if warning := format_drop_warning(run.line, run.optimizer, run.lines[:-1]):
            run.reporter.say(f"warning: {warning}")

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self.bar.close()
        if isinstance(run.stopped, StopTraining):
            run.reporter.say(": ".join(filter(None, (f"stopped {run.position}", str(run.stopped)))))
        if text := format_average_warning(run.config.training, run.best, run.lines):
            run.reporter.say(f"warning: {text}")
