"""Train one epoch, evaluate the model after it, and record both."""

import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, cast

from gcnzc.exchange import run
from gcnzc.exchange.sync import synchronize_buffers
from gcnzc.features.cache import CachedTable
from gcnzc.loader.base import Batches
from gcnzc.optim import LocalMethod
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.system.malloc import freed_memory
from gcnzc.train import record
from gcnzc.train.accumulation import Accumulation
from gcnzc.train.epoch_stats import EpochStats, sum_stats
from gcnzc.train.evaluation import flatten_scores
from gcnzc.train.results import format_drop_warning, format_epoch
from gcnzc.train.saving import (
    handle_stop_request,
    rewrite_record,
    write_best_embeddings,
    write_pending,
)
from gcnzc.train.trainer import Trainer
from gcnzc.train.training_step import train_step

# a run ends with an error if at least this many consecutive steps, up to the end of an epoch, were
# skipped on all workers
DIVERGED_SKIPS = 10


def train_epoch(trainer: Trainer, stopped: threading.Event) -> None:
    """Train the rest of this epoch: all of its steps, or those after the resumed checkpoint.

    Args:
        trainer: the run.
        stopped: set when this process has received a stop request.

    Raises:
        Interrupted: a worker has received a stop request; see `handle_stop_request`.
    """
    if not trainer.in_epoch:
        trainer.loader.set_epoch(trainer.epoch)
        trainer.in_epoch = True
    trainer.model.train()
    accumulation = Accumulation(trainer.loader.shares, trainer.config.training.accumulate)
    steps, resumed_at = len(accumulation), trainer.loader.resume_step
    if trainer.schedule is not None:
        trainer.schedule.begin_epoch(trainer.epoch, trainer.loader.shares, resumed_at)
    precision = trainer.precision
    title = f"epoch {trainer.epoch + 1}/{trainer.config.training.epochs}"
    with ExitStack() as stack, trainer.reporter.task(title) as advance:
        stack.enter_context(precision.enable_tf32())
        # discard the exchanges of loading and evaluation, which are not part of a step
        trainer.group.pop_request_intervals()
        # closed on an error, so that no thread reads the feature table after it is released
        batches = cast(Batches[Batch | HeteroBatch], iter(trainer.loader))
        stack.enter_context(closing(batches))
        began = trainer.now()
        for step in range(accumulation.first_step(resumed_at), steps):
            trainer.group.set_status(trainer.steps, f"training in epoch {trainer.epoch + 1}")
            began = train_step(trainer, batches, accumulation, step, stopped, began)
            progress = partial(trainer.epoch_stats.format_progress, trainer.task.has_accuracy)
            advance(step + 1, steps, progress)
            handle_stop_request(trainer, trainer.optimizer.received_signals)
        # at its end, the iterator moves the loader to the next epoch
        left = next(batches, None)
        assert left is None, "the steps take all minibatches"


def finish_epoch(trainer: Trainer) -> None:
    """Evaluate the model if an evaluation is due, and record the epoch.

    Raises:
        ValueError: the loss of the epoch is not finite, or its last `DIVERGED_SKIPS` or more steps
            were skipped on all workers.
    """
    last = trainer.epoch + 1 == trainer.config.training.epochs
    if isinstance(trainer.optimizer, LocalMethod):
        # workers that are still in the epoch may need answers from this one
        trainer.optimizer.pause_exchanges()
    if not last:
        # after the last epoch, `finalize` does this
        run(synchronize_buffers(trainer.model), trainer.group)
        if trainer.average is not None:
            trainer.average.end_epoch(trainer.epoch)
    trainer.count_sent()
    worker_stats = run(trainer.epoch_stats.of_all_workers(), trainer.group)
    if isinstance(trainer.optimizer, LocalMethod):
        # all workers have ended the epoch
        trainer.optimizer.resume_exchanges()
    _add_worker_lines(trainer, worker_stats)
    stats = sum_stats(worker_stats)
    figures = stats.figures(trainer.task.has_accuracy, trainer.group.world_size)
    cause = ""
    if not math.isfinite(figures["loss"]):
        cause = f"the loss is {figures['loss']} in epoch {trainer.epoch + 1}"
    elif stats.skipped_in_a_row >= DIVERGED_SKIPS + trainer.precision.scale_steps:
        cause = (
            f"the last {stats.skipped_in_a_row} steps up to the end of epoch {trainer.epoch + 1} "
            "were skipped, because gradients were not finite or too large"
        )
    if cause:
        hint = "hint: use a smaller --lr, and check that all features are finite"
        if trainer.config.training.precision == "fp16":
            hint = (
                "hint: use --precision bf16, since float16 overflows above 65504; or a smaller --lr"
            )
        raise ValueError(f"{cause}\n\n{hint}")
    line: dict[str, Any] = {"epoch": trainer.epoch, "metric": trainer.task.metric, **figures}
    if isinstance(trainer.table, CachedTable):
        hits, rows = int(stats.hits), figures["payload_bytes"] // trainer.table.row_bytes
        line |= {"hit_rate": hits / rows, "bytes_saved": hits * trainer.table.row_bytes}
        line["peer_hit_rate"] = int(stats.peer_hits) / rows
    if trainer.schedule is not None:
        line["lr"] = trainer.schedule.last_lr(trainer.epoch)
    if trainer.task.best_accuracy is not None:
        line["best_possible_accuracy"] = trainer.task.best_accuracy
    if last or (trainer.epoch + 1) % trainer.config.training.evaluate_every == 0:
        line |= _evaluate(trainer, trainer.epoch, is_last=last)
    warning = format_drop_warning(line, trainer.optimizer, trainer.lines)
    trainer.lines.append(line)
    trainer.epoch, trainer.in_epoch = trainer.epoch + 1, False
    in_a_row, trainer.epoch_stats = trainer.epoch_stats.skipped_in_a_row, EpochStats(trainer.device)
    trainer.epoch_stats.skipped_in_a_row = in_a_row
    if trainer.is_rank_zero:
        trainer.record.pending += record.to_line(line)
        trainer.events.add(trainer.epoch, line)
    trainer.on_rank_zero(lambda: write_pending(trainer))
    trainer.reporter.say(format_epoch(line, trainer.config.training.epochs))
    if warning:
        trainer.reporter.say(f"warning: {warning}")


