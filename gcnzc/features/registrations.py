"""What this process has page-locked, and copies of it between host and GPUs that CUDA accepts."""

from functools import cache

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.cuda_driver import Driver
from gcnzc.system.page_lock import PageLocks

# of a table that is copied, at a time
COPY_BYTES = 1 << 26


_opening = ForkSafeLock()


def process_page_locks() -> PageLocks | None:
    """What this process has locked; None where there is no CUDA driver, as with AMD's GPUs."""
    # two ledgers would let go of what the other has
    with _opening:
        return _open_ledger()


@cache
def _open_ledger() -> PageLocks | None:
    try:
        return PageLocks(Driver())
    except OSError:
        return None


def copy_to(rows: Tensor, device: torch.device | str) -> Tensor:
    """Return `rows.to(device)`, also if `pinned` has locked the rows in several registrations.

    CUDA copies no range of host memory that begins in one registration and ends in another. Rows
    that lie apart, which torch first copies side by side on the host, are copied in parts.
    """
    device = torch.device(device)
    if device.type == rows.device.type:
        return rows.to(device)
    if rows.layout == torch.strided and not rows.is_contiguous() and rows.ndim == 2:
        out = torch.empty(rows.shape, dtype=rows.dtype, device=device)
        step = max(1, COPY_BYTES // max(1, rows[:1].nbytes))
        for begin in range(0, len(rows), step):
            out[begin : begin + step].copy_(rows[begin : begin + step])
        return out
    if len(_stretches(rows)) < 2:
        return rows.to(device)
    return copy_into(torch.empty_like(rows, device=device), rows)


def copy_into(out: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
    """`out.copy_(source)`, in parts where CUDA would refuse the whole, as `copy_to` says.

    Args:
        out: of the shape and dtype of `source`, on any device.
        source: on any device.
        non_blocking: queue the copy and do not wait, as for `Tensor.copy_`.
    """
    stretches = _stretches(source)
    if len(stretches) < 2 or not out.is_contiguous() or out.dtype != source.dtype:
        return out.copy_(source, non_blocking=non_blocking)
    begin = source.data_ptr()
    there, here = (tensor.view(-1).view(torch.uint8) for tensor in (out, source))
    for first, last in stretches:
        part = slice(first - begin, last - begin)
        there[part].copy_(here[part], non_blocking=non_blocking)
    return out


def _stretches(source: Tensor) -> list[tuple[int, int]]:
    """What of `source` can be copied at a time; none if torch copies it to other memory first."""
    if source.device.type != "cpu" or source.layout != torch.strided or not source.is_contiguous():
        return []
    if (
        source.numel() == 0
        or not torch.cuda.is_available()
        or (ledger := process_page_locks()) is None
    ):
        return []
    return ledger.stretches(source.data_ptr(), source.nbytes)
