"""Values of options: parse and show them, also those that have options of their own.

`Choices` has the values of one option, such as the strategies: each name with the class or function
that it stands for. The keyword arguments in its signature are the options that are written with the
name, as in `--strategy diloco:local_steps=12,outer_lr=0.4`.
"""

import ast
import difflib
import math
import operator
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from gcnzc.train import signatures
from gcnzc.train.signatures import Argument

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# larger than any memory, and within the range of 64-bit counters
_MAX_BYTES = 2**60


# the limits of numbers without bounds of their own: those of 32-bit counters, and 30 years in
# seconds, which timers that count nanoseconds in 64 bits can wait
MAX_COUNT, MAX_FLOAT = 2**31 - 1, 1e9


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError if a number, or one of several, is out of bounds; words are valid."""
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, bool) or not isinstance(item, int | float):
                continue
            most = MAX_COUNT if isinstance(item, int) else MAX_FLOAT
            bounds: tuple[tuple[str, Any, Any], ...] = (
                ("at least", self.least, operator.ge),
                ("above", self.above, operator.gt),
                ("below", self.below, operator.lt),
                ("at most", most if self.most is None else self.most, operator.le),
            )
            for word, bound, is_met in bounds:
                if bound is not None and not is_met(item, bound):
                    raise ValueError(f"{name} must be {word} {bound:g}, got {item}")


@dataclass(frozen=True)
class Choices:
    """The values of an option that have options of their own."""

    flag: str
    """the option on the command line, such as `--strategy`"""
    targets: Mapping[str, Sequence[str]]
    """by name: each `module:name` whose keyword arguments are options; the first is what the name
    stands for"""
    supplied: Sequence[str] = ()
    """arguments that the run supplies"""
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by name: arguments of a base class that the class does not support"""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """by name: defaults that replace those of the signature"""
    summaries: Mapping[str, str] = field(default_factory=dict)
    """by name, where it is not the docstring's first sentence"""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    """by option, where its class does not check it before the graph is loaded"""

    def arguments(self, name: str) -> dict[str, Argument]:
        """Return the options of a value: its keyword arguments that text can express."""
        excluded = (*self.supplied, *self.refused.get(name, ()))
        found: dict[str, Argument] = {}
        for target in self.targets[name]:
            found = {**signatures.read(target).arguments, **found}
        return {
            key: each
            for key, each in found.items()
            if key not in excluded and not {*each.kinds} <= {type(None)}
        }

    def summary(self, name: str) -> str:
        """Return the sentence that describes a value."""
        if name in self.summaries:
            return self.summaries[name]
        return signatures.read(self.targets[name][0]).summary

    def parse(self, given: Any) -> "Value":
        """Parse `NAME` or `NAME:OPTION=VALUE,...`.

        Raises:
            ValueError: there is no such value, it has no such option, or an option is not valid.
        """
        if isinstance(given, Value):
            return given
        name, _, text = str(given).partition(":")
        if name not in self.targets:
            raise ValueError(not_among(self.flag, name, self.targets))
        options: dict[str, Any] = {}
        known = self.arguments(name) if text else {}
        # a comma within a value is not followed by a name and `=`
        for item in re.split(r",(?=\w+=)", text) if text else ():
            key, equals, value = item.partition("=")
            if key not in known:
                raise ValueError(not_among(f"option of {self.flag} {name}", key, known))
            if not equals or key in options:
                wrong = "is given twice" if equals else "has no value"
                raise ValueError(f"{self.flag} {given}: {key} {wrong}\n\nhint: {name}:{key}=VALUE")
            option = f"{key} of {self.flag} {name}"
            options[key] = parse(value, known[key].kinds, option)
            self.bounds.get(key, Bounds()).check(option, options[key])
        return Value(name, options, self)


@dataclass(frozen=True)
class Value:
    """A choice with the options that are given: `Value("diloco", {"local_steps": 12}, ...)`."""

    name: str
    options: Mapping[str, Any]
    of: Choices = field(compare=False, repr=False)

    def __str__(self) -> str:
        given = ",".join(f"{key}={shown(value)}" for key, value in self.options.items())
        return f"{self.name}:{given}" if given else self.name

    def __getitem__(self, option: str) -> Any:
        """Return an option's value, or its default."""
        if option in self.given:
            return self.given[option]
        return ast.literal_eval(str(self.of.arguments(self.name)[option].default))

    @property
    def given(self) -> dict[str, Any]:
        """The keyword arguments: the options that are given, over the defaults of the choice."""
        return {**self.of.defaults.get(self.name, {}), **self.options}

    def load(self) -> Any:
        """Import the class or function that the name stands for.

        Raises:
            ValueError: a required option is not given.
        """
        for key, each in self.of.arguments(self.name).items():
            if each.default is None and key not in self.given:
                flag = self.of.flag
                raise ValueError(
                    f"{flag} {self} has no {key}\n\nhint: {flag} {self.name}:{key}=VALUE"
                )
        module, _, name = self.of.targets[self.name][0].partition(":")
        return getattr(import_module(module), name)


