"""Check in ten minutes that gcnzc works on a GPU, and record what its driver does.

    python -m bench.gpu.session                     all stages, in a new folder under runs/
    python -m bench.gpu.session --out FOLDER        results elsewhere
    python -m bench.gpu.session --stages driver     some of the stages
    python -m bench.gpu.session --rehearse          what runs without a GPU: Triton's interpreter, a
                                                    made-up driver, and kernels compiled for --arch

Each stage is a process of its own with a time limit, after which its whole process group is killed;
the next one starts whatever became of it. `session.jsonl` in the folder gets one line a stage as
soon as it ends, and STAGE.log what it printed. A table ends the session. The exit status is 0 if
every stage passed or was skipped, 1 if one did not, and 2 without a CUDA device.

    compile   compile the gather's kernels for this GPU, into a Triton cache that all stages use;
              with --rehearse for every --arch. --cache FOLDER takes such a cache along
    driver    the driver's attributes, and what it does with registrations of host memory
    locking   tests of the driver's calls, page-locking and tables
    gathers   rows of 100, 602 and 1433 columns, under compute-sanitizer where it is installed
    loader    tests of the loader and the feature cache, with 4 threads
    train     two epochs of training, with a trace
    bench     `bench/gpu/suite.py link gather --quick`
    kernels   tests of the kernels, by 16 processes

It needs this checkout, and torch, Triton, numba and pytest (with pytest-xdist) on PYTHONPATH.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
SESSION_S = 600.0
# left for the rest when a stage begins, or it is skipped
LEAST_S = 1.0
COLUMNS = (100, 602, 1433)
SANITIZER = "compute-sanitizer"
HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"

Command = Sequence[str | Path]


@dataclass(frozen=True)
class Stage:
    """What a session does in one process group, one command after the other."""

    name: str
    limit_s: float
    commands: Sequence[Command]
    environment: dict[str, str] = field(default_factory=dict)
    # of how the stage is run, for its line
    note: str = ""


def main() -> int:
    """Run the stages that are asked for."""
    options = _options()
    if options.inside is not None:
        INSIDE[options.inside](options)
        return 0
    if not options.rehearse and subprocess.run([sys.executable, "-c", HAS_CUDA]).returncode:
        print(
            "error: no CUDA device here\n\n"
            "hint: --rehearse runs what can be run without one; `gcnzc check` says what is missing",
            file=sys.stderr,
        )
        return 2
    out = options.out or ROOT / "runs" / time.strftime("gpu-session-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in stages_of(options, out) if stage.name in options.stages]
    if options.stage_limit_s is not None:
        stages = [replace(stage, limit_s=options.stage_limit_s) for stage in stages]
    # as Ctrl-C, so that no stage outlives the session
    signal.signal(signal.SIGTERM, _interrupt)
    lines = []
    for line in run_stages(stages, out, options.limit_s, _environment(options, out)):
        lines.append(line)
        print(f"{line['stage']}: {line['status']}", file=sys.stderr, flush=True)
    print("\n".join(table_of(lines)))
    print(out / "session.jsonl")
    return 0 if all(line["status"].startswith(("passed", "skipped")) for line in lines) else 1


def stages_of(options: argparse.Namespace, out: Path) -> list[Stage]:
    """Return all stages of a session, in order; their limits add up to less than `SESSION_S`."""
    rehearsed = ["--rehearse"] if options.rehearse else []
    architectures = [word for arch in options.arch for word in ("--arch", str(arch))]
    this: Command = [sys.executable, "-m", "bench.gpu.session", *rehearsed, *architectures]
    tests: Command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [*tests, "-m", "not slow"]
    gathers, note = [*this, "--inside", "gathers"], ""
    sanitizer = _sanitizer()
    if sanitizer is None:
        note = f"{SANITIZER} is not installed: without it"
    elif not options.rehearse:
        gathers, note = [sanitizer, "--error-exitcode", "9", *gathers], f"under {sanitizer}"
    device = "cpu" if options.rehearse else "cuda"
    graph, run = out / "graph", out / "run"
    gcnzc: Command = [sys.executable, "-m", "gcnzc"]
    train = [*gcnzc, "train", graph, "--epochs", "2", "--trace", "20", "--device", device]
    bench = [sys.executable, "-m", "bench.gpu.suite", "link", "gather"]
    bench += ["--small"] if options.rehearse else ["--quick", "--results", out / "results"]
    small = ["--nodes", "3000", "--edges", "20000"] if options.rehearse else []
    compiling = {"TRITON_INTERPRET": "0"}
    found = {"GCNZC_SESSION_FINDINGS": str(out / "driver.json")}
    files = [
        ROOT / "tests" / name
        for name in (
            "system/test_cuda_driver.py",
            "system/test_page_lock.py",
            "features/test_table.py",
        )
    ]
    loading = [
        ROOT / "tests" / name for name in ("loader/test_loader.py", "features/test_cache.py")
    ]
    threads = {"OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"}
    return [
        Stage("compile", 60, [[*this, "--inside", "compile"]], compiling),
        Stage("driver", 25, [[*this, "--inside", "driver"]], found),
        Stage("locking", 50, [[*tests, *files]]),
        Stage("gathers", 70, [gathers], note=note),
        Stage("loader", 80, [[*tests, *loading]], threads),
        Stage("train", 80, [[*gcnzc, "make", graph, *small], [*train, "--out", run]]),
        Stage("bench", 100, [bench]),
        Stage("kernels", 120, [[*tests, *_side_by_side(), ROOT / "tests" / "kernels"]]),
    ]


def run_stages(
    stages: Sequence[Stage], out: Path, limit_s: float, environment: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Run stages in turn; yields the line of each, which `session.jsonl` has by then.

    Args:
        stages: see `Stage`.
        out: a folder for lines and logs.
        limit_s: of all of them; a stage's own limit is cut to what is left.
        environment: of their processes.
    """
    end_s = time.monotonic() + limit_s
    for stage in stages:
        began_s, log = time.monotonic(), out / f"{stage.name}.log"
        limit = min(stage.limit_s, end_s - began_s)
        status = "skipped: no time is left"
        if limit >= min(LEAST_S, stage.limit_s):
            status = _run_stage(stage, limit, log, environment | stage.environment)
        line: dict[str, Any] = {
            "stage": stage.name,
            "status": status,
            "seconds": round(time.monotonic() - began_s, 2),
            "limit_s": round(max(limit, 0.0), 2),
            "log": str(log),
        }
        line |= {"note": stage.note} if stage.note else {}
        findings = stage.environment.get("GCNZC_SESSION_FINDINGS")
        if findings is not None and Path(findings).exists():
            line["findings"] = json.loads(Path(findings).read_text())
        with (out / "session.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield line


def _run_stage(stage: Stage, limit_s: float, log: Path, environment: dict[str, str]) -> str:
    """Run the commands of a stage; what became of them, in words."""
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


def _run(command: Command, limit_s: float, log: int, environment: dict[str, str]) -> int | None:
    """Run a command and return its exit status; None on timeout. Its process group is ended."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # also what the command has left behind
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


def compile_kernels(options: argparse.Namespace) -> None:
    """Compile the gathers of `COLUMNS` as their launches do, without a launch.

    What is compiled on a machine without a GPU lies in Triton's cache under the same keys as on one
    that has it, if Triton is of the same version.
    """
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **how)

    JITFunction.run = compile_only
    architectures = options.arch if options.rehearse else [None]
    for arch in architectures:
        if arch is not None:
            triton.runtime.driver.set_active(_Target(arch))
        device = torch.device("cpu" if options.rehearse else "cuda")
        for rows, ids, layout in _gathers(num_rows=8, num_ids=4):
            _compile_gathers(rows, ids.to(device), layout)
        print("compiled for", "this GPU" if arch is None else f"sm_{arch}", flush=True)


def _compile_gathers(rows: Any, ids: Any, layout: Any) -> None:
    from gcnzc.kernels.gather.gpu import gather_rows

    # a pointer to the host is no obstacle: nothing is launched
    out = rows.new_empty((len(ids), rows.shape[1])).to(ids.device)
    # with checked ids in the stage of gathers, without in training
    for checked in (True, False):
        gather_rows(rows, ids, out, layout=layout, checked=checked)


class _Target:
    """A minimal Triton driver, to compile for a GPU that this machine does not have."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device
        return self.arch

    def get_current_stream(self, _device: int) -> int:
        return 0


def gather_wide_rows(options: argparse.Namespace) -> None:
    """Gather rows of `COLUMNS` columns from page-locked memory, and hold them against torch's."""
    import torch

    from gcnzc.features.pinning import pinned
    from gcnzc.kernels.gather.gpu import gather_rows

    device = torch.device("cpu" if options.rehearse else "cuda")
    num_rows, num_ids = (50, 9) if options.rehearse else (20_000, 5000)
    for rows, ids, layout in _gathers(num_rows, num_ids):
        with pinned(rows) as table:
            found = gather_rows(table.rows, ids.to(device), layout=layout, checked=True).cpu()
        if not torch.equal(found, rows[ids]):
            raise RuntimeError(f"wrong rows: {rows.dtype}, {rows.shape[1]} columns, {layout}")
        print(rows.dtype, rows.shape[1], layout, "are right", flush=True)


def _gathers(num_rows: int, num_ids: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield rows, ids and layouts: contiguous rows, rows at an offset, and padded rows."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_rows, (num_ids,), generator=generator)
    ids[:2] = torch.tensor([num_rows - 1, 0])
    for columns in COLUMNS:
        for dtype in (torch.float32, torch.float16):
            whole = torch.randn(num_rows, columns + 1, generator=generator).to(dtype)
            yield whole[:, :columns].contiguous(), ids, "shifted"
        yield whole[:, 1:], ids, "shifted"
        padded = torch.zeros(num_rows + 1, -(-columns // 64) * 64, dtype=dtype)
        lines = padded.view(-1)[-padded.data_ptr() % 128 // padded.element_size() :]
        rows = lines[: num_rows * padded.shape[1]].view(num_rows, -1)[:, :columns]
        yield rows.copy_(whole[:, :columns]), ids, "pitched"


def probe(options: argparse.Namespace) -> None:
    """Ask the driver what it is, and find out what it does with registrations of host memory."""
    import torch

    from gcnzc.system.cuda_driver import Driver

    findings: dict[str, Any] = {}
    if options.rehearse:
        sys.path.insert(0, str(ROOT / "tests"))
        from fake_driver import FakeDriver, FakeGpu

        made_up = FakeDriver()
        with FakeGpu(made_up):
            findings["rules"] = registration_rules(made_up)
    else:
        from bench import harness

        driver = Driver()
        number = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(number)
        findings |= harness.machine()
        findings["capability"] = [properties.major, properties.minor]
        findings["memory_bytes"] = properties.total_memory
        findings["attributes"] = {
            name: driver.attribute(attribute, number) for name, attribute in ATTRIBUTES.items()
        }
        findings["rules"] = registration_rules(driver)
    text = json.dumps(findings, indent=1)
    print(text)
    if place := os.environ.get("GCNZC_SESSION_FINDINGS"):
        Path(place).write_text(text)


# of cuDeviceGetAttribute, by cuda.h
ATTRIBUTES = {
    "multiprocessors": 16,
    "can_map_host_memory": 19,
    "copy_engines": 40,
    "unified_addressing": 41,
    "pageable_memory_access": 88,
    "host_pointer_for_registered_memory": 91,
    "host_register_supported": 99,
    "pageable_memory_by_host_page_tables": 100,
    "read_only_host_register_supported": 113,
}


def registration_rules(driver: Any) -> dict[str, Any]:
    """Record how a driver treats registrations: error codes, reported ranges, and copies.

    Args:
        driver: `gcnzc.system.cuda_driver.Driver`, or one that is made up.
    """
    import mmap

    import torch

    page = mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 16 * page), dtype=torch.uint8)
    memory.copy_(torch.arange(len(memory)) % 251)
    at = memory.data_ptr()

    def copied(begin: int, end: int) -> str:
        return _outcome(lambda: torch.equal(memory[begin:end].to("cuda").cpu(), memory[begin:end]))

    def copied_back(begin: int, end: int) -> str:
        expected, part = memory.clone(), memory[begin:end]
        return _outcome(lambda: torch.equal(part.copy_(part.to("cuda")), expected[begin:end]))

    # both begin and end within a page, and they meet within one
    first, second = (64, 3 * page + 160), (3 * page + 160, 6 * page + 32)
    rules: dict[str, Any] = {"page_bytes": page}
    rules["lock within pages"] = driver.lock(at + first[0], first[1] - first[0])
    rules["range is told to the byte"] = driver.locked_range(at + 64) == (at + 64, at + first[1])
    rules["lock beside it on its page"] = driver.lock(at + second[0], second[1] - second[0])
    rules["seen at the host's address"] = all(
        driver.device_address(at + place) == at + place
        for place in (first[0], first[1] - 1, second[0], second[1] - 1)
    )
    rules["lock what overlaps it"] = driver.lock(at + page, page)
    rules["unlock inside it"] = driver.unlock(at + page)
    rules["unlock what is not locked"] = driver.unlock(at + 10 * page)
    rules["copy within a registration"] = copied(first[0] + 100, first[1] - 100)
    rules["copy a registration"] = copied(*first)
    rules["copy to a registration"] = copied_back(*first)
    rules["copy across two registrations"] = copied(first[0], second[1])
    rules["copy beside it on its page"] = copied(0, first[0])
    rules["copy behind it on its page"] = copied(second[1], 8 * page)
    rules["copy into it from outside"] = copied(0, page)
    rules["copy out of it"] = copied(page * 5, 9 * page)
    rules["unlock the first"] = driver.unlock(at + first[0])
    rules["the second is seen on their page"] = driver.device_address(at + second[0]) is not None
    rules["copy the second then"] = copied(*second)
    rules["unlock the second"] = driver.unlock(at + second[0])
    rules |= _read_only_rules(driver, page)
    rules["copy all when nothing is locked"] = copied(0, len(memory))
    return rules


def _read_only_rules(driver: Any, page: int) -> dict[str, Any]:
    """Record how a driver treats a file that is mapped read-only."""
    import mmap
    import tempfile

    import numpy as np

    found = {}
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4 * page))
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        for flag in (False, True):
            code = driver.lock(mapped.ctypes.data, 2 * page, flag)
            found[f"lock a read-only file{', as such' if flag else ''}"] = code
            if code == 0:
                driver.unlock(mapped.ctypes.data)
    return found


def _outcome(deed: Callable[[], bool]) -> str:
    try:
        return "right" if deed() else "wrong bytes"
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]


