"""The state of a training run: its parts, progress and output files."""

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.loader.loader import Loader
from gcnzc.loader.seeds import Shares
from gcnzc.optim import DistributedOptimizer
from gcnzc.system.spans import Span, Stage
from gcnzc.system.streams import clock_of
from gcnzc.train import checkpoint, record
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import EpochStats
from gcnzc.train.graph_files import describe_files
from gcnzc.train.hetero.data import HeteroDataset, TypedTables
from gcnzc.train.hetero.embeddings import TrainedEmbeddings
from gcnzc.train.output_files import OutputFiles
from gcnzc.train.precision import Precision
from gcnzc.train.progress import Reporter
from gcnzc.train.run_folder import BOARD, RECORD, WORKERS
from gcnzc.train.tasks.base import Task
from gcnzc.train.tensorboard import EventFile
from gcnzc.train.weight_average import build_average
from gcnzc.train.worker_state import WorkerStates

# The learning rate of each step: warm-up and schedule.


class Schedule:
    """Sets the learning rate of an optimizer before each of its steps.

    The learning rate depends only on the position in the run, which is stored in checkpoints. If a
    run is resumed with another number of workers, which changes the number of steps of an epoch, it
    continues from the same position within the epoch.

    Args:
        config: options of the run.
        optimizer: optimizer, whose current learning rates are used at the end of the warm-up.
    """

    def __init__(self, config: TrainConfig, optimizer: Optimizer) -> None:
        self.config, self.optimizer = config, optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def begin_epoch(self, epoch: int, shares: Shares, minibatch: int) -> None:
        """Set the learning rate of the first step of an epoch, or of the rest of one.

        Args:
            epoch: counted from 0.
            shares: the seeds of each minibatch.
            minibatch: the first minibatch, counted from the first one of `shares`.
        """
        step_seeds = shares.world_size * shares.batch_size * self.config.accumulate
        steps = math.ceil(shares.num_seeds / step_seeds)
        position = epoch * steps + math.ceil(shares.step_start(minibatch) / step_seeds)
        self._steps = steps
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.setdefault("initial_lr", rate)
        self._scheduler = LambdaLR(
            self.optimizer, lambda now: factor(self.config, now, steps), last_epoch=position - 1
        )

    def step(self) -> None:
        """Set the learning rate of the next step; call it after each step of the optimizer."""
        self._scheduler.step()

    def last_lr(self, epoch: int) -> float:
        """Return the learning rate of the last step of an epoch, of the first parameter group."""
        rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return rate * factor(self.config, (epoch + 1) * self._steps - 1, self._steps)


def build_schedule(config: TrainConfig, optimizer: Optimizer) -> Schedule | None:
    """Return the schedule that the options select; None if the learning rate is constant."""
    if config.schedule == "constant" and not config.warmup_epochs:
        return None
    return Schedule(config, optimizer)


def factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the factor by which --lr is multiplied in a step.

    In the k-th of W warm-up steps, the factor is k / W. After them, "cosine" and "linear" equal
    torch's `CosineAnnealingLR` and `LinearLR` to 0 over the remaining steps. "step" equals torch's
    `StepLR` from the start of the run.

    Args:
        config: options of the run.
        step: counted from 0, over all epochs.
        steps_per_epoch: the number of steps of an epoch.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "step":
        return config.step_factor ** (step // max(1, round(config.step_epochs * steps_per_epoch)))
    progress = min(1.0, (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup))
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress if config.schedule == "linear" else 1.0


# number of the most recent waits for other workers that are kept, to compute how much of the
# overlapped exchanges they contain
WAITS = 1000


class Interrupted(Exception):
    """A worker received a stop request; the run is saved, except files that the message names."""


class SavedRun(Interrupted):
    """A worker received a stop request, and all files of the run are saved."""

    def __init__(self, epoch: int, folder: Path) -> None:
        self.stopped = f"stopped in epoch {epoch}; all files are saved"
        self.remedy = f"`gcnzc train --resume {folder}` resumes the run from here"
        super().__init__(f"{self.stopped}\n\nhint: {self.remedy}")

    def format_restart(self) -> str:
        """Return the message for a worker that its launcher may restart."""
        return (
            f"{self.stopped}. The launcher may restart the workers, which then resume the run; "
            f"otherwise {self.remedy}"
        )


class PeerFailed(Exception):
    """Another worker failed and reports the error; this worker ends as well."""


class Trainer:
    """A run in progress: its parts, its position, and its run folder."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        data: Dataset | HeteroDataset,
        task: Task,
        table: FeatureTable | TypedTables,
        device: torch.device,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        loader: Loader | FullBatchLoader | HeteroLoader,
        reporter: Reporter,
        precision: Precision,
        began: float,
    ) -> None:
        self.config, self.folder, self.data, self.task = config, folder, data, task
        self.table = table
        self.graph_files = describe_files(data.folder)
        self.device, self.model, self.optimizer = device, model, optimizer
        self.schedule = build_schedule(config, optimizer)
        self.average = build_average(config, model)
        self.group = optimizer.group
        self.is_rank_zero = self.group.rank == 0
        self.loader, self.reporter, self.precision = loader, reporter, precision
        self.began = began  # time.perf_counter() at the start of the command
        self.epoch = 0
        self.in_epoch = False  # True from the first step of an epoch to its evaluation
        self.epoch_stats = EpochStats(device)
        self.lines: list[dict[str, Any]] = []  # of record.jsonl, one per epoch
        self.worker_lines = 0  # number of lines of workers.jsonl
        self.best: dict[str, Any] = {}
        self.is_best_written = True
        self.counted_sent = 0  # sent bytes of the ledger that are already in an epoch's statistics
        self.steps = 0  # steps of this command
        self.now = clock_of(device)
        # spans of the traced steps
        self.spans: list[Span] = []
        self.stages: list[Stage] = []
        self.waits: deque[Span] = deque(maxlen=WAITS)
        self.saved_at = time.monotonic()
        self.files = OutputFiles(folder, reporter.say)
        self.record = record.Journal(folder / RECORD)
        self.worker_record = record.Journal(folder / WORKERS)
        self.events = EventFile(folder / BOARD, reporter.say)
        self.writer = checkpoint.Writer()
        self.is_checkpoint_written = True  # whether the last checkpoint is on the disk
        self.worker_states = WorkerStates(folder, self.group.rank, self.group.world_size)
        self.embeddings: TrainedEmbeddings | None = None  # of node types without features

    def on_rank_zero(self, function: Callable[[], None]) -> None:
        """Call a function on rank 0; if it raises an error, all workers raise one.

        Raises:
            PeerFailed: on the other workers, if the function raised an error.
        """
        error: Exception | None = None
        if self.is_rank_zero:
            try:
                function()
            except Exception as failure:  # any error, because the other workers wait for the result
                error = failure
        if any(run(all_gather_scalar(int(error is not None)), self.group)):
            raise error or PeerFailed("rank 0 has failed")

    def is_checkpoint_due(self) -> bool:
        """Whether --checkpoint-every-s seconds have passed since the last checkpoint."""
        return time.monotonic() - self.saved_at >= self.config.checkpoint_every_s

    def count_sent(self) -> None:
        """Add the bytes sent since the last call to the epoch's statistics."""
        sent = self.group.ledger.bytes_sent
        self.epoch_stats.bytes_sent += sent - self.counted_sent
        self.counted_sent = sent
