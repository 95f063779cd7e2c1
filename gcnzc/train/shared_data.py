"""Tensors in shared memory, made by one rank of each machine.

The first worker of a machine makes memory without a name, by memfd_create(2), and the others map it
by way of /proc/PID/fd, see proc(5). So nothing can be left behind, whoever is killed at whatever
moment: the kernel frees the memory with the last process that maps it.
"""

import ctypes
import io
import logging
import math
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gcnzc.datasets import store
from gcnzc.datasets.rows import Allocate, Array
from gcnzc.exchange import Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.pinning import needs_copy
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import load
from gcnzc.system.host_memory import available_bytes

T = TypeVar("T")


# of the kernel's linux/memfd.h
_MFD_CLOEXEC = 1


_log = logging.getLogger("gcnzc")


def load_shared(path: str | Path, group: Group, *, allow_nan: bool = False) -> Dataset:
    """Load a graph for all workers, so that each machine holds it once.

    A prepared folder is mapped by each worker: they share the pages. Anything else is read by the
    first worker of each machine, features straight into shared memory, and mapped by the others.
    That may take long: meanwhile the first worker says that it is alive. Tensors that are read so
    are the same memory on all workers of a machine: writing to one changes it for all.

    Args:
        path: see `gcnzc.load`; the same on all workers, each machine has its own files.
        group: of all workers.
        allow_nan: see `gcnzc.load`.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `gcnzc.load` does, on all workers if on one.
        RuntimeError: the workers of a machine cannot open each other's memory.
        WorkerLost: another worker is gone.
    """
    path = Path(path)
    if group.world_size == 1:
        return load(path, allow_nan=allow_nan)
    group.set_status(0, "loading")
    if all(run(all_gather_scalar(int(store.is_prepared(path))), group)):
        with joint_work(group):
            data = load(path, allow_nan=allow_nan)
        return data
    return shared(lambda allocate: load(path, allow_nan=allow_nan, allocate=allocate), group)


def shared(make: Callable[[Allocate], T], group: Group) -> T:
    """What `make` returns on the first worker of each machine, for all workers of that machine.

    Its tensors, at any depth of it, lie once in shared memory; all else is pickled.

    Args:
        make: called with what gives arrays that are in shared memory from the start; tensors on
            memory of any other kind are copied into it. They are strided or CSR, on the host.
        group: of all workers.

    Raises:
        RuntimeError: the workers of a machine cannot open each other's memory, or there is too
            little of it.
        WorkerLost: another worker is gone.
        Exception: what `make` raises, on all workers.
    """
    with _Maker() as maker:
        own = _Handle(0, 0, 0)
        with joint_work(group) as work:
            if group.local_rank == 0:
                own = work.run_in_thread(lambda: maker.placed(make(maker.allocate)))
        handle = _of_first(own, group)
        with joint_work(group):
            memory = maker.memory_of if group.local_rank == 0 else _opened
            value = _Unpickler(memory(handle), handle.pid, memory).load()
        # all have it open now, so its makers may close it
        return value


def share_copy(table: FeatureTable, group: Group) -> FeatureTable:
    """Return `table`, or one copy per machine where the driver cannot lock it in place.

    Some drivers do not lock memory that is mapped read-only, as a prepared folder is. Without this
    function `gcnzc.pinned` would make a copy on each worker.

    Args:
        table: the same on all workers.
        group: of all workers.

    Raises:
        RuntimeError: CUDA will not lock a single page, or there is too little memory; on all
            workers if on one.
        WorkerLost: another worker is gone.
    """
    if group.world_size == 1:
        return table
    with joint_work(group):
        needs = int(needs_copy(table))
    firsts, needing = first_workers(group), run(all_gather_scalar(needs), group)
    if not any(needing):
        return table
    own = firsts[group.rank]
    is_copied = any(need for need, first in zip(needing, firsts, strict=True) if first == own)
    if is_copied and group.local_rank == 0:
        _log.warning(
            "the driver will not lock features that are mapped read-only: copying %s bytes into "
            "memory that the workers of this machine share",
            f"{table.nbytes:,}",
        )
    # a collective call, also for workers of machines that need no copy
    rows = shared(lambda _: table.rows if is_copied else None, group)
    return table if rows is None else replace(table, rows=rows)


