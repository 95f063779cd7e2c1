"""Whether the options of parameter groups, such as the learning rate, are the same on all ranks.

A scheduler that follows a rank's own loss gives each rank its own learning rate, and the replicas
drift apart. So with every exchange of an optimizer travels one bit of a hash of these options,
another bit each time: ranks whose options are the same always send the same bit, and others differ
in every second exchange. Where bits differ, the options themselves are exchanged, and compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.flat import hash_of
from gcnzc.replicas import everybodys

# how a step is computed, which depends on a rank's device and not on the method
NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# exchanges from one look at options on a GPU to the next, since reading them waits for it
GPU_INTERVAL = 100


class OptionComparison:
    """Compares the options of an optimizer's groups with those of the other ranks."""

    def __init__(self) -> None:
        self.count = 0
        """of bits so far, the same on all ranks"""
        self.is_due = False
        """whether bits have differed since the last comparison, the same on all ranks"""

    def bit(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """0 or 1, to be sent with the next exchange."""
        self.count += 1
        lines = option_lines(groups, with_gpu=self.count % GPU_INTERVAL == 0)
        return float(hash_of([str(self.count), *lines]) & 1)

    def receive(self, total: float, ranks: int) -> None:
        """Take the sum of the bits of so many ranks."""
        self.is_due |= total not in (0, ranks)

    def compare(self, groups: Sequence[Mapping[str, Any]]) -> Algorithm[None]:
        """Compare the options where bits have differed; without a request where they have not.

        Raises:
            ValueError: an option differs; raised on all ranks, and names it and both values.
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
        with_gpu: whether to read tensors on a GPU, which waits for it.
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
    # a whole number may stand for the same float
    return repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
