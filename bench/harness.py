"""Time functions, and record the results.

A record is one JSON line with the case, the time, the machine, the commit and the versions. Lines
are appended to files in `bench/results/`, and never changed; `bench/docs` draws and tabulates them.
There, every line belongs to a commit: with uncommitted changes to code, or without a git checkout,
nothing is recorded. The environment variable GCNZC_COMMIT names the commit of a copy without git,
and turns these checks off. GCNZC_RESULTS names another folder, which takes lines of any tree.
`side_by_side` interleaves the calls of functions that are compared, so that a temporary slowdown of
the machine affects all of them.
"""

import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from bench.gpu.clocks import gpu_state
from gcnzc.tune.search import interleave

ROOT = Path(__file__).resolve().parents[1]
OWN_RESULTS = ROOT / "bench" / "results"
RESULTS = Path(os.environ.get("GCNZC_RESULTS") or OWN_RESULTS).resolve()
# what results depend on; between two benchmarks, lines and pages change
CODE = ("gcnzc", "kernels", "datasets", "bench", "pyproject.toml", "constraints.txt")
NO_CODE = ":(exclude)bench/results"
PACKAGES = ["torch", "triton", "numba", "numpy"]


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over `calls` calls after the warm-up."""

    median_s: float
    fast_s: float  # a fifth of the calls were faster
    slow_s: float  # a fifth of the calls were slower
    calls: int


def measure(fn: Callable[[], object], *, calls: int = 50, warmup: int = 5) -> Timing:
    """Time `fn`, waiting for the GPU before and after each call."""
    return side_by_side({"fn": fn}, rounds=calls, warmup=warmup)["fn"]


def side_by_side(
    functions: Mapping[str, Callable[[], object]], rounds: int = 15, *, warmup: int = 2
) -> dict[str, Timing]:
    """Time several functions: a round calls each of them once, in a random order.

    Args:
        functions: functions to time, by name; the GPU is waited for before and after each call.
        rounds: number of timed calls of each function, at least 2.
        warmup: number of rounds before them, which are not timed.

    Returns:
        The timing of each function by its name.
    """
    shuffler = random.Random(0)
    times = interleave(
        functions,
        lambda name: _time_once(functions[name]),
        rounds,
        warm_up=warmup,
        shuffler=shuffler,
    )
    return {name: timing_of(seconds) for name, seconds in times.items()}


def record(
    name: str, case: Mapping[str, Any], timing: Timing | None = None, **derived: Any
) -> dict[str, Any]:
    """Print one result, append it to `results/<name>.jsonl`, and return the line's content.

    Args:
        name: name of the file without its suffix.
        case: fields that distinguish the measured case from the other lines of the file.
        timing: timing of the case, if it was timed.
        derived: other results, whose names end in their units.

    Raises:
        SystemExit: the folder is `bench/results/`, GCNZC_COMMIT is not set, and code has changes
            that are not committed, or is not in a git checkout.
    """
    check_code_is_committed()
    timed = {} if timing is None else asdict(timing)
    line = dict(case) | timed | derived | machine()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    shown = [f"{key}={value}" for key, value in case.items()]
    if timing is not None:
        shown.append(f"{timing.median_s * 1e3:.3f} ms")
    shown += [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in derived.items()]
    print(name, *shown, sep="  ", flush=True)
    return line


def machine() -> dict[str, Any]:
    """Return the fields of a record that describe the machine, the versions and the commit.

    The environment variable GCNZC_COMMIT replaces the commit of the git repository. With a GPU,
    `gpu_state` has its clocks, temperature, power and PCIe link.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": os.environ.get("GCNZC_COMMIT") or commit(ROOT) or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver() if torch.cuda.is_available() else "none",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **_gpu_state(),
    } | {name: _version(name) for name in PACKAGES}


def check_code_is_committed() -> None:
    """Check that `record` may add lines; call it before a long measurement.

    Raises:
        SystemExit: see `record`.
    """
    if RESULTS != OWN_RESULTS or os.environ.get("GCNZC_COMMIT"):
        return
    if not commit(ROOT):
        raise SystemExit(
            f"error: results belong to a commit, but git finds none in {ROOT}\n"
            "hint: set GCNZC_COMMIT; with GCNZC_RESULTS=FOLDER, results go to another folder"
        )
    if changed := _changed_code(ROOT):
        raise SystemExit(
            f"error: results belong to a commit, but the code has changes: {', '.join(changed)}\n"
            "hint: commit them first; with GCNZC_RESULTS=FOLDER, results go to another folder"
        )


@cache
def commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with `-dirty` if code has changes that are not committed.

    It is empty without git, a checkout or a commit.
    """
    found = _git(root, "describe", "--always").strip()
    return f"{found}-dirty" if found and _changed_code(root) else found


@cache
def _changed_code(root: Path) -> list[str]:
    """Return the files of code with changes that are not committed."""
    status = _git(root, "status", "--porcelain", "--", *CODE, NO_CODE)
    return [line[3:] for line in status.splitlines()]


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        ).stdout
    except FileNotFoundError:  # no git
        return ""


def _gpu_state() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # cached for a second, in which many lines may be recorded
    return {"gpu_state": _gpu_state_at(str(getattr(properties, "uuid", "")), int(time.monotonic()))}


@lru_cache(1)
def _gpu_state_at(uuid: str, second: int) -> dict[str, float | None]:
    return gpu_state(uuid)


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
        if found:
            return found[0]
    return str(torch.version.cuda)


def _time_once(fn: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    wait()
    begin = time.perf_counter()
    fn()
    wait()
    return time.perf_counter() - begin


def _nothing() -> None:
    pass


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the median and the outer quintiles of the times of at least two calls."""
    quintiles = statistics.quantiles(seconds, n=5)
    return Timing(statistics.median(seconds), quintiles[0], quintiles[3], len(seconds))


def _version(name: str) -> str:
    # prefer the version of an imported module, which may come from another environment
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
