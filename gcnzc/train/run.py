"""Train a model on a graph; this module combines all stages of a run.

`train` makes the data, table, model and loader. It then trains epochs, each followed by an
evaluation with all neighbours, and finally tests the model that was best on the validation split.
The checkpoint has everything that later steps depend on, so a run that was killed resumes bit for
bit.
"""

import hashlib
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gcnzc.datasets.store import is_prepared
from gcnzc.exchange import Choices, Group, run
from gcnzc.exchange.long_work import together
from gcnzc.exchange.sync import gathered, synchronise_buffers, told, vote
from gcnzc.features.cache import CachedTable
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import verify
from gcnzc.loader.loader import Loader
from gcnzc.optim import Exchanging, LocalUpdates, resized
from gcnzc.system import files, machine
from gcnzc.system.spans import Span, Stage, seconds_outside
from gcnzc.system.streams import clock_of
from gcnzc.train import checkpoint, record
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import Tally, added
from gcnzc.train.evaluation import BEST_KEYS, named
from gcnzc.train.exchange_tuning import exchange_tuning
from gcnzc.train.memory import check_memory, footprint_of
from gcnzc.train.optimizers import build_method
from gcnzc.train.options import to_words
from gcnzc.train.plots import curves, timeline
from gcnzc.train.progress import Quiet, Reporter
from gcnzc.train.run_folder import (
    BEST,
    BOARD,
    CHECKPOINT,
    CONFIG,
    CURVES,
    RECORD,
    RESULT,
    TIMELINE,
    TRACE,
    WORKERS,
    is_of_launch,
    read_config,
)
from gcnzc.train.setup import cached_table, choose_device, feature_table, planned
from gcnzc.train.shared_data import load_shared
from gcnzc.train.signals import STOP, stop_requests
from gcnzc.train.tasks import build_task
from gcnzc.train.tasks.base import Task
from gcnzc.train.tracing import everybodys_spans, share_under, write_trace
from gcnzc.train.worker_state import WorkerStates
from gcnzc.tune import pcie_bench

# options that a resumed run may be given anew: they change how long it runs, not what it computes
FREE_ON_RESUME = {
    *(
        "data",
        "epochs",
        "threads",
        "plan",
        "verify",
        "checkpoint_every_s",
        "trace",
        "out",
        "resume",
        "config",
    ),
    *("workers", "timeout_s", "restarts"),
}


# waits for other workers that an exchange beside the steps may have seen
WAITS = 1000


# steps that are not traced: they compile, and fill the loader's memory
WARM_UP = 10


# what checkpoint.pt and best.pt hold at least
CHECKPOINT_KEYS: Mapping[str, type] = {
    "model": dict,
    "optimizer": dict,
    "epoch": int,
    "in_epoch": bool,
    "loader": dict,
    "best": dict,
    "lines": list,
    "worker_lines": int,
    "rng": torch.Tensor,
}


class Interrupted(Exception):
    """The user stopped the run; its state is saved."""


class Followed(Exception):
    """Another worker has failed and reports the error; this worker ends too."""


