"""Convert bfloat16 and float16 to and from float32 in numba kernels, which have no such types.

A kernel gets bfloat16 elements as uint16 and float16 elements as int16: the integer type selects
the conversion when the kernel is compiled. The functions also accept float32 and float64, which
they return unchanged, so that one kernel serves all dtypes. A kernel that gets addresses instead of
arrays has an argument `kind`, a zero of the type of the elements.

Conversions to 16 bits round to nearest, ties to even, as torch does.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

# the numpy types that stand for the dtypes of elements
KINDS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}

BFLOAT16, FLOAT16 = types.uint16, types.int16

BITS16, BITS32, BITS64 = (ir.IntType(bits) for bits in (16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()


def kind_of(dtype: torch.dtype) -> Any:
    """Return a zero of the numpy type that stands for elements of `dtype` in a kernel."""
    return KINDS[dtype](0)


def as_array(x: Tensor) -> np.ndarray:
    """Return the elements of a contiguous tensor as a flat array of the type for kernels.

    Args:
        x: on the CPU, of a dtype in `KINDS`. The array shares its memory.
    """
    flat = x.detach().view(-1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        return flat.view(torch.int16).numpy().view(KINDS[x.dtype])
    return flat.numpy()


def is_half(kind: Any) -> bool:
    """Return whether a numba type stands for elements of 16 bits."""
    return kind in (BFLOAT16, FLOAT16)


def like(chunk: Any, element: Any) -> Any:
    """Return the LLVM type of as many elements as `chunk` has, a scalar type or one of vectors."""
    return ir.VectorType(element, chunk.count) if isinstance(chunk, ir.VectorType) else element


def has_half_instructions(context: Any) -> bool:
    """Return whether the processor that numba compiles for converts float16 by instructions.

    LLVM would otherwise call functions of a runtime library that numba does not link.
    """
    triple, _, features = context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64"))


def widen(context: Any, builder: Any, value: Any, kind: Any) -> Any:
    """Generate the conversion of loaded elements to float32; other kinds are unchanged.

    Args:
        context: numba's target context.
        builder: LLVM's IR builder.
        value: an element or a vector of them; of 16-bit integers if `kind` is one of 16 bits.
        kind: the numba type of the elements.
    """
    if not is_half(kind):
        return value
    floats = like(value.type, FLOAT)
    if kind == FLOAT16 and has_half_instructions(context):
        return builder.fpext(builder.bitcast(value, like(value.type, HALF)), floats)
    bits = builder.zext(value, like(value.type, BITS32))
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(bits, _constant(bits, 16)), floats)
    return widen_by_integers(builder, bits)


def narrow(context: Any, builder: Any, value: Any, kind: Any) -> Any:
    """Generate the conversion of float32 to elements for a store; the inverse of `widen`."""
    if not is_half(kind):
        return value
    shorts = like(value.type, BITS16)
    if kind == FLOAT16 and has_half_instructions(context):
        return builder.bitcast(builder.fptrunc(value, like(value.type, HALF)), shorts)
    bits = builder.bitcast(value, like(value.type, BITS32))
    if kind == FLOAT16:
        return builder.trunc(narrow_by_integers(builder, bits), shorts)
    upper = builder.lshr(bits, _constant(bits, 16))
    odd = builder.and_(upper, _constant(bits, 1))
    half = builder.add(odd, _constant(bits, 0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), _constant(bits, 16))
    # rounding could turn a NaN into an infinity
    quiet = builder.or_(upper, _constant(bits, 0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), shorts)


def widen_by_integers(builder: Any, bits: Any) -> Any:
    """Generate the conversion of float16 in the lower half of 32-bit integers to float32.

    From "half_to_float_fast4" of Giesen, https://gist.github.com/rygorous/2156668; subnormal
    numbers are normalized by a subtraction, which does not depend on the mode of the processor for
    subnormal numbers.
    """
    floats = like(bits.type, FLOAT)
    magnitude = builder.shl(builder.and_(bits, _constant(bits, 0x7FFF)), _constant(bits, 13))
    exponent = builder.and_(magnitude, _constant(bits, 0x7C00 << 13))
    normal = builder.add(magnitude, _constant(bits, (127 - 15) << 23))
    infinite = builder.add(normal, _constant(bits, (128 - 16) << 23))
    smallest = _constant(bits, 113 << 23)
    raised = builder.bitcast(builder.add(normal, _constant(bits, 1 << 23)), floats)
    tiny = builder.bitcast(builder.fsub(raised, builder.bitcast(smallest, floats)), bits.type)
    is_infinite = builder.icmp_unsigned("==", exponent, _constant(bits, 0x7C00 << 13))
    is_tiny = builder.icmp_unsigned("==", exponent, _constant(bits, 0))
    found = builder.select(is_infinite, infinite, builder.select(is_tiny, tiny, normal))
    sign = builder.shl(builder.and_(bits, _constant(bits, 0x8000)), _constant(bits, 16))
    return builder.bitcast(builder.or_(found, sign), floats)


def narrow_by_integers(builder: Any, bits: Any) -> Any:
    """Generate the conversion of the bits of float32 to those of float16, in 32-bit integers.

    From "float_to_half_fast3_rtne" of Giesen, https://gist.github.com/rygorous/2156668.
    """
    floats = like(bits.type, FLOAT)
    sign = builder.and_(bits, _constant(bits, 0x80000000))
    magnitude = builder.xor(bits, sign)
    # an addition that has the last bit of a subnormal result as its last bit rounds it
    magic = _constant(bits, ((127 - 15) + (23 - 10) + 1) << 23)
    shifted = builder.fadd(builder.bitcast(magnitude, floats), builder.bitcast(magic, floats))
    tiny = builder.sub(builder.bitcast(shifted, bits.type), magic)
    odd = builder.and_(builder.lshr(magnitude, _constant(bits, 13)), _constant(bits, 1))
    # an overflow of the addition is wanted: it subtracts from the exponent
    moved = builder.add(magnitude, _constant(bits, (((15 - 127) << 23) + 0xFFF) % 2**32))
    normal = builder.lshr(builder.add(moved, odd), _constant(bits, 13))
    is_nan = builder.icmp_unsigned(">", magnitude, _constant(bits, 255 << 23))
    infinite = builder.select(is_nan, _constant(bits, 0x7E00), _constant(bits, 0x7C00))
    is_infinite = builder.icmp_unsigned(">=", magnitude, _constant(bits, (127 + 16) << 23))
    is_tiny = builder.icmp_unsigned("<", magnitude, _constant(bits, 113 << 23))
    found = builder.select(is_infinite, infinite, builder.select(is_tiny, tiny, normal))
    return builder.or_(found, builder.lshr(sign, _constant(bits, 16)))


def _constant(like_value: Any, number: int) -> Any:
    kind = like_value.type
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [number] * kind.count)
    return ir.Constant(kind, number)


def _float_type(kind: Any) -> Any:
    return types.float32 if is_half(kind) else kind


def _widened(_typing: Any, element: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return widen(context, builder, args[0], element)

    return _float_type(element)(element), codegen


def _narrowed(_typing: Any, value: Any, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return narrow(context, builder, args[0], kind)

    return kind(value, kind), codegen


def _item_bytes(_typing: Any, kind: Any) -> Any:
    def codegen(_context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
        return BITS64(kind.bitwidth // 8)

    return types.int64(kind), codegen


# widened(element): an element as float32, or as it is if it is float32 or float64
widened: Any = intrinsic(_widened)


# narrowed(value, kind): a float32 rounded to the type of elements that `kind` stands for
narrowed: Any = intrinsic(_narrowed)


# item_bytes(kind): the bytes of an element, a constant of the compiled kernel
item_bytes: Any = intrinsic(_item_bytes)
