"""The checkpoint of a run: a callback that saves all states, and restores them bit for bit.

Each worker writes a file to the folder `checkpoints` on its own machine, such as `000007-1.pt`:
worker 1 of checkpoint 7. The file of worker 0 also has what is the same on all workers, and is
written last, in the background. So a run that is killed at any moment resumes from a checkpoint
whose files are all complete. The rows of trainable embeddings are in `000007-rows.npz`, and those
of the best model remain in the run folder while a checkpoint names their epoch.
"""

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gcnzc._files import remove_partial
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather, broadcast_bytes, flat_buffers, write_buffers
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.optim import resize_state
from gcnzc.system import files
from gcnzc.train import checkpoint, record
from gcnzc.train.callbacks import Callback, named_errors
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import EpochStats, Statistics, sum_stats
from gcnzc.train.graph_files import check_files, describe_files
from gcnzc.train.listeners import Best
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.options import rows
from gcnzc.train.output_files import format_moved_error
from gcnzc.train.run_folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    LOGS,
    RECORD,
    SCHEMA,
    best_rows,
    check_free_folder,
    checkpoint_numbers,
    checkpoint_path,
    is_of_launch,
    read_config,
)
from gcnzc.train.schema import write_schema
from gcnzc.train.seed_parts import find_parts
from gcnzc.train.state import Run
from gcnzc.train.values import shown


