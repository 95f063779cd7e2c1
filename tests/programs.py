"""Python programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]


def run_python(*words: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's root, with changes of the environment; None is without."""
    changed = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=6 * HANG_S,
    )


def output_of(*words: object, **environment: str | None) -> str:
    """What a program prints that succeeds."""
    done = run_python(*words, **environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def output_of_compiled(*words: object, **environment: str | None) -> str:
    """What a program prints that executes the PTX of kernels.

    Triton chooses between its compiler and its interpreter when it is imported.
    """
    import triton

    from gcnzc.testing.triton_driver import SUPPORTED_VERSIONS

    if tuple(map(int, triton.__version__.split(".")[:2])) not in SUPPORTED_VERSIONS:
        pytest.skip(f"PTX of Triton {triton.__version__} is not executed")
    return output_of(*words, TRITON_INTERPRET=None, **environment)
