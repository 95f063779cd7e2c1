"""`--strategy`, in commands, files, run folders and Python."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from train.test_unused_options import NEEDED, OTHERS

from gcnzc.cli.errors import UsageError
from gcnzc.cli.parser import parse
from gcnzc.exchange import Group
from gcnzc.optim import DiLoCo, StreamingDiLoCo
from gcnzc.system import files
from gcnzc.train.config import TrainConfig
from gcnzc.train.optimizer_options import ONE_BIT, UPDATE_RULES, OptimizerName, StrategyName
from gcnzc.train.optimizers import build_method
from gcnzc.train.options import config_from_dict, config_to_dict
from gcnzc.train.run_folder import CONFIG
from gcnzc.train.strategies import STRATEGIES

OPTION_NAMES = {field.name for field in fields(TrainConfig)}


def build(**options):
    return build_method(TrainConfig(**options), torch.nn.Linear(3, 2), Group(), 100)


def test_the_table_has_every_strategy():
    assert set(STRATEGIES) == set(get_args(StrategyName))
    names = {name for part in get_args(OptimizerName) for name in get_args(part) or (part,)}
    assert {*UPDATE_RULES, *ONE_BIT} == names
    page = (Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md").read_text()
    missing = [
        name for name in STRATEGIES if not re.search(rf"^\| [^|]*`{name}`", page, re.MULTILINE)
    ]
    assert not missing


def describe(optimizer):
    """The options of an optimizer."""
    return "\n".join(optimizer.layout_lines())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_of_a_strategy_reaches_its_optimizer(name):
    options = STRATEGIES[name].options
    assert set(options) <= OPTION_NAMES
    for option in options:
        value, needed = OTHERS.get(option, "bfloat16"), NEEDED.get((name, option), {})
        default = describe(build(strategy=name, **needed))
        assert describe(build(strategy=name, **needed, **{option: value})) != default, option


def test_options_are_converted_to_arguments():
    made = build(strategy="diloco", optimizer="sgd", local_steps="5", outer_lr=0.25, lr=0.1)
    assert isinstance(made, DiLoCo)
    assert isinstance(made.inner, torch.optim.SGD)
    assert made.inner.param_groups[0]["lr"] == 0.1
    options = made.compared_options()
    assert (
        options | {"local_steps": 5, "nesterov": True, "outer": "SGD", "outer_lr": 0.25} == options
    )
    measured = build(strategy="streaming-diloco", local_steps="auto", fragments="2")
    assert isinstance(measured, StreamingDiLoCo)
    assert (len(measured.fragments), measured.delay) == (2, "auto")
    assert build(strategy="streaming-diloco").delay == 1
    assert build(strategy="streaming-diloco", delay="3").delay == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--precision fp16", "--precision fp16 with --strategy fedglomo, which computes several"),
        ("--clip-gradients 1", "--strategy fedglomo does not support --clip-gradients"),
        ("--participants 4 --workers 3", "--participants 4 with --workers 3"),
    ],
)
def test_fedglomo_reports_options_that_it_does_not_support_before_the_run(words, message):
    with pytest.raises(UsageError) as error:
        parse(["train", "--strategy", "fedglomo", *words.split()])
    text, _, hint = str(error.value).partition("\n\nhint: ")
    assert message in " ".join(text.split())
    assert hint
    # torchrun may start more workers
    assert parse(["train", "--strategy", "fedglomo", "--participants", "4"]).participants == 4


CONTRADICTIONS = [
    ("optimizer", "adam", '"adam"', "muloco", "muon"),
    ("optimizer", "adam", '"adam"', "fedglomo", "sgd"),
    ("accumulate", 1, "1", "dropcompute", 4),
]


@pytest.mark.parametrize(("name", "value", "toml", "strategy", "default"), CONTRADICTIONS)
def test_a_given_default_that_contradicts_the_strategy_is_an_error(
    name, value, toml, strategy, default, tmp_path
):
    message = f"--{name} {value} with --strategy {strategy}, which "
    with pytest.raises(ValueError, match=rf"^{message}.*\n\nhint: ") as error:
        TrainConfig(**{name: value}, strategy=strategy)
    file, both = tmp_path / "options.toml", tmp_path / "both.toml"
    file.write_text(f"{name} = {toml}\n")
    both.write_text(f'{name} = {toml}\nstrategy = "{strategy}"\n')
    for words in (
        f"--{name} {value} --strategy {strategy}",
        f"--config {file} --strategy {strategy}",
        f"--config {both}",
    ):
        with pytest.raises(UsageError) as error:
            parse(["train", *words.split()])
        assert message in " ".join(str(error.value).split())
    # an option that is not given, or that replaces that of the file
    assert getattr(parse(["train", "--strategy", strategy]), name) == default
    words = ["train", "--config", str(both), f"--{name}", str(default)]
    with pytest.raises(UsageError):
        parse(words)
    words = ["train", "--config", str(file), "--strategy", strategy, f"--{name}", str(default)]
    assert getattr(parse(words), name) == default
    assert getattr(parse(["train", "--config", str(file)]), name) == value
    # copies have all options
    assert getattr(replace(TrainConfig(strategy=strategy), epochs=3), name) == default
    assert getattr(replace(TrainConfig(), strategy=strategy), name) == default
    saved = config_to_dict(TrainConfig(strategy=strategy))
    assert getattr(config_from_dict(TrainConfig, saved, "a file"), name) == default


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--grace-s 0.5", "--grace-s 0.5 with --strategy diloco has no effect without --quorum"),
        ("--quorum 3 --compress int8", "--quorum 3 with --compress int8"),
        ("--quorum 3 --local-steps auto", "--quorum 3 with --local-steps auto"),
        ("--quorum 2 --workers 4", "--quorum 2 with --workers 4"),
        ("--quorum 5 --workers 4", "--quorum 5 with --workers 4"),
        ("--quorum 0", "--quorum must be at least 1"),
    ],
)
def test_a_quorum_that_is_not_possible_is_reported(words, message):
    with pytest.raises(UsageError) as error:
        parse(["train", "--strategy", "diloco", *words.split()])
    assert message in " ".join(str(error.value).split())
    assert "\n\nhint: " in str(error.value)


def test_sgd_has_a_default_learning_rate_of_its_own(tmp_path):
    def lr_of(words):
        return parse(["train", *words.split()]).lr

    others, sgd = 0.003, 0.1
    assert lr_of("") == lr_of("--optimizer muon") == lr_of("--strategy diloco") == others
    assert lr_of("--optimizer onebit-adam") == others
    assert lr_of("--optimizer sgd") == lr_of("--strategy fedglomo") == sgd
    assert lr_of("--strategy co2 --optimizer sgd") == sgd
    # one that is given is used, also the default of the others
    assert lr_of("--optimizer sgd --lr 0.003") == others
    assert TrainConfig(optimizer="sgd", lr=0.003).lr == others
    assert (TrainConfig().lr, TrainConfig(strategy="fedglomo").lr) == (others, sgd)
    # the learning rate of the optimizer, not that of the one in the file
    file = tmp_path / "options.toml"
    file.write_text("epochs = 3\n")
    assert lr_of(f"--config {file} --optimizer sgd") == sgd
    file.write_text('optimizer = "sgd"\n')
    assert lr_of(f"--config {file}") == sgd
    assert lr_of(f"--config {file} --optimizer adam") == others
    file.write_text("lr = 0.003\n")
    assert lr_of(f"--config {file} --optimizer sgd") == others
    assert (
        lr_of("--preset tuned/cora-gcn --optimizer sgd") == TrainConfig(preset="tuned/cora-gcn").lr
    )
    # the recorded one, also of a run of a version whose default was another one
    recorded = config_to_dict(TrainConfig(strategy="fedglomo", data=tmp_path))
    assert recorded["lr"] == sgd
    for lr in (others, sgd):
        files.write_json(tmp_path / CONFIG, recorded | {"lr": lr})
        assert lr_of(f"--resume {tmp_path}") == lr_of(f"--config {tmp_path / CONFIG}") == lr
    assert replace(TrainConfig(optimizer="sgd"), epochs=3).lr == sgd
    optimizer = build_method(
        parse(["train", "--optimizer", "sgd"]), torch.nn.Linear(3, 2), Group(), 9
    )
    assert optimizer.param_groups[0]["lr"] == sgd
