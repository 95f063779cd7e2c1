"""Gather rows of a sparse table as a dense matrix.

Bag-of-words features have thousands of columns, of which a row has a few dozen non-zeros. The table
stays in CSR format, and only the rows of a minibatch are converted to dense rows.

Notation: N rows in the table, D columns, B gathered rows.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.gather.overlap import check_no_overlap
from gcnzc.kernels.structure.csc import VERIFY_HINT
from gcnzc.kernels.threads import parallel_for

# fewest bytes of the result for a thread
GRAIN_BYTES = 1 << 18


def gather_sparse_reference(table: Tensor, ids: Tensor) -> Tensor:
    """Reference for `gather_sparse`, which must match it bit for bit."""
    return table.to_dense()[ids]


@njit(nogil=True, cache=True)
def _densify_rows(indptr, columns, values, ids, out, is_invalid, begin, end):
    num_rows, num_columns = len(indptr) - 1, out.shape[1]
    for i in range(begin, end):
        row = ids[i]
        if not 0 <= row < num_rows:
            is_invalid[0] = 1
            return
        out[i] = 0
        first, last = indptr[row], indptr[row + 1]
        if not 0 <= first <= last <= len(columns):
            is_invalid[0] = 1
            return
        for entry in range(first, last):
            column = columns[entry]
            if not 0 <= column < num_columns:
                is_invalid[0] = 1
                return
            value, total = values[entry], out[i, column]
            # 0 + value would be 0 for -0.0
            out[i, column] = value if total == 0 else total + value


def gather_sparse(
    table: Tensor, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
) -> Tensor:
    """Return `table.to_dense()[ids]` without converting the table.

    Args:
        table: (N, D) float32, `torch.sparse_csr` on the host. Elements of a row with the same
            column are added.
        ids: (B,) int32 or int64 in [0, N), on the host.
        out: (B, D) float32, contiguous, on the host, written; a new tensor if None.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        (B, D), which is `out` if it was given.

    Raises:
        ValueError: a layout, shape or dtype does not match; `out` overlaps a tensor that is read;
            or the table has offsets or columns out of range, and `out` may be partly written.
        IndexError: an id is outside [0, N); `out` may then be partly written.
    """
    if table.layout != torch.sparse_csr or table.ndim != 2 or table.dtype != torch.float32:
        raise ValueError(
            f"gather_sparse: the table must be float32 CSR of two dimensions, not {table.dtype} "
            f"{table.layout} of shape {tuple(table.shape)}"
        )
    if table.device.type != "cpu" or ids.device.type != "cpu":
        raise ValueError(
            f"gather_sparse: a table on {table.device} and ids on {ids.device} must both be on "
            "the host"
        )
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"gather_sparse: ids must be one row of int32 or int64, not {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    shape = (ids.shape[0], table.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=table.dtype)
    elif tuple(out.shape) != shape or out.dtype != table.dtype or not out.is_contiguous():
        raise ValueError(
            f"gather_sparse: out must be contiguous {shape} {table.dtype}, not of strides "
            f"{out.stride()}, {tuple(out.shape)} {out.dtype}"
        )
    check_no_overlap("gather_sparse", out, table=table.values(), ids=ids)
    # int32 or int64 without conversion, which would take longer than the gather
    indptr, columns = table.crow_indices().numpy(), table.col_indices().numpy()
    values = table.values().detach().numpy()
    is_invalid = np.zeros(1, np.int64)
    parallel_for(
        _densify_rows,
        shape[0],
        indptr,
        columns,
        values,
        ids.to(torch.int64).contiguous().numpy(),
        out.detach().numpy(),
        is_invalid,
        threads=threads,
        grain_size=max(1, GRAIN_BYTES // max(1, 4 * shape[1])),
    )
    if is_invalid[0]:
        _raise_invalid(table, ids)
    return out


def _raise_invalid(table: Tensor, ids: Tensor) -> None:
    num_rows, num_columns = table.shape
    outside = ids[(ids < 0) | (ids >= num_rows)]
    if len(outside) > 0:
        raise IndexError(
            f"gather_sparse: id {int(outside[0])} is not in a table of {num_rows} rows "
            f"({len(outside)} of {len(ids)} ids are outside)"
        )
    columns = table.col_indices()
    wrong = columns[(columns < 0) | (columns >= num_columns)]
    fault = "offsets that are out of range"
    if len(wrong):
        fault = f"column id {int(wrong[0])}, which is not in [0, {num_columns})"
    raise ValueError(f"gather_sparse: the table has {fault}\n\n{VERIFY_HINT}")
