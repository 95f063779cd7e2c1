"""A feature cache sharded over the GPUs of a machine, which read each other's memory.

The rows go round by rank: the hottest to the first GPU, the next to the second. So each GPU serves
about as many reads as any other, and their links carry alike. GPUs read each other's memory over
NVLink or PCIe in place, within the one kernel of `gcnzc.kernels.gather.gpu`.

Within a process the driver opens one GPU's memory to another. Between processes, one a GPU, each
makes a handle of its memory, which it sends to the others by any means and they open.

Letters: N rows in the table, D columns, H hot rows, G GPUs.
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
from gcnzc.kernels.gather.cached import gather_cached, room_bytes
from gcnzc.kernels.gather.cached_rows import CachedRows, Peers, copy_rows, on_lines, slots_of
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.system.cuda_driver import Driver

LOOKED_AT = 64  # rows of each memory, that are read once and compared before a set is used


INSTEAD = (
    "let each GPU have copies of its own, `gcnzc.cached(table, size, ranking)` in each process; "
    "`nvidia-smi topo -p2p r` shows which GPUs read which"
)


@dataclass(frozen=True)
class Handle:
    """How other processes of a machine find one GPU's share of a split hot set.

    It is made of plain values, so that pickle and any way of sending serve.
    """

    number: int  # of the GPU, from 0
    of: int  # G
    about: str  # of what all processes must have the same
    machine: str
    memory: bytes  # what the driver opens; empty where a CPU gathers
    offset: int  # bytes of that memory before the first copy

    def to_text(self) -> str:
        """The handle as a line of text."""
        return json.dumps(asdict(self) | {"memory": self.memory.hex()})

    @classmethod
    def from_text(cls, text: str) -> "Handle":
        """The handle that `to_text` made into `text`."""
        values = json.loads(text)
        return cls(**values | {"memory": bytes.fromhex(values["memory"])})


@dataclass(frozen=True, eq=False)
class Share:
    """The copies that one process has, before it knows of the others'."""

    rows: Tensor  # (N, D), the table's, on the host
    parts: Sequence[Tensor]  # ids of the rows that each GPU has, on the host
    memory: Tensor  # (H / G, stride) bytes on this GPU
    handle: Handle


def parts_of(hot: Tensor, gpus: int) -> list[Tensor]:
    """Which rows each GPU has: those of `hot` (H,), hottest first, go round."""
    return [hot[number::gpus] for number in range(gpus)]


def handle_of(hot: Tensor, num_rows: int, row_bytes: int, number: int, of: int) -> Handle:
    """The handle of a share that no GPU has: where CPUs gather, and count.

    Args:
        hot: (H,) ids, the hottest first, on the host.
        num_rows: N.
        row_bytes: of one row as it is stored.
        number: of the share.
        of: G.

    Raises:
        ValueError: there is no share of that number.
    """
    if not 0 <= number < of:
        raise ValueError(
            f"no share number {number} of a hot set that {of} GPUs split\n\n"
            "hint: shares are numbered from 0; `of` is the number of processes on this machine"
        )
    digest = hashlib.sha256(hot.numpy().tobytes()).hexdigest()[:16]
    about = f"{len(hot)} of {num_rows} rows of {row_bytes} B, set {digest}"
    return Handle(number, of, about, platform.node(), b"", 0)


def sorted_handles(own: Handle, handles: Sequence[Handle]) -> list[Handle]:
    """The handles of all shares by number, if they are of one set on one machine.

    Raises:
        ValueError: one is missing or is there twice, or processes have other rows or tables.
        RuntimeError: one is of another machine.
    """
    found = sorted(handles, key=lambda handle: handle.number)
    numbers = [handle.number for handle in found]
    if numbers != list(range(own.of)) or {handle.of for handle in found} != {own.of}:
        raise ValueError(
            f"handles of shares {numbers} of a hot set that {own.of} GPUs split\n\n"
            "hint: one of each is needed, this process's own among them"
        )
    for handle in found:
        if handle.machine != own.machine:
            raise RuntimeError(
                f"share {handle.number} lies on {handle.machine}, and this process is on "
                f"{own.machine}\n\nhint: GPUs of one machine split a hot set; each machine has one"
            )
        if handle.about != own.about:
            raise ValueError(
                f"share {handle.number} is of {handle.about}; this process has {own.about}\n\n"
                "hint: all need the same size, ranking and seed, and the table from one file"
            )
    return found


def split(
    rows: Tensor,
    hot: Tensor,
    devices: Sequence[torch.device],
    driver: Driver | None = None,
) -> list[CachedRows]:
    """Split copies of rows of a table over several GPUs of this process.

    Args:
        rows: (N, D), each row contiguous, page-locked on the host.
        hot: (H,) int64 in [0, N), all different, the hottest first, on the host.
        devices: the GPUs, G of them, above 1.
        driver: of the machine, if None.

    Returns:
        For each GPU what it gathers by. All of them keep all of the memory.

    Raises:
        RuntimeError: a GPU cannot read another's memory, or reads other bytes than are there, or
            has too little memory.
    """
    pairs = list(permutations(devices, 2))
    for device, peer in pairs:
        if not torch.cuda.can_device_access_peer(device, peer):
            raise RuntimeError(f"{device} cannot read the memory of {peer}\n\nhint: {INSTEAD}")
    driver = driver or _driver()
    for device, peer in pairs:
        code = driver.enable_peer(device.index, peer.index)
        if code != 0:
            raise _no_way(device, str(peer), driver, code)
    parts = parts_of(hot, len(devices))
    memories = [
        _copied(rows, ids, device, driver)[1] for ids, device in zip(parts, devices, strict=True)
    ]
    # the copies are there before another GPU reads them
    driver.synchronize()
    slots, addresses = slots_of(parts, len(rows)), [memory.data_ptr() for memory in memories]
    copies = [
        CachedRows(slots.to(device), memory, Peers(_int64(addresses, device), own, tuple(memories)))
        for own, (device, memory) in enumerate(zip(devices, memories, strict=True))
    ]
    for each in copies:
        _check_same(rows, parts, each)
    return copies


