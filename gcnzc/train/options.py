"""Options: parse values, check bounds, and convert to and from JSON and TOML."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from gcnzc._files import check_regular
from gcnzc.compress import compression
from gcnzc.datasets.store import FORMAT
from gcnzc.system.arguments import ALL_NEIGHBOURS, FANOUT_LIMIT

C = TypeVar("C")


PICTURES = (".png", ".svg", ".pdf")


# the largest value of 32-bit counters
MAX_COUNT = 2**31 - 1


# options that may be larger; `hidden` is limited by the memory of the machine
LARGE = {"seed": 2**63 - 1, "hidden": 2**63 - 1, "nodes": 2**50, "edges": 2**50}


# about thirty years in seconds; no float option is larger
MAX_FLOAT = 1e9


# larger than any memory, and within the range of 64-bit counters
MAX_BYTES = 2**60


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _integers(words: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(
            f"{words[0]!r} is not a list of whole numbers separated by commas, such as 15,10"
        ) from None


def _floats(words: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(
            f"{words[0]!r} is not a list of numbers separated by commas, such as 0.5,0.8"
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


Floats = Annotated[
    tuple[float, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="X,X,...",
        instance_from_str=_floats,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(f"{number:g}" for number in value)],
    ),
]


def check_number_or_word(
    option: str, text: str, choices: Sequence[str], hint: str, *, whole: bool = False
) -> None:
    """Raise a ValueError unless `text` is a number above 0, or one of `choices`."""
    most = MAX_COUNT if whole else MAX_FLOAT
    is_number = re.fullmatch(r"\d+" if whole else r"\d+\.?\d*|\.\d+", text) is not None
    if text not in choices and not (is_number and float(text) > 0):
        raise ValueError(
            f"{option} must be a {'whole ' * whole}number above 0 or {' or '.join(choices)}, got "
            f"{text!r:.100}\n\nhint: {hint}"
        )
    if is_number and float(text) > most:
        raise ValueError(f"{option} must be at most {most:g}, got {text:.100}\n\nhint: {hint}")


def check_compress(text: str) -> None:
    """Raise a ValueError unless `text` is "auto" or the name of a compression."""
    if text == "auto":
        return
    try:
        compression(text)
    except ValueError as error:
        raise ValueError(f"--compress: {error}") from None


def parse_fragments(text: str) -> int | str | list[str]:
    """Parse the value of --fragments: a number, "modules", or a list of regular expressions.

    Raises:
        ValueError: `text` is none of these.
    """
    if text == "modules":
        return text
    if re.fullmatch(r"[-+.\d]*", text):
        check_number_or_word("--fragments", text, ("modules",), "the default is 4", whole=True)
        return int(text)
    patterns = text.split(",")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"--fragments: {pattern!r} is not a regular expression: {error}\n\n"
                "hint: give a number, modules, or expressions such as layers.0,layers.1"
            ) from None
    return patterns


def parse_cache_size(text: str, option: str = "--cache-size", whole: str = "of the rows") -> float:
    """Parse the size of a feature cache.

    Args:
        text: a fraction, such as 0.2, or bytes with a unit, such as 2GB.
        option: name of the option, for the message.
        whole: what the fraction refers to, for the message.

    Returns:
        A float that is a fraction, or an int that is a number of bytes.

    Raises:
        ValueError: `text` is neither.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(?:([KMG]i?)?(B))?", text.strip())
    if found is not None:
        number, unit, is_bytes = found.groups()
        num_bytes = float(number) * _UNITS[unit or ""]
        if is_bytes and 1 <= num_bytes <= MAX_BYTES:
            return int(num_bytes)
        if not is_bytes and 0 < float(number) <= 1:
            return float(number)
    raise ValueError(
        f"{option} must be a fraction {whole} from above 0 to 1, or bytes, got {text!r:.100}\n\n"
        f"hint: 0.2 is a fifth {whole}, and 1 is all; 2GB and 512MiB are bytes"
    )


