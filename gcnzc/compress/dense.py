"""Means with one all-reduce, in the vector's dtype or in a shorter one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress.reducer import (
    Compression,
    Reducer,
    WorkerInfo,
    count_not_finite,
    describe_non_finite,
)
from gcnzc.exchange import Algorithm, AllGatherScalar, Sum
from gcnzc.kernels.finite import are_finite
from gcnzc.system.arguments import describe
from gcnzc.system.scalars import read_scalars

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Dense(Compression):
    """The mean of all elements with one all-reduce, without error feedback.

    Raises:
        ValueError: `dtype` is not float16, bfloat16, float32, float64 or None.
    """

    dtype: torch.dtype | None = None
    """dtype of the messages: float16 or bfloat16, to which sums are rounded as well; float32 or
    float64; None for the vector's dtype"""

    is_reduced = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ValueError(
                f"cannot send {describe(self.dtype)}\n\nhint: use one of "
                f"{', '.join(map(str, DTYPES))}, or None for the vector's dtype"
            )

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "DenseReducer":
        """See `Compression`."""
        return DenseReducer(num_elements, worker, self.dtype)

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """See `Compression`."""
        return (num_elements + extras) * (4 if self.dtype is None else self.dtype.itemsize)


class DenseReducer(Reducer):
    """The reducer of `Dense`, which has no state."""

    def __init__(self, num_elements: int, worker: WorkerInfo, dtype: torch.dtype | None) -> None:
        super().__init__(num_elements, worker)
        self.dtype = dtype or worker.dtype

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`; sums of extras are rounded to the dtype, and must not overflow it.

        Integers up to 2,048 are exact in float16, and up to 256 in bfloat16.
        """
        if self.worker.world_size == 1:
            return self.mean_of_one_rank(values)
        vector = values[: self.num_elements]
        self.clear_inactive(vector)
        # count now, since the sum may overwrite the values
        bad = count_not_finite(values)
        # a sum, not a mean: the means of integer extras, such as thirds, would not add up exactly
        sums = yield Sum(values.to(self.dtype))
        (is_finite,), extra_sums = read_scalars(are_finite(sums), sums[self.num_elements :])
        if not is_finite:
            return describe_non_finite((yield AllGatherScalar(int(bad))))
        self.extra_sums = extra_sums
        values.copy_(sums)
        vector /= self.worker.world_size
        return ""