def share(
    rows: Tensor,
    hot: Tensor,
    device: torch.device,
    handle: Handle,
    driver: Driver | None = None,
) -> Share:
    """Copy one GPU's share of a hot set to it, for other processes to read.

    Args:
        rows: as for `split`.
        hot: as for `split`, the same in all processes.
        device: the GPU.
        handle: which share it is; made by `handle_of`.
        driver: of the machine, if None.

    Raises:
        RuntimeError: the GPU has too little memory, or the driver shares none.
    """
    driver = driver or _driver()
    parts = parts_of(hot, handle.of)
    whole, memory = _copied(rows, parts[handle.number], device, driver)
    code, opened = driver.export(device.index, whole.data_ptr())
    if code != 0:
        raise RuntimeError(
            f"other processes cannot read the memory of {device}: {driver.error_name(code)}\n\n"
            f"hint: {INSTEAD}"
        )
    # the copies are there before the handle is sent
    driver.synchronize()
    stride_bytes = rows.stride(0) * rows.element_size()
    # a copy lies behind a line as the row does in the table of the process that made it
    lies = f"{stride_bytes} B apart, the first {rows.data_ptr() % LINE_BYTES} B after a line"
    offset = memory.data_ptr() - whole.data_ptr() if len(memory) else 0
    made = replace(handle, about=f"{handle.about}, {lies}", memory=opened, offset=offset)
    return Share(rows, parts, memory, made)


def join(mine: Share, handles: Sequence[Handle], driver: Driver | None = None) -> CachedRows:
    """Open the other processes' shares.

    Args:
        mine: this process's.
        handles: of all, its own among them; from `sorted_handles`.
        driver: of the machine, if None.

    Returns:
        What this process's GPU gathers by, as long as the others keep their shares.

    Raises:
        RuntimeError: the GPU cannot read another's memory, or reads other bytes than are there.
    """
    driver, device = driver or _driver(), mine.memory.device
    slots, peers = slots_of(mine.parts, len(mine.rows)).to(device), None
    if len(handles) > 1:
        kept: list[object] = [mine.memory]
        addresses = []
        for handle in handles:
            if handle.number == mine.handle.number:
                # a process cannot open its own
                addresses.append(mine.memory.data_ptr())
                continue
            opened = _Opened(driver, device, handle)
            kept.append(opened)
            addresses.append(opened.address + handle.offset)
        peers = Peers(_int64(addresses, device), mine.handle.number, tuple(kept))
    copies = CachedRows(slots, mine.memory, peers)
    _check_same(mine.rows, mine.parts, copies)
    return copies


class _Opened:
    """Another process's memory, open as long as this is kept."""

    def __init__(self, driver: Driver, device: torch.device, handle: Handle) -> None:
        code, self.address = driver.open(device.index, handle.memory)
        if code != 0:
            raise _no_way(device, f"process {handle.number}'s GPU", driver, code)
        weakref.finalize(self, driver.close, device.index, self.address).atexit = False


def _copied(
    rows: Tensor, ids: Tensor, device: torch.device, driver: Driver
) -> tuple[Tensor, Tensor]:
    """Memory of a GPU that others can open, and the copies in it."""
    room = room_bytes(rows)
    num_bytes = len(ids) * room + LINE_BYTES
    code, whole = driver.allocate(device.index, num_bytes)
    if whole is None:
        raise RuntimeError(
            f"no {num_bytes} bytes for hot rows on {device}: {driver.error_name(code)}\n\n"
            "hint: a smaller hot set; `nvidia-smi` shows what else takes memory there"
        )
    whole.zero_()
    memory = on_lines(whole, len(ids), room)
    copy_rows(rows, ids, memory)
    return whole, memory


def _check_same(rows: Tensor, parts: Sequence[Tensor], copies: CachedRows) -> None:
    """Read some rows of each memory, which must be those of the table.

    There are machines that promise peer access and give wrong bytes.
    """
    device = copies.memory.device
    for number, part in enumerate(parts):
        ids = part[:LOOKED_AT]
        found = gather_cached(rows, ids.to(device), copies).cpu()
        expected = gather_reference(rows, ids)
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(
                f"{device} reads other rows from GPU number {number} than this process's table "
                "has\n\nhint: do all processes have the same table? If so, an IOMMU may be in the "
                f"way; {INSTEAD}"
            )


def _no_way(device: torch.device, peer: str, driver: Driver, code: int) -> RuntimeError:
    return RuntimeError(
        f"{device} cannot read the memory of {peer}: {driver.error_name(code)}\n\nhint: {INSTEAD}"
    )


def _int64(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@cache
def _driver() -> Driver:
    return Driver()
