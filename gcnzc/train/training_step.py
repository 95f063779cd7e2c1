"""Compute an optimizer step: the gradients of its minibatches, the exchange and the update."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from gcnzc.features.cache import CachedTable
from gcnzc.features.table import FeatureTable
from gcnzc.loader.loader import Loader
from gcnzc.optim import DistributedOptimizer, DropCompute, LocalMethod
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.system.spans import Span, Stage, seconds_outside
from gcnzc.system.streams import TimedEvent
from gcnzc.train.accumulation import Accumulation
from gcnzc.train.hetero.data import TypedTables
from gcnzc.train.tracing import trace
from gcnzc.train.trainer import Trainer

# number of consecutive skipped steps that are reported; later ones are not
REPORTED_SKIPS = 3


def train_step(
    trainer: Trainer,
    batches: Iterator[Batch | HeteroBatch],
    accumulation: Accumulation,
    step: int,
    stopped: threading.Event,
    began: TimedEvent,
) -> TimedEvent:
    """Take an optimizer step, and add it to the statistics of the epoch.

    Args:
        trainer: the run.
        batches: the minibatches of the epoch, from the first one of this step on.
        accumulation: the steps of the epoch.
        step: the step, counted from the first one of `accumulation`.
        stopped: set when this process has received a stop request.
        began: when the training thread began to wait for the first minibatch.

    Returns:
        The end of the step.
    """
    optimizer, precision, stats = trainer.optimizer, trainer.precision, trainer.epoch_stats
    zero_gradients(trainer)
    own = islice(batches, len(accumulation.num_seeds(step)))
    computed: Iterator[Batch | HeteroBatch] = own
    factors, optimizer.weight = accumulation.loss_factors(step), accumulation.loss_weight(step)
    if isinstance(optimizer, DropCompute):
        # DropCompute divides by the sizes of the minibatches that all workers have computed
        factors, optimizer.weight = accumulation.sizes(step), 1.0
        computed = optimizer.micro_batches(own, factors)
    stages: list[Stage] = []
    transfers: list[Stage] = []  # on the streams that copy and gather minibatches
    spans: list[Span] = []
    closure = StepClosure(trainer) if needs_closure(optimizer) else None
    for number, batch in enumerate(computed):
        ready = trainer.now()
        stages.append(Stage("wait", "model", began, ready))
        if closure is None:
            compute_gradients(trainer, batch, factors[number])
        else:
            closure.minibatches.append((batch, factors[number]))
        stats.time(batch.times, (), ())
        count_rows(trainer, batch)
        spans += batch.spans
        transfers += batch.stages
        began = trainer.now()
        stages.append(Stage("compute", "model", ready, began))
    optimizer.signals = [stopped.is_set(), trainer.is_checkpoint_due()]
    skipped, ignored = optimizer.skipped, optimizer.num_ignored_gradients
    before = _count_minibatches(optimizer)
    precision.step(optimizer, closure)
    after = _count_minibatches(optimizer)
    stats.minibatches += after[0] - before[0]
    stats.dropped += after[1] - before[1]
    if trainer.embeddings is not None:
        trainer.embeddings.step(accumulation.loss_weight(step))
    if trainer.schedule is not None:
        trainer.schedule.step()
    if trainer.average is not None:
        trainer.average.end_step()
    step_end = trainer.now()
    # the exchange and the update belong to the computation of the last minibatch
    stages[-1] = replace(stages[-1], end=step_end)
    stats.steps += 1
    report_skip(trainer, step, skipped, optimizer.num_ignored_gradients > ignored)
    # skip the minibatches that DropCompute has dropped, so that no later step uses them
    deque(own, maxlen=0)
    waits = [Span("exchange", "model", *wait) for wait in trainer.group.pop_request_intervals()]
    trainer.waits += waits
    overlapped = [
        Span("overlapped", "exchange", *each) for each in trainer.group.pop_overlapped_intervals()
    ]
    gathers = [each for each in transfers if each.name == "gather"]
    stats.time({}, [*gathers, *stages], waits)
    if overlapped:
        # the part of the overlapped exchange for which no step waited
        stats.seconds.add_seconds("hidden_s", seconds_outside(overlapped, trainer.waits))
    trace(trainer, spans + waits + overlapped, transfers + stages)
    return trainer.now()


def _count_minibatches(optimizer: DistributedOptimizer) -> tuple[int, int]:
    """Return the numbers of all and of dropped minibatches of DropCompute on this worker."""
    if not isinstance(optimizer, DropCompute):
        return 0, 0
    dropped = optimizer.dropped_micro_batches
    return optimizer.computed_micro_batches + dropped, dropped


def zero_gradients(trainer: Trainer) -> None:
    """Set all gradients to None, also those of embeddings."""
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer.embeddings is not None:
        trainer.embeddings.clear_gradients()


def needs_closure(optimizer: DistributedOptimizer) -> bool:
    """Return whether the optimizer computes the gradients of a step itself, several times."""
    return isinstance(optimizer, LocalMethod) and optimizer.needs_closure


class StepClosure:
    """Computes the gradients of the minibatches of a step at the current parameters.

    An optimizer that needs a closure calls it with several values of the parameters. The first call
    adds to the statistics of the epoch.

    Args:
        trainer: the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.minibatches: list[tuple[Batch | HeteroBatch, float]] = []
        """the minibatches, and the factor of the mean loss of each"""
        self.is_called = False

    def __call__(self) -> float:
        """Compute the gradients, and return 0: the loss is not read from the device."""
        zero_gradients(self.trainer)
        for batch, factor in self.minibatches:
            compute_gradients(self.trainer, batch, factor, is_counted=not self.is_called)
        self.is_called = True
        return 0.0


