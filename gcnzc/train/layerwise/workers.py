"""Workers that divide the outputs of a layer among them, and exchange them between machines."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllToAll, Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.train.layerwise.ranges import Span
from gcnzc.train.shared_data import first_workers, shared_empty

# maximum bytes that a worker sends in one all-to-all: it must not time out on a slow network
PIECE_BYTES = 1 << 22


class Rows(Protocol):
    """Rows that the workers compute together; those of one machine share the memory or file."""

    dtype: torch.dtype
    num_columns: int

    def read(self, begin: int, end: int) -> Tensor:
        """Return the rows of a span, (end - begin, num_columns) on the host."""

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """Set the rows of a span, from a tensor of any device."""


class MemoryRows:
    """Rows in host memory.

    Args:
        tensor: (n, ...), contiguous, in memory that the workers of a machine share.
        indices_of: `indices_of(begin, end)` returns the indices of a span in `tensor`. Default: the
            slice.
    """

    def __init__(
        self, tensor: Tensor, indices_of: Callable[[int, int], slice | Tensor] = slice
    ) -> None:
        self.tensor = tensor.view(len(tensor), -1) if tensor.numel() else tensor
        self.dtype = tensor.dtype
        self.num_columns = self.tensor.shape[1] if tensor.numel() else 0
        self.indices_of = indices_of

    def read(self, begin: int, end: int) -> Tensor:
        """See `Rows`."""
        return self.tensor[self.indices_of(begin, end)]

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """See `Rows`."""
        self.tensor[self.indices_of(begin, end)] = values.cpu()


class Workers:
    """The workers among which the computation of a layer is divided."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.count = group, group.rank, group.world_size
        # for each rank, the lowest rank on the same machine
        self.firsts = first_workers(group)

    @property
    def has_several_machines(self) -> bool:
        """Whether the workers are on several machines."""
        return len(set(self.firsts)) > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker of its machine."""
        return self.firsts[self.rank] == self.rank

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Allocate a tensor in host memory that the workers of this machine share."""
        return shared_empty(shape, dtype, self.group)

    def wait(self) -> None:
        """Wait until all workers have called this."""
        run(all_gather_scalar(0), self.group)

    def minimum(self, value: int) -> int:
        """Return the least of the values of all workers."""
        return min(run(all_gather_scalar(value), self.group))

    def distribute(self, rows: Rows, shares: Sequence[Sequence[Span]]) -> None:
        """Copy the rows that each machine has computed to all other machines.

        Args:
            rows: the rows that all machines have in the end.
            shares: the spans that each worker has computed.
        """
        if not self.has_several_machines or rows.num_columns == 0:
            return
        spans = [(share[0][0], share[-1][1]) if share else (0, 0) for share in shares]
        step = max(1, PIECE_BYTES // (rows.num_columns * rows.dtype.itemsize))
        for done in range(0, max(end - begin for begin, end in spans), step):
            pieces = [(min(b + done, end), min(b + done + step, end)) for b, end in spans]
            self._distribute_pieces(rows, pieces)
        # the first worker of each machine has written the rows
        self.wait()

    def _distribute_pieces(self, rows: Rows, pieces: Sequence[Span]) -> None:
        own_first = self.firsts[self.rank]
        own = rows.read(*pieces[self.rank]).flatten()
        none = own.new_empty(0)
        # each worker sends its rows to the first workers of the other machines
        parts = [
            own if rank == first != own_first else none for rank, first in enumerate(self.firsts)
        ]
        counts = [
            (end - begin) * rows.num_columns if self.rank == own_first != first else 0
            for (begin, end), first in zip(pieces, self.firsts, strict=True)
        ]
        for piece, part in zip(pieces, run(_all_to_all(parts, counts), self.group), strict=True):
            if len(part):
                rows.write(*piece, part.view(-1, rows.num_columns))


def _all_to_all(parts: Sequence[Tensor], counts: Sequence[int]) -> Algorithm[list[Tensor]]:
    return (yield AllToAll(parts, counts))
