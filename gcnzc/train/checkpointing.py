"""The checkpoint of a run: a callback that saves all states, and restores them bit for bit.

A checkpoint is a file of the first worker. With local steps the states of the workers differ: each
writes its own to the folder `workers`, and then the checkpoint refers to them.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gcnzc._files import remove_partial
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import (
    all_gather,
    all_gather_scalar,
    broadcast_bytes,
    flat_buffers,
    write_buffers,
)
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.optim import resize_state
from gcnzc.system import files
from gcnzc.train import checkpoint, record
from gcnzc.train.callbacks import Callback
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import EpochStats, Statistics, sum_stats
from gcnzc.train.graph_files import check_files, describe_files
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.options import rows
from gcnzc.train.output_files import format_moved_error
from gcnzc.train.run_folder import (
    BEST,
    CHECKPOINT,
    CONFIG,
    LOGS,
    RECORD,
    SCHEMA,
    check_free_folder,
    is_of_launch,
    read_config,
)
from gcnzc.train.schema import write_schema
from gcnzc.train.seed_parts import find_parts
from gcnzc.train.signals import STOP
from gcnzc.train.state import Run
from gcnzc.train.trained import BEST_KEYS
from gcnzc.train.values import shown
from gcnzc.train.worker_state import AVERAGE, FOLDER, WorkerStates

# required keys of checkpoint.pt
CHECKPOINT_KEYS: Mapping[str, type] = {
    "model": dict,
    "optimizer": dict,
    "epoch": int,
    "in_epoch": bool,
    "loader": dict,
    "tallies": list,
    "best": dict,
    "lines": list,
    "callbacks": dict,
    "options": dict,
    "graph": dict,
    "rng": torch.Tensor,
}
# name of the files of trainable embeddings in messages
EMBEDDINGS = "embeddings/state"


class Checkpoint(Callback):
    """Saves the run at its start, when that is due or requested, and at its end.

    Args:
        run: the run.
        statistics: of the epoch.
        callbacks: those whose states are saved.
        launch: see `train`.
        stack: the first worker locks the folder until it is closed.
    """

    def __init__(
        self,
        run: Run,
        statistics: Statistics,
        callbacks: Sequence[Callback],
        launch: record.Launch | None,
        stack: ExitStack,
    ) -> None:
        self.statistics, self.callbacks = statistics, callbacks
        self.launch, self.stack = launch, stack
        self.every_s = run.config.run.checkpoint_every_s
        self.writer = checkpoint.Writer()
        self.is_written = True
        """whether the last checkpoint is on the disk"""
        self.graph_files = describe_files(run.data.folder)
        self.states = WorkerStates(run.folder, run.group.rank, run.group.world_size)
        self.saved_at = time.monotonic()

    def begin(self, run: Run) -> None:
        """Start the run, or resume the one in the folder; a collective call before `on_start`."""
        found: list[bytes] = []
        run.on_first(lambda: found.append(self._open_folder(run)))
        data = run_algorithm(broadcast_bytes(b"".join(found), run.group.rank), run.group)
        if data:
            path = run.folder / CHECKPOINT
            try:
                self._restore(run, checkpoint.from_bytes(data, path, CHECKPOINT_KEYS))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{path} does not fit this run: {type(error).__name__} {error}\n\n"
                    f"{checkpoint.RESTORE}"
                ) from error
        else:
            self.save(run)
        run.files.is_training = True
        run.is_save_due = self._is_due

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if any(run.agreed):
            self.save(run, waits=run.agreed[STOP])

    on_record = on_step

    def on_end(self, run: Run) -> None:
        """See `Callback`: all that is pending is written."""
        self.save(run)
        if run.is_first:
            self._write_description(run)
            if run.embeddings is not None and self.is_written and not run.files.failures:
                run.embeddings.remove_old(run.best)

    def _is_due(self) -> bool:
        """Whether --checkpoint-every-s seconds have passed since the last checkpoint."""
        return time.monotonic() - self.saved_at >= self.every_s

    def save(self, run: Run, *, waits: bool = True) -> None:
        """Write a checkpoint; a collective call.

        If the file cannot be written, this is reported, and the run continues.

        Args:
            run: the run.
            waits: wait until the file is on the disk; if False, it is written in the background.
        """
        self.saved_at = time.monotonic()
        optimizer = self._save_optimizer(run)
        if optimizer is None or not self._save_embeddings(run):
            return
        self.statistics.count_sent(run)
        tallies = run_algorithm(self.statistics.own.of_all_workers(), run.group)
        states = {"rng": run_algorithm(all_gather(torch.get_rng_state()), run.group)}
        buffers = flat_buffers(run.model)
        if run.in_epoch and run.group.world_size > 1 and len(buffers):
            # running statistics of normalization differ between workers until the end of an epoch
            states["buffers"] = run_algorithm(all_gather(buffers.cpu()), run.group)
        if (scaler := run.precision.state()) is not None:
            # with local steps, the scales of the loss differ between workers
            states["scaler"] = run_algorithm(all_gather(scaler), run.group)
        if run.device.type == "cuda":
            own = torch.cuda.get_rng_state(run.device)
            states["cuda_rng"] = run_algorithm(all_gather(own), run.group)
        callbacks: dict[str, list[Any]] = {}
        for each in self.callbacks:
            callbacks.setdefault(type(each).__qualname__, []).append(each.state_dict())
        state = {
            "model": run.model.state_dict(),
            "optimizer": optimizer,
            "epoch": run.epoch,
            "in_epoch": run.in_epoch,
            "loader": run.loader.state_dict() if run.in_epoch else {},
            "tallies": [tally.state_dict() for tally in tallies],
            "best": run.best,
            "lines": run.lines,
            "callbacks": callbacks,
            "options": run.config.to_dict(),
            "graph": self.graph_files,
            **_average_state(run),
            **states,
        }
        if run.embeddings is not None:
            state["embeddings"] = run.embeddings.generation
        run.on_first(lambda: self._write(run, state, waits))
        if waits and not run.optimizer.is_shared:
            run_algorithm(self.states.remove_old(self.is_written), run.group)
        self.saved_at = time.monotonic()

    def _save_optimizer(self, run: Run) -> dict[str, Any] | None:
        """Return the optimizer's entry; None if a worker could not write its state."""
        state = run.optimizer.snapshot()
        if run.optimizer.is_shared:
            return state
        run.on_first(lambda: self._finish(run))
        run_algorithm(self.states.remove_old(self.is_written), run.group)
        # with local steps, the averages of the weights differ between workers
        saved = run_algorithm(self.states.save({**state, **_average_state(run)}), run.group)
        if saved:
            run.on_first(lambda: _report_states(run, saved))
            return None
        run.files.failures.pop(FOLDER, None)
        return {"generation": self.states.generation, "workers": run.group.world_size}

    def _save_embeddings(self, run: Run) -> bool:
        """Write the trainable embeddings; return False if worker 0 could not write them."""
        embeddings, is_written = run.embeddings, True
        if embeddings is None:
            return True
        with joint_work(run.group):
            if run.is_first:
                self._finish(run)
                is_written = run.files.attempt(
                    EMBEDDINGS, lambda: embeddings.write_state(run.best, self.is_written)
                )
        return all(run_algorithm(all_gather_scalar(int(is_written)), run.group))

    def _write(self, run: Run, state: Mapping[str, Any], waits: bool) -> None:
        self._write_description(run)
        self._finish(run)
        self.is_written = False
        self.writer.begin(run.folder / CHECKPOINT, state)
        if waits:
            self._finish(run)

    def _finish(self, run: Run) -> None:
        """Wait for the checkpoint that is written in the background, and report a failure."""
        if self.writer.is_writing:
            self.is_written = run.files.attempt(CHECKPOINT, self.writer.wait)

    def _write_description(self, run: Run) -> None:
        """Write the options and the schema of the run, if these files do not exist."""
        folder, options = run.folder, run.config.replace(resume=None).to_dict()
        if not (folder / SCHEMA).exists():
            run.files.attempt(SCHEMA, lambda: write_schema(folder, run.data))
        # written last: a folder without this file has no run
        if not (folder / CONFIG).exists():
            run.files.attempt(CONFIG, lambda: files.write_json(folder / CONFIG, options))

    def _open_folder(self, run: Run) -> bytes:
        """Return the bytes of the checkpoint to resume from; empty for a new run."""
        self._lock_folder(run)
        is_resumed = bool(run.config.run.resume) or is_of_launch(run.folder, self.launch)
        if not is_resumed:
            check_free_folder(run.folder)
        remove_partial(run.folder)
        if self.launch is not None:
            self.launch.write(run.folder)
        if is_resumed:
            return _read_checkpoint(run)
        write_schema(run.folder, run.data)
        # written last: a folder without this file has no run
        files.write_json(run.folder / CONFIG, run.config.to_dict())
        # again, since the folder is also identified by the time of this file
        run.files.identify()
        return b""

    def _lock_folder(self, run: Run) -> None:
        """Lock the run folder, so that no other launch uses it.

        A launcher locks the folder of logs until its last worker has ended.
        """
        folder, launch = run.folder, self.launch
        expected = launch.folder if launch is not None else None
        is_same = expected is None or files.folder_identity(folder) == expected
        if not is_same and not is_of_launch(folder, launch):
            raise ValueError(format_moved_error(folder))
        if not run.config.run.resume:
            folder.mkdir(parents=True, exist_ok=True)
        # first, so that an error names the launcher and not its worker, which it would replace
        if expected is None and (folder / LOGS).is_dir():
            self.stack.enter_context(files.locked_folder(folder / LOGS, folder))
        self.stack.enter_context(files.locked_folder(folder))
        run.files.identify()

    def _restore(self, run: Run, state: dict[str, Any]) -> None:
        """Load a checkpoint, also one of another number of workers."""
        check_resumed_options(run.config, state["options"], run.folder)
        check_files(self.graph_files, state["graph"], run.data.folder, run.folder)
        _check_progress(run, state)
        checkpoint.match(run.model, state["model"], run.folder / CHECKPOINT)
        rank, world_size = run.group.rank, run.group.world_size
        if len(state.get("buffers", ())) == world_size:
            write_buffers(run.model, state["buffers"][rank].to(run.device))
        self._restore_optimizer(run, state)
        _restore_loss_scale(run, state)
        if run.embeddings is not None:
            run.embeddings.restore(state["embeddings"], state["best"])
            if run.is_first and (lost := run.embeddings.describe_lost_best(state["best"])):
                run.reporter.say(f"warning: {lost}")
        run.epoch, run.in_epoch = state["epoch"], state["in_epoch"]
        run.best, run.lines = state["best"], state["lines"]
        for each in self.callbacks:  # of a resumed run, they may be others
            if states := state["callbacks"].get(type(each).__qualname__):
                each.load_state_dict(states.pop(0))
        # if the number of workers has changed, the first worker has the sums
        tallies = [EpochStats(run.device) for _ in state["tallies"]]
        for tally, saved in zip(tallies, state["tallies"], strict=True):
            tally.load_state_dict(saved)
        if len(tallies) == world_size:
            self.statistics.own = tallies[rank]
        elif run.is_first:
            self.statistics.own = sum_stats(tallies)
        if run.in_epoch:
            _restore_loader(run, state["loader"])
        _set_random_states(run, state)
        where = f"in epoch {run.epoch + 1}" if run.in_epoch else f"after epoch {run.epoch}"
        run.reporter.say(_format_resumed(run, where))

    def _restore_optimizer(self, run: Run, state: Mapping[str, Any]) -> None:
        saved = state["optimizer"]
        if run.optimizer.is_shared:
            run.optimizer.load_state_dict(saved)
            if run.average is not None:
                run.average.load_state_dicts([state[AVERAGE]])
            return
        old_size, rank, world_size = saved["workers"], run.group.rank, run.group.world_size
        ranks = [rank] if old_size == world_size else list(range(old_size))
        with joint_work(run.group):
            states = self.states.load(saved["generation"], ranks)
        if run.average is not None:
            run.average.load_state_dicts([each[AVERAGE] for each in states])
        for each in states:
            each.pop(AVERAGE, None)
        own = states[0] if old_size == world_size else resize_state(states, rank, world_size)
        run.optimizer.load_state_dict(own)


