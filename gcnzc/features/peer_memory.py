"""A feature cache sharded over the GPUs of a machine, which read each other's memory.

Rows are assigned to GPUs round-robin by rank: the most accessed row to the first GPU, the next one
to the second. So all GPUs serve about the same number of reads, and the load of their links is
balanced. The gather kernel of `gcnzc.kernels.gather.gpu` reads the memory of other GPUs in place,
over NVLink or PCIe.

Within one process, the CUDA driver enables peer access between GPUs. With one process for each GPU,
each process exports its memory as a handle and sends it to the others, which open it.

Notation: N rows in the table, D columns, H cached rows, G GPUs.
"""

import hashlib
import json
import platform
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from gcnzc.kernels.gather import gather_reference
from gcnzc.kernels.gather.cached import gather_cached, padded_row_bytes
from gcnzc.kernels.gather.cached_rows import (
    CachedRows,
    Peers,
    aligned_view,
    assign_slots,
    copy_rows,
)
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.system.cuda_driver import Driver

# rows on each GPU that are read and compared with the table before a cache is used
NUM_CHECKED_ROWS = 64


ALTERNATIVE = (
    "use a separate cache on each GPU, `gcnzc.cached(table, size, ranking)` in each process; "
    "`nvidia-smi topo -p2p r` shows which GPUs can read each other's memory"
)


@dataclass(frozen=True)
class Handle:
    """A handle with which other processes of a machine open one GPU's share of a sharded cache.

    It consists of plain values, so it can be pickled or sent as text.
    """

    rank: int  # of the process that exported it
    world_size: int  # G
    description: str  # of the cache; it must be equal in all processes
    machine: str
    memory: bytes  # the CUDA driver's handle; empty if a CPU gathers
    offset: int  # of the first cached row from the start of the memory, in bytes

    def to_text(self) -> str:
        """Return the handle as a line of text."""
        return json.dumps(asdict(self) | {"memory": self.memory.hex()})

    @classmethod
    def from_text(cls, text: str) -> "Handle":
        """Return the handle of which `text` is the result of `to_text`."""
        values = json.loads(text)
        return cls(**values | {"memory": bytes.fromhex(values["memory"])})


@dataclass(frozen=True, eq=False)
class Share:
    """One process's share of a sharded cache, before the other shares are opened."""

    rows: Tensor  # (N, D), the table's rows on the host
    ids_by_gpu: Sequence[Tensor]  # ids of the rows on each GPU, on the host
    memory: Tensor  # (H / G, stride) bytes on this GPU
    handle: Handle


def split_round_robin(values: Tensor, gpus: int) -> list[Tensor]:
    """Split ranked values, such as ids or counts, (H,), into one part for each GPU."""
    return [values[rank::gpus] for rank in range(gpus)]


