"""Presets are the published recipes, and options override them in the documented order."""

import json

import pytest

from gcnzc.cli import main
from gcnzc.cli.parser import parse
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import rows
from gcnzc.train.presets import describe_published_score, preset_names, read_preset

# options that recipes state also if they are the defaults
STATED = {"model", "optimizer", "lr", "dropout", "hidden", "epochs", "batch_size", "fanouts"}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_valid_options_and_a_source(name):
    preset, config, defaults = read_preset(name), TrainConfig(preset=name), TrainConfig()
    for option, value in preset.options.items():
        assert config[option] == rows(TrainConfig)[option].parse(value)
        assert option in STATED or config[option] != defaults[option]
    assert config.model.model.name == name.rpartition("-")[2]
    assert 0.5 < preset.score < 1
    assert 0 < preset.deviation < 0.02
    assert preset.repository.startswith("https://github.com/")
    assert preset.data.replace("-", "_") in name
    metric = config.graph.task["metric"]
    assert preset.metric == (metric if metric != "as-is" else "accuracy")
    parse(["prepare", "source", "dest", *preset.prepare.split()])


def test_options_override_the_file_which_overrides_the_preset(tmp_path):
    name, file = "pyg/ogbn_products-sage", tmp_path / "options.toml"

    def chosen(*words):
        _, config = parse(["train", "g", *words])
        return config.loading.fanouts, config.training.lr, config.model.hidden

    assert chosen("--preset", name) == ((5, 10, 15), 0.003, 256)
    file.write_text("hidden = 32\nlr = 0.5\n")
    words = ["--preset", name, "--config", str(file), "--lr", "0.25"]
    assert chosen(*words) == ((5, 10, 15), 0.25, 32)
    # a file may name the preset, too
    file.write_text(f'preset = "{name}"\nhidden = 32\n')
    assert chosen("--config", str(file), "--lr", "0.25") == ((5, 10, 15), 0.25, 32)
    # in Python, where a copy keeps all options
    config = TrainConfig(preset=name, hidden=16).replace(fanouts=(1, 2, 3))
    assert (config.run.preset, config.loading.fanouts, config.model.hidden) == (name, (1, 2, 3), 16)


def test_a_run_of_a_preset_that_is_gone_keeps_its_options(tmp_path):
    options = TrainConfig(preset="tuned/cora-gcn").to_dict() | {"preset": "tuned/gone"}
    (tmp_path / "config.json").write_text(json.dumps(options))
    _, config = parse(["train", "--config", str(tmp_path / "config.json")])
    assert config.run.preset == "tuned/gone"
    assert config.model.hidden == options["hidden"]


def test_presets_are_listed_with_scores_and_sources(capsys):
    assert main(["help", "preset"]) == 0
    table = capsys.readouterr().out.splitlines()
    for name in preset_names():
        preset = read_preset(name)
        (line,) = [line for line in table if line.startswith(f"{name} ")]
        assert f"{preset.score:.4f}" in line
        assert preset.source in line
        # what is shown can be copied to a command line
        assert main(["help", "preset", name]) == 0
        shown = capsys.readouterr().out.splitlines()
        (words,) = [line.removeprefix("options: ").split() for line in shown if "options: " in line]
        _, config = parse(["train", "g", *words])
        assert config == TrainConfig(preset=name, data="g").replace(preset=None)


def test_a_run_states_how_it_differs_from_the_preset():
    preset = read_preset("tuned/cora-gcn")
    same = describe_published_score(preset, "cora", [])
    assert same.startswith("preset tuned/cora-gcn: published test accuracy 0.8510 ± 0.0067 on cora")
    assert "this run" not in same
    other = describe_published_score(preset, "citeseer", ["--hidden", "--epochs"])
    assert other == f"{same}; this run uses citeseer and sets --hidden, --epochs differently"
