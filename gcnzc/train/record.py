"""Read and write the records of a run: JSON lines, and its launch."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcnzc._files import write_text
from gcnzc.system.files import append_whole, read_json, to_json, write_json

LAUNCH = "launch.json"


@dataclass(frozen=True)
class Launch:
    """The launch of a run's workers, by a launcher on each machine."""

    run_id: str | None = None
    """the id that all launchers have in common; None if there is none"""
    launchers: frozenset[str] = frozenset()
    """unique names of the launchers; empty if there is a run id"""
    folder: str | None = None
    """the identity of the run folder, if the launcher has locked it; see `folder_identity`"""

    def has_started(self, folder: Path) -> bool:
        """Whether this launch was the last one that started the run in `folder`.

        Launchers without a run id belong to a launch if one of them has started its workers before:
        others may have been replaced, and worker 0 may have moved from one to another.
        """
        # a damaged file belongs to no launch
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            earlier = read_json(folder / LAUNCH)
            if self.run_id is not None:
                return bool(earlier["run_id"] == self.run_id)
            return not self.launchers.isdisjoint(earlier["launchers"])
        return False

    def write(self, folder: Path) -> None:
        """Store this launch in `folder`, with all launchers that have belonged to it."""
        known = self.launchers
        if self.has_started(folder):
            known |= set(read_json(folder / LAUNCH).get("launchers", ()))
        write_json(folder / LAUNCH, {"run_id": self.run_id, "launchers": sorted(known)})


class Journal:
    """A file that grows by whole entries, which are pending until they can be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = b""
        """entries that are not in the file yet"""

    def append(self) -> None:
        """Append all pending entries.

        Raises:
            OSError: the disk is full or may not be written. The file is as before, and the entries
                remain pending.
        """
        if self.pending:
            append_whole(self.path, self.pending)
        self.pending = b""


def to_line(values: Mapping[str, Any]) -> bytes:
    """Return one line of JSON."""
    return (to_json(values) + "\n").encode()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path` before the first damaged one; none if there is no file."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    with suppress(json.JSONDecodeError):
        for text in path.read_text(errors="replace").splitlines():
            line = json.loads(text)
            if not isinstance(line, dict):
                break
            lines.append(line)
    return lines


def typical_lines(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the lines of the epochs whose times are typical: all but the first.

    In the first epoch, kernels are compiled or loaded, and buffers are filled. It is returned if it
    is the only one.
    """
    return lines[1:] or lines


def rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the contents of `path` by these lines, atomically."""
    write_text(path, "".join(to_json(line) + "\n" for line in lines))
