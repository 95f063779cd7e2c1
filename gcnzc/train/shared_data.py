"""Share tensors in host memory between the workers of a machine.

The first worker of a machine allocates anonymous memory with memfd_create(2), and the others map it
through /proc/PID/fd, see proc(5). No memory can leak if a process is killed: the kernel frees it
with the last process that maps it.
"""

import io
import json
import logging
import math
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gcnzc.datasets import store
from gcnzc.datasets.rows import Allocate, Array
from gcnzc.exchange import Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar, all_gather_text
from gcnzc.features.pinning import needs_copy
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import load
from gcnzc.system.files import create_memory_file
from gcnzc.system.host_memory import available_bytes

T = TypeVar("T")

_log = logging.getLogger("gcnzc")


def load_shared(path: str | Path, group: Group, *, allow_nan: bool = False) -> Dataset:
    """Load a graph on all workers, with one copy in the memory of each machine.

    A folder that is prepared on all machines is memory-mapped by each worker, and they share the
    pages. Any other graph is read by the first worker of each machine into shared memory, which the
    others map. Reading may take longer than the time limit of a request, because the first worker
    reports its progress. A write to such a tensor is visible on all workers of the machine.

    Args:
        path: see `gcnzc.load`; the same on all workers, but each machine reads its own files.
        group: all workers.
        allow_nan: see `gcnzc.load`.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `gcnzc.load` does; on all workers if on one.
        RuntimeError: a worker cannot open the memory of the first worker of its machine, or there
            is too little memory.
        WorkerLost: another worker has ended or does not respond.
    """
    path = Path(path)
    if group.world_size == 1:
        return load(path, allow_nan=allow_nan)
    group.set_status(0, "loading")
    if all(run(all_gather_scalar(int(store.is_prepared(path))), group)):
        with joint_work(group):
            data = load(path, allow_nan=allow_nan)
        return data
    return share_result(lambda allocate: load(path, allow_nan=allow_nan, allocate=allocate), group)


def share_result(make: Callable[[Allocate], T], group: Group) -> T:
    """Call `make` on the first worker of each machine, and return its result on all workers.

    All tensors in the result are in memory that the workers of a machine share; other objects are
    pickled.

    Args:
        make: called with a function that allocates arrays in shared memory. Tensors in other memory
            are copied to shared memory. All tensors in the result must be on the host, strided or
            CSR.
        group: all workers.

    Raises:
        RuntimeError: a worker cannot open the memory of the first worker of its machine, or there
            is too little memory.
        WorkerLost: another worker has ended or does not respond.
        Exception: an error of `make`, on all workers.
    """
    with closing(_SharedAllocator()) as allocator:
        own = _Handle(0, 0, 0)
        with joint_work(group) as work:
            if group.local_rank == 0:
                own = work.run_in_thread(
                    lambda: allocator.pickle_to_shared_memory(make(allocator.allocate))
                )
        handle = _of_first(own, group)
        with joint_work(group):
            memory = allocator.memory_of if group.local_rank == 0 else _map_memory
            value = _Unpickler(memory(handle), handle.pid, memory).load()
        # all workers have mapped it, so the file descriptors may be closed
        return value


def share_copy(table: FeatureTable, group: Group) -> FeatureTable:
    """Return `table`, or one copy per machine where the driver cannot lock it in place.

    Some drivers do not lock memory that is mapped read-only, as a prepared folder is. Without this
    function `gcnzc.pinned` would make a copy on each worker.

    Args:
        table: the same on all workers.
        group: of all workers.

    Raises:
        RuntimeError: CUDA cannot lock even one page, or there is too little memory; on all
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
    rows = share_result(lambda _: table.rows if is_copied else None, group)
    return table if rows is None else replace(table, rows=rows)


def shared_empty(shape: Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """Allocate a host tensor that all workers of a machine share; elements are not initialized.

    It is a plain tensor if the group has one worker or the tensor has no elements. After the next
    collective, a worker sees what the other workers wrote before it.

    Args:
        shape: the shape, the same on all workers.
        dtype: the dtype, the same on all workers.
        group: all workers.

    Raises:
        RuntimeError: see `share_result`.
        WorkerLost: another worker has ended or does not respond.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if group.world_size == 1 or num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    with closing(_SharedAllocator()) as allocator:
        own = _Handle(0, 0, 0)
        with joint_work(group):
            if group.local_rank == 0:
                own = allocator.handle(allocator.empty(num_bytes))
        handle = _of_first(own, group)
        with joint_work(group):
            memory = allocator.memory_of(handle) if group.local_rank == 0 else _map_memory(handle)
        return memory.view(dtype).view(tuple(shape))


def first_workers(group: Group) -> tuple[int, ...]:
    """Return, for each rank, the rank of the first worker of its machine."""
    return run(all_gather_scalar(group.rank - group.local_rank), group)


@dataclass(frozen=True)
class _Handle:
    """A handle of anonymous memory, by which another process can open it."""

    pid: int
    fd: int
    inode: int  # detects that the same pid and fd are another file


