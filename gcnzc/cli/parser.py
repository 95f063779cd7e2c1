"""Parse the command line and the configuration file to the options of a command."""

import ast
import contextlib
import difflib
import inspect
import io
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from gcnzc.cli.commands import COMMANDS
from gcnzc.cli.commands.embed_nodes import EmbedNodesConfig
from gcnzc.cli.commands.export import ExportConfig
from gcnzc.cli.commands.plot import PlotConfig
from gcnzc.cli.commands.predict import PredictConfig
from gcnzc.cli.errors import UsageError
from gcnzc.system import files
from gcnzc.train import run_folder
from gcnzc.train.config import EvaluateConfig, TrainConfig, fanouts_message
from gcnzc.train.given_options import copy_with_given, given_options, values_given
from gcnzc.train.options import check_picture, check_writable, config_from_dict, option_name
from gcnzc.train.prediction_files import check_file_output, check_output
from gcnzc.train.repeated_runs import read_runs
from gcnzc.train.strategies import accumulate_message, optimizer_message
from gcnzc.train.unused_options import unused_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(words: Sequence[str]) -> Any:
    """Parse the command line to the config of a command; return None if it printed the help.

    Raises:
        UsageError: a command, an option or a value is not valid.
    """
    default = _defaults(words)
    choices: Any = None
    is_help = not {"-h", "--help"}.isdisjoint(words)
    for kind in COMMANDS:
        if is_help:
            _set_help(kind)
        name = _name(kind)
        own = {"default": default} if kind is TrainConfig and default is not None else {}
        choice = Annotated[kind, tyro.conf.subcommand(name, **own)]  # type: ignore[valid-type]
        choices = choice if choices is None else choices | choice
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            config = tyro.cli(
                choices,
                prog="gcnzc",
                description="Train graph neural networks whose features are larger than the GPU."
                "\n\nEvery command has the option --debug, which prints the traceback of an error. "
                "`gcnzc --version` prints the version.",
                args=list(words),
                config=(
                    tyro.conf.OmitArgPrefixes,
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.DisallowNone,
                    tyro.conf.PositionalMetavarFromFieldName,
                ),
            )
    except SystemExit as ended:
        if not ended.code:
            return None
        raise UsageError(_format_message(messages.getvalue(), words)) from None
    except ValueError as error:
        # from the __post_init__ of a config
        raise UsageError(str(error)) from None
    if isinstance(config, TrainConfig):
        if _has_default_lr(words, default):
            # not that of the optimizer in the --config file
            config = replace(config, lr=None)
        _check_used(config, default or TrainConfig())
        _check_given(words, default, config)
        if config.is_full_batch:
            _check_given_fanouts(words)
        elif default is not None and default.is_full_batch and not _value_of("--fanouts", words):
            raise UsageError(
                f"--batch-size {config.batch_size} without --fanouts: the options that it "
                "overrides are those of full-batch training\n\n"
                "hint: give --fanouts, one number per layer, input layer first; -1 samples all "
                "neighbours"
            )
    return config


@cache
def _set_help(kind: type) -> None:
    """Annotate the fields of a config class, and of its bases, with their help texts.

    tyro reads the same strings, but keeps their line breaks. It also ends the help of a flag that
    switches something off with "(default: True)", which seems to refer to the flag itself, and the
    help of an option that need not be given with "(default: None)".
    """
    for base in kind.__mro__:
        hints = vars(base).get("__annotations__", {})
        if base is object or not hints:
            continue
        for name, text in _field_texts(base).items():
            # a help text says what happens without an option whose default is None
            has_no_hint = any(vars(base).get(name, 0) is each for each in (True, None))
            hint: dict[str, Any] = {"help_behavior_hint": ""} if has_no_hint else {}
            hints[name] = Annotated[hints[name], tyro.conf.arg(help=text, **hint)]


