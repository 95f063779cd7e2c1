"""Triton's interpreter with less work for each operation; the results are the same.

Three parts of it take more than half of its time in our kernels, and are not needed to test them:

- It replaces the functions of `triton.language` at each launch and at each call of a function by a
  kernel. Here they remain replaced.
- It checks each sum, difference and product of 32-bit integers for overflow, with 64-bit operands
  (`sanitize_overflow`). Without `--triton-cases`, as in `make test-all`, it still does.
- It builds a table of dtypes whenever it needs one of them.

Written for the interpreter of Triton 3.7; with another version only what both have in common is
replaced.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


class _Permanent:
    """In place of the interpreter's list of replaced functions: none are restored."""

    def restore(self) -> None:
        """Leave the language as it is."""


def _replaced_once(replace: Callable[[Any], Any]) -> Callable[[Any], _Permanent]:
    done = set()

    def replace_once(function: Any) -> _Permanent:
        modules = frozenset(
            id(value)
            for value in function.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        )
        if modules not in done:
            replace(function)
            done.add(modules)
        return _Permanent()

    return replace_once


def _remembered(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    of_names: dict[str, Any] = {}

    def numpy_dtype_of_name(dtype: Any) -> Any:
        # blocks and pointers have no name that is cheap to make
        scalar = getattr(dtype, "element_ty", dtype)
        if isinstance(dtype, interpreter.tl.pointer_type) or not hasattr(scalar, "name"):
            return numpy_dtype(dtype)
        if isinstance(scalar, interpreter.tl.pointer_type):
            return numpy_dtype(scalar)
        name = scalar.name
        if name not in of_names:
            of_names[name] = numpy_dtype(scalar)
        return of_names[name]

    return numpy_dtype_of_name


def make_faster(*, checks_overflow: bool) -> None:
    """Replace the parts, in this process; with `checks_overflow`, not the second."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _replaced_once(interpreter._patch_lang)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not checks_overflow:
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
