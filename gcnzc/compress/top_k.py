"""Top-k: send the elements of largest magnitude.

Each rank selects its own elements, so their indices are sent too, in about 2 + log2(1 / density)
bits each (`gcnzc.kernels.codec.index_codes`). One all-gather has the indices, the values and the
extras of all ranks. A rank therefore sends (W - 1) messages, and for large W more bytes than a
dense all-reduce: with float32 values, from a density of about 1.6 / W on.

A message has, in this order

    float32  1 + k   the number of elements that are not finite, and the extras
    bytes            the values, see `gcnzc.compress.value_formats`
    bytes            the indices
    bytes            zeros, up to a multiple of 4 bytes

Notation: n elements, W ranks, k extras, K elements that a rank sends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress.reducer import WorkerInfo, count_not_finite
from gcnzc.compress.sparse import Per, SegmentedCompression, SparseReducer, check_fraction
from gcnzc.compress.two_stage import make_trailer, read_trailers
from gcnzc.compress.value_formats import VALUE_FORMATS, decode_values, encode_values, value_bytes
from gcnzc.exchange import Algorithm, AllGather
from gcnzc.kernels.codec.index_codes import code_bytes, pack_indices, unpack_indices
from gcnzc.kernels.codec.selection import select_largest
from gcnzc.system.arguments import check_choice

CHUNK = 4096
# of the published configuration of SparseLoCo: 64 of 4096 elements
SPARSE_LOCO_DENSITY, SPARSE_LOCO_DECAY = 1 / 64, 0.95


@dataclass(frozen=True)
class TopK(SegmentedCompression):
    """Each rank sends the elements of largest magnitude of each segment, with error feedback.

    This is Algorithm 1 of Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (2018,
    https://arxiv.org/abs/1809.07599), for the vectors of any optimizer.

    Raises:
        ValueError: an option is not one of those below.
    """

    density: float = 0.01
    """fraction of the elements that are sent, above 0; at least one of each segment is sent"""
    per: Per = CHUNK
    """the segments: a chunk of that many elements each; "layer", each parameter that the optimizer
    has; or "all", the whole vector"""
    value_format: str = "float32"
    """number format of the values: "float32", "float16", "bfloat16", or "int2" for a sign and one
    of two levels per segment"""
    error_feedback: bool = True
    """whether the compression error of each vector is added to the next one"""
    error_decay: float = 1.0
    """factor of the error when it is added, above 0 and at most 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("value_format", self.value_format, VALUE_FORMATS)
        check_fraction("error_decay", self.error_decay)

    @classmethod
    def sparse_loco(cls, density: float = SPARSE_LOCO_DENSITY) -> "TopK":
        """Return the compression of SparseLoCo, for the outer gradients of `DiLoCo`.

        It selects from chunks of 4096 elements, sends values of 2 bits, and multiplies the error by
        0.95 in each exchange, which replaces the outer momentum: use it with `outer_lr=1` and
        `outer_momentum=0`.

        Sarfi, Thérien, Lidin and Belilovsky, "Communication efficient LLM pre-training with
        SparseLoCo" (2025, https://arxiv.org/abs/2508.15706). The update rule is that of the paper.
        The density, 64 of 4096 elements, and the decay are those of Covenant-72B
        (https://github.com/one-covenant/templar); the 2-bit levels and the index code are those of
        gcnzc.

        Args:
            density: fraction of the elements that are sent.
        """
        return cls(density, CHUNK, "int2", error_decay=SPARSE_LOCO_DECAY)

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "TopKReducer":
        """See `Compression`."""
        return TopKReducer(num_elements, worker, self)

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """See `Compression`; a multiple of 4."""
        segments = self.segments(num_elements, worker.layers)
        values = value_bytes(self.value_format, segments.total, len(segments))
        indices = code_bytes(num_elements, segments.total)
        return 4 * (1 + extras) + values + -(-indices // 4) * 4


class TopKReducer(SparseReducer):
    """The reducer of `TopK`."""

    def __init__(self, num_elements: int, worker: WorkerInfo, options: TopK) -> None:
        super().__init__(num_elements, worker, options.error_feedback, options.error_decay)
        self.options, self.value_format = options, options.value_format
        self.segments = options.segments(num_elements, worker.layers)
        self.counts = torch.from_numpy(self.segments.counts).to(worker.device)
        self.value_bytes = value_bytes(self.value_format, self.segments.total, len(self.segments))
        self.code_bytes = code_bytes(num_elements, self.segments.total)

    def exchange(self, vector: Tensor, extras: Tensor, bad: Tensor) -> Algorithm[str]:
        """See `SparseReducer`."""
        indices, _ = select_largest(vector, self.segments)
        length = self.options.message_bytes(self.num_elements, self.worker, len(extras))
        message = torch.zeros(length, dtype=torch.uint8, device=vector.device)
        begin = 4 * (1 + len(extras))
        end = begin + self.value_bytes
        encode_values(vector[indices], self.value_format, self.counts, message[begin:end])
        pack_indices(indices, self.num_elements, message[end : end + self.code_bytes])
        own = indices, self._decode_values(message[begin:end])
        # a finite element may overflow in the format of the values
        bad = bad.where(bad > 0, count_not_finite(own[1]))
        message[:begin] = make_trailer(bad, extras).view(torch.uint8)
        rows = yield AllGather(message)
        trailers = rows[:, :begin].contiguous().view(torch.float32)
        skip_reason = read_trailers(self, trailers, extras)
        if not skip_reason:
            self.write_mean(vector, own, (self._decode(row[begin:]) for row in rows))
        return skip_reason

    def _decode(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices and values of a message without its trailer."""
        code = row[self.value_bytes : self.value_bytes + self.code_bytes]
        indices = unpack_indices(code, self.num_elements, self.segments.total)
        return indices, self._decode_values(row[: self.value_bytes])

    def _decode_values(self, code: Tensor) -> Tensor:
        return decode_values(code, self.value_format, self.counts, self.segments.total)
