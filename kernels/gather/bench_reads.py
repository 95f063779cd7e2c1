"""Kernels that measure a bus: dense reads, and a chain of dependent reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.gather.gpu import VECTORS, WARPS, on, programs_of
from gcnzc.kernels.gather.lanes import VECTOR_BYTES


@triton.jit
def _read_dense(source, out, count, TILE: tl.constexpr):
    # whole tiles of 16 B a lane, one after another by each program
    i = tl.arange(0, TILE)[:, None] * 4 + tl.arange(0, 4)[None, :]
    step = tl.num_programs(0).to(tl.int64) * (4 * TILE)
    begin = tl.program_id(0).to(tl.int64) * (4 * TILE)
    for at in range(begin, count, step):
        inside = tl.arange(0, TILE)[:, None] * 4 < count - at
        values = tl.load(source + at + i, mask=inside)
        tl.store(out + at + i, values, mask=inside)


def read_dense(source: Tensor, out: Tensor, *, programs: int | None = None) -> None:
    """Copy a dense range by the loads of GPU threads: what no gather can be faster than.

    Args:
        source: page-locked on the host, contiguous, of a multiple of 16 B, on a 16 B boundary.
        out: on a GPU, of the same bytes.
        programs: how many share the work; `programs_of` the device if None.

    Raises:
        ValueError: the two differ in bytes, or are not whole vectors of 16 B.
    """
    if source.nbytes != out.nbytes or source.nbytes % VECTOR_BYTES:
        raise ValueError(
            f"{source.nbytes} bytes cannot be read into {out.nbytes} as vectors of {VECTOR_BYTES}"
            "\n\nhint: as many bytes, and a multiple of 16"
        )
    words = source.view(torch.int32)
    tile = 32 * WARPS * VECTORS
    num_programs = min(triton.cdiv(words.numel(), 4 * tile), programs or programs_of(out.device))
    with on(out.device):
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
    """Follow `place = table[place]`, each load after the one before: the time of a step is latency.

    Args:
        table: (N,) int64 in [0, N), page-locked on the host or on a GPU.
        begin: the first place.
        steps: how many.
        out: (1,) int64 on a GPU, which gets the last place.
    """
    with on(out.device):
        _chase_pointers[(1,)](table, begin, steps, out, num_warps=1)
