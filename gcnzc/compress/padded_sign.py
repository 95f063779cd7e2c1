"""Signs as DeepSpeed 0.19.6 sends them, to the bit: what its trajectories are compared with.

Each tensor is a buffer of its own, padded to a multiple of W lcm(W, 8), and the padding counts in
the scales and has errors. One magnitude for a worker's buffer, one for each server's chunk. It
takes two collectives for each tensor; `Sign` takes two in all, and leaves the padding out.

Letters: W workers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress.reducer import Compression, Place, Reducer, culprits, num_not_finite
from gcnzc.exchange import Algorithm, AllGather, AllToAll, Vote


@dataclass(frozen=True)
class PaddedSign(Compression):
    """For comparisons with DeepSpeed alone."""

    lengths: tuple[int, ...]
    """of the buffers, which follow one another in the vector"""

    def reducer(self, num_elements: int, place: Place) -> "PaddedSignReducer":
        """See `Compression`."""
        return PaddedSignReducer(num_elements, place, self.lengths)

    def bytes_sent(self, num_elements: int, world_size: int, notes: int = 0) -> int:
        """See `Compression`; bits are sent as bytes, since nobody trains with this."""
        chunks = [_padded(length, world_size) // world_size for length in self.lengths]
        rounds = sum((world_size - 1) * (2 * (chunk + 4)) for chunk in chunks)
        return rounds + (8 + 4 * notes) * (world_size - 1)


class PaddedSignReducer(Reducer):
    """See `PaddedSign`."""

    def __init__(self, num_elements: int, place: Place, lengths: tuple[int, ...]) -> None:
        super().__init__(num_elements, place)
        assert sum(lengths) == num_elements, "buffers cover the vector"
        self.lengths = lengths
        world_size = place.world_size
        padded = [_padded(length, world_size) for length in lengths]
        self.worker_errors = [torch.zeros(size, dtype=place.dtype) for size in padded]
        self.server_errors = [
            error.new_zeros(len(error) // world_size) for error in self.worker_errors
        ]

    def mean(self, values: Tensor, notes: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        bad = yield Vote(num_not_finite(values))
        if any(bad):
            return culprits(bad)
        noted = values[self.num_elements :]
        if notes:
            noted.copy_((yield AllGather(noted.clone())).sum(dim=0))
        begin = 0
        for place, length in enumerate(self.lengths):
            here = values[begin : begin + length]
            here.copy_((yield from self._buffer(place, here))[:length])
            begin += length
        return ""

    def _buffer(self, place: int, values: Tensor) -> Algorithm[Tensor]:
        world_size = self.place.world_size
        worker, server = self.worker_errors[place], self.server_errors[place]
        worker[: len(values)] += values
        scale = worker.norm() / math.sqrt(len(worker))
        signs = _signs(worker)
        worker -= scale * signs
        parts = yield AllToAll(
            list(signs.to(torch.int8).chunk(world_size)), [len(server)] * world_size
        )
        scales = (yield AllGather(scale.view(1))).view(-1)
        shares = torch.stack(parts).to(values.dtype) * (scales * (1 / world_size))[:, None]
        # the errors come after the mean: sums are rounded in this order
        server += shares.sum(dim=0)
        magnitude = server.norm() / math.sqrt(len(server))
        signs = _signs(server)
        server -= magnitude * signs
        rows = yield AllGather(signs.to(torch.int8))
        magnitudes = (yield AllGather(magnitude.view(1))).view(-1, 1)
        return (rows.to(values.dtype) * magnitudes).view(-1)

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`."""
        return {}

    def load_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Not kept: a comparison is not resumed."""


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def _padded(length: int, world_size: int) -> int:
    multiple = world_size * math.lcm(world_size, 8)
    return -(-length // multiple) * multiple
