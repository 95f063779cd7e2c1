"""Tables of node features, in host or GPU memory, page-locked on request."""

import logging
import mmap
import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from gcnzc.kernels.finite import are_finite
from gcnzc.kernels.gather import gather
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.quantize import LARGEST, largest, quantize, scales_of
from gcnzc.kernels.gather.sparse import gather_sparse
from gcnzc.system.arguments import THREADS_LIMIT, check_device, check_integer, check_kind, describe
from gcnzc.system.cuda_driver import Driver
from gcnzc.system.host_memory import PAGE_BYTES, Mapping, mappings
from gcnzc.system.page_lock import LockRefused, PageLocks, check_memory_fits

# of a table that is copied, at a time
COPY_BYTES = 1 << 26


_log = logging.getLogger("gcnzc")


_opening, _copying, _copying_scales = (threading.Lock() for _ in range(3))


# Copies of rows by the address and the number of their bytes, so that a table that is pinned twice
# is copied once. They go when the last `with` ends; until then the rows stay where they are.
_copies: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Rows of features, one per node.

    Where the rows lie is the caller's choice: on a GPU, on the host for the CPU, or on the host
    inside `pinned` for GPUs too. They may be memory-mapped and read-only.

    Args:
        rows: (N, D), each row contiguous; or `torch.sparse_csr`, float32, on the host, whose rows
            are spread out when they are gathered; or codes with `scales`, int8, float8_e4m3fn or
            float8_e5m2, which are multiplied by them when they are gathered.
        scales: of codes, float32, contiguous, on any device: (N,), one for each row, or
            (ceil(D / scale_columns),). A device that gathers gets a copy, which the table keeps.
        scale_columns: how many columns share a scale, for all rows; None if each row has its own.
        way: how a GPU's threads share a gather, such as `gcnzc check --tune` measured it; as usual
            if None. It changes no bit of what is gathered.

    Raises:
        TypeError: `scale_columns` or `way` are of another type.
        ValueError: `rows` is no such table, or wants a gradient; or `scales` do not fit it, or are
            not finite.
    """

    rows: Tensor
    scales: Tensor | None = None
    scale_columns: int | None = None
    way: KernelConfig | None = None

    @classmethod
    def quantized(
        cls, rows: Tensor, dtype: torch.dtype = torch.int8, *, scale_columns: int | None = None
    ) -> "FeatureTable":
        """The table of the codes of `rows`: a byte an element.

        `gcnzc.kernels.gather.quantize` says how far codes are from the rows.

        Args:
            rows: (N, D) floating point on the host, finite; D at least 1.
            dtype: int8, float8_e4m3fn or float8_e5m2.
            scale_columns: how many columns share a scale, for all rows; None for a scale a row.

        Raises:
            ValueError: `rows`, `dtype` or `scale_columns` are not of these.
        """
        plain = FeatureTable(rows)
        if scale_columns is not None:
            check_integer("scale_columns", scale_columns, 1, hint="None for a scale a row")
        check_kind("dtype", dtype, torch.dtype, "torch.int8")
        floating = rows.is_floating_point() and rows.device.type == "cpu" and not plain.is_sparse
        if dtype not in LARGEST or not floating or not plain.num_columns:
            raise ValueError(
                f"rows of {rows.dtype} and shape {tuple(rows.shape)} on {rows.device} cannot be "
                f"quantised to {dtype}, with scale_columns {scale_columns}\n\n"
                "hint: floating-point rows on the host; torch.int8, torch.float8_e4m3fn or "
                "torch.float8_e5m2"
            )
        exact = rows.float()
        if not are_finite(exact):
            raise ValueError(
                f"rows that are not finite as float32 cannot be quantised to {dtype}\n\n"
                "hint: rows.nan_to_num(), or keep them as they are"
            )
        scales = scales_of(largest(exact, scale_columns), dtype)
        return FeatureTable(quantize(exact, scales, dtype, scale_columns), scales, scale_columns)

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            what = "an ndarray" if isinstance(rows, np.ndarray) else describe(rows)
            raise ValueError(
                f"rows is {what}, but a table of features is a tensor of two dimensions\n\n"
                "hint: torch.from_numpy(array), and .view(-1, 1) for one feature per node"
            )
        if self.way is not None:
            check_kind("way", self.way, KernelConfig, "None takes the default")
        if rows.requires_grad:
            raise ValueError(
                f"a table of features of shape {tuple(rows.shape)} wants a gradient, which gathers "
                "do not carry\n\nhint: rows.detach()"
            )
        if rows.is_neg() or rows.is_conj():
            # the bytes in memory are those of other values
            raise ValueError(
                f"rows is {describe(rows)} whose values are negated or conjugated when they are "
                "read\n\nhint: rows.resolve_neg().resolve_conj()"
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
        self._check_scales()

    def _check_scales(self) -> None:
        scales, per = self.scales, self.scale_columns
        if scales is None and per is None:
            return
        if per is not None:
            check_integer("scale_columns", per, 1, hint="None for a scale a row")
        if scales is not None:
            check_kind("scales", scales, Tensor, "float32, one for each row, or None")
        count = self.num_rows if per is None else -(-self.num_columns // per)
        coded = self.rows.dtype in LARGEST and not self.is_sparse
        if (
            scales is None
            or not coded
            or scales.dtype != torch.float32
            or tuple(scales.shape) != (count,)
            or not scales.is_contiguous()
        ):
            told = None if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
            raise ValueError(
                f"rows of {self.rows.dtype} and shape {tuple(self.rows.shape)} cannot be scaled by "
                f"{told}, with scale_columns {per}\n\n"
                "hint: FeatureTable.quantized(rows) makes codes and their scales"
            )
        if scales.device.type != "meta" and not are_finite(scales.cpu().view(1, -1)):
            raise ValueError(
                f"scales is {describe(scales)} with values that are NaN or infinite\n\n"
                "hint: FeatureTable.quantized(rows) makes codes and their scales"
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
        """Bytes of one row as it is stored, hence as it crosses the bus."""
        return self.num_columns * self.stored_dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements of a minibatch: float32 if the rows are codes with scales."""
        return self.rows.dtype if self.scales is None else torch.float32

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the elements as they are stored."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Bytes of all the rows' elements, without scales; of entries and indices if sparse."""
        if not self.is_sparse:
            return self.num_rows * self.row_bytes
        rows = self.rows
        return sum(part.nbytes for part in (rows.crow_indices(), rows.col_indices(), rows.values()))

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        kind, scaled = "sparse " if self.is_sparse else "", ""
        if self.scales is not None:
            per = self.scale_columns
            scaled = f", a scale for each {'row' if per is None else f'{per} columns'},"
        return (
            f"FeatureTable({self.num_rows} x {self.num_columns} {kind}{self.stored_dtype}{scaled} "
            f"on {self.device}, {self.nbytes} bytes)"
        )

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as a dense (B, D) on the device of `ids`.

        Args:
            ids: (B,) int32 or int64 in [0, N), on the device of the rows; or on a GPU, if the rows
                are inside `pinned`.
            out: (B, D) to write into, on the device of `ids`, of `dtype`; allocated if None. Of
                codes with scales it may also be float16 or bfloat16.
            threads: how many share the work on the host; `torch.get_num_threads()` if None.

        Raises:
            TypeError: `ids` or `out` are no tensors, or `threads` is no integer.
            ValueError, IndexError: as `gcnzc.kernels.gather.gather` does.
        """
        check_gather(ids, out, threads)
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(
            self.rows,
            ids,
            out,
            scales=self.scales_on(ids.device),
            scale_columns=self.scale_columns,
            threads=threads,
            way=self.way,
        )

    def gather_stored(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as they are stored, hence codes without their scales; dense if they are CSR.

        Args:
            ids: as for `gather`.
            out: (B, D) to write into, of `stored_dtype`; allocated if None.
            threads: as for `gather`.

        Raises:
            TypeError, ValueError, IndexError: as `gather` does.
        """
        check_gather(ids, out, threads)
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(self.rows, ids, out, threads=threads)

    def scales_on(self, device: torch.device) -> Tensor | None:
        """The scales on a device, ready for any stream there; copied once."""
        if self.scales is None or self.scales.device == device:
            return self.scales
        with _copying_scales:
            if device not in self._scales:
                self._scales[device] = self.scales.to(device)
            return self._scales[device]

    @cached_property
    def _scales(self) -> dict[torch.device, Tensor]:
        # no field: a table that is made from the fields of this one begins without copies
        return {}

    def to(self, device: torch.device | str) -> "FeatureTable":
        """The table with its rows and scales on a device; itself if they are there.

        Args:
            device: the host, a GPU, or "cuda" for the current one.
        """
        rows = copy_to(self.rows, check_device("device", device))
        if rows is self.rows:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return replace(self, rows=rows, scales=scales)


def check_gather(ids: object, out: object, threads: object) -> None:
    """Check the types of what a table is asked to gather.

    Raises:
        TypeError: `ids` or `out` are no tensors, or `threads` is no integer.
        ValueError: `threads` is out of range.
    """
    check_kind("ids", ids, Tensor, "torch.as_tensor(ids)")
    if out is not None:
        check_kind("out", out, Tensor, "torch.empty of the rows' shape, or None")
    if threads is not None:
        check_integer("threads", threads, 1, THREADS_LIMIT, "None takes torch.get_num_threads()")


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
    view; `copy_to` splits such a copy.

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
    ledger, device = _ledger(), torch.cuda.current_device()
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
    ledger = _ledger()
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
    ledger, rows = _ledger(), table.rows
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
    if source.numel() == 0 or not torch.cuda.is_available() or (ledger := _ledger()) is None:
        return []
    return ledger.stretches(source.data_ptr(), source.nbytes)


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


def _ledger() -> PageLocks | None:
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