def _report_states(run: Run, cause: str) -> None:
    run.files.demand_folder()
    run.files.fail(FOLDER, OSError(cause))


def _average_state(run: Run) -> dict[str, Any]:
    """Return the entry of the averaged weights; empty if weights are not averaged."""
    return {} if run.average is None else {AVERAGE: run.average.state_dict()}


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


def _check_progress(run: Run, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint's epoch and record are consistent."""
    path, epoch, lines = run.folder / CHECKPOINT, state["epoch"], state["lines"]
    if state["best"]:
        checkpoint.check_keys(state["best"], BEST_KEYS, path)
    if epoch != len(lines) or not all(isinstance(line, dict) for line in lines):
        raise ValueError(
            f"{path} was written after epoch {epoch}, but has the record of {len(lines)} epochs\n\n"
            f"{checkpoint.RESTORE}"
        )


def _read_checkpoint(run: Run) -> bytes:
    check_resumed_options(run.config, read_config(run.folder).to_dict(), run.folder)
    path = run.folder / CHECKPOINT
    if path.exists():
        if not path.is_file():
            # a named pipe would be read without an end
            raise ValueError(f"{path} is not a file\n\n{checkpoint.RESTORE}")
        data = path.read_bytes()
        if not data:
            raise ValueError(f"{path} is damaged: it is empty\n\n{checkpoint.RESTORE}")
        return data
    # a run that was killed before its first checkpoint can start again
    for name in (RECORD, BEST):
        if (run.folder / name).exists():
            raise ValueError(
                f"the run in {run.folder} has {name}, but its checkpoint {path} is missing\n\n"
                "hint: restore the checkpoint from a copy, or start another run with --out"
            )
    run.reporter.say(f"{run.folder} has no checkpoint yet: the run starts again")
    return b""


def _format_resumed(run: Run, where: str) -> str:
    folder, epoch, epochs = run.folder, run.epoch, run.config.training.epochs
    if epoch > epochs:
        return (
            f"{folder} has finished {epoch} epochs, so --epochs {epochs} has no effect; the result "
            f"is that of {epoch} epochs"
        )
    if epoch == epochs:
        return f"{folder} has finished all {epoch} epochs; --epochs adds more"
    return f"resuming {folder} {where}"


def _restore_loader(run: Run, state: Mapping[str, Any]) -> None:
    began_with = state.get("order_world_size", run.group.world_size)
    if isinstance(run.loader, FullBatchLoader) or began_with == run.group.world_size:
        run.loader.load_state_dict(state)
        return
    # the rest of the epoch keeps the parts with which it began
    parts, _ = find_parts(run.config, run.data, run.task, began_with, run.group)
    run.loader.load_state_dict(state, parts)


def _restore_loss_scale(run: Run, state: Mapping[str, Any]) -> None:
    if run.precision.scaler is None:
        return
    path = run.folder / CHECKPOINT
    checkpoint.check_keys(state, {"scaler": torch.Tensor}, path)
    try:
        run.precision.load_states(state["scaler"], run.group.rank, run.group.world_size)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}\n\n{checkpoint.RESTORE}") from error


def _set_random_states(run: Run, state: Mapping[str, Any]) -> None:
    rank, world_size = run.group.rank, run.group.world_size
    if len(state["rng"]) != world_size:
        # new seeds, because with the initial ones random numbers of earlier steps would repeat
        position = run.epoch, run.loader.shares.seeds_done
        torch.manual_seed(mixed_seed(run.config.loading.seed, rank + 1, world_size, *position))
        return
    # cloned, because torch 2.13 crashes on a state that is a view of another tensor
    torch.set_rng_state(state["rng"][rank].clone())
    if run.device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"][rank].clone(), run.device)
