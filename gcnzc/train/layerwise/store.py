"""Rows that workers compute together, such as the outputs of a layer, and keep in memory."""

from collections.abc import Callable, Sequence
from typing import Any

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


class Rows:
    """Rows in host memory, which the workers of a machine share.

    Args:
        tensor: (n, columns), contiguous.
    """

    is_finished = False
    """whether all rows are stored from an earlier computation"""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def has(self, begin: int) -> bool:
        """Whether the range that begins at a row is stored from an earlier computation."""
        return False

    def write(self, begin: int, values: Tensor) -> None:
        """Set the rows from `begin`; other workers see them after the next collective.

        Args:
            begin: first row.
            values: (m, columns) on any device.
        """
        self.tensor[begin : begin + len(values)] = values.cpu()

    def record(self, begin: int) -> None:
        """Record that the range that begins at a row is written."""

    def table(self) -> FeatureTable:
        """Return the rows as a table."""
        return FeatureTable(self.tensor)


class Store:
    """Workers that compute rows together, and keep them in host memory; see also `Scratch`.

    Args:
        group: the workers.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # for each rank, the lowest rank on the same machine
        self.firsts = first_workers(group)

    @property
    def has_several_machines(self) -> bool:
        """Whether the workers are on several machines."""
        return len(set(self.firsts)) > 1

    def is_finished(self, name: str) -> bool:
        """Whether all machines have all rows of a name from an earlier computation."""
        return False

    def rows(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Any:
        """Return the `Rows` of a name, which are computed next; a collective call."""
        return Rows(shared_empty((num_rows, num_columns), dtype, self.group))

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
            shares: the ranges that each worker computes.
            compute: `compute(begin, end)` returns the values of a range, for each of `rows`.
            advance: called with the number of rows of each range of this worker.
        """
        with joint_work(self.group) as work:
            for begin, end in shares[self.group.rank]:
                if not all(each.has(begin) for each in rows):
                    for each, values in zip(rows, compute(begin, end), strict=True):
                        each.write(begin, values)
                        each.record(begin)
                advance(end - begin)
                work.report_progress()
        for each in rows:
            if not each.is_finished:
                self.finish(each, shares)

    def finish(self, rows: Any, shares: Sequence[Sequence[Span]]) -> None:
        """Copy the rows that each machine has computed to all other machines; a collective call.

        Args:
            rows: the rows that all machines have in the end.
            shares: the ranges that each worker has computed.
        """
        stored = rows.table().rows
        row_bytes = stored.shape[1] * stored.itemsize
        if not self.has_several_machines or row_bytes == 0:
            return
        spans = [(share[0][0], share[-1][1]) if share else (0, 0) for share in shares]
        step = max(1, PIECE_BYTES // row_bytes)
        for done in range(0, max(end - begin for begin, end in spans), step):
            pieces = [(min(b + done, end), min(b + done + step, end)) for b, end in spans]
            self._distribute(rows, stored, pieces)
        # the first worker of each machine has written the rows
        run(all_gather_scalar(0), self.group)

    def _distribute(self, rows: Rows, stored: Tensor, pieces: Sequence[Span]) -> None:
        rank = self.group.rank
        own_first = self.firsts[rank]
        own = stored[slice(*pieces[rank])].flatten()
        none = own.new_empty(0)
        # each worker sends its rows to the first workers of the other machines
        parts = [
            own if other == first != own_first else none for other, first in enumerate(self.firsts)
        ]
        counts = [
            (end - begin) * stored.shape[1] if rank == own_first != first else 0
            for (begin, end), first in zip(pieces, self.firsts, strict=True)
        ]
        found = run(_all_to_all(parts, counts), self.group)
        for (begin, _), part in zip(pieces, found, strict=True):
            if len(part):
                rows.write(begin, part.view(-1, stored.shape[1]))

    def remove(self, names: Sequence[str]) -> None:
        """Delete the stored rows of names, which are not needed any more."""


def _all_to_all(parts: Sequence[Tensor], counts: Sequence[int]) -> Algorithm[list[Tensor]]:
    return (yield AllToAll(parts, counts))
