"""Files: written whole or not at all, and read with errors that name them."""

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from gcnzc._files import lock, other_process, replacing, write_text

_MFD_CLOEXEC = 1


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return values as JSON, in which numbers that are not finite are null."""
    return json.dumps(_finite(value), indent=indent, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as JSON to `path`, atomically; numbers that are not finite are null."""
    write_text(path, to_json(value, indent=2) + "\n")


def append_whole(path: Path, data: bytes) -> None:
    """Append `data` to `path`, or leave the file as it was.

    Raises:
        OSError: the disk is full or may not be written.
    """
    is_new = not path.exists()
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(data)
        try:
            # a disk that becomes full accepts a part first
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            if is_new:
                path.unlink(missing_ok=True)
            raise


def folder_identity(folder: Path) -> str | None:
    """Return what identifies a folder even if it is renamed; None if there is no folder."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return f"{found.st_dev}:{found.st_ino}"


@contextmanager
def locked_folder(folder: Path, run: Path | None = None) -> Iterator[None]:
    """Lock a folder until the end of the `with` or of the process.

    File systems without locks are accepted, without a lock.

    Args:
        folder: the folder.
        run: the run folder that the lock protects, for the message; `folder` itself if None.

    Raises:
        ValueError: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise ValueError(
                f"{other_process(descriptor)} is training in {run or folder}\n\n"
                "hint: wait for it, or end it first"
            )
        yield
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the user's cache folder, which need not exist.

    It is GCNZC_CACHE of the environment, or the folder gcnzc in XDG_CACHE_HOME or ~/.cache.
    """
    own = os.environ.get("GCNZC_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcnzc")


def read_json(path: Path, remedy: str = "was it edited? Start the run again") -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote.

    Args:
        path: of the file.
        remedy: the hint of the error for a damaged file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a JSON object.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__}, not an object")
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}\n\nhint: {remedy}") from error


def write_array(path: Path, array: numpy.ndarray) -> None:
    """Write `array` to `path` as .npy, atomically."""
    with replacing(path) as partial, partial.open("wb") as file:
        # to an open file, NumPy writes by itself, and its error does not say why that failed
        stream: Any = SimpleNamespace(write=file.write)
        numpy.save(stream, array)


def create_memory_file(label: str) -> int:
    """Create an empty anonymous memory file with close-on-exec; return its descriptor."""
    # some builds of Python have no os.memfd_create, because they were built for an older C library:
    # https://github.com/astral-sh/uv/issues/15081
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.memfd_create(label.encode(), _MFD_CLOEXEC)
    if file < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"memfd_create: {os.strerror(error)}")
    return int(file)
