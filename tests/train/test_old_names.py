"""Old names of commands, options and values."""

from pathlib import Path

import pytest

from gcnzc.cli.commands import COMMANDS as CONFIGS
from gcnzc.cli.commands.check import CheckConfig
from gcnzc.cli.errors import UsageError
from gcnzc.cli.parser import parse
from gcnzc.train import old_names, resume
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import config_from_dict, option_name

CHANGED = {
    "hot": "0.3",
    "hot_by": "in-degree",
    "eager": "0.25",
}


def test_old_options_work_on_the_command_line():
    words = [word for name, value in CHANGED.items() for word in (option_name(name), value)]
    chosen = ["--features", "cached", "--strategy", "co2", "--hot-split", "--no-plan"]
    config = parse(["train", *chosen, *words, "--local-steps", "usual"])
    expected = {"cache_sharded": True, "tuning_profile": False, "local_steps": "default"}
    for old, value in CHANGED.items():
        expected[old_names.OPTIONS["train"][old]] = type(getattr(config, new_name(old)))(value)
    assert {name: getattr(config, name) for name in expected} == expected
    assert parse(["train", "--features=cached", "--hot=0.4"]).cache_size == "0.4"
    assert parse(["check", "--hot-memory", "2GB"]).cache_memory == "2GB"
    assert isinstance(parse(["check"]), CheckConfig)
    assert not parse(["train", "--no_plan"]).tuning_profile
    assert parse(["train", "--strategy=co2", "--local-steps=8", "usual"]).data == Path("usual")
    words = ["prepare", "a", "b", "--bidirected", "as-usual", "--duplicates=as-usual"]
    assert parse(words) == parse(["prepare", "a", "b"])


def test_the_old_flag_of_batch_normalization_works(tmp_path):
    assert parse(["train", "graph", "--batch-norm"]).norm == "batch"
    assert parse(["train", "--batch_norm", "graph"]).data == Path("graph")
    assert parse(["train", "--no-batch-norm"]).norm == "none"
    for value, norm in ((True, "batch"), (False, "none")):
        assert config_from_dict(TrainConfig, {"batch-norm": value}, "a file").norm == norm
        with pytest.warns(DeprecationWarning, match="batch_norm of TrainConfig is now norm"):
            assert TrainConfig(batch_norm=value).norm == norm
    with pytest.raises(ValueError, match="batch_norm and norm are the same option"):
        config_from_dict(TrainConfig, {"batch_norm": True, "norm": "layer"}, "a file")


def new_name(old):
    return old_names.OPTIONS["train"][old]


def test_old_options_work_in_a_file():
    values = {"hot": "0.3", "hot-by": "in-degree", "plan": False, "delay": "usual"}
    config = config_from_dict(TrainConfig, values, "a file")
    assert (config.cache_size, config.cache_policy) == ("0.3", "in-degree")
    assert (config.tuning_profile, config.delay) == (False, "default")


def test_old_options_in_python():
    with pytest.warns(DeprecationWarning, match="option hot of TrainConfig is now cache_size"):
        config = TrainConfig(hot="0.3", lr=0.1)
    assert config == TrainConfig(cache_size="0.3", lr=0.1)
    with pytest.warns(DeprecationWarning, match="plan of TrainConfig is now tuning_profile"):
        config = TrainConfig(plan=False, delay="usual")
    assert config == TrainConfig(tuning_profile=False, delay="default")
    with pytest.raises(ValueError, match="TrainConfig: cache_size and hot are the same option"):
        TrainConfig(cache_size="0.2", hot="0.3")


def test_an_option_with_its_old_and_its_present_name_is_an_error(tmp_path):
    file = tmp_path / "options.toml"
    for old, new in (("hot-by", "cache_policy"), ("batch-size", "batch_size")):
        value = {"hot-by": '"in-degree"'}.get(old, "7")
        file.write_text(f"{old} = {value}\n{new} = {value}\n")
        with pytest.raises(UsageError, match=rf"toml: {old} and {new} are the same option"):
            parse(["train", "--config", str(file)])


def test_an_option_by_its_old_and_its_present_name_is_an_error_on_the_command_line():
    with pytest.raises(UsageError, match="--hot and --cache-size are the same option"):
        parse(["train", "--hot", "1", "--cache-size", "2"])
    with pytest.raises(UsageError, match="--cache-sharded and --hot-split are the same option"):
        parse(["train", "--cache-sharded", "--hot-split"])
    # as of all options, the last value counts
    assert (
        parse(["train", "--features", "cached", "--hot", "1", "--hot", "0.5"]).cache_size == "0.5"
    )


def test_a_run_with_old_options_is_resumed():
    config, folder = TrainConfig(), Path("run")
    old = {"local_steps": "usual", "delay": "usual", "hot": "auto", "inner": "adam", "eager": 0.5}
    resume.check_resumed_options(config, old, folder)
    with pytest.raises(ValueError, match=r"has cache_size '0\.5', not 'auto'"):
        resume.check_resumed_options(config, old | {"hot": "0.5"}, folder)


@pytest.mark.parametrize(("old", "new"), old_names.COMMANDS.items())
def test_old_commands_work(old, new):
    words = {"plan": ["x"], "plan-cache": ["x"]}.get(old, [])
    assert type(parse([old, *words])) is type(parse([new, *words]))
    assert type(parse([old, *words])) in CONFIGS


def test_every_old_name_has_a_present_one():
    # `inner_optimizer` is an alias, too
    present = {"inner_optimizer", *TrainConfig.__dataclass_fields__}
    assert set(old_names.OPTIONS["train"].values()) < present
    assert not set(old_names.OPTIONS["train"]) & set(TrainConfig.__dataclass_fields__)
    assert set(old_names.OPTIONS["check"].values()) < set(CheckConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("words", "present"),
    [
        ("evaluate runs/a --data g", "evaluate runs/a g"),
        ("evaluate --data=g runs/a --metric rocauc", "evaluate runs/a --metric rocauc g"),
        ("evaluate runs/a --data", "evaluate runs/a --data"),
        ("evaluate runs/a g", "evaluate runs/a g"),
    ],
)
def test_the_data_of_an_evaluation_is_positional(words, present):
    assert old_names.rename_command_line(words.split()) == present.split()