def _field_texts(kind: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, on one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts


def _has_default_lr(words: Sequence[str], default: TrainConfig | None) -> bool:
    """Whether a --config file has options but no learning rate, and the command line has none.

    A preset has one, and the options of a run, which --resume reads, have all.
    """
    given = given_options(default)
    return bool(given) and given.isdisjoint({"lr", "preset"}) and not _value_of("--lr", words)


def _check_given_fanouts(words: Sequence[str]) -> None:
    """Raise if --fanouts has its default value on the command line of a full-batch run.

    `TrainConfig` cannot distinguish it from an option that is not given.
    """
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        fanouts = (value if equals else following).split(",")
        if name == "--fanouts" and set(fanouts) != {"-1"}:
            raise UsageError(fanouts_message(fanouts))


def _check_given(words: Sequence[str], default: TrainConfig | None, config: TrainConfig) -> None:
    """Raise if the strategy replaces an option of the command line or of the --config file.

    `TrainConfig` cannot distinguish a default of the command line from an option that is given.
    """
    messages = {"optimizer": optimizer_message, "accumulate": accumulate_message}
    on_line = {name: _value_of(option_name(name), words) for name in messages}
    for name, value in values_given((*messages,), on_line, default).items():
        if value != str(getattr(config, name)):
            raise UsageError(messages[name](config.strategy, value))


def _check_used(config: TrainConfig, default: TrainConfig) -> None:
    """Raise if an option of the command line has no effect; those of a --config file may."""
    for name, message in unused_options(config).items():
        if getattr(config, name) != getattr(default, name):
            raise UsageError(message)


def check_outputs(config: Any) -> None:
    """Raise UsageError if the output of a command cannot be written, before its work begins.

    The configs do not check this themselves, because tyro wraps the lines of their messages, and
    so breaks long paths.
    """
    try:
        if isinstance(config, TrainConfig) and config.out and config.out.is_file():
            raise ValueError(
                f"--out: {config.out} is a file\n\nhint: give a new folder, or omit --out"
            )
        if isinstance(config, EvaluateConfig):
            check_writable("predictions", config.predictions)
            path = config.predictions
            if path is not None and path.suffix != ".npy":
                raise ValueError(
                    f"--predictions {path} is not a .npy file\n\n"
                    f"hint: --predictions {path.with_suffix('.npy')}; `gcnzc predict` writes .csv "
                    "files"
                )
        elif isinstance(config, PredictConfig):
            check_output("out", config.out)
            for name, path in (("pairs", config.pairs), ("nodes", Path(config.nodes))):
                if path is None or not (path.exists() and config.out.exists()):
                    continue
                if config.out.samefile(path):
                    raise ValueError(
                        f"--out and --{name} are the same file, {path}\n\n"
                        "hint: choose another name for the predictions"
                    )
        elif isinstance(config, EmbedNodesConfig):
            check_file_output("out", config.out, ".npy", "`numpy.load` reads it")
        elif isinstance(config, ExportConfig):
            check_file_output("out", config.out, ".pt2", "`torch.export.load` reads it")
        elif isinstance(config, PlotConfig):
            check_picture("out", config.out)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _name(kind: type) -> str:
    """Return the subcommand of a config class: `embed-nodes` for `EmbedNodesConfig`."""
    return re.sub("(?<=.)([A-Z])", r"-\1", kind.__name__.removesuffix("Config")).lower()


def _defaults(words: Sequence[str]) -> TrainConfig | None:
    """Read the options of --resume, or of --preset and --config, which the others then override."""
    if not words or words[0] != "train":
        return None
    resumed, preset, path = (
        _value_of(f"--{name}", words) for name in ("resume", "preset", "config")
    )
    if resumed and preset:
        raise UsageError(
            f"--preset {preset} with --resume {resumed}\n\n"
            "hint: a resumed run keeps its options; omit --preset"
        )
    out = _value_of("--out", words)
    if resumed and out and Path(out).resolve() != Path(resumed).resolve():
        raise UsageError(
            f"--out {out} with --resume {resumed}\n\n"
            "hint: a resumed run continues in its folder; omit --out"
        )
    if resumed:
        kept = _read_resumed(Path(resumed))
        batch_size = _value_of("--batch-size", words)
        # before the options are parsed, since --fanouts may not fit another batch size
        if batch_size and (batch_size == "all") != kept.is_full_batch:
            raise UsageError(
                f"the run in {resumed} has --batch-size {kept.batch_size}, not {batch_size}\n\n"
                "hint: a resumed run keeps its options; start another with --out"
            )
        return kept
    if path:
        return _read_options(Path(path), preset)
    try:
        return TrainConfig(preset=preset) if preset else None
    except ValueError as error:
        raise UsageError(str(error)) from error


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return the last value of an option on the command line; an empty text without one."""
    found = ""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option and not equals and index + 1 < len(words):
            value = words[index + 1]
        if name == option and value:
            found = value
    return found


def _read_resumed(folder: Path) -> TrainConfig:
    """Read the options of the run or runs in a folder."""
    has_several = (folder / run_folder.RUNS).is_file()
    config = read_runs(folder) if has_several else run_folder.read_config(folder)
    return replace(config, out=None, resume=None, config=None)


def _read_options(path: Path, preset: str = "") -> TrainConfig | None:
    """Read a TOML file, which overrides a preset, or the JSON file of a run's options.

    None is returned for a TOML file without options.
    """
    if path.suffix == ".json":
        if preset:
            raise UsageError(
                f"--preset {preset} has no effect with --config {path}, which has all options\n\n"
                "hint: give one of them"
            )
        # of a run, whose folder is not that of the new run
        config = config_from_dict(TrainConfig, files.read_json(path), str(path))
        return copy_with_given(config, out=None, resume=None, config=None)
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not TOML: {error}\n\nhint: write one option per line, such as `epochs = 20`"
        ) from error
    for name in ("resume", "config"):
        if name in values:
            raise UsageError(f"{path}: {name} has no effect in a file\n\nhint: use --{name}")
    if preset:
        values["preset"] = preset
    if not values:
        return None
    try:
        return config_from_dict(TrainConfig, values, str(path))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _format_message(framed: str, words: Sequence[str]) -> str:
    """Convert a framed message of tyro to gcnzc's format: the error, an empty line, and a hint."""
    # the frame has a title, an optional rule, the error, a rule, and the usage, which is not used
    lines: list[str] = []
    for line in framed.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        is_rule = bool(text) and not text.strip("-─")
        if is_rule and any(lines):
            break
        if not is_rule:
            lines.append(text)
    wrong = "\n".join(lines).strip() or "the command line is not valid"
    if misplaced := re.match(r"Unrecognized or misplaced options:\s*(.*)", wrong, re.DOTALL):
        # options that another command has
        names = re.split(r"\s*\(applied to [^)]*\)\s*", misplaced[1])
        wrong = f"Unrecognized options: {', '.join(filter(None, names))}"
    message = re.sub("^Error parsing [A-Z]\\w+Config: ", "", wrong)
    if "\n\nhint: " in message:
        return message
    kinds = {_name(kind): kind for kind in COMMANDS}
    first = words[0] if words else ""
    if first and first not in kinds and not first.startswith("-"):
        return (
            f"there is no command {first!r}\n\n"
            f"hint: {_suggest([first], kinds)}`gcnzc --help` lists the commands"
        )
    command_word = next((word for word in words if word in kinds), None)
    if first.startswith("-") and command_word is not None:
        return (
            f"{first} is before the command\n\n"
            f"hint: options follow the command: gcnzc {command_word} {first}"
        )
    unknown = re.match("Unrecognized options: (.*)", wrong)
    suggestion = ""
    if unknown and first in kinds:
        names = [option.partition("=")[0] for option in unknown[1].split(", ")]
        options = [name for name in names if name.startswith("--")]
        suggestion = _suggest(options, _flags(kinds[first]))
        if not options and any(name.lstrip("-").isdecimal() for name in names):
            suggestion = "lists have commas and no spaces, such as --fanouts 10,5; "
    command, listed = ("gcnzc", "commands")
    if first in kinds:
        command, listed = (f"gcnzc {first}", "options")
    wrong = _format_value_error(message.split("\n\n")[0])
    return f"{wrong}\n\nhint: {suggestion}`{command} --help` lists the {listed}"


def _suggest(words: Sequence[str], names: Iterable[str]) -> str:
    """Ask for the names that are most similar to `words`; return an empty text if none is."""
    known = sorted(names)
    near = [name for word in words for name in difflib.get_close_matches(word, known, 1)]
    return f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""


def _flags(kind: type) -> list[str]:
    """Return the options of a command, as --no-NAME for a flag that is on by default."""
    return [
        option_name(f"no_{field.name}" if field.default is True else field.name)
        for field in fields(kind)
    ]


def _format_value_error(wrong: str) -> str:
    """Reword a message of tyro about a value.

    Args:
        wrong: the message of tyro.

    Returns:
        If tyro lists the choices, its message with the choices separated by commas, without None.
        Otherwise "OPTION: REASON"; or `wrong`, if it does not name an option.
    """
    expected = re.match(r"(.*Expected one of )\((.*)\)\.$", " ".join(wrong.split()))
    if expected is not None:
        # of an optional choice, tyro also lists None, which it does not accept, in a random order
        listed = re.findall(r"'([^']*)'", expected[2])
        if "None" in listed:
            listed = sorted(set(listed) - {"None"})
        return f"{expected[1]}{', '.join(listed)}"
    found = re.match(r"Error parsing (\S+): (.*)", " ".join(wrong.split()))
    if found is None:
        return wrong
    option, reason = found.groups()
    value = re.search(r"could not convert string to float: ('.*')|with base 10: ('.*')", reason)
    choices = re.match(r"no type matching (.*) could be instantiated from \[(.*)\]", reason)
    if value is not None:
        return f"{option}: {value[1] or value[2]} is not a {'' if value[1] else 'whole '}number"
    if choices is not None:
        kind = "whole number" if "INT" in choices[1] else "number" if "FLOAT" in choices[1] else ""
        word = re.search(r"\|{(\w+)}", choices[1])
        other = f" or {word[1]}" if kind and word is not None else ""
        return f"{option}: {choices[2]} is not a {kind or choices[1]}{other}"
    return f"{option}: {reason}"