def parse(given: Any, kind: Any, name: str) -> Any:
    """Convert text, or a value of TOML, JSON or Python, to a type or the first fitting of several.

    Raises:
        ValueError: no type fits.
    """
    kinds = kind if isinstance(kind, tuple) else _members(kind)
    for each in sorted(kinds, key=lambda kind: kind is str):
        if str in kinds and get_origin(each) is tuple and "," not in str(given):
            continue  # a word, and no list
        try:
            return _convert(given, each)
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    literals = [each for each in kinds if _origin(each) is Literal]
    words = [str(word) for each in literals for word in get_args(each)]
    others = [_describe(each) for each in kinds if each not in literals]
    if words and not others:
        raise ValueError(not_among(name, given, words))
    raise ValueError(f"{name} must be {' or '.join([*others, *words])}, got {given!r:.100}")


def _origin(kind: Any) -> Any:
    # with the return type of `get_origin`, mypy rejects comparisons with `Literal`
    return get_origin(kind)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if _origin(kind) in (Union, types.UnionType) else (kind,)


def _convert(given: Any, kind: Any) -> Any:
    if kind == type(None):  # noqa: E721 - mypy takes the identity for impossible
        return {None: None, "none": None}[given]
    origin = _origin(kind)
    if origin is Literal:
        return {str(each): each for each in get_args(kind)}[str(given)]
    if kind is bool:
        return {"true": True, "false": False}[str(given).lower()]
    if origin is tuple:
        item, *rest = get_args(kind)
        words = given.split(",") if isinstance(given, str) else given
        words = [] if given == "" else words
        if "" in words or (rest and rest[0] is not ... and len(words) != len(rest) + 1):
            raise ValueError
        return tuple(_convert(each, item) for each in words)
    is_number = isinstance(given, int | float) or hasattr(given, "__index__")
    if isinstance(given, bool) or (kind is int and isinstance(given, float)):
        raise ValueError
    if kind is str and not (isinstance(given, str) or is_number):
        raise ValueError
    value = kind(given)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "none",
        Path: "a path",
    }
    return words.get(kind, "numbers separated by commas, such as 15,10")


def not_among(what: str, given: Any, known: Iterable[Any]) -> str:
    """Return the message that a name is unknown, with the known ones and the most similar one."""
    names = [str(each) for each in known]
    near = difflib.get_close_matches(str(given), names, 1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    listed = f"choose one of {', '.join(names)}" if names else "it has none"
    return f"{what}: there is no {str(given)!r:.100}\n\nhint: {suggestion}{listed}"


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def to_json(value: Any) -> Any:
    """Return a value of JSON that `parse` converts back."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Value | Path) else value


def parse_share(text: str, name: str, whole: str) -> float:
    """Parse a fraction, such as 0.2, or bytes with a unit, such as 2GB.

    Args:
        text: the value.
        name: of the option, for the message.
        whole: what the fraction refers to, for the message.

    Returns:
        A float that is a fraction, or an int that is a number of bytes.

    Raises:
        ValueError: `text` is neither.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)", text.strip())
    if found is not None and 0 < float(found[1]) <= 1:
        return float(found[1])
    try:
        return parse_bytes(text, name)
    except ValueError:
        raise ValueError(
            f"{name} must be a fraction {whole} from above 0 to 1, or bytes, got {text!r:.100}\n\n"
            f"hint: 0.2 is a fifth {whole}, and 1 is all; 2GB and 512MiB are bytes"
        ) from None


def parse_bytes(text: str, name: str) -> int:
    """Parse a number of bytes with a unit, such as 2GB or 512MiB.

    Raises:
        ValueError: `text` is none.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMG]i?)?B", text.strip())
    num_bytes = float(found[1]) * _UNITS[found[2] or ""] if found else 0
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise ValueError(
            f"{name} must be bytes with a unit, got {text!r:.100}\n\nhint: such as 2GB or 512MiB"
        )
    return int(num_bytes)
