"""Read arrays of an `.npz` archive sequentially, without loading them into memory.

A stored or deflated member of any size is read through a small buffer. At the end, `zipfile`
verifies its checksum.

Notation: N rows, D columns, E edges.
"""

import errno
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from gcnzc.datasets.rows import (
    CHUNK_BYTES,
    Allocate,
    Array,
    Progress,
    Rows,
    allocate_in_memory,
    as_bytes,
    chunk_rows,
)
from gcnzc.datasets.source import allocate_ends, check_ends

# largest compression ratio of deflate; see https://zlib.net/zlib_tech.html
MAX_COMPRESSION_RATIO = 1032
# what zipfile, its codecs and numpy's header parser raise for invalid data
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(tokenize.TokenError, SyntaxError, RecursionError),
    *(ValueError, TypeError, KeyError, OverflowError),
    # for an unsupported compression or version, and for an encrypted member
    *(NotImplementedError, RuntimeError),
)


class Archive:
    """The arrays of an `.npz` archive by name; only the directory and headers are read.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not an `.npz` archive, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}\n\nhint: give the path of an .npz archive")
        with _readable(path), zipfile.ZipFile(path) as archive:
            self.keys = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def member(self, key: str) -> "Member":
        """Return the array `key` without reading it.

        Raises:
            ValueError: there is no such array, or it contains Python objects.
        """
        if key not in self.keys:
            found = ", ".join(self.keys) or "no arrays"
            raise ValueError(f"{self.path} has no array {key}\n\nhint: it has {found}")
        return Member(self.path, key)

    def array(self, key: str) -> Array:
        """Read the array `key` into memory."""
        return self.member(key).in_memory()


class Member:
    """One array of an archive: shape, dtype, and methods to read it."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        with self._open():
            pass
        if self.dtype.kind not in "fiubUS":
            raise ValueError(
                f"{path}: the array {key} is of type {self.dtype}\n\n"
                "hint: only numbers and strings are supported; Python objects would need pickle"
            )
        self._check_size()

    @property
    def where(self) -> str:
        """Name of the array in error messages."""
        return f"{self.path} ({self.key})"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """Open the member and read its header; yield the stream at the start of the data."""
        with (
            _readable(self.path),
            zipfile.ZipFile(self.path) as archive,
            archive.open(self.key + ".npy") as stream,
        ):
            version = np.lib.format.read_magic(stream)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            self.shape, self.fortran, self.dtype = read(stream)
            self._info, self._header_bytes = archive.getinfo(self.key + ".npy"), stream.tell()
            yield stream

    def _check_size(self) -> None:
        """Check that the member can have the size in its header, before memory is allocated."""
        info = self._info
        expected = self._header_bytes + self.size * self.dtype.itemsize
        largest = info.compress_size * (
            1 if info.compress_type == zipfile.ZIP_STORED else MAX_COMPRESSION_RATIO
        )
        largest += 1024  # margin for rounding
        if min(self.shape, default=0) < 0 or info.file_size != expected:
            raise ValueError(
                f"{self.where} has {info.file_size:,} bytes, but shape {self.shape} and type "
                f"{self.dtype} take {expected:,}\n\nhint: the archive is damaged; download or "
                "write it again"
            )
        is_known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if is_known and info.file_size > largest:
            raise ValueError(
                f"{self.where} cannot have {info.file_size:,} bytes, because "
                f"{info.compress_size:,} compressed bytes hold less\n\n"
                "hint: the archive is damaged; download or write it again"
            )

    def flat(self, step: int | None = None) -> Iterator[Array]:
        """Yield all elements in file order, `step` at a time, in a buffer that is reused."""
        if step is None:
            step = max(1, CHUNK_BYTES // max(1, self.dtype.itemsize))
        left = self.size
        buffer = np.empty(min(step, left), self.dtype)
        with self._open() as stream:
            while left:
                part = buffer[: min(step, left)]
                _fill(stream, as_bytes(part), self.where)
                left -= len(part)
                yield part
            # zipfile verifies the checksum when it reads past the last byte
            stream.read(1)

    def array(self, allocate: Allocate) -> Array:
        """Read the array into memory from `allocate`."""
        out = allocate(self.key, self.size, self.dtype)
        done = 0
        for part in self.flat():
            out[done : done + len(part)] = part
            done += len(part)
        return out.reshape(self.shape, order="F" if self.fortran else "C")

    def in_memory(self) -> Array:
        """Read the array into memory."""
        return self.array(allocate_in_memory)

    def rows(self) -> Rows:
        """Return the array as `Rows`; a vector becomes one column.

        An array in Fortran order is first copied to memory from `allocate`.

        Raises:
            ValueError: the array is not a table of numbers.
        """
        if len(self.shape) not in (1, 2) or self.dtype.kind not in "fiub":
            raise ValueError(
                f"{self.where} has shape {self.shape} and type {self.dtype}, not a table of "
                "numbers\n\nhint: features are (nodes, columns), floating point or integers"
            )
        num_rows = self.shape[0]
        num_columns = self.shape[1] if len(self.shape) == 2 else 1
        step = chunk_rows(num_columns, self.dtype.itemsize)

        def chunks(allocate: Allocate) -> Iterator[Array]:
            if self.fortran and num_columns > 1:
                table = self.array(allocate)
                for begin in range(0, num_rows, step):
                    yield np.ascontiguousarray(table[begin : begin + step])
            elif num_columns:
                for part in self.flat(step * num_columns):
                    yield part.reshape(-1, num_columns)

        return Rows(num_rows, num_columns, self.dtype, chunks, self.where)

    def edges(
        self, sizes: tuple[int, int], allocate: Allocate, progress: Progress
    ) -> tuple[Array, Array]:
        """Read and validate a (2, E) array as sources and targets, see `Source.edges`.

        `sizes` are the numbers of nodes of the types of the sources and of the targets.
        """
        if len(self.shape) != 2 or self.shape[0] != 2 or self.dtype.kind not in "iu":
            raise ValueError(
                f"{self.where} has shape {self.shape} and type {self.dtype}\n\n"
                "hint: edges are (2, edges) integers: sources, then targets"
            )
        num_edges = self.shape[1]
        ends = allocate_ends(sizes, num_edges, allocate)
        done = 0
        for part in self.flat((CHUNK_BYTES // self.dtype.itemsize) & ~1):
            if self.fortran:
                for end, ids, size in zip(ends, (part[0::2], part[1::2]), sizes, strict=True):
                    check_ends(ids, size, self.where, done // 2)
                    end[done // 2 : done // 2 + len(ids)] = ids
            else:
                split = min(max(num_edges - done, 0), len(part))
                firsts = done, done + split - num_edges
                pieces = zip(ends, (part[:split], part[split:]), firsts, sizes, strict=True)
                for end, ids, first, size in pieces:
                    check_ends(ids, size, self.where, first)
                    end[first : first + len(ids)] = ids
            done += len(part)
            progress("edges", done // 2, num_edges)
        return ends


def _fill(stream: IO[bytes], view: memoryview, where: str) -> None:
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"{where} ends {len(view) - done:,} bytes early")
        done += got


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ValueError with a hint for what a damaged archive raises."""
    try:
        yield
    except (*_BROKEN, OSError) as error:
        # errors of the disk have an errno; a wrong offset in the archive gives EINVAL
        is_disk_error = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_disk_error or "\n\nhint: " in str(error):
            raise
        raise ValueError(
            f"{path} is not a complete .npz archive: {error}\n\n"
            "hint: it is truncated or in another format; download or write it again"
        ) from error
