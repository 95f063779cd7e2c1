"""Options are checked on construction, and survive JSON."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gcnzc.cli.commands.data import MakeConfig
from gcnzc.train import option_groups
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.options import config_from_dict, config_to_dict, option_name
from gcnzc.train.run import train


def test_a_config_survives_json():
    config = TrainConfig(
        data=Path("g"), fanouts=(5, -1), layers=2, lr=0.1, out=Path("runs/x"), norm="batch"
    )
    assert (
        config_from_dict(TrainConfig, json.loads(json.dumps(config_to_dict(config))), "x") == config
    )


def test_options_may_have_dashes_and_be_omitted():
    config = config_from_dict(
        TrainConfig, {"batch-size": 7, "lr": 1, "fanouts": [3, 2, 1]}, "f.toml"
    )
    assert config == TrainConfig(batch_size=7, lr=1.0, fanouts=(3, 2, 1))


def test_options_that_are_a_number_or_a_word_may_be_numbers_in_a_file():
    values = {"strategy": "streaming-diloco", "local_steps": 4, "fragments": 2, "delay": 1}
    config = config_from_dict(TrainConfig, values, "f.toml")
    assert (config.local_steps, config.fragments, config.delay) == ("4", "2", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"bach_size": 7}, r"f\.toml: no option named bach_size"),
        ({"batch_size": "7"}, r"f\.toml: batch_size cannot be '7'"),
        ({"epochs": True}, r"epochs cannot be True"),
        ({"fanouts": [3, "2", 1]}, r"fanouts cannot be \[3, '2', 1\]"),
        ({"model": "mlp"}, r"model cannot be 'mlp'"),
    ],
)
def test_options_of_the_wrong_type_are_rejected(words, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(TrainConfig, words, "f.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"dropout": 1.0}, r"--dropout must be in \[0, 1\), got 1.0"),
        ({"lr": float("nan")}, "--lr must be finite, got nan"),
        ({"layers": 2}, r"^the 3 default fanouts \(15,10,5\) for 2 layers\n\nhint: give .* first$"),
        (
            {"evaluate": "sampled", "batch_size": "all"},
            "fanouts -1,-1,-1, which sample all neighbours\n\nhint: give --evaluate-fanouts",
        ),
        ({"fanouts": (5, 0, 5)}, "a fanout must be at least 1, or -1 for all neighbours, got 0"),
    ],
)
def test_values_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**options)
    assert "\n\nhint: " in str(error.value)


def test_make_requires_a_kind_of_graph():
    with pytest.raises(ValueError, match="--nodes must be at least 1, got 0"):
        MakeConfig(path=Path("x"), nodes=0)


def test_every_option_of_train_is_in_one_group():
    groups = set(option_groups.Options.__subclasses__())
    # of another command
    groups -= {option_groups.CorrectAndSmoothOptions}
    names = [field.name for group in groups for field in fields(group)]
    assert sorted(names) == sorted(field.name for field in fields(TrainConfig))
    assert groups < set(TrainConfig.__mro__)


def test_python_values_are_converted_to_the_types_of_the_options():
    given = {"data": "x/y", "fanouts": [3, 4], "layers": np.int64(2), "lr": 1, "local_steps": 4}
    config = TrainConfig(strategy="diloco", **given)
    wanted = {"data": Path("x/y"), "fanouts": (3, 4), "layers": 2, "lr": 1.0, "local_steps": "4"}
    for name, value in wanted.items():
        found = getattr(config, name)
        assert (found, type(found)) == (value, type(value)), name
    config = EvaluateConfig(run="runs/x", predictions="y.npy")
    assert (config.run, config.predictions) == (Path("runs/x"), Path("y.npy"))


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("optimizer", "foo", "choose one of adam, adamw, sgd, muon, onebit-adam"),
        ("epochs", "3", "its type is int"),
        ("residual", "no", "its type is bool"),
        ("fanouts", "5,5,5", "its type is"),
    ],
)
def test_python_values_that_the_command_line_would_reject_are_rejected(option, value, hint):
    with pytest.raises(
        ValueError, match=re.escape(f"{option_name(option)} cannot be {value!r}")
    ) as e:
        TrainConfig(**{option: value})
    assert f"hint: {hint}" in str(e.value)


def test_one_process_does_not_train_as_if_it_were_several_workers(tmp_path):
    config = TrainConfig(data=tmp_path / "graph", workers=2)
    with pytest.raises(ValueError, match="workers is 2, and this is one process"):
        train(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())
