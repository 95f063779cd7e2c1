"""Save and load checkpoints atomically, with a SHA-256, for bit-for-bit resuming.

A file is the zip archive that `torch.save` writes, whose comment has the SHA-256 of all bytes
before the digest. `torch.load` can read the file too. Torch checks neither the digest nor the
archive's CRCs, so it would not notice a few wrong bits in a weight.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc._files import replacing
from gcnzc.train.run_folder import BEST

LABEL = b"gcnzc sha256 "
RESTORE = "restore the file from a copy, or start another run with --out"
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


def to_bytes(state: Mapping[str, Any]) -> memoryview:
    """Serialize the current `state` to the bytes of an archive, for `write`."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getbuffer()


def to_plain(value: Any, name: str) -> Any:
    """Return what a callback has supplied as values that `load` and JSON can read.

    Args:
        value: numbers, also of NumPy, texts, tensors, None, and lists and dicts of these.
        name: of the value, for the message.

    Raises:
        TypeError: a value has another type.
    """
    if isinstance(value, Mapping):
        return {key: to_plain(each, name) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each, name) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, Tensor) or type(value) in (int, float, bool, str):
        return value
    raise TypeError(
        f"{name}: a checkpoint can only have tensors, numbers, texts, and lists and dicts of "
        f"these, not {value!r:.200}\n\nhint: convert other values, such as by float(...)"
    )


def write(path: Path, data: memoryview) -> None:
    """Write an archive with its checksum to `path` atomically.

    Args:
        path: file to write; its folder exists.
        data: from `to_bytes`, without the checksum.

    Raises:
        OSError: the disk is full or not writable. The previous file remains.
    """
    # up to the length of the archive's comment
    body, label = data[:-2], SEAL_BYTES.to_bytes(2, "little") + LABEL
    digest = hashlib.sha256(body)
    digest.update(label)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(body)
        file.write(label + digest.hexdigest().encode())


def load(path: Path, needed: Sequence[str] = (), remedy: str = RESTORE) -> dict[str, Any]:
    """Load a state that `save` wrote, with its tensors on the CPU and `weights_only=True`.

    Args:
        path: the file.
        needed: required keys.
        remedy: the hint of an error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, or is damaged.
    """
    hint = f"\n\nhint: {remedy}"
    if not path.is_file():
        # a named pipe would be read without an end
        what = "is not a file" if path.exists() else "is missing"
        raise FileNotFoundError(f"{path} {what}{hint}")
    data = path.read_bytes()
    size = max(len(data) - SEAL_BYTES + len(LABEL), 0)
    if data[size:] != hashlib.sha256(memoryview(data)[:size]).hexdigest().encode():
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of gcnzc: its SHA-256 is not the one that it "
            f"ends with{hint}"
        )
    try:
        state = from_bytes(data)
    # torch may raise any exception, and its message for other objects suggests an unsafe load
    except Exception as error:
        raise ValueError(
            f"{path} is not a checkpoint of gcnzc: it has other objects than tensors, numbers and "
            f"text{hint}"
        ) from error
    if missing := [name for name in needed if name not in state]:
        raise ValueError(f"{path} is not a checkpoint of gcnzc: it has no {missing[0]}{hint}")
    return state


def load_best(run: Path) -> dict[str, Any]:
    """Load the best model of a run: its epoch, validation score, scores and weights (`model`).

    Raises:
        FileNotFoundError: the run has none.
        ValueError: the file is damaged.
    """
    remedy = f"`gcnzc train --resume {run}` writes it again, from the checkpoint of the run"
    return load(run / BEST, ("epoch", "valid", "scores", "model"), remedy)


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return the state that `to_bytes` serialized, with or without a checksum after it."""
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def match(model: torch.nn.Module, saved: Mapping[str, Tensor], source: Path) -> None:
    """Load the state dict `saved` into `model`.

    Raises:
        ValueError: names or shapes differ; the first difference is named.
    """
    try:
        model.load_state_dict(dict(saved))
    # of values that are no tensors, torch raises various errors
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        difference = str(error).partition(":\n")[2] or str(error)
        raise ValueError(
            f"{source} is a checkpoint of another model: {difference.strip().splitlines()[0]}\n\n"
            "hint: the options in the run's config.json, or its graph, have changed since the "
            "training; restore them from a copy"
        ) from None
