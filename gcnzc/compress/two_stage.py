"""Compressed means in two stages: encode, reduce one part per rank, encode again, gather.

    x_i   a worker's vector          y_i = x_i + e_i      a_i = C(y_i)     e_i <- y_i - a_i
    part  of worker j, of all a_i    z_j = mean_i a_i + s_j  b_j = C(z_j)  s_j <- z_j - b_j
    mean  b_1, b_2, ... b_W

as in Tang et al., "1-bit Adam" (2021, https://arxiv.org/abs/2102.02888), algorithm 1, and for codes
of several bits. What C leaves out stays in e and s until a later step, so that no share of any x_i
is lost: the sum over time of the means, and of what lies in mean_i e_i and s, is that of mean_i
x_i. It takes two collectives, an all-to-all and an all-gather, whatever the vector is made of; the
scales of blocks, and notes, travel in them.

What is not finite shows in a scale, and with its codes every worker tells every other how many of
its elements are not. Both stages run in any case; then all ranks read these numbers, and whether
every part's mean is finite, at once. Errors change last, and only if all is finite.

Letters: n elements, W workers, k notes.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from gcnzc.compress.reducer import (
    Compression,
    Reducer,
    WorkerInfo,
    count_not_finite,
    describe_non_finite,
)
from gcnzc.exchange import Algorithm, AllGather, AllToAll
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.finite import are_finite
from gcnzc.system.scalars import read_scalars


class Codec(Compression):
    """Encodes a vector as rows of codes; `gcnzc.kernels.codec.block_layout` defines the rows."""

    has_feedback: bool
    """whether what a code leaves out is kept, and added to the next"""
    stochastic: bool = False
    """whether rounding is random"""

    @property
    def of_means(self) -> "Codec":
        """What the parts' means are sent in: these codes, unless a way says otherwise."""
        return self

    @abstractmethod
    def cut(self, num_elements: int, parts: int) -> BlockLayout:
        """How a vector is cut."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        error: Tensor | None,
        active: Tensor | None,
        cut: BlockLayout,
        rows: Tensor,
        draw: tuple[int, int],
    ) -> None:
        """Write the codes and scales of values + error into the parts' rows.

        Args:
            values: (n,) float32.
            error: (n,), or None for zeros.
            active: (n,) bool, or None for all.
            cut: of the vector.
            rows: (parts, at least `cut.row_bytes`) uint8.
            draw: what random rounding depends on besides the element: a step, and who rounds.
        """

    @abstractmethod
    def update_error(
        self, values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
    ) -> None:
        """Set the error to what the rows leave out of values + error."""

    @abstractmethod
    def mean_of(self, rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
        """The mean of what W rows (W, bytes) of one part stand for, in the order of ranks."""

    @abstractmethod
    def decode(self, rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """(n,): what the rows of all parts stand for; 0 where not active."""

    def row_bytes(self, cut: BlockLayout) -> int:
        """Of a part's row, a multiple of 4."""
        return cut.row_bytes

    def are_finite(self, rows: Tensor, cut: BlockLayout) -> Tensor:
        """() bool: whether all that rows stand for is, which their scales show."""
        scales = rows[:, cut.code_bytes : cut.row_bytes].reshape(-1)
        return are_finite(scales.view(torch.float32))

    def reducer(self, num_elements: int, place: WorkerInfo) -> Reducer:
        """See `Compression`."""
        return TwoStageReducer(num_elements, place, self)

    def bytes_sent(self, num_elements: int, world_size: int, notes: int = 0) -> int:
        """See `Compression`."""
        rows = sum(
            codes.row_bytes(codes.cut(num_elements, world_size)) for codes in (self, self.of_means)
        )
        return (world_size - 1) * (rows + 4 * (1 + notes))


