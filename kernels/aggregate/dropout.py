"""Dropout, optionally fused with ReLU or ELU, with a counter-based random generator.

Dropout: Srivastava et al., JMLR 2014. On a CPU torch generates the random bits sequentially,
which takes half of the time of a training step of GraphSAGE. Here the bits are a function of the
element's position, computed by Philox, so that threads and vector lanes generate them in parallel,
the backward pass recomputes the mask instead of storing it, and the CPU and a GPU drop the same
elements.

An element needs only as many random bits as distinguish its probability: 4 for a multiple of 1/16,
such as 0.5, 8 for a multiple of 1/256, and 16 for others, so that Philox is computed for fewer
counters. A counter gives 128 bits.

Elements are numbered in row-major order of their indices, whatever the strides of the tensor, in
chunks of 128 counters: with fields of 16 bits 1024 elements, with 4 bits 4096. Element `e` of a
chunk uses field `e // 128` of counter `e % 128`, from the low bits of its first word on, so that
neighbours in a row use neighbouring counters.
"""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit, uint64
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcnzc.kernels.exponential import expm1_nonpositive
from gcnzc.kernels.half_precision import KINDS, as_array, narrowed, widened
from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key
from gcnzc.kernels.threads import parallel_for

COUNTERS = 128  # counters of a chunk


COUNTER_BITS = 128  # random bits of a counter: four words of 32 bits


# probabilities are rounded to multiples of 1 / NUM_LEVELS
MAX_BITS = 16


NUM_LEVELS = 1 << MAX_BITS


