"""Errors of the command line: their messages, hints and exit statuses."""

import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Iterator

from gcnzc.train.errors import Interrupted, SavedRun

FAILED, MISUSED = 1, 2


DEBUG = "--debug"


UNKNOWN_REMEDY = f"{DEBUG} shows the traceback, which helps to report this"


# parts of the error messages of numpy's and torch's allocators
NO_MEMORY = ("can't allocate memory", "DefaultCPUAllocator", "not enough memory")


# errors that may be gone when the workers are restarted
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class UsageError(Exception):
    """The command line is not valid."""


def usage_error(error: Exception, command: str) -> UsageError:
    """Return the error of an option that is not valid; its hint, if it has none, is the help."""
    text = str(error)
    if "\n\nhint: " not in text:
        text += f"\n\nhint: `gcnzc {command} --help` lists the options and their defaults"
    return UsageError(text)


class OutputClosed(Exception):
    """The reader of this command's stdout has closed the pipe."""


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; raised as an exception so that partial files are removed."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the `with`, raise KeyboardInterrupt on SIGTERM, as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def complain(text: str, status: int) -> int:
    """Write an error message and its hint to standard error, one line each; return `status`."""
    wrong, _, remedy = text.partition("\n\n")
    remedy = remedy.removeprefix("hint:").strip() or UNKNOWN_REMEDY
    with contextlib.suppress(BrokenPipeError):
        print(f"error: {' '.join(wrong.split())}", file=sys.stderr)
        print(f"hint: {' '.join(remedy.split())}", file=sys.stderr, flush=True)
    return status


def report(error: BaseException) -> int:
    """Print an error, or where a run was stopped; return the exit status.

    After a signal it is 128 and the number of the signal, as in a shell.
    """
    if isinstance(error, SavedRun):
        with contextlib.suppress(BrokenPipeError):
            print(error, file=sys.stderr, flush=True)
        return 128 + error.signal if error.signal else FAILED
    status = MISUSED if isinstance(error, UsageError) else FAILED
    if isinstance(error, KeyboardInterrupt):
        is_terminated = isinstance(error, Terminated)
        status = 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)
    wrong, gap, remedy = message_of(error).partition("\n\n")
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return complain(f"{wrong}{notes}{gap}{remedy}", status)


def message_of(error: BaseException) -> str:
    """Return the message of an error, and after an empty line its hint."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        how = "terminated" if isinstance(error, Terminated) else "interrupted"
        return f"{how}\n\nhint: complete files are kept, and partial ones are removed"
    if "\n\nhint:" in text:
        return text
    if isinstance(error, MemoryError) or any(sign in text for sign in NO_MEMORY):
        return _memory_message(text)
    if isinstance(error, OSError):
        return _system_message(error)
    if text.startswith("CUDA"):
        return _gpu_message(text)
    if isinstance(error, ValueError | RuntimeError | Interrupted | UsageError) and text:
        return text
    return f"unexpected {type(error).__name__}: {text}"


def _memory_message(text: str) -> str:
    detail = text.splitlines()[0] if text else "an allocation failed"
    return (
        f"not enough memory: {detail}\n\n"
        "hint: use a smaller --batch-size, --hidden, --threads, or for link prediction "
        "num_negatives; the features of a folder that `gcnzc prepare` wrote need not fit into "
        "memory"
    )


def _gpu_message(text: str) -> str:
    wrong = text.splitlines()[0]
    if wrong.startswith("CUDA out of memory"):
        return f"{wrong}\n\nhint: use a smaller --batch-size or --hidden, or --features host"
    return (
        f"the GPU failed: {wrong}\n\nhint: `nvidia-smi` shows whether it still works; "
        "`gcnzc train --resume RUN` resumes from the last checkpoint"
    )


def _system_message(error: OSError) -> str:
    text = str(error) or f"unexpected {type(error).__name__}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the disk"
        return f"no space left on {where}\n\nhint: free space on it, or write to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}\n\nhint: choose a path that this user may write to"
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:
        return (
            f"{error.filename} is not a folder, since a file is in its place\n\n"
            "hint: choose another path, or rename the file"
        )
    return f"{text}\n\nhint: check the path and the disk"
