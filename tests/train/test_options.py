"""Options survive files and command lines, and reach the classes that they configure."""

import ast
import inspect
import json
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from training import Listener

from gcnzc.cli.errors import UsageError
from gcnzc.cli.parser import parse
from gcnzc.compress import compression
from gcnzc.train import config as config_module
from gcnzc.train import signatures
from gcnzc.train.build import check_options
from gcnzc.train.config import (
    HETERO_MODELS,
    MODELS,
    OPTIMIZER_OF,
    OPTIMIZERS,
    STRATEGIES,
    EvaluateConfig,
    TrainConfig,
)
from gcnzc.train.options import rows
from gcnzc.train.run import train
from gcnzc.train.values import Choices, shown

# values of options whose type does not suggest a valid one, by option or by value and option
SAMPLES: dict[Any, Any] = {
    "preset": "tuned/cora-gcn",
    "batch_size": "7",
    "compress": "bfloat16",
    "gradient_compression": "bfloat16",
    "norm": "batch",
    "jumping": "cat",
    "topology": "complete",
    "reactivate": "refresh",
    "adjust_lr_fn": "original",
    "calibration": "3,6",
    "quorum": "4",
    ("co2", "gap"): "gap_aware",
    ("co2", "delay"): "0",
    ("co2", "eager"): "0.25",
    ("average", "momentum"): "everywhere",
    ("dropcompute", "momentum"): "everywhere",
}
# by option, or by value: the others with which it is valid
NEEDED: dict[str, dict[str, str]] = {
    "temporal": {"model": "rgcn"},
    "embeddings": {"model": "rgcn"},
    "decay": {"optimizer": "adam:weight_decay=0.1"},
    "warmup_epochs": {"epochs": "30"},
}


def sample(kinds: tuple[Any, ...], default: Any) -> str:
    """A value that is not the default, as text."""
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(str(each) for each in get_args(kind) if each != default)
        if kind is bool:
            return str(not default).lower()
        if kind is int:
            return str(default + 1 if isinstance(default, int) else 2)
        if kind is float:
            return "0.25"
        if get_origin(kind) is tuple:
            return "0.25,0.75" if float in get_args(kind) else "4,3,2"
    return {"auto": "none", "relu": "elu", "elu": "relu", "pyg": "dgl"}.get(default, "auto")


def cases():
    """Every option with another value, and every value with another one of its options."""
    for name, row in rows(TrainConfig).items():
        for value in row.of.targets if row.of else ():
            required = {"decoupled-diloco": {"quorum": "3"}}.get(value, {})
            for option in [None, *row.of.arguments(value)]:
                own = dict(required)
                if option is not None:
                    own[option] = text_of(row.of, value, option)
                words = ",".join(f"{key}={each}" for key, each in own.items())
                yield name, f"{value}:{words}" if words else value
        if row.of is None:
            kinds = get_args(row.kind) if get_origin(row.kind) is not Literal else ()
            kinds = kinds if kinds and get_origin(row.kind) is not tuple else (row.kind,)
            yield name, SAMPLES.get(name) or sample(kinds, row.default)


def text_of(choices: Choices, value: str, option: str) -> str:
    if given := SAMPLES.get((value, option)) or SAMPLES.get(option):
        return given
    argument = choices.arguments(value)[option]
    default = ast.literal_eval(str(argument.default))
    return sample(argument.kinds, choices.defaults.get(value, {}).get(option, default))


def needed(name: str, text: str) -> dict[str, str]:
    value = text.partition(":")[0]
    if name == "strategy" and value in OPTIMIZER_OF:
        return {"optimizer": OPTIMIZER_OF[value]}
    if name == "strategy" and value == "dropcompute":
        return {"accumulate": "4"}
    if name == "task" and re.search("edge_type|split|reverse|_edges|evaluate|target", text):
        return {"model": "rgcn"}
    return NEEDED.get(name, {})


CASES = list(cases())


