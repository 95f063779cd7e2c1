"""A run in progress: its parts, its position, and what its callbacks read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group, WorkerLost
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.loader.loader import Batches, Loader
from gcnzc.optim import DistributedOptimizer
from gcnzc.system.spans import Span, Stage
from gcnzc.system.streams import TimedEvent, clock_of
from gcnzc.train.config import TrainConfig
from gcnzc.train.errors import PeerFailed, StopTraining
from gcnzc.train.hetero.data import HeteroDataset, TypedTables
from gcnzc.train.hetero.embeddings import TrainedEmbeddings
from gcnzc.train.output_files import OutputFiles
from gcnzc.train.precision import Precision
from gcnzc.train.progress import Reporter
from gcnzc.train.schedules import Schedule
from gcnzc.train.tasks.base import Scores, Task
from gcnzc.train.weight_average import WeightAverage


@dataclass(frozen=True, eq=False)
class Output:
    """What callbacks read of a minibatch; not its features, so that their memory is reused."""

    items: Tensor
    """(S,) int64 on the host: seed nodes, or numbers of seed edges"""
    labels: Tensor
    """(B,), (B, C) or (P,) on the device"""
    logits: Tensor | None
    """on the device, detached; None if the minibatch was dropped or has no seeds"""
    loss: Tensor | None
    """(), the mean over the minibatch"""
    nodes: Tensor | Mapping[str, Tensor]
    """the nodes whose features were gathered, in a heterogeneous graph by type"""
    times: Mapping[str, float]
    """seconds that were measured on the threads of the loader"""
    spans: Sequence[Span]
    stages: Sequence[Stage]

    @classmethod
    def of(cls, batch: Any, logits: Tensor | None, loss: Tensor | None) -> "Output":
        """Return the output of a minibatch."""
        logits, loss = (each if each is None else each.detach() for each in (logits, loss))
        times = batch.times, batch.spans, batch.stages
        return cls(batch.items, batch.y, logits, loss, batch.nodes, *times)


@dataclass(eq=False)
class Run:
    """A run in progress, which callbacks receive.

    Attributes:
        config: the options.
        folder: the run folder.
        group: all workers.
        device: where the model is.
        model: the model that is trained.
        optimizer: the update rule with the exchange between the workers.
        epoch, step: the position, both from 0; `step` is that of the epoch.
        num_steps: steps of the epoch.
        outputs: of the minibatches of the last step.
        line: the line of the record, of the epoch that ends.
        scores: of the last evaluation: by metric and split.
        evaluated: the model that was evaluated last: `model`, or the average of its weights.
        stopped: why the run has ended before its last epoch; None if it has not.
        result: what `train` returns; complete after `on_end`.
    """

    config: TrainConfig
    folder: Path
    group: Group
    device: torch.device
    reporter: Reporter
    began: float
    """`time.perf_counter()` at the start of the command"""
    data: Dataset | HeteroDataset = field(init=False)
    task: Task = field(init=False)
    table: FeatureTable | TypedTables = field(init=False)
    model: nn.Module = field(init=False)
    loader: Loader | FullBatchLoader = field(init=False)
    optimizer: DistributedOptimizer = field(init=False)
    precision: Precision = field(init=False)
    schedule: Schedule | None = None
    average: WeightAverage | None = None
    embeddings: TrainedEmbeddings | None = None
    epoch: int = 0
    in_epoch: bool = False
    """True from the first step of an epoch to its end"""
    step: int = 0
    num_steps: int = 0
    steps: int = 0
    """of this command, over all epochs"""
    is_last: bool = False
    """whether this epoch is the last one of the run"""
    outputs: list[Output] = field(default_factory=list)
    line: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """of the record, one per epoch"""
    scores: Scores = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    """epoch, valid and scores of the best evaluation; empty before the first"""
    evaluated: nn.Module | None = None
    result: dict[str, Any] = field(default_factory=dict)
    stopped: Exception | None = None
    received_signal: Callable[[], int] = lambda: 0
    """the SIGINT or SIGTERM that this worker has received; 0 if none"""
    is_save_due: Callable[[], bool] = lambda: False
    """whether this worker requests a checkpoint"""
    save: Callable[[], None] = lambda: None
    """writes a checkpoint; a collective call"""
    ending: StopTraining | None = None
    """why a callback of this worker ends the run"""
    agreed: Sequence[bool] = (False, False)
    """the requests of any worker at the last exchange, see `STOP` and `SAVE`; the same on all"""
    stages: list[Stage] = field(default_factory=list)
    """of the training thread, in the last step"""
    spans: list[Span] = field(default_factory=list)
    """exchanges of the last step"""

    def __post_init__(self) -> None:
        self.files = OutputFiles(self.folder, self.reporter.say)
        self.now = clock_of(self.device)
        self._marked: TimedEvent = self.now()

    @property
    def is_first(self) -> bool:
        """Whether this worker writes the files of the run."""
        return self.group.rank == 0

    @property
    def position(self) -> str:
        """Where in the run this is, for messages: in an epoch, or after one."""
        return f"in epoch {self.epoch + 1}" if self.in_epoch else f"after epoch {self.epoch}"

    def on_first(self, function: Callable[[], object]) -> None:
        """Call a function on the first worker; if it raises an error, all workers raise one.

        It may take longer than the time limit of the group.

        Raises:
            PeerFailed: on the other workers, if the function raised an error.
        """
        error: Exception | None = None
        with joint_work(self.group) as work:
            if self.is_first:
                try:
                    work.run_in_thread(function)
                except WorkerLost:
                    raise
                except Exception as failure:  # any error, because the other workers wait
                    error = failure
        if any(run_algorithm(all_gather_scalar(int(error is not None)), self.group)):
            raise error or PeerFailed("the first worker has failed")

    def open_batches(self) -> Batches:
        """Return the iterator of the minibatches of this epoch."""
        return cast(Batches, iter(self.loader))

    def wanted(self) -> list[bool]:
        """Return the requests of this worker, in the order of `STOP` and `SAVE`."""
        return [bool(self.received_signal()) or self.ending is not None, self.is_save_due()]

    def mark(self, name: str) -> None:
        """End a stage of the training thread, such as "wait"; one without a name is not counted."""
        now = self.now()
        if name:
            is_longer = bool(self.stages) and self.stages[-1].name == name
            begin = self.stages.pop().begin if is_longer else self._marked
            self.stages.append(Stage(name, "model", begin, now))
        self._marked = now
