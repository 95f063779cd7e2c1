"""The feature cache as the gather kernel reads it: slots, memory and addresses of peers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.gather.lanes import LINE_BYTES

FILL_BYTES = 1 << 26  # bytes of cached rows that are copied at once


@dataclass(frozen=True)
class Peers:
    """The memories of a sharded cache, as addressed by one of its GPUs."""

    addresses: Tensor  # (G,) int64 on that GPU, G > 1: the address of each memory, on a 128 B line
    own: int  # index in `addresses` of that GPU's own memory
    owners: tuple[object, ...] = ()  # objects that keep the memories allocated


@dataclass(frozen=True)
class CachedRows:
    """Copies of some rows of a table, on one GPU or sharded over several.

    A slot is the number of a copy. In a cache that is sharded over G GPUs, slot s is row s // G of
    the memory of GPU s % G.
    """

    slots: Tensor  # (N,) int32: the slot of each row's copy; -1 if the row is not cached
    memory: Tensor  # (H, stride) bytes on this GPU, beginning on a 128 B line
    peers: Peers | None = None  # for a sharded cache

    @property
    def num_rows(self) -> int:
        """The number of rows on this GPU, H."""
        return self.memory.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and the memory on this GPU."""
        return self.slots.nbytes + self.memory.nbytes


def make_cached_rows(table: Tensor, ids: Tensor, device: torch.device) -> CachedRows:
    """Copy rows of a table to a GPU.

    A copy has the same offset from a 128 B line as the row itself, so that the kernel reads both
    with the same lanes. Every copy takes as many lines as the worst-aligned of these rows.

    Args:
        table: (N, D), each row contiguous, on the host.
        ids: (H,) int64 in [0, N), distinct, on the host.
        device: the GPU to copy to.
    """
    row_bytes = table.shape[1] * table.element_size()
    max_offset = int(_line_offsets(table, ids).max()) if len(ids) else 0
    padded_row_bytes = -(-(max_offset + row_bytes) // LINE_BYTES) * LINE_BYTES
    buffer = torch.zeros(len(ids) * padded_row_bytes + LINE_BYTES, dtype=torch.int8, device=device)
    memory = aligned_view(buffer, len(ids), padded_row_bytes)
    copy_rows(table, ids, memory)
    return CachedRows(assign_slots([ids], table.shape[0]).to(device), memory)


def aligned_view(buffer: Tensor, num_rows: int, padded_row_bytes: int) -> Tensor:
    """Return a (num_rows, padded_row_bytes) view of `buffer` from its first 128 B line on."""
    begin = -buffer.data_ptr() % LINE_BYTES
    return buffer[begin : begin + num_rows * padded_row_bytes].view(num_rows, padded_row_bytes)


def copy_rows(table: Tensor, ids: Tensor, memory: Tensor) -> None:
    """Copy rows of a table, each at the same offset from a 128 B line as the row itself.

    Args:
        table: (N, D), each row contiguous, on the host.
        ids: (H,) int64 in [0, N), on the host.
        memory: (H, stride) int8, beginning on a line; the stride is a multiple of 128 B that fits
            every row at its offset. Other bytes are not written.
    """
    row_bytes = table.shape[1] * table.element_size()
    offsets = _line_offsets(table, ids)
    # there are at most as many offsets as elements in a line
    for offset in offsets.unique().tolist():
        indices = (offsets == offset).nonzero().flatten()
        for chunk in indices.split(max(1, FILL_BYTES // max(1, row_bytes))):
            rows = table[ids[chunk]].contiguous().view(torch.int8).to(memory.device)
            memory[chunk.to(memory.device), offset : offset + row_bytes] = rows


def assign_slots(ids_by_gpu: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return the (N,) int32 slots of a sharded cache on the host, see `CachedRows`.

    Args:
        ids_by_gpu: the ids of the rows in each GPU's memory, in order; all distinct.
        num_rows: N.
    """
    slots = torch.full((num_rows,), -1, dtype=torch.int32)
    for gpu, ids in enumerate(ids_by_gpu):
        slots[ids] = gpu + len(ids_by_gpu) * torch.arange(len(ids), dtype=torch.int32)
    return slots


def _line_offsets(table: Tensor, ids: Tensor) -> Tensor:
    """Return the offset of each of these rows from the start of its 128 B line, in bytes."""
    return (table.data_ptr() + ids * (table.stride(0) * table.element_size())) % LINE_BYTES
