"""Uncompressed means, in float32 or a shorter dtype."""

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
from gcnzc.system.scalars import read_scalars


@dataclass(frozen=True)
class Dense(Compression):
    """The mean of all elements, in one all-reduce."""

    dtype: torch.dtype | None = None
    """what is sent: float16 or bfloat16, whose sums are rounded to it as well; the vector's own if
    None"""

    def reducer(self, num_elements: int, place: WorkerInfo) -> "DenseReducer":
        """See `Compression`."""
        return DenseReducer(num_elements, place, self.dtype)

    def bytes_sent(self, num_elements: int, world_size: int, notes: int = 0) -> int:
        """See `Compression`. Of a ring; other algorithms of sums send more, in fewer rounds."""
        size = 4 if self.dtype is None else self.dtype.itemsize
        return 2 * (world_size - 1) * (num_elements + notes) * size // world_size


class DenseReducer(Reducer):
    """See `Dense`; it keeps nothing."""

    def __init__(self, num_elements: int, place: WorkerInfo, dtype: torch.dtype | None) -> None:
        super().__init__(num_elements, place)
        self.dtype = dtype or place.dtype

    def mean(self, values: Tensor, notes: int = 0) -> Algorithm[str]:
        """See `Reducer`; sums of notes are rounded to the dtype, and must not overflow it.

        Whole numbers up to 2,048 are exact in float16, and up to 256 in bfloat16.
        """
        vector = values[: self.num_elements]
        self.clear_inactive(vector)
        # counted now, since the sum may take their place
        bad = count_not_finite(values)
        if self.place.world_size == 1:
            found, self.note_sums = read_scalars(bad, values[self.num_elements :])
            return describe_non_finite(found) if any(found) else ""
        # not the mean: thirds of notes, added up, are not whole
        sent = yield Sum(values.to(self.dtype))
        (is_finite,), sums = read_scalars(are_finite(sent), sent[self.num_elements :])
        if not is_finite:
            return describe_non_finite((yield AllGatherScalar(int(bad))))
        self.note_sums = sums
        values.copy_(sent)
        vector /= self.place.world_size
        return ""
