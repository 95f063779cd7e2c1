"""Rules for the values of a prepared folder's `meta.json`, and the errors if one is broken."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

import numpy as np

# data starts at a page boundary, so that whole pages can be mapped, locked and read by a device
HEADER_BYTES = 4096
AGAIN = "hint: prepare the folder again from its source"
VERIFY = "hint: `gcnzc info {} --verify` reports what is damaged; prepare the folder again"


Table = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A constraint on a value, and its description for messages."""

    words: str
    # exact types: bool is a subclass of int in Python, but true is not a number in JSON
    types: tuple[type, ...]
    bounds: tuple[float, float] | None = None
    pattern: re.Pattern[str] | None = None  # of a whole string
    is_list: bool = False  # the constraint is on the elements of a list
    is_required: bool = True


def or_null(rule: Rule) -> Rule:
    """Return the rule that also allows null."""
    return replace(rule, words=f"{rule.words} or null", types=(*rule.types, type(None)))


def optional(rule: Rule) -> Rule:
    """Return the rule for a key that may be absent."""
    return replace(rule, is_required=False)


def one_of(*choices: str) -> Rule:
    """Return the rule for one of some strings."""
    words = " or ".join(json.dumps(choice) for choice in choices)
    return Rule(words, (str,), pattern=re.compile("|".join(map(re.escape, choices))))


def integer(least: int = 0) -> Rule:
    """Return the rule for an integer with a lower bound."""
    return Rule(f"an integer of at least {least}", (int,), (least, math.inf))


COUNT = integer()
TEXT = Rule("a string", (str,))
BOOL = Rule("true or false", (bool,))
OBJECT = Rule("an object", (dict,))
FRACTION = Rule("a number from 0 to 1", (int, float), (0, 1))
SIZES = Rule("a list of integers", (int,), (0, math.inf), is_list=True)
HEX = Rule("eight hexadecimal digits", (str,), pattern=re.compile("[0-9a-f]{8}"))


FILE: Mapping[str, Rule] = {
    "shape": optional(SIZES),
    "dtype": optional(TEXT),
    "bytes": COUNT,
    "crc32": HEX,
}


def check_tables(tables: Sequence[tuple[str, Any, Mapping[str, Rule]]], path: Path) -> None:
    """Check that tables have the required keys and that their values follow the rules.

    Args:
        tables: name for messages, values and rules of each table.
        path: the file, for messages.
    """
    for where, values, rules in tables:
        if type(values) is not dict:
            raise invalid(path, where, values, OBJECT.words)
        missing, wrong = [], []
        for key, rule in rules.items():
            if key not in values:
                if rule.is_required:
                    missing.append(key)
                continue
            value = values[key]
            items = [value]
            if rule.is_list:
                items = value if type(value) is list else [None]
            for item in items:
                is_valid = type(item) in rule.types
                if is_valid and item is not None and rule.bounds is not None:
                    is_valid = rule.bounds[0] <= item <= rule.bounds[1]
                if is_valid and item is not None and rule.pattern is not None:
                    is_valid = rule.pattern.fullmatch(item) is not None
                if not is_valid:
                    wrong.append(key)
        if missing:
            context = f" in {where}" if where else ""
            raise ValueError(f"{path} has no {', '.join(missing)}{context}\n\n{AGAIN}")
        if wrong:
            key = wrong[0]
            name = f"{where}: {key}" if where else key
            raise invalid(path, name, values[key], rules[key].words)


def invalid(path: Path, what: str, value: object, words: str) -> ValueError:
    """Return the error for a value that breaks a rule; `words` describes valid ones."""
    hint = VERIFY.format(path.parent)
    return ValueError(f"{path}: {what} is {shortened(value)}, not {words}\n\n{hint}")


def check_files(files: Table, path: Path) -> None:
    """Check the names, shapes and sizes of all files."""
    for name, entry in files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\0" in name or not name:
            raise invalid(path, "a name in files", name, "the name of a file in the folder")
        if ("shape" in entry) != ("dtype" in entry):
            raise ValueError(f"{path} does not have both shape and dtype of {name}\n\n{AGAIN}")
        if "shape" not in entry:
            continue
        if entry["dtype"] not in ("<i8", "<i4", "<f8", "<f4", "<f2", "|i1", "|u1", "<u2"):
            raise invalid(path, f"files: {name}: dtype", entry["dtype"], "a supported dtype")
        expected = HEADER_BYTES + math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
        if entry["bytes"] != expected:
            raise invalid(
                path, f"files: {name}: bytes", entry["bytes"], f"{expected}, the size for its shape"
            )
