"""Kernels run on the GPU if there is one, else on the CPU under Triton's interpreter."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

# Triton reads this when a kernel is decorated, so it must be set before gcnzc is imported. With the
# plugin `ptx_plugin` it is 0: compiled kernels are executed.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# every gather looks at its ids
os.environ["GCNZC_CHECK_IDS"] = "1"
# no tuning profile of this user changes how a test runs
os.environ["GCNZC_CACHE"] = tempfile.mkdtemp(prefix="gcnzc-cache-")
# idle OpenMP threads sleep at once: other test processes and workers need their cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# pictures are written, never shown
os.environ["MPLBACKEND"] = "Agg"

import numpy as np
import pytest
import triton
from triton.runtime import interpreter

from tests.fast_interpreter import accept_new_numpy, speed_up_interpreter
from tests.ptx_launches import evenly_spaced
from tests.slow_cases import covering

ROOT = Path(__file__).parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
# numba's cache of compiled kernels
COMPILED = "kernels/**/*.nbc"


def _interpreter_works() -> bool:
    """Whether Triton's interpreter goes with this numpy: before 3.2 it misreads memory with 2."""
    of_triton = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return of_triton >= (3, 2) or int(np.__version__.split(".")[0]) < 2


def _skip(*_args: object, **_options: object) -> None:
    pytest.skip(f"Triton {triton.__version__} does not interpret with numpy {np.__version__}")


# CI must not go without its kernels: there the tests fail instead
if not torch.cuda.is_available() and not _interpreter_works() and not os.environ.get("CI"):
    interpreter.GridExecutor.__call__ = _skip


def pytest_report_header() -> str:
    """Versions of the two packages that decide what a kernel is compiled to."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"torch {torch.__version__}, Triton {triton.__version__}, {device}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-cases",
        type=int,
        help="the most cases of each test with the marker `triton`, evenly spaced",
    )
    parser.addoption(
        "--cover",
        action="store_true",
        help="of each test, few cases that together have each value of each parameter",
    )


def pytest_configure(config: pytest.Config) -> None:
    accept_new_numpy()
    speed_up_interpreter(checks_overflow=config.getoption("--triton-cases") is None)
    if not hasattr(config, "workerinput"):
        # tests that are stopped at a limit of time show the failures that there were
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a new checkout, compile bytecode and kernels once, and not in each process at a time."""
    is_parallel = session.config.getoption("numprocesses", None)
    if hasattr(session.config, "workerinput") or not is_parallel or any(ROOT.glob(COMPILED)):
        return
    sys.stdout.write("compiling kernels and bytecode\n")
    commands = (
        ("tests.compile_kernels", "models"),
        ("tests.compile_kernels", "optimizers"),
        ("pytest", "--collect-only", "-qq"),
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in commands
    ]
    # a failure shows in the tests
    for process in processes:
        process.wait()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["GCNZC_CACHE"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collections, which tests start often.

    Then start the process from which workers are forked, if a test needs it.
    """
    gc.collect()
    gc.freeze()
    if "processes" in sys.modules:
        sys.modules["processes"].start_fork_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, for `--numprocesses auto`: many tests wait for processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        needs_gpu = pytest.mark.skip(reason="no CUDA device here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(needs_gpu)
    most_cases = config.getoption("--triton-cases")
    removed: set[pytest.Item] = set()
    marked = [item for item in items if item.get_closest_marker("triton")]
    if most_cases is not None:
        removed |= {*marked} - {*evenly_spaced(marked, most_cases)}
    if config.getoption("--cover"):
        others = [item for item in items if not item.get_closest_marker("triton")]
        removed |= {*others} - {*covering(others)}
    config.hook.pytest_deselected(items=list(removed))
    items[:] = [item for item in items if item not in removed]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    # a hundred times as fast as `torch.manual_seed`, which ten thousand tests would call
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs; without it a test skips, but not in CI."""
    if not SHARED_DATA.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no folder {SHARED_DATA}, which CI must have")
        pytest.skip(f"no real graphs at {SHARED_DATA}")
    return SHARED_DATA
