"""The base of sparse compressions, which send some elements of a vector and none of the others.

    y_i = x_i + decay * e_i          rank i adds its error to its vector
    a_i = y_i on the support of rank i, else 0
    e_i <- y_i - a_i                 if everything is finite on all ranks
    result  mean_i a_i

With a decay of 1, no part of any x_i is lost: the sum over time of the results, plus mean_i e_i,
equals the sum of mean_i x_i. Contributions are divided by W and added in the order of ranks, so the
result is the same bit for bit on all ranks, and cannot overflow.

Notation: n elements, W ranks, k extras, K elements that a rank sends.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gcnzc.compress.reducer import Compression, Reducer, WorkerInfo, count_not_finite
from gcnzc.exchange import Algorithm
from gcnzc.kernels.codec.selection import Segments
from gcnzc.system.arguments import check_integer, check_number

Per: TypeAlias = Literal["layer", "all"] | int


def count_elements(num_elements: int, density: float) -> int:
    """Return how many of n elements are sent: at least one, unless n is 0."""
    return min(num_elements, max(1, int(density * num_elements)))


def check_fraction(name: str, value: object) -> None:
    """Check that an option is a number above 0 and at most 1."""
    check_number(name, value, lambda number: 0 < number <= 1, "above 0 and at most 1, as 0.01")


class SparseCompression(Compression):
    """The base of sparse compressions."""

    error_feedback: bool
    """whether the elements that are not sent are added to the next vector"""

    @property
    def has_feedback(self) -> bool:
        """Whether the compression uses error feedback."""
        return self.error_feedback

    @property
    def momentum(self) -> Literal["everywhere", "masked"]:
        """See `Compression`: "masked" with error feedback.

        Momentum at all elements may make training diverge at the learning rate of uncompressed
        gradients; see `gcnzc.optim.averaged`.
        """
        return "masked" if self.error_feedback else "everywhere"


class SegmentedCompression(SparseCompression):
    """The base of sparse compressions that send the largest elements of each segment."""

    density: float
    """fraction of the elements of a segment that are sent; at least one is"""
    per: Per
    """"layer" for a segment per layer, "all" for one segment, or the elements of a segment"""

    def __post_init__(self) -> None:
        check_fraction("density", self.density)
        if self.per not in ("layer", "all"):
            hint = "'layer', 'all', or the elements of a chunk, as 4096"
            check_integer("per", self.per, 1, hint=hint)

    def segments(self, num_elements: int, layers: Sequence[int] = ()) -> Segments:
        """Return the segments of a vector, and the number of elements sent of each.

        Args:
            num_elements: n.
            layers: see `WorkerInfo`.
        """
        if isinstance(self.per, int):
            return Segments.of_chunks(num_elements, self.per, self.density)
        is_split = self.per == "layer" and sum(layers) == num_elements
        return Segments.of_density(layers if is_split else [num_elements], self.density)


class SparseReducer(Reducer):
    """The base of reducers of sparse compressions; with one rank the mean is the vector itself.

    Args:
        num_elements: n, the length of the vector.
        worker: this rank, and the vector's device and dtype.
        has_feedback: whether to use error feedback.
        error_decay: the factor of the error when it is added to the next vector.
    """

    def __init__(
        self,
        num_elements: int,
        worker: WorkerInfo,
        has_feedback: bool,
        error_decay: float = 1.0,
    ) -> None:
        super().__init__(num_elements, worker)
        self.error_decay = error_decay
        if worker.world_size == 1:
            return
        self.support = torch.zeros(num_elements, dtype=torch.bool, device=worker.device)
        if has_feedback:
            self.worker_error = torch.zeros(num_elements, dtype=worker.dtype, device=worker.device)

    @abstractmethod
    def exchange(self, vector: Tensor, extras: Tensor, bad: Tensor) -> Algorithm[str]:
        """Exchange elements of y with the other ranks; see `mean`.

        Args:
            vector: (n,) y; replaced by the mean.
            extras: (k,), replaced by their sums, which are also stored in `extra_sums`.
            bad: () int64, the number of elements of y that are not finite.

        Returns:
            Why there is no mean; empty if there is.
        """

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        vector, extra_values = values[: self.num_elements], values[self.num_elements :]
        if self.worker.world_size == 1:
            return self.mean_of_one_rank(values)
        if self.worker_error is not None:
            vector.add_(self.worker_error, alpha=self.error_decay)
        self.clear_inactive(vector)
        skip_reason = yield from self.exchange(vector, extra_values, count_not_finite(vector))
        if not skip_reason:
            self.num_means += 1
        return skip_reason

    def write_mean(
        self,
        vector: Tensor,
        own: tuple[Tensor, Tensor],
        contributions: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        """Update the error of this rank, and replace y by the mean.

        Args:
            vector: (n,) y; overwritten.
            own: indices (K,) int64 and values (K,) that this rank sent.
            contributions: the same of each rank, this one included, in the order of ranks.
        """
        if self.worker_error is not None:
            indices, sent = own
            self.worker_error.copy_(vector)
            self.worker_error.index_add_(0, indices, sent.to(vector.dtype), alpha=-1)
            if self.active is not None:
                self.worker_error.masked_fill_(~self.active, 0)
        vector.zero_()
        assert self.support is not None, "there are several ranks"
        self.support.zero_()
        for indices, sent in contributions:
            vector.index_add_(0, indices, sent.to(vector.dtype) / self.worker.world_size)
            self.support.index_fill_(0, indices, True)
        self.clear_inactive(vector)
        if self.active is not None:
            self.support &= self.active
