"""Page-locks of this process, and copies that respect the boundaries of CUDA's registrations."""

from functools import cache

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.cuda_driver import Driver
from gcnzc.system.page_lock import PageLocks

# bytes of a table that are copied at a time
COPY_BYTES = 1 << 26


_opening = ForkSafeLock()


def process_page_locks() -> PageLocks | None:
    """Return the page-locks of this process; None without a CUDA driver, as with AMD's GPUs."""
    # two instances would unlock memory that the other one still uses
    with _opening:
        return _open_page_locks()


@cache
def _open_page_locks() -> PageLocks | None:
    try:
        return PageLocks(Driver())
    except OSError:
        return None


def copy_to(rows: Tensor, device: torch.device | str) -> Tensor:
    """Return `rows.to(device)`, also if `pinned` has locked the rows in several registrations.

    CUDA cannot copy a range of host memory that begins in one registration and ends in another.
    Padded rows are copied in parts, since torch would first make them contiguous on the host.
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
    """Copy `source` to `out`, in parts where CUDA cannot copy the whole range; see `copy_to`.

    Args:
        out: of the same shape and dtype as `source`, on any device.
        source: on any device.
        non_blocking: queue the copy without waiting for it; see `Tensor.copy_`.
    """
    stretches = _stretches(source)
    if len(stretches) < 2 or not out.is_contiguous() or out.dtype != source.dtype:
        return out.copy_(source, non_blocking=non_blocking)
    begin = source.data_ptr()
    target_bytes, source_bytes = (tensor.view(-1).view(torch.uint8) for tensor in (out, source))
    for first, last in stretches:
        part = slice(first - begin, last - begin)
        target_bytes[part].copy_(source_bytes[part], non_blocking=non_blocking)
    return out


def _stretches(source: Tensor) -> list[tuple[int, int]]:
    """Return the address ranges that can each be copied at once; none if torch stages the copy."""
    if source.device.type != "cpu" or source.layout != torch.strided or not source.is_contiguous():
        return []
    if (
        source.numel() == 0
        or not torch.cuda.is_available()
        or (page_locks := process_page_locks()) is None
    ):
        return []
    return page_locks.copy_ranges(source.data_ptr(), source.nbytes)
