"""The state of a training run: its parts, progress and output files."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.loader.loader import Loader
from gcnzc.optim import DistributedOptimizer
from gcnzc.system.spans import Span, Stage
from gcnzc.system.streams import clock_of
from gcnzc.train import checkpoint, record
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import EpochStats
from gcnzc.train.errors import PeerFailed
from gcnzc.train.graph_files import describe_files
from gcnzc.train.hetero.data import HeteroDataset, TypedTables
from gcnzc.train.hetero.embeddings import TrainedEmbeddings
from gcnzc.train.output_files import OutputFiles
from gcnzc.train.precision import Precision
from gcnzc.train.progress import Reporter
from gcnzc.train.run_folder import BOARD, RECORD, WORKERS
from gcnzc.train.schedules import build_schedule
from gcnzc.train.tasks.base import Task
from gcnzc.train.tensorboard import EventFile
from gcnzc.train.weight_average import build_average
from gcnzc.train.worker_state import WorkerStates

# number of the most recent waits for other workers that are kept, to compute how much of the
# overlapped exchanges they contain
WAITS = 1000


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
        self.schedule = build_schedule(config.training, optimizer)
        self.average = build_average(config.training, model)
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
        return time.monotonic() - self.saved_at >= self.config.run.checkpoint_every_s

    def count_sent(self) -> None:
        """Add the bytes sent since the last call to the epoch's statistics."""
        sent = self.group.ledger.bytes_sent
        self.epoch_stats.bytes_sent += sent - self.counted_sent
        self.counted_sent = sent
