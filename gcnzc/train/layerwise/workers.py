"""Workers that divide the outputs of a layer among them, and the rows that they compute."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllToAll, Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.train.layerwise.ranges import Span
from gcnzc.train.shared_data import first_workers, shared_empty

# maximum bytes that a worker sends in one all-to-all: it must not time out on a slow network
PIECE_BYTES = 1 << 22


class Rows(Protocol):
    """Rows that the workers compute together; those of one machine share the memory or file."""

    dtype: torch.dtype
    num_columns: int

    @property
    def is_finished(self) -> bool:
        """Whether all rows are stored from an earlier computation."""

    def has(self, begin: int, end: int) -> bool:
        """Whether the rows of a span are stored from an earlier computation."""

    def read(self, begin: int, end: int) -> Tensor:
        """Return the rows of a span, (end - begin, num_columns) on the host."""

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """Set the rows of a span, from a tensor of any device."""

    def sync(self) -> None:
        """Store what was written."""

    def table(self) -> FeatureTable:
        """Return the rows as a table, after all are computed."""


class MemoryRows:
    """Rows in host memory.

    Args:
        tensor: (n, columns), contiguous, in memory that the workers of a machine share.
        indices: (m,) indices in `tensor` of the rows that are computed. Default: all, in order.
    """

    is_finished = False

    def __init__(self, tensor: Tensor, indices: Tensor | None = None) -> None:
        self.tensor, self.indices = tensor, indices
        self.dtype, self.num_columns = tensor.dtype, tensor.shape[1]

    def _at(self, begin: int, end: int) -> slice | Tensor:
        return slice(begin, end) if self.indices is None else self.indices[begin:end]

    def has(self, begin: int, end: int) -> bool:
        """See `Rows`."""
        return False

    def read(self, begin: int, end: int) -> Tensor:
        """See `Rows`."""
        return self.tensor[self._at(begin, end)]

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """See `Rows`."""
        self.tensor[self._at(begin, end)] = values.cpu()

    def sync(self) -> None:
        """See `Rows`; other workers see the rows after the next collective."""

    def table(self) -> FeatureTable:
        """See `Rows`."""
        return FeatureTable(self.tensor)


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


class Store:
    """Keeps rows in host memory; a `Scratch` keeps them on disk instead.

    Args:
        workers: the workers that compute the rows.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def is_finished(self, name: str) -> bool:
        """Whether all machines have all rows of a name from an earlier computation."""
        return False

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Rows:
        """Return the rows of a name, which are computed next; a collective call."""
        return MemoryRows(self.workers.empty(dtype, num_rows, num_columns))

    def compute(
        self,
        rows: Sequence[Rows],
        shares: Sequence[Sequence[Span]],
        compute: Callable[[int, int], Sequence[Tensor]],
        advance: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Compute the rows that are missing, and copy them to all machines; a collective call.

        Args:
            rows: of one or several names.
            shares: the spans that each worker computes.
            compute: `compute(begin, end)` returns the values of a span, for each of `rows`.
            advance: called with the number of rows of each span of this worker.
        """
        with joint_work(self.workers.group) as work:
            for begin, end in shares[self.workers.rank]:
                if not all(each.has(begin, end) for each in rows):
                    for each, values in zip(rows, compute(begin, end), strict=True):
                        each.write(begin, end, values)
                advance(end - begin)
                work.report_progress()
            for each in rows:
                each.sync()
        for each in rows:
            if not each.is_finished:
                self.finish(each, shares)

    def finish(self, rows: Any, shares: Sequence[Sequence[Span]]) -> None:
        """Copy the rows to all machines; a collective call.

        Args:
            rows: the rows, of which each worker has computed its share.
            shares: the spans that each worker has computed.
        """
        self.workers.distribute(rows, shares)

    def remove(self, names: Sequence[str]) -> None:
        """Delete the stored rows of names, which are not needed any more."""


def _all_to_all(parts: Sequence[Tensor], counts: Sequence[int]) -> Algorithm[list[Tensor]]:
    return (yield AllToAll(parts, counts))