def dropout_reference(x: Tensor, p: float, seed: int, floor: float = math.nan) -> Tensor:
    """Reference for `dropout` and, with a floor of 0, for `relu_dropout_`.

    Both must match it bit for bit. Elements at or below `floor` are set to zero.
    """
    positions = np.arange(x.numel())
    bits, threshold = _field(p)
    chunk = chunk_elements(bits)
    counters = (positions // chunk) * COUNTERS + positions % COUNTERS
    first_bits = positions % chunk // COUNTERS * bits
    words = np.stack(philox4x32_reference(*_counter(counters), *split_key(seed)))
    fields = words[first_bits // 32, positions] >> (first_bits % 32) & (1 << bits) - 1
    is_kept = torch.from_numpy(fields >= threshold).view(x.shape).to(x.device)
    # written so that a floor of NaN has no effect, and kept NaN elements stay NaN
    return torch.where(is_kept & ~(x <= floor), x * _scale(p), 0.0)


def _counter(counters: NDArray[np.int64]) -> tuple[Any, Any, int, int]:
    numbers = counters.astype(np.uint64)
    return numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32), 0, 0


def _num_dropped_levels(p: float) -> int:
    return round(p * NUM_LEVELS)


def _field(p: float) -> tuple[int, int]:
    """Return the random bits per element, and the threshold below which they drop the element."""
    levels = _num_dropped_levels(p)
    for bits in (4, 8):
        if levels % (1 << MAX_BITS - bits) == 0:
            return bits, levels >> MAX_BITS - bits
    return MAX_BITS, levels


def chunk_elements(bits: int) -> int:
    """Return the number of elements of a chunk, with fields of `bits` bits."""
    return COUNTERS * COUNTER_BITS // bits


def _scale(p: float) -> float:
    # from the rounded probability, so that the expected value is exact
    return NUM_LEVELS / (NUM_LEVELS - _num_dropped_levels(p))


@njit(nogil=True, cache=True, error_model="numpy")
def _dropout_numba(x, out, bits, threshold, scale, floor, dropped, elu, key_0, key_1, begin, end):
    num_fields, ones = COUNTER_BITS // bits, np.uint32((1 << bits) - 1)
    words = np.empty((4, COUNTERS), np.uint32)
    values = np.empty(COUNTERS, type(scale))
    kind, dropped_element = x.dtype.type(0), narrowed(dropped, x.dtype.type(0))
    for chunk in range(begin, end):
        first = chunk * COUNTERS
        for i in range(COUNTERS):
            number = uint64(first + i)
            low, high = number & uint64(0xFFFFFFFF), number >> uint64(32)
            c0, c1, c2, c3 = philox4x32(low, high, uint64(0), uint64(0), key_0, key_1)
            words[0, i], words[1, i], words[2, i], words[3, i] = c0, c1, c2, c3
        for field in range(num_fields):
            position = (chunk * num_fields + field) * COUNTERS
            row = words[field * bits // 32]
            shift = np.uint32(field * bits % 32)
            # slices, because numba would check indices from `position` for negative ones, and LLVM
            # would not vectorize the loops
            given = x[position : position + COUNTERS]
            result = out[position : position + COUNTERS]
            # copied first: a loop that reads and writes the same array is not vectorized
            for i in range(len(given)):
                values[i] = widened(given[i])
            # None or True, so that numba removes the branch at compile time
            if elu is not None:
                for i in range(len(given)):
                    value = np.float32(values[i])
                    values[i] = expm1_nonpositive(value) if value < 0 else value
            for i in range(len(result)):
                # without branches, so that it is vectorized, too
                is_dropped = ((row[i] >> shift) & ones < threshold) | (values[i] <= floor)
                # with a `dropped` of -0, the subtraction turns a kept -0 into 0
                kept = narrowed(values[i] * scale - dropped, kind)
                result[i] = dropped_element if is_dropped else kept


@njit(nogil=True, cache=True, error_model="numpy")
def _relu_dropout_grad(out, grad, grad_x, scale, begin, end):
    kind, zero = out.dtype.type(0), scale - scale
    # slices, as above
    out, grad, grad_x = out[begin:end], grad[begin:end], grad_x[begin:end]
    for i in range(len(out)):
        product = widened(grad[i]) * scale
        grad_x[i] = narrowed(zero if widened(out[i]) <= zero else product, kind)


@njit(nogil=True, cache=True, error_model="numpy")
def _elu_dropout_grad(out, grad, grad_x, scale, begin, end):
    kind, zero = out.dtype.type(0), scale - scale
    # slices, as above
    out, grad, grad_x = out[begin:end], grad[begin:end], grad_x[begin:end]
    for i in range(len(out)):
        value = widened(out[i])
        is_dropped = value == zero and math.copysign(scale, value) < zero
        # a rounded output may be below -scale
        factor = scale if value > zero else max(value + scale, zero)
        grad_x[i] = narrowed(zero if is_dropped else widened(grad[i]) * factor, kind)


# count and seed change between minibatches, and must not cause a recompilation
@triton.jit(do_not_specialize=["count", "seed"])
def _dropout_triton(
    x,
    out,
    count,
    seed: tl.int64,
    threshold,
    scale: tl.float64,  # without the type, Triton would round it to float32
    COUNTERS: tl.constexpr,
    BITS: tl.constexpr,
    RELU: tl.constexpr,
    WIDE: tl.constexpr,  # float64 for float64 elements, else float32
):
    chunk = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COUNTERS)
    counter = chunk * COUNTERS + i
    zero = tl.zeros([COUNTERS], tl.uint32)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    factor = tl.full([COUNTERS], scale, WIDE)
    c0, c1, c2, c3 = tl.philox(seed, low, high, zero, zero)
    FIELDS: tl.constexpr = 128 // BITS
    for field in tl.static_range(FIELDS):
        if field * BITS // 32 == 0:
            word = c0
        elif field * BITS // 32 == 1:
            word = c1
        elif field * BITS // 32 == 2:
            word = c2
        else:
            word = c3
        position = (chunk * FIELDS + field) * COUNTERS + i
        mask = position < count
        random_bits = (word.to(tl.uint32) >> (field * BITS % 32)) & ((1 << BITS) - 1)
        value = tl.load(x + position, mask=mask)
        result = tl.where(random_bits >= threshold, (value * factor).to(value.dtype), 0.0)
        if RELU:
            result = tl.where(value <= 0, 0.0, result)
        tl.store(out + position, result.to(value.dtype), mask=mask)


def dropout_numba(
    x: Tensor,
    p: float,
    seed: int,
    threads: int | None = None,
    *,
    floor: float = math.nan,
    dropped: float = 0.0,
    has_elu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`dropout_reference` on the CPU, for contiguous `x` of a dtype in `KINDS`; `out` may be `x`.

    bfloat16 and float16 are multiplied in float32 and rounded once, as torch does. Dropped elements
    are set to `dropped`, 0 or -0; with -0, no other element of the result is -0. With `has_elu`,
    `x` is not float64, and dropout follows an ELU.
    """
    out = torch.empty_like(x) if out is None else out
    flat, out_flat = as_array(x), as_array(out)
    key_0, key_1 = (np.uint64(word) for word in split_key(seed))
    wide: Any = np.float64 if x.dtype == torch.float64 else np.float32
    bits, threshold = _field(p)
    num_chunks = -(-len(flat) // chunk_elements(bits))
    parallel_for(
        _dropout_numba,
        num_chunks,
        flat,
        out_flat,
        bits,
        np.uint32(threshold),
        wide(_scale(p)),
        wide(floor),
        wide(dropped),
        True if has_elu else None,
        key_0,
        key_1,
        threads=threads,
        grain_size=(1 << 16) // chunk_elements(bits),
    )
    return out


def dropout_triton(
    x: Tensor, p: float, seed: int, *, relu: bool = False, out: Tensor | None = None
) -> Tensor:
    """`dropout_reference` in Triton, for contiguous tensors; `out` may be `x`."""
    out = torch.empty_like(x) if out is None else out
    bits, threshold = _field(p)
    num_chunks = triton.cdiv(x.numel(), chunk_elements(bits))
    with torch.cuda.device_of(x):
        wide = tl.float64 if x.dtype == torch.float64 else tl.float32
        # Triton expects the 64 bits as a signed integer
        signed_seed = seed - 2**64 if seed >= 2**63 else seed
        _dropout_triton[(num_chunks,)](
            x, out, x.numel(), signed_seed, threshold, _scale(p), COUNTERS, bits, relu, wide
        )
    return out


def _dropout_on_device(x: Tensor, p: float, seed: int) -> Tensor:
    x = x.contiguous()
    if x.is_cuda:
        return dropout_triton(x, p, seed)
    if x.dtype in KINDS:
        return dropout_numba(x, p, seed)
    return dropout_numba(x.float(), p, seed).to(x.dtype)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _dropout_on_device(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # dropout is linear, so that its gradient is the same function, and differentiable, too
        return _Dropout.apply(grad, ctx.p, ctx.seed), None, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        if x.is_cuda:
            dropout_triton(x, p, seed, relu=True, out=x)
        else:
            dropout_numba(x, p, seed, floor=0.0, out=x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = _scale(p)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # elements that were dropped or rectified are zero in the output, which gives the mask
        (out,) = ctx.saved_tensors
        if out.is_cuda or torch.is_grad_enabled():  # a gradient of this gradient is needed
            return torch.ops.aten.threshold_backward(grad, out, 0.0).mul_(ctx.scale), None, None
        return _gradient(_relu_dropout_grad, out, grad, ctx.scale), None, None


class _EluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        has_elu = x.dtype != torch.float64
        if not has_elu:
            torch.nn.functional.elu_(x)
        # dropped elements are -0, so that the backward pass recognizes them
        dropout_numba(x, p, seed, dropped=-0.0, has_elu=has_elu, out=x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = _scale(p)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return _gradient(_elu_dropout_grad, out, grad, ctx.scale), None, None


def _gradient(kernel: Any, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Compute the gradient of an activation with dropout on the CPU from its output."""
    wide: Any = np.float64 if out.dtype == torch.float64 else np.float32
    grad_x = torch.empty_like(out)
    arrays = (as_array(tensor) for tensor in (out, grad.contiguous(), grad_x))
    parallel_for(kernel, out.numel(), *arrays, wide(scale), grain_size=1 << 15)
    return grad_x


def _check_probability(p: float) -> None:
    if not 0 <= p < 1 or _num_dropped_levels(p) == NUM_LEVELS:
        raise ValueError(f"the dropout probability is {p}\n\nhint: use a number in [0, 1)")


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zero elements of `x` at random and scale the others by 1 / (1 - p).

    Args:
        x: floating point, of any shape, on the CPU or a GPU.
        p: probability that an element is zeroed, in [0, 1); rounded to a multiple of 2**-16.
        seed: 64-bit seed of the mask. Whether an element is zeroed depends on the seed and on its
            position in row-major order, not on the strides of `x`.

    Returns:
        A contiguous tensor like `x`; on a GPU, computed on the current stream. Gradients flow
        through the elements that are not zeroed.

    Raises:
        ValueError: p is outside [0, 1), or rounds to 1; or `x` is not floating point.
    """
    _check_probability(p)
    if not x.is_floating_point():
        raise ValueError(f"dropout of {x.dtype}\n\nhint: convert to floating point, x.float()")
    return _Dropout.apply(x, p, seed)


def relu_dropout_(x: Tensor, p: float, seed: int) -> Tensor:
    """Compute `dropout(relu(x), p, seed)` in place, in one pass.

    Args:
        x: as for `dropout`; not a leaf that requires a gradient. Its values must not be needed
            elsewhere, for example in the backward pass of another operation.
        p: as for `dropout`; with 0 this is `torch.relu_`.
        seed: as for `dropout`.

    Returns:
        `x`; a new tensor if `x` is not contiguous and p is not 0.

    Raises:
        ValueError: p is outside [0, 1), or rounds to 1.
    """
    _check_probability(p)
    if p == 0:
        return x.relu_()
    x = x.contiguous()
    if not x.is_cuda and x.dtype not in KINDS:
        return dropout(x.relu_(), p, seed)
    return _ReluDropout.apply(x, p, seed)


def elu_dropout_(x: Tensor, p: float, seed: int) -> Tensor:
    """Compute `dropout(elu(x), p, seed)`, on the CPU in place.

    Differentiable once.

    Args:
        x: as for `relu_dropout_`.
        p: as for `dropout`; with 0 this is the ELU in place.
        seed: as for `dropout`.

    Returns:
        `x`; if p is not 0, a new tensor if `x` is not contiguous, or on a GPU.

    Raises:
        ValueError: p is outside [0, 1), or rounds to 1.
    """
    _check_probability(p)
    if p == 0:
        return torch.nn.functional.elu_(x)
    if x.is_cuda or x.dtype not in KINDS:
        return dropout(torch.nn.functional.elu_(x), p, seed)
    return _EluDropout.apply(x.contiguous(), p, seed)
