"""Equality of tensors, and of what consists of tensors, bit for bit."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# of minibatches, what is never on a device
ON_HOST = ("graph", "items", "metadata", "times", "spans", "stages")


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, NaNs too."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found, expected = (each.cpu().contiguous() for each in (found, expected))
    return not found.numel() or torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors of a minibatch, or of another dataclass, dict or tuple, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value) if each.name not in ON_HOST]
    else:
        parts = list(value) if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


def same_tensors(found: Any, expected: Any) -> bool:
    """Whether all tensors of two minibatches are the same, wherever they are."""
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    return all(same_bits(*pair) for pair in pairs)
