"""Commands do what their help says, and report errors with a remedy."""

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_runs import SMALL, failed, ran
from tiny_graph import tiny

import gcnzc
from gcnzc.cli import main
from gcnzc.cli.commands import check
from gcnzc.cli.output import warned_with
from gcnzc.train import checkpoint
from gcnzc.train import run as train_run
from gcnzc.train.plots import run_labels
from gcnzc.train.run_folder import last_checkpoint
from gcnzc.tune import choose, machine, search


def test_prepare_reports_edges_without_their_reverse(tmp_path, capsys):
    archive = tiny().write_npz(tmp_path / "mine.npz")
    for choice, expected in (("auto", True), ("yes", False), ("no", False)):
        _, err = ran(capsys, "prepare", archive, tmp_path / choice, "--bidirected", choice)
        assert ("most edges have no reverse edge" in err) == expected


def test_columns_of_features_of_different_scale_are_reported(tmp_path, capsys):
    graph = tiny()
    for factor in (1, 1e5):
        rows = graph.features * [factor, 1, 0, 1, 1]
        archive = graph.but(features=rows).write_npz(tmp_path / f"{factor:g}.npz")
        _, err = ran(capsys, "prepare", archive, tmp_path / f"{factor:g}")
        assert ("the standard deviations of columns differ by a factor of" in err) == (factor > 1)


def test_training_prints_one_line_and_fills_the_run_folder(graph, tmp_path, capsys):
    line, err = ran(capsys, "train", graph, *SMALL, "--out", tmp_path / "r")
    wanted = {"test_accuracy", "valid_accuracy", "epoch_s", "sample_s", "gather_s", "compute_s"}
    assert wanted | {"exchange_s", "payload_bytes", "bytes_sent"} <= set(line)
    assert line["epochs"] == 2
    assert 0.5 < line["test_accuracy"] <= 1
    assert "epoch 2/2" in err
    files = {path.name for path in (tmp_path / "r").iterdir()} - {"tensorboard"}
    wanted = {"config.json", "record.jsonl", "curves.png", "checkpoints", "best.pt"}
    assert files == wanted | {"result.json", "schema.json"}
    assert [path.suffix for path in (tmp_path / "r" / "checkpoints").iterdir()] == [".pt"]
    assert len((tmp_path / "r" / "record.jsonl").read_text().splitlines()) == 2


def test_a_tuning_profile_is_measured_saved_shown_and_used(graph, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GCNZC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "MIN_MEASURED_S", 0.001)
    monkeypatch.setattr(choose, "NOISY", float("inf"))
    monkeypatch.setattr(search, "ROUNDS", (2, 2))
    little = ["--megabytes", "1"]
    assert ran(capsys, "check", *little)[0]["plans"] == []
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "plans.json").write_text("{")
    words = ["--fanouts", "4,4", "--batch-size", "32", "--cache-memory", "20KB"]
    found, err = ran(capsys, "check", graph, "--tune", *words, *little)
    (made,) = found["plans"]
    assert err.count("cannot read tuning profiles in") == 1
    assert found["kept_in"] == str(tmp_path / "cache" / "plans.json")
    assert made["key"]["table"]["row_bytes"] == 64
    # 20,000 bytes less 4 a row, in lines of 128 B
    assert made["choices"]["hot"]["value"] == (20_000 - 4 * 1500) // 128 / 1500
    for setting in ("programs", "threads", "ahead", "copied_share", "hot"):
        assert any(line.startswith(f"{setting} ") for line in err.splitlines()), setting
    # for the machine, or for this graph; not for another
    for more in ([], [graph]):
        found, err = ran(capsys, "check", *more, *little)
        assert found["plans"] == [made]
        assert "threads" in err
    raw = tmp_path / "raw"
    ran(capsys, "make", raw, "--nodes", "50", "--edges", "100", "--classes", "3")
    assert ran(capsys, "check", raw, *little)[0]["plans"] == []
    words = ["train", graph, *SMALL, "--epochs", "1"]
    _, err = ran(capsys, *words, "--out", tmp_path / "with")
    assert f"tuning profile of {made['made'][:10]}: " in err
    for more in (
        [*words, "--out", tmp_path / "without"],
        # a run may go on with another plan, or none
        ["train", "--resume", tmp_path / "with", "--epochs", "2"],
    ):
        assert "tuning profile of" not in ran(capsys, *more, "--no-tuning-profile")[1]


