"""The base class of reducers, which compute the mean of a vector over the ranks.

A way of compressing is a few options; what it leaves out of one mean and adds to the next is kept
by a `Reducer`, one for each vector. Optimizers are written against these, and do not know which one
they were given.

Letters: n elements of the vector, W workers, k notes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.kernels.finite import are_finite


@dataclass(frozen=True)
class WorkerInfo:
    """Where a reducer works."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    """of the vector: float32 or float64"""


class Compression(ABC):
    """A way of taking means: options alone, which are the same on all workers."""

    @abstractmethod
    def reducer(self, num_elements: int, place: WorkerInfo) -> "Reducer":
        """What takes the means of vectors of so many elements, one after the other."""

    @abstractmethod
    def bytes_sent(self, num_elements: int, world_size: int, notes: int = 0) -> int:
        """What one worker sends for the mean of a float32 vector: the formula."""


class Reducer(ABC):
    """Takes the means of one vector at every step, together with those of the other workers.

    Args:
        num_elements: n.
        place: of this worker.
    """

    worker_error: Tensor | None = None
    """(n,) on the device: what this worker has not sent yet"""
    server_error: Tensor | None = None
    """(elements of this worker's part,): what it has not passed on yet"""
    note_sums: Sequence[float] = ()
    """(k,): the sums of the last mean's notes, which `mean` reads together with its checks"""

    def __init__(self, num_elements: int, place: WorkerInfo) -> None:
        self.num_elements, self.place = num_elements, place
        self.active: Tensor | None = None
        """(n,) bool: elements that are exchanged; all if None"""

    @abstractmethod
    def mean(self, values: Tensor, notes: int = 0) -> Algorithm[str]:
        """Replace a vector by its mean over the workers, or by what comes close to it.

        Args:
            values: (n + k,), contiguous, on the device. Written in place, equal on all workers.
                Elements that are not active become 0, whatever they were.
            notes: k, the last elements: small numbers for all, whose sums over the workers are
                written there, exact to float32, and to `note_sums`.

        Returns:
            Why there is no mean, in words, if elements are not finite: the same on all workers, the
            errors are as before, and `values` is of no use. Otherwise nothing.
        """

    def keep_to(self, active: Tensor | None) -> None:
        """Exchange only these elements from now on, (n,) bool; what others left out is forgotten.

        Must be called with the same on all workers.
        """
        self.active = active
        if active is None:
            return
        if self.worker_error is not None:
            self.worker_error.masked_fill_(~active, 0)
        if self.server_error is not None:
            begin = self.part[0]
            end = begin + len(self.server_error)
            self.server_error.masked_fill_(~active[begin:end], 0)

    def clear_inactive(self, vector: Tensor) -> None:
        """Set the elements of a vector (n,) that are not active to 0."""
        if self.active is not None:
            vector.masked_fill_(~self.active, 0)

    @property
    def part(self) -> tuple[int, int]:
        """Where this worker's part of the vector begins and ends, if it keeps a server error."""
        return 0, 0

    def forget(self) -> None:
        """Set all errors to 0."""
        for error in (self.worker_error, self.server_error):
            if error is not None:
                error.zero_()

    def errors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the tensors themselves."""
        named = {"worker": self.worker_error, "server": self.server_error}
        return {name: error for name, error in named.items() if error is not None}

    def load_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Take up what `errors` gave, or what `gcnzc.optim.resized` made of it.

        What is not there becomes 0: one worker alone, for instance, has left nothing out.

        Raises:
            ValueError: they are of another vector, or another number of workers.
        """
        own = self.errors()
        for name, error in errors.items():
            if name not in own or own[name].shape != error.shape:
                raise ValueError(
                    f"errors of shapes { {name: tuple(e.shape) for name, e in errors.items()} }, "
                    f"not { {name: tuple(e.shape) for name, e in own.items()} }\n\n"
                    "hint: a state of another number of workers is made to fit by "
                    "gcnzc.optim.resized"
                )
        for name, error in own.items():
            error.copy_(errors[name] if name in errors else torch.zeros_like(error))

    @property
    def state_bytes(self) -> int:
        """Memory that is kept from one mean to the next."""
        return sum(error.numel() * error.element_size() for error in self.errors().values())


def count_not_finite(values: Tensor) -> Tensor:
    """() int64 on the device: how many elements are not finite. Nothing is read from a GPU."""
    if values.device.type == "cpu" and bool(are_finite(values)):
        # the check is faster than the count, and nearly always enough
        return torch.zeros((), dtype=torch.int64)
    return (~values.isfinite()).sum()


def describe_non_finite(found: Iterable[float]) -> str:
    """Who has elements that are not finite, in words, of how many each worker has."""
    words = [f"worker {rank} has {count:,.0f}" for rank, count in enumerate(found) if count]
    if not words:
        return "the mean overflows"
    return f"elements that are not finite: {', '.join(words)}"
