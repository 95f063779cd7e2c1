"""Errors that end a training run."""

from pathlib import Path


class StopTraining(Exception):
    """Ends a run as if its last epoch were over; callbacks raise it, see `Callback`.

    If the run is resumed, it trains on, up to `epochs`.
    """


class Interrupted(Exception):
    """A worker received a stop request; the run is saved, except files that the message names."""


class SavedRun(Interrupted):
    """A worker received a stop request, and all files of the run are saved.

    Args:
        position: such as "after epoch 3".
        folder: of the run.
        signal: the signal that this worker has received; 0 if only another one has.
    """

    def __init__(self, position: str, folder: Path, signal: int) -> None:
        self.position, self.signal = position, signal
        super().__init__(f"stopped {position}; resume with `gcnzc train --resume {folder}`")


class PeerFailed(Exception):
    """Another worker failed and reports the error; this worker ends as well."""
