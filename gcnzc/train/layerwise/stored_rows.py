"""Layer outputs in a file: written range by range, and gathered in bounded memory."""

import mmap
import os
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from gcnzc._files import sync
from gcnzc.features.table import FeatureTable
from gcnzc.system.host_memory import PAGE_BYTES
from gcnzc.train.layerwise.journal import Journal
from gcnzc.train.layerwise.ranges import Span

# ranges are recorded in the journal once their rows are synchronized with the disk, together for
# this many bytes or seconds, because synchronizing takes milliseconds
SYNC_BYTES, SYNC_S = 1 << 26, 5.0


class StoredRows:
    """Rows in a file that the workers of a machine write together; a `Rows` of `Workers`.

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
        has_rows = self.is_finished or self.name in journal.spans
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
        return self.is_finished or (begin, end) in self.journal.spans.get(self.name, ())

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
        if data.shape != (end - begin, self.num_columns):
            raise ValueError(f"rows {begin} to {end} of {self.path} get {tuple(data.shape)}")
        if self.num_columns:
            rest = bytes_of(data)
            at = begin * self.row_bytes
            try:
                # a disk that becomes full accepts a part first
                while rest:
                    written = os.pwrite(self._file, rest, at)
                    rest, at = rest[written:], at + written
            except OSError as error:
                error.filename = str(self.path)
                raise
        self._pending.append((begin, end))
        self._pending_bytes += (end - begin) * self.row_bytes
        if self._pending_bytes >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until all written rows are on the disk, then record their ranges.

        Raises:
            OSError: the disk is full.
        """
        if self._pending:
            try:
                os.fdatasync(self._file)
            except OSError as error:
                error.filename = str(self.path)
                raise
            self.journal.add_spans(self.name, self._pending)
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
            ValueError: the file ends before the range does.
        """
        out = torch.empty(end - begin, self.num_columns, dtype=self.dtype)
        if out.numel():
            rest = bytes_of(out)
            at = begin * self.row_bytes
            while rest:
                count = os.preadv(self._file, [rest], at)
                if count == 0:
                    raise ValueError(
                        f"{self.path} ends at byte {at:,}\n\nhint: was it truncated? Delete the "
                        f"folder {self.path.parent}, and start again"
                    )
                rest, at = rest[count:], at + count
        return out

    def table(self) -> "StoredTable":
        """Return the finished rows as a table that is read in bounded memory."""
        return StoredTable.map(self)


class StoredTable(FeatureTable):
    """A table whose rows are mapped from a file; a gather maps only a part of it at a time.

    The pages of the file that were read remain in the operating system's cache while it has memory,
    but not in that of this process.
    """

    @classmethod
    def map(cls, stored: StoredRows) -> "StoredTable":
        """Map the rows of a file."""
        memory, rows = _map_file(stored._file, stored.num_rows, stored.num_columns, stored.dtype)
        table = cls(rows)
        object.__setattr__(table, "_memory", memory)
        object.__setattr__(table, "_window_bytes", stored.window_bytes)
        return table

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """See `FeatureTable.gather`."""
        memory: mmap.mmap | None = getattr(self, "_memory", None)
        if memory is None or len(ids) == 0:
            return super().gather(ids, out, threads=threads)
        order = None
        if len(ids) > 1 and not bool((ids[1:] >= ids[:-1]).all()):
            order = ids.argsort()
            ids = ids[order]
        result = torch.empty(len(ids), self.num_columns, dtype=self.dtype) if out is None else out
        step = max(1, int(getattr(self, "_window_bytes")) // self.row_bytes)  # noqa: B009
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


def _map_file(
    file: int, num_rows: int, num_columns: int, dtype: torch.dtype
) -> tuple[mmap.mmap | None, Tensor]:
    """Map a file read-only, and return the mapping and its rows."""
    num_bytes = num_rows * num_columns * dtype.itemsize
    if num_bytes == 0:
        return None, torch.empty(num_rows, num_columns, dtype=dtype)
    memory = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    # torch warns about read-only memory, but nothing here writes to it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = torch.frombuffer(memory, dtype=dtype)
    return memory, rows.view(num_rows, num_columns)


def map_rows(file: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Map rows of an open file read-only."""
    return _map_file(file, num_rows, num_columns, dtype)[1]
