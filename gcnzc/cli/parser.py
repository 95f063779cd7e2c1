"""Parse the command line: the parser and the help of each command follow from its rows."""

import argparse
import ast
import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from gcnzc.cli.errors import UsageError, usage_error
from gcnzc.cli.options import COMMANDS
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import Options, Row, read_options, rows, unread
from gcnzc.train.presets import describe_preset, list_presets
from gcnzc.train.values import not_among, shown

WIDTH = 100
COMMANDS_HELP = "\n".join(
    [
        "usage: gcnzc COMMAND [options]\n",
        "Train graph neural networks whose features are larger than the GPU.\n",
        *(
            f"  {command:10}{str(kind.__doc__).partition(chr(10))[0]}"
            for command, (kind, _) in COMMANDS.items()
        ),
        "  help      Describe an option, its values, or a preset.\n",
        "`gcnzc COMMAND --help` lists the options of a command, and `gcnzc --version` prints the",
        "version. Every command has the option --debug, which prints the traceback of an error.",
    ]
)
# what the help on the values of an option uses
TERMS = {
    "strategy": (
        "A rank is a worker. H is the number of local steps from one exchange to the next, and the "
        "anchor has the parameters from which all workers have started them."
    ),
    "compress": (
        "Compressions: float32, float16 and bfloat16 send all elements in that dtype; sign, int2, "
        "int4, int8, float4_e3m0, float8_e4m3fn and float8_e5m2 send 1 to 8 bits of each; topk, "
        "randomk, block, threshold and sparseloco send some, such as a hundredth with topk:0.01."
    ),
}
METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """A parser that raises an error, with the most similar options as a hint."""

    kind: type[Options]
    flags: Sequence[str] = ()
    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError instead of printing the usage."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        names = [word.partition("=")[0] for word in unknown]
        options = [name for name in names if name.startswith("--")]
        owners = "".join(_owner_of(each, self.kind, self.words) for each in options)
        suggestion = owners or suggest(options, self.flags)
        if unknown and not suggestion and any(name.lstrip("-").isdecimal() for name in names):
            suggestion = "lists have commas and no spaces, such as --fanouts 10,5; "
        if unknown:
            message = f"unrecognized options: {', '.join(names)}"
        raise UsageError(f"{message}\n\nhint: {suggestion}`{self.prog} --help` lists the options")


def _owner_of(flag: str, kind: type[Options], words: Sequence[str]) -> str:
    """Say with which value an option is written, such as heads with --model gat; "" if none.

    Values that are on the command line come first.
    """
    name = flag[2:].replace("-", "_")
    owners = [
        (row.flag, value)
        for row in rows(kind).values()
        for value in (row.of.targets if row.of else ())
        if row.of and name in row.of.arguments(value)
    ]
    for owner, value in sorted(owners, key=lambda each: each[1] not in words)[:1]:
        return f"it is an option of {owner} {value}, as in {value}:{name}=VALUE; "
    return ""


def suggest(words: Iterable[str], names: Sequence[str]) -> str:
    """Ask for the names that are most similar to `words`; return an empty text if none is."""
    near = [name for word in words for name in difflib.get_close_matches(word, names, 1)]
    return f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""


def parse(words: Sequence[str]) -> tuple[str, Options] | None:
    """Parse the command line to a command and its options; print the help and return None if asked.

    Raises:
        UsageError: a command, an option or a value is not valid.
    """
    command, *rest = words or ["help"]
    try:
        if command in ("help", "-h", "--help"):
            print(show_help(rest))
            return None
        if command not in COMMANDS:
            _reject_command(words)
        kind, _ = COMMANDS[command]
        if not {"-h", "--help", "--help-all"}.isdisjoint(rest):
            print(build_parser(command, "--help-all" in rest).format_help(), end="")
            return None
        parser = build_parser(command, False)
        parser.words = rest
        given = vars(parser.parse_args(_joined(rest)))
        return command, _train_options(given) if kind is TrainConfig else kind(**given)
    except ValueError as error:
        raise usage_error(error, command) from None


def _reject_command(words: Sequence[str]) -> NoReturn:
    first = words[0]
    named = next((word for word in words if word in COMMANDS), None)
    if first.startswith("-") and named is not None:
        raise UsageError(
            f"{first} is before the command\n\n"
            f"hint: options follow the command: gcnzc {named} {first}"
        )
    raise UsageError(
        f"there is no command {first!r}\n\n"
        f"hint: {suggest([first], [*COMMANDS, 'help'])}`gcnzc --help` lists the commands"
    )


