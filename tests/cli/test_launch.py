"""`gcnzc train --workers N`: normal runs and failures."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from command_runs import ROOT, started, wait_for
from limits import HANG_S, NEVER_S
from training import planted, saved

from gcnzc import load
from gcnzc.cli import launch, main
from gcnzc.exchange import Group, lockstep
from gcnzc.train.epoch_stats import seeds_checksum
from gcnzc.train.errors import SavedRun
from gcnzc.train.record import Launch

# a worker that is stopped is killed soon
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
# on a busy machine, saving takes longer than three seconds
TIME_TO_SAVE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(NEVER_S)}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 2000, 12000, 24, 4)


@contextmanager
def launched(graph, run, *words, environment=(), **options):
    """The launcher of a run, and none of its processes left at the end."""
    sizes = ["--fanouts", "5,5", "--hidden", "16", "--batch-size", "30"]
    words = [*sizes, "--checkpoint-every-s", "0.3", "--timeout-s", "30", *words]
    given = ENVIRONMENT | dict(environment)
    with started("train", graph, "--out", run, *words, **options, **given) as process:
        try:
            yield process
        finally:
            process.kill()
            for worker in of_this(run):
                os.kill(worker, signal.SIGKILL)


def of_this(run):
    """Processes of a run in the order in which they were started: the launcher's first."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                started = (entry / "stat").read_text().rpartition(")")[2].split()[19]
            except OSError:
                continue
            if str(run) in words:
                # process ids alone do not give the order: they start again at the limit
                found[int(entry.name)] = int(started), int(entry.name)
    return sorted(found, key=found.__getitem__)


# of /proc/net/tcp and tcp6: 127.0.0.1, ::1 and ::ffff:127.0.0.1
LOOPBACK = {"0100007F", f"{1 << 24:032X}", "0000000000000000FFFF00000100007F"}


def listening(processes):
    """The addresses on which these processes accept TCP connections, as the kernel writes them."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            name = os.readlink(entry)
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def epochs(run):
    path = run / "record.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.processes
def test_a_lost_worker_is_replaced_and_the_result_is_the_same(graph, tmp_path):
    run = tmp_path / "run"
    words = ("--workers", "2", "--epochs", "25")
    with launched(graph, run, *words, "--evaluate-every", "100") as process:
        # before it has imported torch, and anybody knows of it but the kernel
        wait_for(lambda: len(of_this(run)) == 3)
        os.kill(of_this(run)[-1], signal.SIGSTOP)
        wait_for(lambda: epochs(run) >= 2)
        os.kill(of_this(run)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=HANG_S)
        assert not of_this(run)
    assert process.returncode == 0, err
    assert "rank 1 is stopped by a signal" in err
    assert "rank 1 on" in err
    assert "has stopped sending heartbeats" in err
    assert "rank 0 on" not in err
    assert "resuming " in err
    # one line, of the first worker
    line = json.loads(out)
    assert (line["workers"], line["epochs"]) == (2, 25)
    lines = (run / "record.jsonl").read_text().splitlines()
    assert len(lines) == 25
    # every epoch used each seed once
    seeds = load(graph).split["train"]
    expected = (len(seeds), f"{seeds_checksum(seeds):016x}")
    for line in map(json.loads, lines):
        assert (line["seeds"], line["seeds_checksum"]) == expected
    # nothing but what a run keeps
    assert {path.name for path in run.iterdir()} >= {"logs", "workers.jsonl", "result.json"}
    assert not list(run.glob("*.partial*"))


@pytest.mark.processes
def test_an_interrupted_run_continues_with_fewer_workers(graph, tmp_path):
    run = tmp_path / "run"
    words = ("--workers", "2", "--epochs", "10000", "--evaluate-every", "10000")
    with launched(graph, run, *words, environment=TIME_TO_SAVE) as process:
        wait_for(lambda: epochs(run) >= 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
        assert not of_this(run)
    assert process.returncode == 130
    assert (
        len(re.findall("^stopped (?:in|after) epoch .*; resume with `gcnzc", err, re.MULTILINE))
        == 1
    )
    assert "Traceback" not in err
    # the launcher adds no error of its own
    assert not re.findall("^error: ", err, re.MULTILINE)
    state = saved(run)
    assert state["workers"] == 2
    words = ["--resume", run, "--workers", "1", "--epochs", state["epoch"] + 2]
    with started("train", *words) as process:
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert json.loads(out)["epochs"] == state["epoch"] + 2


def run_ids(run):
    """The run ids in the environments of a run's workers."""
    found = []
    for process in of_this(run):
        environment = Path(f"/proc/{process}/environ").read_text().split("\0")
        found += [each.partition("=")[2] for each in environment if "TORCHELASTIC_RUN_ID=" in each]
    return found


def test_runs_have_different_random_run_ids(tmp_path, monkeypatch):
    """A process that knows the run id could join the run, so it must not be guessable."""
    found = []

    def record(config, _command):
        found.append(uuid.UUID(config.run_id))
        return lambda *_words: {}

    monkeypatch.setattr(launch, "elastic_launch", record)
    for name in ("one", "other"):
        assert launch.launch(["train"], 2, tmp_path / name, 3) == 0
    assert len(set(found)) == 2
    # of 122 random bits
    assert {(each.version, each.variant) for each in found} == {(4, uuid.RFC_4122)}


