"""Check within ten minutes that gcnzc works on a GPU, and measure it.

    python -m bench.gpu.session                     all stages; results in a new folder under runs/
    python -m bench.gpu.session --out FOLDER        results in FOLDER
    python -m bench.gpu.session --stages driver     some of the stages
    python -m bench.gpu.session --dry-run           all stages on a machine without a GPU

A stage runs one or more commands, one after another, which share a time limit. Each runs in a
process group of its own, which is killed when the command ends. The next stage starts whether a
stage passed or failed.

    compile     compile the gathers for this GPU, into a Triton cache that all stages use, and
                record the registers and the memory that they need. --cache FOLDER reuses a cache
    driver      read the driver's attributes, and find out how it treats registered host memory
    locking     tests of the driver's calls, page-locking and tables
    gathers     rows of 100, 602 and 1433 columns, under compute-sanitizer where it is installed
    loader      tests of the loader and the feature cache, with 4 threads
    train       two epochs of training, with a trace
    bench       python -m bench.gpu.suite link gather --quick
    comparison  compare the measurements with the model of PCIe traffic, the recorded resources of
                kernels, and published figures, see bench/gpu/comparison.py
    kernels     tests of the kernels, with 16 processes

FOLDER has `session.jsonl`, one line for each stage with its status, the GPU, its driver and its
clocks, written when the stage ends; STAGE.log, the output of each stage; `results`, the
measurements; and `comparison.jsonl`. `--results bench/results` adds the measurements to those of
the repository. The session prints a table of the stages and the comparison.

The exit status is 0 if every stage passed or was skipped, 1 if a stage failed or timed out, and 2
without a CUDA device.

A dry run executes the same code on fakes: `tests/fake_cuda.py` for torch.cuda and the driver,
`tests/fake_tools` for nvidia-smi and compute-sanitizer, Triton's interpreter for kernels, and small
inputs. Kernels are compiled for each --arch. Tests are collected but not run. Limits are ten times
as long. A dry run finds errors in this code; its figures have no meaning.

The session needs this checkout, and torch, Triton, numba and pytest (with pytest-xdist) on
PYTHONPATH.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from bench.gpu.clocks import gpu_state

ROOT = Path(__file__).parents[2]
SESSION_S = 600.0
IDENTIFY_S = 30.0  # limit of `identify`, part of the session
DRY_RUN_FACTOR = 10  # for all limits, since interpreted kernels on a CPU are slow
LEAST_S = 1.0  # a stage with less time left is skipped
SANITIZER = "compute-sanitizer"
SANITIZER_ERROR = "9"  # exit status
FAILED, NO_GPU = 1, 2
OUT_HINT = "hint: give --out a folder, or a path at which one can be created"
TABLE = "comparison.txt"
STAGES = (
    *("compile", "driver", "locking", "gathers", "loader", "train", "bench", "comparison"),
    "kernels",
)

Command = Sequence[str | Path]


@dataclass(frozen=True)
class Stage:
    """Commands that a session runs one after another, each in a process group of its own."""

    name: str
    limit_s: float  # of all commands together
    commands: Sequence[Command]
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""  # shown with the status


def main() -> int:
    """Run the session of the command line, and return its exit status."""
    options = _options()
    out = options.out or ROOT / "runs" / time.strftime("gpu-session-%Y%m%d-%H%M%S")
    environment, began_s = _environment(options, out), time.monotonic()
    about = identify(options, environment)
    if about is None:
        print(
            "error: torch finds no CUDA device\n\n"
            "hint: `gcnzc check` shows what is missing; --dry-run runs without a GPU",
            file=sys.stderr,
        )
        return NO_GPU
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: no folder {out}: {error.strerror}\n\n{OUT_HINT}", file=sys.stderr)
        return FAILED
    stages = [
        stage
        for stage in stages_of(options, out, environment["PATH"])
        if stage.name in options.stages
    ]
    factor = DRY_RUN_FACTOR if options.dry_run else 1
    stages = [
        replace(stage, limit_s=options.stage_limit_s or factor * stage.limit_s) for stage in stages
    ]
    limit_s = options.limit_s or factor * SESSION_S + began_s - time.monotonic()
    # like Ctrl-C, so that no process of a stage continues
    signal.signal(signal.SIGTERM, _interrupt)
    lines = []
    try:
        for line in run_stages(stages, out, limit_s, environment, about):
            lines.append(line)
            print(f"{line['stage']}: {line['status']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\n".join(table_of(lines)))
        print(f"error: interrupted\n\nhint: {out} has the finished stages", file=sys.stderr)
        return FAILED
    print("\n".join(table_of(lines)))
    if "comparison" in options.stages and (out / TABLE).exists():
        print((out / TABLE).read_text(), end="")
    print(out / "session.jsonl")
    return 0 if all(line["status"].startswith(("passed", "skipped")) for line in lines) else 1


def identify(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the machine, the GPU and its driver; None without a CUDA device.

    If that fails or takes too long, the reason is printed, and the result is empty.
    """
    command = [*_module("bench.gpu.device_checks", options), "identify"]
    limit_s = IDENTIFY_S * (DRY_RUN_FACTOR if options.dry_run else 1)
    with tempfile.TemporaryFile("w+") as found, tempfile.TemporaryFile("w+") as errors:
        code = _run(command, limit_s, found.fileno(), environment, errors.fileno())
        if code == NO_GPU:
            return None
        if code == 0:
            found.seek(0)
            return json.load(found)
        errors.seek(0)
        print(errors.read(), file=sys.stderr)
    if code is None:
        print(
            f"error: the identification of the GPU timed out after {limit_s:g} s", file=sys.stderr
        )
    return {}