class TwoStageReducer(Reducer):
    """See above. With one worker the mean is its own vector, and nothing is left out."""

    def __init__(self, num_elements: int, place: WorkerInfo, codes: Codec) -> None:
        super().__init__(num_elements, place)
        self.codes, self.last_codes = codes, codes.of_means
        self.cut = codes.cut(num_elements, place.world_size)
        self.last_cut = self.last_codes.cut(num_elements, place.world_size)
        self.taken = torch.zeros(1, dtype=torch.int64)
        if codes.has_feedback and place.world_size > 1:
            self.worker_error = torch.zeros(num_elements, dtype=place.dtype, device=place.device)
            begin, end = self.part
            self.server_error = self.worker_error.new_zeros(end - begin)

    @property
    def part(self) -> tuple[int, int]:
        """See `Reducer`."""
        return self.cut.bounds(self.place.rank)

    @property
    def means(self) -> int:
        """How many were taken so far; random rounding depends on it."""
        return int(self.taken)

    @means.setter
    def means(self, means: int) -> None:
        self.taken.fill_(means)

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`; with `means` if rounding is random, which goes on with other draws."""
        return {**super().errors(), **({"means": self.taken} if self.codes.stochastic else {})}

    def mean(self, values: Tensor, notes: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        vector, noted = values[: self.num_elements], values[self.num_elements :]
        if self.place.world_size == 1:
            self.clear_inactive(vector)
            found, self.note_sums = read_scalars(count_not_finite(values), noted)
            return describe_non_finite(found) if any(found) else ""
        codes, cut, last_codes, last_cut = self.codes, self.cut, self.last_codes, self.last_cut
        world_size, rank, step = self.place.world_size, self.place.rank, self.means
        code_bytes = codes.row_bytes(cut)
        row_bytes = code_bytes + 4 * (1 + notes)
        rows = torch.zeros(world_size, row_bytes, dtype=torch.uint8, device=values.device)
        codes.encode(vector, self.worker_error, self.active, cut, rows, (step, rank))
        told = torch.cat([self._bad(vector, rows), noted.float()])
        rows[:, code_bytes:] = told.view(torch.uint8)
        received = torch.stack((yield AllToAll(list(rows), [row_bytes] * world_size)))
        told = received[:, code_bytes:].contiguous().view(torch.float32)
        bad = told[:, 0] + (~told.isfinite()).sum(dim=1)
        sums = told[:, 1:].sum(dim=0)
        begin, end = self.part
        active = None if self.active is None else self.active[begin:end]
        share, own = vector.new_empty(end - begin), last_cut.part_layout(rank)
        codes.mean_of(received, cut.part_layout(rank), share)
        row = rows.new_empty(1, last_codes.row_bytes(own))
        who = world_size + rank
        last_codes.encode(share, self.server_error, active, own, row, (step, who))
        everyones = yield AllGather(row[0])
        # read only now, so that the host waits for a device once
        is_finite = last_codes.are_finite(everyones, last_cut)
        counts, (are_means_finite,), note_sums = read_scalars(bad, is_finite, sums)
        if any(counts) or not are_means_finite:
            return describe_non_finite(counts)
        noted.copy_(sums)
        self.note_sums = note_sums
        if self.worker_error is not None and self.server_error is not None:
            codes.update_error(vector, self.worker_error, self.active, cut, rows)
            last_codes.update_error(share, self.server_error, active, own, row)
        last_codes.decode(everyones, last_cut, self.active, vector)
        self.means += 1
        return ""

    def _bad(self, vector: Tensor, rows: Tensor) -> Tensor:
        """(1,): how many elements of this worker are not finite. Nothing is read from a GPU."""
        is_finite = self.codes.are_finite(rows, self.cut)
        if rows.device.type == "cpu" and bool(is_finite):
            return torch.zeros(1)
        bad = ~vector.isfinite()
        if self.active is not None:
            bad &= self.active
        # with its error, or in a shorter dtype, an element may not be finite though it is by itself
        return bad.sum().clamp(min=1).float().where(~is_finite, 0.0)[None]
