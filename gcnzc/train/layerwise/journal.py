"""A journal of finished ranges of rows, which survives a process that is killed at any moment.

Each worker appends to a file of its own. A line is written after the rows that it describes are on
the disk; a line that is not whole is ignored and removed.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcnzc._files import sync
from gcnzc.system.files import append_whole
from gcnzc.train.layerwise.ranges import Span

PATTERN = "journal-*.jsonl"


class Journal:
    """The finished ranges of all workers of a machine, and the file of this worker.

    Args:
        folder: folder of the journals of all workers.
        rank: this worker's rank.

    Attributes:
        spans: for each name of rows, the finished ranges.
        finished: the names of rows of which all ranges are finished.

    Raises:
        OSError: a journal cannot be read or written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.path = folder, folder / f"journal-{rank}.jsonl"
        self.spans: dict[str, set[Span]] = {}
        self.finished: set[str] = set()
        for path in sorted(folder.glob(PATTERN)):
            self._read(path)

    def _read(self, path: Path) -> None:
        whole = 0
        data = path.read_bytes()
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        if path == self.path and whole < len(data):
            # the next line must not continue one that is not whole
            os.truncate(path, whole)

    def _add(self, entry: dict[str, Any]) -> None:
        if "finished" in entry:
            self.finished.add(str(entry["finished"]))
        else:
            span = int(entry["begin"]), int(entry["end"])
            self.spans.setdefault(str(entry["rows"]), set()).add(span)

    def add_spans(self, name: str, spans: Sequence[Span]) -> None:
        """Record finished ranges, whose rows are on the disk.

        Raises:
            OSError: the disk is full or may not be written. The journal is as before.
        """
        self._append([{"rows": name, "begin": begin, "end": end} for begin, end in spans])
        self.spans.setdefault(name, set()).update(spans)

    def add_finished(self, name: str) -> None:
        """Record that all ranges are finished, and their rows on the disk.

        Raises:
            OSError: the disk is full or may not be written. The journal is as before.
        """
        self._append([{"finished": name}])
        self.finished.add(name)

    def _append(self, entries: Sequence[dict[str, Any]]) -> None:
        is_new = not self.path.exists()
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        try:
            append_whole(self.path, lines.encode())
            sync(self.path)
            if is_new:
                sync(self.folder)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
