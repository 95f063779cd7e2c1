"""Save and load checkpoints atomically, with a SHA-256, for bit-for-bit resuming.

A file is the zip archive that `torch.save` writes, whose comment has the SHA-256 of all bytes
before the digest. `torch.load` can read the file too. Torch checks neither the digest nor the
archive's CRCs, so it would not notice a few wrong bits in a weight.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcnzc._files import replacing

LABEL = b"gcnzc sha256 "


RESTORE = "hint: restore the file from a copy, or start another run with --out"


SEAL_BYTES = len(LABEL) + 2 * hashlib.sha256().digest_size


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to `path` atomically: the file always has the old state or the new one.

    Args:
        path: file to write; its folder exists.
        state: tensors, numbers, strings, and lists and dicts of these.

    Raises:
        OSError: the disk is full or not writable. The previous file remains.
    """
    write(path, to_bytes(state))


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """Serialize the current `state` to the bytes of an archive, for `write`."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _sealed(data: bytes) -> tuple[memoryview, bytes]:
    """Return an archive up to the length of its comment, and the rest with the checksum."""
    body, label = memoryview(data)[:-2], SEAL_BYTES.to_bytes(2, "little") + LABEL
    digest = hashlib.sha256(body)
    digest.update(label)
    return body, label + digest.hexdigest().encode()


def _check_seal(data: bytes, path: Path) -> None:
    """Verify the checksum.

    Raises:
        ValueError: it does not match.
    """
    size = max(len(data) - SEAL_BYTES + len(LABEL), 0)
    if data[size:] != hashlib.sha256(memoryview(data)[:size]).hexdigest().encode():
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of gcnzc: its SHA-256 is not the one that it "
            f"ends with\n\n{RESTORE}"
        )


def write(path: Path, data: bytes) -> None:
    """Write an archive with its checksum to `path` atomically.

    Args:
        path: file to write; its folder exists.
        data: from `to_bytes`, without the checksum.

    Raises:
        OSError: the disk is full or not writable. The previous file remains.
    """
    with replacing(path) as partial, partial.open("wb") as file:
        for part in _sealed(data):
            file.write(part)


class Writer:
    """Writes files one after the other in a background thread.

    A state is copied first, so it may change while the copy is written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gcnzc-checkpoint")
        self._writing: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether `wait` has not been called since the last `begin`."""
        return self._writing is not None

    def begin(self, path: Path, state: Mapping[str, Any]) -> None:
        """Wait for the previous file, then start to write `state` to `path`, as `save` does.

        Raises:
            OSError: the previous file could not be written. This state is not written.
        """
        self.wait()
        self._writing = self._thread.submit(write, path, to_bytes(state))

    def wait(self) -> None:
        """Wait until the last file is written.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def load(path: Path, needed: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Load a state that `save` wrote, with its tensors on the CPU and `weights_only=True`.

    Args:
        path: the file.
        needed: required keys, with the types of their values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint {path}\n\nhint: `gcnzc train` writes one; was this folder made by it?"
        )
    return from_bytes(path.read_bytes(), path, needed)


def from_bytes(data: bytes, path: Path, needed: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Load a state from the bytes of the file at `path`; see `load`."""
    _check_seal(data, path)
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # torch may raise any exception for a damaged file
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError):
            # torch's own message suggests an unsafe load
            reason = "it has other objects than tensors, numbers and text"
        else:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} is not a checkpoint of gcnzc, or is damaged: {reason}\n\n{RESTORE}"
        ) from error
    check_keys(state, needed or {}, path)
    return dict(state)


def check_keys(state: Mapping[str, Any], needed: Mapping[str, type], path: Path) -> None:
    """Check that a state from `path` has the required keys, with values of the given types.

    Raises:
        ValueError: a key is missing, or its value has another type.
    """
    for key, kind in needed.items():
        if key not in state:
            raise ValueError(_not_ours(path, f"it has no {key}"))
        if not isinstance(state[key], kind):
            found = type(state[key]).__name__
            raise ValueError(_not_ours(path, f"{key} is a {found}, not a {kind.__name__}"))


def _not_ours(path: Path, what: str) -> str:
    return f"{path} is not a checkpoint of gcnzc: {what}\n\n{RESTORE}"


def match(model: torch.nn.Module, saved: Mapping[str, Tensor], source: Path) -> None:
    """Load the state dict `saved` into `model`.

    Raises:
        ValueError: names or shapes differ; the first difference is named.
    """
    own = model.state_dict()
    if any(not isinstance(value, Tensor) for value in saved.values()):
        raise ValueError(_not_ours(source, "the model has values that are not tensors"))
    for name in [*own, *saved]:
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(saved[name].shape) if name in saved else "absent"
        if here != there:
            raise ValueError(
                f"{source} is a checkpoint of another model: {name} is {there} there and {here} "
                "here\n\nhint: the options in the run's config.json, or its graph, have changed "
                "since the training; restore them from a copy"
            )
    model.load_state_dict(dict(saved))
