"""A GPU session continues after failed stages, leaves no process, and reports every stage."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import session as gpu_session
from bench.gpu.session import Stage, run_stages, table_of

ROOT = Path(__file__).parents[2]


def session(*options):
    """Run the command as from a plain checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu.session", *map(str, options)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment | {"PYTHONPATH": ""}
    )


def lines_of(folder):
    return [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_session_continues_after_stages_that_fail_hang_or_are_missing(tmp_path):
    pids = tmp_path / "pids"
    hang = f"sleep 600 & echo $! $$ > {pids}; echo begun; wait"
    leave = f"sleep 600 & echo $! >> {pids}"
    stages = [
        Stage("hangs", 1.0, [["sh", "-c", hang]]),
        Stage("fails", 20, [["sh", "-c", "echo what; exit 3"], ["touch", tmp_path / "second"]]),
        Stage("dies", 20, [["sh", "-c", "kill -9 $$"]]),
        Stage("missing", 20, [["/no/such/program"]]),
        Stage("leaves", 20, [["sh", "-c", leave]], note="as noted"),
        Stage("passes", 20, [["true"], ["sh", "-c", 'test "$WORD" = here']], {"WORD": "here"}),
    ]
    found = run_stages(stages, tmp_path, 60, dict(os.environ))
    # each line is there as soon as its stage has ended
    assert next(found)["stage"] == "hangs"
    assert len(lines_of(tmp_path)) == 1
    list(found)
    lines = lines_of(tmp_path)
    assert [line["status"] for line in lines[:3]] == [
        "timed out after 1 s",
        "failed: exit 3",
        "failed: signal 9",
    ]
    assert "No such file" in lines[3]["status"]
    assert [line["status"] for line in lines[4:]] == ["passed", "passed"]
    assert 1 <= lines[0]["seconds"] < 15
    assert Path(lines[0]["log"]).read_text().splitlines()[-1] == "begun"
    assert not (tmp_path / "second").exists()
    started = pids.read_text().split()
    assert len(started) == 3
    deadline = time.monotonic() + 10
    while any(map(is_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, started))
    shown = table_of(lines)
    assert len(shown) == 7
    assert shown[5].endswith("passed (as noted)")


def test_stages_that_do_not_fit_into_the_session_are_skipped(tmp_path):
    stages = [Stage("first", 20, [["sleep", "20"]]), Stage("second", 20, [["true"]])]
    lines = list(run_stages(stages, tmp_path, 1.2, dict(os.environ)))
    assert lines[0]["status"].startswith("timed out")
    assert lines[1]["status"] == "skipped: no time is left"
    assert lines_of(tmp_path) == lines


def test_the_stages_fit_into_ten_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_session.py"])
    options = gpu_session._options()
    stages = gpu_session.stages_of(options, tmp_path)
    assert [stage.name for stage in stages] == list(gpu_session.STAGES)
    assert sum(stage.limit_s for stage in stages) <= 600 - 15
    told = gpu_session.__doc__
    assert all(f"\n    {name} " in told for name in gpu_session.STAGES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path):
    run = session("--out", tmp_path / "out")
    assert run.returncode == 2
    assert run.stderr.startswith("error: no CUDA device here\n\nhint: --rehearse runs")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for the real one")
def test_a_rehearsal_runs_what_needs_no_gpu(tmp_path):
    run = session("--rehearse", "--out", tmp_path, "--stages", "driver", "gathers")
    assert run.returncode == 0, run.stdout + (tmp_path / "driver.log").read_text()
    driver, gathers = lines_of(tmp_path)
    assert (driver["status"], gathers["status"]) == ("passed", "passed")
    rules = driver["findings"]["rules"]
    assert rules["copy a registration"] == rules["copy beside it on its page"] == "right"
    for refused in ("copy across two registrations", "copy into it from outside", "copy out of it"):
        assert rules[refused] == "CUDA error: invalid argument"
    assert rules["lock beside it on its page"] == 0
    assert (rules["lock what overlaps it"], rules["unlock what is not locked"]) == (712, 713)
    assert Path(gathers["log"]).read_text().count("are right") == 12
    if gpu_session._sanitizer() is None:
        assert "compute-sanitizer is not installed" in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for the real one")
def test_a_rehearsal_within_tiny_limits_ends_with_a_table(tmp_path):
    run = session("--rehearse", "--out", tmp_path, "--stage-limit-s", "0.3")
    assert run.returncode == 1
    lines = lines_of(tmp_path)
    assert [line["stage"] for line in lines] == list(gpu_session.STAGES)
    assert {line["status"] for line in lines} == {"timed out after 0.3 s"}
    shown = run.stdout.splitlines()
    assert shown[: len(lines) + 1] == table_of(lines)
    assert shown[-1] == str(tmp_path / "session.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for the real one")
def test_kernels_are_compiled_for_absent_gpus_and_found_in_the_cache(tmp_path):
    cache = tmp_path / "cache"
    options = ["--rehearse", "--stages", "compile", "--cache", cache, "--arch", "90"]
    limits = ["--limit-s", "500", "--stage-limit-s", "500"]
    for turn in ("first", "again"):
        run = session(*options, *limits, "--out", tmp_path / turn)
        assert run.returncode == 0, (tmp_path / turn / "compile.log").read_text()
        made = sorted(cache.rglob("*.cubin"))
        assert len(made) >= 9
        if turn == "first":
            first = {path: path.stat().st_mtime_ns for path in made}
    assert {path: path.stat().st_mtime_ns for path in made} == first
