"""Rows of the feature cache as the gather kernel reads them: addresses, slots and peers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.gather.lanes import LINE_BYTES

FILL_BYTES = 1 << 26  # of hot rows that are copied at a time


@dataclass(frozen=True)
class Peers:
    """The memories among which a hot set is split, as one of their GPUs sees them."""

    addresses: Tensor  # (G,) int64, on that GPU, G above 1: where each begins, on a line
    own: int  # which of them is that GPU's
    kept: tuple[object, ...] = ()  # without which memories would go


@dataclass(frozen=True)
class CachedRows:
    """Copies of some rows of a table, on the GPU that asks for them or split over several.

    Of a set that is split over G GPUs, slot s is at place s // G of the memory of GPU s % G.
    """

    slots: Tensor  # (N,) int32: which slot holds a row's copy; -1 for none
    memory: Tensor  # (H, stride) bytes, beginning on a line: those on the GPU that asks
    peers: Peers | None = None  # if the set is split

    @property
    def num_rows(self) -> int:
        """H."""
        return self.memory.shape[0]

    @property
    def nbytes(self) -> int:
        """Of slots and memory, on the GPU."""
        return self.slots.nbytes + self.memory.nbytes


def make_cached_rows(table: Tensor, ids: Tensor, device: torch.device) -> CachedRows:
    """Copy rows of a table to a GPU.

    A copy lies as far behind a line as the row itself, so that the same lanes read both; that costs
    up to a line a row.

    Args:
        table: (N, D), each row contiguous, on the host.
        ids: (H,) int64 in [0, N), all different, on the host.
        device: where the rows go.
    """
    row_bytes = table.shape[1] * table.element_size()
    furthest = int(_behind_lines(table, ids).max()) if len(ids) else 0
    room_bytes = -(-(furthest + row_bytes) // LINE_BYTES) * LINE_BYTES
    whole = torch.zeros(len(ids) * room_bytes + LINE_BYTES, dtype=torch.int8, device=device)
    memory = on_lines(whole, len(ids), room_bytes)
    copy_rows(table, ids, memory)
    return CachedRows(slots_of([ids], table.shape[0]).to(device), memory)


def on_lines(whole: Tensor, num_rows: int, room_bytes: int) -> Tensor:
    """(num_rows, room_bytes) of the bytes of `whole`, from the first line that begins there."""
    begin = -whole.data_ptr() % LINE_BYTES
    return whole[begin : begin + num_rows * room_bytes].view(num_rows, room_bytes)


def copy_rows(table: Tensor, ids: Tensor, memory: Tensor) -> None:
    """Copy rows of a table, each as far behind a line as the row itself.

    Args:
        table: (N, D), each row contiguous, on the host.
        ids: (H,) int64 in [0, N), on the host.
        memory: (H, stride) int8, beginning on a line, a multiple of lines wide that holds every
            row where it goes; what is beside the copies stays as it is.
    """
    row_bytes = table.shape[1] * table.element_size()
    starts = _behind_lines(table, ids)
    # at most as many places as there are elements in a line
    for start in starts.unique().tolist():
        at = (starts == start).nonzero().flatten()
        for part in at.split(max(1, FILL_BYTES // max(1, row_bytes))):
            rows = table[ids[part]].contiguous().view(torch.int8).to(memory.device)
            memory[part.to(memory.device), start : start + row_bytes] = rows


def slots_of(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """(N,) int32 on the host: the slots of a set that is split in `parts`, see `CachedRows`.

    Args:
        parts: ids of the rows in each memory, in the order of their places; no id is twice there.
        num_rows: N.
    """
    slots = torch.full((num_rows,), -1, dtype=torch.int32)
    for number, ids in enumerate(parts):
        slots[ids] = number + len(parts) * torch.arange(len(ids), dtype=torch.int32)
    return slots


def _behind_lines(table: Tensor, ids: Tensor) -> Tensor:
    """How many bytes behind the begin of a line each of these rows begins."""
    return (table.data_ptr() + ids * (table.stride(0) * table.element_size())) % LINE_BYTES
