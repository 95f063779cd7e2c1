"""The training loop: minibatch, forward, loss, backward, step; all else is a callback.

The loop reads no value from the device, so that the host stays ahead of a GPU.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch

from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather, synchronize_buffers
from gcnzc.system.malloc import freed_memory
from gcnzc.train.accumulation import Accumulation
from gcnzc.train.callbacks import Callback, Hooks
from gcnzc.train.checkpoint import to_plain
from gcnzc.train.errors import Interrupted, StopTraining
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.signals import SAVE, STOP
from gcnzc.train.state import Output, Run
from gcnzc.train.tasks.base import flatten_scores


def fit(run: Run, callbacks: Sequence[Callback]) -> None:
    """Train the remaining epochs, or until a callback or a signal stops the run."""
    hooks = Hooks(callbacks)
    hooks("on_start", run)
    if run.lines:  # a resumed run may have nothing left to do
        run.stopped = run.ending
    while run.epoch < run.config.training.epochs and run.stopped is None:
        train_epoch(run, hooks)
        if not isinstance(run.stopped, Interrupted):
            finish_epoch(run, hooks)
    if not isinstance(run.stopped, Interrupted):
        score_last_epoch(run, hooks)
    hooks("on_end", run)


def train_epoch(run: Run, hooks: Hooks) -> None:
    """Take the steps of this epoch, or those after the position that was resumed."""
    if not run.in_epoch:
        run.loader.set_epoch(run.epoch)
        run.in_epoch = True
    steps = Accumulation(run.loader.shares, run.config.training.accumulate)
    first, run.num_steps = run.loader.resume_step, len(steps)
    if run.schedule is not None:
        run.schedule.begin_epoch(run.epoch, run.loader.shares, first)
    run.model.train()
    # closed on an error, so that no thread reads the feature table after it is released
    with run.precision.enable_tf32(), closing(run.open_batches()) as batches:
        run.mark("")
        for run.step in range(steps.first_step(first), len(steps)):
            run.group.pop_request_intervals()  # waits between steps are of no step
            run.group.set_status(run.steps, f"training in epoch {run.epoch + 1}")
            train_step(run, batches, steps)
            run.steps += 1
            hooks("on_step", run)
            if run.agreed[SAVE]:
                run.save()
            if run.agreed[STOP] or (run.ending is not None and run.group.world_size == 1):
                agree(run)
                return
        next(batches, None)  # moves the loader to the next epoch


def train_step(run: Run, batches: Iterator[Any], steps: Accumulation) -> None:
    """Add the gradients of the minibatches of a step, and update the model with their mean."""
    optimizer, own = run.optimizer, islice(batches, len(steps.num_seeds(run.step)))
    factors, weight = steps.weights(run.step, by_size=optimizer.weighs_by_size)
    optimizer.weight = weight
    minibatches = zip(optimizer.micro_batches(own, factors), factors, strict=False)
    optimizer.signals, run.outputs, run.stages = run.wanted(), [], []
    if optimizer.needs_closure:  # it computes several gradients in a step
        kept = list(minibatches)
        run.precision.step(optimizer, lambda: add_gradients(run, kept))
    else:
        add_gradients(run, minibatches)
        run.precision.step(optimizer)  # the exchange between workers is part of the step
    if run.embeddings is not None:
        run.embeddings.step(weight)
    if run.average is not None:
        run.average.end_step()
    if run.schedule is not None:
        run.schedule.step()
    deque(own, maxlen=0)  # minibatches that the optimizer has dropped
    run.agreed = optimizer.received_signals
    run.mark("compute")


def add_gradients(run: Run, minibatches: Iterable[tuple[Any, float]]) -> float:
    """Set the gradients to the weighted mean over minibatches; the loss is not read."""
    run.optimizer.zero_grad(set_to_none=True)
    if run.embeddings is not None:
        run.embeddings.optimizer.zero_grad()
    outputs = []
    for batch, factor in minibatches:
        run.mark("wait")
        output = Output.of(batch, None, None)
        if len(batch.y):  # a worker may have no seeds in the last step of a resumed epoch
            with run.precision.autocast():
                logits = run.task.logits(run.model, batch)
            logits = run.precision.widen(logits)
            loss = run.task.loss(logits, batch.y)
            if run.optimizer.backward(run.precision.scale(loss if factor == 1 else loss * factor)):
                output = Output.of(batch, logits, loss)
        outputs.append(output)
        run.mark("compute")
    run.outputs = run.outputs or outputs
    return 0.0


def finish_epoch(run: Run, hooks: Hooks) -> None:
    """End an epoch: evaluate the model if that is due, and let the callbacks record it."""
    training = run.config.training
    run.is_last = run.stopped is not None or run.epoch + 1 == training.epochs
    run.optimizer.pause_exchanges()  # workers that are still in the epoch may need answers
    if not run.is_last:  # else `finalize` does this
        run_algorithm(synchronize_buffers(run.model), run.group)
        if run.average is not None:
            run.average.end_epoch(run.epoch)
    run.line = {"epoch": run.epoch, "metric": run.task.metric}
    hooks("on_epoch", run)
    run.optimizer.resume_exchanges()
    if run.is_last or (run.epoch + 1) % training.evaluate_every == 0:
        evaluate(run, hooks)
    run.epoch, run.in_epoch = run.epoch + 1, False
    run.line = to_plain(run.line, "run.line")
    run.lines.append(run.line)
    hooks("on_record", run)
    agree(run)
    if run.agreed[SAVE]:
        run.save()


def score_last_epoch(run: Run, hooks: Hooks) -> None:
    """Evaluate the model after the last epoch of a run, if that has not been done.

    A run that was stopped between two evaluations, and resumed with fewer epochs than it was
    started with, has not evaluated its last epoch. If it was stopped within a later epoch, the
    weights are no longer those of the last epoch: the best model of the earlier evaluations remains
    the result.

    Raises:
        ValueError: the run was stopped in a later epoch, before its first evaluation.
    """
    run.line = run.lines[-1]
    if f"valid_{run.task.metric}" in run.line:
        if run.stopped is not None and not run.is_last:  # by its evaluation or its record
            run.optimizer.finalize()
        return
    if not run.in_epoch:
        run.epoch, run.is_last = run.epoch - 1, True
        evaluate(run, hooks)
        run.epoch += 1
        hooks("on_record", run)
    elif not run.best:
        raise ValueError(
            f"the run in {run.folder} was stopped in epoch {run.epoch + 1}, before its first "
            f"evaluation: it cannot end after epoch {run.epoch}\n\n"
            f"hint: --epochs {run.epoch + 1}, or more"
        )


def evaluate(run: Run, hooks: Hooks) -> None:
    """Score the model, or the average of its weights, on the validation and test splits."""
    if run.is_last:
        run.optimizer.finalize()
    own: Any = run.optimizer.average_parameters()  # they differ between workers with local steps
    run.evaluated = run.model
    if run.average is not None:
        if run.is_last:
            run.average.end_epoch(run.epoch)
        run.evaluated = run_algorithm(run.average.build_evaluated_model(), run.group)
        run.line["averaged"] = run.average.updates
    run.group.set_status(run.steps, f"evaluation in epoch {run.epoch + 1}")
    title = f"evaluate {run.epoch + 1}/{run.config.training.epochs}"
    # the arrays of whole layers are too large for steps to reuse
    with freed_memory(kept=False), run.reporter.task(title) as advance:
        evaluated = Evaluated(run.evaluated, run.table, run.device, advance, run.group)
        run.scores = run.task.evaluate(evaluated)
    run.line |= flatten_scores(run.scores)
    hooks("on_evaluate", run)
    run.optimizer.restore_parameters(own)


def agree(run: Run) -> None:
    """Exchange what each worker requests: to stop after a signal or a callback, or to save."""
    wanted = torch.tensor([run.received_signal() > 0, run.ending is not None, run.is_save_due()])
    if run.group.world_size > 1:
        wanted = run_algorithm(all_gather(wanted), run.group).any(dim=0)
    is_interrupted, is_ended, is_saved = wanted.tolist()
    run.agreed = [is_interrupted or is_ended, is_saved]
    if is_interrupted:
        run.stopped = Interrupted("a worker has received a signal")
    elif is_ended:
        run.stopped = run.ending or StopTraining("another worker has ended the run")
