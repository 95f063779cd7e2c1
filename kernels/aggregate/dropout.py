"""Dropout, with or without ReLU, from a counter-based random generator.

Srivastava et al., "Dropout", JMLR 2014. torch draws the bits one after another on the CPU, which
takes half of the time of a training step of GraphSAGE; here they are a function of the place, by
Philox, so that threads and vector lanes draw side by side, the backward pass draws them again
instead of keeping them, and the CPU leaves out what a GPU would.

Elements are numbered as in memory. A lot of 1024 has 128 counters, each of which gives eight halves
of words: element `e` of a lot takes half `e // 128` of counter `e % 128`, so that neighbours in
memory are neighbours among the counters.
"""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit, uint64
from torch import Tensor

from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key
from gcnzc.kernels.threads import parallel_for

COUNTERS = 128  # of a lot


HALVES = 8  # of the words of a counter


LOT = COUNTERS * HALVES


LEVELS = 1 << 16  # a half is left out if it is below the share of these


def dropout_reference(x: Tensor, share: float, seed: int, floor: float = math.nan) -> Tensor:
    """What `dropout` must equal, bit for bit; and `relu_dropout_`, with a floor of 0."""
    places = torch.arange(x.numel())
    counters = (places // LOT) * COUNTERS + places % COUNTERS
    halves = places % LOT // COUNTERS
    words = np.stack(philox4x32_reference(*_counter(counters), *split_key(seed)))
    drawn = words[halves.numpy() // 2, places.numpy()] >> (halves.numpy() % 2 * 16) & 0xFFFF
    kept = torch.from_numpy(drawn >= _level(share)).view(x.shape).to(x.device)
    # nothing is at or below NaN, and NaN stays
    return torch.where(kept & ~(x <= floor), x * _scale(share), 0.0)


def _counter(counters: Tensor) -> tuple[Any, Any, int, int]:
    numbers = counters.numpy().astype(np.uint64)
    return numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32), 0, 0


def _level(share: float) -> int:
    return round(share * LEVELS)


def _scale(share: float) -> float:
    # of the share that is really left out, so that the mean stays
    return LEVELS / (LEVELS - _level(share))


@njit(nogil=True, cache=True, error_model="numpy")
def _drop(x, out, level, scale, floor, key_0, key_1, begin, end):
    words = np.empty((4, COUNTERS), np.uint32)
    for lot in range(begin, end):
        first = lot * COUNTERS
        for i in range(COUNTERS):
            number = uint64(first + i)
            low, high = number & uint64(0xFFFFFFFF), number >> uint64(32)
            c0, c1, c2, c3 = philox4x32(low, high, uint64(0), uint64(0), key_0, key_1)
            words[0, i], words[1, i], words[2, i], words[3, i] = c0, c1, c2, c3
        for half in range(HALVES):
            place = lot * LOT + half * COUNTERS
            row = words[half // 2]
            shift = np.uint32(16 * (half % 2))
            for i in range(min(COUNTERS, len(x) - place)):
                kept = (row[i] >> shift) & np.uint32(0xFFFF) >= level
                value = x[place + i]
                out[place + i] = value * scale if kept and not value <= floor else x.dtype.type(0)


# count and seed change from one minibatch to the next, and must not cause another compilation
@triton.jit(do_not_specialize=["count", "seed"])
def _drop_gpu(
    x,
    out,
    count,
    seed: tl.int64,
    level,
    scale,
    COUNTERS: tl.constexpr,
    RECTIFIED: tl.constexpr,
):
    lot = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COUNTERS)
    counter = lot * COUNTERS + i
    zero = tl.zeros([COUNTERS], tl.uint32)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(seed, low, high, zero, zero)
    for half in tl.static_range(8):
        if half // 2 == 0:
            word = c0
        elif half // 2 == 1:
            word = c1
        elif half // 2 == 2:
            word = c2
        else:
            word = c3
        place = lot * (8 * COUNTERS) + half * COUNTERS + i
        inside = place < count
        drawn = (word.to(tl.uint32) >> (16 * (half % 2))) & 0xFFFF
        value = tl.load(x + place, mask=inside)
        kept = tl.where(drawn >= level, (value * scale).to(value.dtype), 0.0)
        if RECTIFIED:
            kept = tl.where(value <= 0, 0.0, kept)
        tl.store(out + place, kept.to(value.dtype), mask=inside)


def drop_numba(
    x: Tensor,
    share: float,
    seed: int,
    threads: int | None = None,
    *,
    floor: float = math.nan,
    out: Tensor | None = None,
) -> Tensor:
    """`dropout_reference` on the CPU, for contiguous float32 or float64; `out` may be `x`."""
    out = torch.empty_like(x) if out is None else out
    flat, into = x.detach().view(-1).numpy(), out.detach().view(-1).numpy()
    key_0, key_1 = (np.uint64(word) for word in split_key(seed))
    level, scale = np.uint32(_level(share)), flat.dtype.type(_scale(share))
    floor = flat.dtype.type(floor)
    lots = -(-len(flat) // LOT)
    parallel_for(
        _drop, lots, flat, into, level, scale, floor, key_0, key_1, threads=threads, grain_size=64
    )
    return out


def drop_triton(
    x: Tensor, share: float, seed: int, *, rectified: bool = False, out: Tensor | None = None
) -> Tensor:
    """`dropout_reference` in Triton, for contiguous rows on its device; `out` may be `x`."""
    out = torch.empty_like(x) if out is None else out
    lots = triton.cdiv(x.numel(), LOT)
    with torch.cuda.device_of(x):
        level, scale = _level(share), _scale(share)
        # the same 64 bits as a signed number
        signed_seed = seed - 2**64 if seed >= 2**63 else seed
        _drop_gpu[(lots,)](x, out, x.numel(), signed_seed, level, scale, COUNTERS, rectified)
    return out


def _drop_anywhere(x: Tensor, share: float, seed: int) -> Tensor:
    x = x.contiguous()
    if x.is_cuda:
        return drop_triton(x, share, seed)
    if x.dtype in (torch.float32, torch.float64):
        return drop_numba(x, share, seed)
    # numba has no half precision; a product that is rounded twice is the same here, since the
    # scale is one of float32 in any case
    return drop_numba(x.float(), share, seed).to(x.dtype)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, seed: int) -> Tensor:
        ctx.share, ctx.seed = share, seed
        return _drop_anywhere(x, share, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _drop_anywhere(grad, ctx.share, ctx.seed), None, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, seed: int) -> Tensor:
        if x.is_cuda:
            drop_triton(x, share, seed, rectified=True, out=x)
        else:
            drop_numba(x, share, seed, floor=0.0, out=x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = _scale(share)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # what was left out or rectified is zero, so nothing needs to be drawn again
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, out, 0.0).mul_(ctx.scale), None, None


def _check_share(share: float) -> None:
    if not 0 <= share < 1 or _level(share) == LEVELS:
        raise ValueError(f"a share of {share} cannot be left out\n\nhint: from 0 to below 1")


def dropout(x: Tensor, share: float, seed: int) -> Tensor:
    """Zero elements of `x` independently and scale the others, so that the mean stays.

    Args:
        x: floating point, of any shape, on the CPU or a GPU.
        share: of the elements that become zero, in [0, 1); the nearest multiple of 2**-16 is taken.
        seed: 64 bits that choose them; the same seed leaves out the same places of the same shape.

    Returns:
        Like `x`, contiguous; ready on the current stream. Gradients flow through what is kept.

    Raises:
        ValueError: the share is outside [0, 1), or rounds to 1.
    """
    _check_share(share)
    return _Dropout.apply(x, share, seed)


def relu_dropout_(x: Tensor, share: float, seed: int) -> Tensor:
    """`dropout(relu(x), share, seed)` in one pass, written over `x`.

    Args:
        x: as for `dropout`; not a leaf that needs a gradient. Nobody else may need its values.
        share: as for `dropout`; with 0 it is `torch.relu_`.
        seed: as for `dropout`.

    Returns:
        `x`, or what takes its place if it is not contiguous or of half precision on the CPU.

    Raises:
        ValueError: the share is outside [0, 1), or rounds to 1.
    """
    _check_share(share)
    if share == 0:
        return x.relu_()
    x = x.contiguous()
    if not x.is_cuda and x.dtype not in (torch.float32, torch.float64):
        return dropout(x.relu_(), share, seed)
    return _ReluDropout.apply(x, share, seed)
