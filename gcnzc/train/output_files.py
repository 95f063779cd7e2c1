"""The files of a run while it trains: those that cannot be written do not end it.

A full disk, or one that has become read-only, is reported once for each file. Training continues,
and the file is written when that is possible again. A run folder that was moved ends the run.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from gcnzc.system.files import folder_identity
from gcnzc.train.run_folder import CONFIG


class Unsaved(Exception):
    """A run has ended, but some of its files could not be written."""


class OutputFiles:
    """The files of a run folder that this process writes.

    Args:
        folder: the run folder.
        say: called with each message.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.failures: dict[str, OSError] = {}
        """names of the files that are not up to date, and why"""
        self.is_training = False
        """whether failures are reported; before the training begins they are raised"""
        self._identities: set[str | int] = set()

    def identify(self) -> None:
        """Record the folder's identity, so that `demand_folder` detects if it is moved."""
        self._identities = _identities_of(self.folder)

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Call `write`, which writes the file `name`, and return whether it could be written.

        Raises:
            ValueError: the run folder was moved or removed.
            OSError: the file could not be written, before the training begins.
        """
        self.demand_folder()
        try:
            write()
        except OSError as error:
            self.fail(name, error)
            return False
        if self.failures.pop(name, None) is not None:
            self.say(f"{self.folder / name} could be written again")
        return True

    def fail(self, name: str, error: OSError) -> None:
        """Record that a file could not be written, and report it the first time.

        Raises:
            ValueError: the run folder was moved or removed.
            OSError: `error`, before the training begins.
        """
        self.demand_folder()
        if not self.is_training:
            raise error
        if name not in self.failures:
            self.say(
                f"warning: {self.folder / name} could not be written: {cause_of(error)}; training "
                "continues, and writes it as soon as the disk has space and permits it"
            )
        self.failures[name] = error

    def demand_folder(self) -> None:
        """Check that the run folder is where it was.

        Raises:
            ValueError: it was moved or removed.
        """
        if self._identities and self._identities.isdisjoint(_identities_of(self.folder)):
            raise ValueError(format_moved_error(self.folder))

    def causes(self) -> dict[str, str]:
        """Return the names of the files that are not up to date, with the cause."""
        return {name: cause_of(error) for name, error in sorted(self.failures.items())}


def _identities_of(folder: Path) -> set[str | int]:
    """Return what identifies a run folder, also on a network file system that numbers it anew."""
    found: set[str | int] = {identity} if (identity := folder_identity(folder)) else set()
    with suppress(OSError):
        found.add((folder / CONFIG).stat().st_mtime_ns)
    return found


def format_moved_error(folder: Path) -> str:
    """Return the message that a run folder is gone."""
    return (
        f"the run folder {folder} was moved or removed while the run was training\n\n"
        "hint: `gcnzc train --resume FOLDER` with the folder's new place resumes the run from its "
        "last checkpoint"
    )


def format_unsaved_error(folder: Path, causes: Mapping[str, str]) -> str:
    """Return the message that the files in `causes` could not be written."""
    names = ", ".join(f"{folder / name} ({cause})" for name, cause in causes.items())
    return (
        f"not saved: {names}\n\nhint: free space on that disk or make the folder writable, then "
        f"`gcnzc train --resume {folder}` writes what is missing"
    )


def cause_of(error: OSError) -> str:
    """Return the cause of an error without the path."""
    return error.strerror or str(error).partition("\n")[0]
