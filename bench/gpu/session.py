"""Check within ten minutes that gcnzc works on a GPU, and measure what it claims.

    python -m bench.gpu.session --out FOLDER                   all stages, the most valuable first
    python -m bench.gpu.session --out FOLDER --limit-s 560     end within that time
    python -m bench.gpu.session --out FOLDER --stages driver   some of the stages
    python -m bench.gpu.session --out FOLDER --dry-run         on a machine without a GPU

The session needs this checkout, torch, Triton, numba and pytest; no network, git, make or pip.

A stage runs commands one after another, which share its time limit. Each runs in a process group of
its own. At the limit its process gets SIGTERM, and `TERM_S` later its group SIGKILL. The next stage
starts whether a stage passed or failed. A stage's limit is at most what is left of the session.

    gathers     compare gathered rows of 100, 602 and 1433 columns with torch's
    compile     compile the gathers for this GPU, and record the registers and memory that they need
    driver      read the driver's attributes, and find out how it treats registered host memory
    claims      measure the PCIe bus, and gathers beside the alternatives, by width and dtype
    epochs      measure epochs on the shapes of ogbn-products and ogbn-papers100M, the same
    comparison  tabulate the claims, each with its ratio, see bench/gpu/claims.py
    tests       tests that need a GPU
    sanitizer   the gathers again, under compute-sanitizer
    train       two epochs of training, with a trace
    locking     tests of the driver's calls, page-locking and tables
    kernels     a few cases of each test of Triton kernels

FOLDER gets two files, which are replaced after each stage: `session.txt`, with tables of the stages
and of the claims; and `session.tar.gz`, at most 16 MiB, with `session.jsonl`, a
line for each stage with its status, the GPU and its clocks; STAGE.log, the output of each; and
`results`, whose lines are those of `bench/results`. On a machine without git, set GCNZC_COMMIT to
the commit.

The exit status is 0 if no stage failed, 1 if one failed or timed out, and 2 without a CUDA device.

A dry run executes the same code on fakes: `tests/fake_cuda.py` for torch.cuda and the driver,
`tests/fake_tools` for nvidia-smi and compute-sanitizer, Triton's interpreter for kernels, and small
inputs. Kernels are compiled for each --arch. Tests are collected but not run. Limits are ten times
as long. A dry run finds errors in this code; its figures have no meaning.
"""

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu.clocks import gpu_state

ROOT = Path(__file__).parents[2]
LIMIT_S = 560.0
IDENTIFY_S = 60.0  # limit of `identify`, part of the session
TERM_S = 12.0  # after SIGTERM; pytest gives its processes 10 s
KILL_S = 3.0  # after SIGKILL
LEAST_S = 5.0  # a stage with less time left is skipped
DRY_RUN_FACTOR = 10  # for all limits, since interpreted kernels on a CPU are slow
SANITIZER = "compute-sanitizer"
SANITIZER_ERROR = "9"  # exit status
FAILED, NO_GPU = 1, 2
TABLE, ARCHIVE = "session.txt", "session.tar.gz"
ARCHIVED = ("*.jsonl", "*.json", "*.txt", "results/*.jsonl", "*.log")  # in this order
ARCHIVE_BYTES = 15 << 20  # before compression, which never adds a MiB
FILE_BYTES = 2 << 20  # of longer files the end is kept
# of `bench.gpu.device_checks identify`, in each line of a session
IDENTITY = (
    "gpu",
    "driver",
    "commit",
    "cpu",
    "cores",
    "python",
    "torch",
    "triton",
    "numba",
    "numpy",
)
# prints what a reader of the measurements asks about the machine
MACHINE = "nvidia-smi -q; nvidia-smi topo -m; lscpu; free -g; ulimit -l; uname -a"

Command = Sequence[str | Path]


@dataclass(frozen=True)
class Stage:
    """Commands that a session runs one after another, each in a process group of its own."""

    name: str
    limit_s: float  # of all commands together
    commands: Sequence[Command]
    environment: dict[str, str] = field(default_factory=dict)
    skipped: str = ""  # why it does not run


def main() -> int:
    """Run the session of the command line, and return its exit status."""
    options = _options()
    # like Ctrl-C, so that no process of a stage continues
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu-session-") as folder:
        work, lines = Path(folder), []
        try:
            for line in _session(options, work):
                lines.append(line)
                print(f"{line['stage']}: {line['status']}", file=sys.stderr, flush=True)
                save(options.out, work, lines)
        except NoGpuError:
            print(
                "error: torch finds no CUDA device\n\n"
                "hint: `gcnzc check` shows what is missing; --dry-run runs without a GPU",
                file=sys.stderr,
            )
            return NO_GPU
        except KeyboardInterrupt:
            # with what the stage has written so far
            save(options.out, work, lines)
            print(f"error: interrupted\n\nhint: {options.out} has the results", file=sys.stderr)
            return FAILED
    print((options.out / TABLE).read_text(), end="")
    return FAILED if any(line["status"].startswith(("failed", "timed")) for line in lines) else 0