def evaluate_last_epoch(trainer: Trainer) -> None:
    """Evaluate the model after the last epoch of a run, if `finish_epoch` has not done so.

    A run that was stopped between two evaluations, and resumed with fewer epochs than it was
    started with, has not evaluated its last epoch. If it was stopped within a later epoch, the
    weights are no longer those of the last epoch: nothing is evaluated, and the best model of the
    earlier evaluations remains the result.

    Raises:
        ValueError: the run was stopped in a later epoch, before its first evaluation.
    """
    line, last = trainer.lines[-1], trainer.epoch
    if f"valid_{trainer.task.metric}" in line:
        return
    if not trainer.in_epoch:
        found = _evaluate(trainer, last - 1, is_last=True)
        line |= found
        if trainer.is_rank_zero:
            trainer.events.add(last, found)
        trainer.on_rank_zero(lambda: rewrite_record(trainer))
        trainer.reporter.say(format_epoch(line, last))
    elif not trainer.best:
        raise ValueError(
            f"the run in {trainer.folder} was stopped in epoch {last + 1}, before its first "
            f"evaluation: it cannot end after epoch {last}\n\nhint: --epochs {last + 1}, or more"
        )


def _evaluate(trainer: Trainer, epoch: int, *, is_last: bool) -> dict[str, Any]:
    """Score the model, and keep its weights if it is the best so far.

    Args:
        trainer: the run.
        epoch: the epoch that the model was trained in last, counted from 0.
        is_last: whether this is the last of `--epochs`; then `finalize` is called first. A run
            that ends earlier because of `--patience` ends without it.

    Returns:
        What the evaluation adds to the epoch's line of the record.
    """
    begin = time.perf_counter()
    if is_last:
        trainer.optimizer.finalize()
        if trainer.average is not None:
            trainer.average.end_epoch(epoch)
    # with local steps, the parameters of the workers differ between two exchanges
    own: Any = trainer.optimizer.average_parameters()
    model, averaged = trainer.model, {}
    if trainer.average is not None:
        model = run(trainer.average.build_evaluated_model(), trainer.group)
        averaged = {"averaged": trainer.average.updates}
    trainer.group.set_status(trainer.steps, f"evaluation in epoch {epoch + 1}")
    title = f"evaluate {epoch + 1}/{trainer.config.training.epochs}"
    # the arrays of whole layers are too large for steps to reuse
    with freed_memory(kept=False), trainer.reporter.task(title) as advance:
        scores = trainer.task.evaluate(model, trainer.table, trainer.device, advance, trainer.group)
    valid = scores[trainer.task.metric]["valid"]
    if math.isnan(valid) and not trainer.best:
        trainer.reporter.say(
            f"the validation {trainer.task.metric} is not defined, since the labels of the "
            "validation split have a single class: the model of the first evaluation remains the "
            "best one"
        )
    if not trainer.best or valid > trainer.best["valid"]:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        trainer.best = {"epoch": epoch, "valid": valid, "scores": scores, "model": weights}
        trainer.is_best_written = False
        write_best_embeddings(trainer, epoch)
    trainer.optimizer.restore_parameters(own)
    seconds = time.perf_counter() - begin
    line = {"evaluate_s": seconds, "evaluation": trainer.task.evaluator.method}
    return {**line, **averaged, **flatten_scores(scores)}


def _add_worker_lines(trainer: Trainer, worker_stats: Sequence[EpochStats]) -> None:
    """Add this epoch's statistics of each worker to the pending lines of workers.jsonl."""
    if len(worker_stats) == 1:
        return  # record.jsonl has the same figures
    trainer.worker_lines += len(worker_stats)
    if not trainer.is_rank_zero:
        return
    for worker, stats in enumerate(worker_stats):
        line = {"epoch": trainer.epoch, "worker": worker, **stats.seconds.all()}
        line |= {"seeds": stats.seeds, "steps": stats.steps, "bytes_sent": stats.bytes_sent}
        if stats.minibatches:
            line["dropped_share"] = stats.dropped_share
        trainer.worker_record.pending += record.to_line(line)
