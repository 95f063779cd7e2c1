"""A GPU session continues after failed stages, leaves no process, and reports every stage."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from limits import HANG_S, NEVER_S

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


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(folder):
    return read_lines(folder / "session.jsonl")


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_session_continues_after_stages_that_fail_hang_or_are_missing(tmp_path):
    pids = tmp_path / "pids"
    hang = f"sleep {NEVER_S} & echo $! $$ > {pids}; echo begun; wait"
    leave = f"sleep {NEVER_S} & echo $! >> {pids}"
    stages = [
        Stage("hangs", 3.0, [["sh", "-c", hang]]),
        Stage("fails", HANG_S, [["sh", "-c", "echo what; exit 3"], ["touch", tmp_path / "second"]]),
        Stage("dies", HANG_S, [["sh", "-c", "kill -9 $$"]]),
        Stage("missing", HANG_S, [["/no/such/program"]]),
        Stage("leaves", HANG_S, [["sh", "-c", leave]], note="as noted"),
        Stage("passes", HANG_S, [["true"], ["sh", "-c", 'test "$WORD" = here']], {"WORD": "here"}),
    ]
    found = run_stages(stages, tmp_path, 2 * HANG_S, dict(os.environ))
    # each line is there as soon as its stage has ended
    assert next(found)["stage"] == "hangs"
    assert len(lines_of(tmp_path)) == 1
    list(found)
    lines = lines_of(tmp_path)
    assert [line["status"] for line in lines[:3]] == [
        "timed out after 3 s",
        "failed: exit 3",
        "failed: signal 9",
    ]
    assert "No such file" in lines[3]["status"]
    assert [line["status"] for line in lines[4:]] == ["passed", "passed"]
    assert lines[0]["seconds"] >= 3
    assert Path(lines[0]["log"]).read_text().splitlines()[-1] == "begun"
    assert not (tmp_path / "second").exists()
    started = pids.read_text().split()
    assert len(started) == 3
    end = time.monotonic() + HANG_S
    while any(map(is_alive, started)):
        assert time.monotonic() < end
        time.sleep(0.05)
    shown = table_of(lines)
    assert len(shown) == 7
    assert shown[5].endswith("passed (as noted)")


def test_stages_that_do_not_fit_into_the_session_are_skipped(tmp_path):
    stages = [Stage("first", 20, [["sleep", "20"]]), Stage("second", 20, [["true"]])]
    lines = list(run_stages(stages, tmp_path, 1.2, dict(os.environ)))
    assert lines[0]["status"].startswith("timed out")
    assert lines[1]["status"] == "skipped: no time is left"
    assert lines_of(tmp_path) == lines


def test_a_driver_that_hangs_does_not_stop_the_session(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_session.py"])
    options = gpu_session._options()
    monkeypatch.setattr(gpu_session, "IDENTIFY_S", 0.5)
    hang = f"import time; time.sleep({NEVER_S})"
    monkeypatch.setattr(gpu_session, "_module", lambda *_: [sys.executable, "-c", hang])
    assert gpu_session.identify(options, dict(os.environ)) == {}
    assert "timed out after 0.5 s" in capsys.readouterr().err
    # what is written as an error does not change the answer
    answer = "import sys; print('a warning', file=sys.stderr); print('{\"gpu\": \"A\"}')"
    monkeypatch.setattr(gpu_session, "IDENTIFY_S", HANG_S)
    monkeypatch.setattr(gpu_session, "_module", lambda *_: [sys.executable, "-c", answer])
    assert gpu_session.identify(options, dict(os.environ)) == {"gpu": "A"}


def test_the_stages_fit_into_ten_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_session.py"])
    options = gpu_session._options()
    stages = gpu_session.stages_of(options, tmp_path, os.environ["PATH"])
    assert [stage.name for stage in stages] == list(gpu_session.STAGES)
    assert sum(stage.limit_s for stage in stages) <= 600 - 15
    text = gpu_session.__doc__
    assert all(f"\n    {name} " in text for name in gpu_session.STAGES)


def test_a_dry_run_executes_the_commands_of_a_session(tmp_path, monkeypatch):
    """The commands differ in the fakes, the sizes, and in tests that are only collected."""
    commands = {}
    for name in ("session", "dry run"):
        monkeypatch.setattr(sys, "argv", ["session", *(["--dry-run"] if name == "dry run" else [])])
        options = gpu_session._options()
        path = gpu_session._environment(options, tmp_path)["PATH"]
        words = {
            stage.name: {str(word) for command in stage.commands for word in command}
            for stage in gpu_session.stages_of(options, tmp_path, path)
        }
        commands[name] = words
    fakes = {"fake_cuda", str(ROOT / "tests" / "fake_tools" / "compute-sanitizer")}
    sizes = {"--nodes", "500", "--edges", "3000", "--arch", "80", "90", "all", "--small"}
    sizes |= {"--collect-only", "--error-exitcode", "9"}
    real = {"link", "gather", "--quick", "-n", "16"}
    for stage in gpu_session.STAGES:
        more = commands["dry run"][stage] - commands["session"][stage]
        assert more <= fakes | sizes, stage
        less = commands["session"][stage] - commands["dry run"][stage]
        assert {word for word in less if "compute-sanitizer" not in word} <= real, stage


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path):
    run = session("--out", tmp_path / "out")
    assert run.returncode == 2
    assert run.stderr.startswith("error: torch finds no CUDA device\n\nhint: ")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_are_rejected(tmp_path):
    (tmp_path / "file").touch()
    for words, message in (
        (["--dry-run", "--limit-s", "-5"], "-5 is not a number of seconds above 0"),
        (["--dry-run", "--stage-limit-s", "nan"], "nan is not a number of seconds above 0"),
        (["--arch", "90"], "--arch is for --dry-run"),
    ):
        done = session(*words, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert message in done.stderr
    done = session("--dry-run", "--stages", "driver", "--out", tmp_path / "file")
    assert done.returncode == 1
    assert f"error: no folder {tmp_path / 'file'}: File exists\n\nhint: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupted_session_shows_its_stages(monkeypatch, tmp_path, capsys):
    def stages(*_):
        yield {"stage": "compile", "status": "passed", "seconds": 1.0, "limit_s": 9.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["session", "--out", str(tmp_path / "out"), "--dry-run"])
    monkeypatch.setattr(gpu_session, "identify", lambda *_: {})
    monkeypatch.setattr(gpu_session, "run_stages", stages)
    assert gpu_session.main() == 1
    out, err = capsys.readouterr()
    assert "compile" in out
    assert "error: interrupted\n\nhint: " in err


def check_measurements(folder):
    """Check that all parts of the benchmarks have recorded lines with the GPU and its clocks."""
    found = {path.stem.removeprefix("gpu_"): read_lines(path) for path in folder.glob("*.jsonl")}
    assert found.keys() == {
        *("link", "methods", "widths", "tlb", "gather", "gather_dtypes", "gather_programs"),
        *("cache", "codes", "bulk", "two_engines", "overlap", "epoch"),
    }
    for line in (line for lines in found.values() for line in lines):
        assert (line["gpu"], line["gpu_state"]["max_sm_mhz"]) == ("fake GPU", 1980)
        # nvidia-smi does not report it
        assert line["gpu_state"]["watts"] is None
    methods = {line["method"] for line in found["epoch"]}
    stages = {"sampling", "transfer", "compute"}
    assert stages < methods
    # alternatives, zero-copy with several dtypes and shares, and all features on the GPU
    assert len(methods - stages) == 11
    assert {line["method"] for line in found["bulk"]} >= {"bulk", "threads"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_within_tiny_limits_ends_with_a_table(tmp_path):
    run = session("--dry-run", "--out", tmp_path, "--stage-limit-s", "0.3")
    assert run.returncode == 1
    lines = lines_of(tmp_path)
    assert [line["stage"] for line in lines] == list(gpu_session.STAGES)
    assert {line["status"] for line in lines} == {"timed out after 0.3 s"}
    shown = run.stdout.splitlines()
    assert shown[: len(lines) + 1] == table_of(lines)
    assert shown[-1] == str(tmp_path / "session.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_whole_dry_run_passes(tmp_path):
    # the old name of the option
    run = session("--rehearse", "--out", tmp_path)
    logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("*.log"))
    assert run.returncode == 0, run.stdout + logs
    assert [line["stage"] for line in lines_of(tmp_path)] == list(gpu_session.STAGES)
    gathers = (tmp_path / "gathers.log").read_text()
    assert "COMPUTE-SANITIZER" in gathers
    assert gathers.count(" passed") == 12
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["device"], result["gpu"], result["epochs"]) == ("cuda:0", "fake GPU", 2)
    assert "Resources of kernels, and budgets" in run.stdout
    for line in lines_of(tmp_path):
        assert (line["gpu"], line["gpu_state"]["sm_mhz"]) == ("fake GPU", 345)
        assert line["driver"]
    found = json.loads((tmp_path / "driver.json").read_text())
    assert found["attributes"]["host_register_supported"] == 1
    rules = found["rules"]
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
    check_measurements(tmp_path / "results")
    compared = read_lines(tmp_path / "comparison.jsonl")
    assert {line["compared"] for line in compared} >= {"bus", "gather"}
    assert all(line["gpu"] == "fake GPU" for line in compared)
    assert "Gathers, and the model of PCIe traffic" in run.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_compiled_for_absent_gpus_and_found_in_the_cache(tmp_path):
    cache = tmp_path / "cache"
    options = ["--dry-run", "--stages", "compile", "--cache", cache, "--arch", "90"]
    limits = ["--limit-s", "500", "--stage-limit-s", "500"]
    for name in ("first", "again"):
        run = session(*options, *limits, "--out", tmp_path / name)
        assert run.returncode == 0, (tmp_path / name / "compile.log").read_text()
        written = sorted(cache.rglob("*.cubin"))
        assert len(written) >= 9
        if name == "first":
            first = {path: path.stat().st_mtime_ns for path in written}
    assert {path: path.stat().st_mtime_ns for path in written} == first
    kernels = read_lines(tmp_path / "again" / "kernels.jsonl")
    assert {line["launch"] for line in kernels} >= {"gather 602 float32, shifted"}
    assert all(line["arch"] == 90 and line["registers"] > 0 for line in kernels)