def _module(name: str, options: argparse.Namespace) -> list[str]:
    """Return the command that runs a module: in a dry run, with a fake CUDA device."""
    return [sys.executable, *(["-m", "fake_cuda"] if options.dry_run else []), "-m", name]


def stages_of(options: argparse.Namespace, out: Path, path: str) -> list[Stage]:
    """Return all stages of a session, in order; their limits add up to less than `SESSION_S`.

    Args:
        options: of the command line.
        out: folder of the session.
        path: folders in which programs are found.
    """
    dry = options.dry_run
    checks = _module("bench.gpu.device_checks", options)
    small = ["--small"] if dry else []
    architectures = [word for arch in options.arch or [80, 90] for word in ("--arch", str(arch))]
    compilation = [*checks, "compile", "--out", out / "kernels.jsonl", *(architectures * dry)]
    gathers, note = [*checks, "gathers", *small], f"{SANITIZER} is not installed"
    sanitizer = _sanitizer(path)
    if sanitizer is not None:
        gathers = [sanitizer, "--error-exitcode", SANITIZER_ERROR, *gathers]
        note = f"under {sanitizer}"
    results = options.results or out / "results"
    graph, run = out / "graph", out / "run"
    gcnzc = _module("gcnzc", options)
    size = ["--nodes", "500", "--edges", "3000"] if dry else []
    train = [*gcnzc, "train", graph, "--epochs", "2", "--trace", "20", "--device", "cuda"]
    suite = [*_module("bench.gpu.suite", options), "--results", results]
    suite += ["all", "--small"] if dry else ["link", "gather", "--quick"]
    comparison = [*_module("bench.gpu.comparison", options), out, "--results", results]
    threads = {"OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"}
    return [
        Stage("compile", 60, [compilation], {"TRITON_INTERPRET": "0"}),
        Stage("driver", 25, [[*checks, "driver", "--out", out / "driver.json"]]),
        _tests(
            options,
            "locking",
            50,
            ["system/test_cuda_driver.py", "system/test_page_lock.py", "features/test_table.py"],
        ),
        Stage("gathers", 70, [gathers], note=note),
        replace(
            _tests(options, "loader", 80, ["loader/test_loader.py", "features/test_cache.py"]),
            environment=threads,
        ),
        Stage("train", 80, [[*gcnzc, "make", graph, *size], [*train, "--out", run]]),
        Stage("bench", 100, [suite]),
        Stage("comparison", 20, [comparison]),
        _tests(options, "kernels", 100, ["kernels"], num_processes=16),
    ]


def _tests(
    options: argparse.Namespace,
    name: str,
    limit_s: float,
    files: Sequence[str],
    num_processes: int = 1,
) -> Stage:
    """Return a stage that runs tests; in a dry run, it collects them."""
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow"]
    if options.dry_run:
        command += ["--collect-only"]
    elif num_processes > 1 and find_spec("xdist") is not None:
        command += ["-n", str(num_processes)]
    command += [ROOT / "tests" / file for file in files]
    return Stage(name, limit_s, [command], note="collected, not run" * options.dry_run)


