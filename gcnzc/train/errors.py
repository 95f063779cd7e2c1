"""Errors that end a training run."""

from pathlib import Path


class StopTraining(Exception):
    """Ends a run as if its last epoch were over; callbacks raise it, see `Callback`."""


class Interrupted(Exception):
    """A worker received a stop request; the run is saved, except files that the message names."""


class SavedRun(Interrupted):
    """A worker received a stop request, and all files of the run are saved."""

    def __init__(self, epoch: int, folder: Path) -> None:
        self.stopped = f"stopped in epoch {epoch}; all files are saved"
        self.remedy = f"`gcnzc train --resume {folder}` resumes the run from here"
        super().__init__(f"{self.stopped}\n\nhint: {self.remedy}")

    def format_restart(self) -> str:
        """Return the message for a worker that its launcher may restart."""
        return (
            f"{self.stopped}. The launcher may restart the workers, which then resume the run; "
            f"otherwise {self.remedy}"
        )


class PeerFailed(Exception):
    """Another worker failed and reports the error; this worker ends as well."""
