"""Rows of node features, and where they lie. The one door to cudart."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.gather import gather
from gcnzc.kernels.gather_sparse import gather_sparse


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Rows of features, one per node.

    Where the rows lie is the caller's choice: on a GPU, on the host for the CPU, or on the host
    inside `pinned` for GPUs too. They may be memory-mapped and read-only.

    Args:
        rows: (N, D), each row contiguous; or `torch.sparse_csr`, float32, on the host, whose rows
            are spread out when they are gathered.

    Raises:
        ValueError: `rows` is no such table, or wants a gradient.
    """

    rows: Tensor

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            what = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"a table of features has two dimensions, not {what}\n\n"
                "hint: torch.from_numpy(array), and .view(-1, 1) for one feature per node"
            )
        if rows.requires_grad:
            raise ValueError(
                f"a table of features of shape {tuple(rows.shape)} wants a gradient, which gathers "
                "do not carry\n\nhint: rows.detach()"
            )
        if self.is_sparse:
            if rows.dtype != torch.float32 or rows.device.type != "cpu":
                raise ValueError(
                    f"a sparse table of features is float32 on the host, not {rows.dtype} on "
                    f"{rows.device}\n\nhint: rows.float().cpu(), or rows.to_dense()"
                )
        elif rows.layout != torch.strided or (rows.shape[1] > 1 and rows.stride(1) != 1):
            strides = f" with strides {rows.stride()}" if rows.layout == torch.strided else ""
            raise ValueError(
                f"a table of features is dense with contiguous rows, or CSR, not {rows.layout} of "
                f"shape {tuple(rows.shape)}{strides}\n\nhint: rows.contiguous() or "
                "rows.to_sparse_csr()"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether the rows are kept as CSR."""
        return self.rows.layout == torch.sparse_csr

    @property
    def num_rows(self) -> int:
        """N."""
        return self.rows.shape[0]

    @property
    def num_columns(self) -> int:
        """D."""
        return self.rows.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a minibatch."""
        return self.num_columns * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Bytes of all the rows' elements; of entries and indices if they are sparse."""
        if not self.is_sparse:
            return self.num_rows * self.row_bytes
        rows = self.rows
        return sum(part.nbytes for part in (rows.crow_indices(), rows.col_indices(), rows.values()))

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        kind = "sparse " if self.is_sparse else ""
        return (
            f"FeatureTable({self.num_rows} x {self.num_columns} {kind}{self.dtype} "
            f"on {self.device}, {self.nbytes} bytes)"
        )

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as a dense (B, D) on the device of `ids`.

        Args:
            ids: (B,) int32 or int64 in [0, N), on the device of the rows; or on a GPU, if the rows
                are inside `pinned`.
            out: (B, D) to write into, on the device of `ids`; allocated if None.
            threads: how many share the work on the host; `torch.get_num_threads()` if None.

        Raises:
            ValueError, IndexError: as `gcnzc.kernels.gather.gather` does.
        """
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(self.rows, ids, out, threads=threads)


@contextmanager
def pinned(rows: Tensor) -> Iterator[FeatureTable]:
    """Page-lock `rows` where they lie, so that GPUs can read them, for the length of a `with`.

    Nothing is copied, unlike `Tensor.pin_memory`, so a table of nearly the host's memory fits. On
    a machine without CUDA the same code runs, and nothing is locked. Rows that are locked already,
    lie on a GPU, or are of no bytes are left as they are.

    Args:
        rows: (N, D) dense, on the host, in memory that may be written.

    Raises:
        ValueError: `rows` is no table of features, or is sparse and there is CUDA.
        RuntimeError: CUDA will not lock the pages.
    """
    table = FeatureTable(rows)
    if not torch.cuda.is_available() or rows.device.type != "cpu":
        yield table
        return
    if table.is_sparse:
        raise ValueError(
            f"a sparse table of {rows.shape[0]} rows cannot be page-locked for a GPU\n\n"
            "hint: rows.to_dense(), or gather on the host"
        )
    # rows that are a view lie apart: from the first byte of the first to the last of the last
    span = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
    num_bytes = span * rows.element_size()
    if rows.numel() == 0 or rows.is_pinned():
        yield table
        return
    cudart = torch.cuda.cudart()
    _demand(cudart.cudaHostRegister(rows.data_ptr(), num_bytes, 0), "lock", num_bytes)
    try:
        yield table
    finally:
        try:
            # no GPU may still be reading when the pages are let go
            torch.cuda.synchronize()
        finally:
            _demand(cudart.cudaHostUnregister(rows.data_ptr()), "unlock", num_bytes)


def _demand(code: int, verb: str, num_bytes: int) -> None:
    if int(code) != 0:
        raise RuntimeError(
            f"CUDA would not {verb} {num_bytes:,} bytes of host memory (error {int(code)})\n\n"
            "hint: `ulimit -l` shows how many KiB this user may lock; features that are kept on "
            "the GPU, or smaller ones, need none"
        )
