"""Options: declared once as rows, from which the command line, files, checks and records follow.

The fields of an `Options` class are options. Each has a row (`Row`), with its name, type, default,
bounds and help. `gcnzc.cli.parser` makes the parser and the help from the rows. An option that only
one model, task or strategy has is no row: it is written with that value, as in `--strategy
diloco:local_steps=12`; see `gcnzc.train.values`. This module imports neither torch nor such a
class.
"""

import functools
import json
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar, cast, get_args, get_type_hints

from gcnzc.train import signatures, values
from gcnzc.train.values import Bounds, Choices, Value, not_among, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

O = TypeVar("O", bound="Options")  # noqa: E741 - the type of options


@dataclass(frozen=True, kw_only=True)
class Row(Bounds):
    """An option: all that is known of it."""

    name: str
    kind: Any
    default: Any
    help: str
    group: str = ""
    """the field of the config that has the option; "" if the config itself has it"""
    of: Choices | None = None
    """the values that have options of their own"""
    read_with: tuple[str, Collection[str]] | None = None
    """another option, and its values with which this one has an effect"""
    required: bool = False
    positional: bool = False
    common: bool = True
    """whether `--help` lists the option; `--help-all` lists all"""
    free: bool = False
    """whether a resumed run may have another value"""

    @property
    def flag(self) -> str:
        """The option on the command line, such as `--batch-size`."""
        return "--" + self.name.replace("_", "-")

    def parse(self, given: Any) -> Any:
        """Return a value of the command line, a file or Python as one of the option's type.

        Raises:
            ValueError: it has another type, is out of bounds, or is not one of the choices.
        """
        if self.of is not None and (given is not None or type(None) not in get_args(self.kind)):
            return self.of.parse(given)
        value = values.parse(given, self.kind, self.flag)
        self.check(self.flag, value)
        return value


def option(default: Any = None, **row: Any) -> Any:
    """Declare an option: a field of an `Options` class. Its docstring is the text of `--help`.

    Args:
        default: the value if none is given; `...` if one must be given.
        row: other fields of `Row`.
    """
    return field(default=MISSING if default is ... else default, metadata=row)


# some values of an option, or a function that tells whether a value is one of them
Values: TypeAlias = Collection[Any] | Callable[[Any], object]
# by an option, some of its values and the remedy: other options, and those of their values that
# contradict these, with the reason
Exclusions: TypeAlias = Mapping[tuple[str, Values, str], Sequence[tuple[str, Values, str]]]


def _is_one_of(value: Any, some: Values) -> bool:
    chosen = value.name if isinstance(value, Value) else value
    return bool(some(chosen)) if callable(some) else chosen in some


class Options:
    """Base class of dataclasses whose fields are options, or groups of options.

    Raises:
        ValueError: a value is not valid, or options contradict each other.
    """

    exclusions: ClassVar[Exclusions] = {}

    def __post_init__(self) -> None:
        own = rows(type(self))
        for row in own.values():
            if not row.group:
                object.__setattr__(self, row.name, row.parse(getattr(self, row.name)))
        for (other, others, remedy), excluded in self.exclusions.items():
            for name, some, reason in excluded if _is_one_of(self[other], others) else ():
                if _is_one_of(self[name], some):
                    raise ValueError(
                        f"{own[name].flag} {shown(self[name])} with {own[other].flag} "
                        f"{shown(self[other])}: {reason}\n\n"
                        f"hint: omit {own[name].flag}, or {remedy}"
                    )
        self.check()

    def check(self) -> None:
        """Check what a row cannot express; override it.

        Raises:
            ValueError: options contradict each other.
        """

    def __getitem__(self, name: str) -> Any:
        group = rows(type(self))[name].group
        return getattr(getattr(self, group) if group else self, name)

    def replace(self: O, **given: Any) -> O:
        """Return a copy with other options."""
        return type(self)(**({name: self[name] for name in rows(type(self))} | given))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as values of JSON, from which the class can be built again."""
        return {name: values.to_json(self[name]) for name in rows(type(self))}


def rows(kind: type) -> Mapping[str, Row]:
    """Return the rows of an `Options` class by name, in the order of the help."""
    return _rows(cast(Hashable, kind))


@functools.cache
def _rows(kind: Any) -> Mapping[str, Row]:
    found: dict[str, Row] = {}
    hints, helps = get_type_hints(kind), signatures.docstrings(kind.__module__, kind.__name__)
    for own in fields(kind):
        kind_of = hints[own.name]
        if isinstance(kind_of, type) and issubclass(kind_of, Options):
            for name, row in rows(kind_of).items():
                found[name] = Row(**{**vars(row), "group": own.name})
        else:
            required = own.default is MISSING
            found[own.name] = Row(
                name=own.name,
                kind=kind_of,
                default=None if required else own.default,
                help=helps[own.name],
                required=required,
                **own.metadata,
            )
    return found


def check_names(kind: type, given: Iterable[tuple[str, Any]], source: str = "") -> dict[str, Any]:
    """Return options by the names of their rows; those of files may have - for _.

    Raises:
        ValueError: an option is unknown or given twice.
    """
    found: dict[str, Any] = {}
    for name, value in given:
        own = name.replace("-", "_")
        if own not in rows(kind):
            raise ValueError(f"{source}{not_among('option', name, rows(kind))}")
        if own in found:
            raise ValueError(f"{source}{own} is given twice")
        found[own] = value
    return found


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, whose names are unique."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is given twice")
    return dict(pairs)


def read_options(path: Path, kind: type) -> dict[str, Any]:
    """Read options from a TOML file, or the JSON file of a run; tables only group them.

    Raises:
        ValueError: it is not TOML or JSON, or an option is unknown, given twice or not valid.
        OSError: it cannot be read.
    """
    is_json = path.suffix == ".json"
    try:
        text = path.read_bytes().decode("utf-8-sig")
        table = json.loads(text, object_pairs_hook=_object) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "restore it from a copy" if is_json else "write lines such as `epochs = 20`"
        raise ValueError(
            f"{path} is not {'JSON' if is_json else 'TOML'}: {error}\n\nhint: {remedy}"
        ) from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} has no options\n\nhint: `gcnzc train --help-all` lists them")
    groups = {row.group for row in rows(kind).values()}
    pairs: list[tuple[str, Any]] = []
    for name, value in table.items():
        if isinstance(value, dict) and name not in groups:
            raise ValueError(f"{path}: {not_among('table', name, sorted(groups))}")
        pairs += value.items() if isinstance(value, dict) else [(name, value)]
    given = check_names(kind, pairs, f"{path}: ")
    for name, value in given.items():
        try:
            given[name] = rows(kind)[name].parse(value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return given


def unread(config: Any, names: Collection[str]) -> list[str]:
    """Return a message for each of the options `names` that has no effect with the others."""
    own, messages = rows(type(config)), []
    for row in (own[name] for name in names):
        if row.read_with is None or config[row.name] == row.parse(row.default):
            continue
        other, readers = row.read_with
        if not _is_one_of(config[other], readers):
            flag = own[other].flag
            messages.append(
                f"{row.flag} {shown(config[row.name])} has no effect with {flag} "
                f"{shown(config[other])}\n\nhint: only {flag} {' or '.join(readers)} uses it"
            )
    return messages
