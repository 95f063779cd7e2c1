"""Save what a run is, so that it goes on bit for bit: whole or not at all."""

import io
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, so that at any moment `path` holds the old state or the new one.

    Args:
        path: file to write; its folder exists.
        state: tensors, numbers, strings, and lists and dicts of these: what `load` may read.

    Raises:
        OSError: the disk is full or may not be written. What was at `path` is still there.
    """
    write(path, to_bytes(state))


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """The bytes of a file that `load` reads: a copy of `state` as it is now."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path`, so that at any moment `path` holds the old bytes or the new ones.

    Raises:
        OSError: the disk is full or may not be written. What was at `path` is still there.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


class Writer:
    """Writes files one after the other, while training goes on.

    A state is copied at once, so that it may change while its copy is written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gcnzc-checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, path: Path, state: Mapping[str, Any]) -> None:
        """Begin to write `state` to `path`, as `save` does, after what was begun before.

        Raises:
            OSError: what was begun before could not be written. This state is not written.
        """
        self.wait()
        self._writing = self._thread.submit(write, path, to_bytes(state))

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: it could not be.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def load(path: Path) -> dict[str, Any]:
    """The state that `save` wrote, with its tensors on the CPU; nothing is unpickled but data.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is not a checkpoint, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint {path}\n\nhint: `gcnzc train` writes one; was this folder made by it?"
        )
    return from_bytes(path.read_bytes(), path)


def from_bytes(data: bytes, path: Path) -> dict[str, Any]:
    """The state in the bytes of a file that `save` wrote at `path`; see `load`."""
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} is not a checkpoint of gcnzc, or is damaged: {reason}\n\n"
            "hint: start again without --resume"
        ) from error
    return state


def match(model: torch.nn.Module, saved: Mapping[str, Tensor], source: Path) -> None:
    """Load `saved` into `model`, or say how they differ.

    Raises:
        ValueError: names or shapes differ; the first difference is named.
    """
    own = model.state_dict()
    for name in [*own, *saved]:
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(saved[name].shape) if name in saved else "absent"
        if here != there:
            raise ValueError(
                f"{source} is a checkpoint of another model: {name} is {there} there and {here} "
                "here\n\nhint: give the model's options (--model, --layers, --hidden, --heads, "
                "--batch-norm) and the graph that it was trained with"
            )
    model.load_state_dict(dict(saved))


def sync_folder(folder: Path) -> None:
    """Wait until a rename inside `folder` is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