def _joined(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, an option joined with a value that begins with -, such as -1,-1."""
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word.startswith("--") and remaining and re.match(r"-[\d.]", remaining[0]):
            word = f"{word}={remaining.pop(0)}"
        yield word


def _train_options(given: dict[str, Any]) -> TrainConfig:
    """Build the options of `gcnzc train`: those of a run or file, which the command line overrides.

    Raises:
        UsageError, ValueError: options contradict each other, or have no effect.
    """
    config = TrainConfig(**{**_file_options(given), **given})
    for message in unread(config, given):
        raise UsageError(message)
    return config


def _file_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of --resume or --config; a preset is read by `TrainConfig`."""
    resumed, preset = given.get("resume"), given.get("preset")
    path = Path(given.get("config", ""))
    if resumed and preset:
        raise UsageError(
            f"--preset {preset} with --resume {resumed}\n\n"
            "hint: a resumed run keeps its options; omit --preset"
        )
    out = given.get("out")
    if resumed and out and Path(out).resolve() != Path(resumed).resolve():
        raise UsageError(
            f"--out {out} with --resume {resumed}\n\n"
            "hint: a resumed run continues in its folder; omit --out"
        )
    found: dict[str, Any] = {}
    if resumed:
        # imported here, since it needs torch
        from gcnzc.train.run_folder import read_any

        try:
            found = read_any(Path(resumed)).to_dict()
        except ValueError as error:
            # the command line is valid, and the run is damaged
            raise RuntimeError(str(error)) from None
    if "config" in given:
        found |= read_options(path, TrainConfig)
        is_run = path.suffix == ".json"
        if is_run and preset:
            raise UsageError(
                f"--preset {preset} has no effect with --config {path}, which has all options\n\n"
                "hint: give one of them"
            )
        for name in ("resume", "config"):
            if name in found and not is_run:
                raise UsageError(f"{path}: {name} has no effect in a file\n\nhint: use --{name}")
    # a run has all options, and its folder is not that of another run
    if resumed or path.suffix == ".json":
        found = {k: v for k, v in found.items() if k not in ("out", "resume", "config")}
    return found


def build_parser(command: str, shows_all: bool) -> Parser:
    """Build the parser of a command, whose help lists the common options or all."""
    kind, _ = COMMANDS[command]
    own = rows(kind).values()
    positional = [row for row in own if row.positional]
    usage = [f"gcnzc {command}", *(_usage(row) for row in positional), "[options]"]
    parser = Parser(
        f"gcnzc {command}",
        usage=" ".join(usage),
        description=str(kind.__doc__).partition("\n\n    Args:")[0],
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=26, width=WIDTH
        ),
    )
    parser.kind = kind
    titles = {each.name: each.type.__doc__ for each in fields(kind)}  # type: ignore[arg-type]
    for group, members in groupby(own, lambda row: row.group):
        section = parser.add_argument_group(str(titles[group]).lower() if group else "options")
        for row in members:
            text = describe(row) if shows_all or row.common else argparse.SUPPRESS
            _add(section, row, text)
    parser.flags = [row.flag if row.default is not True else f"--no-{row.flag[2:]}" for row in own]
    section = parser.add_argument_group("help")
    has_all = all(row.common for row in own)
    about = "list the options" if has_all else "list the common options"
    section.add_argument("-h", "--help", action="help", help=about)
    if not has_all:
        section.add_argument("--help-all", action="help", help="list all options")
    if any(row.of for row in own):
        parser.epilog = (
            "`gcnzc help strategy` describes the values of an option, and `gcnzc help strategy "
            "diloco` the options of a value, as in --strategy diloco:local_steps=12."
        )
    return parser


def _usage(row: Row) -> str:
    name = row.name.upper() + " ..." * _is_list(row)
    return name if row.required else f"[{name}]"


def _is_list(row: Row) -> bool:
    return row.positional and get_origin(row.kind) is tuple


def _add(section: Any, row: Row, text: str) -> None:
    """Add an option to a section of a parser."""
    if row.positional:
        nargs = "+" if _is_list(row) else None if row.required else "?"
        section.add_argument(row.name, metavar=row.name.upper(), help=text, nargs=nargs)
    elif row.kind is bool:
        section.add_argument(row.flag, help=text, action=argparse.BooleanOptionalAction)
    else:
        section.add_argument(row.flag, help=text, metavar=_metavar(row), required=row.required)


def _metavar(row: Row) -> str:
    """Return how the help shows the value of an option."""
    if row.of is not None:
        return "NAME"
    kinds = [kind for kind in get_args(row.kind) or (row.kind,) if kind is not type(None)]
    words = _words(row)
    if words:
        return "{" + ",".join(words) + "}"
    if get_origin(row.kind) is tuple:
        return "N,N,..." if int in kinds else "NAME,NAME,..."
    return METAVARS[kinds[0]]


