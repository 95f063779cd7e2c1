"""The layout of a list of tensors: groups by dtype and device, and a hash of it."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def group_by_dtype(named: Iterable[tuple[str, T]]) -> list[list[tuple[str, T]]]:
    """Group named tensors by dtype and device, each tensor once, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, T]]] = {}
    seen = set()
    for name, parameter in named:
        # tied ones have several names
        if id(parameter) not in seen:
            seen.add(id(parameter))
            kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(kinds.values())


def layout(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """What must be the same on all workers, a line for each tensor, which may be repeated."""
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
        f"{'' if tensor.requires_grad else ' without gradient'}"
        for name, tensor in named
    ]


def hash_of(lines: Sequence[str]) -> int:
    """A number of 63 bits that tells layouts apart."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