@pytest.mark.parametrize(("name", "text"), CASES, ids=[":".join(each) for each in CASES])
def test_a_config_survives_json_toml_and_the_command_line(name, text, tmp_path):
    config = TrainConfig(**needed(name, text), **{name: text})
    assert (config == TrainConfig(**needed(name, text))) == (
        text == rows(TrainConfig)[name].default
    )
    found = config.to_dict()
    assert TrainConfig(**found) == config
    assert config.replace() == config
    # those of the command line are not read from a file
    kept = {key: value for key, value in found.items() if key not in ("resume", "config", "out")}
    expected = config.replace(resume=None, config=None, out=None)
    json_file, toml_file = tmp_path / "c.json", tmp_path / "c.toml"
    json_file.write_text(json.dumps(kept))
    # TOML has no null, and else the syntax of JSON
    lines = [f"{key} = {json.dumps(value)}" for key, value in kept.items() if value is not None]
    toml_file.write_text("\n".join(lines))
    words = []
    for key, row in rows(TrainConfig).items():
        value = config[key]
        if row.positional or value is None:
            words += [] if value is None else [str(value)]
        elif row.kind is bool:
            words.append(row.flag if value else f"--no-{row.flag[2:]}")
        else:
            words += [row.flag, shown(value)]
    for file in (json_file, toml_file):
        _, read = parse(["train", "--config", str(file)])
        assert read.replace(config=None) == expected
    if name not in ("resume", "config"):
        assert parse(["train", *words]) == ("train", config)


# --- the options of a value are arguments of its class

TARGETS = [
    (value, target)
    for choices in vars(config_module).values()
    if isinstance(choices, Choices)
    for value, targets in choices.targets.items()
    for target in targets
]


@pytest.mark.parametrize("target", sorted({target for _, target in TARGETS}))
def test_a_signature_that_is_read_from_the_source_is_that_of_the_class(target):
    module, _, name = target.partition(":")
    kind = getattr(import_module(module), name)
    found, expected = signatures.read(target).arguments, {}
    # a constructor with `**options` has those of its bases, and those that are declared
    for each in kind.__mro__ if isinstance(kind, type) else (kind,):
        own = inspect.signature(each.__init__ if isinstance(kind, type) else each).parameters
        expected = {**own, **expected}
        if not any(one.kind is one.VAR_KEYWORD for one in own.values()):
            break
    expected |= inspect.signature(kind).parameters
    for option, argument in found.items():
        default = expected[option].default
        if argument.default is None:
            assert default is inspect.Parameter.empty
        else:
            # of other types, text has no values
            with suppress(ValueError):
                assert ast.literal_eval(argument.default) == default, option
    named = {key for key, each in expected.items() if each.kind is each.KEYWORD_ONLY}
    assert named <= set(found)


# by option, or by value and option: those that it needs
WITH: dict[Any, str] = {
    "pre_norm": "norm=layer",
    "pre_activation": "norm=layer,output_linear=true,input_linear=true",
    "jumping": "output_linear=true",
    **{(value, "momentum"): "compress=topk:0.1" for value in ("average", "dropcompute")},
    **{(value, "sharded"): "compress=none" for value in ("muloco", "sparseloco", "fedglomo")},
}
# the schedule of 0/1 Adam is built from its warm-up
SET = {("zero-one-adam", "warmup")}


def built_cases():
    for name, choices in (("model", MODELS), ("optimizer", OPTIMIZERS), ("strategy", STRATEGIES)):
        for value in choices.targets:
            for option in choices.arguments(value):
                # hidden layers of other widths than the features need it
                if (value, option) not in SET and (
                    value not in HETERO_MODELS or option != "input_linear"
                ):
                    yield name, value, option


@pytest.mark.parametrize(("name", "value", "option"), [*built_cases()])
def test_an_option_reaches_its_class(name, value, option, monkeypatch):
    choices = rows(TrainConfig)[name].of
    text = text_of(choices, value, option)
    words = [f"{option}={text}", WITH.get((value, option)) or WITH.get(option, "")]
    words.append("quorum=3" if value == "decoupled-diloco" and option != "quorum" else "")
    own = {name: f"{value}:{','.join(filter(None, words))}"}
    config = TrainConfig(**needed(name, value), **own)
    kind, seen = config[name].load(), {}
    init = kind.__init__

    def recorded(self, *args, **options):
        seen.update(options)
        init(self, *args, **options)

    monkeypatch.setattr(kind, "__init__", recorded)
    check_options(config, workers=4)
    expected = config[name].options[option]
    if option in ("compress", "gradient_compression"):
        expected = compression(expected)
    assert str(seen[option]) == str(expected)


# --- defaults that depend on other options, and what was given


