"""Read the tensors in files of `torch.save` without unpickling objects."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load(path: Path) -> Any:
    """What `torch.save` wrote, if it is plain values, tensors and numpy arrays of numbers.

    Raises:
        ValueError: it is anything else, or broken.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(_numpy_globals())
    try:
        with warnings.catch_warnings():
            # of pickles of another protocol than torch's
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    # a broken pickle makes the reader fail in any way
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read as numbers: {why}\n\n"
            "hint: it is broken, or would run code if it were unpickled; get the set again"
        ) from None
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _numpy_globals() -> list[Any]:
    """What a pickle of a numpy array of numbers calls, by the names of NumPy 1 and 2."""
    functions: list[Any] = [np.empty(0).__reduce__()[0], np.int64(0).__reduce__()[0]]
    named = []
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        for function in functions:
            alias = _alias(function)
            alias.__module__, alias.__qualname__ = module, function.__name__
            named.append(alias)
    return [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "bBhHiIlLqQefd?"}, *named]


def _alias(function: Any) -> Any:
    """`function` under a name that may be changed."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call
