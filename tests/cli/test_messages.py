"""Errors on the command line name the option and suggest a correction."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gcnzc import prepare
from gcnzc.cli import main
from gcnzc.cli.commands import COMMANDS
from gcnzc.cli.parser import parse
from gcnzc.datasets.generate import Shape, make

ROOT = Path(__file__).parents[2]
TRAINING = ["--layers", "2", "--fanouts", "3,3", "--hidden", "4", "--epochs", "1"]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["train", "--lr", "abc"], "--lr: 'abc' is not a number", "`gcnzc train --help`"),
        (["train", "--epochs", "1.5"], "--epochs: '1.5' is not a whole number", ""),
        (["cost", "--step-s", "x"], "--step-s: 'x' is not a number", "`gcnzc cost --help`"),
        (["train", "--fanouts", "a"], "--fanouts: 'a' is not a list of whole numbers", ""),
        (["train", "--model", "sag"], "'sag' for argument '--model'", ""),
        (["trian", "x"], "there is no command 'trian'", "did you mean train?"),
        (["train", "--optimiser", "adam"], "--optimiser", "did you mean --optimizer?"),
        (["train", "--dropuot=0.1"], "--dropuot=0.1", "did you mean --dropout?"),
        (["train", "--no-skpi"], "--no-skpi", "did you mean --no-skip?"),
        (["train", "x", "--fanouts", "10", "5"], "5", "commas and no spaces"),
        (["quux"], "there is no command 'quux'", "`gcnzc --help` lists the commands"),
    ],
)
def test_an_unknown_option_is_reported_with_the_nearest_one(words, error, hint, capsys):
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert error in lines[0]
    assert hint in lines[1]


def test_the_help_of_a_negative_flag_describes_its_effect(capsys):
    flags = 0
    for kind in COMMANDS:
        own = [
            f"--no-{field.name}".replace("_", "-")
            for field in fields(kind)
            if field.default is True
        ]
        if own:
            command = re.sub("(?<=.)([A-Z])", r"-\1", kind.__name__.removesuffix("Config")).lower()
            assert parse([command, "--help"]) is None
            text = " ".join(capsys.readouterr().out.replace("│", " ").split())
            for flag in own:
                # as the option, and in what is said of it
                assert len(re.findall(rf"{flag}(?![-\w])", text)) >= 2, flag
        flags += len(own)
    assert flags >= 3


def test_the_help_names_positional_arguments_and_types_of_optional_values(capsys):
    positional = {
        "train": "[DATA]",
        "prepare": "SOURCE DEST",
        "embed": "SOURCE DEST",
        "info": "DATA",
        "evaluate": "RUN",
        "plot": "RUN ...",
    }
    for command, names in positional.items():
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert names in text.splitlines()[0]
        assert "{None}" not in text
    assert main(["train", "--help"]) == 0
    assert "--outer-lr FLOAT" in capsys.readouterr().out


def test_a_reader_that_closes_the_pipe_ends_the_help_without_a_message(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["train", "--help"]) == 1
    assert capsys.readouterr().err == ""


def test_a_graph_of_another_size_is_reported_with_both_numbers(tmp_path, capsys):
    for name, shape in (
        ("own", Shape(300, 1500, 8, 3)),
        ("columns", Shape(300, 1500, 9, 3)),
        ("classes", Shape(300, 1500, 8, 4)),
    ):
        make(tmp_path / f"{name}-raw", "planted", shape, seed=3)
        prepare(tmp_path / f"{name}-raw", tmp_path / name)
    own = tmp_path / "own"
    for model in ("sage", "gat"):
        run = tmp_path / f"run-{model}"
        assert main(["train", str(own), *TRAINING, "--model", model, "--out", str(run)]) == 0
        for name, words in (
            ("columns", f"has 9 feature columns, but the model was trained on {own} with 8"),
            ("classes", f"has 4 outputs (classes), but the model was trained on {own} with 3"),
        ):
            capsys.readouterr()
            assert main(["evaluate", str(run), "--data", str(tmp_path / name)]) == 1
            err = capsys.readouterr().err
            assert f"error: {tmp_path / name} {words}" in err
            assert "give the model's options" not in err
        assert main(["evaluate", str(run), "--data", str(own)]) == 0


def test_an_example_without_arguments_shows_its_usage():
    done = subprocess.run(
        [sys.executable, "-c", "import read_npz"],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert "required: archive" in done.stderr
    assert "Traceback" not in done.stderr
