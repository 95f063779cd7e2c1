"""Statistics of one epoch: loss, accuracy, times and bytes, and the callback that collects them."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather_text
from gcnzc.features.cache import CachedTable
from gcnzc.loader.loader import Loader
from gcnzc.optim import DistributedOptimizer, DropCompute, LocalMethod
from gcnzc.system.spans import Seconds, Span, Stage, seconds_outside
from gcnzc.train.callbacks import Callback
from gcnzc.train.hetero.data import TypedTables
from gcnzc.train.state import Output, Run

# times that every epoch's line has, also if they are 0
TIMES = ("sample_s", "gather_s", "wait_s", "compute_s", "exchange_s", "hidden_s")
# how the numbers of several workers are combined that are not added: all workers take the same
# steps, and `skipped_in_a_row` counts those that no worker's gradients changed
COMBINED: Mapping[str, Callable[[Iterable[Any]], Any]] = {"steps": max, "skipped_in_a_row": min}
# rows of logits that are counted together, since their operations take longer to start than to run
COUNTED_ROWS = 4096


def seeds_checksum(seeds: Tensor) -> int:
    """Return the sum of the SplitMix64 hashes of all seeds, modulo 2**64, in any order.

    The checksums of minibatches add up to the checksum of their epoch, regardless of which rank
    used them. A seed that is missing or used twice changes it.

    Args:
        seeds: (S,) int64 on the host: ids of nodes, or numbers of edges in link prediction.
    """
    mixed = seeds.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


@dataclass(eq=False)
class EpochStats:
    """Sums over the steps of one epoch on one worker; part of a checkpoint.

    Its arguments are the values of `state_dict`.
    """

    # these sums, and those of hits, are tensors on the device, which is not waited for
    loss: Any = 0.0
    right: Any = 0
    seeds: int = 0
    seeds_checksum: int = 0  # modulo 2**64
    steps: int = 0
    # the last steps without this worker's gradients, also those of earlier epochs
    skipped_in_a_row: int = 0
    bytes: int = 0  # of the gathered feature rows (`payload_bytes` of the record)
    bytes_sent: int = 0  # payload of all messages to other workers
    # rows that are read from the feature cache, and those of them from another worker's GPU
    hits: Any = 0
    peer_hits: Any = 0
    # with DropCompute: the minibatches of the steps, and those of them that were dropped
    minibatches: int = 0
    dropped: int = 0
    times: InitVar[Mapping[str, float]] = MappingProxyType(dict.fromkeys(TIMES, 0.0))

    def __post_init__(self, times: Mapping[str, float]) -> None:
        self.seconds = Seconds(times)
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._pending_rows = 0

    def add(self, logits: Tensor, loss: Tensor, labels: Tensor, seeds: Tensor) -> None:
        """Add the loss and accuracy of one minibatch.

        Args:
            logits: (B, C) of classes or label columns, or (B,) of pairs of nodes, on any device.
            loss: (), the mean over the minibatch.
            labels: (B,) classes, (B, C) label columns, or (B,) labels of pairs, 0 or 1.
            seeds: (S,) int64 on the host, see `seeds_checksum`; B, or fewer in link prediction.
        """
        self._pending.append((logits, loss, labels, seeds))
        self.seeds += len(labels)
        self._pending_rows += len(labels)
        if self._pending_rows >= COUNTED_ROWS:
            self.count()

    def count(self) -> None:
        """Add the pending minibatches to the sums."""
        if not self._pending:
            return
        parts, losses, labels, seeds = zip(*self._pending, strict=True)
        self._pending, self._pending_rows = [], 0
        sizes = torch.tensor([len(each) for each in labels], dtype=torch.float64)
        sizes = sizes.to(losses[0].device, non_blocking=True)
        # float64, in which the sum of float32 losses is nearly always exact
        self.loss = self.loss + (torch.stack(losses).double() * sizes).sum()
        if labels[0].ndim == 1:
            # one logit per pair of nodes, or one per class
            logits = torch.cat(parts)
            predicted = logits > 0 if logits.ndim == 1 else logits.argmax(dim=1)
            self.right = self.right + (predicted == torch.cat(labels)).sum()
        self.seeds_checksum = (self.seeds_checksum + seeds_checksum(torch.cat(seeds))) % 2**64

    def time(
        self, times: Mapping[str, float], stages: Sequence[Stage], waits: Sequence[Span]
    ) -> None:
        """Add the seconds of one step.

        Args:
            times: seconds that were measured on the threads of the loader.
            stages: stages of the training thread, and gathers on the loader's streams.
            waits: waits for other workers, which are subtracted from the time of `compute`.
        """
        for name, seconds in times.items():
            self.seconds.add_seconds(name, seconds)
        self.seconds.add(stages)
        for wait in waits:
            self.seconds.add_seconds("exchange_s", wait.end_s - wait.begin_s)
            self.seconds.add_seconds("compute_s", wait.begin_s - wait.end_s)

    def of_all_workers(self) -> Algorithm[list["EpochStats"]]:
        """Gather the statistics of all workers, in the order of ranks."""
        texts = yield from all_gather_text(json.dumps(self.state_dict()))
        return [EpochStats(**json.loads(text)) for text in texts]

    def format_progress(self, has_accuracy: bool) -> str:
        """Format the statistics for the progress bar; see `figures`."""
        line = self.figures(has_accuracy)
        accuracy = f"minibatch accuracy {line['minibatch_accuracy']:.4f}  " if has_accuracy else ""
        rate = format_rate(self.bytes / max(line["gather_s"], 1e-9))
        dropped = f"  dropped {self.dropped_share:.0%}" if self.minibatches else ""
        return (
            f"loss {line['loss']:.4f}  {accuracy}"
            f"{self.seeds / max(line['epoch_s'], 1e-9):,.0f} seeds/s  gather {rate}{dropped}"
        )

    @property
    def dropped_share(self) -> float:
        """The fraction of the minibatches that DropCompute has dropped."""
        return self.dropped / self.minibatches if self.minibatches else 0.0

    def figures(self, has_accuracy: bool, workers: int = 1) -> dict[str, Any]:
        """Return the epoch's line of the record, with times that are means over the workers.

        Args:
            has_accuracy: False if there are several labels per node.
            workers: number of workers whose sums these are.
        """
        sums, seeds = self.state_dict(), max(self.seeds, 1)
        line: dict[str, Any] = {"loss": sums["loss"] / seeds, "steps": self.steps}
        if has_accuracy:
            # with dropout, and with weights that change after each minibatch, unlike the
            # train_accuracy of an evaluation
            line["minibatch_accuracy"] = sums["right"] / seeds
        times = {name: seconds / workers for name, seconds in sums["times"].items()}
        line["epoch_s"] = times["wait_s"] + times["compute_s"] + times["exchange_s"]
        line |= times | {"seeds": self.seeds, "seeds_checksum": f"{self.seeds_checksum:016x}"}
        if self.minibatches:
            line["dropped_share"] = self.dropped_share
        return line | {"payload_bytes": self.bytes, "bytes_sent": self.bytes_sent}

    def state_dict(self) -> dict[str, Any]:
        """Return all sums as Python numbers."""
        self.count()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in values.items():
            values[name] = value.item() if isinstance(value, Tensor) else value
        return values | {"times": self.seconds.all()}


def sum_stats(tallies: Sequence[EpochStats]) -> EpochStats:
    """Combine the statistics of workers, most of which are sums; see `COMBINED`."""
    states = [tally.state_dict() for tally in tallies]
    times = [state.pop("times") for state in states]
    whole = {name: COMBINED.get(name, sum)(each[name] for each in states) for name in states[0]}
    whole["times"] = {name: sum(each[name] for each in times) for name in times[0]}
    whole["seeds_checksum"] %= 2**64
    return EpochStats(**whole)


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in GB/s, or in MB/s below 0.1 GB/s."""
    if bytes_per_s < 1e8:
        return f"{bytes_per_s / 1e6:.1f} MB/s"
    return f"{bytes_per_s / 1e9:.1f} GB/s"