@pytest.mark.parametrize(
    ("name", "value", "strategy", "default"),
    [
        ("optimizer", "adam", "muloco", "muon"),
        ("optimizer", "adam", "fedglomo", "sgd"),
        ("accumulate", 1, "dropcompute", 4),
    ],
)
def test_a_strategy_replaces_a_default_but_not_what_is_given(
    name, value, strategy, default, tmp_path
):
    def chosen(config):
        return shown(config[name])

    file, both = tmp_path / "options.toml", tmp_path / "both.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    both.write_text(f'{name} = {json.dumps(value)}\nstrategy = "{strategy}"\n')
    message = f"--{name} {value} with --strategy {strategy}: "
    with pytest.raises(ValueError, match=rf"^{message}.*\n\nhint: "):
        TrainConfig(**{name: value}, strategy=strategy)
    for words in (
        ["--strategy", strategy, f"--{name}", str(value)],
        ["--config", str(file), "--strategy", strategy],
        ["--config", str(both)],
    ):
        with pytest.raises(UsageError, match=message):
            parse(["train", *words])
    _, config = parse(["train", "--strategy", strategy])
    assert chosen(config) == str(default)
    words = ["--config", str(file), "--strategy", strategy, f"--{name}", str(default)]
    assert parse(["train", *words])[1] == config.replace(config=file)
    # copies, and files of a run, have all options
    assert (
        chosen(config.replace(epochs=3)) == chosen(TrainConfig(**config.to_dict())) == str(default)
    )


def test_sgd_has_a_default_learning_rate_of_its_own():
    def lr_of(**options):
        return TrainConfig(**options).training.learning_rate

    assert lr_of() == lr_of(optimizer="muon") == lr_of(optimizer="onebit-adam") == 0.003
    assert lr_of(optimizer="sgd") == lr_of(strategy="fedglomo") == 0.1
    assert TrainConfig().replace(optimizer="sgd").training.learning_rate == 0.1
    assert lr_of(optimizer="sgd", lr=0.003) == 0.003


def test_values_of_python_and_of_files_are_converted():
    given = {"data": "x/y", "fanouts": [3, 4], "hidden": np.int64(2), "lr": 1}
    config = TrainConfig(**given, model="gat:heads=2")
    wanted = {"data": Path("x/y"), "fanouts": (3, 4), "hidden": 2, "lr": 1.0}
    for name, value in wanted.items():
        assert (config[name], type(config[name])) == (value, type(value)), name
    assert config.layers == 2
    assert (config.model.model.name, config.model.model["heads"]) == ("gat", 2)
    # a default of the class, and one of the table
    assert config.model.model["norm"] == "none"
    assert TrainConfig(optimizer="adamw").training.optimizer["weight_decay"] == 0
    config = EvaluateConfig(run="runs/x", predictions="y.npy")
    assert (config.run, config.predictions) == (Path("runs/x"), Path("y.npy"))
    assert TrainConfig(batch_size="all").loading.fanouts == (-1, -1, -1)
    for wrong in (
        *({"epochs": "3x"}, {"epochs": True}, {"fanouts": 5}, {"epoch": 3}),
        *({"fanouts": "3,,3"}, {"callback": "a:b,,c:d"}, {"fanouts": "3,"}),
    ):
        with pytest.raises(ValueError, match=r"--epochs|--fanouts|--callback|'epoch'"):
            TrainConfig(**wrong)


def test_an_option_that_a_file_has_twice_is_refused(tmp_path):
    for name, text in (
        ("c.json", '{"epochs": 3, "epochs": 4}'),
        ("c.toml", "epochs=3\n[training]\nepochs=4"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match="epochs is given twice"):
            parse(["train", "--config", str(tmp_path / name)])


def test_every_strategy_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md").read_text()
    missing = [
        name
        for name in STRATEGIES.targets
        if not re.search(rf"^\| [^|]*`{name}`", page, re.MULTILINE)
    ]
    assert not missing


def test_one_process_does_not_train_as_if_it_were_several_workers(tmp_path):
    config = TrainConfig(data=tmp_path / "graph", workers=2)
    with pytest.raises(ValueError, match="workers is 2, and this is one process"):
        train(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_options_of_a_file_without_effect_are_a_warning(tmp_path):
    """They may be for another value that the command line replaces."""
    file = tmp_path / "c.toml"
    file.write_text('embeddings = "adam:lr=0.1"\nmodel = "rgcn"\n')
    _, config = parse(["train", "--config", str(file), "--model", "sage"])
    listener = Listener()
    with pytest.raises(FileNotFoundError):
        train(config.replace(data=tmp_path / "none"), tmp_path / "run", listener)
    (warning,) = listener.said
    assert warning.startswith("warning: --embeddings adam:lr=0.1 has no effect with --model sage; ")