INSIDE: dict[str, Callable[[argparse.Namespace], None]] = {
    "compile": compile_kernels,
    "driver": probe,
    "gathers": gather_wide_rows,
}
STAGES = ("compile", "driver", "locking", "gathers", "loader", "train", "bench", "kernels")


def _environment(options: argparse.Namespace, out: Path) -> dict[str, str]:
    """Return the environment of all stages: this checkout first, and one kernel cache."""
    places = [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    cache = (options.cache or out / "triton-cache").resolve()
    words = {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TRITON_CACHE_DIR": str(cache),
        "GCNZC_CACHE": str((out / "cache").resolve()),
    }
    return {**os.environ, **words, "TRITON_INTERPRET": str(int(options.rehearse))}


def _sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None if it is not installed."""
    toolkit = Path("/usr/local/cuda/bin") / SANITIZER
    return shutil.which(SANITIZER) or (str(toolkit) if toolkit.exists() else None)


def _side_by_side() -> list[str]:
    from importlib.util import find_spec

    return ["-n", "16"] if find_spec("xdist") is not None else []


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument(
        "--cache", type=Path, help="folder of Triton's cache, such as a rehearsal's"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--limit-s", type=float, default=SESSION_S, help="of the session")
    parser.add_argument("--stage-limit-s", type=float, help="of each stage, instead of its own")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="to rehearse compiling for; 80 and 90 if not given",
    )
    parser.add_argument("--inside", choices=INSIDE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.arch = options.arch or [80, 90]
    return options


if __name__ == "__main__":
    sys.exit(main())