class Checkpoint(Callback):
    """Saves the run at its start, when that is due or requested, and at its end.

    Args:
        run: the run.
        statistics: of the epoch.
        best: has the best model.
        callbacks: those whose states are saved.
    """

    def __init__(
        self, run: Run, statistics: Statistics, best: Best, callbacks: Sequence[Callback]
    ) -> None:
        self.statistics, self.best, self.callbacks = statistics, best, callbacks
        self.folder, self.number = run.folder / CHECKPOINTS, 0
        self.best_epochs: dict[int, int] = {}
        """the epoch of the best model in each checkpoint that is kept"""
        self.thread = ThreadPoolExecutor(1, "gcnzc-checkpoint")
        self.writing: Future[None] | None = None
        self.has_options = False
        """whether config.json has the options of this command"""
        with joint_work(run.group):  # the files of a machine may be damaged
            self.graph_files = describe_files(run.data)
        self.saved_at = time.monotonic()

    def begin(self, run: Run, launch: record.Launch | None, stack: ExitStack) -> None:
        """Start the run, or resume the one in the folder; a collective call before `on_start`.

        Args:
            run: the run.
            launch: see `train`.
            stack: the first worker locks the folder until it is closed.
        """
        found: dict[str, Any] = {}
        run.on_first(lambda: found.update(open_folder(run, launch, stack)))
        own = found.pop("own", None)
        data = bytes(checkpoint.to_bytes(found)) if run.is_first else b""
        state = checkpoint.from_bytes(
            run_algorithm(broadcast_bytes(data, run.group.rank), run.group)
        )
        if state:
            self.number = state["number"]
            try:
                self._restore(run, state, own)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{self._path(0)} does not fit this run: {type(error).__name__} {error}\n\n"
                    f"hint: {remedy_of(run.folder, self.number)}"
                ) from error
        else:
            self.save(run)
        run.files.is_training = True
        every_s = run.config.run.checkpoint_every_s
        run.is_save_due = lambda: time.monotonic() - self.saved_at >= every_s
        run.save = partial(self.save, run, waits=False)

    def on_end(self, run: Run) -> None:
        """See `Callback`: all that is pending is written."""
        self.save(run)

    def save(self, run: Run, *, waits: bool = True) -> None:
        """Write a checkpoint; a collective call.

        If a file cannot be written, this is reported, and the run continues.

        Args:
            run: the run.
            waits: wait until the files are on the disk; if False, worker 0 writes in the
                background.
        """
        self.saved_at = time.monotonic()
        common, own = self._states(run)
        run.on_first(lambda: self._finish(run))
        self._remove_others(run)
        self.number += 1
        try:
            with joint_work(run.group) as work:
                work.run_in_thread(lambda: self._write_parts(run, own))
        except OSError as error:
            run.on_first(partial(run.files.fail, CHECKPOINTS, error))
            return
        self.best_epochs[self.number] = self.best.state.get("epoch", 0)
        run.on_first(lambda: self._write(run, {**common, "own": own}, waits))
        if waits:
            self._remove_others(run)
        self.saved_at = time.monotonic()

    def _states(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is the same on all workers, and what is this worker's own."""
        update = {
            "optimizer": run.optimizer.snapshot(),
            "average": None if run.average is None else run.average.state_dict(),
        }
        self.statistics.count_sent(run)
        own = {
            "tally": self.statistics.own.state_dict(),
            "rng": torch.get_rng_state(),
            # with local steps, the scales of the loss differ between workers
            "scaler": run.precision.state_dict(),
        }
        if run.device.type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state(run.device)
        if run.in_epoch and run.group.world_size > 1:
            # running statistics of normalization differ between workers until the end of an epoch
            own["buffers"] = flat_buffers(run.model).cpu()
        callbacks: dict[str, list[Any]] = {}
        for each in self.callbacks:
            with named_errors(f"{type(each).__qualname__}.state_dict"):
                state = checkpoint.to_plain(each.state_dict(), f"state of {_class_name(each)}")
            callbacks.setdefault(_class_name(each), []).append(state)
        common = {
            "model": run.model.state_dict(),
            "epoch": run.epoch,
            "in_epoch": run.in_epoch,
            "loader": run.loader.state_dict() if run.in_epoch else {},
            "lines": run.lines,
            "callbacks": callbacks,
            "options": run.config.to_dict(),
            "graph": self.graph_files,
            "workers": run.group.world_size,
        }
        (common if run.optimizer.is_shared else own).update(update)
        return common, own

    def _write_parts(self, run: Run, own: Mapping[str, Any]) -> None:
        """Write the files to which that of worker 0 belongs.

        Raises:
            OSError: a file could not be written.
        """
        # only the first time: later a missing run folder was moved, and is not created again
        self.folder.mkdir(parents=not run.files.is_training, exist_ok=True)
        if run.group.rank:
            checkpoint.save(self._path(run.group.rank), {"own": own})
        elif run.embeddings is not None:
            run.embeddings.optimizer.save(self._path("rows"))

    def _write(self, run: Run, state: Mapping[str, Any], waits: bool) -> None:
        folder, options = run.folder, run.config.replace(resume=None).to_dict()
        if not (self.has_options and (folder / CONFIG).exists()):
            run.files.attempt(SCHEMA, lambda: write_schema(folder, run.data))
            # written last: a folder without this file has no run
            self.has_options = run.files.attempt(
                CONFIG, lambda: files.write_json(folder / CONFIG, options)
            )
            # the folder is also identified by the time of config.json
            run.files.identify()
        data = checkpoint.to_bytes(state)
        self.writing = self.thread.submit(checkpoint.write, self._path(0), data)
        if waits:
            self._finish(run)

    def _finish(self, run: Run) -> None:
        """Wait for the file that is written in the background, and report a failure."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            run.files.attempt(CHECKPOINTS, writing.result)

    def _remove_others(self, run: Run) -> None:
        """Remove the files of all checkpoints but the last --keep ones; a collective call.

        Also of a checkpoint that could not be completed, whose number the next one has. Those of
        workers of an earlier launch with more workers are divided among the workers.
        """
        kept = checkpoint_numbers(run.folder)[-run.config.run.keep :] or [0]
        ends = run_algorithm(all_gather(torch.tensor([kept[0], kept[-1]])), run.group)
        first, self.number = ends[0].tolist()
        # in the order of the names: a checkpoint without the file of worker 0 is none
        unused = []
        for path in sorted(self.folder.glob("*")):
            # other workers may be writing temporary files
            found = re.fullmatch(r"(\d+)-(\d+|rows)\.\w+", path.name)
            if found is not None and not first <= int(found[1]) <= self.number:
                owner = 0 if found[2] == "rows" else int(found[2])
                unused += [path] * (owner % run.group.world_size == run.group.rank)
        if run.is_first:
            self.best_epochs = {n: e for n, e in self.best_epochs.items() if n in kept}
            used = {*self.best_epochs.values(), self.best.state.get("epoch", 0)}
            unused += {*run.folder.glob("best-*.npz")} - {best_rows(run.folder, n) for n in used}
        for path in unused:
            # a file that is left on a read-only disk does no harm
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _find_best_rows(self, run: Run) -> None:
        """Find which rows of embeddings the checkpoints need that are kept."""
        for number in checkpoint_numbers(run.folder)[-run.config.run.keep :]:
            with suppress(ValueError):  # it is damaged
                state = checkpoint.load(checkpoint_path(run.folder, number))
                best = state["callbacks"][_class_name(self.best)][0]
                self.best_epochs[number] = best.get("epoch", 0)

    def _path(self, owner: object) -> Path:
        return checkpoint_path(self.folder.parent, self.number, owner)

    def _restore(self, run: Run, state: dict[str, Any], first: dict[str, Any] | None) -> None:
        """Load a checkpoint, also one of another number of workers.

        Args:
            run: the run.
            state: what is the same on all workers.
            first: the own state of worker 0, on this worker; None on the others.
        """
        check_resumed_options(run.config, state["options"], run.folder)
        check_epochs(run.config, state, run.folder)
        checkpoint.match(run.model, state["model"], self._path(0))
        rank, world_size, former = run.group.rank, run.group.world_size, state["workers"]
        is_same = former == world_size
        remedy = (
            f"{remedy_of(run.folder, self.number)}; with several machines, put the run folder on "
            "a file system that they share"
        )

        def load_own(worker: int) -> Any:
            if worker == 0 and first is not None:
                return first
            return checkpoint.load(self._path(worker), remedy=remedy)["own"]

        with joint_work(run.group) as work:
            check_files(self.graph_files, state["graph"], run.data.folder, run.folder)
            workers = [rank] if is_same else range(former)
            owns = work.run_in_thread(lambda: [*map(load_own, workers)])
        run.epoch, run.in_epoch, run.lines = state["epoch"], state["in_epoch"], state["lines"]
        states = [state] if run.optimizer.is_shared else owns
        if run.average is not None:
            run.average.load_state_dicts([each["average"] for each in states])
        optimizer = states[0]["optimizer"]
        if not (run.optimizer.is_shared or is_same):
            optimizer = resize_state([each["optimizer"] for each in states], rank, world_size)
        run.optimizer.load_state_dict(optimizer)
        run.precision.load_state_dicts([each["scaler"] for each in owns])
        if run.embeddings is not None:
            run.embeddings.load(self._path("rows"), remedy)
        for each in self.callbacks:  # of a resumed run, they may be others
            if found := state["callbacks"].get(_class_name(each)):
                _load_callback(each, found.pop(0))
        if run.is_first and run.embeddings is not None:
            self._find_best_rows(run)
        if run.in_epoch:
            _restore_loader(run, state["loader"])
        if is_same or run.is_first:
            # if the number of workers has changed, the first worker has the sums
            self.statistics.own = sum_stats([EpochStats(**each["tally"]) for each in owns])
        if is_same:
            _restore_worker(run, owns[0])
        else:
            # new seeds, because with the initial ones random numbers of earlier steps would repeat
            position = run.epoch, run.loader.shares.seeds_done
            torch.manual_seed(mixed_seed(run.config.loading.seed, rank + 1, world_size, *position))
        run.reporter.say(_format_resumed(run))


def _class_name(callback: Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _load_callback(callback: Callback, state: Mapping[str, Any]) -> None:
    try:
        callback.load_state_dict(state)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        if type(callback).__module__.startswith("gcnzc."):
            raise
        # no fault of the checkpoint
        what = f"{type(error).__name__} {error}"
        raise RuntimeError(f"{_class_name(callback)}.load_state_dict raised {what}") from error


def remedy_of(run: Path, number: int) -> str:
    """Return the hint of a checkpoint of a run that cannot be read."""
    earlier = [each for each in checkpoint_numbers(run) if each < number]
    if not earlier:
        return f"{checkpoint.RESTORE}; --keep 2 keeps an earlier checkpoint as well"
    return (
        f"restore the file from a copy; or delete {checkpoint_path(run, number)}, and the same "
        f"command resumes from {checkpoint_path(run, earlier[-1]).name}"
    )


def open_folder(run: Run, launch: record.Launch | None, stack: ExitStack) -> dict[str, Any]:
    """Lock the run folder on the first worker, and return the state to resume from, if any.

    Args:
        run: the run.
        launch: see `train`.
        stack: the folder is locked until it is closed.

    Raises:
        ValueError: the folder has another run, or is in use; or a file of the run is damaged.
    """
    _lock_folder(run, launch, stack)
    folder = run.folder
    is_resumed = bool(run.config.run.resume) or is_of_launch(folder, launch)
    if not is_resumed:
        check_free_folder(folder)
    remove_partial(folder)
    if launch is not None:
        launch.write(folder)
    return _read_state(run) if is_resumed else {}


def _lock_folder(run: Run, launch: record.Launch | None, stack: ExitStack) -> None:
    """Lock the run folder, so that no other launch uses it.

    A launcher locks the folder of logs until its last worker has ended.
    """
    folder = run.folder
    expected = launch.folder if launch is not None else None
    is_same = expected is None or files.folder_identity(folder) == expected
    if not is_same and not is_of_launch(folder, launch):
        raise ValueError(format_moved_error(folder))
    if not run.config.run.resume:
        folder.mkdir(parents=True, exist_ok=True)
    # first, so that an error names the launcher and not its worker, which it would replace
    if expected is None and (folder / LOGS).is_dir():
        stack.enter_context(files.locked_folder(folder / LOGS, folder))
    stack.enter_context(files.locked_folder(folder))
    run.files.identify()


def _read_state(run: Run) -> dict[str, Any]:
    """Return the state of the last checkpoint; empty if the run has none yet."""
    folder = run.folder
    check_resumed_options(run.config, read_config(folder).to_dict(), folder)
    if checkpoint_numbers(folder):
        return load_last(folder)
    # a run that was killed before its first checkpoint can start again
    for name in (RECORD, BEST):
        if (folder / name).exists():
            raise ValueError(
                f"the run in {folder} has {name}, but no checkpoint in {folder / CHECKPOINTS}\n\n"
                "hint: restore the checkpoint from a copy, or start another run with --out"
            )
    run.reporter.say(f"{folder} has no checkpoint yet: the run starts again")
    return {}


def load_last(run: Path) -> dict[str, Any]:
    """Return the state of the last checkpoint of a run, which has one, and its `number`.

    Raises:
        ValueError: the file is damaged; the hint names the checkpoint before it.
    """
    number = checkpoint_numbers(run)[-1]
    path, needed = checkpoint_path(run, number), ("epoch", "lines", "graph")
    state = checkpoint.load(path, needed, remedy_of(run, number))
    return state | {"number": number}


def check_resumed_options(config: TrainConfig, options: Mapping[str, Any], folder: Any) -> None:
    """Check the options against those of the run in `folder`.

    Raises:
        ValueError: an option differs that a resumed run keeps.
    """
    given = config.to_dict()
    for name, value in options.items():
        row = rows(TrainConfig).get(name)
        if row is not None and given[name] != value and not row.free:
            raise ValueError(
                f"the run in {folder} has {row.flag} {shown(row.parse(value))}, not "
                f"{shown(config[name])}\n\n"
                "hint: a resumed run keeps its options; start another with --out"
            )


def check_epochs(config: TrainConfig, state: Mapping[str, Any], run: Path) -> None:
    """Check the number of epochs in the state of a run against the options.

    Raises:
        ValueError: the run has finished more epochs, or the state is damaged.
    """
    epoch, epochs = state["epoch"], config.training.epochs
    if epoch != len(state["lines"]):
        raise ValueError(
            f"{checkpoint_path(run, state['number'])} is damaged: epoch is {epoch!r:.100}, and the "
            f"record has {len(state['lines'])} lines\n\nhint: {remedy_of(run, state['number'])}"
        )
    if epoch > epochs:
        raise ValueError(
            f"{run} has finished {epoch} epochs, more than --epochs {epochs}\n\n"
            f"hint: omit --epochs, or give at least {epoch}"
        )


def _restore_loader(run: Run, state: Mapping[str, Any]) -> None:
    began_with = state.get("order_world_size", run.group.world_size)
    if isinstance(run.loader, FullBatchLoader) or began_with == run.group.world_size:
        run.loader.load_state_dict(state)
        return
    # the rest of the epoch keeps the parts with which it began
    parts, _ = find_parts(run.config, run.data, run.task, began_with, run.group)
    run.loader.load_state_dict(state, parts)


def _restore_worker(run: Run, own: Mapping[str, Any]) -> None:
    """Restore the buffers and the random generators of this worker."""
    if "buffers" in own:
        write_buffers(run.model, own["buffers"].to(run.device))
    # cloned, because torch 2.13 crashes on a state that is a view of another tensor
    torch.set_rng_state(own["rng"].clone())
    if run.device.type == "cuda" and "cuda_rng" in own:
        torch.cuda.set_rng_state(own["cuda_rng"].clone(), run.device)


def _format_resumed(run: Run) -> str:
    folder, epoch, epochs = run.folder, run.epoch, run.config.training.epochs
    if epoch < epochs:
        return f"resuming {folder} {run.position}"
    return f"{folder} has finished all {epoch} epochs; --epochs adds more"