def train(
    config: TrainConfig,
    folder: Path,
    reporter: Reporter | None = None,
    group: Group | None = None,
    launch: record.Launch | None = None,
) -> dict[str, Any]:
    """Train a model with the options of `config`, and return the result of the run.

    Args:
        config: the options; `data` must be set.
        folder: the run folder, created if needed. With `config.resume` it has the run to resume.
            Only worker 0 reads and writes it.
        reporter: shows the progress; None shows nothing.
        group: the workers that train together; this process alone if None.
        launch: the launch of these workers, the same on all. If `folder` has a run of this launch,
            these workers were restarted, and resume that run.

    Returns:
        The result that `gcnzc train` prints: accuracies, bytes, and seconds per epoch.

    Raises:
        ValueError: the data, the options or the checkpoint do not match.
        RuntimeError: the run needs more memory than the machine has.
        Interrupted: the process received SIGINT or SIGTERM; the run was saved first.
        WorkerLost: another worker has ended or does not respond; the run can be resumed.
        Followed: worker 0 failed, and raises the error.
    """
    began = time.perf_counter()
    reporter, group = reporter or Quiet(), group or Group()
    if config.data is None:
        raise ValueError("train: no data\n\nhint: give the folder of a graph")
    if config.verify:
        _verify(config.data, group, reporter)
    data = load_shared(config.data, group, allow_nan=config.allow_nan)
    device = choose_device(config.device, group.local_rank)
    task = build_task(config, data)
    if data.table is not None and data.table.num_columns > 0:
        sizes = (data.graph.num_nodes, data.table.num_columns, len(task.seeds))
        check_memory(footprint_of(config, task.model, *sizes), device, group)
    with ExitStack() as stack:
        table = stack.enter_context(feature_table(data, config.features, device, group))
        settings = planned(config, table, device, reporter.say)
        table = settings.table
        if config.features == "cached":
            with reporter.task("count how often rows are needed") as advance:
                table = cached_table(config, data, table, device, group, advance, settings.hot)
            if isinstance(table, CachedTable) and table.gpus > 1:
                stack.push(_leave_together(group, device))
        # dropout and initial weights draw from torch's generators; the caller's are left alone
        stack.enter_context(torch.random.fork_rng(_cuda_devices(device)))
        stopped = stack.enter_context(stop_requests())
        torch.manual_seed(config.seed)
        model = task.model().to(device)
        if config.tune_exchange:
            tuning = exchange_tuning(model, group)
            group.choices = tuning.choices
            for row in tuning.rows():
                reporter.say(row.told())
        if group.rank:
            # dropout is not that of the other workers
            torch.manual_seed(_mixed(config.seed, group.rank))
        loader = Loader(
            data.graph,
            table,
            task.seeds,
            list(config.fanouts),
            config.batch_size,
            labels=task.labels,
            device=device,
            seed=config.seed,
            sampler=task.sampler,
            in_degrees=config.model == "gcn",
            rank=group.rank,
            world_size=group.world_size,
            **settings.loading,
        )
        steps = config.epochs * len(loader)
        optimizer = build_method(config, model, group, steps, signals=2)
        parts = data, task, table, device, model, optimizer, loader, reporter
        this = _Run(config, folder, *parts, began)
        this.begin(launch, stack)
        return this.to_the_end(stopped)


def _verify(path: Path, group: Group, reporter: Reporter) -> None:
    """Verify a prepared folder on one worker of each machine; other data is checked when read.

    Raises:
        FileNotFoundError, ValueError: on all workers, if a file is missing or damaged.
    """
    with together(group) as work:
        if group.local_rank == 0 and is_prepared(path):
            with reporter.stages(f"verify {path}") as progress:
                work.meanwhile(lambda: verify(path, progress))


