"""Base classes of compressed all-reduces, which compute the mean of a vector over the ranks.

A `Compression` is a set of options. A `Reducer`, one per vector, computes the means with these
options, and stores the state between them, such as error feedback. Optimizers use only these two
interfaces, so every optimizer works with every compression.

Notation: n elements of the vector, W ranks, k extras.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.system.scalars import read_scalars


@dataclass(frozen=True)
class WorkerInfo:
    """The rank, device and dtype that a reducer is created for."""

    rank: int
    world_size: int
    device: torch.device
    """of the vector"""
    dtype: torch.dtype
    """of the vector: float32 or float64"""
    layers: Sequence[int] = ()
    """numbers of elements of the parameters that the vector consists of; compressions that treat
    layers separately treat a vector with another number of elements as one layer"""


class Compression(ABC):
    """Options of a compressed all-reduce, the same on all ranks."""

    @property
    def momentum(self) -> Literal["everywhere", "masked"]:
        """The default of the argument `momentum` of `gcnzc.optim.Averaged`."""
        return "everywhere"

    @property
    def scale_elements(self) -> int | None:
        """The number of adjacent elements that share a scale; 1 if none do, None for a whole part.

        The compression error of an element can be as large as the others that share its scale.
        """
        return 1

    @abstractmethod
    def reducer(self, num_elements: int, worker: WorkerInfo) -> "Reducer":
        """Create the reducer of a vector.

        Args:
            num_elements: n, the length of the vector.
            worker: this rank, and the vector's device and dtype.
        """

    is_reduced = False
    """whether the messages are those of a ring all-reduce; otherwise all ranks get one from each"""

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """Return the bytes that a rank sends to each other one, or that the ranks all-reduce.

        Args:
            num_elements: n, the length of a float32 vector.
            worker: the rank.
            extras: k, the number of extras; see `Reducer.mean`.

        Raises:
            NotImplementedError: this compression does not predict its bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement message_bytes()")

    def bytes_sent(
        self, num_elements: int, world_size: int, extras: int = 0, layers: Sequence[int] = ()
    ) -> int:
        """Return the bytes that one rank sends for the mean of a float32 vector, by formula.

        Args:
            num_elements: n, the length of the vector.
            world_size: W.
            extras: k, the number of extras; see `Reducer.mean`.
            layers: see `WorkerInfo`.
        """
        worker = WorkerInfo(0, world_size, torch.device("cpu"), torch.float32, layers)
        sent = (world_size - 1) * self.message_bytes(num_elements, worker, extras)
        return 2 * sent // world_size if self.is_reduced else sent


class Reducer(ABC):
    """Computes the means of one vector, which changes at every step, over all ranks.

    Args:
        num_elements: n, the length of the vector.
        worker: this rank, and the vector's device and dtype.
    """

    worker_error: Tensor | None = None
    """(n,) on the device: the compression error of this rank's vector; None without feedback"""
    server_error: Tensor | None = None
    """(elements of this rank's part,) on the device: the compression error of the part's mean"""
    extra_sums: Sequence[float] = ()
    """(k,): the sums of the extras of the last mean, on the host; `mean` copies them together with
    the flags that it checks, so reading them does not synchronize with the device again"""
    support: Tensor | None = None
    """(n,) bool on the device: the elements of the last mean that a rank has sent; the others are
    0. None for all elements"""

    part = 0, 0
    """the first and one past the last element of this rank's part, if it has a server error"""

    def __init__(self, num_elements: int, worker: WorkerInfo) -> None:
        self.num_elements, self.worker = num_elements, worker
        self.active: Tensor | None = None
        """(n,) bool: the elements that are reduced; None for all"""
        self.num_means = torch.zeros(1, dtype=torch.int64)
        """the number of means so far, which determines random draws; a subclass that uses it counts
        and saves it"""

    @abstractmethod
    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """Replace a vector with its mean over the ranks, or with an approximation of it.

        Args:
            values: (n + k,), contiguous, on the device; written in place, equal on all ranks.
                Inactive elements become 0, whatever their values.
            extras: k, the number of scalars appended to the vector. They are replaced by their
                sums over the ranks, which are also stored in `extra_sums`. `Dense` computes the
                sums in the dtype that it sends, other compressions in float32.

        Returns:
            An empty string, or the reason why there is no mean because elements are not finite,
            the same on all ranks. Then the errors are unchanged, and `values` is undefined.
        """

    def restrict_to(self, active: Tensor | None) -> None:
        """Reduce only the active elements from now on, and set the errors of the others to 0.

        All ranks must call it with the same mask.

        Args:
            active: (n,) bool on the device; None for all elements.
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
        """Set the inactive elements of a vector (n,) to 0."""
        if self.active is not None:
            vector.masked_fill_(~self.active, 0)

    def mean_of_one_rank(self, values: Tensor) -> str:
        """Return the result of `mean` with a single rank: the vector itself, not compressed."""
        self.clear_inactive(values[: self.num_elements])
        extras = values[self.num_elements :]
        counts, self.extra_sums = read_scalars(count_not_finite(values), extras)
        return describe_non_finite(counts) if any(counts) else ""

    def errors(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint saves, by name; the tensors are not copies."""
        named = {"worker": self.worker_error, "server": self.server_error}
        return {name: error for name, error in named.items() if error is not None}

    def check_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Check the argument of `load_errors`.

        Args:
            errors: by name, the tensors that `errors` returns.

        Raises:
            ValueError: the shapes are those of another vector or another number of ranks, or
                elements are not finite: there would be no mean again.
        """
        if bad := [name for name, error in errors.items() if not _is_finite(error)]:
            raise ValueError(
                f"errors that are no tensors of finite elements: {', '.join(bad)}\n\n"
                "hint: load another checkpoint; this one may be damaged"
            )
        shapes = {name: tuple(error.shape) for name, error in self.errors().items()}
        found = {name: tuple(error.shape) for name, error in errors.items()}
        if not found.items() <= shapes.items():
            raise ValueError(
                f"errors of shapes {found}, not {shapes}\n\nhint: convert the state of another "
                "number of ranks with gcnzc.optim.resize_state"
            )

    def load_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Load the state that `errors` returned, or that `gcnzc.optim.resize_state` converted.

        State that is missing becomes 0; a single rank, for example, has no errors.

        Raises:
            ValueError: see `check_errors`; nothing is loaded then.
        """
        self.check_errors(errors)
        for name, error in self.errors().items():
            error.copy_(errors[name] if name in errors else torch.zeros_like(error))


def _is_finite(error: object) -> bool:
    return isinstance(error, Tensor) and bool(error.isfinite().all())


def count_not_finite(values: Tensor) -> Tensor:
    """Count the elements that are not finite, without a device synchronization.

    Returns:
        () int64 on the device of `values`.
    """
    if values.device.type == "cpu" and math.isfinite(float(torch.linalg.vector_norm(values))):
        # the norm is faster than the count, and nearly always sufficient
        return torch.zeros((), dtype=torch.int64)
    return (~values.isfinite()).sum()


def describe_non_finite(counts: Iterable[float]) -> str:
    """Return the skip reason for the numbers of non-finite elements of all ranks."""
    ranks = [f"rank {rank} has {count:,.0f}" for rank, count in enumerate(counts) if count]
    if not ranks:
        return "the mean overflows"
    return f"elements that are not finite or too large: {', '.join(ranks)}"
