"""A scratch folder with layer outputs, from which interrupted inference resumes.

`scratch.json` identifies the model, the graph and the features. `NAME.rows` has the finished rows
of a name. Rows of which some are not finished are in `NAME.unfinished`, followed by a byte for each
row: 1 if the range that begins at this row is on the disk. A file is renamed when all rows are.
"""

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcnzc._files import lock, other_process, remove_partial, sync
from gcnzc.exchange import Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.system import files
from gcnzc.system.host_memory import PAGE_BYTES
from gcnzc.train.layerwise.ranges import Span
from gcnzc.train.layerwise.store import Rows, Store

IDENTITY, FINISHED, UNFINISHED = "scratch.json", ".rows", ".unfinished"

# with another format, stored rows are not reused
FORMAT = 3

# a gather keeps at most this much of a file resident, or a quarter of the memory if that is less
WINDOW_BYTES = 1 << 26

# of a range of rows that are on the disk
_MARK = b"\1"


class StoredRows(Rows):
    """Rows in a file: written range by range, and gathered in bounded memory.

    A range is marked after its rows are on the disk, so that the marks are right if a process is
    killed or the machine loses power at any moment.

    Args:
        path: the file, which is created unless it is finished.
        shape: n rows, and columns.
        dtype: dtype of the elements.
        window_bytes: bytes of the file that a gather maps at a time.

    Raises:
        OSError: the file cannot be created.
        ValueError: a finished file does not have the size of the rows.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: torch.dtype, window_bytes: int
    ) -> None:
        self.path, self.shape, self.dtype, self.window_bytes = path, shape, dtype, window_bytes
        self.row_bytes = shape[1] * dtype.itemsize
        self._marks = shape[0] * self.row_bytes
        num_bytes = self._marks + shape[0]
        found = path.stat().st_size if path.suffix == FINISHED else num_bytes
        if found != num_bytes:
            raise ValueError(
                f"{path} has {found:,} bytes instead of {num_bytes:,}\n\n"
                f"hint: delete the folder {path.parent}, and start again"
            )
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # bytes after the end of the file are 0
        os.ftruncate(self._file, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def has(self, begin: int) -> bool:
        """See `Rows`."""
        return self.is_finished or os.pread(self._file, 1, self._marks + begin) == _MARK

    def write(self, begin: int, values: Tensor) -> None:
        """See `Rows`; values are converted to `dtype`.

        Raises:
            OSError: the disk is full. Ranges that are recorded remain valid.
        """
        data = values.detach().to("cpu", self.dtype).contiguous()
        self._write(begin * self.row_bytes, bytes_of(data))

    def _write(self, at: int, rest: memoryview | bytes) -> None:
        with self._named_errors():
            # a disk that becomes full accepts a part first
            while rest:
                written = os.pwrite(self._file, rest, at)
                rest, at = rest[written:], at + written

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the file in errors of the disk."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def record(self, begin: int) -> None:
        """Wait until the written rows are on the disk, and mark their range.

        Raises:
            OSError: the disk is full.
        """
        with self._named_errors():
            os.fdatasync(self._file)
        self._write(self._marks + begin, _MARK)

    def finish(self) -> None:
        """Wait until all rows are on the disk, and rename the file.

        Raises:
            OSError: the disk is full.
        """
        with self._named_errors():
            os.fdatasync(self._file)
            self.path = self.path.replace(self.path.with_suffix(FINISHED))
            sync(self.path.parent)

    def table(self) -> FeatureTable:
        """Return the rows as a table that is read in bounded memory."""
        memory, rows = map_rows(self._file, *self.shape, self.dtype)
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
        if memory is None:
            return super().gather(ids, out, threads=threads)
        result = torch.empty(len(ids), self.num_columns, dtype=self.dtype) if out is None else out
        ids, order = ids.sort()
        step = max(1, self.window_bytes // self.row_bytes)
        windows, counts = torch.unique_consecutive(ids // step, return_counts=True)
        sizes = counts.tolist()
        parts = zip(windows.tolist(), order.split(sizes), ids.split(sizes), strict=True)
        for window, places, own in parts:
            result[places] = super().gather(own, threads=threads)
            self._release(memory, window * step, (window + 1) * step)
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
        folder: the folder; the workers of several machines use a folder in it for each machine.
        memory: bytes for the layer outputs that are in memory at a time.
        group: the workers that compute the rows.
    """

    def __init__(self, folder: Path, memory: int, group: Group) -> None:
        super().__init__(group)
        own_first = self.firsts[group.rank]
        self.folder = folder / f"machine-{own_first}" if self.has_several_machines else folder
        self.is_first = own_first == group.rank  # of its machine
        self.memory = memory
        self.window_bytes = min(WINDOW_BYTES, max(1, memory // 4))

    def is_finished(self, name: str) -> bool:
        """See `Store`; a collective call."""
        is_finished = (self.folder / (name + FINISHED)).exists()
        if self.has_several_machines:
            is_finished = all(run(all_gather_scalar(int(is_finished)), self.group))
        return is_finished

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> StoredRows:
        """Open the rows of a name, which may be finished, begun or new; a collective call.

        Raises:
            OSError: the file cannot be created.
            ValueError: a finished file does not have the size of the rows.
        """
        is_finished = self.is_finished(name)
        with joint_work(self.group):
            path = self.folder / (name + FINISHED)
            if not path.exists():
                path = path.with_suffix(UNFINISHED)
            rows = StoredRows(path, (num_rows, num_columns), dtype, self.window_bytes)
            # another machine may lack rows that this one has
            rows.is_finished = is_finished
        return rows

    def finish(self, rows: Any, shares: Sequence[Sequence[Span]]) -> None:
        """See `Store`; the rows are then finished.

        Raises:
            OSError: the disk is full.
        """
        super().finish(rows, shares)
        with joint_work(self.group):
            if self.is_first:
                rows.finish()
        rows.is_finished = True

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files of rows that are not needed any more, after all have called `finish`."""
        if self.is_first:
            for name in names:
                (self.folder / (name + FINISHED)).unlink(missing_ok=True)


@contextmanager
def open_scratch(
    folder: Path, memory: int, group: Group, identify: Callable[[], Mapping[str, Any]]
) -> Iterator[Scratch]:
    """Open a scratch folder, which is created if needed and locked; a collective call.

    Args:
        folder, memory, group: see `Scratch`.
        identify: returns what the rows depend on, as values of JSON.

    Raises:
        ValueError: the folder has rows of another model, graph or features, or other files, or
            another process uses it.
        OSError: the folder cannot be created, or the disk is full.
    """
    scratch = Scratch(folder, memory, group)
    own = scratch.folder
    with ExitStack() as stack:
        with joint_work(group) as work:
            if scratch.is_first:
                own.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                if not lock(descriptor):
                    raise ValueError(
                        f"{other_process(descriptor)} uses the scratch folder {own}\n\n"
                        "hint: wait for it, or give another folder"
                    )
                try:
                    _claim(own, work.run_in_thread(lambda: {"format": FORMAT, **identify()}))
                except BaseException:
                    # fails if the folder has files
                    with suppress(OSError):
                        own.rmdir()
                    raise
        yield scratch


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Check whose rows a folder has, and record whose it has from now on."""
    path = folder / IDENTITY
    if path.exists():
        found = files.read_json(path, "give another folder, or delete this one with its rows")
        differing = [key for key in identity if found.get(key) != identity[key]]
        if differing:
            raise ValueError(
                f"{folder} has rows of another computation: {', '.join(differing)} differ\n\n"
                "hint: give another folder, or delete this one if its rows are not needed"
            )
        remove_partial(folder)
        return
    # a process that was killed may have left a part of the identity
    others = (each.name for each in folder.iterdir() if not each.name.startswith(f".{path.stem}."))
    other = min(others, default=None)
    if other is not None:
        raise ValueError(
            f"{folder} is not a scratch folder: it has {other}\n\n"
            "hint: give a new or an empty folder"
        )
    remove_partial(folder)
    files.write_json(path, identity)


def remove_scratch(folder: Path) -> None:
    """Delete the files of a scratch folder, and the folder if it is empty then.

    Tensors that are mapped from the files remain valid. A folder that is not a scratch folder is
    not changed.
    """
    if not (folder / IDENTITY).is_file():
        return
    for pattern in (f"*{FINISHED}", f"*{UNFINISHED}", IDENTITY):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
