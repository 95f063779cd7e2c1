"""Random-k and random-block: send elements that are selected by a hash of the seed and the step.

All ranks compute the selection themselves, so no indices are sent. If it is the same on all ranks,
the selected elements are all-reduced, and the bytes are those of an all-reduce of K elements for
any number of ranks. The random block is from Eghlidi and Jaggi, "Sparse communication for training
deep networks" (2020, https://arxiv.org/abs/2009.09271).

Each element is sent about once in 1 / density steps. With error feedback, it is then the sum of its
values since it was last sent. Heavy-ball momentum multiplies that sum by 1 / (1 - momentum), so
training at the learning rate of dense gradients may diverge. `gcnzc.optim.Averaged` therefore
restricts its steps to the selected elements by default (`momentum="masked"`).

Notation: n elements, W ranks, k extras, K elements that a rank sends.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress.reducer import WorkerInfo, count_not_finite, describe_non_finite
from gcnzc.compress.sparse import SparseCompression, SparseReducer, check_fraction, count_elements
from gcnzc.compress.two_stage import make_trailer, read_trailers
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, Sum
from gcnzc.kernels.codec.random_indices import draw_index, draw_indices
from gcnzc.kernels.finite import are_finite
from gcnzc.system.arguments import check_integer
from gcnzc.system.scalars import read_scalars

# the seed is the low half of a random generator's key, the rank the high half
SEED_BITS = 32


@dataclass(frozen=True)
class RandomSelection(SparseCompression):
    """The base of compressions whose elements are selected by a hash."""

    density: float = 0.05
    """fraction of the elements that are sent, above 0; at least one element is sent"""
    seed: int = 0
    """seed of the selection, in [0, 2**32)"""
    error_feedback: bool = True
    """whether the elements that are not sent are added to the next vector; otherwise those that are
    sent are multiplied by n / K, so that the expected value of the result is the mean"""

    is_reduced = True

    def __post_init__(self) -> None:
        check_fraction("density", self.density)
        check_integer("seed", self.seed, 0, (1 << SEED_BITS) - 1)

    @abstractmethod
    def select(self, num_elements: int, step: int, rank: int) -> Tensor:
        """Return the selected elements of a step.

        Args:
            num_elements: n.
            step: the number of the mean.
            rank: the rank that sends them.

        Returns:
            Their indices (K,) int64, on the CPU.
        """

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "RandomReducer":
        """See `Compression`."""
        return RandomReducer(num_elements, worker, self)

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """See `Compression`."""
        return 4 * (count_elements(num_elements, self.density) + 1 + extras)


@dataclass(frozen=True)
class RandomK(RandomSelection):
    """Sends elements that are drawn at random in each step, without their indices.

    Raises:
        ValueError: an option is not one of those below.
    """

    same: bool = True
    """whether all ranks select the same elements, whose sums are then all-reduced; otherwise the
    elements of all ranks are gathered"""

    @property
    def is_reduced(self) -> bool:  # type: ignore[override]
        """See `Compression`."""
        return self.same

    def select(self, num_elements: int, step: int, rank: int) -> Tensor:
        """See `RandomSelection`."""
        key = self.seed if self.same else rank << SEED_BITS | self.seed
        count = count_elements(num_elements, self.density)
        return draw_indices(num_elements, count, key, step)


@dataclass(frozen=True)
class RandomBlock(RandomSelection):
    """Sends consecutive elements from a random position on, the same ones on all ranks.

    The first element of the vector follows the last.

    Raises:
        ValueError: an option is not one of those below.
    """

    def select(self, num_elements: int, step: int, rank: int) -> Tensor:
        """See `RandomSelection`."""
        count = count_elements(num_elements, self.density)
        begin = draw_index(num_elements, self.seed, step)
        return torch.arange(begin, begin + count).remainder_(max(1, num_elements))


class RandomReducer(SparseReducer):
    """The reducer of `RandomK` and `RandomBlock`."""

    def __init__(self, num_elements: int, worker: WorkerInfo, options: RandomSelection) -> None:
        super().__init__(num_elements, worker, options.error_feedback)
        self.options = options
        self.count = count_elements(num_elements, options.density)
        self.factor = 1.0 if options.error_feedback else num_elements / max(1, self.count)

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`; includes the number of means, so that selections do not repeat."""
        return {**super().errors(), "means": self.num_means}

    def select(self, rank: int) -> Tensor:
        """Return the elements (K,) that a rank selects in this step, on the device."""
        indices = self.options.select(self.num_elements, int(self.num_means), rank)
        return indices.to(self.worker.device, non_blocking=True)

    def exchange(self, vector: Tensor, extras: Tensor, bad: Tensor) -> Algorithm[str]:
        """See `SparseReducer`."""
        indices = self.select(self.worker.rank)
        sent = vector[indices] * self.factor
        if self.options.is_reduced:
            return (yield from self._reduce(vector, extras, bad, indices, sent))
        sent = sent.float()
        bad = bad.where(bad > 0, count_not_finite(sent))
        rows = yield AllGather(torch.cat([make_trailer(bad, extras), sent]))
        begin = 1 + len(extras)
        skip_reason = read_trailers(self, rows[:, :begin], extras)
        if not skip_reason:
            pairs = ((self.select(rank), row[begin:]) for rank, row in enumerate(rows))
            self.write_mean(vector, (indices, sent), pairs)
        return skip_reason

    def _reduce(
        self, vector: Tensor, extras: Tensor, bad: Tensor, indices: Tensor, sent: Tensor
    ) -> Algorithm[str]:
        """All-reduce the same elements of all ranks; see `exchange`."""
        # elements that are not sent must be finite too, since they become errors
        bad = bad + count_not_finite(extras)
        count = self.count
        sums = yield Sum(torch.cat([sent, bad.to(vector.dtype)[None], extras]))
        is_good = are_finite(sums) & (sums[count] == 0)
        (has_mean,), extra_sums = read_scalars(is_good, sums[count + 1 :])
        if not has_mean:
            bad = bad.where(bad > 0, count_not_finite(sent))
            return describe_non_finite((yield AllGatherScalar(int(bad))))
        extras.copy_(sums[count + 1 :])
        self.extra_sums = extra_sums
        # the mean of all ranks is one contribution to the sum over them
        self.write_mean(vector, (indices, vector[indices]), [(indices, sums[:count])])
        return ""
