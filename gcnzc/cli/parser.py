"""The command line and the configuration file, parsed to a command's options."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from gcnzc.cli.commands import COMMANDS
from gcnzc.cli.commands.link import LinkConfig
from gcnzc.cli.commands.plan import PlanConfig
from gcnzc.cli.commands.plan_cache import PlanCacheConfig
from gcnzc.cli.commands.plot import PlotConfig
from gcnzc.cli.errors import Misuse
from gcnzc.train import run_folder
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.options import check_picture, check_writable, from_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(words: Sequence[str]) -> Any:
    """The config that `words` spell, or None when they asked for help and got it."""
    default = _defaults(words)
    choices: Any = None
    for kind in COMMANDS:
        name = _name(kind)
        own = {"default": default} if kind is TrainConfig and default is not None else {}
        choice = Annotated[kind, tyro.conf.subcommand(name, **own)]  # type: ignore[valid-type]
        choices = choice if choices is None else choices | choice
    talk = io.StringIO()
    try:
        with contextlib.redirect_stderr(talk):
            return tyro.cli(
                choices,
                prog="gcnzc",
                description="Train graph neural networks whose features are larger than the GPU. "
                "With --debug, errors come with a traceback.",
                args=list(words),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as left:
        if not left.code:
            return None
        raise Misuse(_plain(talk.getvalue(), words)) from None
    except ValueError as error:
        # a config's own check
        raise Misuse(str(error)) from None


def check_outputs(config: Any) -> None:
    """Raise before the work if its result could not be written.

    Not in the configs themselves: the parser breaks the lines of their messages, and so long paths.
    """
    try:
        if isinstance(config, EvaluateConfig):
            check_writable("predictions", config.predictions)
        elif isinstance(config, PlanConfig):
            check_picture("picture", config.picture)
        elif isinstance(config, LinkConfig | PlanCacheConfig | PlotConfig):
            check_picture("out", config.out)
    except ValueError as error:
        raise Misuse(str(error)) from None


def _name(kind: type) -> str:
    """The subcommand of a config: `plan-cache` of `PlanCacheConfig`."""
    return re.sub("(?<=.)([A-Z])", r"-\1", kind.__name__.removesuffix("Config")).lower()


def _defaults(words: Sequence[str]) -> TrainConfig | None:
    """What --config or --resume says before the other words are read."""
    if not words or words[0] != "train":
        return None
    for option, read in (("--resume", run_folder.read_config), ("--config", _read_toml)):
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and not equals and index + 1 < len(words):
                value = words[index + 1]
            if name == option and value:
                return replace(read(Path(value)), out=None, resume=None)
    return None


def _read_toml(path: Path) -> TrainConfig:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise Misuse(f"{path} is not TOML: {error}\n\nhint: lines like `epochs = 20`") from error
    try:
        return from_words(TrainConfig, values, str(path))
    except ValueError as error:
        raise Misuse(str(error)) from error


def _plain(framed: str, words: Sequence[str]) -> str:
    """The parser's message without its frames: what is wrong, then what to do."""
    # a title, what is wrong, a rule, what may have been meant, a rule, where help is
    sections: list[list[str]] = [[]]
    for line in framed.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if text and not text.strip("-─"):
            sections.append([])
        else:
            sections[-1].append(text)
    wrong, *others = [lines for lines in sections if any(lines)] or [["not understood"]]
    message = re.sub("^Error parsing [^:]*: ", "", "\n".join(wrong).strip())
    if "\n\nhint: " in message:
        return message
    message = message.split("\n\n")[0]
    names = {_name(kind) for kind in COMMANDS}
    command = f"gcnzc {words[0]}" if words and words[0] in names else "gcnzc"
    near = []
    for option, place in pairwise(
        text for text in chain(*others) if text.startswith(("--", "in "))
    ):
        if place == f"in {command} --help":
            near.append(option.split()[0])
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{message}\n\nhint: {meant}`{command} --help` lists what there is"
