"""One attribute of nodes or edges, gathered for a minibatch.

A column is a tensor of any rank with one row per node or edge, or a `gcnzc.FeatureTable`. One wide
column of the nodes is gathered by `gcnzc.Loader`, for a GPU by the GPU itself; the others by the
threads that make the minibatch, on the host. Rows that lie on a GPU are gathered there, when the
minibatch is handed out.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.buffers import Pool

# fresh pages would cost more than the gather that fills them
_pool = Pool()


class Column:
    """Rows of one attribute, and how minibatches of them come to where they are wanted.

    Args:
        name: the attribute's, for what is said of it.
        rows: (N, ...) on the host or a GPU; or a table of features.
        num_rows: how many there must be.
        device: where minibatches are handed out.
        locks: keeps what is page-locked for a GPU until it is closed.

    Raises:
        ValueError: the rows are not one per node or edge, or want a gradient.
    """

    def __init__(
        self,
        name: str,
        rows: Tensor | FeatureTable,
        num_rows: int,
        device: torch.device,
        locks: ExitStack,
    ) -> None:
        self.name = name
        self._is_table = isinstance(rows, FeatureTable)
        self.rows = rows.rows if isinstance(rows, FeatureTable) else rows
        self._device, self._locks, self._is_locked = device, locks, device.type != "cuda"
        self._check_rows(num_rows)
        self.table = rows if isinstance(rows, FeatureTable) else as_table(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""
        return tuple(self.rows.shape[1:])

    @property
    def is_on_host(self) -> bool:
        """Whether threads can gather the rows beside the model."""
        return self.rows.device.type == "cpu"

    @property
    def is_prefetched(self) -> bool:
        """Whether `gcnzc.Loader` can gather the rows before the minibatch is handed out."""
        can = self.is_on_host or self.rows.device == self._device
        return can and self.table is not None and self.rows.ndim > 1

    def locked(self) -> FeatureTable | None:
        """The rows where a GPU can read them, if minibatches go to one and it can.

        If the driver does not lock read-only memory, each rank locks a copy of its own: ranks share
        one only through a group, by `gcnzc.train.shared_data.share_copy`.
        """
        if not self._is_locked and self.table is not None and not self.table.is_sparse:
            self.table = self._locks.enter_context(pinned(self.table))
            self._is_locked = True
        return self.table

    def on_host(self, ids: Tensor) -> Tensor:
        """(B, ...) the rows of `ids`, gathered by the calling thread alone.

        Args:
            ids: (B,) int64 on the host, in range.
        """
        if self.table is None:
            return self.rows.index_select(0, ids)
        return gather_on_host(self.table, ids, threads=1).view(len(ids), *self.shape)

    def in_place(self, ids: Tensor) -> Tensor:
        """(B, ...) the rows of `ids`, gathered where they lie.

        Args:
            ids: (B,) int64 on any device, in range.
        """
        if self.is_on_host:
            return self.on_host(ids)
        ids = ids.to(self.rows.device)
        if self._is_table and self.table is not None:
            return self.table.gather(ids).view(len(ids), *self.shape)
        return self.rows.index_select(0, ids)

    def _check_rows(self, num_rows: int) -> None:
        rows = self.rows
        if rows.layout not in (torch.strided, torch.sparse_csr):
            raise ValueError(
                f"{self.name} is of {rows.layout}\n\n"
                f"hint: {self.name}.to_dense(), or {self.name}.to_sparse_csr()"
            )
        if rows.ndim == 0 or len(rows) != num_rows:
            raise ValueError(
                f"{self.name} has shape {tuple(rows.shape)}, but {num_rows} rows are needed\n\n"
                "hint: one row for each node, or each edge, of the graph"
            )
        if rows.requires_grad:
            raise ValueError(
                f"{self.name} wants a gradient, which minibatches do not carry back\n\n"
                f"hint: {self.name}.detach(), or a torch.nn.Embedding that the model indexes by "
                "the minibatch's node ids"
            )


def as_table(rows: Tensor) -> FeatureTable | None:
    """The rows as a table of two dimensions in the same memory; None if there is no such view."""
    if rows.layout == torch.sparse_csr:
        return FeatureTable(rows)
    if rows.ndim == 1:
        rows = rows.view(-1, 1)
    elif rows.ndim > 2 and rows.is_contiguous():
        rows = rows.flatten(1)
    fits = rows.ndim == 2 and (rows.shape[1] <= 1 or rows.stride(1) == 1)
    return FeatureTable(rows) if fits else None


def gather_on_host(table: FeatureTable, ids: Tensor, threads: int | None = None) -> Tensor:
    """(B, D) rows of a table on the host, in memory that is used again.

    Args:
        table: on the host.
        ids: (B,) int32 or int64 on the host, in range.
        threads: how many share the work; `torch.get_num_threads()` if None.
    """
    out = _pool.empty((len(ids), table.num_columns), table.dtype)
    return table.gather(ids, out, threads=threads)