def test_tuning_on_a_busy_machine_is_reported(monkeypatch, capsys):
    for load, told in ((0.1, False), (1e6, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found, err = ran(capsys, "check", "--megabytes", "1")
        assert ("other processes use" in err) == told
        assert found["load"] == load


def test_tuning_without_a_graph_works_with_a_read_only_cache_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GCNZC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(machine, "DEFAULT_TABLE_BYTES", 1 << 18)
    monkeypatch.setattr(machine, "MIN_MEASURED_S", 0.001)
    words = ["--tune", "--row-bytes", "100", "--fanouts", "2", "--megabytes", "1"]
    found, err = ran(capsys, "check", *words)
    assert found["kept_in"] is None
    assert "the tuning profile could not be stored" in err
    assert found["plans"][0]["key"]["table"]["row_bytes"] == 100
    assert found["plans"][0]["choices"]["hot"]["basis"] == "default"


def test_a_resumed_run_may_have_more_epochs(graph, tmp_path, capsys):
    whole, part = tmp_path / "whole", tmp_path / "part"
    expected, _ = ran(capsys, "train", graph, *SMALL, "--epochs", "3", "--out", whole)
    ran(capsys, "train", graph, *SMALL, "--out", part)
    found, _ = ran(capsys, "train", "--resume", part, "--epochs", "3")
    assert (found["test_accuracy"], found["epochs"]) == (expected["test_accuracy"], 3)


def test_plot_draws_two_runs(run, tmp_path, capsys):
    found, _ = ran(capsys, "plot", run, run, "--out", tmp_path / "p.png")
    assert found["picture"] == str(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_plot_of_several_runs_leaves_the_curves_of_each(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    before = (other / "curves.png").read_bytes()
    found, _ = ran(capsys, "plot", other, run)
    assert (other / "curves.png").read_bytes() == before
    assert found["picture"] == str(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 1000
    assert run_labels([Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]
    assert "there is no folder" in failed(capsys, ["plot", tmp_path / "none"], 1)[0]


def test_check_measures_the_machine(capsys, monkeypatch):
    # each copy, and each gather, takes half a second
    clock = SimpleNamespace(perf_counter=itertools.count(step=0.5).__next__)
    monkeypatch.setattr(check, "time", clock)
    line, _ = ran(capsys, "check", "--megabytes", "16")
    # of a quarter of the bytes
    assert line["copy_bytes_per_s"] == pytest.approx(16e6 / 4 / 0.5, rel=0.1)
    assert line["gather_bytes_per_s"] == line["copy_bytes_per_s"]


def test_pcie_reports_the_traffic_of_a_graph(graph, capsys, monkeypatch):
    monkeypatch.setattr("gcnzc.tune.pcie_bench.current_gpu", lambda: None)
    line, err = ran(capsys, "pcie", graph, "--split-bytes", "64")
    assert (line["split_bytes"], line["link"]) == (64, None)
    table = line["table"]
    assert (table["rows"], table["columns"], table["row_bytes"]) == (1500, 16, 64)
    # half of the rows of 64 B begin in the middle of a line, and none lies in two
    assert table["requests"] == {"32": 0, "64": 1, "96": 0, "128": 0}
    assert "1.00 requests per row" in err


def test_resuming_a_finished_run_says_so(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "r")
    _, err = ran(capsys, "train", "--resume", tmp_path / "r")
    assert "has finished all 2 epochs; --epochs adds more" in err


def test_user_warnings_are_messages():
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with warned_with(said.append):
            warnings.warn("one thing\n\nhint: another", UserWarning, stacklevel=1)
    assert said == ["warning: one thing\n\nhint: another"]


def test_files_of_another_program_in_a_run_are_rejected(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for path in (other / "best.pt", last_checkpoint(other)):
        checkpoint.save(path, {"epoch": 0, "lines": [], "graph": {}})
    assert "it has no valid" in failed(capsys, ["evaluate", other], 1)[0]
    assert "does not fit this run" in failed(capsys, ["train", "--resume", other], 1)[0]
    for text in ("{}", "[]", "3", "[" * 100_000, '{"data": 7}', "\xff"):
        (other / "config.json").write_text(text, encoding="latin-1")
        for words in (["evaluate", other], ["train", "--resume", other]):
            assert "config.json" in failed(capsys, words, 1)[0]


def test_resuming_a_run_without_its_checkpoint_is_an_error(run, tmp_path, capsys):
    lost = tmp_path / "lost"
    shutil.copytree(run, lost)
    path = last_checkpoint(lost)
    path.write_bytes(b"")
    error, hint = failed(capsys, ["train", "--resume", lost, "--epochs", "3"], 1)
    assert f"{path.name} is damaged" in error
    assert "--keep 2 keeps an earlier checkpoint" in hint
    path.unlink()
    os.mkfifo(path)
    error, _ = failed(capsys, ["train", "--resume", lost, "--epochs", "3"], 1)
    assert f"{path.name} is not a file" in error
    path.unlink()
    error, _ = failed(capsys, ["train", "--resume", lost, "--epochs", "3"], 1)
    assert "has record.jsonl, but no checkpoint" in error
    # it was killed before its first checkpoint: there is nothing to lose
    for path in lost.iterdir():
        if path.is_file() and path.name != "config.json":
            path.unlink()
    _, err = ran(capsys, "train", "--resume", lost, "--epochs", "1")
    assert "has no checkpoint yet: the run starts again" in err


def test_commands_that_do_not_fit_a_graph_or_a_run(
    run, graph, shared_data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("gcnzc.tune.pcie_bench.current_gpu", lambda: None)
    bare, new = shared_data / "ogb" / "arxiv_nofeat", tmp_path / "r"
    for words, error, hint in (
        (["pcie"], "no CUDA device", "`gcnzc pcie DATA`"),
        (["pcie", bare], "no features to read", "--embed"),
        (["train", bare, *SMALL, "--out", new], "no features", "--embed"),
        (["train", graph, *SMALL, "--out", run], "already has a run", "--resume"),
        (["train", "--resume", run, "--hidden", "32"], "--hidden 16, not 32", ""),
    ):
        found = failed(capsys, words, 1)
        assert error in found[0]
        assert hint in found[1]
    assert not new.exists()


def test_training_without_labels_is_an_error(tmp_path, capsys):
    edges = np.array([[0, 1], [1, 2]])
    gcnzc.prepare(dest=tmp_path / "g", edges=edges, features=np.eye(3))
    error, hint = failed(capsys, ["train", tmp_path / "g", *SMALL, "--out", tmp_path / "r"], 1)
    assert "g has no labelled nodes to train on" in error
    assert "check the training split of the graph" in hint


def test_an_embedding_is_used_as_features(shared_data, tmp_path, capsys):
    source = shared_data / "ogb" / "cora"
    line, _ = ran(capsys, "prepare", source, tmp_path / "g", "--embed", "24")
    assert line["features"]["columns"] == 24
    options = ["--batch-size", "140", "--epochs", "20", "--lr", "0.01", "--fanouts", "10,10"]
    line, _ = ran(capsys, "train", tmp_path / "g", *options, "--out", tmp_path / "r")
    # seven classes, of which the largest has 30 % of the nodes; the edges alone say this much
    assert line["test_accuracy"] > 0.6


@pytest.mark.parametrize(
    ("message", "error", "hint"),
    [
        (
            "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later",
            "error: the GPU failed: CUDA error: unspecified launch failure",
            "--resume RUN",
        ),
        ("CUDA out of memory. Tried to allocate 2 GiB.", "error: CUDA out of memory.", "smaller"),
        ("no such node\n\nhint: count again", "error: no such node", "hint: count again"),
    ],
)
def test_a_gpu_that_fails_is_reported(message, error, hint, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(train_run, "train", fail)
    assert main(["train", "anywhere"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-2].startswith(error)
    assert told[-1].startswith("hint: ")
    assert hint in told[-1]


@pytest.mark.parametrize(
    ("given", "policy", "words"),
    [
        ({}, "passive", ["check"]),
        ({}, "passive", ["train", "--resume", "run"]),  # its options are read with torch
        ({"OMP_WAIT_POLICY": "active"}, "active", ["check"]),
        ({"GOMP_SPINCOUNT": "1"}, None, ["check"]),
    ],
)
def test_idle_openmp_threads_of_a_command_sleep_unless_the_user_chooses(given, policy, words):
    """The variable must be set before torch loads OpenMP, so when torch is not imported yet."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from gcnzc.cli import main\n"
        f"main({words})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])} | given,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(policy)], done.stderr
