"""Files of several large arrays: written and read in pieces, atomically, with checksums.

A file is an uncompressed `.npz`, the zip archive of `numpy.savez`, with another member for
metadata. The archive has a CRC-32 of each member. Neither writing nor reading needs memory for more
than a piece of an array.
"""

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gcnzc._files import replacing
from gcnzc.system.row_memory import DAMAGED_HEADER

META = "meta.json"

# bytes that are written or read at once
PIECE_BYTES = 1 << 24

# what the modules that read archives and arrays raise for damaged ones
_DAMAGED = (
    *DAMAGED_HEADER,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    # of zipfile: an unsupported compression or version, and an encrypted member
    NotImplementedError,
    RuntimeError,
)
_HINT = "hint: restore the file from a copy, or write it again"


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write arrays and metadata to `path` atomically: the file has the old or the new content.

    Args:
        path: of the file; its folder exists.
        arrays: by name; C-contiguous.
        meta: what `json.dumps` accepts.

    Raises:
        OSError: the disk is full or not writable. The previous file remains.
    """
    with replacing(path) as partial, zipfile.ZipFile(partial, "w", allowZip64=True) as archive:
        # a fixed time, so that equal content is equal bytes
        archive.writestr(zipfile.ZipInfo(META), json.dumps(dict(meta)))
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member, np.lib.format.header_data_from_array_1_0(array)
                )
                data = _bytes_of(array)
                for begin in range(0, len(data), PIECE_BYTES):
                    member.write(data[begin : begin + PIECE_BYTES])


def read_meta(path: Path) -> dict[str, Any]:
    """Return the metadata of a file, without its arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or not one of `write_arrays`.
    """
    with _Archive(path) as archive:
        return archive.meta()


def read_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and dtype of each array by its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or not one of `write_arrays`.
    """
    with _Archive(path) as archive:
        return {name: archive.header(name) for name in archive.names()}


def read_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Read arrays from a file into memory that is given.

    The file is read twice: first to verify its checksums, so that a damaged file changes nothing.

    Args:
        path: of the file.
        arrays: by name, C-contiguous; overwritten. The file may have others too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or has no array of such a name, shape and dtype. Nothing is
            changed then.
    """
    verify_arrays(path)
    with _Archive(path) as archive:
        for name, array in arrays.items():
            if name not in archive.names():
                raise ValueError(
                    f"{path} has no array {name!r}, but {', '.join(archive.names()) or 'none'}"
                    f"\n\nhint: was it saved for other tables?"
                )
            shape, dtype = archive.header(name)
            if shape != array.shape or dtype != array.dtype:
                raise ValueError(
                    f"{path}: {name!r} is {dtype} of shape {shape} there, and {array.dtype} of "
                    f"shape {array.shape} here\n\nhint: was it saved for other tables?"
                )
        for name, array in arrays.items():
            with archive.open(name) as member:
                _read_header(member, path)
                data = _bytes_of(array)
                for begin in range(0, len(data), PIECE_BYTES):
                    piece = data[begin : begin + PIECE_BYTES]
                    piece[:] = member.read(len(piece))


def verify_arrays(path: Path) -> None:
    """Read a file of `write_arrays` to its end, and compare its checksums.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    with _Archive(path) as archive:
        archive.meta()
        for name in archive.names():
            archive.verify(name)


class _Archive:
    """An open file of `write_arrays`; errors of the archive become a ValueError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "_Archive":
        try:
            self._archive = zipfile.ZipFile(self.path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no file {self.path}\n\nhint: was the state saved there?"
            ) from None
        except _DAMAGED as error:
            raise self._damaged(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def names(self) -> list[str]:
        """Return the names of the arrays."""
        return [name.removesuffix(".npy") for name in self._archive.namelist() if name != META]

    def meta(self) -> dict[str, Any]:
        """Return the metadata."""
        try:
            return dict(json.loads(self._archive.read(META)))
        except (*_DAMAGED, OSError) as error:
            raise self._damaged(error) from error

    def open(self, name: str) -> IO[bytes]:
        """Open an array for reading."""
        try:
            return self._archive.open(f"{name}.npy")
        except (*_DAMAGED, OSError) as error:
            raise self._damaged(error) from error

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype of an array, which fit the size of its file."""
        with self.open(name) as member:
            shape, dtype = _read_header(member, self.path)
            size = self._archive.getinfo(f"{name}.npy").file_size - member.tell()
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{self.path} is damaged: {name!r} has {size:,} bytes, not those of {dtype} of "
                f"shape {shape}\n\n{_HINT}"
            )
        return shape, dtype

    def verify(self, name: str) -> None:
        """Read an array to its end, where the archive compares the checksum."""
        with self.open(name) as member:
            try:
                while member.read(PIECE_BYTES):
                    pass
            except (*_DAMAGED, OSError) as error:
                raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.path} is damaged, or not a file of tables and states: {error}\n\n{_HINT}"
        )


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_header(member: IO[bytes], path: Path) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"version {version} of the array format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged: {error}\n\n{_HINT}") from error
    return shape, dtype