def make_handle(ids: Tensor, num_rows: int, row_bytes: int, rank: int, world_size: int) -> Handle:
    """Return the handle of a share without GPU memory, as for processes that gather on a CPU.

    Args:
        ids: (H,) ids of the cached rows, by descending score, on the host.
        num_rows: N.
        row_bytes: bytes of one row as it is stored.
        rank: of this process.
        world_size: number of processes, G.

    Raises:
        ValueError: `rank` is not in [0, world_size).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} with a world_size of {world_size}")
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
    description = f"{len(ids)} of {num_rows} rows of {row_bytes} B, set {digest}"
    return Handle(rank, world_size, description, platform.node(), b"", 0)


def check_handles(own: Handle, handles: Sequence[Handle]) -> list[Handle]:
    """Check that handles are those of all ranks, of one cache on one machine; return them by rank.

    Raises:
        ValueError: a handle is missing or duplicate, or processes cache other rows or tables.
        RuntimeError: a process runs on another machine.
    """
    found = sorted(handles, key=lambda handle: handle.rank)
    ranks = [handle.rank for handle in found]
    if ranks != list(range(own.world_size)) or {each.world_size for each in found} != {
        own.world_size
    }:
        raise ValueError(
            f"handles of ranks {ranks} of a cache that is sharded over {own.world_size} GPUs"
        )
    for handle in found:
        if handle.machine != own.machine:
            raise RuntimeError(
                f"the share of rank {handle.rank} is on {handle.machine}, and this process is on "
                f"{own.machine}\n\nhint: a cache is sharded over the GPUs of one machine; each "
                "machine needs a cache of its own"
            )
        if handle.description != own.description:
            raise ValueError(
                f"the share of rank {handle.rank} caches {handle.description}; this process caches "
                f"{own.description}\n\n"
                "hint: all ranks need the same size, ranking and seed, and the table from one file"
            )
    return found


def make_sharded_rows(
    rows: Tensor,
    ids: Tensor,
    devices: Sequence[torch.device],
    driver: Driver | None = None,
) -> list[CachedRows]:
    """Copy rows of a table to several GPUs of this process, which read each other's memory.

    Args:
        rows: (N, D), each row contiguous, page-locked on the host.
        ids: (H,) int64 in [0, N), unique, by descending score, on the host.
        devices: G different GPUs, at least 2.
        driver: the CUDA driver; the machine's if None.

    Returns:
        The cached rows as each GPU reads them. Each of them keeps the memory of all GPUs.

    Raises:
        RuntimeError: a GPU cannot read another's memory, reads wrong bytes from it, or has too
            little memory.
    """
    pairs = list(permutations(devices, 2))
    for device, peer in pairs:
        if not torch.cuda.can_device_access_peer(device, peer):
            raise RuntimeError(f"{device} cannot read the memory of {peer}\n\nhint: {ALTERNATIVE}")
    driver = driver or _driver()
    for device, peer in pairs:
        code = driver.enable_peer(device.index, peer.index)
        if code != 0:
            raise _no_access(device, str(peer), driver, code)
    ids_by_gpu = split_round_robin(ids, len(devices))
    memories = [
        _copy_rows(rows, own_ids, device, driver)[1]
        for own_ids, device in zip(ids_by_gpu, devices, strict=True)
    ]
    # the copies must be complete before another GPU reads them
    driver.synchronize()
    slots, addresses = (
        assign_slots(ids_by_gpu, len(rows)),
        [memory.data_ptr() for memory in memories],
    )
    copies = [
        CachedRows(slots.to(device), memory, Peers(_int64(addresses, device), own, tuple(memories)))
        for own, (device, memory) in enumerate(zip(devices, memories, strict=True))
    ]
    for cached in copies:
        _check_reads(rows, ids_by_gpu, cached)
    return copies


def export_share(
    rows: Tensor,
    ids: Tensor,
    device: torch.device,
    handle: Handle,
    driver: Driver | None = None,
) -> Share:
    """Copy one GPU's share of a sharded cache to it, in memory that other processes can open.

    Args:
        rows: see `make_sharded_rows`.
        ids: see `make_sharded_rows`; the same in all processes.
        device: the GPU.
        handle: made by `make_handle`; it determines which rows are copied.
        driver: the CUDA driver; the machine's if None.

    Raises:
        RuntimeError: the GPU has too little memory, or the driver cannot export it.
    """
    driver = driver or _driver()
    ids_by_gpu = split_round_robin(ids, handle.world_size)
    whole, memory = _copy_rows(rows, ids_by_gpu[handle.rank], device, driver)
    code, exported = driver.export(device.index, whole.data_ptr())
    if code != 0:
        raise RuntimeError(
            f"other processes cannot read the memory of {device}: {driver.error_name(code)}\n\n"
            f"hint: {ALTERNATIVE}"
        )
    # the copies must be complete before another process receives the handle
    driver.synchronize()
    stride_bytes = rows.stride(0) * rows.element_size()
    # a copy has the alignment of its row in the exporting process, which must be that of all tables
    alignment = f"{stride_bytes} B apart, the first {rows.data_ptr() % LINE_BYTES} B after a line"
    offset = memory.data_ptr() - whole.data_ptr() if len(memory) else 0
    description = f"{handle.description}, {alignment}"
    handle = replace(handle, description=description, memory=exported, offset=offset)
    return Share(rows, ids_by_gpu, memory, handle)


def open_shares(
    own_share: Share, handles: Sequence[Handle], driver: Driver | None = None
) -> CachedRows:
    """Open the shares of the other processes.

    Args:
        own_share: the share of this process.
        handles: of all ranks including this one, returned by `check_handles`.
        driver: the CUDA driver; the machine's if None.

    Returns:
        The cached rows as this process's GPU reads them. They are valid for as long as the other
        processes keep their shares.

    Raises:
        RuntimeError: the GPU cannot read another's memory, or reads wrong bytes from it.
    """
    driver, device = driver or _driver(), own_share.memory.device
    slots, peers = assign_slots(own_share.ids_by_gpu, len(own_share.rows)).to(device), None
    if len(handles) > 1:
        references: list[object] = [own_share.memory]
        addresses = []
        for handle in handles:
            if handle.rank == own_share.handle.rank:
                # CUDA does not open a handle in the process that exported it
                addresses.append(own_share.memory.data_ptr())
                continue
            mapping = _Mapping(driver, device, handle)
            references.append(mapping)
            addresses.append(mapping.address + handle.offset)
        peers = Peers(_int64(addresses, device), own_share.handle.rank, tuple(references))
    copies = CachedRows(slots, own_share.memory, peers)
    _check_reads(own_share.rows, own_share.ids_by_gpu, copies)
    return copies


class _Mapping:
    """Another process's GPU memory, open until this object is deleted."""

    def __init__(self, driver: Driver, device: torch.device, handle: Handle) -> None:
        code, self.address = driver.open(device.index, handle.memory)
        if code != 0:
            raise _no_access(device, f"rank {handle.rank}'s GPU", driver, code)
        weakref.finalize(self, driver.close, device.index, self.address).atexit = False