@pytest.mark.processes
def test_a_user_error_is_reported_once_and_not_retried(graph, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    # as the installed command is started, from a folder with another version of the package
    command = tmp_path / "bin" / "gcnzc"
    command.parent.mkdir()
    command.write_text("import sys\nfrom gcnzc.cli import main\nsys.exit(main())\n")
    other = tmp_path / "checkout" / "gcnzc" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise ImportError('the package in the current folder')\n")
    here = {"program": (sys.executable, str(command)), "cwd": tmp_path / "checkout"}
    with launched(graph, run, "--workers", "2", **here) as process:
        out, err = process.communicate(timeout=HANG_S)
        assert not of_this(run)
    assert process.returncode == 1
    assert out == ""
    assert err.count("already has a run") == 1
    assert "Traceback" not in err


@pytest.mark.processes
def test_a_launcher_that_dies_takes_its_workers_with_it(graph, tmp_path):
    run = tmp_path / "run"
    words = ("--workers", "2", "--epochs", "10000", "--evaluate-every", "10000")
    with launched(graph, run, *words) as process:
        wait_for(lambda: epochs(run) >= 1)
        # the random id of this run, which no other process can guess
        one, other = run_ids(run)
        assert one == other
        assert uuid.UUID(one).version == 4
        # nothing that another machine could connect to
        addresses = listening(of_this(run))
        assert addresses
        assert {address for address in addresses if address not in LOOPBACK} == set()
        process.kill()
        process.wait()
        wait_for(lambda: not of_this(run))
        _, err = process.communicate()
    assert "frame #" not in err
    assert saved(run)["epoch"] >= 0


def test_a_worker_reports_that_a_restart_cannot_fix_its_error(tmp_path, monkeypatch):
    monkeypatch.delenv(launch.FATAL, raising=False)
    assert not launch.report_fatal_error()
    assert not launch.has_reported_fatal_error()
    with open(os.memfd_create("fatal"), "rb") as memory:
        monkeypatch.setenv(launch.FATAL, f"/proc/self/fd/{memory.fileno()}")
        assert not launch.has_reported_fatal_error()
        assert launch.report_fatal_error()
        assert launch.has_reported_fatal_error()
    # the launcher was killed
    assert not launch.has_reported_fatal_error()
    assert not launch.report_fatal_error()


@pytest.mark.parametrize(
    ("restarts", "own_launcher", "is_restartable"),
    [(None, False, False), ("0", False, False), ("3", False, True), ("3", True, False)],
)
def test_a_worker_that_its_launcher_may_restart_reports_no_error(
    restarts, own_launcher, is_restartable, tmp_path, monkeypatch, capsys
):
    names = {"TORCHELASTIC_MAX_RESTARTS": restarts}
    names |= {launch.FATAL: str(tmp_path / "fatal") if own_launcher else None}
    names |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in names.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def stop(*_):
        raise SavedRun("in epoch 10", tmp_path, 15)

    monkeypatch.setattr("gcnzc.cli.execute.init_group", lambda *_, **__: nullcontext(Group()))
    monkeypatch.setattr("gcnzc.cli.execute.train_command", stop)
    # with gcnzc's launcher, a status of 0 lets it end the run
    assert main(["train", str(tmp_path)]) == (0 if own_launcher else 1 if is_restartable else 143)
    err = capsys.readouterr().err
    assert ("unless the launcher restarts the workers" in err) == is_restartable
    assert f"stopped in epoch 10; resume with `gcnzc train --resume {tmp_path}`" in err


def test_a_launch_is_identified_by_the_run_id_or_by_all_its_launchers(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch.own_launch() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "products")
    assert launch.own_launch() == Launch("products")
    # what torchrun writes where the user gave none
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    own = launch.own_launch()
    assert own == launch.own_launch()
    with subprocess.Popen(["sleep", "60"]) as other:
        monkeypatch.setattr(os, "getppid", lambda: other.pid)
        others = launch.own_launch()
        other.kill()
    assert own.run_id is None
    assert own.launchers.isdisjoint(others.launchers)
    agreed = lockstep([launch.agree_on_launch(each) for each in (own, others, own)]).results
    assert agreed == [Launch(None, own.launchers | others.launchers)] * 3
    for each in (None, Launch("products")):
        assert lockstep([launch.agree_on_launch(each)] * 1).results == [each]


def test_a_run_belongs_to_the_launch_that_started_it_last(tmp_path):
    assert not Launch("seven").has_started(tmp_path)
    Launch("seven").write(tmp_path)
    assert Launch("seven").has_started(tmp_path)
    assert not Launch("eight").has_started(tmp_path)
    assert not Launch(None, frozenset("a")).has_started(tmp_path)
    Launch(None, frozenset("ab")).write(tmp_path)
    assert not Launch("seven").has_started(tmp_path)
    # launchers are replaced one after the other; one that was cut off for a while comes back
    Launch(None, frozenset("bc")).write(tmp_path)
    for names, has_started in (("cd", True), ("a", True), ("de", False)):
        assert Launch(None, frozenset(names)).has_started(tmp_path) == has_started
    (tmp_path / "launch.json").write_text("{")
    assert not Launch(None, frozenset("a")).has_started(tmp_path)


@pytest.mark.parametrize(
    ("machines", "shared", "is_closed"),
    [("1", "True", False), ("2", "True", True), ("2", "False", False)],
)
def test_a_rendezvous_store_that_a_new_machine_cannot_find_is_reported(
    machines, shared, is_closed, monkeypatch
):
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    assert launch.is_closed_to_new_machines() == is_closed
