"""Report SIGBUS, the signal for an access to a memory-mapped file beyond its end, by a message.

Python's own signal handlers run between bytecodes, so that the access would be repeated forever
before one runs. The handler here is called by the kernel in the thread that made the access.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SA_SIGINFO = 4  # from <bits/sigaction.h>: the handler takes three arguments
_ADDRESS = 16  # offset of si_addr in siginfo_t


class _SigAction(ctypes.Structure):
    """struct sigaction of the C library."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


@contextmanager
def handled_bus_errors(handle: Callable[[str], int]) -> Iterator[None]:
    """Within the `with`, call `handle` on SIGBUS, and end the process with the status it returns.

    Args:
        handle: called with a message that names the file.
    """
    libc = ctypes.CDLL(None)

    def on_bus_error(number: int, info: int, context: int | None) -> None:
        status = 1
        try:
            status = handle(_message(_mapped_file(ctypes.c_size_t.from_address(info + _ADDRESS))))
        finally:
            # a return would repeat the access
            os._exit(status)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    handler = kind(on_bus_error)
    action = _SigAction(ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    before = _SigAction()
    libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGBUS), ctypes.byref(before), None)


def _mapped_file(address: ctypes.c_size_t) -> str:
    """Return the path of the file that is mapped at an address; empty if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # such as "7f0a3b000000-7f0a3b021000 r--s 00000000 fe:00 2196204   /data/features.npy"
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address.value < end:
            return path if path.startswith("/") else ""
    return ""


def _message(path: str) -> str:
    if not path:
        return (
            "the machine could not read a part of its memory (SIGBUS)\n\n"
            "hint: `dmesg` may name the cause; `gcnzc train --resume RUN` resumes a run"
        )
    return (
        f"{path} was truncated while it was in use, or its disk failed\n\n"
        "hint: restore the file, for example by preparing the folder again; then `gcnzc train "
        "--resume RUN` resumes a run from its last checkpoint"
    )
