"""Page-lock tables of features where they lie, so that GPUs can read them."""

import logging
import mmap
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gcnzc.features import registrations
from gcnzc.features.registrations import COPY_BYTES
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.host_memory import PAGE_BYTES, Mapping, mappings
from gcnzc.system.page_lock import LockRefused, PageLocks, check_memory_fits

_log = logging.getLogger("gcnzc")


_copying = ForkSafeLock()


# Copies of rows by the address and the number of their bytes, so that a table that is pinned twice
# is copied once. They go when the last `with` ends; until then the rows stay where they are.
_copies: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


@contextmanager
def pinned(rows: Tensor | FeatureTable) -> Iterator[FeatureTable]:
    """Page-lock `rows` where they lie, so that GPUs can read them, for the length of a `with`.

    Nothing is copied, unlike `Tensor.pin_memory`, so a table of nearly the host's memory fits. The
    exception is a file that is mapped read-only, if the driver will not lock it: it is copied once
    into shared memory, which processes that are forked later share, and the logger "gcnzc" says
    so. Such a copy is what the yielded table holds, for as long as anything refers to it.
    `gcnzc.train.shared_data.share_copy` makes one for all workers of a machine.

    On a machine without CUDA the same code runs, and nothing is locked. Rows that are locked
    already, lie on a GPU, or are of no bytes are left as they are. Rows that are pinned twice, or
    are parts of one tensor, are locked once, until the last `with` ends. In a process that is
    forked inside the `with` nothing is let go of.

    Only the rows' own bytes are locked, so that CUDA copies what lies beside them as any other
    memory. It refuses to copy what is locked in part, such as a tensor of which the rows are a
    view; `gcnzc.features.registrations.copy_to` splits such a copy.

    Where the driver gives GPUs no way to host memory, or under WSL not to as much of it, the table
    is yielded unlocked, the logger says so, and `can_read_host` is False from then on.

    Args:
        rows: (N, D) dense, on the host: ordinary, shared or mapped memory. They may be a view.

    Raises:
        ValueError: `rows` is no table of features, or is sparse and there is CUDA.
        RuntimeError: there is too little memory, or CUDA will not lock the pages (then nothing is
            left locked), or will not let go of them.
    """
    table = rows if isinstance(rows, FeatureTable) else FeatureTable(rows)
    if not torch.cuda.is_available() or table.device.type != "cpu":
        yield table
        return
    if table.is_sparse:
        raise ValueError(
            f"a sparse table of {table.num_rows} rows cannot be page-locked for a GPU\n\n"
            "hint: rows.to_dense(), or gather on the host"
        )
    if table.rows.numel() == 0:
        yield table
        return
    ledger, device = registrations.process_page_locks(), torch.cuda.current_device()
    with ExitStack() as locks:
        locked = None
        if ledger is not None and ledger.is_read_by(device):
            try:
                locked = locks.enter_context(_locked(table.rows, ledger))
            except LockRefused:
                # Windows lets the driver lock a part of the memory, and does not say how much
                if not _is_wsl():
                    raise
                ledger.give_up(device)
        if locked is None:
            _log.warning(
                "this driver does not let the GPU read %s bytes of host memory: the CPU gathers "
                "the rows, and they are copied",
                f"{table.nbytes:,}",
            )
            locked = table.rows
        yield table if locked is table.rows else replace(table, rows=locked)


def can_read_host(device: torch.device | str) -> bool:
    """Whether `device` is a GPU that reads what `pinned` locks; where not, the CPU must gather.

    Raises:
        RuntimeError: it should, but CUDA will not lock a single page.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    ledger = registrations.process_page_locks()
    return ledger is not None and ledger.is_read_by(index)


def needs_copy(table: FeatureTable) -> bool:
    """Whether `pinned` will copy the rows because the driver does not lock read-only memory.

    One page of the rows is locked to see. Workers of one machine can then make one copy for all,
    see `gcnzc.train.shared_data.share_copy`.

    Raises:
        RuntimeError: CUDA will not lock a single page.
    """
    if not torch.cuda.is_available() or table.device.type != "cpu" or table.is_sparse:
        return False
    ledger, rows = registrations.process_page_locks(), table.rows
    if ledger is None or rows.numel() == 0 or not _read_only(rows):
        return False
    if not ledger.is_read_by(torch.cuda.current_device()):
        return False
    try:
        with ledger.locked(rows.data_ptr(), min(_num_bytes(rows), PAGE_BYTES), read_only=True):
            return False
    except LockRefused as refusal:
        if not refusal.is_unsuitable:
            raise
        return True


@contextmanager
def _locked(rows: Tensor, ledger: PageLocks) -> Iterator[Tensor]:
    """`rows`, or a copy of them, locked."""
    address, num_bytes = rows.data_ptr(), _num_bytes(rows)
    read_only = _read_only(rows)
    with ExitStack() as locks:
        try:
            locks.enter_context(ledger.locked(address, num_bytes, bool(read_only), rows))
        except LockRefused as refusal:
            if not read_only or not refusal.is_unsuitable:
                raise
            flat = _shared_copy(rows, read_only[0].path or "the table")
            locks.enter_context(ledger.locked(flat.data_ptr(), num_bytes, owner=flat))
            rows = flat.view(rows.dtype).as_strided(rows.shape, rows.stride())
        yield rows


def _read_only(rows: Tensor) -> list[Mapping]:
    """Those mappings under `rows` that cannot be written."""
    return [part for part in mappings(rows.data_ptr(), _num_bytes(rows)) if not part.writable]


def _num_bytes(rows: Tensor) -> int:
    """From the first byte to the last: rows that are a view lie apart."""
    return _span(rows) * rows.element_size()


def _shared_copy(rows: Tensor, name: str) -> Tensor:
    """The bytes of `rows`, gaps and all, in shared memory that has no name to be left behind."""
    source = rows.as_strided((_span(rows),), (1,)).view(torch.uint8)
    key = (source.data_ptr(), len(source))
    with _copying:
        flat = _copies.get(key)
        if flat is None:
            flat = torch.frombuffer(mmap.mmap(-1, len(source)), dtype=torch.uint8)
            check_memory_fits(flat.data_ptr(), len(flat))
            _log.warning(
                "%s is mapped read-only, which the driver will not lock: copying %s bytes into "
                "shared memory",
                name,
                f"{len(flat):,}",
            )
            # in parts, between which Ctrl-C is heard
            for begin in range(0, len(flat), COPY_BYTES):
                part = slice(begin, begin + COPY_BYTES)
                flat[part].copy_(source[part])
            _copies[key] = flat
    return flat


def _span(rows: Tensor) -> int:
    """Elements from the first to the last: rows that are a view lie apart."""
    return (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]


def _is_wsl() -> bool:
    return "microsoft" in platform.release().lower()