def run_stages(
    stages: Sequence[Stage],
    out: Path,
    limit_s: float,
    environment: Mapping[str, str],
    about: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run stages in order; yield the line of each, after it is written to `session.jsonl`.

    Args:
        stages: see `Stage`.
        out: folder of lines and logs.
        limit_s: limit of all stages; the limit of a stage is reduced to what is left.
        environment: environment variables of the processes.
        about: the GPU, see `identify`.
    """
    end_s, about = time.monotonic() + limit_s, about or {}
    for stage in stages:
        began_s, log = time.monotonic(), out / f"{stage.name}.log"
        limit = min(stage.limit_s, end_s - began_s)
        status = "skipped: no time is left"
        if limit >= min(LEAST_S, stage.limit_s):
            status = _run_stage(stage, limit, log, {**environment, **stage.environment})
        line: dict[str, Any] = {
            "stage": stage.name,
            "status": status,
            "seconds": round(time.monotonic() - began_s, 2),
            "limit_s": round(max(limit, 0.0), 2),
            "log": str(log),
        }
        line |= {"note": stage.note} if stage.note else {}
        line |= {name: about[name] for name in ("gpu", "driver", "commit") if name in about}
        if "uuid" in about:
            line["gpu_state"] = gpu_state(about["uuid"], environment["PATH"])
        with (out / "session.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield line


def _run_stage(stage: Stage, limit_s: float, log: Path, environment: dict[str, str]) -> str:
    """Run the commands of a stage, and return its status."""
    end_s = time.monotonic() + limit_s
    with log.open("w") as file:
        for command in stage.commands:
            print("$", *command, file=file, flush=True)
            try:
                code = _run(command, end_s - time.monotonic(), file.fileno(), environment)
            except OSError as error:
                return f"failed: {error}"
            if code is None:
                return f"timed out after {round(limit_s, 1):g} s"
            if code != 0:
                return f"failed: exit {code}" if code > 0 else f"failed: signal {-code}"
    return "passed"


def _run(
    command: Command,
    limit_s: float,
    log: int,
    environment: Mapping[str, str],
    errors: int | None = None,
) -> int | None:
    """Run a command and return its exit status; None on timeout. Its process group is killed.

    Args:
        command: the program and its arguments.
        limit_s: limit of its time.
        log: file descriptor of its output.
        environment: environment variables.
        errors: file descriptor of its error messages; by default, `log`.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log if errors is None else errors,
        start_new_session=True,
    )
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # also processes that the command has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Format the lines of a session as a table."""
    from gcnzc.cli.reports.tables import align_columns

    rows = [("stage", "seconds", "limit", "status")]
    for line in lines:
        status = line["status"] + (f" ({line['note']})" if "note" in line else "")
        rows.append((line["stage"], f"{line['seconds']:.1f}", f"{line['limit_s']:.0f}", status))
    return align_columns(rows, left=(0, 3))


def _environment(options: argparse.Namespace, out: Path) -> dict[str, str]:
    """Return the environment of all stages: this checkout first, and one kernel cache."""
    modules = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = os.environ.get("PATH", os.defpath)
    if options.dry_run:
        modules.insert(1, str(ROOT / "tests"))
        programs = f"{ROOT / 'tests' / 'fake_tools'}{os.pathsep}{programs}"
    cache = (options.cache or out / "triton-cache").resolve()
    return {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "TRITON_CACHE_DIR": str(cache),
        "GCNZC_CACHE": str((out / "cache").resolve()),
        "TRITON_INTERPRET": str(int(options.dry_run)),
    }


def _sanitizer(path: str) -> str | None:
    """Return the path of compute-sanitizer; None if it is not installed."""
    return shutil.which(SANITIZER, path=f"{path}{os.pathsep}/usr/local/cuda/bin")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the session")
    parser.add_argument(
        "--results", type=Path, help="folder of the measurements; default: `results` in --out"
    )
    parser.add_argument("--cache", type=Path, help="folder of Triton's cache")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--limit-s", type=_seconds, help="limit of the session")
    parser.add_argument("--stage-limit-s", type=_seconds, help="limit of each stage")
    parser.add_argument("--dry-run", action="store_true", help="run on fakes, without a GPU")
    # the old name of --dry-run
    parser.add_argument("--rehearse", dest="dry_run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="architecture to compile for in a dry run; default: 80 and 90",
    )
    options = parser.parse_args()
    if options.arch and not options.dry_run:
        parser.error("--arch is for --dry-run: with a GPU, its own architecture is compiled for")
    return options


def _seconds(text: str) -> float:
    """Convert a limit of the command line."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
