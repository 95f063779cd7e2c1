"""Kernels that measure the PCIe bus: dense reads, and a chain of dependent reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.gather.gpu import VECTORS, WARPS, default_programs, on_device
from gcnzc.kernels.gather.lanes import VECTOR_BYTES


@triton.jit
def _read_dense(source, out, count, TILE: tl.constexpr):
    # each program copies tiles in which a lane loads 16 B at once
    i = tl.arange(0, TILE)[:, None] * 4 + tl.arange(0, 4)[None, :]
    step = tl.num_programs(0).to(tl.int64) * (4 * TILE)
    begin = tl.program_id(0).to(tl.int64) * (4 * TILE)
    for at in range(begin, count, step):
        inside = tl.arange(0, TILE)[:, None] * 4 < count - at
        values = tl.load(source + at + i, mask=inside)
        tl.store(out + at + i, values, mask=inside)


def read_dense(source: Tensor, out: Tensor, *, programs: int | None = None) -> None:
    """Copy a contiguous range with loads of GPU threads, an upper bound for the rate of a gather.

    Args:
        source: page-locked on the host, contiguous, a multiple of 16 B, aligned to 16 B.
        out: on a GPU, with the same number of bytes.
        programs: number of programs; `default_programs(out.device)` if None.

    Raises:
        ValueError: the sizes differ, or are not a multiple of 16 B.
    """
    if source.nbytes != out.nbytes or source.nbytes % VECTOR_BYTES:
        raise ValueError(
            f"{source.nbytes} bytes cannot be read into {out.nbytes} as vectors of {VECTOR_BYTES}"
            "\n\nhint: use equal sizes that are a multiple of 16 bytes"
        )
    words = source.view(torch.int32)
    tile = 32 * WARPS * VECTORS
    num_programs = min(
        triton.cdiv(words.numel(), 4 * tile), programs or default_programs(out.device)
    )
    with on_device(out.device):
        _read_dense[(num_programs,)](
            words.view(-1), out.view(torch.int32).view(-1), words.numel(), tile, num_warps=WARPS
        )


@triton.jit
def _chase_pointers(table, begin, steps, out):
    place = tl.load(out).to(tl.int64) * 0 + begin
    for _ in range(steps):
        place = tl.load(table + place)
    tl.store(out, place)


def chase_pointers(table: Tensor, begin: int, steps: int, out: Tensor) -> None:
    """Follow a chain of dependent loads, `i = table[i]`; the time of a step is the read latency.

    Args:
        table: (N,) int64 in [0, N), page-locked on the host or on a GPU.
        begin: the first index.
        steps: number of loads.
        out: (1,) int64 on a GPU, to which the last index is written.
    """
    with on_device(out.device):
        _chase_pointers[(1,)](table, begin, steps, out, num_warps=1)
