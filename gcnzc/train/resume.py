"""Start a run, or resume it from its checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gcnzc._files import remove_partial
from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather_scalar, broadcast_bytes, write_buffers
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.optim import resize_state
from gcnzc.system import files
from gcnzc.train import checkpoint, record
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import EpochStats, sum_stats
from gcnzc.train.errors import PeerFailed
from gcnzc.train.evaluation import BEST_KEYS
from gcnzc.train.graph_files import check_files
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.options import rows
from gcnzc.train.output_files import format_moved_error
from gcnzc.train.run_folder import (
    BEST,
    CHECKPOINT,
    CONFIG,
    LOGS,
    RECORD,
    WORKERS,
    check_free_folder,
    is_of_launch,
    read_config,
)
from gcnzc.train.saving import save
from gcnzc.train.schema import write_schema
from gcnzc.train.seed_parts import find_parts
from gcnzc.train.trainer import Trainer
from gcnzc.train.values import shown
from gcnzc.train.worker_state import AVERAGE

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
    "worker_lines": int,
    "options": dict,
    "graph": dict,
    "rng": torch.Tensor,
}


def begin(trainer: Trainer, launch: record.Launch | None, stack: ExitStack) -> None:
    """Start a run, or resume the one in the folder; a collective call, in which worker 0 decides.

    After this call the run can be resumed. Worker 0 locks the folder until `stack` is closed.
    """
    found: list[bytes] = []
    trainer.on_rank_zero(lambda: found.append(_open_folder(trainer, launch, stack)))
    data = run(broadcast_bytes(found[0] if found else b"", trainer.group.rank), trainer.group)
    if data:
        path = trainer.folder / CHECKPOINT
        try:
            _restore(trainer, checkpoint.from_bytes(data, path, CHECKPOINT_KEYS))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} does not fit this run: {type(error).__name__} {error}\n\n"
                f"{checkpoint.RESTORE}"
            ) from error
        # the checkpoint was broadcast; no epoch counts that
        trainer.counted_sent = trainer.group.ledger.bytes_sent
    else:
        save(trainer)
    trainer.files.is_training = True


def _open_folder(trainer: Trainer, launch: record.Launch | None, stack: ExitStack) -> bytes:
    """Return the bytes of the checkpoint to resume from; empty for a new run."""
    _lock_folder(trainer, launch, stack)
    is_resumed = bool(trainer.config.run.resume) or is_of_launch(trainer.folder, launch)
    if not is_resumed:
        check_free_folder(trainer.folder)
    remove_partial(trainer.folder)
    if launch is not None:
        launch.write(trainer.folder)
    if is_resumed:
        return _read_checkpoint(trainer)
    write_schema(trainer.folder, trainer.data)
    # written last: a folder without this file has no run
    files.write_json(trainer.folder / CONFIG, trainer.config.to_dict())
    # again, since the folder is also identified by the time of this file
    trainer.files.identify()
    return b""


def _lock_folder(trainer: Trainer, launch: record.Launch | None, stack: ExitStack) -> None:
    """Lock the run folder, so that no other launch uses it.

    A launcher locks the folder of logs until its last worker has ended.
    """
    folder, expected = trainer.folder, launch.folder if launch is not None else None
    is_same = expected is None or files.folder_identity(folder) == expected
    if not is_same and not is_of_launch(folder, launch):
        raise ValueError(format_moved_error(folder))
    if not trainer.config.run.resume:
        folder.mkdir(parents=True, exist_ok=True)
    # first, so that an error names the launcher and not its worker, which it would replace
    if expected is None and (folder / LOGS).is_dir():
        stack.enter_context(files.locked_folder(folder / LOGS, folder))
    stack.enter_context(files.locked_folder(folder))
    trainer.files.identify()


def check_resumed_options(config: TrainConfig, options: Mapping[str, Any], folder: Path) -> None:
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


def _check_progress(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint's epoch, record and tallies are consistent."""
    path, epoch, lines = trainer.folder / CHECKPOINT, state["epoch"], state["lines"]
    if state["best"]:
        checkpoint.check_keys(state["best"], BEST_KEYS, path)
    is_whole = epoch == len(lines) and all(isinstance(line, dict) for line in lines)
    if not is_whole or state["worker_lines"] < 0:
        raise ValueError(
            f"{path} was written after epoch {epoch}, but has the record of {len(lines)} epochs\n\n"
            f"{checkpoint.RESTORE}"
        )


