"""Errors on the command line name the option and suggest a correction."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gcnzc.cli import main
from gcnzc.cli.commands import COMMANDS
from gcnzc.cli.errors import UNKNOWN_REMEDY
from gcnzc.cli.parser import parse

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["train", "--lr", "abc"], "--lr: 'abc' is not a number", "`gcnzc train --help`"),
        (["train", "--epochs", "1.5"], "--epochs: '1.5' is not a whole number", ""),
        (["train", "--fanouts", "a"], "--fanouts: 'a' is not a list of whole numbers", ""),
        (["train", "--model", "sag"], "'sag' for argument '--model'", ""),
        (["trian", "x"], "there is no command 'trian'", "did you mean train?"),
        (["train", "--optimiser", "adam"], "--optimiser", "did you mean --optimizer?"),
        (["train", "--dropuot=0.1"], "--dropuot=0.1", "did you mean --dropout?"),
        (["train", "--no-skpi"], "--no-skpi", "did you mean --no-skip?"),
        (["train", "x", "--fanouts", "10", "5"], "5", "commas and no spaces"),
        (["train", "--resume", "r", "--out", "x"], "--out x with --resume r", "omit --out"),
        (["quux"], "there is no command 'quux'", "`gcnzc --help` lists the commands"),
        (["--epochs", "3", "train", "x"], "--epochs is before the command", "gcnzc train --epochs"),
    ],
)
def test_an_unknown_option_is_reported_with_the_nearest_one(words, error, hint, capsys):
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert error in lines[0]
    assert hint in lines[1]


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("words", [["--no-such-option"], ["x"] * 4])
def test_the_hint_of_a_command_is_not_the_list_of_commands(kind, words, capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, kind, lambda *_: None)
    command = re.sub("(?<=.)([A-Z])", r"-\1", kind.__name__.removesuffix("Config")).lower()
    assert main([command, *words]) in (0, 2)
    err = capsys.readouterr().err
    assert "`gcnzc --help`" not in err
    assert UNKNOWN_REMEDY not in err


@pytest.mark.parametrize("launched", ["--workers", "torchrun"])
@pytest.mark.parametrize(
    ("options", "workers", "given", "hint"),
    [
        ("--strategy diloco --quorum 1", 2, "--quorum 1", "give --quorum 2, more than half"),
        ("--strategy diloco --quorum 5", 2, "--quorum 5", "give --quorum 2, more than half"),
        ("--strategy diloco --quorum 2", 1, "--quorum 2", "give --workers 2 to 3, or start"),
        ("--strategy fedglomo --participants 3", 2, "--participants 3", "give --participants 2 or"),
        ("--strategy fedglomo --participants 3", 1, "--participants 3", "give --workers 3 or more"),
    ],
)
def test_a_number_of_workers_that_a_strategy_does_not_support_is_wrong_usage(
    launched, options, workers, given, hint, monkeypatch, capsys
):
    words, found = options.split(), f"--workers {workers}"
    if launched == "torchrun":
        found = f"{workers} workers"
        for name, value in {"RANK": "0", "WORLD_SIZE": workers, "MASTER_ADDR": "0.0.0.0"}.items():
            monkeypatch.setenv(name, str(value))
    else:
        words += ["--workers", str(workers)]
    if workers == 1:
        found = "one worker"
    # neither is the graph read, nor a worker started
    assert main(["train", "no-graph", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {given} with {found}"
    assert lines[1].startswith(f"hint: {hint}")
    assert "None" not in lines[1]


def test_an_invalid_number_of_workers_in_the_environment_is_wrong_usage(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "0.0.0.0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "no-graph"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the environment variable WORLD_SIZE is 'x'"
    assert lines[1].startswith("hint: it is an integer that a launcher")


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
            assert "(default: True)" not in text
            for flag in own:
                # the positive flag is not listed, so the help says what the negative one does
                assert re.search(rf" {flag} ([\w ]+: )?(omit|permit|ignore) ", text), flag
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


@pytest.mark.processes
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
