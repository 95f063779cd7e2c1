"""Save a run: checkpoints of all workers, records, and stop requests."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gcnzc.exchange import run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather, all_gather_scalar, flat_buffers
from gcnzc.system.files import write_json
from gcnzc.train import checkpoint, record
from gcnzc.train.errors import Interrupted, SavedRun
from gcnzc.train.output_files import format_unsaved_error
from gcnzc.train.plots import curves
from gcnzc.train.run_folder import BEST, BOARD, CHECKPOINT, CONFIG, CURVES, RECORD, SCHEMA, WORKERS
from gcnzc.train.schema import write_schema
from gcnzc.train.signals import STOP
from gcnzc.train.trainer import Trainer
from gcnzc.train.worker_state import AVERAGE, FOLDER

# names of the files of trainable embeddings in messages
EMBEDDINGS, BEST_EMBEDDINGS = "embeddings/state", "embeddings/best"


def save(trainer: Trainer, *, waits: bool = True) -> None:
    """Write a checkpoint; a collective call.

    If the file cannot be written, this is reported, and the run continues.

    Args:
        trainer: the run.
        waits: wait until the file is on the disk; if False, it is written in the background.
    """
    optimizer = _save_optimizer(trainer)
    if optimizer is None or not _save_embeddings(trainer):
        return
    trainer.count_sent()
    tallies = run(trainer.epoch_stats.of_all_workers(), trainer.group)
    states = {"rng": run(all_gather(torch.get_rng_state()), trainer.group)}
    buffers = flat_buffers(trainer.model)
    if trainer.in_epoch and trainer.group.world_size > 1 and len(buffers):
        # running statistics of normalization differ between workers until the end of an epoch
        states["buffers"] = run(all_gather(buffers.cpu()), trainer.group)
    if (scaler := trainer.precision.state()) is not None:
        # with local steps, the scales of the loss differ between workers
        states["scaler"] = run(all_gather(scaler), trainer.group)
    if trainer.device.type == "cuda":
        own = torch.cuda.get_rng_state(trainer.device)
        states["cuda_rng"] = run(all_gather(own), trainer.group)
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": optimizer,
        "epoch": trainer.epoch,
        "in_epoch": trainer.in_epoch,
        "loader": trainer.loader.state_dict() if trainer.in_epoch else {},
        "tallies": [tally.state_dict() for tally in tallies],
        "best": trainer.best,
        "lines": trainer.lines,
        "worker_lines": trainer.worker_lines,
        "options": trainer.config.to_dict(),
        "graph": trainer.graph_files,
        **_average_state(trainer),
        **states,
    }
    if trainer.embeddings is not None:
        state["embeddings"] = trainer.embeddings.generation
    trainer.on_rank_zero(lambda: _write_checkpoint(trainer, state, waits))
    if waits and not trainer.optimizer.is_shared:
        run(trainer.worker_states.remove_old(trainer.is_checkpoint_written), trainer.group)
    trainer.saved_at = time.monotonic()


def _save_optimizer(trainer: Trainer) -> dict[str, Any] | None:
    """Return the optimizer's entry of a checkpoint; None if a worker could not write its state."""
    state = trainer.optimizer.snapshot()
    if trainer.optimizer.is_shared:
        return state
    trainer.on_rank_zero(lambda: _finish_checkpoint(trainer))
    run(trainer.worker_states.remove_old(trainer.is_checkpoint_written), trainer.group)
    # with local steps, the averages of the weights differ between workers
    if wrong := run(
        trainer.worker_states.save({**state, **_average_state(trainer)}), trainer.group
    ):
        trainer.on_rank_zero(lambda: _report_worker_states(trainer, wrong))
        trainer.saved_at = time.monotonic()
        return None
    trainer.files.failures.pop(FOLDER, None)
    generation, workers = trainer.worker_states.generation, trainer.group.world_size
    return {"generation": generation, "workers": workers}


def _save_embeddings(trainer: Trainer) -> bool:
    """Write the trainable embeddings; return False if worker 0 could not write them."""
    embeddings = trainer.embeddings
    if embeddings is None:
        return True
    is_written = [True]

    def write() -> None:
        _finish_checkpoint(trainer)
        is_written[0] = trainer.files.attempt(
            EMBEDDINGS,
            lambda: embeddings.write_state(trainer.best, trainer.is_checkpoint_written),
        )

    with joint_work(trainer.group):
        if trainer.is_rank_zero:
            write()
    is_saved = all(run(all_gather_scalar(int(is_written[0])), trainer.group))
    if not is_saved:
        trainer.saved_at = time.monotonic()
    return is_saved


