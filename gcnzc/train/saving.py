"""Saving a run: checkpoints of all ranks, and stop requests."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gcnzc.exchange import run
from gcnzc.exchange.sync import all_gather
from gcnzc.train import checkpoint
from gcnzc.train.options import to_words
from gcnzc.train.run_folder import (
    CHECKPOINT,
)
from gcnzc.train.signals import STOP
from gcnzc.train.trainer import Interrupted, Trainer


def save(trainer: Trainer, *, waits: bool = True) -> None:
    """Write the checkpoint, on all workers together.

    Without `waits`, the file is written in the background, and a full disk is reported and does
    not end the run.
    """
    optimizer = _save_optimizer(trainer)
    if optimizer is None:
        return
    trainer.count_sent()
    tallies = run(trainer.tally.of_all_workers(), trainer.group)
    states = {"rng": run(all_gather(torch.get_rng_state()), trainer.group)}
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
        "options": to_words(trainer.config),
        # sums round as the algorithms add
        "choices": dict(trainer.group.choices.steps),
        **states,
    }
    path = trainer.folder / CHECKPOINT
    if waits:
        trainer.on_rank_zero(lambda: _write_checkpoint(trainer, path, state))
    elif trainer.is_first:
        try:
            trainer.writer.begin(path, state)
        except OSError as error:
            trainer.reporter.say(
                f"a checkpoint could not be written: {error}; training goes on, and the next "
                f"one is due in {trainer.config.checkpoint_every_s:g} s"
            )
    trainer.saved_at = time.monotonic()


def _save_optimizer(trainer: Trainer) -> dict[str, Any] | None:
    """What a checkpoint keeps of the optimizer; None if a worker could not write its state."""
    state = trainer.optimizer.snapshot()
    if trainer.optimizer.is_shared:
        return state
    is_written = trainer.is_first
    try:
        trainer.writer.wait()
    except OSError:
        is_written = False
    run(trainer.worker_states.forget(is_written), trainer.group)
    if wrong := run(trainer.worker_states.save(state), trainer.group):
        trainer.reporter.say(
            f"a checkpoint could not be written: {wrong}; training goes on, and the next one "
            f"is due in {trainer.config.checkpoint_every_s:g} s"
        )
        trainer.saved_at = time.monotonic()
        return None
    generation, workers = trainer.worker_states.generation, trainer.group.world_size
    return {"generation": generation, "workers": workers}


def _write_checkpoint(trainer: Trainer, path: Path, state: Mapping[str, Any]) -> None:
    # what was begun before is older, and may fail
    with suppress(OSError):
        trainer.writer.wait()
    checkpoint.save(path, state)


def handle_stop_request(trainer: Trainer, heard: Sequence[bool]) -> None:
    """Save, and leave, if a worker asked for it."""
    if any(heard):
        save(trainer, waits=heard[STOP])
    if heard[STOP]:
        raise Interrupted(
            f"stopped in epoch {min(trainer.epoch + 1, trainer.config.epochs)}; all is saved\n\n"
            f"hint: `gcnzc train --resume {trainer.folder}` goes on from here"
        )
