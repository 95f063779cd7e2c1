"""Every failure prints an `error:` and a `hint:` line, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from command_runs import ROOT, SMALL, failed, ran, started
from limits import HANG_S
from numba import njit
from stopped import STOPS, wait_for_state

from gcnzc.cli import execute, main
from gcnzc.cli.commands import data
from gcnzc.cli.options import COMMANDS
from gcnzc.kernels import compilation
from gcnzc.system import files
from gcnzc.train import record
from gcnzc.train import run as train_run
from gcnzc.train.writable import check_output


def answer_of(capsys, words, status) -> str:
    """The error and the hint of a command that fails."""
    return "\n".join(failed(capsys, words, status))


def test_too_little_memory_is_reported_with_a_remedy(graph, tmp_path, capsys):
    # an array of numpy's, then a tensor of torch's
    text = answer_of(capsys, ["make", tmp_path / "x", "--nodes", 10**15], 1)
    assert "error: not enough memory: " in text
    assert "--batch-size" in text
    assert list(tmp_path.iterdir()) == []
    words = [*SMALL, "--hidden", 10**13, "--out", tmp_path / "run"]
    assert "error: not enough memory: " in answer_of(capsys, ["train", graph, *words], 1)


@pytest.mark.parametrize(
    "error", [KeyError("x"), OverflowError("too large"), IndexError(), ZeroDivisionError("by zero")]
)
def test_unexpected_errors_are_reported_in_one_line_too(graph, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(data, "info_command", fail)
    text = answer_of(capsys, ["info", graph], 1)
    assert text.startswith(f"error: unexpected {type(error).__name__}:")
    assert "hint: --debug shows the traceback" in text


@pytest.mark.parametrize("hidden", [99_999_999, 10**13])
def test_a_model_that_does_not_fit_is_rejected_before_any_work(
    graph, tmp_path, capsys, monkeypatch, hidden
):
    monkeypatch.setattr(train_run, "build_optimizer", lambda *_: pytest.fail("the work began"))
    monkeypatch.setattr(train_run, "open_features", lambda *_: pytest.fail("the work began"))
    words = ["train", graph, *SMALL, "--out", tmp_path / "run", "--hidden", hidden]
    text = answer_of(capsys, words, 1)
    assert re.search("error: not enough memory: this run needs ", text)
    assert "hint: use a smaller --hidden" in text
    if hidden < 10**9:
        assert re.search(r"at least [\d.,]+ .B, but this machine has [\d.,]+ .B", text)
        assert re.search(r"[\d.,]+ .B for weights, gradients and the optimizer's state", text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["--debug", "info"], ["info", "--debug"]])
def test_debug_shows_the_traceback(words, tmp_path, capsys):
    assert main([*words, str(tmp_path / "missing")]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert re.search("^error: .*missing", err, re.MULTILINE)


def test_output_paths_are_checked_before_the_work(run, graph, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(execute, "execute", lambda *_, **__: pytest.fail("the work began"))
    missing, pipe = tmp_path / "missing", tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    link = tmp_path / "link.npy"
    link.symlink_to(graph / "features.npy")
    # as far below the folder as the names of a node type
    names = tmp_path / "typed/nodes/0/mapping/names.npy"
    names.parent.mkdir(parents=True)
    files = {"format": "gcnzc-graph", "files": {"nodes/0/mapping/names.npy": {}}}
    (tmp_path / "typed/meta.json").write_text(json.dumps(files))
    names.touch()
    # another file in the folder may be replaced
    check_output("--out", names.with_name("own.npy"), [".npy"])
    names.with_name("own.npy").touch()
    check_output("--out", names.with_name("own.npy"), [".npy"])
    plot, evaluate = ["plot", run, "--out"], ["evaluate", run, "--predictions"]
    predict, kept = ["predict", run, "--out"], "is a file of the prepared graph"
    for words, wrong in (
        ([*plot, tmp_path], f"--out: {tmp_path} is a folder"),
        ([*plot, missing / "x.png"], f"--out: there is no folder {missing}"),
        ([*plot, tmp_path / "x.txt"], "--out: 'x.txt' does not end in .png or .svg or .pdf"),
        ([*evaluate, missing / "x.npy"], f"there is no folder {missing}"),
        ([*evaluate, tmp_path], f"{tmp_path} is a folder"),
        ([*evaluate, pipe], f"{pipe} is not a regular file"),
        ([*evaluate, graph / "features.npy"], kept),
        ([*evaluate, link], f"link.npy {kept}"),
        ([*predict, link], f"link.npy {kept}"),
        ([*predict, names], f"{kept} {names.parents[3]}"),
    ):
        assert wrong in answer_of(capsys, words, 2), words


@pytest.mark.processes
def test_a_pipe_that_closes_is_no_error(graph):
    with started("info", graph) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


@pytest.mark.processes
def test_sigterm_while_preparing_leaves_nothing_behind(tmp_path):
    sizes = ["--nodes", "100", "--edges", "200", "--num-features", "10"]
    assert main(["make", str(tmp_path / "raw"), *sizes]) == 0
    words = ["prepare", tmp_path / "raw", tmp_path / "prepared"]
    with started(*words, program=STOPS) as process:
        wait_for_state(process)
        assert len(list(tmp_path.iterdir())) == 2
        assert not (tmp_path / "prepared").exists()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 143
    assert "error: terminated" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_every_command_prints_one_json_line(run, graph, tmp_path, capsys):
    commands_run = set()
    for words in (
        ["train", graph, *SMALL, "--out", tmp_path / "r"],
        ["train", graph, *SMALL, "--epochs", "1", "--runs", "2", "--out", tmp_path / "rs"],
        ["make", tmp_path / "m", "--nodes", 100, "--edges", 300, "--num-features", 4],
        ["prepare", tmp_path / "m", tmp_path / "p"],
        ["make", tmp_path / "t", "--kind", "typed", "--nodes", 200, "--edges", 2000],
        ["prepare", tmp_path / "t", tmp_path / "tp"],
        ["info", tmp_path / "tp", "--verify"],
        ["prepare", graph, tmp_path / "e", "--embed", 4],
        ["info", graph],
        ["evaluate", run],
        ["predict", run, "--out", tmp_path / "x.csv"],
        ["predict", run, "--embeddings", "--out", tmp_path / "x.npy"],
        ["export", run, "--out", tmp_path / "x.pt2"],
        ["plot", run, "--out", tmp_path / "x.png"],
        ["check", "--megabytes", 1],
        ["check", graph, "--megabytes", 1],
        ["pcie", graph, "--megabytes", 16],
    ):
        assert isinstance(ran(capsys, *words)[0], dict), words
        commands_run.add(words[0])
    assert commands_run == set(COMMANDS)


def test_the_result_of_a_run_has_its_options(run):
    line = json.loads((run / "result.json").read_text())
    assert line["device"] == "cpu"
    assert {"gcnzc", "python", "torch", "triton", "numba", "numpy", "cpu", "cores"} <= set(line)
    assert line["options"]["fanouts"] == [4, 4]
    assert line["options"]["optimizer"] == "adam"
    assert not {"out", "data", "resume"} & set(line["options"])
    assert line["epochs"] * line["epoch_s"] < line["total_s"] < 600
    # the first epoch compiles kernels or loads them: it is not part of the means
    times = [each["epoch_s"] for each in epochs_of(run)[1:]]
    assert line["epoch_s"] == pytest.approx(sum(times) / len(times))
    assert 50e6 < line["peak_memory_bytes"] < 50e9
    assert line["peak_gpu_memory_bytes"] is None


@pytest.mark.processes
def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path):
    # a module that the command imports, and in which the signal arrives
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    with started("info", "graph", PYTHONPATH=f"{tmp_path}:{ROOT}") as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert (
        err == "error: interrupted\nhint: complete files are kept, and partial ones are removed\n"
    )


@pytest.mark.processes
def test_a_closed_stdout_is_reported(tmp_path):
    command = f"{sys.executable} -m gcnzc info graph >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout is closed")
    assert "hint: redirect it" in done.stderr


def epochs_of(run):
    return [json.loads(text) for text in (run / "record.jsonl").read_text().splitlines()]


def test_a_long_compilation_is_reported_once(graph, monkeypatch, capsys):
    def compile_anew(*_):
        for function in (lambda x: x + 1, lambda x: x + 2, lambda x: x + 3):
            njit(function)(1)

    monkeypatch.setattr(data, "info_command", compile_anew)
    for least_s, reports in ((0.0, 1), (1000.0, 0)):
        monkeypatch.setattr(compilation, "REPORT_S", least_s)
        capsys.readouterr()
        assert main(["info", str(graph)]) == 0
        assert capsys.readouterr().err.count("compiling kernels for this machine") == reports


def test_two_processes_do_not_train_in_one_folder(run, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run")
    with files.locked_folder(run):
        text = answer_of(capsys, ["train", "--resume", run, "--epochs", "3"], 1)
    assert f"error: another process (pid {os.getpid()}) is training in {run}" in text
    assert main(["train", "--resume", str(run), "--epochs", "3"]) == 0


def test_a_run_is_not_written_into_the_folder_of_a_graph(graph, capsys):
    before = sorted(graph.iterdir())
    text = answer_of(capsys, ["train", graph, *SMALL, "--out", graph], 1)
    assert f"error: {graph} has a prepared graph" in text
    assert sorted(graph.iterdir()) == before


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    for write in (
        lambda path: files.write_text(path, "x"),
        lambda path: files.write_array(path, np.ones(3)),
        lambda path: record.rewrite(path, []),
    ):
        with pytest.raises(OSError, match=r"no space left on .*x\.npy\n\nhint: free"):
            write(tmp_path / "x.npy")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "[1, 2]\n"])
def test_a_damaged_record_is_reported_and_rewritten(run, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "record.jsonl").write_bytes(damage.encode("latin-1"))
    text = answer_of(capsys, ["plot", folder], 1)
    assert "record.jsonl" in text
    assert "unexpected" not in text
    assert main(["train", "--resume", str(folder), "--epochs", "4"]) == 0
    lines = [json.loads(text) for text in (folder / "record.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        *({"classes": value} for value in ("x", [1, 2, 3, 4])),
        *({"num_classes": value} for value in (-1, "4")),
        {"features": 3},
        {"num_label_columns": -1},
    ],
)
def test_a_damaged_schema_is_reported(run, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / "schema.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    words = ["predict", folder, "--out", tmp_path / "out.csv"]
    assert f"schema.json is damaged: {next(iter(damage))} is" in answer_of(capsys, words, 1)


def test_an_epoch_of_few_steps_is_reported(graph, tmp_path, capsys):
    words = ["train", str(graph), *SMALL[:-4], "--epochs", "1", "--threads", "1"]
    for size, steps in ((1024, "a single step"), (500, "only 2 steps"), (32, None)):
        err = ran(capsys, *words, "--batch-size", size, "--out", tmp_path / str(size))[1]
        message = f"warning: an epoch is {steps} of {size:,} of the "
        assert message in err if steps else "an epoch is" not in err


def test_a_file_in_the_place_of_a_folder_is_named(run, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    words = ["predict", run, "--embeddings", "--out", tmp_path / "rows.npy", "--scratch"]
    for folder in (file, file / "in"):
        text = answer_of(capsys, [*words, folder], 1)
        assert re.search(rf"error: {file}(/in)? is not a folder", text)
        assert "hint: choose another path" in text