def parse_bytes(text: str, option: str) -> int:
    """Parse a number of bytes with a unit, such as 2GB or 512MiB.

    Raises:
        ValueError: `text` is none.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMG]i?)?B", text.strip())
    num_bytes = float(found[1]) * _UNITS[found[2] or ""] if found else 0
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ValueError(
            f"{option} must be bytes with a unit, got {text!r:.100}\n\nhint: such as 2GB or 512MiB"
        )
    return int(num_bytes)


def config_from_dict(kind: type[C], values: Mapping[str, Any], source: str) -> C:
    """Build a config from a table of TOML or JSON; missing options have their defaults.

    Args:
        kind: a class of `gcnzc.train.config`.
        values: option names, with - or _, and their values.
        source: the file of the table, for messages.

    Raises:
        ValueError: an option is unknown or given twice, or a value has the wrong type.
    """
    hints, given = get_type_hints(kind), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in given:
            raise ValueError(f"{source}: {name} is given twice")
        if name not in hints:
            raise ValueError(
                f"{source}: no option named {name}\n\nhint: `gcnzc train --help` lists the options"
            )
        try:
            given[name] = _convert(hints[name], value)
        except (TypeError, OverflowError):
            raise ValueError(
                f"{source}: {name} cannot be {value!r:.100}\n\n"
                f"hint: {_describe(hints[name])}; the default is {getattr(kind, name, None)!r}"
            ) from None
    return kind(**given)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return the options of `config` as values of JSON, for `config_from_dict`."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _convert(hint: Any, value: Any) -> Any:
    """Convert a value of TOML or JSON to the type `hint` of an option.

    Raises:
        TypeError: the value has another type, or is not one of the choices.
        OverflowError: the value is too large for a float.
    """
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for choice in choices:
            with contextlib.suppress(TypeError):
                return _convert(choice, value)
    elif origin is Literal:
        # 1 == True, so the types are compared as well
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
    elif origin is tuple and isinstance(value, list):
        return tuple(_convert(choices[0], item) for item in value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint is str and type(value) in (int, float):
        # of an option that is a number or a word, such as local_steps
        return str(value)
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r} is not of type {hint}")


def option_name(name: str) -> str:
    """Return the option of a field: `--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")


def at_least(least: int, name: str, value: float) -> None:
    """Raise a ValueError if an option's value is below `least`, or NaN."""
    if not value >= least:
        raise ValueError(
            f"{option_name(name)} must be at least {least}, got {value}\n\n"
            f"hint: omit {option_name(name)} for the default"
        )


def check_least(config: Any, **least: int) -> None:
    """Raise a ValueError if an option is below its bound, or NaN; words and None are valid."""
    for name, bound in least.items():
        value = getattr(config, name)
        if isinstance(value, int | float):
            at_least(bound, name, value)


def check_range(
    config: Any, name: str, is_valid: Callable[[float], bool], valid: str, hint: str
) -> None:
    """Raise a ValueError if an option is out of range; None is valid.

    Args:
        config: has the option.
        name: of the option.
        is_valid: whether a number is in the range.
        valid: the range, for the message.
        hint: of the message.
    """
    value = getattr(config, name)
    if value is not None and not is_valid(value):
        raise ValueError(f"{option_name(name)} must be {valid}, got {value}\n\nhint: {hint}")


def at_most(most: float, name: str, value: float) -> None:
    """Raise a ValueError if an option's value is above `most`."""
    if value > most:
        raise ValueError(
            f"{option_name(name)} must be at most {most}, got {value}\n\n"
            f"hint: omit {option_name(name)} for the default"
        )


def check_options(config: Any) -> None:
    """Convert the fields of a config to their types, and check all numbers.

    A config that Python code constructs may have a `str` for a path, a list for a tuple, an integer
    for a float, or a number of numpy.

    Raises:
        ValueError: a value has another type or is not one of the choices, or a number is NaN,
            infinite, or above the limit for its type.
    """
    kind: Any = type(config)
    for name, hint in _type_hints(kind).items():
        value = getattr(config, name)
        try:
            converted = _convert(hint, _plain(value, hint))
        except (TypeError, OverflowError):
            raise ValueError(
                f"{option_name(name)} cannot be {value!r:.100}\n\nhint: {_describe(hint)}"
            ) from None
        if converted is not value:
            object.__setattr__(config, name, converted)
    check_numbers(config)


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _plain(value: Any, hint: Any) -> Any:
    """Return a value as TOML would have it: paths as text, sequences as lists, numbers as Python's.

    A number becomes text where the option takes a number or a word.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [_plain(item, None) for item in value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if hint is str and is_number else value


def _describe(hint: Any) -> str:
    """Describe the values of an option, for a hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    others = [kind for kind in kinds if get_origin(kind) is not Literal]
    names = [getattr(kind, "__name__", str(kind)) for kind in others if kind is not type(None)]
    if choices and names:
        names.append(f"the word {' or '.join(map(str, choices))}")
    elif choices:
        return f"choose one of {', '.join(map(str, choices))}"
    return f"its type is {' or '.join(names) or hint}"


def check_numbers(config: Any) -> None:
    """Raise a ValueError if an option is NaN, infinite, or above the limit for its type."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{option_name(field.name)} must be finite, got {value}\n\n"
                f"hint: omit {option_name(field.name)} for the default"
            )
        if isinstance(value, float):
            at_most(MAX_FLOAT, field.name, value)
        elif isinstance(value, int):
            at_most(LARGE.get(field.name, MAX_COUNT), field.name, value)


def check_writable(name: str, path: Path | None) -> None:
    """Raise a ValueError if a file cannot be written to `path`; None is valid."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(
            f"{option_name(name)}: {path} is a folder\n\nhint: name a file, such as {path / 'x'}"
        )
    check_regular(path)
    folder = path.parent
    # where a symbolic link leads to
    target = path.resolve().parent
    # a file of a node type may be in graph/nodes/0/mapping
    for place in (target, *target.parents[:3]):
        if path.exists() and _is_file_of_graph(path.resolve(), place):
            raise ValueError(
                f"{option_name(name)}: {path} is a file of the prepared graph {place}\n\n"
                "hint: choose another name"
            )
    if not folder.is_dir():
        raise ValueError(
            f"{option_name(name)}: there is no folder {folder}\n\n"
            f"hint: `mkdir -p {folder}` creates it"
        )
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"{option_name(name)}: this user may not write to {folder}\n\n"
            "hint: choose another folder"
        )


def _is_file_of_graph(path: Path, folder: Path) -> bool:
    """Whether a file is one of the prepared graph in a folder above it; True if it may be."""
    meta_path = folder / "meta.json"
    try:
        meta = json.loads(meta_path.read_bytes())
        files = meta["files"] if meta["format"] == FORMAT else ()
    except (OSError, ValueError, LookupError, TypeError):
        # also a damaged one
        return path == meta_path
    return path == meta_path or str(path.relative_to(folder)) in files


def check_picture(name: str, path: Path | None) -> None:
    """Raise a ValueError if an image cannot be written to `path`; None is valid."""
    if path is not None and not path.is_dir() and path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option_name(name)}: {path.name!r} does not end in an image format\n\n"
            f"hint: use a name that ends in {', '.join(PICTURES)}"
        )
    check_writable(name, path)


def check_layer_fanouts(fanouts: Sequence[int]) -> None:
    """Raise a ValueError if there is no fanout, or one is out of range."""
    if not fanouts:
        raise ValueError(
            "no fanout is given\n\nhint: the default for three layers is --fanouts 15,10,5"
        )
    for fanout in fanouts:
        if fanout != ALL_NEIGHBOURS and not 1 <= fanout <= FANOUT_LIMIT:
            bound = "at least 1, or -1 for all neighbours"
            if fanout > FANOUT_LIMIT:
                bound = f"at most {FANOUT_LIMIT}"
            raise ValueError(
                f"a fanout must be {bound}, got {fanout}\n\n"
                "hint: -1 samples all neighbours; the default for three layers is --fanouts 15,10,5"
            )


class Options:
    """Base of the groups: checks the types of all options, and that numbers are within limits."""

    def __post_init__(self) -> None:
        check_options(self)