def write_best_embeddings(trainer: Trainer, epoch: int) -> None:
    """Write the trainable embeddings of a new best model, on worker 0; a collective call."""
    embeddings = trainer.embeddings
    if embeddings is None:
        return
    with joint_work(trainer.group):
        if trainer.is_rank_zero:
            trainer.files.attempt(BEST_EMBEDDINGS, lambda: embeddings.write_best(epoch))


def remove_old_embeddings(trainer: Trainer) -> None:
    """Remove files of earlier embeddings after the end of a run, on worker 0.

    They remain if the last checkpoint or the best model could not be written.
    """
    if trainer.embeddings is not None and trainer.is_checkpoint_written and trainer.is_best_written:
        trainer.embeddings.remove_old(trainer.best)


def _average_state(trainer: Trainer) -> dict[str, Any]:
    """Return the entry of the averaged weights; empty if weights are not averaged."""
    return {} if trainer.average is None else {AVERAGE: trainer.average.state_dict()}


def _report_worker_states(trainer: Trainer, wrong: str) -> None:
    trainer.files.demand_folder()
    trainer.files.fail(FOLDER, OSError(wrong))


def _finish_checkpoint(trainer: Trainer) -> None:
    """Wait for the checkpoint that is written in the background, and report a failure."""
    if trainer.writer.is_writing:
        trainer.is_checkpoint_written = trainer.files.attempt(CHECKPOINT, trainer.writer.wait)


def _write_checkpoint(trainer: Trainer, state: Mapping[str, Any], waits: bool) -> None:
    _finish_checkpoint(trainer)
    trainer.is_checkpoint_written = False
    trainer.writer.begin(trainer.folder / CHECKPOINT, state)
    if waits:
        _finish_checkpoint(trainer)


def write_pending(trainer: Trainer) -> None:
    """Write the best model, and all pending lines and events, on worker 0.

    Files that were removed during the run are written again.
    """
    files = trainer.files
    write_description(trainer)
    if trainer.best and not (trainer.folder / BEST).exists():
        trainer.is_best_written = False
    if not trainer.is_best_written:
        best = trainer.best
        trainer.is_best_written = files.attempt(
            BEST, lambda: checkpoint.save(trainer.folder / BEST, best)
        )
    files.attempt(WORKERS, trainer.worker_record.append)
    if trainer.lines and not (trainer.folder / RECORD).exists():
        rewrite_record(trainer)
    files.attempt(RECORD, trainer.record.append)
    files.attempt(BOARD, trainer.events.append)


def write_description(trainer: Trainer) -> None:
    """Write the options and the schema of the run, if these files do not exist, on worker 0."""
    folder, options = trainer.folder, trainer.config.replace(resume=None).to_dict()
    if not (folder / SCHEMA).exists():
        trainer.files.attempt(SCHEMA, lambda: write_schema(folder, trainer.data))
    # written last: a folder without this file has no run
    if not (folder / CONFIG).exists():
        trainer.files.attempt(CONFIG, lambda: write_json(folder / CONFIG, options))


def rewrite_record(trainer: Trainer) -> None:
    """Replace record.jsonl by the lines of all epochs, on worker 0."""

    def write() -> None:
        record.rewrite(trainer.folder / RECORD, trainer.lines)
        trainer.record.pending = b""

    trainer.files.attempt(RECORD, write)


def _write_interrupted(trainer: Trainer) -> None:
    """Write what a run that is interrupted has not written, and its curves."""
    write_pending(trainer)
    if trainer.lines:
        folder = trainer.folder
        trainer.files.attempt(CURVES, lambda: curves([folder], folder / CURVES))


def handle_stop_request(trainer: Trainer, flags: Sequence[bool]) -> None:
    """Save a checkpoint if one is requested, and end the run if that is requested.

    Args:
        trainer: the run.
        flags: the requests of all workers, combined; see `STOP` and `SAVE`.

    Raises:
        Interrupted: a worker received a stop request. The run is saved, except for the files that
            the message names.
    """
    if any(flags):
        save(trainer, waits=flags[STOP])
    if not flags[STOP]:
        return
    trainer.on_rank_zero(lambda: _write_interrupted(trainer))
    epoch = min(trainer.epoch + 1, trainer.config.training.epochs)
    if any(run(all_gather_scalar(len(trainer.files.failures)), trainer.group)):
        message = ""
        if trainer.is_rank_zero:
            message = format_unsaved_error(trainer.folder, trainer.files.causes())
        raise Interrupted(
            f"stopped in epoch {epoch}; {message or 'worker 0 could not write all files'}"
        )
    raise SavedRun(epoch, trainer.folder)