def compute_gradients(
    trainer: Trainer, batch: Batch | HeteroBatch, factor: float, *, is_counted: bool = True
) -> None:
    """Add the gradients of a minibatch to those of the parameters, and its loss to the statistics.

    DropCompute may drop the minibatch after the forward pass.

    Args:
        trainer: the run.
        batch: the minibatch; it may have no seeds after resuming with another number of workers.
        factor: factor of the mean loss of the minibatch.
        is_counted: whether to add the loss to the statistics.
    """
    assert batch.x is not None, "the loader has no table"
    assert batch.y is not None, "neither the loader nor its sampler has labels"
    if not len(batch.y):
        return
    precision = trainer.precision
    with precision.autocast():
        logits = trainer.task.logits(trainer.model, batch)
    logits = precision.widen(logits)
    loss = trainer.task.loss(logits, batch.y)
    scaled = precision.scale(loss if factor == 1 else loss * factor)
    if not isinstance(trainer.optimizer, DropCompute):
        scaled.backward()
    elif not trainer.optimizer.backward(scaled):
        return
    assert batch.items is not None, "the loader has not set the seeds of the minibatch"
    if is_counted:
        trainer.epoch_stats.add(logits.detach(), loss.detach(), batch.y, batch.items)


def count_rows(trainer: Trainer, batch: Batch | HeteroBatch) -> None:
    """Add the gathered rows of a minibatch, and those from the feature cache, to the statistics."""
    if isinstance(batch, HeteroBatch):
        assert isinstance(trainer.table, TypedTables), "both are of a heterogeneous graph"
        trainer.epoch_stats.bytes += trainer.table.gathered_bytes(batch)
        return
    assert isinstance(trainer.table, FeatureTable), "both are of a graph of one node type"
    # a full-batch run gathers its rows at most once
    if isinstance(trainer.loader, Loader) or "gather_s" in batch.times:
        trainer.epoch_stats.bytes += len(batch.nodes) * trainer.table.row_bytes
    if isinstance(trainer.table, CachedTable) and isinstance(trainer.loader, Loader):
        in_place = trainer.loader.nodes_read_in_place(batch.nodes)
        trainer.epoch_stats.hits += trainer.table.hits(in_place)
        trainer.epoch_stats.peer_hits += trainer.table.peer_hits(in_place)


def report_skip(trainer: Trainer, step: int, skipped: int, is_ignored: bool) -> None:
    """Count consecutive steps without this worker's gradients, and report the first ones.

    Args:
        trainer: the run.
        step: the step of this epoch, counted from 0.
        skipped: the optimizer's number of skipped steps before this one.
        is_ignored: whether the step has ignored this worker's gradients.
    """
    in_a_row = (trainer.epoch_stats.skipped_in_a_row + 1) * is_ignored
    trainer.epoch_stats.skipped_in_a_row = in_a_row
    if trainer.optimizer.skip_reason and in_a_row <= REPORTED_SKIPS:
        effect = describe_skip(trainer.optimizer, skipped)
        if trainer.precision.loss_scale is not None:
            effect += f"; the loss scale is now {trainer.precision.loss_scale:g}"
        trainer.reporter.say(f"step {step + 1} of epoch {trainer.epoch + 1}{effect}")


def describe_skip(optimizer: DistributedOptimizer, skipped: int) -> str:
    """Return the end of a message that begins with "step N of epoch E": what was skipped, and why.

    Args:
        optimizer: its `skip_reason` is not empty.
        skipped: its number of skipped steps before this one.
    """
    if optimizer.skipped == skipped or isinstance(optimizer, LocalMethod):
        # a local step, or a mean that excludes a worker: the reason contains the effect
        return f": {optimizer.skip_reason}"
    where = " on all workers" if optimizer.group.world_size > 1 else ""
    return f" was skipped{where}: {optimizer.skip_reason}"
