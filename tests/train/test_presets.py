"""Presets are the published recipes, and options override them in the documented order."""

import json
from dataclasses import replace

import pytest

from gcnzc.cli import main
from gcnzc.cli.errors import UsageError
from gcnzc.cli.parser import parse
from gcnzc.train.config import TrainConfig
from gcnzc.train.presets import (
    describe_published_score,
    preset_names,
    read_preset,
)
from gcnzc.train.unused_options import unused_options


def config_of(name):
    """The options of a preset; minibatches instead of full batches, where these do not exist."""
    layers = read_preset(name).options["layers"]
    is_full = read_preset(name).options["batch_size"] == "all"
    if not is_full or hasattr(TrainConfig, "is_full_batch"):
        return TrainConfig(preset=name)
    return TrainConfig(preset=name, batch_size=64, fanouts=(5,) * layers)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_valid_options_that_are_used(name):
    preset = read_preset(name)
    config = config_of(name)
    defaults = TrainConfig()
    for option, value in preset.options.items():
        if option == "batch_size" and value == "all":
            continue
        chosen = getattr(config, option)
        assert (list(chosen) if isinstance(chosen, tuple) else chosen) == value
        if option not in ("optimizer", "lr", "dropout", "layers", "hidden", "epochs", "norm"):
            # options that are the defaults are not listed, except those that recipes state
            assert chosen != getattr(defaults, option) or option in (
                *("model", "batch_size", "activation"),
            )
    assert not unused_options(config)
    kind = name.rpartition("-")[2]
    assert config.model == kind
    assert 0.5 < preset.score < 1
    assert 0 < preset.deviation < 0.02
    assert preset.repository.startswith("https://github.com/")
    assert preset.data.replace("-", "_") in name
    assert preset.metric == (config.metric if config.metric != "as-is" else "accuracy")
    if preset.prepare:
        words = preset.prepare.split()
        parse(["prepare", "source", "dest", *words])


def test_options_override_the_file_which_overrides_the_preset(tmp_path):
    name = "pyg/ogbn_products-sage"
    file = tmp_path / "options.toml"
    file.write_text("hidden = 32\nlr = 0.5\n")
    config = parse(["train", "g", "--preset", name])
    assert (config.fanouts, config.lr, config.hidden) == ((5, 10, 15), 0.003, 256)
    assert config.preset == name
    config = parse(["train", "g", "--preset", name, "--config", str(file), "--lr", "0.25"])
    assert (config.fanouts, config.lr, config.hidden) == ((5, 10, 15), 0.25, 32)
    # a file may name the preset, too
    file.write_text(f'preset = "{name}"\nhidden = 32\n')
    config = parse(["train", "g", "--config", str(file), "--dropout", "0.25"])
    assert (config.fanouts, config.dropout, config.hidden) == ((5, 10, 15), 0.25, 32)
    # in Python
    config = TrainConfig(preset=name, hidden=16)
    assert (config.fanouts, config.hidden) == ((5, 10, 15), 16)
    assert replace(config, fanouts=(1, 2, 3)).fanouts == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["tuned/coragcn"], "there is no preset 'tuned/coragcn'", "tuned/cora-gcn"),
        (["cora-gcn"], "there is no preset 'cora-gcn'", "tuned/cora-gcn"),
        (["minesweeper"], "there is no preset 'minesweeper'", "tuned/minesweeper-gat"),
        (["xyz"], "there is no preset 'xyz'", "`gcnzc presets` lists all"),
        (["tuned/cora-gcn", "--resume", "r"], "--preset tuned/cora-gcn with --resume r", "keeps"),
        (["tuned/cora-gcn", "--config", "c.json"], "has no effect with --config c.json", "one of"),
        (
            ["tuned/cora-gcn", "--batch-size", "64"],
            "--batch-size 64 without --fanouts",
            "one number",
        ),
    ],
)
def test_wrong_presets_are_rejected(words, message, hint):
    with pytest.raises(UsageError, match=message.replace("(", "\\(")) as error:
        parse(["train", "g", "--preset", *words])
    assert hint in str(error.value).partition("\n\nhint: ")[2]


def test_presets_are_listed_with_scores_and_sources(capsys):
    assert main(["presets"]) == 0
    out, table = capsys.readouterr()
    listed = json.loads(out)["presets"]
    assert [each["name"] for each in listed] == preset_names()
    for each in listed:
        line = next(line for line in table.splitlines() if line.startswith(f"{each['name']} "))
        assert f"{each['score']:.4f}" in line
        assert each["source"] in line
    assert main(["presets", "tuned/coauthor_cs-gat"]) == 0
    assert "--hidden 256 --layers 1 --heads 1" in capsys.readouterr().err
    assert main(["presets", "tuned/none"]) == 2
    assert "there is no preset 'tuned/none'" in capsys.readouterr().err


def test_a_run_states_how_it_differs_from_the_preset():
    preset = read_preset("tuned/cora-gcn")
    same = describe_published_score(preset, "cora", vars(TrainConfig(preset=preset.name)))
    assert same.startswith("preset tuned/cora-gcn: published test accuracy 0.8510 ± 0.0067 on cora")
    assert "this run" not in same
    config = TrainConfig(preset=preset.name, epochs=3, hidden=16)
    other = describe_published_score(preset, "citeseer", vars(config))
    assert other == f"{same}; this run uses citeseer and sets --hidden, --epochs differently"
