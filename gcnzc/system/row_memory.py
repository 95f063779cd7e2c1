"""Allocate large tables that are written in place: in memory, or in a memory-mapped file."""

import math
import os
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc._files import replacing
from gcnzc.system.host_memory import available_bytes, mappings

DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""dtypes of tables that are written in place, with those of NumPy"""
# what NumPy raises for a damaged header of an array
DAMAGED_HEADER = (
    *(ValueError, EOFError, TypeError, SyntaxError, OverflowError, MemoryError),
    *(KeyError, AttributeError, RecursionError, tokenize.TokenError),
)


def allocate(shape: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """Return a tensor of zeros on the host, whose pages are allocated when they are written.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        what: the name of the tensor, for the error message.

    Raises:
        RuntimeError: the tensor is larger than the available memory.
    """
    needed, left = math.prod(shape) * dtype.itemsize, available_bytes()
    if needed > left:
        raise RuntimeError(
            f"{what} of shape {tuple(shape)} and {dtype} needs {needed:,} bytes of memory, but "
            f"{left:,} are available\n\nhint: use fewer columns, stop other programs, raise the "
            "memory limit of the container, or map a file"
        )
    return torch.zeros(tuple(shape), dtype=dtype)


@contextmanager
def new_mapped_file(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Create a `.npy` file, and yield its elements, which are zeros, as a memory-mapped tensor.

    The file appears at the end of the `with`, and does not appear after an error. The tensor stays
    valid; writes to it change the file.

    Args:
        path: of the file; must not exist.
        shape: of the array.
        dtype: of the array, one of `DTYPES`.

    Raises:
        FileExistsError: `path` exists.
        OSError: the disk is full or not writable.
    """
    if path.exists():
        raise FileExistsError(
            f"{path} exists\n\nhint: open it to go on with its values, or remove it first"
        )
    with replacing(path) as partial:
        # room on the disk is reserved first: a write to a mapped page without room ends the process
        with partial.open("wb") as file:
            header: dict[str, Any] = {
                "descr": DTYPES[dtype].str,
                "fortran_order": False,
                "shape": tuple(shape),
            }
            np.lib.format.write_array_header_1_0(file, header)
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes:
                os.posix_fallocate(file.fileno(), file.tell(), num_bytes)
        array = np.lib.format.open_memmap(partial, mode="r+")
        yield torch.from_numpy(array)
        array.flush()


def open_mapped_file(path: Path, *, read_only: bool) -> Tensor:
    """Memory-map a `.npy` file of one of `DTYPES`.

    Args:
        path: of the file.
        read_only: whether the memory may not be written. Otherwise writes change the file.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the file may not be written, and `read_only` is False.
        ValueError: it is not such a file.
    """
    try:
        # first for reading, since NumPy would extend a file that is too short to be written to
        array = np.lib.format.open_memmap(path, mode="r")
        array = np.lib.format.open_memmap(path, mode="c" if read_only else "r+")
    except PermissionError as error:
        raise PermissionError(
            f"{path} may not be written\n\nhint: open it with read_only=True, or copy it"
        ) from error
    except DAMAGED_HEADER as error:
        raise ValueError(
            f"{path} is not a .npy file of an array: {error}\n\nhint: was it written completely?"
        ) from error
    if array.dtype not in DTYPES.values() or not array.flags.c_contiguous:
        raise ValueError(
            f"{path} has an array of {array.dtype} and shape {array.shape}\n\n"
            "hint: a table in C order of float32 or float64 is needed"
        )
    return torch.from_numpy(array)


def check_writable(rows: Tensor, what: str) -> None:
    """Check that the memory of a tensor on the host may be written.

    Raises:
        ValueError: it is mapped read-only, such as a file; a write would end the process.
    """
    if rows.numel() == 0:
        return
    for mapping in mappings(rows.data_ptr(), rows.numel() * rows.element_size()):
        if not mapping.writable:
            raise ValueError(
                f"{what} of shape {tuple(rows.shape)} is mapped read-only"
                f"{f' from {mapping.path}' if mapping.path else ''}\n\n"
                "hint: rows.clone() is a copy in memory; open a file with read_only=False"
            )
