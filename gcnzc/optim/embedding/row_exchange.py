"""Exchange the gradients of rows between ranks: ids and rows of the rows with a gradient only.

Notation: W ranks, T tables, U_t different rows of table t with a gradient on this rank, D_t columns
of table t, and N_t rows.

In a step, each rank sends to each other rank 8 (T + 2) bytes of counts, and for each table
U_t (b_t + D_t s_t) bytes, where b_t is 4, or 8 if N_t is above 2^31 - 1, and s_t is 4 for float32
and 8 for float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, AllToAll
from gcnzc.kernels.embedding.duplicates import sum_duplicates
from gcnzc.kernels.finite import can_be_squared, square_limit

MAX_INT32 = 2**31 - 1


@dataclass
class RowGradients:
    """The gradients of a table's rows in a step."""

    ids: Tensor
    """(U,) int64, ascending and different, on the host"""
    values: Tensor
    """(U, D), on the host"""
    num_rows: int
    """number of rows of the table, N"""

    def check_ids(self, name: str) -> None:
        """Check that the ids are in the table.

        Raises:
            IndexError: one is not.
        """
        for row in (int(self.ids[0]), int(self.ids[-1])) if len(self.ids) else ():
            if not 0 <= row < self.num_rows:
                raise IndexError(
                    f"id {row} is not in {name} of {self.num_rows} rows\n\n"
                    "hint: set GCNZC_CHECK_IDS=1 to find the gather that used it on a GPU"
                )

    def count_bad_elements(self) -> int:
        """Return the number of elements that are not finite, or too large to be squared."""
        if bool(can_be_squared(self.values)):
            return 0
        return int((~(self.values.abs() < square_limit(self.values.dtype))).sum())


def exchange_counts(
    tables: Sequence[RowGradients], options_hash: int, world_size: int
) -> Algorithm[Tensor]:
    """All-gather what ranks need to know before rows are exchanged.

    Args:
        tables: the gradients of this rank.
        options_hash: a number that is equal on all ranks if their options are.
        world_size: W.

    Returns:
        (W, T + 2) int64: of each rank the hash, the number of elements that cannot be used, and
        the number of rows of each table.
    """
    bad = sum(each.count_bad_elements() for each in tables)
    own = torch.tensor([options_hash, bad, *(len(each.ids) for each in tables)])
    if world_size == 1:
        return own[None]
    return (yield AllGather(own))


def mean_of_rows(
    own: RowGradients, counts: Sequence[int], *, threads: int | None = None
) -> Algorithm[RowGradients]:
    """Return the mean of the gradients of a table over the ranks, for all rows that any rank has.

    A rank without a gradient of a row counts as zero. The gradients of a row are added in the order
    of ranks.

    Args:
        own: the gradients of this rank.
        counts: the number of rows of each rank.
        threads: number of threads; `torch.get_num_threads()` if None.
    """
    world_size = len(counts)
    if world_size == 1:
        return own
    width = own.values.shape[1]
    ids = own.ids.int() if own.num_rows <= MAX_INT32 else own.ids
    all_ids = yield AllToAll([ids] * world_size, counts)
    flat = own.values.reshape(-1)
    all_values = yield AllToAll([flat] * world_size, [count * width for count in counts])
    merged_ids, sums = sum_duplicates(
        torch.cat(all_ids).long(), torch.cat(all_values).view(-1, width), threads=threads
    )
    return RowGradients(merged_ids, sums.div_(world_size), own.num_rows)