class NoGpuError(Exception):
    """Torch finds no CUDA device."""


def _session(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Run a session with its files in a folder; yield the line of each stage, see `run_stages`."""
    factor = DRY_RUN_FACTOR if options.dry_run else 1
    end_s = time.monotonic() + (options.limit_s or factor * LIMIT_S)
    environment = _environment(options, work)
    about = identify(options, environment)
    save(options.out, work, [])
    stages = [
        replace(stage, limit_s=factor * stage.limit_s)
        for stage in stages_of(options, work, environment["PATH"])
        if options.stages is None or stage.name in options.stages
    ]
    yield from run_stages(stages, work, end_s, environment, about)


def identify(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the machine, the GPU and its driver.

    If that fails or takes too long, the reason is printed, and the result is empty.

    Raises:
        NoGpuError: there is no CUDA device.
    """
    command = [*_module("bench.gpu.device_checks", options), "identify"]
    limit_s = IDENTIFY_S * (DRY_RUN_FACTOR if options.dry_run else 1)
    with tempfile.TemporaryFile("w+") as found, tempfile.TemporaryFile("w+") as errors:
        code = _run(command, limit_s, found.fileno(), environment, errors.fileno())
        if code == NO_GPU:
            raise NoGpuError
        if code == 0:
            found.seek(0)
            return json.loads(found.read().splitlines()[-1])
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


def stages_of(options: argparse.Namespace, work: Path, path: str) -> list[Stage]:
    """Return all stages of a session, in order.

    Args:
        options: of the command line.
        work: folder of the session's files.
        path: folders in which programs are found.
    """
    dry = options.dry_run
    checks = _module("bench.gpu.device_checks", options)
    architectures = [word for arch in options.arch or [80, 90] for word in ("--arch", str(arch))]
    compilation = [*checks, "compile", "--out", work / "kernels.jsonl", *(architectures * dry)]
    gathers = [*checks, "gathers", *(["--small"] * dry)]
    sanitizer = shutil.which(SANITIZER, path=f"{path}{os.pathsep}/usr/local/cuda/bin")
    results = work / "results"
    suite = [*_module("bench.gpu.suite", options), "--results", results]
    suite += ["--small" if dry else "--quick"]
    table = [*_module("bench.gpu.claims", options), results, "--out", work / "claims.txt"]
    gcnzc, graph = _module("gcnzc", options), work / "graph"
    size = ["--nodes", "500", "--edges", "3000"] if dry else []
    train = [*gcnzc, "train", graph, "--epochs", "2", "--trace", "20", "--device", "cuda"]
    locking = ["system/test_cuda_driver.py", "system/test_page_lock.py", "features/test_table.py"]
    return [
        Stage("machine", 20, [["sh", "-c", MACHINE]]),
        Stage("gathers", 60, [gathers]),
        Stage("compile", 60, [compilation], {"TRITON_INTERPRET": "0"}),
        Stage("driver", 25, [[*checks, "driver", "--out", work / "driver.json"]]),
        Stage("claims", 120, [[*suite, "link", "claims"]]),
        Stage("epochs", 170, [[*suite, "epoch", "epoch-large"]]),
        Stage("comparison", 30, [table]),
        _tests(options, "tests", 90, "gpu", _files_with_gpu_tests()),
        Stage(
            "sanitizer",
            60,
            [[sanitizer or SANITIZER, "--error-exitcode", SANITIZER_ERROR, *gathers]],
            skipped="" if sanitizer else f"{SANITIZER} is not installed",
        ),
        Stage("train", 60, [[*gcnzc, "make", graph, *size], [*train, "--out", work / "run"]]),
        _tests(options, "locking", 60, "", locking),
        _tests(options, "kernels", 100, "triton", ["kernels", "features"]),
    ]


def _files_with_gpu_tests() -> list[str]:
    """Return the modules of tests in which the marker `gpu` occurs."""
    tests = ROOT / "tests"
    paths = sorted(tests.rglob("test_*.py"))
    return [str(path.relative_to(tests)) for path in paths if "mark.gpu" in path.read_text()]


def _tests(
    options: argparse.Namespace, name: str, limit_s: float, marker: str, files: Sequence[str]
) -> Stage:
    """Return a stage that runs tests; in a dry run, it collects them."""
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # new versions of packages warn
    command += ["-W", "default"]
    command += ["-m", " and ".join(filter(None, (marker, "not slow")))]
    command += ["--triton-cases", "2"] if marker == "triton" else []
    command += ["--collect-only"] if options.dry_run else ["-n", "8", "--maxprocesses", "8"]
    return Stage(name, limit_s, [[*command, *(ROOT / "tests" / file for file in files)]])


def run_stages(
    stages: Sequence[Stage],
    work: Path,
    end_s: float,
    environment: Mapping[str, str],
    about: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run stages in order; yield the line of each, after it is written to `session.jsonl`.

    Args:
        stages: see `Stage`.
        work: folder of lines and logs.
        end_s: when all stages have ended, by the monotonic clock.
        environment: environment variables of the processes.
        about: the GPU, see `identify`.
    """
    about = about or {}
    for stage in stages:
        began_s, log = time.monotonic(), work / f"{stage.name}.log"
        # a stage that is stopped needs time to end
        limit = min(stage.limit_s, end_s - began_s - TERM_S - KILL_S)
        if stage.skipped:
            status = f"skipped: {stage.skipped}"
        elif limit < min(LEAST_S, stage.limit_s):
            status = "skipped: no time is left"
        else:
            status = _run_stage(stage, limit, log, {**environment, **stage.environment})
        line: dict[str, Any] = {
            "stage": stage.name,
            "status": status,
            "seconds": round(time.monotonic() - began_s, 2),
            "limit_s": round(max(limit, 0.0), 2),
        }
        line |= {name: about[name] for name in IDENTITY if name in about}
        if "uuid" in about:
            line["gpu_state"] = gpu_state(about["uuid"], environment["PATH"])
        with (work / "session.jsonl").open("a") as file:
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
        # not a new session: who kills all processes of this one reaches it
        preexec_fn=os.setpgrp,
    )
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # without effect on a process that has ended; tests then report, and training saves
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
        # also processes that the command has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # a process within a call of a driver that hangs does not end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)


def save(out: Path, work: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the table and the archive of a session.

    Args:
        out: folder of both.
        work: folder of the session's files.
        lines: of the stages.
    """
    text = "\n".join(table_of(lines)) + "\n"
    if (claims := work / "claims.txt").exists():
        text += "\n" + claims.read_text()
    _replace(out / TABLE, text.encode())
    packed, size = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in (path for pattern in ARCHIVED for path in sorted(work.glob(pattern))):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - FILE_BYTES))
                content = file.read(FILE_BYTES)
            if (size := size + len(content)) > ARCHIVE_BYTES:
                break
            member = tarfile.TarInfo(str(path.relative_to(work)))
            member.size, member.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(member, io.BytesIO(content))
    _replace(out / ARCHIVE, packed.getvalue())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a kill leaves the old content or the new."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def table_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the lines of a session as a table."""
    # this module imports no torch, which may be what hangs
    heads = f"{'stage':<12}{'seconds':>9}{'limit':>7}  status"
    return [
        heads,
        *(
            f"{line['stage']:<12}{line['seconds']:>9.1f}{line['limit_s']:>7.0f}  {line['status']}"
            for line in lines
        ),
    ]


