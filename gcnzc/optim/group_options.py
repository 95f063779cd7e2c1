"""Compare the options of parameter groups, such as the learning rate, across ranks.

A scheduler that follows a rank's own loss gives each rank its own learning rate, and the replicas
go out of sync. Therefore every exchange of an optimizer also sends one bit of a hash of the options
and of the number of the exchange. Ranks with equal options always send equal bits; ranks with
different options send different bits in about half of the exchanges. If bits differ, the ranks
exchange the options themselves and compare them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.flat import hash_of
from gcnzc.replicas import everybodys

# these choose an implementation for the rank's device and do not change the method
NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# options on a GPU are read once in so many exchanges, because reading them synchronises with it
GPU_INTERVAL = 100


class OptionComparison:
    """Compares the options of an optimizer's groups with those of the other ranks."""

    def __init__(self) -> None:
        self.count = 0
        """number of bits sent so far; equal on all ranks"""
        self.is_due = False
        """whether bits have differed since the last comparison; equal on all ranks"""

    def bit(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """Return the bit, 0 or 1, to send with the next exchange."""
        self.count += 1
        lines = option_lines(groups, with_gpu=self.count % GPU_INTERVAL == 0)
        return float(hash_of([str(self.count), *lines]) & 1)

    def receive(self, total: float, ranks: int) -> None:
        """Take in the sum of the bits of `ranks` ranks."""
        self.is_due |= total not in (0, ranks)

    def compare(self, groups: Sequence[Mapping[str, Any]]) -> Algorithm[None]:
        """Compare the options if bits have differed; otherwise communicate nothing.

        Raises:
            ValueError: an option differs between ranks. It is raised on all ranks; the message has
                the name of the option and both values.
        """
        if not self.is_due:
            return
        self.is_due = False
        texts = yield from everybodys("\n".join(option_lines(groups, with_gpu=True)))
        first, *others = (dict(line.split("\t") for line in text.splitlines()) for text in texts)
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                one, two = first.get(name, "not set"), other.get(name, "not set")
                if one != two:
                    raise ValueError(
                        f"{name} differs between ranks: {one} on rank 0, {two} on rank {rank}\n\n"
                        "hint: change options by what all ranks know, such as the step or the mean "
                        "of their losses"
                    )


def option_lines(groups: Sequence[Mapping[str, Any]], *, with_gpu: bool) -> list[str]:
    """A line for each option that must be the same on all ranks: its name, a tab and its value.

    Args:
        groups: of an optimizer.
        with_gpu: whether to read tensors on a GPU, which synchronises with it.
    """
    return [
        f"{name} of parameter group {number}\t{_text(group[name], with_gpu=with_gpu)}"
        for number, group in enumerate(groups)
        for name in sorted(group)
        if name not in NOT_COMPARED and _is_compared(group[name])
    ]


def _is_compared(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_compared, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | None)


def _text(value: Any, *, with_gpu: bool) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(each, with_gpu=with_gpu) for each in value)})"
    if isinstance(value, Tensor):
        return repr(value.item()) if with_gpu or value.device.type == "cpu" else "on a GPU"
    # an int and a float of the same value are equal
    return repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