class _Run:
    """A run: its parts, its progress and its folder."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        data: Dataset,
        task: Task,
        table: FeatureTable,
        device: torch.device,
        model: nn.Module,
        optimizer: Exchanging,
        loader: Loader,
        reporter: Reporter,
        began: float,
    ) -> None:
        self.config, self.folder, self.data, self.task = config, folder, data, task
        self.table = table
        self.device, self.model, self.optimizer = device, model, optimizer
        self.group = optimizer.group
        self.is_first = self.group.rank == 0
        self.loader, self.reporter = loader, reporter
        self.began = began  # by time.perf_counter
        self.epoch = 0
        self.in_epoch = False  # between the first step of an epoch and its evaluation
        self.tally = Tally(device)
        self.lines: list[dict[str, Any]] = []  # of the record, one an epoch
        self.worker_lines = 0  # of what each worker did in each epoch
        self.best: dict[str, Any] = {}
        self.counted_sent = 0  # bytes of the ledger that were already added to a tally
        self.steps = 0  # of this command
        self.now = clock_of(device)
        # of the steps that are traced
        self.spans: list[Span] = []
        self.stages: list[Stage] = []
        self.waits: deque[Span] = deque(maxlen=WAITS)
        self.saved_at = time.monotonic()
        self.writer = checkpoint.Writer()
        self.worker_states = WorkerStates(folder, self.group.rank)

    def on_first(self, deed: Callable[[], None]) -> None:
        """Call a function on worker 0; if it raises an error, all workers raise one."""
        error: Exception | None = None
        if self.is_first:
            try:
                deed()
            except Exception as failure:  # whatever it is, the others must not wait for it
                error = failure
        if any(run(vote(int(error is not None)), self.group)):
            raise error or Followed("worker 0 has failed")

    def begin(self, launch: record.Launch | None, stack: ExitStack) -> None:
        """Start a run, or resume the one in the folder; worker 0 decides.

        From then on the run can be resumed. Worker 0 locks the folder until `stack` ends.
        """
        found: list[bytes] = []
        self.on_first(lambda: found.append(self._open_folder(launch, stack)))
        data = run(told(found[0] if found else b"", self.group.rank), self.group)
        if data:
            path = self.folder / CHECKPOINT
            try:
                self._take_up(checkpoint.from_bytes(data, path, CHECKPOINT_KEYS))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{path} does not fit this run: {type(error).__name__} {error}\n\n"
                    f"{checkpoint.RESTORE}"
                ) from error
        else:
            self.save()

    def _open_folder(self, launch: record.Launch | None, stack: ExitStack) -> bytes:
        """Return the bytes of the checkpoint to resume from; empty for a new run."""
        if not self.config.resume:
            self.folder.mkdir(parents=True, exist_ok=True)
        # before anything is decided: of two launches that start at the same time, one has it
        stack.enter_context(files.locked_folder(self.folder))
        is_resumed = bool(self.config.resume) or is_of_launch(self.folder, launch)
        if not is_resumed:
            self._demand_free_folder()
        if launch is not None:
            launch.write(self.folder)
        if is_resumed:
            return self._read_checkpoint()
        # last: a folder without it holds no run
        files.write_json(self.folder / CONFIG, to_words(self.config))
        return b""

    def _demand_free_folder(self) -> None:
        """Check that the folder has neither a run nor a prepared graph."""
        if (self.folder / CONFIG).exists():
            raise ValueError(
                f"{self.folder} already holds a run\n\n"
                f"hint: --resume {self.folder} goes on with it; another --out starts anew"
            )
        if is_prepared(self.folder):
            raise ValueError(
                f"{self.folder} holds a prepared graph\n\nhint: a run needs a folder of its own"
            )

    def _demand_options(self, options: Mapping[str, Any] | None) -> None:
        """Check the options against those of the resumed run; old checkpoints have none."""
        given = to_words(self.config)
        for name, value in (options or {}).items():
            if name in given and given[name] != value and name not in FREE_ON_RESUME:
                raise ValueError(
                    f"the run in {self.folder} has {name} {value!r}, not {given[name]!r}\n\n"
                    "hint: a resumed run keeps its options; start another with --out"
                )

    def _demand_progress(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint's epoch, record and tallies are consistent."""
        path, epoch, lines = self.folder / CHECKPOINT, state["epoch"], state["lines"]
        # a checkpoint from before each worker's was kept has their sum
        checkpoint.demand_keys(
            state, {"tallies": list} if "tallies" in state else {"tally": dict}, path
        )
        if state["best"]:
            checkpoint.demand_keys(state["best"], BEST_KEYS, path)
        is_whole = epoch == len(lines) and all(isinstance(line, dict) for line in lines)
        if not is_whole or state["worker_lines"] < 0:
            raise ValueError(
                f"{path} is after epoch {epoch}, but has the record of {len(lines)} epochs\n\n"
                f"{checkpoint.RESTORE}"
            )

    def _read_checkpoint(self) -> bytes:
        self._demand_options(to_words(read_config(self.folder)))
        path = self.folder / CHECKPOINT
        if path.exists():
            data = path.read_bytes()
            if not data:
                raise ValueError(f"{path} is damaged: it is empty\n\n{checkpoint.RESTORE}")
            return data
        # a run that was killed before its first checkpoint has nothing to lose
        for name in (RECORD, BEST):
            if (self.folder / name).exists():
                raise ValueError(
                    f"the run in {self.folder} has {name}, but its checkpoint {path} is gone\n\n"
                    "hint: put the checkpoint back; or start another run, with --out"
                )
        self.reporter.say(f"{self.folder} has no checkpoint yet: its run starts over")
        return b""

    def _take_up(self, state: dict[str, Any]) -> None:
        self._demand_options(state.get("options"))
        self._demand_progress(state)
        checkpoint.match(self.model, state["model"], self.folder / CHECKPOINT)
        self._take_up_optimizer(state)
        self.epoch, self.in_epoch = state["epoch"], state["in_epoch"]
        self.best, self.lines = state["best"], state["lines"]
        self._take_up_tally(state["tallies"] if "tallies" in state else [state["tally"]])
        if self.in_epoch:
            self.loader.load_state_dict(state["loader"])
        self._set_random_states(state)
        if self.is_first:
            # the checkpoint has all lines, also where the file was damaged since
            record.rewrite(self.folder / RECORD, self.lines)
            record.keep(self.folder / WORKERS, state["worker_lines"])
        self.worker_lines = state["worker_lines"]
        if len(state["rng"]) == self.group.world_size:
            self.group.choices = Choices(state.get("choices", {}))
        where = f"in epoch {self.epoch + 1}" if self.in_epoch else f"after epoch {self.epoch}"
        self.reporter.say(f"going on with {self.folder} {where}")

    def _take_up_tally(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load each worker's tally; if the number of workers changed, worker 0 loads the sum."""
        if len(states) == self.group.world_size:
            self.tally.load_state_dict(states[self.group.rank])
        elif self.is_first:
            tallies = [Tally(self.device) for _ in states]
            for tally, each in zip(tallies, states, strict=True):
                tally.load_state_dict(each)
            self.tally = added(tallies)

    def _take_up_optimizer(self, state: Mapping[str, Any]) -> None:
        found = state["optimizer"]
        if self.optimizer.is_shared:
            self.optimizer.load_state_dict(found)
            return
        old, rank, world_size = found["workers"], self.group.rank, self.group.world_size
        everyone = list(range(old))
        ranks = [rank] if old == world_size else everyone
        failure: Exception | None = None
        try:
            states = self.worker_states.load(found["generation"], ranks)
        except (OSError, ValueError) as error:
            failure = error
        if any(run(vote(int(failure is not None)), self.group)):
            raise failure or Followed("another worker cannot read the run")
        own = states[0] if old == world_size else resized(states, rank, world_size)
        self.optimizer.load_state_dict(own)

    def _set_random_states(self, state: Mapping[str, Any]) -> None:
        rank, world_size = self.group.rank, self.group.world_size
        if len(state["rng"]) != world_size:
            # as many others would draw anew what these have drawn
            place = (self.config.seed, rank + 1, world_size, self.epoch, self.loader.shares.done)
            torch.manual_seed(_mixed(*place))
            return
        # torch 2.13 crashes on a state that is part of another tensor
        torch.set_rng_state(state["rng"][rank].clone())
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"][rank].clone(), self.device)

    def save(self, *, waits: bool = True) -> None:
        """Write the checkpoint, on all workers together.

        Without `waits`, the file is written in the background, and a full disk is reported and does
        not end the run.
        """
        optimizer = self._save_optimizer()
        if optimizer is None:
            return
        self._count_sent()
        tallies = run(self.tally.of_all_workers(), self.group)
        states = {"rng": run(gathered(torch.get_rng_state()), self.group)}
        if self.device.type == "cuda":
            own = torch.cuda.get_rng_state(self.device)
            states["cuda_rng"] = run(gathered(own), self.group)
        state = {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "epoch": self.epoch,
            "in_epoch": self.in_epoch,
            "loader": self.loader.state_dict() if self.in_epoch else {},
            "tallies": [tally.state_dict() for tally in tallies],
            "best": self.best,
            "lines": self.lines,
            "worker_lines": self.worker_lines,
            "options": to_words(self.config),
            # sums round as the algorithms add
            "choices": dict(self.group.choices.steps),
            **states,
        }
        path = self.folder / CHECKPOINT
        if waits:
            self.on_first(lambda: self._write(path, state))
        elif self.is_first:
            try:
                self.writer.begin(path, state)
            except OSError as error:
                self.reporter.say(
                    f"a checkpoint could not be written: {error}; training goes on, and the next "
                    f"one is due in {self.config.checkpoint_every_s:g} s"
                )
        self.saved_at = time.monotonic()

    def _save_optimizer(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the optimizer; None if a worker could not write its state."""
        state = self.optimizer.snapshot()
        if self.optimizer.is_shared:
            return state
        is_written = self.is_first
        try:
            self.writer.wait()
        except OSError:
            is_written = False
        run(self.worker_states.forget(is_written), self.group)
        if wrong := run(self.worker_states.save(state), self.group):
            self.reporter.say(
                f"a checkpoint could not be written: {wrong}; training goes on, and the next one "
                f"is due in {self.config.checkpoint_every_s:g} s"
            )
            self.saved_at = time.monotonic()
            return None
        generation, workers = self.worker_states.generation, self.group.world_size
        return {"generation": generation, "workers": workers}

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        # what was begun before is older, and may fail
        with suppress(OSError):
            self.writer.wait()
        checkpoint.save(path, state)

    def to_the_end(self, stopped: threading.Event) -> dict[str, Any]:
        """Train what is left, and test the best model."""
        with self._board() as show:
            while self.epoch < self.config.epochs and not self.out_of_patience():
                self.train_epoch(stopped)
                self.finish_epoch()
                show(self.epoch, self.lines[-1])
                asks = [stopped.is_set(), self.is_due()]
                if self.group.world_size > 1:
                    # each has its own clock, and its own signals
                    asks = run(gathered(torch.tensor(asks)), self.group).any(dim=0).tolist()
                self.obey(asks)
        self.save()
        return self.result()

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self.saved_at >= self.config.checkpoint_every_s

    def _board(self) -> AbstractContextManager[Callable[[int, Mapping[str, Any]], None]]:
        if self.is_first:
            return record.board(self.folder / BOARD, self.epoch)
        return nullcontext(lambda epoch, line: None)

    def train_epoch(self, stopped: threading.Event) -> None:
        """Take the steps of this epoch that are not taken yet."""
        if not self.in_epoch:
            self.loader.set_epoch(self.epoch)
            self.in_epoch = True
        self.model.train()
        steps, done = len(self.loader), self.loader.position
        title = f"epoch {self.epoch + 1}/{self.config.epochs}"
        with ExitStack() as stack, self.reporter.task(title) as advance:
            # those of loading and evaluation are not of a step
            self.group.take_waits()
            # closed, so that no row is read any more when the run is left
            batches = stack.enter_context(closing(iter(self.loader)))
            began = self.now()
            for step, batch in enumerate(batches, done):
                ready = self.now()
                assert batch.x is not None, "the loader has a table"
                assert batch.y is not None, "the loader or its sampler has labels"
                self.group.at(self.steps, f"training in epoch {self.epoch + 1}")
                self.optimizer.zero_grad(set_to_none=True)
                # a worker may have no seed when others have taken up the rest of an epoch
                if len(batch.y):
                    logits = self.task.logits(self.model, batch)
                    loss = self.task.loss(logits, batch.y)
                    loss.backward()
                self.optimizer.weight = self.loader.shares.weight(step)
                self.optimizer.asks = [stopped.is_set(), self.is_due()]
                self.optimizer.step()
                stepped = self.now()
                if self.optimizer.blame:
                    who = "" if isinstance(self.optimizer, LocalUpdates) else " on all workers"
                    self.reporter.say(
                        f"step {step + 1} of epoch {self.epoch + 1} was skipped{who}: "
                        f"{self.optimizer.blame}"
                    )
                if len(batch.y):
                    assert batch.items is not None, "the loader says which seeds it took"
                    self.tally.add(logits.detach(), loss.detach(), batch.y, batch.items)
                self.tally.steps += 1
                stages = [
                    *batch.stages,
                    Stage("wait", "model", began, ready),
                    Stage("compute", "model", ready, stepped),
                ]
                waits = [Span("exchange", "model", *wait) for wait in self.group.take_waits()]
                self.waits += waits
                beside = [Span("beside", "exchange", *each) for each in self.group.take_beside()]
                self.tally.time(batch.times, stages, waits)
                if beside:
                    # what of it nobody waited for
                    hidden_s = seconds_outside(beside, self.waits)
                    self.tally.seconds.add_seconds("hidden_s", hidden_s)
                self.tally.bytes += len(batch.nodes) * self.table.row_bytes
                if isinstance(self.table, CachedTable):
                    in_place = self.loader.read_in_place(batch.nodes)
                    self.tally.hits += self.table.hits(in_place)
                    self.tally.peer_hits += self.table.peer_hits(in_place)
                self.trace(batch.spans + waits + beside, stages)
                began = self.now()
                advance(step + 1, steps, self.tally.shown)
                self.obey(self.optimizer.heard)

    def trace(self, spans: Sequence[Span], stages: Sequence[Stage]) -> None:
        """Keep when this step's stages ran, if it is to be drawn, and draw after the last one."""
        self.steps += 1
        last = WARM_UP + self.config.trace
        if not WARM_UP < self.steps <= last:
            return
        self.spans += spans
        self.stages += stages
        if self.steps == last:
            self.draw_trace()

    def draw_trace(self) -> None:
        """Write the timeline of the steps that were traced, if there are any."""
        if self.stages:
            own = self.spans + [stage.span() for stage in self.stages]
            spans = run(everybodys_spans(own, self.group.rank), self.group)
            self.spans, self.stages = [], []
            if not self.is_first:
                return
            write_trace(spans, self.folder / TRACE)
            timeline(spans, self.folder / TIMELINE)
            share = share_under(own, "gather", "compute")
            self.reporter.say(
                f"{share:.0%} of the gathering lay under the model's work; {self.folder / TIMELINE}"
            )

    def finish_epoch(self) -> None:
        """Evaluate, keep the best model, and write the line of this epoch."""
        last = self.epoch + 1 == self.config.epochs
        if not last:
            # the last time it is part of `finalize`
            run(synchronise_buffers(self.model), self.group)
        self._count_sent()
        tallies = run(self.tally.of_all_workers(), self.group)
        self._write_worker_lines(tallies)
        tally = added(tallies)
        figures = tally.figures(self.task.has_accuracy, self.group.world_size)
        if not math.isfinite(figures["loss"]):
            raise ValueError(
                f"the loss is {figures['loss']} in epoch {self.epoch + 1}\n\n"
                "hint: a smaller --lr; features that are not finite do this too"
            )
        line: dict[str, Any] = {"epoch": self.epoch, "metric": self.task.metric, **figures}
        if isinstance(self.table, CachedTable):
            hits, rows = int(tally.hits), figures["payload_bytes"] // self.table.row_bytes
            line |= {"hit_rate": hits / rows, "bytes_saved": hits * self.table.row_bytes}
            line["peer_hit_rate"] = int(tally.peer_hits) / rows
        if self.task.best_accuracy is not None:
            line["best_possible_accuracy"] = self.task.best_accuracy
        if last or (self.epoch + 1) % self.config.evaluate_every == 0:
            begin = time.perf_counter()
            if last:
                self.optimizer.finalize()
            # between two exchanges workers may be apart
            own: Any = run(self.optimizer.parameters_averaged(), self.group)
            self.group.at(self.steps, f"evaluation in epoch {self.epoch + 1}")
            with self.reporter.task(f"evaluate {self.epoch + 1}/{self.config.epochs}") as advance:
                scores = self.task.evaluate(
                    self.model, self.table, self.device, advance, self.group
                )
            line |= {"evaluate_s": time.perf_counter() - begin, **named(scores)}
            mine = scores[self.task.metric]["valid"]
            if not self.best or mine > self.best["valid"]:
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.best = {"epoch": self.epoch, "valid": mine, "scores": scores, "model": weights}
                self.on_first(lambda: checkpoint.save(self.folder / BEST, self.best))
            run(self.optimizer.parameters_restored(own), self.group)
        self.lines.append(line)
        self.epoch, self.in_epoch = self.epoch + 1, False
        self.tally = Tally(self.device)
        if self.is_first:
            record.append(self.folder / RECORD, line)
        self.reporter.say(_sentence(line, self.config.epochs))

    def _count_sent(self) -> None:
        """Add the bytes that this worker sent since the last call to the epoch's tally."""
        sent = self.group.ledger.bytes_sent
        self.tally.bytes_sent += sent - self.counted_sent
        self.counted_sent = sent

    def _write_worker_lines(self, tallies: Sequence[Tally]) -> None:
        """What each worker did in this epoch, a line for each."""
        if len(tallies) == 1:
            return  # the record has it all
        self.worker_lines += len(tallies)
        if not self.is_first:
            return
        for worker, tally in enumerate(tallies):
            line = {"epoch": self.epoch, "worker": worker, **tally.seconds.all()}
            line |= {"seeds": tally.seeds, "steps": tally.steps, "bytes_sent": tally.bytes_sent}
            record.append(self.folder / WORKERS, line)

    def out_of_patience(self) -> bool:
        """Whether the last evaluations brought no better model."""
        if not self.config.patience or not self.best:
            return False
        key = f"valid_{self.task.metric}"
        later = [line for line in self.lines if key in line and line["epoch"] > self.best["epoch"]]
        return len(later) >= self.config.patience

    def obey(self, heard: Sequence[bool]) -> None:
        """Save, and leave, if a worker asked for it."""
        if any(heard):
            self.save(waits=heard[STOP])
        if heard[STOP]:
            raise Interrupted(
                f"stopped in epoch {min(self.epoch + 1, self.config.epochs)}; all is saved\n\n"
                f"hint: `gcnzc train --resume {self.folder}` goes on from here"
            )

    def result(self) -> dict[str, Any]:
        """What the run came to; also written into its folder, with its curves."""
        epochs = len(self.lines)

        def mean(key: str) -> float:
            # lines from before something was measured do not have it
            return sum(line.get(key, 0.0) for line in self.lines) / epochs

        data, task, config = self.data, self.task, self.config
        gathered, seconds = mean("payload_bytes"), mean("gather_s")
        line: dict[str, Any] = {
            "run": str(self.folder),
            "data": data.name,
            "task": config.task,
            "model": config.model,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "metric": task.metric,
            **named(self.best["scores"]),
            "best_epoch": self.best["epoch"] + 1,
            "epochs": epochs,
            "epoch_s": mean("epoch_s"),
            "sample_s": mean("sample_s"),
            "gather_s": seconds,
            "compute_s": mean("compute_s"),
            "wait_s": mean("wait_s"),
            "exchange_s": mean("exchange_s"),
            "hidden_s": mean("hidden_s"),
            "seeds_per_s": len(task.seeds) / mean("epoch_s"),
            "payload_bytes": int(gathered),
            "gather_bytes_per_s": gathered / seconds if seconds else 0.0,
            "gather_roof_bytes_per_s": self._roof(),
            "workers": self.group.world_size,
            "bytes_sent": sum(line.get("bytes_sent", 0) for line in self.lines),
            "seed": config.seed,
            "device": str(self.device),
            "options": _options(config),
            # of this command, which may have resumed the run
            "total_s": time.perf_counter() - self.began,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_gpu_memory_bytes": _peak_gpu_memory_bytes(self.device),
            **machine.machine(),
        }
        if isinstance(self.table, CachedTable):
            for key in ("hit_rate", "peer_hit_rate"):
                # lines from before sets were split have no hits of peers
                hit = sum(line.get(key, 0.0) * line["payload_bytes"] for line in self.lines)
                line[key] = hit / epochs / gathered
            line["predicted_hit_rate"] = self.table.predicted_hit_rate
            line["bytes_saved"] = int(mean("bytes_saved"))
        if task.best_accuracy is not None:
            line["best_possible_accuracy"] = task.best_accuracy
        # of a run with fewer steps than were asked for
        self.draw_trace()
        if not self.is_first:
            return line
        files.write_json(self.folder / RESULT, line)
        curves([self.folder], self.folder / CURVES)
        return line

    def _roof(self) -> float | None:
        """What no gather of this run passes, where a GPU reads the host's memory."""
        return pcie_bench.roof(self.device) if self.table.device != self.device else None


def _options(config: TrainConfig) -> dict[str, Any]:
    """The options of a run, except paths and time limits."""
    left_out = ("data", "out", "resume", "config", "timeout_s", "restarts", "checkpoint_every_s")
    return {name: value for name, value in to_words(config).items() if name not in left_out}


def _peak_gpu_memory_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _sentence(line: Mapping[str, Any], epochs: int) -> str:
    metric = line["metric"]
    words = [f"epoch {line['epoch'] + 1}/{epochs}", f"loss {line['loss']:.4f}"]
    for part in ("minibatch", "valid", "test"):
        if f"{part}_{metric}" in line:
            words.append(f"{part} {line[f'{part}_{metric}']:.4f}")
    words.append(f"{line['seeds'] / line['epoch_s']:,.0f} seeds/s")
    words.append(f"waited {line['wait_s'] / line['epoch_s']:.0%} of {line['epoch_s']:.1f} s")
    return "  ".join(words)


def _mixed(*numbers: int) -> int:
    """A seed that differs for other numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _leave_together(group: Group, device: torch.device) -> Callable[..., None]:
    """What keeps hot rows until the last worker that reads them has done so.

    A worker that fails leaves at once, and the others then fail as well.
    """

    def leave(kind: type[BaseException] | None, *what: object) -> None:
        if kind is None or issubclass(kind, Interrupted):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            run(vote(0), group)

    return leave


def _cuda_devices(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []
