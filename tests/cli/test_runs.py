"""`gcnzc train --runs N`: several seeds in one command."""

import json
import shutil
import signal
import statistics

import pytest
from command_runs import ran, started
from training import planted

from gcnzc import prepare
from gcnzc.datasets.generate import Shape, make
from gcnzc.train import run as train_run
from gcnzc.train.errors import SavedRun
from gcnzc.train.run_folder import checkpoint_path, last_checkpoint

OPTIONS = ["--fanouts", "3,3", "--hidden", "4", "--batch-size", "100"]
OPTIONS += ["--epochs", "2"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 400, 2000, 8, 3)


def result_of(run):
    return json.loads((run / "result.json").read_text())


def test_several_seeds_are_summarized_and_resumed_as_a_whole(graph, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    train_one, calls = train_run.train, []

    def stops_in_the_second(config, folder, *given, **named):
        calls.append(config.loading.seed)
        if folder == out / "seed-5" and config.run.resume is None:
            train_one(config, folder, *given, **named)
            (folder / "result.json").unlink()
            raise SavedRun("after epoch 2", folder, signal.SIGINT)
        return train_one(config, folder, *given, **named)

    monkeypatch.setattr(train_run, "train", stops_in_the_second)
    words = [graph, *OPTIONS, "--runs", 3, "--seed", 4, "--out", out]
    _, err = ran(capsys, "train", *words, status=130)
    expected = f"stopped after epoch 2 of seed 5; resume with `gcnzc train --resume {out}`"
    assert expected in err
    assert {path.name for path in out.iterdir()} == {"runs.json", "seed-4", "seed-5"}
    line, err = ran(capsys, "train", "--resume", out)
    # the first run was finished
    assert calls == [4, 5, 5, 6]
    results = [result_of(out / f"seed-{seed}") for seed in (4, 5, 6)]
    scores = [result["test_accuracy"] for result in results]
    assert len(set(scores)) > 1
    assert line["test_accuracy"] == statistics.fmean(scores)
    assert line["test_accuracy_std"] == statistics.stdev(scores)
    assert (line["runs"], line["seeds"], line["metric"]) == (3, [4, 5, 6], "accuracy")
    assert [each["test_accuracy"] for each in line["results"]] == scores
    assert f"test accuracy {statistics.fmean(scores):.4f} ± {statistics.stdev(scores):.4f}" in err
    assert json.loads((out / "summary.json").read_text()) == line
    # the folder of the runs stands for all of them
    shown = ran(capsys, "plot", out, "--out", tmp_path / "p.png")[0]["runs"]
    assert shown == [str(out / f"seed-{seed}") for seed in (4, 5, 6)]
    # a single run with the seed gives the same
    single, _ = ran(capsys, "train", graph, *OPTIONS, "--seed", 5, "--out", tmp_path / "single")
    assert single["test_accuracy"] == scores[1]
    # more runs and epochs extend what is there
    line, _ = ran(capsys, "train", "--resume", out, "--runs", 4, "--epochs", 3)
    assert [each["epochs"] for each in line["results"]] == [3] * 4
    assert line["seeds"] == [4, 5, 6, 7]


def test_folders_and_options_that_do_not_fit_several_runs(graph, tmp_path, capsys):
    out, single = tmp_path / "out", tmp_path / "single"
    words = [graph, *OPTIONS, "--epochs", 1]
    ran(capsys, "train", *words, "--runs", 2, "--out", out)
    ran(capsys, "train", *words, "--out", single)
    shutil.copytree(graph, tmp_path / "graph")
    shutil.copytree(single, tmp_path / "other" / "seed-1")
    for given, expected in (
        ([*words, "--runs", 2, "--out", out], "already has runs"),
        ([*words, "--runs", 2, "--out", single], "already has a run"),
        ([*words, "--out", out], "already has runs"),
        ([*words, "--runs", 2, "--out", tmp_path / "other"], "seed-1 already has a run"),
        ([*words, "--runs", 2, "--out", tmp_path / "graph"], "has a prepared graph"),
        (["--resume", out, "--runs", 1], "has several runs"),
        (["--resume", single, "--runs", 2], "no runs in"),
        (["--resume", out, "--lr", 0.5], "has --lr none, not 0.5"),
        (["--resume", out, "--seed", 1], "has --seed 0, not 1"),
    ):
        _, err = ran(capsys, "train", *given, status=1)
        assert expected in err
        assert "\nhint: " in err
    # a damaged result is written again
    result = out / "seed-1" / "result.json"
    whole = result.read_text()
    for damaged in ("", '{"options": 1}', whole.replace('"seed": 1', '"sed": 1')):
        result.write_text(damaged)
        line, _ = ran(capsys, "train", "--resume", out)
        assert json.loads(whole)["test_accuracy"] == line["results"][1]["test_accuracy"]
    assert f"such as {out}/seed-0" in ran(capsys, "evaluate", out, status=1)[1]
    # before the first run
    last = [*words, "--runs", 2, "--seed", 2**63 - 1, "--out", tmp_path / "last"]
    _, err = ran(capsys, "train", *last, status=1)
    assert "--seed must be at most" in err
    assert not (tmp_path / "last").exists()


def test_runs_that_fail_or_are_damaged(graph, tmp_path, capsys):
    out = tmp_path / "out"
    words = [graph, *OPTIONS, "--runs", 2, "--out", out]
    # before the training: the same command can be given again
    ran(capsys, "train", tmp_path / "none", *words[1:], status=1)
    ran(capsys, "train", *words, "--keep", 2)
    error = ran(capsys, "train", "--resume", out, "--epochs", 1, "--runs", 3, status=1)[1]
    assert f"{out / 'seed-0'} has finished 2 epochs, more than --epochs 1" in error
    assert json.loads((out / "runs.json").read_text())["runs"] == 2
    last, before = last_checkpoint(out / "seed-1"), checkpoint_path(out / "seed-1", 1)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    error = ran(capsys, "train", "--resume", out, "--runs", 3, status=1)[1]
    assert f"delete {last}, and the same command resumes from {before.name}" in error
    last.write_bytes(whole)
    for text in (None, "{}", "{"):
        (out / "runs.json").unlink()
        if text is not None:
            (out / "runs.json").write_text(text)
        error = ran(capsys, "train", "--resume", out, "--runs", 2, status=1)[1]
        assert f"copy {out / 'seed-0' / 'config.json'} to it, and resume with --runs N" in error
        shutil.copy(out / "seed-0" / "config.json", out / "runs.json")
        assert ran(capsys, "train", "--resume", out, "--runs", 2)[0]["runs"] == 2


def test_runs_on_another_graph_are_not_averaged(graph, tmp_path, capsys):
    make(tmp_path / "raw", "planted", Shape(400, 2000, 8, 3), seed=7)
    prepare(tmp_path / "raw", tmp_path / "other")
    # prepared graphs, and their sources
    for number, pair in enumerate(
        (
            (graph, tmp_path / "other"),
            (graph.parent / "raw", tmp_path / "raw"),
            (graph, tmp_path / "raw"),
        )
    ):
        out = tmp_path / f"out{number}"
        ran(capsys, "train", pair[0], *OPTIONS, "--runs", 2, "--out", out)
        runs = (out / "runs.json").read_text()
        _, err = ran(capsys, "train", pair[1], "--resume", out, "--runs", 3, status=1)
        assert f"{pair[1]} is not the graph that the run in {out / 'seed-0'} was trained on" in err
        assert (out / "runs.json").read_text() == runs
        assert ran(capsys, "train", pair[0], "--resume", out)[0]["runs"] == 2


@pytest.mark.slow
def test_several_seeds_with_workers_print_one_line(graph, tmp_path):
    out = tmp_path / "out"
    lines = []
    for words in ([graph, *OPTIONS, "--workers", 2, "--runs", 2, "--out", out], ["--resume", out]):
        with started("train", *words) as process:
            lines.append(json.loads(process.communicate()[0]))
        (out / "seed-1" / "result.json").unlink()
    assert (lines[0]["runs"], lines[0]["workers"]) == (2, 2)
    assert len({line["results"][1]["test_accuracy"] for line in lines}) == 1
