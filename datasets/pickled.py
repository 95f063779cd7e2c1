"""Read tensors and numpy arrays from files of `torch.save`, without unpickling other objects."""

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load(path: Path, classes: Sequence[str] = ()) -> Any:
    """Load a file of `torch.save` that contains plain values, tensors and numeric numpy arrays.

    Args:
        path: of the file.
        classes: full names of classes that the file may mention. They are replaced by empty
            classes, so that no code of theirs runs.

    Raises:
        ValueError: the file contains other objects, or is damaged.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([*_numpy_globals(), *map(_empty_class, classes)])
    try:
        with warnings.catch_warnings():
            # torch warns about pickle protocols other than its own
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    # a damaged pickle can raise any exception
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        if isinstance(error, KeyError):
            # an opcode or a record that does not exist
            reason = "it is not a file of torch.save"
        if isinstance(error, pickle.UnpicklingError) and "Weights only" in reason:
            reason = "it has other objects than tensors, numbers and texts"
        raise ValueError(
            f"{path} cannot be read as numbers: {reason}\n\n"
            "hint: it is damaged, or could run code when unpickled; download the dataset again"
        ) from None
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _empty_class(name: str) -> type:
    module, _, own_name = name.rpartition(".")
    return type(own_name, (), {"__module__": module, "__qualname__": own_name})


def _numpy_globals() -> list[Any]:
    """Return the globals that pickles of numeric numpy arrays use, by names of NumPy 1 and 2."""
    functions: list[Any] = [np.empty(0).__reduce__()[0], np.int64(0).__reduce__()[0]]
    named = []
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        for function in functions:
            alias = _alias(function)
            alias.__module__, alias.__qualname__ = module, function.__name__
            named.append(alias)
    return [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "bBhHiIlLqQefd?"}, *named]


def _alias(function: Any) -> Any:
    """Return a wrapper of `function` whose name can be changed."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call
