"""Describe, hash and group lists of tensors, which must have the same layout on all ranks."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def group_by_dtype(named: Iterable[tuple[str, T]]) -> list[list[tuple[str, T]]]:
    """Group named tensors by dtype and device, each tensor once, in their order."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, T]]] = {}
    seen = set()
    for name, parameter in named:
        # a tied parameter has several names
        if id(parameter) not in seen:
            seen.add(id(parameter))
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(groups.values())


def describe_layout(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Describe tensors by what must be the same on all ranks; return a line for each tensor."""
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
        f"{'' if tensor.requires_grad else ' without gradient'}"
        for name, tensor in named
    ]


def hash_lines(lines: Sequence[str]) -> int:
    """Return a 63-bit hash of lines of text."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
