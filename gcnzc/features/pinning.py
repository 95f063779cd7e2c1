"""Page-lock tables of features in place, so that GPUs can read them."""

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
# is copied once. A copy is freed when the last reference to it is dropped.
_copies: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


@contextmanager
def pinned(rows: Tensor | FeatureTable) -> Iterator[FeatureTable]:
    """Page-lock `rows` in place inside a `with` block, so that GPUs can read them.

    Unlike `Tensor.pin_memory`, this does not copy the rows, so the table may take nearly all of the
    host's memory. The exception is a file that is mapped read-only, if the driver cannot lock it:
    it is copied once into shared memory, which processes forked later share, with a warning of the
    logger "gcnzc". The yielded table then refers to the copy, which exists until its last reference
    is dropped. `gcnzc.train.shared_data.share_copy` makes one copy for all ranks of a machine.

    On a machine without CUDA the same code runs, and nothing is locked. Rows that are locked
    already, are on a GPU, or have no bytes are left as they are. Rows that are pinned twice, or are
    parts of one tensor, are locked once, until the last `with` ends. A fork inside the `with` does
    not unlock the parent's rows; the child has no locks.

    The bytes of the rows, extended to multiples of 16 B and not to whole pages, are registered with
    the driver, which locks the pages that contain them. CUDA copies memory that is entirely
    registered or not at all, also on these pages. It does not copy memory that is partly
    registered, such as a tensor of which the rows are a view;
    `gcnzc.features.registrations.copy_to` splits such a copy.

    If the driver does not let GPUs read host memory, or under WSL not this much of it, the table is
    yielded unlocked with a warning of the logger, and `can_read_host` returns False from then on.

    Args:
        rows: (N, D) dense, on the host, in ordinary, shared or mapped memory; may be a view.

    Raises:
        ValueError: `rows` is not a table of features, or is sparse and CUDA is available.
        RuntimeError: there is too little memory, or CUDA cannot lock the pages (then no page stays
            locked) or cannot unlock them.
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
    page_locks, device = registrations.process_page_locks(), torch.cuda.current_device()
    with ExitStack() as locks:
        locked = None
        if page_locks is not None and page_locks.is_readable_by(device):
            try:
                locked = locks.enter_context(_locked(table.rows, page_locks))
            except LockRefused:
                # Windows limits how much memory the driver can lock, and does not report the limit
                if not _is_wsl():
                    raise
                page_locks.disable_reads(device)
        if locked is None:
            _log.warning(
                "this driver does not let the GPU read %s bytes of host memory: the CPU gathers "
                "the rows, and they are copied",
                f"{table.nbytes:,}",
            )
            locked = table.rows
        yield table if locked is table.rows else replace(table, rows=locked)


def can_read_host(device: torch.device | str) -> bool:
    """Return whether `device` is a GPU that can read host memory locked by `pinned`.

    If not, the CPU must gather the rows.

    Raises:
        RuntimeError: the GPU supports it, but CUDA cannot lock even one page.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    page_locks = registrations.process_page_locks()
    return page_locks is not None and page_locks.is_readable_by(index)


def needs_copy(table: FeatureTable) -> bool:
    """Return whether `pinned` would copy the rows, because the driver cannot lock read-only memory.

    This is tested by locking one page of the rows. All ranks of one machine can then share one
    copy; see `gcnzc.train.shared_data.share_copy`.

    Raises:
        RuntimeError: CUDA cannot lock even one page.
    """
    if not torch.cuda.is_available() or table.device.type != "cpu" or table.is_sparse:
        return False
    page_locks, rows = registrations.process_page_locks(), table.rows
    if page_locks is None or rows.numel() == 0 or not _read_only_mappings(rows):
        return False
    if not page_locks.is_readable_by(torch.cuda.current_device()):
        return False
    try:
        with page_locks.locked(rows.data_ptr(), min(_num_bytes(rows), PAGE_BYTES), read_only=True):
            return False
    except LockRefused as refusal:
        if not refusal.is_unsuitable:
            raise
        return True


@contextmanager
def _locked(rows: Tensor, page_locks: PageLocks) -> Iterator[Tensor]:
    """Page-lock `rows`, or a copy of them if the driver cannot lock them."""
    address, num_bytes = rows.data_ptr(), _num_bytes(rows)
    read_only = _read_only_mappings(rows)
    with ExitStack() as locks:
        try:
            locks.enter_context(page_locks.locked(address, num_bytes, bool(read_only), rows))
        except LockRefused as refusal:
            if not read_only or not refusal.is_unsuitable:
                raise
            copy = _shared_copy(rows, read_only[0].path or "the table")
            locks.enter_context(page_locks.locked(copy.data_ptr(), num_bytes, owner=copy))
            rows = copy.view(rows.dtype).as_strided(rows.shape, rows.stride())
        yield rows


def _read_only_mappings(rows: Tensor) -> list[Mapping]:
    """Return the read-only memory mappings that contain `rows`."""
    return [part for part in mappings(rows.data_ptr(), _num_bytes(rows)) if not part.writable]


def _num_bytes(rows: Tensor) -> int:
    """Return the bytes from the start of the first row to the end of the last, with any gaps."""
    return _span(rows) * rows.element_size()


def _shared_copy(rows: Tensor, name: str) -> Tensor:
    """Copy the bytes of `rows`, gaps included, into anonymous shared memory."""
    source = rows.as_strided((_span(rows),), (1,)).view(torch.uint8)
    key = (source.data_ptr(), len(source))
    with _copying:
        flat = _copies.get(key)
        if flat is None:
            flat = torch.frombuffer(mmap.mmap(-1, len(source)), dtype=torch.uint8)
            check_memory_fits(flat.data_ptr(), len(flat))
            _log.warning(
                "%s is mapped read-only, which the driver cannot lock: copying %s bytes into "
                "shared memory",
                name,
                f"{len(flat):,}",
            )
            # in parts, so that Ctrl-C can interrupt the copy
            for begin in range(0, len(flat), COPY_BYTES):
                part = slice(begin, begin + COPY_BYTES)
                flat[part].copy_(source[part])
            _copies[key] = flat
    return flat


def _span(rows: Tensor) -> int:
    """Return the elements from the start of the first row to the end of the last, with any gaps."""
    return (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]


def _is_wsl() -> bool:
    return "microsoft" in platform.release().lower()