def _copy_rows(
    rows: Tensor, ids: Tensor, device: torch.device, driver: Driver
) -> tuple[Tensor, Tensor]:
    """Copy rows to GPU memory that other processes can open.

    Returns:
        The allocated memory, and its part with the copies.
    """
    padded_bytes = padded_row_bytes(rows)
    num_bytes = len(ids) * padded_bytes + LINE_BYTES
    code, whole = driver.allocate(device.index, num_bytes)
    if whole is None:
        raise RuntimeError(
            f"no {num_bytes} bytes for cached rows on {device}: {driver.error_name(code)}\n\n"
            "hint: a smaller cache; `nvidia-smi` shows what else takes memory there"
        )
    whole.zero_()
    memory = aligned_view(whole, len(ids), padded_bytes)
    copy_rows(rows, ids, memory)
    return whole, memory


def _check_reads(rows: Tensor, ids_by_gpu: Sequence[Tensor], copies: CachedRows) -> None:
    """Compare some rows on each GPU, as this GPU reads them, with the table.

    Some machines report peer access, but reads of a peer's memory return wrong bytes.
    """
    device = copies.memory.device
    for rank, cached_ids in enumerate(ids_by_gpu):
        ids = cached_ids[:NUM_CHECKED_ROWS]
        found = gather_cached(rows, ids.to(device), copies).cpu()
        expected = gather_reference(rows, ids)
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(
                f"{device} reads rows from the GPU of rank {rank} that differ from this process's "
                "table\n\nhint: do all processes have the same table? If so, an IOMMU may prevent "
                f"peer access; {ALTERNATIVE}"
            )


def _no_access(device: torch.device, peer: str, driver: Driver, code: int) -> RuntimeError:
    return RuntimeError(
        f"{device} cannot read the memory of {peer}: {driver.error_name(code)}\n\n"
        f"hint: {ALTERNATIVE}"
    )


def _int64(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@cache
def _driver() -> Driver:
    return Driver()