def _words(row: Row) -> list[str]:
    """Return the words that an option takes; none if it takes other values too."""
    if get_origin(row.kind) is Literal:
        return [str(each) for each in get_args(row.kind)]
    kinds = [kind for kind in get_args(row.kind) if kind is not type(None)]
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return [str(each) for each in get_args(kinds[0])]
    return []


def describe(row: Row) -> str:
    """Return the help of an option: its sentence, values, bounds and default."""
    words = row.help
    if row.of is not None:
        words += f": {', '.join(row.of.targets)}"
    notes = [
        f"{word} {bound:g}"
        for word, bound in (("above", row.above), ("below", row.below))
        if bound is not None
    ]
    if row.read_with is not None:
        notes.append(f"with --{row.read_with[0]} {' or '.join(map(str, row.read_with[1]))}")
    if row.default not in (None, False, ()):
        notes.append(f"default {shown(row.default)}")
    text = words + (f" ({', '.join(notes)})" if notes else "")
    return text.replace("%", "%%")


def show_help(words: Sequence[str]) -> str:
    """Return the help on the commands, on the values of an option, or on the options of a value."""
    if not words:
        return COMMANDS_HELP
    name, values = words[0].lstrip("-").replace("-", "_"), words[1:]
    if name == "toml":
        return _describe_toml()
    if name == "preset":
        return "\n".join(describe_preset(values[0]) if values else list_presets())
    if words[0] in COMMANDS and not values:
        return build_parser(name, False).format_help().rstrip()
    known = {key: row for kind, _ in COMMANDS.values() for key, row in rows(kind).items()}
    known |= rows(TrainConfig)
    if name not in known:
        raise UsageError(not_among("help", words[0], [*COMMANDS, "preset", "toml", *known]))
    row = known[name]
    if row.of is None:
        return f"{row.flag}: {describe(row).replace('%%', '%')}"
    if not values:
        lines = [f"{row.flag}: {row.help}", ""]
        for each in row.of.targets:
            lines += _columns(f"  {each}", row.of.summary(each), 22)
        return "\n".join([*lines, "", f"`gcnzc help {words[0]} NAME` lists the options of one."])
    return "\n".join(_describe_value(row, values[0]))


def _describe_toml() -> str:
    """Return the help on the keys of the file that describes tables."""
    # imported here, since it needs numpy
    from gcnzc.datasets.table_options import KEYS

    lines = [
        "Keys of the .toml file of `gcnzc prepare` and `gcnzc train`, and what holds without them:"
    ]
    for table, keys in KEYS.items():
        lines += ["", f"[{table}]" if table else "above the tables"]
        for name, key in keys.items():
            lines += _columns(f"  {name}", f"{key.value}; without it: {key.without}", 22)
    return "\n".join(lines)


def _describe_value(row: Row, name: str) -> list[str]:
    """Return the help on the options of a value."""
    assert row.of is not None, "it has options"
    if name not in row.of.targets:
        raise UsageError(not_among(row.flag, name, row.of.targets))
    own, lines = row.of.defaults.get(name, {}), [f"{row.flag} {name}: {row.of.summary(name)}", ""]
    arguments = row.of.arguments(name)
    for key, each in arguments.items():
        default = f"={shown(own[key])}" if key in own else _default(each.default)
        lines += _columns(f"  {key}{default}", _plain(each.help), 34)
    if not arguments:
        return [*lines, "  It has no options."]
    terms = [text for word, text in TERMS.items() if word in (row.name, *arguments)]
    return [*lines, *("\n" + textwrap.fill(text, WIDTH) for text in terms)]


def _default(source: str | None) -> str:
    """Return a default, given as source, as it is written after an option."""
    if source is None:
        return "=VALUE"
    try:
        return f"={shown(ast.literal_eval(source))}"
    except ValueError:  # an object, which the help describes
        return ""


def _plain(text: str) -> str:
    """Return the help of a docstring without references to classes, and with values as words."""
    text = re.sub(r"; see `\w+`| \(`[\w.]+`\)", "", text)
    return re.sub(r"\b(?:None|True|False)\b", lambda found: found[0].lower(), text)


def _columns(head: str, text: str, width: int) -> list[str]:
    """Return lines with a head at the left, and a text from a column on."""
    wrapped = textwrap.wrap(text, WIDTH - width) or [""]
    if len(head) >= width:
        return [head, *(" " * width + line for line in wrapped)]
    return [head.ljust(width) + wrapped[0], *(" " * width + line for line in wrapped[1:])]
