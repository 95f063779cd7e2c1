"""A scratch folder with layer outputs, from which interrupted inference resumes.

`scratch.json` identifies the model, the graph and the features; files `NAME.rows` have the rows,
and `journal-RANK.jsonl` the ranges of them that are finished.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gcnzc._files import lock, other_process, remove_partial
from gcnzc.exchange.long_work import joint_work
from gcnzc.system import files
from gcnzc.train.layerwise.journal import PATTERN, Journal
from gcnzc.train.layerwise.ranges import Span
from gcnzc.train.layerwise.stored_rows import StoredRows
from gcnzc.train.layerwise.workers import Workers

IDENTITY, SUFFIX = "scratch.json", ".rows"

# with another format, stored rows are not reused
FORMAT = 1

# a gather keeps at most this much of a file resident, or a quarter of the memory if that is less
WINDOW_BYTES = 1 << 26


class Scratch:
    """The layer outputs in a scratch folder, which `open_scratch` opens.

    Args:
        folder: the folder of this machine's rows.
        memory: bytes for the layer outputs that are in memory at a time.
        workers: the workers that compute the rows.

    Raises:
        OSError: a journal cannot be read.
    """

    def __init__(self, folder: Path, memory: int, workers: Workers) -> None:
        self.folder, self.memory, self.workers = folder, memory, workers
        self.window_bytes = min(WINDOW_BYTES, max(1, memory // 4))
        self.journal = Journal(folder, workers.rank)

    def is_finished(self, name: str) -> bool:
        """Whether all machines have all rows of a name; a collective call."""
        is_finished = name in self.journal.finished
        if self.workers.has_several_machines:
            is_finished = bool(self.workers.minimum(int(is_finished)))
        return is_finished

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> StoredRows:
        """Open the rows of a name, which may be finished, begun or new; a collective call.

        Raises:
            OSError: the file cannot be created.
            ValueError: the file is not as its journal says.
        """
        if not self.is_finished(name):
            # another machine lacks rows that this one has
            self.journal.finished.discard(name)
        with joint_work(self.workers.group):
            path = self.folder / (name + SUFFIX)
            return StoredRows(path, num_rows, num_columns, dtype, self.journal, self.window_bytes)

    def finish(self, rows: StoredRows, shares: Sequence[Sequence[Span]]) -> None:
        """Copy the rows to all machines, and record that all are finished; a collective call.

        Args:
            rows: the rows; each worker has computed and synchronized its share.
            shares: the spans that each worker has computed.

        Raises:
            OSError: the disk is full.
        """
        self.workers.distribute(rows, shares)
        with joint_work(self.workers.group):
            if self.workers.is_first:
                rows.sync()
                self.journal.add_finished(rows.name)
        self.journal.finished.add(rows.name)

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files of rows that are not needed any more, after all have called `finish`."""
        if self.workers.is_first:
            for name in names:
                (self.folder / (name + SUFFIX)).unlink(missing_ok=True)


@contextmanager
def open_scratch(
    folder: Path,
    memory: int,
    workers: Workers,
    identify: Callable[[], Mapping[str, Any]],
) -> Iterator[Scratch]:
    """Open a scratch folder, which is created if needed and locked; a collective call.

    Args:
        folder: the folder; the workers of several machines use a folder in it for each machine.
        memory: see `Scratch`.
        workers: the workers that compute the rows.
        identify: returns what the rows depend on, as values of JSON.

    Raises:
        ValueError: the folder has rows of another model, graph or features, or other files, or
            another process uses it.
        OSError: the folder cannot be created, or the disk is full.
    """
    own = folder
    if workers.has_several_machines:
        own = folder / f"machine-{workers.firsts[workers.rank]}"
    with ExitStack() as stack:
        with joint_work(workers.group) as work:
            if workers.is_first:
                own.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(own))
                try:
                    _claim(own, work.run_in_thread(lambda: {"format": FORMAT, **identify()}))
                except BaseException:
                    # fails if the folder has files
                    with suppress(OSError):
                        own.rmdir()
                    raise
        with joint_work(workers.group):
            scratch = Scratch(own, memory, workers)
        yield scratch


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not lock(descriptor):
            raise ValueError(
                f"{other_process(descriptor)} uses the scratch folder {folder}\n\n"
                "hint: wait for it, or give another folder"
            )
        yield
    finally:
        os.close(descriptor)


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Check whose rows a folder has, and record whose it has from now on."""
    path = folder / IDENTITY
    if not path.exists():
        names = (found.name for found in folder.iterdir())
        others = sorted(name for name in names if not name.startswith(f".{IDENTITY}."))
        if others:
            raise ValueError(
                f"{folder} is not a scratch folder: it has {others[0]}\n\n"
                "hint: give a new or an empty folder"
            )
    else:
        try:
            found = files.read_json(path)
        except ValueError as error:
            raise ValueError(
                f"{str(error).partition(chr(10))[0]}\n\n"
                "hint: give another folder, or delete this one; its rows cannot be reused"
            ) from error
        differing = [key for key in identity if found.get(key) != identity[key]]
        if differing:
            raise ValueError(
                f"{folder} has rows of another computation: {', '.join(differing)} differ\n\n"
                "hint: give another folder, or delete this one if its rows are not needed"
            )
        remove_partial(folder)
        return
    remove_partial(folder)
    files.write_json(path, identity)


def remove_scratch(folder: Path) -> None:
    """Delete the files of a scratch folder, and the folder if it is empty then.

    Tensors that are mapped from the files remain valid. A folder that is not a scratch folder is
    not changed.
    """
    if not (folder / IDENTITY).is_file():
        return
    # the journals first: without them, no rows are reused
    for pattern in (PATTERN, f"*{SUFFIX}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    (folder / IDENTITY).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
