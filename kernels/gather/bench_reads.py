"""Kernels that measure the PCIe bus: dense (contiguous) reads, and a chain of dependent reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.gather.gpu import VECTORS, WARPS
from gcnzc.kernels.gather.lanes import VECTOR_BYTES
from gcnzc.kernels.gpu_launch import default_programs, on_device


@triton.jit
def _read_dense(source, out, count, TILE: tl.constexpr):
    # a program copies tiles of TILE vectors in a grid-stride loop; a lane loads vectors of 16 B
    offsets = tl.arange(0, TILE)[:, None] * 4 + tl.arange(0, 4)[None, :]
    grid_stride = tl.num_programs(0).to(tl.int64) * (4 * TILE)
    first = tl.program_id(0).to(tl.int64) * (4 * TILE)
    for begin in range(first, count, grid_stride):
        mask = tl.arange(0, TILE)[:, None] * 4 < count - begin
        values = tl.load(source + begin + offsets, mask=mask)
        tl.store(out + begin + offsets, values, mask=mask)


def read_dense(source: Tensor, out: Tensor, *, programs: int | None = None) -> None:
    """Copy a contiguous range with loads of GPU threads; its rate bounds that of a gather.

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
    # int64 in every iteration, although `begin` may be int32
    index = tl.load(out).to(tl.int64) * 0 + begin
    for _ in range(steps):
        index = tl.load(table + index)
    tl.store(out, index)


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
