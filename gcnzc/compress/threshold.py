"""Send the elements whose magnitude is at least a threshold, which is renewed rarely.

Gupta et al., "Training recommender systems at scale: communication-efficient model and data
parallelism" (2020, https://arxiv.org/abs/2010.08899), call this dynamic communication thresholding
(DCT). The threshold of a segment is its k-th largest magnitude at the last renewal, with
k = max(1, floor(density * length)). The renewals of the segments of a vector are staggered. Between
them a rank sends a varying number of elements. A segment's threshold is also renewed if the rank
would send more than 4 k or fewer than k / 4 of its elements. Each rank has thresholds for its own
vector, which differ from those of other ranks.

A mean takes two collectives: an all-gather of the numbers of elements and the extras, and an
all-to-all of the elements, whose lengths are then known. If no rank sends elements, the second one
is omitted. The messages are

    int32    1       the number of elements K
    float32  1 + k   the number of elements that are not finite, and the extras

    float32  K       the values
    bytes            the indices, see `gcnzc.kernels.codec.index_codes`
    bytes            zeros, up to a multiple of 4 bytes

Notation: n elements, S segments, W ranks, k extras, K elements that a rank sends.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gcnzc.compress.reducer import WorkerInfo, count_not_finite
from gcnzc.compress.sparse import Per, SegmentedCompression, SparseReducer
from gcnzc.compress.two_stage import make_trailer, read_trailers
from gcnzc.exchange import Algorithm, AllGather, AllToAll
from gcnzc.kernels.codec.index_codes import code_bytes, pack_indices, unpack_indices
from gcnzc.kernels.codec.selection import Segments, count_above, select_above, select_largest
from gcnzc.system.arguments import check_integer

# a threshold is renewed if it selects more than 4 k or fewer than k / 4 elements of its segment
MOST = 4


@dataclass(frozen=True)
class Threshold(SegmentedCompression):
    """Sends the elements whose magnitude is at least the threshold of their segment.

    A vector of zeros sends no elements. `gcnzc.compress.threshold` describes the exchange.

    Raises:
        ValueError: an option is not one of those below.
    """

    density: float = 0.01
    """fraction of a segment's elements that the threshold selects when it is renewed, above 0; it
    selects at least one"""
    refresh: int = 1000
    """number of means from one renewal of a threshold to the next"""
    per: Per = "layer"
    """the segments: "layer", each parameter that the optimizer has; "all", the whole vector; or a
    chunk of that many elements each"""
    error_feedback: bool = True
    """whether the elements that are not sent are added to the next vector"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("refresh", self.refresh, 1)

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "ThresholdReducer":
        """See `Compression`."""
        return ThresholdReducer(num_elements, worker, self)

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """See `Compression`; of a mean in which every segment sends k elements."""
        count = self.segments(num_elements, worker.layers).total
        return 4 * (2 + extras) + payload_bytes(num_elements, count)


def payload_bytes(num_elements: int, count: int) -> int:
    """Return the bytes of K elements and their indices, a multiple of 4."""
    return 4 * count + -(-code_bytes(num_elements, count) // 4) * 4


class ThresholdReducer(SparseReducer):
    """The reducer of `Threshold`."""

    def __init__(self, num_elements: int, worker: WorkerInfo, options: Threshold) -> None:
        super().__init__(num_elements, worker, options.error_feedback)
        self.refresh = options.refresh
        self.segments = options.segments(num_elements, worker.layers)
        self.thresholds = torch.zeros(len(self.segments), device=worker.device)
        """(S,) float32: 0 before the first mean, and if a segment had fewer than k elements that
        are not 0"""
        self.renewals = 0
        """the number of thresholds that were renewed, of all segments"""

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`; includes the thresholds, and the number of means for their renewal."""
        return {**super().errors(), "thresholds": self.thresholds, "means": self.num_means}

    def exchange(self, vector: Tensor, extras: Tensor, bad: Tensor) -> Algorithm[str]:
        """See `SparseReducer`."""
        before = self.thresholds.clone()
        indices = self._select(vector)
        sent = vector[indices].float()
        bad = bad.where(bad > 0, count_not_finite(sent))
        length = torch.tensor([len(indices)], dtype=torch.int32).to(vector.device)
        header = torch.cat([length.view(torch.float32), make_trailer(bad, extras)])
        headers = yield AllGather(header)
        skip_reason = read_trailers(self, headers[:, 1:], extras)
        if skip_reason:
            self.thresholds.copy_(before)
            return skip_reason
        counts = headers[:, 0].contiguous().view(torch.int32).tolist()
        rows: list[Tensor] = [vector.new_empty(0, dtype=torch.uint8)] * len(counts)
        if any(counts):
            lengths = [payload_bytes(self.num_elements, count) for count in counts]
            payload = vector.new_zeros(lengths[self.worker.rank], dtype=torch.uint8)
            begin, end = 4 * len(sent), 4 * len(sent) + code_bytes(self.num_elements, len(sent))
            payload[:begin] = sent.view(torch.uint8)
            pack_indices(indices, self.num_elements, payload[begin:end])
            rows = yield AllToAll([payload] * len(counts), lengths)
        pairs = (self._decode(row, count) for row, count in zip(rows, counts, strict=True))
        self.write_mean(vector, (indices, sent), pairs)
        return ""

    def _select(self, vector: Tensor) -> Tensor:
        """Return the indices (K,) to send, after renewing the thresholds that are due."""
        segments, device = self.segments, vector.device
        step, numbers = int(self.num_means), np.arange(len(segments))
        # the first renewals are at once, the later ones at different steps
        is_due = (step + numbers * self.refresh // max(1, len(segments))) % self.refresh == 0
        counts = count_above(vector, segments, self.thresholds)
        is_due |= (counts > MOST * segments.counts) | (counts * MOST < segments.counts)
        is_due |= self.thresholds.cpu().numpy() == 0
        if not is_due.any():
            return select_above(vector, segments, self.thresholds, counts)
        due = torch.from_numpy(is_due).to(device)
        self.renewals += int(is_due.sum())
        # with a limit of 0, elements that are not 0
        num_nonzero = count_above(vector, segments, self.thresholds.masked_fill(due, 0))
        wanted = np.where(is_due, np.minimum(segments.counts, num_nonzero), 0)
        largest, limits = select_largest(vector, Segments(segments.bounds, wanted))
        others = self.thresholds.masked_fill(due, torch.inf)
        above = select_above(vector, segments, others, count_above(vector, segments, others))
        is_known = torch.from_numpy(num_nonzero >= segments.counts).to(device)
        self.thresholds = torch.where(due, limits * is_known, self.thresholds)
        return torch.cat([above, largest]).sort().values

    def _decode(self, row: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the indices and values of a payload of K elements."""
        begin, end = 4 * count, 4 * count + code_bytes(self.num_elements, count)
        indices = unpack_indices(row[begin:end], self.num_elements, count)
        return indices, row[:begin].view(torch.float32)
