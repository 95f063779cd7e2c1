"""One attribute of nodes or edges, gathered for a minibatch.

A column is a tensor of any rank with one row per node or edge, or a `gcnzc.FeatureTable`. One
column of the nodes, the features, is gathered by `gcnzc.Loader`, on a GPU by the GPU itself. The
others are gathered on the host by the threads that prepare the minibatch. Rows on a GPU are
gathered there, when the minibatch is yielded.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.buffers import Pool
from gcnzc.loader.checks import is_copied

# reused, since page faults of new memory would take longer than the gather
_pool = Pool()


class Column:
    """Rows of one attribute, from which minibatches are gathered.

    Args:
        name: the attribute's name, for error messages.
        rows: (N, ...) on the host or a GPU; or a table of features.
        num_rows: the required number of rows.
        device: device of the minibatches.
        locks: keeps rows page-locked for a GPU until it is closed.

    Raises:
        ValueError: there is not one row per node or edge, or the rows require a gradient.
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
        """Shape of one row."""
        return tuple(self.rows.shape[1:])

    @property
    def is_on_host(self) -> bool:
        """Whether the loader's threads can gather the rows, in parallel to the model."""
        return self.rows.device.type == "cpu"

    @property
    def is_prefetched(self) -> bool:
        """Whether `gcnzc.Loader` can prefetch the rows."""
        can = self.is_on_host or self.rows.device == self._device
        return can and self.table is not None and self.rows.ndim > 1

    @property
    def is_read_in_place(self) -> bool:
        """Whether the GPU of the minibatches can read the rows, once they are locked."""
        if self._device.type != "cuda" or self.table is None or not self.is_prefetched:
            return False
        return not self.table.is_sparse and not is_copied(self._device, self.table)

    def lock(self) -> FeatureTable | None:
        """Return the rows as a table, page-locked if the minibatches are on a GPU.

        If the driver cannot lock read-only memory, each rank makes a copy of its own. Ranks can
        share a copy only with a group; see `gcnzc.train.shared_data.share_copy`.
        """
        if not self._is_locked and self.table is not None and not self.table.is_sparse:
            self.table = self._locks.enter_context(pinned(self.table))
            self._is_locked = True
        return self.table

    def gather_in_thread(self, ids: Tensor) -> Tensor:
        """Gather rows `ids`, (B, ...), on the host, in the calling thread.

        Args:
            ids: (B,) int64 on the host, in range.
        """
        if self.table is None:
            return self.rows.index_select(0, ids)
        return gather_on_host(self.table, ids, threads=1).view(len(ids), *self.shape)

    def gather_on_device(self, ids: Tensor) -> Tensor:
        """Gather rows `ids`, (B, ...), on the device of the rows.

        Args:
            ids: (B,) int64 on any device, in range.
        """
        if self.is_on_host:
            return self.gather_in_thread(ids)
        ids = ids.to(self.rows.device)
        if self._is_table and self.table is not None:
            return self.table.gather(ids).view(len(ids), *self.shape)
        return self.rows.index_select(0, ids)

    def _check_rows(self, num_rows: int) -> None:
        rows = self.rows
        if rows.layout not in (torch.strided, torch.sparse_csr):
            raise ValueError(f"{self.name} is of {rows.layout}, not dense or CSR")
        if rows.ndim == 0 or len(rows) != num_rows:
            raise ValueError(
                f"{self.name} has shape {tuple(rows.shape)}, but {num_rows} rows are needed"
            )
        if rows.requires_grad:
            raise ValueError(
                f"{self.name} requires a gradient, which minibatches do not propagate\n\n"
                f"hint: {self.name}.detach(), or a torch.nn.Embedding that the model indexes by "
                "the minibatch's node ids"
            )


def as_table(rows: Tensor) -> FeatureTable | None:
    """Return a view of the rows as a table of two dimensions; None if there is no such view."""
    if rows.layout == torch.sparse_csr:
        return FeatureTable(rows)
    if rows.ndim == 1:
        rows = rows.view(-1, 1)
    elif rows.ndim > 2 and rows.is_contiguous():
        rows = rows.flatten(1)
    if rows.is_complex():
        return None
    fits = rows.ndim == 2 and (rows.shape[1] <= 1 or rows.stride(1) == 1)
    return FeatureTable(rows) if fits else None


def gather_on_host(table: FeatureTable, ids: Tensor, threads: int | None = None) -> Tensor:
    """Gather rows of a table, (B, D), on the host, in memory that is reused.

    Args:
        table: on the host.
        ids: (B,) int32 or int64 on the host, in range.
        threads: number of threads. Default: `torch.get_num_threads()`.
    """
    out = _pool.empty((len(ids), table.num_columns), table.dtype)
    return table.gather(ids, out, threads=threads)


def gather_ids(ids: Tensor, positions: Tensor) -> Tensor:
    """Return (B,) elements of a vector on the host, in the calling thread.

    Args:
        ids: (N,) on the host.
        positions: (B,) int64 on the host, in range.
    """
    table = as_table(ids)
    assert table is not None, "a vector is a table of one column"
    return gather_on_host(table, positions, threads=1).flatten()
