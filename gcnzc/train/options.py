"""Options: parsers, bounds, and conversion to and from text."""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from gcnzc.train import old_names

C = TypeVar("C")


# fan-outs are int32 in the samplers of PyG and DGL, too
MOST_NEIGHBOURS = 2**31 - 1


PICTURES = (".png", ".svg", ".pdf")


# no count of this kind makes sense beyond; 32-bit counters end here
MOST_COUNT = 2**31 - 1


# options that may be larger: the memory of the machine limits `hidden`
LARGE = {"seed": 2**63 - 1, "hidden": 2**63 - 1, "nodes": 2**50, "edges": 2**50}


# thirty years in seconds, a terabit per second in Mbit/s; no option is a larger float
MOST_FLOAT = 1e9


# more than any memory, and less than counters of 64 bits hold
MOST_BYTES = 2**60


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _integers(words: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(
            f"{words[0]!r} is not a list of whole numbers with commas between them, such as 15,10"
        ) from None


Fanouts = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,...",
        instance_from_str=_integers,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(str(number) for number in value)],
    ),
]


def check_number(
    option: str, words: str, others: Sequence[str], hint: str, *, whole: bool = False
) -> None:
    """Raise a ValueError unless `words` are a number above 0, or one of some others."""
    most = MOST_COUNT if whole else MOST_FLOAT
    is_number = re.fullmatch(r"\d+" if whole else r"\d+\.?\d*|\.\d+", words) is not None
    if words not in others and not (is_number and float(words) > 0):
        raise ValueError(
            f"{option} must be a {'whole ' * whole}number above 0 or {' or '.join(others)}, got "
            f"{words!r:.100}\n\nhint: {hint}"
        )
    if is_number and float(words) > most:
        raise ValueError(f"{option} must be at most {most:g}, got {words:.100}\n\nhint: {hint}")


def fragments_of(words: str) -> int | str | list[str]:
    """The fragments of a model that `words` say: how many, "modules", or regular expressions.

    Raises:
        ValueError: they say none of these.
    """
    if words == "modules":
        return words
    if re.fullmatch(r"[-+.\d]*", words):
        check_number("--fragments", words, ("modules",), "the default is 4", whole=True)
        return int(words)
    patterns = words.split(",")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"--fragments: {pattern!r} is no regular expression: {error}\n\n"
                "hint: a number, modules, or expressions such as layers.0,layers.1"
            ) from None
    return patterns


def parse_cache_size(words: str, option: str = "--cache-size", whole: str = "of the rows") -> float:
    """The size of a hot set that `words` say: a float is a share of the rows, an int is bytes.

    Args:
        words: of the command line.
        option: that they are of.
        whole: what a share is of.

    Raises:
        ValueError: they say neither.
    """
    told = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(?:([KMG]i?)?(B))?", words.strip())
    if told is not None:
        number, unit, is_bytes = told.groups()
        num_bytes = float(number) * _UNITS[unit or ""]
        if is_bytes and 1 <= num_bytes <= MOST_BYTES:
            return int(num_bytes)
        if not is_bytes and 0 < float(number) <= 1:
            return float(number)
    raise ValueError(
        f"{option} must be a share {whole} above 0, or bytes, got {words!r:.100}\n\n"
        f"hint: 0.2 is a fifth {whole}, 1 all; 2GB and 512MiB are bytes"
    )


def from_words(kind: type[C], values: Mapping[str, Any], source: str) -> C:
    """The config that a TOML or JSON table spells, with the defaults for what it leaves out.

    Args:
        kind: a class of this module.
        values: option names, with - or _, and their values.
        source: where the table came from, for messages.

    Raises:
        ValueError: an option is unknown or a value is of the wrong type.
    """
    hints, given = get_type_hints(kind), {}
    for name, value in old_names.rename_options(values).items():
        if name not in hints:
            raise ValueError(
                f"{source}: no option named {name}\n\nhint: `gcnzc train --help` lists the options"
            )
        try:
            given[name] = _converted(hints[name], value)
        except (TypeError, OverflowError):
            raise ValueError(
                f"{source}: {name} cannot be {value!r:.100}\n\n"
                f"hint: the default is {getattr(kind, name, None)!r}"
            ) from None
    return kind(**given)


def to_words(config: Any) -> dict[str, Any]:
    """The options of `config` as what JSON can hold; `from_words` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _converted(hint: Any, value: Any) -> Any:
    """A value of TOML or JSON as an option of type `hint` holds it.

    Raises:
        TypeError: it is of another type, or not one of the choices.
        OverflowError: it is too large for a float.
    """
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for choice in choices:
            with contextlib.suppress(TypeError):
                return _converted(choice, value)
    elif origin is Literal:
        # 1 and True are equal
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
    elif origin is tuple and isinstance(value, list):
        return tuple(_converted(choices[0], item) for item in value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r} is not of type {hint}")


def option_name(name: str) -> str:
    """Return the flag of a field: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def at_least(least: int, name: str, value: float) -> None:
    """Raise unless an option's value reaches a minimum."""
    if not value >= least:
        raise ValueError(
            f"{option_name(name)} must be at least {least}, got {value}\n\n"
            f"hint: leave {option_name(name)} out for the default"
        )


def at_most(most: float, name: str, value: float) -> None:
    """Raise if an option's value exceeds a maximum."""
    if value > most:
        raise ValueError(
            f"{option_name(name)} must be at most {most}, got {value}\n\n"
            f"hint: leave {option_name(name)} out for the default"
        )


def check_numbers(config: Any) -> None:
    """Raise a ValueError if a number among the options is NaN, infinite or absurdly large."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{option_name(field.name)} must be finite, got {value}\n\n"
                f"hint: leave {option_name(field.name)} out for the default"
            )
        if isinstance(value, float):
            at_most(MOST_FLOAT, field.name, value)
        elif isinstance(value, int):
            at_most(LARGE.get(field.name, MOST_COUNT), field.name, value)


def check_writable(name: str, path: Path | None) -> None:
    """Raise a ValueError unless a file can be written to `path`, or there is none to write."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(
            f"{option_name(name)}: {path} is a folder\n\nhint: name a file, such as {path / 'x'}"
        )
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(
            f"{option_name(name)}: there is no folder {folder}\n\nhint: mkdir -p {folder} makes it"
        )
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"{option_name(name)}: this user may not write to {folder}\n\n"
            "hint: choose another folder"
        )


def check_picture(name: str, path: Path | None) -> None:
    """Raise a ValueError unless a picture can be written to `path`, or there is none to write."""
    if path is not None and not path.is_dir() and path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option_name(name)}: no picture can be written as {path.name!r}\n\n"
            f"hint: a name that ends in {', '.join(PICTURES)}"
        )
    check_writable(name, path)


def check_fanouts(fanouts: Sequence[int]) -> None:
    """Raise if there is no fan-out, or one exceeds what the sampler's counters hold."""
    if not fanouts:
        raise ValueError(
            "no fan-out is given\n\nhint: the default for three layers is --fanouts 15,10,5"
        )
    for number in fanouts:
        if number > MOST_NEIGHBOURS:
            raise ValueError(
                f"a fan-out must be at most {MOST_NEIGHBOURS}, got {number}\n\n"
                "hint: -1 keeps all neighbours"
            )
        if number < 1 and number != -1:
            raise ValueError(
                f"a fan-out must be at least 1, or -1 for all neighbours, got {number}\n\n"
                "hint: the default for three layers is --fanouts 15,10,5"
            )
