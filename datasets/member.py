"""Read one array of an `.npz` archive in order, without holding it in memory.

A stored or a deflated member of any size is read through a small buffer, and the zip's own checksum
is held against it at the end.

Letters: N rows, D columns, E edges.
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
    as_bytes,
    chunk_rows,
    in_memory,
)
from gcnzc.datasets.source import check_ends, node_dtype

# of deflate; see https://zlib.net/zlib_tech.html
MOST_COMPRESSED = 1032
# what zipfile, its codecs and numpy's parser of headers raise for bytes that are not theirs
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(tokenize.TokenError, SyntaxError, RecursionError),
    *(ValueError, TypeError, KeyError, OverflowError),
    # of a compression or version that zipfile does not know, and of an encrypted member
    *(NotImplementedError, RuntimeError),
)


class Archive:
    """The arrays of an `.npz`, by name; only their headers are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no whole `.npz`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}\n\nhint: give the path of an .npz archive")
        with _whole(path), zipfile.ZipFile(path) as archive:
            self.keys = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def member(self, key: str) -> "Member":
        """The array `key`.

        Raises:
            ValueError: there is none, or it is of Python objects.
        """
        if key not in self.keys:
            found = ", ".join(self.keys) or "nothing"
            raise ValueError(f"{self.path} has no array {key}\n\nhint: it has {found}")
        return Member(self.path, key)

    def array(self, key: str) -> Array:
        """The array `key`, whole, in memory."""
        return self.member(key).array(in_memory)


class Member:
    """One array of an archive: its shape and type, and ways to read it."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        with self._open():
            pass
        if self.dtype.kind not in "fiubUS":
            raise ValueError(
                f"{path}: the array {key} is of type {self.dtype}\n\n"
                "hint: only plain numbers are read; Python objects would have to be unpickled"
            )
        self._check_size()

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.path} ({self.key})"

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """The member behind its header, which is read."""
        with (
            _whole(self.path),
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
        """Demand that the member can be as large as its header says, before memory is made."""
        info = self._info
        wanted = self._header_bytes + self.size * self.dtype.itemsize
        most = info.compress_size * (
            1 if info.compress_type == zipfile.ZIP_STORED else MOST_COMPRESSED
        )
        most += 1024  # a few bytes of rounding
        if min(self.shape, default=0) < 0 or info.file_size != wanted:
            raise ValueError(
                f"{self.where} has {info.file_size:,} bytes, but shape {self.shape} and type "
                f"{self.dtype} take {wanted:,}\n\nhint: the archive is broken; get it again"
            )
        is_known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if is_known and info.file_size > most:
            raise ValueError(
                f"{self.where} cannot have {info.file_size:,} bytes, as {info.compress_size:,} "
                "compressed bytes hold less\n\nhint: the archive is broken; get it again"
            )

    def flat(self, step: int | None = None) -> Iterator[Array]:
        """All elements in the order of the file, `step` at a time.

        Each array is overwritten by the next one.
        """
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
            # reading past the last byte is what makes zipfile compare its checksum
            stream.read(1)

    def array(self, allocate: Allocate) -> Array:
        """The whole array, in what `allocate` gives."""
        out = allocate(self.key, self.size, self.dtype)
        done = 0
        for part in self.flat():
            out[done : done + len(part)] = part
            done += len(part)
        return out.reshape(self.shape, order="F" if self.fortran else "C")

    def rows(self) -> Rows:
        """The array as rows that are read chunk by chunk; one dimension is one column.

        Columns that lie one behind the other in the file are first copied to what `allocate` gives.

        Raises:
            ValueError: it is no table of numbers.
        """
        if len(self.shape) not in (1, 2) or self.dtype.kind not in "fiub":
            raise ValueError(
                f"{self.where} has shape {self.shape} and type {self.dtype}, which is no table of "
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

    def edges(self, num_nodes: int, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """The array, which is (2, E), as sources and destinations, checked; see `Source.edges`."""
        if len(self.shape) != 2 or self.shape[0] != 2 or self.dtype.kind not in "iu":
            raise ValueError(
                f"{self.where} has shape {self.shape} and type {self.dtype}\n\n"
                "hint: edges are (2, edges) integers: sources, then destinations"
            )
        num_edges = self.shape[1]
        dtype = node_dtype(num_nodes)
        ends = allocate("sources", num_edges, dtype), allocate("destinations", num_edges, dtype)
        done = 0
        for part in self.flat((CHUNK_BYTES // self.dtype.itemsize) & ~1):
            if self.fortran:
                for end, ids in zip(ends, (part[0::2], part[1::2]), strict=True):
                    check_ends(ids, num_nodes, self.where, done // 2)
                    end[done // 2 : done // 2 + len(ids)] = ids
            else:
                split = min(max(num_edges - done, 0), len(part))
                pieces = ((ends[0], part[:split], done), (ends[1], part[split:], done + split))
                for end, ids, place in pieces:
                    first = place if end is ends[0] else place - num_edges
                    check_ends(ids, num_nodes, self.where, first)
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
def _whole(path: Path) -> Iterator[None]:
    """What a broken archive raises, in words."""
    try:
        yield
    except (*_BROKEN, OSError) as error:
        # the disk's own faults have a number; a wrong offset in the archive has EINVAL
        is_of_disk = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_of_disk or "\n\nhint: " in str(error):
            raise
        raise ValueError(
            f"{path} is no whole .npz archive: {error}\n\n"
            "hint: it was cut short or is of another kind; get or write it again"
        ) from error
