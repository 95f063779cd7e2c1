"""The part of a run's state that differs between workers, in one file per worker.

A checkpoint refers to a generation of these files, and is written after all of them are on the
disk. So the files of the last checkpoint are always complete, whichever process is killed. Each
worker writes to the run folder on its own machine; to resume with another number of workers on
several machines, the folder must be on a shared file system.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcnzc.exchange import Algorithm, AllGatherScalar
from gcnzc.train import checkpoint

FOLDER = "workers"


# key of the averaged weights in a state
AVERAGE = "average"


class WorkerStates:
    """Writes and reads the state files of one worker.

    Args:
        run: the run folder.
        rank: rank of this worker.
        world_size: the number of workers.
    """

    def __init__(self, run: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = run / FOLDER, rank, world_size
        self.generation = 0
        """generation of the files that were written last"""
        self.named = 0
        """generation that the last checkpoint refers to"""

    def save(self, state: Mapping[str, Any]) -> Algorithm[str]:
        """Write the next generation of the files; a collective operation.

        Args:
            state: the state of this worker; see `checkpoint.save`.

        Returns:
            A message if a worker could not write its file; otherwise an empty text. Then
            `generation` is the one for the checkpoint to refer to.
        """
        generation, error = self.generation + 1, ""
        try:
            # only the first time: later a missing run folder was moved, and is not created again
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

    def remove_old(self, is_named: bool) -> Algorithm[None]:
        """Remove the files that the last checkpoint does not refer to; a collective operation.

        Those of workers of an earlier launch with more workers are divided among the workers.

        Args:
            is_named: whether a checkpoint that refers to the last generation is on the disk; only
                the value of worker 0 is used.
        """
        if (yield AllGatherScalar(int(is_named)))[0]:
            self.named = self.generation
        for path in self.folder.glob("*.pt"):
            # other workers may be writing temporary files
            if found := re.fullmatch(r"(\d+)-(\d+)\.pt", path.name):
                generation, rank = map(int, found.groups())
                if generation < self.named and rank % self.world_size == self.rank:
                    _remove(path)

    def load(self, generation: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Load the states of some workers in a generation, on the CPU.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged.
        """
        self.generation = self.named = generation
        missing = [rank for rank in ranks if not self.path(generation, rank).is_file()]
        if missing:
            raise FileNotFoundError(
                f"no state of worker {', '.join(map(str, missing))} in {self.folder}\n\nhint: "
                "put the run folder on a file system that all machines share"
            )
        return [checkpoint.load(self.path(generation, rank)) for rank in ranks]

    def path(self, generation: int, rank: int) -> Path:
        """Return the path of a worker's file."""
        return self.folder / f"{generation:06}-{rank}.pt"


def _remove(path: Path) -> None:
    # a file that is left on a read-only disk does no harm: checkpoints name generations
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