# number of consecutive skipped steps that are reported; later ones are not
REPORTED_SKIPS = 3
# a run ends with an error if at least this many consecutive steps, up to the end of an epoch, were
# skipped on all workers
DIVERGED_SKIPS = 10
# number of the most recent waits for other workers that are kept, to compute how much of the
# overlapped exchanges they contain
WAITS = 1000


class Statistics(Callback):
    """Collects the statistics of an epoch, and fills its line of the record."""

    def __init__(self) -> None:
        self.own = EpochStats()
        self.workers: Sequence[EpochStats] = ()
        """of all workers, after the steps of an epoch"""
        self._waits: deque[Span] = deque(maxlen=WAITS)
        self._sent = 0
        """sent bytes of the ledger that are already in an epoch's statistics"""
        self._before = (0, 0, 0, 0)
        """counts of the optimizer after the step before"""
        self._evaluation_began = 0.0

    def on_start(self, run: Run) -> None:
        """See `Callback`: what was exchanged before is of no epoch."""
        self._sent = run.group.ledger.bytes_sent
        self._before = _counts_of(run.optimizer)
        self._evaluation_began = time.perf_counter()  # of an epoch that ended before the resume

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        for each in run.outputs:
            if each.logits is not None and each.loss is not None:
                self.own.add(each.logits, each.loss, each.labels, each.items)
            self._count_rows(run, each)
            gathers = [stage for stage in each.stages if stage.name == "gather"]
            self.own.time(each.times, gathers, ())
        self.own.steps += 1
        waits = [Span("exchange", "model", *wait) for wait in run.group.pop_request_intervals()]
        self._waits += waits
        self.own.time({}, run.stages, waits)
        run.spans = waits
        if overlapped := run.group.pop_overlapped_intervals():
            run.spans = [*waits, *(Span("overlapped", "exchange", *each) for each in overlapped)]
            # the part of the overlapped exchange for which no step waited
            hidden_s = seconds_outside(run.spans[len(waits) :], self._waits)
            self.own.seconds.add_seconds("hidden_s", hidden_s)
        self._count_skips(run)
        run.mark("")  # the time since then is of the next wait

    def on_epoch(self, run: Run) -> None:
        """See `Callback`.

        Raises:
            ValueError: the loss of the epoch is not finite, or its last `DIVERGED_SKIPS` or more
                steps were skipped on all workers.
        """
        self.count_sent(run)
        self.workers = run_algorithm(self.own.of_all_workers(), run.group)
        total = sum_stats(self.workers)
        self.own = EpochStats(skipped_in_a_row=self.own.skipped_in_a_row)
        figures = total.figures(run.task.has_accuracy, run.group.world_size)
        _check_progress(run, figures["loss"], total.skipped_in_a_row)
        run.line |= figures
        if isinstance(run.table, CachedTable):
            hits, row_bytes = int(total.hits), run.table.row_bytes
            rows = figures["payload_bytes"] // row_bytes
            run.line |= {"hit_rate": hits / rows, "bytes_saved": hits * row_bytes}
            run.line["peer_hit_rate"] = int(total.peer_hits) / rows
        if run.schedule is not None:
            run.line["lr"] = run.schedule.last_lr(run.epoch)
        if run.task.best_accuracy is not None:
            run.line["best_possible_accuracy"] = run.task.best_accuracy

        self._evaluation_began = time.perf_counter()

    def on_evaluate(self, run: Run) -> None:
        """See `Callback`."""
        seconds = time.perf_counter() - self._evaluation_began
        run.line |= {"evaluate_s": seconds, "evaluation": run.task.evaluator.method}

    def count_sent(self, run: Run) -> None:
        """Add the bytes that were sent since the last call."""
        sent = run.group.ledger.bytes_sent
        self.own.bytes_sent += sent - self._sent
        self._sent = sent

    def _count_rows(self, run: Run, output: Output) -> None:
        """Add the rows that were gathered for a minibatch, and those of them from the cache."""
        nodes, table = output.nodes, run.table
        if isinstance(table, TypedTables):
            assert not isinstance(nodes, Tensor), "the graph has several node types"
            self.own.bytes += table.gathered_bytes(nodes)
            return
        assert isinstance(nodes, Tensor), "the graph has one node type"
        # a full-batch run gathers its rows at most once
        if isinstance(run.loader, Loader) or "gather_s" in output.times:
            self.own.bytes += len(nodes) * table.row_bytes
        if isinstance(table, CachedTable) and isinstance(run.loader, Loader):
            in_place = run.loader.nodes_read_in_place(nodes)
            self.own.hits += table.hits(in_place)
            self.own.peer_hits += table.peer_hits(in_place)

    def _count_skips(self, run: Run) -> None:
        """Count the minibatches of DropCompute, and the steps without this worker's gradients."""
        optimizer, before = run.optimizer, self._before
        self._before = now = _counts_of(optimizer)
        self.own.minibatches += now[2] - before[2]
        self.own.dropped += now[3] - before[3]
        in_a_row = self.own.skipped_in_a_row + 1 if now[1] > before[1] else 0
        self.own.skipped_in_a_row = in_a_row
        if optimizer.skip_reason and in_a_row <= REPORTED_SKIPS:
            effect = describe_skip(optimizer, before[0])
            if run.precision.loss_scale is not None:
                effect += f"; the loss scale is now {run.precision.loss_scale:g}"
            run.reporter.say(f"step {run.step + 1} of epoch {run.epoch + 1}{effect}")


def _counts_of(optimizer: DistributedOptimizer) -> tuple[int, int, int, int]:
    """Return the optimizer's skipped steps, ignored gradients, minibatches, and dropped ones."""
    minibatches = dropped = 0
    if isinstance(optimizer, DropCompute):
        dropped = optimizer.dropped_micro_batches
        minibatches = optimizer.computed_micro_batches + dropped
    return optimizer.skipped, optimizer.num_ignored_gradients, minibatches, dropped


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


def _check_progress(run: Run, loss: float, skipped_in_a_row: int) -> None:
    """Raise a ValueError if training has diverged."""
    cause, epoch = "", run.epoch + 1
    if not math.isfinite(loss):
        cause = f"the loss is {loss} in epoch {epoch}"
    elif skipped_in_a_row >= DIVERGED_SKIPS + run.precision.scale_steps:
        cause = (
            f"the last {skipped_in_a_row} steps up to the end of epoch {epoch} were skipped, "
            "because gradients were not finite or too large"
        )
    if cause:
        hint = "use a smaller --lr, and check that all features are finite"
        if run.config.training.precision == "fp16":
            hint = "use --precision bf16, since float16 overflows above 65504; or a smaller --lr"
        raise ValueError(f"{cause}\n\nhint: {hint}")
