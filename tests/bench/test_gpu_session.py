"""A GPU session continues after failed stages, leaves no process, and loses one stage at most."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from limits import HANG_S, NEVER_S
from programs import run_python

from bench.gpu import session as gpu_session
from bench.gpu.session import ARCHIVE, TABLE, Stage, run_stages, table_of

ROOT = Path(__file__).parents[2]
# a session of stages that are given as shell commands, on a machine that was identified
SHELL_SESSION = """
import sys
from bench.gpu import session
session.identify = lambda *_: {}
commands, sys.argv = sys.argv[3:], sys.argv[:3]
session.stages_of = lambda *_: [
    session.Stage(f"stage{n}", 60, [["sh", "-c", text]]) for n, text in enumerate(commands)
]
sys.exit(session.main())
"""


def session(*options):
    """Run the command as from a plain checkout."""
    plain = {"TRITON_INTERPRET": None, "PYTHONPATH": ""}
    return run_python("-m", "bench.gpu.session", *options, **plain)


def start_shell_session(out, *commands):
    words = [sys.executable, "-c", SHELL_SESSION, "--out", out, *commands]
    return subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def unpack(out, folder):
    """Unpack the archive of a session; return the lines of its stages."""
    assert (out / ARCHIVE).stat().st_size <= 16 << 20
    with tarfile.open(out / ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    path = folder / "session.jsonl"
    return read_lines(path) if path.exists() else []


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for_ends(pids):
    end = time.monotonic() + HANG_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.processes
def test_a_session_continues_after_stages_that_fail_hang_or_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "TERM_S", 2.0)
    pids = tmp_path / "pids"
    hang = f"trap '' TERM; sleep {NEVER_S} & echo $! $$ > {pids}; echo begun; wait"
    report = f"trap 'echo reported; exit' TERM; sleep {NEVER_S} & echo $! >> {pids}; wait"
    leave = f"sleep {NEVER_S} & echo $! >> {pids}"
    stages = [
        Stage("hangs", 3.0, [["sh", "-c", hang]]),
        Stage("reports", 1.0, [["sh", "-c", report]]),
        Stage("fails", HANG_S, [["sh", "-c", "echo what; exit 3"], ["touch", tmp_path / "second"]]),
        Stage("dies", HANG_S, [["sh", "-c", "kill -9 $$"]]),
        Stage("missing", HANG_S, [["/no/such/program"]]),
        Stage("leaves", HANG_S, [["sh", "-c", leave]]),
        Stage("passes", HANG_S, [["true"], ["sh", "-c", 'test "$WORD" = here']], {"WORD": "here"}),
        Stage("has no tool", HANG_S, [["false"]], skipped="no tool"),
    ]
    found = run_stages(stages, tmp_path, time.monotonic() + 9 * HANG_S, dict(os.environ))
    # each line is there as soon as its stage has ended
    assert next(found)["stage"] == "hangs"
    assert len(read_lines(tmp_path / "session.jsonl")) == 1
    list(found)
    lines = read_lines(tmp_path / "session.jsonl")
    assert [line["status"] for line in lines[:4]] == [
        "timed out after 3 s",
        "timed out after 1 s",
        "failed: exit 3",
        "failed: signal 9",
    ]
    assert "No such file" in lines[4]["status"]
    assert [line["status"] for line in lines[5:]] == ["passed", "passed", "skipped: no tool"]
    assert lines[0]["seconds"] >= 3
    assert (tmp_path / "hangs.log").read_text().splitlines()[-1] == "begun"
    assert (tmp_path / "reports.log").read_text().splitlines()[-1] == "reported"
    assert not (tmp_path / "second").exists()
    started = pids.read_text().split()
    assert len(started) == 4
    wait_for_ends(started)
    assert len(table_of(lines)) == len(stages) + 1


@pytest.mark.processes
def test_stages_that_do_not_fit_into_the_session_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "TERM_S", 1.0)
    stages = [Stage("first", 60, [["sleep", "60"]]), Stage("second", 20, [["true"]])]
    end_s = time.monotonic() + 6 + 1 + gpu_session.KILL_S
    lines = list(run_stages(stages, tmp_path, end_s, dict(os.environ)))
    assert lines[0]["status"].startswith("timed out after 6")
    assert lines[1]["status"] == "skipped: no time is left"
    assert time.monotonic() < end_s
    assert read_lines(tmp_path / "session.jsonl") == lines


@pytest.mark.processes
def test_a_kill_at_any_moment_leaves_the_finished_stages(tmp_path):
    # logs of random bytes, so that the archive takes time to write
    text = "echo done; head -c 1500000 /dev/urandom; sleep 0.1"
    processes = [start_shell_session(tmp_path / str(n), *[text] * 40) for n in range(10)]
    moments = random.Random(0)
    for number, process in enumerate(processes):
        out = tmp_path / str(number)
        while not (out / ARCHIVE).exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.random())
        process.kill()
        reported = process.communicate()[1].splitlines()
        lines = unpack(out, tmp_path / f"unpacked{number}")
        # the line of a stage is printed before its files are replaced
        assert len(lines) in (len(reported), len(reported) - 1)
        assert all(line["status"] == "passed" for line in lines)
        assert (out / TABLE).read_text().count("passed") in (len(lines), len(lines) + 1)


def test_a_terminated_session_leaves_its_results_and_no_process(tmp_path):
    pid = tmp_path / "pid"
    hang = f"echo begun; sleep {NEVER_S} & echo $! > {pid}; wait"
    process = start_shell_session(tmp_path / "out", "true", hang)
    end = time.monotonic() + HANG_S
    while not pid.exists() or not pid.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "error: interrupted\n\nhint: " in process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 1
    [line] = unpack(tmp_path / "out", tmp_path / "unpacked")
    assert (line["stage"], line["status"]) == ("stage0", "passed")
    assert "begun" in (tmp_path / "unpacked" / "stage1.log").read_text()
    wait_for_ends([pid.read_text().strip()])


def options_of(monkeypatch, tmp_path, *words):
    monkeypatch.setattr(sys, "argv", ["session", "--out", str(tmp_path), *words])
    return gpu_session._options()


def test_a_driver_that_hangs_does_not_stop_the_session(monkeypatch, capsys, tmp_path):
    options = options_of(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_session, "IDENTIFY_S", 0.5)
    hang = f"import time; time.sleep({NEVER_S})"
    monkeypatch.setattr(gpu_session, "_module", lambda *_: [sys.executable, "-c", hang])
    assert gpu_session.identify(options, dict(os.environ)) == {}
    assert "timed out after 0.5 s" in capsys.readouterr().err
    # what else is written does not change the answer
    answer = "import sys; print('a', file=sys.stderr); print('a'); print('{\"gpu\": \"A\"}')"
    monkeypatch.setattr(gpu_session, "IDENTIFY_S", HANG_S)
    monkeypatch.setattr(gpu_session, "_module", lambda *_: [sys.executable, "-c", answer])
    assert gpu_session.identify(options, dict(os.environ)) == {"gpu": "A"}


def test_a_dry_run_executes_the_commands_of_a_session(tmp_path, monkeypatch):
    """The commands differ in the fakes, the sizes, and in tests that are only collected."""
    commands = []
    for words in ([], ["--dry-run"]):
        options = options_of(monkeypatch, tmp_path, *words)
        path = gpu_session._environment(options, tmp_path)["PATH"]
        stages = gpu_session.stages_of(options, tmp_path, path)
        commands.append(
            {s.name: {str(word) for command in s.commands for word in command} for s in stages}
        )
    real, dry = commands
    text = gpu_session.__doc__
    assert all(f"\n    {name} " in text for name in real if name != "machine")
    fakes = {"fake_cuda", str(ROOT / "tests" / "fake_tools" / "compute-sanitizer")}
    sizes = {"--nodes", "500", "--edges", "3000", "--arch", "80", "90", "--small", "--collect-only"}
    for stage in real:
        assert dry[stage] - real[stage] <= fakes | sizes, stage
        less = real[stage] - dry[stage] - {"--quick", "-n", "8", "--maxprocesses"}
        assert all("compute-sanitizer" in word for word in less), stage


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path):
    run = session("--out", tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: torch finds no CUDA device\n\nhint: ")
    assert not any(tmp_path.iterdir())


def check_measurements(folder):
    """Check that all parts of the benchmarks have recorded lines with the GPU and its clocks."""
    found = {path.stem.removeprefix("gpu_"): read_lines(path) for path in folder.glob("*.jsonl")}
    assert found.keys() >= {"link", "methods", "widths", "tlb", "epoch", "overlap"}
    for line in (line for lines in found.values() for line in lines):
        assert (line["gpu"], line["gpu_state"]["max_sm_mhz"]) == ("fake GPU", 1980)
        # nvidia-smi does not report it
        assert line["gpu_state"]["watts"] is None
        assert line["commit"] == "0123abc"
    methods = {line["method"] for line in found["epoch"]}
    assert {"sampling", "transfer", "compute"} < methods


def bare_checkout(folder):
    """Copy what git tracks, without its metadata; return the folder."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, tracked.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_whole_dry_run_passes_in_a_bare_checkout_without_git_and_network(tmp_path):
    tree, out, programs = bare_checkout(tmp_path / "tree"), tmp_path / "out", tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "env", "lscpu", "free", "uname"):
        if path := shutil.which(name):
            (programs / name).symlink_to(path)
    # of the fake nvidia-smi
    (programs / "python3").symlink_to(sys.executable)
    environment = {
        "PATH": str(programs),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(tree),
        "GCNZC_COMMIT": "0123abc",
    }
    command = [sys.executable, "-m", "bench.gpu.session", "--out", out, "--dry-run"]
    run = subprocess.run(
        [shutil.which("unshare"), "-rn", *map(str, command)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines, found = unpack(out, tmp_path / "found"), tmp_path / "found"
    logs = "".join(path.read_text()[-3000:] for path in found.glob("*.log"))
    assert run.returncode == 0, run.stdout + logs
    assert {line["status"] for line in lines} == {"passed"}
    assert (found / "gathers.log").read_text().count(" passed") == 12
    assert "COMPUTE-SANITIZER" in (found / "sanitizer.log").read_text()
    for line in lines:
        assert (line["gpu"], line["gpu_state"]["sm_mhz"]) == ("fake GPU", 345)
        assert (line["driver"], line["commit"]) == (lines[0]["driver"], "0123abc")
    driver = json.loads((found / "driver.json").read_text())
    assert driver["attributes"]["host_register_supported"] == 1
    rules = driver["rules"]
    assert rules["unregistered memory is reported"] is False
    assert rules["copy a range"] == "correct"
    assert rules["copy memory before a range, on its page"] == "correct"
    for name in (
        "copy two adjacent ranges at once",
        "copy memory from before a range into it",
        "copy memory from a range beyond it",
    ):
        assert rules[name] == "CUDA error: invalid argument"
    assert rules["register an adjacent range on the same page"] == 0
    assert rules["register an overlapping range"] == 712
    assert rules["unregister an address that is not registered"] == 713
    check_measurements(found / "results")
    assert "verdict" in (out / TABLE).read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_compiled_for_absent_gpus_and_found_in_the_cache(tmp_path):
    cache = tmp_path / "cache"
    options = ["--dry-run", "--stages", "compile", "--cache", cache, "--arch", "90"]
    for name in ("first", "again"):
        run = session(*options, "--out", tmp_path / name)
        assert run.returncode == 0, run.stdout
        written = sorted(cache.rglob("*.cubin"))
        assert len(written) >= 9
        if name == "first":
            first = {path: path.stat().st_mtime_ns for path in written}
    assert {path: path.stat().st_mtime_ns for path in written} == first
    unpack(tmp_path / "again", tmp_path / "found")
    kernels = read_lines(tmp_path / "found" / "kernels.jsonl")
    assert {line["launch"] for line in kernels} >= {"gather 602 float32, shifted"}
    assert all(line["arch"] == 90 and line["registers"] > 0 for line in kernels)
