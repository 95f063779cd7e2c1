"""The help texts of options, from the strings below the fields of config classes."""

import ast
import inspect
from functools import cache
from typing import Annotated, Any

import tyro


@cache
def set_help(kind: type) -> None:
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
