"""A scratch folder with layer outputs, from which interrupted inference resumes.

`scratch.json` identifies the model, the graph and the features; files `NAME.rows` have the rows,
and `journal-RANK.jsonl` the ranges of them that are finished.
"""

import json
import mmap
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcnzc._files import lock, other_process, remove_partial, sync
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.table import FeatureTable
from gcnzc.system import files
from gcnzc.system.files import append_whole
from gcnzc.system.host_memory import PAGE_BYTES
from gcnzc.train.layerwise.ranges import Span
from gcnzc.train.layerwise.workers import Store, Workers

IDENTITY, SUFFIX, JOURNALS = "scratch.json", ".rows", "journal-*.jsonl"

# with another format, stored rows are not reused
FORMAT = 2

# a gather keeps at most this much of a file resident, or a quarter of the memory if that is less
WINDOW_BYTES = 1 << 26

# ranges are recorded in the journal once their rows are synchronized with the disk, together for
# this many bytes or seconds, because synchronizing takes milliseconds
SYNC_BYTES, SYNC_S = 1 << 26, 5.0


class Journal:
    """The finished ranges of all workers of a machine, and the file of this worker.

    Each worker appends to a file of its own, a line for each range of the rows of a name, or for
    the name alone when all of its rows are finished. A line is written after the rows are on the
    disk, so that the journal survives a process that is killed at any moment. A line that is not
    whole is ignored and removed.

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
        self.path = folder / f"journal-{rank}.jsonl"
        self.spans: dict[str, set[Span]] = defaultdict(set)
        self.finished: set[str] = set()
        for path in sorted(folder.glob(JOURNALS)):
            data, whole = path.read_bytes(), 0
            for line in data.splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._add(*json.loads(line))
                except (ValueError, TypeError):
                    break
                whole += len(line)
            if path == self.path and whole < len(data):
                # the next line must not continue one that is not whole
                os.truncate(path, whole)

    def _add(self, name: str, begin: int | None = None, end: int = 0) -> None:
        if begin is None:
            self.finished.add(name)
        else:
            self.spans[name].add((begin, end))

    def add(self, name: str, spans: Sequence[Span] | None = None) -> None:
        """Record finished ranges, or that all of a name are finished; the rows are on the disk.

        Raises:
            OSError: the disk is full or may not be written. The journal is as before.
        """
        entries: list[tuple[Any, ...]] = [(name,)]
        if spans is not None:
            entries = [(name, begin, end) for begin, end in spans]
        is_new = not self.path.exists()
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        try:
            append_whole(self.path, lines.encode())
            sync(self.path)
            if is_new:
                sync(self.path.parent)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        for entry in entries:
            self._add(*entry)


class StoredRows:
    """Layer outputs in a file: written range by range, and gathered in bounded memory; see `Rows`.

    Args:
        path: the file, created if needed.
        num_rows: n.
        num_columns: columns.
        dtype: dtype of the elements.
        journal: has the finished ranges.
        window_bytes: bytes of the file that a gather maps at a time.

    Raises:
        OSError: the file cannot be created.
        ValueError: the journal has finished ranges, and the file is missing or too short.
    """

    def __init__(
        self,
        path: Path,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        journal: Journal,
        window_bytes: int,
    ) -> None:
        self.path, self.num_rows, self.num_columns, self.dtype = path, num_rows, num_columns, dtype
        self.journal, self.window_bytes = journal, window_bytes
        self.name = path.stem
        self.row_bytes = num_columns * dtype.itemsize
        self._pending: list[Span] = []
        self._pending_bytes, self._synced_at = 0, time.monotonic()
        num_bytes = num_rows * self.row_bytes
        has_rows = self.is_finished or bool(journal.spans[self.name])
        found = path.stat().st_size if path.exists() else 0
        if has_rows and found != num_bytes:
            raise ValueError(
                f"{path} has {found:,} bytes instead of {num_bytes:,}, but its journal lists "
                f"finished rows\n\nhint: delete the folder {path.parent}, and start again"
            )
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if found < num_bytes:
            os.ftruncate(self._file, num_bytes)
        if is_new:
            # the journal must not list rows of a file that a power failure removes
            sync(path.parent)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def is_finished(self) -> bool:
        """Whether all rows are computed and on the disk."""
        return self.name in self.journal.finished

    def has(self, begin: int, end: int) -> bool:
        """Whether the rows from `begin` to before `end` are computed and on the disk."""
        return self.is_finished or (begin, end) in self.journal.spans[self.name]

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """Write the rows of a range; `sync` records it.

        Args:
            begin: first row.
            end: last row + 1.
            values: (end - begin, num_columns) of any device, converted to `dtype`.

        Raises:
            OSError: the disk is full. Ranges that are recorded remain valid.
        """
        data = values.detach().to("cpu", self.dtype).contiguous()
        if self.num_columns:
            rest = bytes_of(data)
            at = begin * self.row_bytes
            with self._named_errors():
                # a disk that becomes full accepts a part first
                while rest:
                    written = os.pwrite(self._file, rest, at)
                    rest, at = rest[written:], at + written
        self._pending.append((begin, end))
        self._pending_bytes += (end - begin) * self.row_bytes
        if self._pending_bytes >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_S:
            self.sync()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the file in errors of the disk."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Wait until all written rows are on the disk, then record their ranges.

        Raises:
            OSError: the disk is full.
        """
        if self._pending:
            with self._named_errors():
                os.fdatasync(self._file)
            self.journal.add(self.name, self._pending)
        self._pending, self._pending_bytes, self._synced_at = [], 0, time.monotonic()

    def read(self, begin: int, end: int) -> Tensor:
        """Read the rows of a range.

        Args:
            begin: first row.
            end: last row + 1.

        Returns:
            (end - begin, num_columns) on the host.

        Raises:
            OSError: the file cannot be read.
        """
        return map_rows(self._file, self.num_rows, self.num_columns, self.dtype)[1][begin:end]

    def table(self) -> FeatureTable:
        """Return the finished rows as a table that is read in bounded memory."""
        memory, rows = map_rows(self._file, self.num_rows, self.num_columns, self.dtype)
        return StoredTable(rows, memory=memory, window_bytes=self.window_bytes)


