"""Memory-map the array files of a prepared folder, and write their headers."""

import contextlib
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gcnzc.datasets.meta_rules import AGAIN, HEADER_BYTES
from gcnzc.datasets.rows import Array

# names of files that a GPU driver may lock begin with one of these
LOCKED = ("indptr", "indices", "features")

# Python has the name since 3.13; the number is that of Linux on x86-64 and 64-bit Arm
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def npy_headers(arrays: Iterable[tuple[tuple[int, ...], np.dtype]]) -> list[bytes]:
    """Return the `.npy` headers for shapes and dtypes, padded to `HEADER_BYTES`."""
    magic, headers = np.lib.format.magic(1, 0), []
    length = HEADER_BYTES - len(magic) - 2
    for shape, dtype in arrays:
        fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        text = f"{fields!r}".encode().ljust(length - 1) + b"\n"
        headers.append(magic + length.to_bytes(2, "little") + text)
    return headers


def map_arrays(
    folder: Path, files: Mapping[str, Mapping[str, Any]], read_only: bool
) -> dict[str, Array]:
    """Memory-map the files that have a shape, and compare their headers with `meta.json`.

    Args:
        folder: a prepared folder.
        files: the files that `meta.json` describes, by name.
        read_only: see `gcnzc.datasets.store.open_folder`.

    Raises:
        ValueError: a header differs.
    """
    arrays: dict[str, Array] = {}
    described = {}
    for name, entry in files.items():
        if "shape" in entry:
            described[name] = tuple(entry["shape"]), np.dtype(entry["dtype"])
    headers = npy_headers(described.values())
    for (name, (shape, dtype)), header in zip(described.items(), headers, strict=True):
        with (folder / name).open("rb") as file:
            if file.read(HEADER_BYTES) != header:
                raise ValueError(
                    f"{folder / name} has no header of an array of shape {shape} and type {dtype}"
                    f"\n\n{AGAIN}"
                )
            num_bytes = files[name]["bytes"]
            if num_bytes == HEADER_BYTES:
                arrays[name] = np.empty(shape, dtype)
                continue
            is_locked = read_only and PurePosixPath(name).name.startswith(LOCKED)
            mapped = _map_file(file.fileno(), num_bytes, is_locked)
        arrays[name] = np.ndarray(shape, dtype, mapped, offset=HEADER_BYTES)
    return arrays


def _map_file(file: int, num_bytes: int, read_only: bool) -> mmap.mmap:
    if not read_only:
        # without MAP_NORESERVE, the kernel refuses a private mapping that is larger than memory;
        # with vm.overcommit_memory=2 it does so in any case
        with contextlib.suppress(OSError):
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            return mmap.mmap(file, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ)