def _environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """Return the environment of all stages: this checkout first, and one kernel cache."""
    modules = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = os.environ.get("PATH", os.defpath)
    if options.dry_run:
        modules.insert(1, str(ROOT / "tests"))
        programs = f"{ROOT / 'tests' / 'fake_tools'}{os.pathsep}{programs}"
    cache = (options.cache or work / "triton-cache").resolve()
    return {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(cache),
        "GCNZC_CACHE": str(work / "cache"),
        "TRITON_INTERPRET": str(int(options.dry_run)),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the two results")
    parser.add_argument("--limit-s", type=_seconds, help=f"limit of the session; {LIMIT_S:g}")
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="default: all")
    parser.add_argument("--cache", type=Path, help="folder of Triton's cache")
    parser.add_argument("--dry-run", action="store_true", help="run on fakes, without a GPU")
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="architecture to compile for in a dry run; default: 80 and 90",
    )
    options = parser.parse_args()
    if options.arch and not options.dry_run:
        parser.error("--arch is for --dry-run: with a GPU, its own architecture is compiled for")
    names = [stage.name for stage in stages_of(options, Path(), "")]
    if unknown := set(options.stages or ()) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"no folder {options.out}: {error.strerror}")
    return options


def _seconds(text: str) -> float:
    """Convert a limit of the command line."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
