"""The part of a run's state that differs between ranks, in a file per rank.

A checkpoint names a generation of these files, and is written once all of them are on the disk; so
at any moment the last checkpoint's files are whole, whatever was killed. The files lie in the run
folder as each worker sees it: on several machines it must be shared for another number of workers
to go on.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcnzc.exchange import Algorithm, AllGatherScalar
from gcnzc.train import checkpoint

FOLDER = "workers"


class WorkerStates:
    """The files of one worker.

    Args:
        run: folder of the run.
        rank: of this worker.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.folder, self.rank = run / FOLDER, rank
        self.generation = 0
        """of the files that were written last"""
        self.named = 0
        """the generation that the last checkpoint names"""

    def save(self, state: Mapping[str, Any]) -> Algorithm[str]:
        """Write the next generation, on all workers together.

        Args:
            state: of this worker; see `checkpoint.save`.

        Returns:
            Why it could not be written on some worker, in words; empty if it was on all. Then
            `generation` is what a checkpoint must name.
        """
        generation, error = self.generation + 1, ""
        try:
            # later the run folder exists, unless it was moved
            self.folder.mkdir(parents=not self.generation, exist_ok=True)
            checkpoint.save(self.path(generation, self.rank), state)
        except OSError as failure:
            error = str(failure)
        failed = [rank for rank, bad in enumerate((yield AllGatherScalar(int(bool(error))))) if bad]
        if failed:
            _remove(self.path(generation, self.rank))
            who = ", ".join(map(str, failed))
            return f"worker {who} could not write its state{f': {error}' if error else ''}"
        self.generation = generation
        return ""

    def forget(self, is_named: bool) -> Algorithm[None]:
        """Remove the files of generations that no checkpoint names any more.

        Args:
            is_named: whether a checkpoint that names the last generation is on the disk, as worker
                0 knows it.
        """
        if (yield AllGatherScalar(int(is_named)))[0]:
            self.named = self.generation
        for path in self.folder.glob(f"*-{self.rank}.pt"):
            if int(path.name.split("-")[0]) < self.named:
                _remove(path)

    def load(self, generation: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The states of some workers in a generation, on the CPU.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: one is damaged.
        """
        self.generation = self.named = generation
        missing = [rank for rank in ranks if not self.path(generation, rank).is_file()]
        if missing:
            raise FileNotFoundError(
                f"no state of worker {', '.join(map(str, missing))} in {self.folder}\n\nhint: "
                "workers on several machines need a run folder that all of them share"
            )
        return [checkpoint.load(self.path(generation, rank)) for rank in ranks]

    def path(self, generation: int, rank: int) -> Path:
        """Of one worker's file."""
        return self.folder / f"{generation:06}-{rank}.pt"


def _remove(path: Path) -> None:
    # a file that is left on a read-only disk does no harm: checkpoints name generations
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