def shared_empty(shape: Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """A tensor on the host that all workers of a machine read and write; alone, a plain one.

    Args:
        shape: the same on all workers, as is `dtype`.
        dtype: of the tensor.
        group: of all workers. What one writes, others may read after their next vote.

    Raises:
        RuntimeError: as for `shared`.
        WorkerLost: another worker is gone.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if group.world_size == 1 or num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    with _Maker() as maker:
        own = _Handle(0, 0, 0)
        with joint_work(group):
            if group.local_rank == 0:
                own = maker.handle(maker.empty(num_bytes))
        handle = _of_first(own, group)
        with joint_work(group):
            memory = maker.memory_of(handle) if group.local_rank == 0 else _opened(handle)
        return memory.view(dtype).view(tuple(shape))


def first_workers(group: Group) -> tuple[int, ...]:
    """For each worker, by rank, the rank of the first worker of its machine."""
    return run(all_gather_scalar(group.rank - group.local_rank), group)


@dataclass(frozen=True)
class _Handle:
    """Memory without a name, as another process can open it."""

    pid: int
    fd: int
    inode: int  # tells it from what another process has under the same numbers


def _of_first(own: _Handle, group: Group) -> _Handle:
    """The handle that the first worker of this machine gives."""
    first = group.rank - group.local_rank
    place = run(all_gather_scalar(own.pid << 32 | own.fd), group)[first]
    inode = run(all_gather_scalar(own.inode), group)[first]
    return _Handle(place >> 32, place & 0xFFFFFFFF, inode)


def _opened(handle: _Handle) -> Tensor:
    """(bytes,) uint8: memory of another process of this machine."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if os.stat(path).st_ino != handle.inode:
            raise OSError(f"{path} is something else")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        finally:
            os.close(file)
    except OSError as error:
        raise RuntimeError(
            f"process {os.getpid()} cannot open the memory of the first worker of its machine, "
            f"process {handle.pid}: {error}\n\nhint: workers of one machine run as one user, in "
            "one container, with /proc; and LOCAL_RANK counts those of one machine"
        ) from error


def _without_name(label: str) -> int:
    """The descriptor of memory of no bytes yet; it is closed in programs that this one starts."""
    # os.memfd_create is missing where Python was built for an older C library than the one that
    # runs, as uv's was: https://github.com/astral-sh/uv/issues/15081
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.memfd_create(label.encode(), _MFD_CLOEXEC)
    if file < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"memfd_create: {os.strerror(error)}")
    return int(file)


_Memory: TypeAlias = Callable[[_Handle], Tensor]


class _Maker:
    """Makes memory that other processes can open until the end of the `with`."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, _Handle]] = {}  # by address
        self.copies: dict[tuple[int, int], Tensor] = {}  # of storages, by address and bytes

    def __enter__(self) -> "_Maker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # whoever has mapped the memory keeps it
        for _, handle in self.made.values():
            os.close(handle.fd)

    def empty(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8, all zero."""
        left = available_bytes()
        if num_bytes > left:
            raise RuntimeError(
                f"{num_bytes:,} bytes for the workers of this machine to share do not fit into the "
                f"{left:,} that are left\n\nhint: `gcnzc prepare` writes a folder that is opened "
                "without being read into memory"
            )
        file = _without_name("gcnzc")
        os.ftruncate(file, num_bytes)
        memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        handle = _Handle(os.getpid(), file, os.fstat(file).st_ino)
        self.made[memory.data_ptr()] = memory, handle
        return memory

    def handle(self, memory: Tensor) -> _Handle:
        """What others open it by; `memory` begins where one of ours does."""
        return self.made[memory.data_ptr()][1]

    def memory_of(self, handle: _Handle) -> Tensor:
        """The memory that was made under this handle."""
        return next(memory for memory, known in self.made.values() if known == handle)

    def allocate(self, name: str, size: int, dtype: Any) -> Array:
        """The `Allocate` whose arrays lie in such memory."""
        probe = torch.empty(0, dtype=torch.uint8).numpy().view(dtype)
        memory = self.empty(max(size * probe.itemsize, 1))
        return memory[: size * probe.itemsize].numpy().view(dtype)

    def placed(self, value: object) -> _Handle:
        """The handle of the pickled `value`, whose tensors have handles in it."""
        file = io.BytesIO()
        _Pickler(file, self).dump(value)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return self.handle(self.empty(len(data)).copy_(data))

    def storage(self, tensor: Tensor) -> Tensor:
        """Memory of ours that holds the storage of `tensor`."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self.made:
            return self.made[address][0]
        key = address, num_bytes
        if key not in self.copies:
            copy = self.empty(max(num_bytes, 1))
            copy[:num_bytes] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.copies[key] = copy
        return self.copies[key]


class _Pickler(pickle.Pickler):
    """Writes where tensors lie, in place of what they hold."""

    def __init__(self, file: io.BytesIO, maker: _Maker) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.maker = maker

    def persistent_id(self, value: object) -> Any:
        """Of a strided tensor: its memory, and where in it the elements are."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        handle = self.maker.handle(self.maker.storage(value))
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return handle.fd, handle.inode, value.dtype, *layout

    def reducer_override(self, value: object) -> Any:
        """Of a CSR tensor: its parts, which are strided."""
        if not isinstance(value, Tensor):
            return NotImplemented
        parts = value.crow_indices(), value.col_indices(), value.values()
        return _csr, (*parts, tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote; of one's own workers only."""

    def __init__(self, data: Tensor, pid: int, memory: _Memory) -> None:
        super().__init__(io.BytesIO(data.numpy().tobytes()))
        self.pid, self.memory = pid, memory
        self.known: dict[_Handle, Tensor] = {}

    def persistent_load(self, told: Any) -> Tensor:
        """The tensor on shared memory."""
        fd, inode, dtype, shape, stride, offset = told
        handle = _Handle(self.pid, fd, inode)
        if handle not in self.known:
            self.known[handle] = self.memory(handle)
        memory = self.known[handle]
        whole = len(memory) // dtype.itemsize * dtype.itemsize
        return memory[:whole].view(dtype).as_strided(shape, stride, offset)


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        # torch says once that sparse CSR is in beta
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)
