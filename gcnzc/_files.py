"""Write files atomically and lock them; every package may import this module."""

import errno
import fcntl
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 24


class FullDisk(OSError):
    """A disk or a quota is full; the message says what helps."""

    def __str__(self) -> str:
        return (
            f"no space left on {self.filename}\n\nhint: free space on it, or write to another disk"
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` at the end, or is removed after an error.

    The file is on the disk before it replaces `path`, so that a crash of the machine leaves the
    previous file or the whole new one. The temporary path has the suffix of `path`, from which some
    libraries choose a format. If `path` is a symbolic link, the file that it leads to is replaced.

    Raises:
        FullDisk: the disk or a quota is full. The previous file remains.
        OSError: the disk is not writable. The previous file remains.
        ValueError: `path` is a device, a pipe or a folder.
    """
    check_regular(path)
    path = path.resolve()
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except OSError as error:
        # writes to an open file do not name it
        if error.errno is not None and error.filename in (None, str(partial), partial):
            error.filename = str(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDisk(error.errno, error.strerror, error.filename) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def remove_partial(folder: Path) -> None:
    """Remove temporary files of `replacing` that killed processes left in or below `folder`."""
    for path in folder.rglob(".*.partial*"):
        found = re.fullmatch(r"\..+\.(\d+)\.partial(\..*)?", path.name)
        # such as `gcnzc plot`, which may be writing
        if found is None or Path("/proc", found[1]).exists():
            continue
        # a file that is left on a read-only disk does no harm
        with suppress(OSError):
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, atomically."""
    with replacing(path) as partial:
        partial.write_text(text)


def check_regular(path: Path) -> None:
    """Check that `path` is a regular file or does not exist, so that it may be replaced.

    Raises:
        ValueError: it is a device, such as /dev/null, a pipe or a folder.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(
            f"{path} is not a regular file, but a device, a pipe or a folder\n\n"
            "hint: name a file, which is replaced if it exists"
        )


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder such as a renamed file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder, until it is closed or the process ends.

    File systems without locks are accepted, without a lock.

    Args:
        descriptor: of the file or folder.
        wait: wait for a process that has locked it.

    Returns:
        False if another process has locked it, and `wait` is False.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def pid_of_lock(descriptor: int) -> int | None:
    """Return the id of the process that has locked a file or folder; None if it is not known.

    The kernel lists the locks of this machine in /proc/locks, see proc(5).

    Args:
        descriptor: of the file or folder, opened by any process.
    """
    found = os.fstat(descriptor)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # such as "1: FLOCK  ADVISORY  WRITE 9843 fe:00:2196204 0 EOF"; of a waiting process "1: ->"
        words = line.split()
        if words[1] == "FLOCK" and words[5] == f"{device}:{found.st_ino}":
            # of a process outside this container the kernel gives no id
            return int(words[4]) if int(words[4]) > 0 else None
    return None


def other_process(descriptor: int) -> str:
    """Return "another process", with its id if it is known, for messages."""
    pid = pid_of_lock(descriptor)
    return "another process" if pid is None else f"another process (pid {pid})"


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Create the file `path` and lock it until the end of the `with`; wait for other processes."""
    with path.open("w") as file:
        lock(file.fileno(), wait=True)
        yield


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file as eight hexadecimal digits.

    CRC-32 is computed at over 3 GB/s, three times the rate of SHA-256.
    """
    code = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            code = zlib.crc32(block, code)
    return f"{code:08x}"