@dataclass(frozen=True, eq=False)
class StoredTable(FeatureTable):
    """A table whose rows are mapped from a file; a gather maps only a part of it at a time.

    The pages of the file that were read remain in the operating system's cache while it has memory,
    but not in that of this process.
    """

    memory: mmap.mmap | None = None
    window_bytes: int = 0

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """See `FeatureTable.gather`."""
        memory = self.memory
        if memory is None or len(ids) == 0:
            return super().gather(ids, out, threads=threads)
        order = None
        if len(ids) > 1 and not bool((ids[1:] >= ids[:-1]).all()):
            order = ids.argsort()
            ids = ids[order]
        result = torch.empty(len(ids), self.num_columns, dtype=self.dtype) if out is None else out
        step = max(1, self.window_bytes // self.row_bytes)
        first, last = int(ids[0]) // step * step, int(ids[-1])
        edges = torch.arange(first, last + step, step, dtype=ids.dtype)
        bounds = [*torch.searchsorted(ids, edges).tolist(), len(ids)]
        for window, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end:
                continue
            if order is None:
                super().gather(ids[begin:end], result[begin:end], threads=threads)
            else:
                part = super().gather(ids[begin:end], threads=threads)
                result[order[begin:end]] = part
            self._release(memory, first + window * step, first + (window + 1) * step)
        return result

    def _release(self, memory: mmap.mmap, begin: int, end: int) -> None:
        """Release the resident pages of a range of rows, which remain in the file."""
        start = begin * self.row_bytes // PAGE_BYTES * PAGE_BYTES
        stop = min(end * self.row_bytes, len(memory))
        if stop > start:
            memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


def bytes_of(rows: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return rows.view(-1).view(torch.uint8).numpy().data


def map_rows(
    file: int, num_rows: int, num_columns: int, dtype: torch.dtype
) -> tuple[mmap.mmap | None, Tensor]:
    """Map an open file read-only, and return the mapping and its rows."""
    num_bytes = num_rows * num_columns * dtype.itemsize
    if num_bytes == 0:
        return None, torch.empty(num_rows, num_columns, dtype=dtype)
    memory = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    # torch warns about read-only memory, but nothing here writes to it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = torch.frombuffer(memory, dtype=dtype)
    return memory, rows.view(num_rows, num_columns)


class Scratch(Store):
    """The layer outputs in a scratch folder, which `open_scratch` opens.

    Args:
        folder: the folder of this machine's rows.
        memory: bytes for the layer outputs that are in memory at a time.
        workers: the workers that compute the rows.

    Raises:
        OSError: a journal cannot be read.
    """

    def __init__(self, folder: Path, memory: int, workers: Workers) -> None:
        super().__init__(workers)
        self.folder, self.memory = folder, memory
        self.window_bytes = min(WINDOW_BYTES, max(1, memory // 4))
        self.journal = Journal(folder, workers.rank)

    def is_finished(self, name: str) -> bool:
        """See `Store`; a collective call."""
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

    def finish(self, rows: Any, shares: Sequence[Sequence[Span]]) -> None:
        """See `Store`; also record that all rows are finished.

        Raises:
            OSError: the disk is full.
        """
        super().finish(rows, shares)
        with joint_work(self.workers.group):
            if self.workers.is_first:
                rows.sync()
                self.journal.add(rows.name)
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
    for pattern in (JOURNALS, f"*{SUFFIX}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    (folder / IDENTITY).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