def _read_checkpoint(trainer: Trainer) -> bytes:
    options = read_config(trainer.folder).to_dict()
    check_resumed_options(trainer.config, options, trainer.folder)
    path = trainer.folder / CHECKPOINT
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
        if (trainer.folder / name).exists():
            raise ValueError(
                f"the run in {trainer.folder} has {name}, but its checkpoint {path} is missing\n\n"
                "hint: restore the checkpoint from a copy, or start another run with --out"
            )
    trainer.reporter.say(f"{trainer.folder} has no checkpoint yet: the run starts again")
    return b""


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    check_resumed_options(trainer.config, state["options"], trainer.folder)
    check_files(trainer.graph_files, state["graph"], trainer.data.folder, trainer.folder)
    _check_progress(trainer, state)
    checkpoint.match(trainer.model, state["model"], trainer.folder / CHECKPOINT)
    if len(state.get("buffers", ())) == trainer.group.world_size:
        write_buffers(trainer.model, state["buffers"][trainer.group.rank].to(trainer.device))
    _restore_optimizer(trainer, state)
    _restore_loss_scale(trainer, state)
    if trainer.embeddings is not None:
        trainer.embeddings.restore(state["embeddings"], state["best"])
        if trainer.is_rank_zero and (lost := trainer.embeddings.describe_lost_best(state["best"])):
            trainer.reporter.say(f"warning: {lost}")
    trainer.epoch, trainer.in_epoch = state["epoch"], state["in_epoch"]
    trainer.best, trainer.lines = state["best"], state["lines"]
    # best.pt may be older than the checkpoint
    trainer.is_best_written = not trainer.best
    _restore_stats(trainer, state["tallies"])
    if trainer.in_epoch:
        _restore_loader(trainer, state["loader"])
    _set_random_states(trainer, state)
    trainer.worker_lines = state["worker_lines"]
    trainer.on_rank_zero(lambda: _restore_records(trainer))
    where = f"in epoch {trainer.epoch + 1}" if trainer.in_epoch else f"after epoch {trainer.epoch}"
    trainer.reporter.say(_format_resumed(trainer, where))


def _format_resumed(trainer: Trainer, where: str) -> str:
    folder, epoch, epochs = trainer.folder, trainer.epoch, trainer.config.training.epochs
    if epoch > epochs:
        return (
            f"{folder} has finished {epoch} epochs, so --epochs {epochs} has no effect; the result "
            f"is that of {epoch} epochs"
        )
    if epoch == epochs:
        return f"{folder} has finished all {epoch} epochs; --epochs adds more"
    return f"resuming {folder} {where}"


def _restore_loader(trainer: Trainer, state: Mapping[str, Any]) -> None:
    loader, world_size = trainer.loader, trainer.group.world_size
    began_with = state.get("order_world_size", world_size)
    if isinstance(loader, FullBatchLoader) or began_with == world_size:
        loader.load_state_dict(state)
        return
    # the rest of the epoch keeps the parts with which it began
    parts, _ = find_parts(trainer.config, trainer.data, trainer.task, began_with, trainer.group)
    loader.load_state_dict(state, parts)


def _restore_records(trainer: Trainer) -> None:
    # the checkpoint has all lines, so this also repairs a damaged file
    record.rewrite(trainer.folder / RECORD, trainer.lines)
    record.keep(trainer.folder / WORKERS, trainer.worker_lines)


def _restore_stats(trainer: Trainer, states: Sequence[Mapping[str, Any]]) -> None:
    """Load each worker's statistics; if the number of workers changed, worker 0 loads the sum."""
    if len(states) == trainer.group.world_size:
        trainer.epoch_stats.load_state_dict(states[trainer.group.rank])
    elif trainer.is_rank_zero:
        tallies = [EpochStats(trainer.device) for _ in states]
        for tally, each in zip(tallies, states, strict=True):
            tally.load_state_dict(each)
        trainer.epoch_stats = sum_stats(tallies)


def _restore_loss_scale(trainer: Trainer, state: Mapping[str, Any]) -> None:
    if trainer.precision.scaler is None:
        return
    path = trainer.folder / CHECKPOINT
    checkpoint.check_keys(state, {"scaler": torch.Tensor}, path)
    try:
        group = trainer.group
        trainer.precision.load_states(state["scaler"], group.rank, group.world_size)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}\n\n{checkpoint.RESTORE}") from error


def _restore_optimizer(trainer: Trainer, state: Mapping[str, Any]) -> None:
    saved = state["optimizer"]
    if trainer.optimizer.is_shared:
        trainer.optimizer.load_state_dict(saved)
        if trainer.average is not None:
            trainer.average.load_state_dicts([state[AVERAGE]])
        return
    old_size, rank, world_size = saved["workers"], trainer.group.rank, trainer.group.world_size
    ranks = [rank] if old_size == world_size else list(range(old_size))
    failure: Exception | None = None
    try:
        states = trainer.worker_states.load(saved["generation"], ranks)
    except (OSError, ValueError) as error:
        failure = error
    if any(run(all_gather_scalar(int(failure is not None)), trainer.group)):
        raise failure or PeerFailed("another worker cannot read its state")
    if trainer.average is not None:
        trainer.average.load_state_dicts([each[AVERAGE] for each in states])
    for each in states:
        each.pop(AVERAGE, None)
    own = states[0] if old_size == world_size else resize_state(states, rank, world_size)
    trainer.optimizer.load_state_dict(own)


def _set_random_states(trainer: Trainer, state: Mapping[str, Any]) -> None:
    rank, world_size = trainer.group.rank, trainer.group.world_size
    if len(state["rng"]) != world_size:
        # new seeds, because with the initial ones random numbers of earlier steps would repeat
        numbers = (
            trainer.config.loading.seed,
            rank + 1,
            world_size,
            trainer.epoch,
            trainer.loader.shares.seeds_done,
        )
        torch.manual_seed(mixed_seed(*numbers))
        return
    # cloned, because torch 2.13 crashes on a state that is a view of another tensor
    torch.set_rng_state(state["rng"][rank].clone())
    if trainer.device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"][rank].clone(), trainer.device)
