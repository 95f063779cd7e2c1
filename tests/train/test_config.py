"""Options are checked on construction, and survive JSON."""

import json
from pathlib import Path

import pytest

from gcnzc.cli.commands.data import MakeConfig
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import config_from_dict, config_to_dict


def test_a_config_survives_json():
    config = TrainConfig(
        data=Path("g"), fanouts=(5, -1), layers=2, lr=0.1, out=Path("runs/x"), batch_norm=True
    )
    assert (
        config_from_dict(TrainConfig, json.loads(json.dumps(config_to_dict(config))), "x") == config
    )


def test_options_may_have_dashes_and_be_omitted():
    config = config_from_dict(
        TrainConfig, {"batch-size": 7, "lr": 1, "fanouts": [3, 2, 1]}, "f.toml"
    )
    assert config == TrainConfig(batch_size=7, lr=1.0, fanouts=(3, 2, 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"bach_size": 7}, r"f\.toml: no option named bach_size"),
        ({"batch_size": "7"}, r"f\.toml: batch_size cannot be '7'"),
        ({"batch_norm": 1}, r"batch_norm cannot be 1"),
        ({"epochs": True}, r"epochs cannot be True"),
        ({"seed": [1, 2]}, r"seed cannot be \[1, 2\]"),
        ({"seed": 1.5}, r"seed cannot be 1.5"),
        ({"fanouts": [3, "2", 1]}, r"fanouts cannot be \[3, '2', 1\]"),
        ({"fanouts": 3}, r"fanouts cannot be 3"),
        ({"model": "mlp"}, r"model cannot be 'mlp'"),
        ({"outer_lr": "x"}, r"outer_lr cannot be 'x'"),
        ({"out": 3}, r"out cannot be 3"),
        ({"lr": 10**400}, r"lr cannot be 10000"),
    ],
)
def test_options_of_the_wrong_type_are_rejected(words, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(TrainConfig, words, "f.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"epochs": -3}, "--epochs must be at least 1, got -3"),
        ({"dropout": 1.0}, "--dropout must be from 0 to below 1, got 1.0"),
        ({"lr": 0.0}, "--lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "--lr must be finite, got nan"),
        ({"fanouts": (5, 5)}, r"2 fan-outs \(5,5\) for 3 layers"),
        ({"fanouts": (5, 0, 5)}, "a fan-out must be at least 1, or -1 for all neighbours, got 0"),
        ({"hidden": 10**30}, "--hidden must be at most 9223372036854775807, got 10000000"),
        ({"outer_lr": -1.0}, "--outer-lr must be at least 0, got -1.0"),
        ({"outer_momentum": -1.0}, "--outer-momentum must be from 0 to below 1, got -1.0"),
        ({"timeout_s": 1e30}, "--timeout-s must be at most 1000000000.0, got 1e"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
    ],
)
def test_values_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**options)
    assert "\n\nhint: " in str(error.value)


def test_make_requires_a_kind_of_graph():
    with pytest.raises(ValueError, match="--nodes must be at least 1, got 0"):
        MakeConfig(path=Path("x"), nodes=0)
