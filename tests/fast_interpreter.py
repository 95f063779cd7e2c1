"""Speed up Triton's interpreter in tests, with the same results, and let it accept new numpy.

Three features take more than half of the interpreter's time in gcnzc's kernels, and the tests do
not need them:

- The interpreter patches `triton.language` at each launch and at each call of a device function,
  and restores it afterwards. Here it is patched once and not restored.
- It checks each sum, difference and product of 32-bit integers for overflow, in 64 bits
  (`sanitize_overflow`). The check is disabled if `--triton-cases` limits the number of cases; `make
  test-all` keeps it.
- It builds a table of dtypes at each conversion of a dtype. Here conversions are cached.

The patches are for the interpreter of Triton 3.7. A patch is skipped if another version does not
have the function that it replaces.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


class _PermanentScope:
    """Replaces the interpreter's `_LangPatchScope`: `restore` does nothing."""

    def restore(self) -> None:
        """Leave `triton.language` patched."""


def _patch_only_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], _PermanentScope]:
    patched = set()

    def patch_once(function: Any) -> _PermanentScope:
        modules = frozenset(
            id(value)
            for value in function.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        )
        if modules not in patched:
            patch_lang(function)
            patched.add(modules)
        return _PermanentScope()

    return patch_once


def _cache_by_name(get_np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    cache: dict[str, Any] = {}

    def get_cached_np_dtype(dtype: Any) -> Any:
        # building the name of a block or of a pointer would take longer than the cache saves, so a
        # block has the key of its elements, and a pointer is not cached
        scalar = getattr(dtype, "element_ty", dtype)
        if isinstance(dtype, interpreter.tl.pointer_type) or not hasattr(scalar, "name"):
            return get_np_dtype(dtype)
        if isinstance(scalar, interpreter.tl.pointer_type):
            return get_np_dtype(scalar)
        name = scalar.name
        if name not in cache:
            cache[name] = get_np_dtype(scalar)
        return cache[name]

    return get_cached_np_dtype


def speed_up_interpreter(*, checks_overflow: bool) -> None:
    """Patch the interpreter of this process; keep its overflow checks if `checks_overflow`."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_only_once(interpreter._patch_lang)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not checks_overflow:
        options = dataclasses.replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _cache_by_name(interpreter._get_np_dtype)


def accept_new_numpy() -> None:
    """Let the interpreter of Triton before 3.7 convert scalars, such as the bounds of loops.

    Its scalars are arrays of one dimension, which numpy 2.4 and later do not convert to integers.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_and_convert(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_convert
