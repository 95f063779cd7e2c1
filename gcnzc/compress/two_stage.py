"""Compressed means in two stages: an all-to-all of encoded parts, and an all-gather of their means.

    stage 1  rank i sends the codes of its vector x_i plus its error e_i, part j to rank j:
             y_i = x_i + e_i          a_i = C(y_i)     e_i <- y_i - a_i
    stage 2  rank j sends the codes of the mean of part j plus its error s_j to all ranks:
             z_j = mean_i a_i + s_j   b_j = C(z_j)     s_j <- z_j - b_j
    result   the concatenation of b_1, b_2, ... b_W

This is the compressed all-reduce of 1-bit Adam (Tang et al., 2021,
https://arxiv.org/abs/2102.02888), also for codes of several bits. The compression errors stay in e
(worker error) and s (server error) until a later step, so no part of any x_i is lost: the sum over
time of the results, plus mean_i e_i and s, equals the sum of mean_i x_i. A mean takes two
collectives for any number of parameters; the scales of blocks and the extras are part of the same
messages.

A non-finite element makes its block's scale non-finite. Each rank also sends its count of
non-finite elements, in the trailer of its messages. Both stages always run; then all ranks read
these counts, and whether the mean of each part is finite, with one device synchronization. The
errors are updated last, and only if everything is finite.

Notation: n elements, W ranks, k extras.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gcnzc.compress.reducer import Compression, Reducer, WorkerInfo, describe_non_finite
from gcnzc.exchange import Algorithm, AllGather, AllToAll
from gcnzc.kernels.codec import signs
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.system.arguments import check_choice
from gcnzc.system.scalars import read_scalars


class Encoding(NamedTuple):
    """A vector and its rows of codes: the arguments of the kernels."""

    values: Tensor
    """(n,) float32 or float64"""
    error: Tensor | None
    """(n,) of the same dtype; None for zeros"""
    active: Tensor | None
    """(n,) bool; None for all elements"""
    layout: BlockLayout
    rows: Tensor
    """(parts, at least `row_bytes`) uint8"""


class Codec(Compression):
    """Encodes a vector as rows of codes; `gcnzc.kernels.codec.block_layout` defines the rows."""

    has_feedback: bool
    """whether to use error feedback: the compression error of each vector, and of each mean, is
    added to the next one"""
    stochastic: bool = False
    """whether rounding is random"""

    @property
    def mean_codec(self) -> "Codec":
        """The codec of the second stage, which sends the parts' means; by default this codec."""
        return self

    @abstractmethod
    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """Return the parts and blocks of a vector."""

    @abstractmethod
    def encode(self, own: Encoding, random_counter: tuple[int, int]) -> None:
        """Write the codes and scales of values + error to the rows of the parts.

        Args:
            own: the vector and its rows.
            random_counter: step and number of the encoder, which together with an element's index
                determine the random number of its rounding.
        """

    @abstractmethod
    def update_error(self, own: Encoding) -> None:
        """Set the error to values + error - decode(rows)."""

    @abstractmethod
    def decode_mean(self, rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """Decode W rows (W, bytes) of one part, and write their mean to `out` (part,).

        The rows are added in the order of ranks.
        """

    @abstractmethod
    def decode(self, rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """Decode the rows of all parts to `out` (n,); inactive elements become 0."""

    def row_bytes(self, layout: BlockLayout) -> int:
        """Return the length of a part's row in bytes, a multiple of 4."""
        return layout.row_bytes

    def are_finite(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """Return () bool: whether all scales, and thereby all decoded elements, are finite."""
        scales = rows[:, layout.code_bytes : layout.row_bytes].reshape(-1)
        return scales.view(torch.float32).isfinite().all()

    def reducer(self, num_elements: int, worker: WorkerInfo) -> Reducer:
        """See `Compression`."""
        return TwoStageReducer(num_elements, worker, self)

    def message_bytes(self, num_elements: int, worker: WorkerInfo, extras: int) -> int:
        """See `Compression`."""
        codecs, parts = (self, self.mean_codec), worker.world_size
        rows = [codec.row_bytes(codec.block_layout(num_elements, parts)) for codec in codecs]
        return sum(rows) + 4 * (1 + extras)


class TwoStageReducer(Reducer):
    """Computes means in two stages, see the module's docstring.

    With one rank the mean is the vector itself, which is not compressed.
    """

    def __init__(self, num_elements: int, worker: WorkerInfo, codec: Codec) -> None:
        super().__init__(num_elements, worker)
        self.codec, self.mean_codec = codec, codec.mean_codec
        self.layout = codec.block_layout(num_elements, worker.world_size)
        self.mean_layout = self.mean_codec.block_layout(num_elements, worker.world_size)
        # of this rank's part, and of its mean
        self.part_layout = self.layout.part_layout(worker.rank)
        self.part_mean_layout = self.mean_layout.part_layout(worker.rank)
        self.part = self.layout.bounds(worker.rank)
        self.code_bytes = codec.row_bytes(self.layout)
        self.mean_row_bytes = self.mean_codec.row_bytes(self.part_mean_layout)
        if codec.has_feedback and worker.world_size > 1:
            self.worker_error = torch.zeros(num_elements, dtype=worker.dtype, device=worker.device)
            begin, end = self.part
            self.server_error = self.worker_error.new_zeros(end - begin)

    @property
    def means(self) -> int:
        """The number of means computed so far, which determines the draws of random rounding."""
        return int(self.num_means)

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`; includes `means` if rounding is random, so that draws do not repeat."""
        counter = {"means": self.num_means} if self.codec.stochastic else {}
        return {**super().errors(), **counter}

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        vector, extra_values = values[: self.num_elements], values[self.num_elements :]
        if self.worker.world_size == 1:
            return self.mean_of_one_rank(values)
        codec, layout = self.codec, self.layout
        mean_codec, mean_layout = self.mean_codec, self.mean_layout
        world_size, rank, step = self.worker.world_size, self.worker.rank, self.means
        code_bytes, row_bytes = self.code_bytes, self.code_bytes + 4 * (1 + extras)
        rows = torch.zeros(world_size, row_bytes, dtype=torch.uint8, device=values.device)
        own = Encoding(vector, self.worker_error, self.active, layout, rows)
        codec.encode(own, (step, rank))
        trailer = make_trailer(self._count_bad(vector, rows), extra_values)
        rows[:, code_bytes:] = trailer.view(torch.uint8)
        received = torch.stack((yield AllToAll(list(rows), [row_bytes] * world_size)))
        trailers = received[:, code_bytes:].contiguous().view(torch.float32)
        begin, end = self.part
        active = None if self.active is None else self.active[begin:end]
        part_mean, part_layout = vector.new_empty(end - begin), self.part_mean_layout
        codec.decode_mean(received, self.part_layout, part_mean)
        row = rows.new_empty(1, self.mean_row_bytes)
        mean = Encoding(part_mean, self.server_error, active, part_layout, row)
        mean_codec.encode(mean, (step, world_size + rank))
        mean_rows = yield AllGather(row[0])
        # read only here, so that the host waits for the device once
        is_finite = mean_codec.are_finite(mean_rows, mean_layout)
        skip_reason = read_trailers(self, trailers, extra_values, is_finite)
        if skip_reason:
            return skip_reason
        if self.worker_error is not None:
            codec.update_error(own)
            mean_codec.update_error(mean)
        mean_codec.decode(mean_rows, mean_layout, self.active, vector)
        self.num_means += 1
        return ""

    def _count_bad(self, vector: Tensor, rows: Tensor) -> Tensor:
        """Return (1,) float32: the number of active elements of this rank that are not finite.

        There is no device synchronization.
        """
        is_finite = self.codec.are_finite(rows, self.layout)
        if rows.device.type == "cpu" and bool(is_finite):
            return torch.zeros(1)
        bad = ~vector.isfinite()
        if self.active is not None:
            bad &= self.active
        # a finite element may overflow in a shorter dtype or with its error, so count at least one
        return bad.sum().clamp(min=1).float().where(~is_finite, 0.0)[None]


def make_trailer(bad: Tensor, extras: Tensor) -> Tensor:
    """Return (1 + k,) float32: the numbers that a rank sends with the elements of a vector.

    Args:
        bad: () or (1,), the number of elements that are not finite.
        extras: (k,).
    """
    return torch.cat([bad.float().view(1), extras.float()])


def read_trailers(reducer: Reducer, trailers: Tensor, extras: Tensor, *flags: Tensor) -> str:
    """Read the trailers of all ranks, and write the sums of the extras if all are finite.

    Args:
        reducer: gets the sums on the host, as `extra_sums`.
        trailers: (W, 1 + k), see `make_trailer`.
        extras: (k,), overwritten.
        flags: () bool, read together with the trailers: whether there is a mean.

    Returns:
        Why there is no mean; empty if there is.
    """
    bad = trailers[:, 0] + (~trailers.isfinite()).sum(dim=1)
    sums = trailers[:, 1:].sum(dim=0)
    counts, extra_sums, *found = read_scalars(bad, sums, *flags)
    if any(counts) or not all(flag for (flag,) in found):
        return describe_non_finite(counts)
    extras.copy_(sums)
    reducer.extra_sums = extra_sums
    return ""


@dataclass(frozen=True)
class Sign(Codec):
    """Signs with one scale per block and error feedback, as in 1-bit Adam (Tang et al., 2021).

    A zero counts as positive. Each rank computes the mean of one part of the vector.
    `gcnzc.kernels.codec.block_layout` describes the rows: the encoded parts of a vector.

    Raises:
        ValueError: an option is not one of those below.
    """

    block: int | None = 4096
    """number of elements that share a scale, a multiple of 32; None for one scale per part"""
    scale: Literal["rms", "l1"] = "rms"
    """a block's scale: "rms", the root mean square of its elements, or "l1", their mean absolute
    value"""
    has_feedback: bool = True
    """whether to use error feedback: the compression error of a vector is added to the next vector,
    and that of a mean to the next mean"""

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("rms", "l1"))
        # the layout checks the block size
        self.block_layout(0, 1)

    @property
    def scale_elements(self) -> int | None:
        """See `Compression`."""
        return self.block

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, 1, self.block)

    def encode(self, own: Encoding, random_counter: tuple[int, int]) -> None:
        """See `Codec`; signs are deterministic, so `random_counter` is not used."""
        signs.encode_signs(*own, self.scale)

    def update_error(self, own: Encoding) -> None:
        """See `Codec`."""
        signs.update_error_signs(*own)  # type: ignore[arg-type]

    # the arguments of the kernels are those of `Codec`
    decode_mean = staticmethod(signs.mean_of_signs)
    decode = staticmethod(signs.decode_signs)