def _of_first(own: _Handle, group: Group) -> _Handle:
    """Return the handle of the first worker of this machine."""
    texts = run(all_gather_text(json.dumps(astuple(own))), group)
    return _Handle(*json.loads(texts[group.rank - group.local_rank]))


def _map_memory(handle: _Handle) -> Tensor:
    """Map the memory of another process of this machine, as a (bytes,) uint8 tensor."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if os.stat(path).st_ino != handle.inode:
            raise OSError(f"{path} is another file")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        finally:
            os.close(file)
    except OSError as error:
        raise RuntimeError(
            f"process {os.getpid()} cannot open the memory of the first worker of its machine, "
            f"process {handle.pid}: {error}\n\nhint: run the workers of a machine as one "
            "user, in one container with /proc; LOCAL_RANK numbers the workers of one machine"
        ) from error


_Memory: TypeAlias = Callable[[_Handle], Tensor]


class _SharedAllocator:
    """Allocates memory that other processes can open until it is closed."""

    def __init__(self) -> None:
        self.allocated: dict[int, tuple[Tensor, _Handle]] = {}  # by address
        self.copies: dict[tuple[int, int], Tensor] = {}  # of storages, by address and bytes

    def close(self) -> None:
        """Close the files of the memory; its mappings remain valid."""
        for _, handle in self.allocated.values():
            os.close(handle.fd)

    def empty(self, num_bytes: int) -> Tensor:
        """Allocate a (num_bytes,) uint8 tensor of zeros."""
        left = available_bytes()
        if num_bytes > left:
            raise RuntimeError(
                f"{num_bytes:,} bytes of shared memory do not fit into the {left:,} bytes that are "
                "free on this machine\n\nhint: `gcnzc prepare` writes folders that need no copy"
            )
        file = create_memory_file("gcnzc")
        os.ftruncate(file, num_bytes)
        memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        handle = _Handle(os.getpid(), file, os.fstat(file).st_ino)
        self.allocated[memory.data_ptr()] = memory, handle
        return memory

    def handle(self, memory: Tensor) -> _Handle:
        """Return the handle of a tensor at the start of memory that `empty` allocated."""
        return self.allocated[memory.data_ptr()][1]

    def memory_of(self, handle: _Handle) -> Tensor:
        """Return the memory that has a handle."""
        return next(memory for memory, known in self.allocated.values() if known == handle)

    def allocate(self, name: str, size: int, dtype: Any) -> Array:
        """Allocate an array in shared memory; implements `gcnzc.datasets.rows.Allocate`."""
        probe = torch.empty(0, dtype=torch.uint8).numpy().view(dtype)
        memory = self.empty(max(size * probe.itemsize, 1))
        return memory[: size * probe.itemsize].numpy().view(dtype)

    def pickle_to_shared_memory(self, value: object) -> _Handle:
        """Pickle `value` to shared memory, with handles in place of its tensors."""
        file = io.BytesIO()
        _Pickler(file, self).dump(value)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return self.handle(self.empty(len(data)).copy_(data))

    def storage(self, tensor: Tensor) -> Tensor:
        """Return shared memory with the storage of `tensor`, which is copied if needed."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self.allocated:
            return self.allocated[address][0]
        key = address, num_bytes
        if key not in self.copies:
            copy = self.empty(max(num_bytes, 1))
            copy[:num_bytes] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.copies[key] = copy
        return self.copies[key]


class _Pickler(pickle.Pickler):
    """A pickler that writes the handles and layouts of tensors instead of their elements."""

    def __init__(self, file: io.BytesIO, allocator: _SharedAllocator) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.allocator = allocator

    def persistent_id(self, value: object) -> Any:
        """Return the memory and the layout of a strided tensor; None for other objects."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        handle = self.allocator.handle(self.allocator.storage(value))
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return handle.fd, handle.inode, value.dtype, *layout

    def reducer_override(self, value: object) -> Any:
        """Reduce a CSR tensor to its strided parts."""
        if not isinstance(value, Tensor):
            return NotImplemented
        parts = value.crow_indices(), value.col_indices(), value.values()
        return _csr, (*parts, tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    """Loads the data of a `_Pickler` of the same run; it is not safe for other data."""

    def __init__(self, data: Tensor, pid: int, memory: _Memory) -> None:
        super().__init__(io.BytesIO(data.numpy().tobytes()))
        self.pid, self.memory = pid, memory
        self.known: dict[_Handle, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the tensor in shared memory that `persistent_id` described."""
        fd, inode, dtype, shape, stride, offset = pid
        handle = _Handle(self.pid, fd, inode)
        if handle not in self.known:
            self.known[handle] = self.memory(handle)
        memory = self.known[handle]
        whole = len(memory) // dtype.itemsize * dtype.itemsize
        return memory[:whole].view(dtype).as_strided(shape, stride, offset)


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        # torch warns once that sparse CSR is in beta
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)
