"""Preparations that stop themselves, so that a test can act while they are at work."""

import subprocess
import sys
import time
from pathlib import Path

from limits import HANG_S

PROGRAM = """
import os, signal, sys
from gcnzc.cli import main
from gcnzc.datasets import store

sync = store.sync

def stop(path):
    # all files are written, and the folder is not renamed yet
    store.sync = sync
    os.kill(os.getpid(), signal.SIGSTOP)
    sync(path)

store.sync = stop
sys.exit(main())
"""

# instead of `python -m gcnzc`
STOPS = [sys.executable, "-c", PROGRAM]


def wait_for_state(process: subprocess.Popen, state: str = "T") -> None:
    """Wait until /proc/PID/stat has this letter, such as T for a process that is stopped."""
    end = time.monotonic() + HANG_S
    while _state_of(process) != state:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def _state_of(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
