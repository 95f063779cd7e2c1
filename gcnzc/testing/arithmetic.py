"""Arithmetic of PTX instructions on numpy arrays, where numpy has no equal operation.

All functions are elementwise and broadcast. Results are those of the PTX ISA,
https://docs.nvidia.com/cuda/parallel-thread-execution/, where it specifies them.
"""

import operator
from collections.abc import Callable
from fractions import Fraction
from math import copysign, inf, isfinite
from typing import Any

import numpy as np

from gcnzc.testing.number_types import FORMATS, Array, bits_of, encode, with_canonical_nan

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


# -- floating point


def fma(a: Array, b: Array, c: Array, *, kind: str) -> Array:
    """Return a * b + c, rounded once.

    Args:
        a: float64, representable in `kind`, like b and c.
        b: see a.
        c: see a.
        kind: the type of the result, f16, bf16, f32 or f64.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    if kind == "f64":
        return np.asarray(_fma_double(a, b, c), np.float64)
    # the product is exact in float64; a sum that is rounded to odd can be rounded a second time
    # without an error (Boldo and Melquiond, 2008)
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.copy().view(np.int64)
    is_even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits += np.where(is_even, np.where((error > 0) == (total > 0), 1, -1), 0)
    return encode(bits.view(np.float64), kind)


def _fma_double_scalar(a: float, b: float, c: float) -> float:
    if not (isfinite(a) and isfinite(b)):
        return a * b + c
    if not isfinite(c):
        # the exact product is finite, also where a * b overflows
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # the sign of an exact zero is that of a sum of zeros
        is_negative = copysign(1, a) * copysign(1, b) < 0 and copysign(1, c) < 0
        return -0.0 if is_negative else 0.0
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


_fma_double = np.frompyfunc(_fma_double_scalar, 3, 1)


def minimum(a: Array, b: Array, propagate_nan: bool) -> Array:
    """Return the smaller of two; of a number and a NaN the number, unless `propagate_nan`."""
    return _extremum(a, b, np.minimum if propagate_nan else np.fmin, operator.or_)


def maximum(a: Array, b: Array, propagate_nan: bool) -> Array:
    """Return the larger of two; of a number and a NaN the number, unless `propagate_nan`."""
    return _extremum(a, b, np.maximum if propagate_nan else np.fmax, operator.and_)


def _extremum(
    a: Array, b: Array, choose: Callable[[Any, Any], Any], join: Callable[[Any, Any], Any]
) -> Array:
    found = np.asarray(choose(a, b))
    if a.dtype.kind != "f":
        return found
    # numpy returns either of two zeros; -0 is less than +0
    bits = np.asarray(join(bits_of(np.asarray(a)), bits_of(np.asarray(b))))
    return with_canonical_nan(np.where((a == 0) & (b == 0), bits.view(found.dtype), found))


def compare(comparison: str, a: Array, b: Array) -> Array:
    """Compare as `setp`: a comparison that ends in u is also true if an operand is NaN."""
    if a.dtype.kind != "f":
        return np.asarray(COMPARISONS[comparison](a, b))
    is_nan = np.isnan(a) | np.isnan(b)
    if comparison == "num":
        return np.asarray(~is_nan)
    if comparison == "nan":
        return np.asarray(is_nan)
    if comparison.endswith("u"):
        return np.asarray(is_nan | COMPARISONS[comparison[:-1]](a, b))
    return np.asarray(~is_nan & COMPARISONS[comparison](a, b))


def flush_subnormals(values: Array, kind: str = "f32") -> Array:
    """Replace subnormal f16, f32 or bf16 by a zero of the same sign, as `.ftz`."""
    if kind == "bf16":
        # held as bits
        is_small = values & np.uint16(0x7F80) == 0
        return np.where(is_small, values & np.uint16(0x8000), values)
    least = values.dtype.type(2.0 ** FORMATS[kind].min_exponent)
    return np.where(np.abs(values) < least, np.copysign(least.dtype.type(0), values), values)


def to_integer(values: Array, dtype: np.dtype[Any], source: str, rounding: Any) -> Array:
    """Convert float64 to integers, and saturate.

    Args:
        values: float64.
        dtype: of the result.
        source: the type that was converted from, on which the result of NaN depends.
        rounding: a function that rounds float64 to integers.
    """
    rounded, limits = rounding(values), np.iinfo(dtype)
    too_low = rounded < float(limits.min)
    # the largest integer of 64 bits is not a float64, but the next one is
    too_high = rounded >= float(limits.max) + (1 if dtype.itemsize < 8 else 0)
    is_nan = np.isnan(values)
    found = np.where(too_low | too_high | is_nan, 0, rounded).astype(dtype)
    found = np.where(too_high, dtype.type(limits.max), found)
    found = np.where(too_low, dtype.type(limits.min), found)
    of_nan = 0
    if source == "f64" or dtype.itemsize == 8:
        of_nan = int(limits.min) if dtype.kind == "i" else 1 << (8 * dtype.itemsize - 1)
    return np.where(is_nan, dtype.type(of_nan), found)


# -- integers


def divide(a: Array, b: Array) -> Array:
    """Divide integers and truncate toward zero.

    PTX leaves a division by zero unspecified. Here, all bits of the quotient are set.
    """
    divisor = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        is_inexact = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
        quotient = quotient + is_inexact.astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(quotient), quotient)


def remainder(a: Array, b: Array) -> Array:
    """Return the remainder of `divide`, which has the sign of a; by zero it is a."""
    return np.where(b == 0, a, a - divide(a, b) * b)


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper half of the product of integers."""
    if a.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
        product = a.astype(wide) * b.astype(wide)
        return (product >> wide.type(8 * a.itemsize)).astype(a.dtype)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    x_low, x_high, y_low, y_high = x & mask, x >> half, y & mask, y >> half
    middle = x_high * y_low + (x_low * y_low >> half)
    other = x_low * y_high + (middle & mask)
    found = x_high * y_high + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        found = found - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return found.astype(a.dtype)


def shift_left(a: Array, amount: Array) -> Array:
    """Shift, and return 0 if `amount` is at least the width."""
    width = 8 * a.itemsize
    amount_below = np.minimum(amount, width - 1).astype(a.dtype)
    return np.where(amount < width, a << amount_below, a.dtype.type(0))


def shift_right(a: Array, amount: Array) -> Array:
    """Shift, and return 0, or for signed integers the sign, if `amount` is at least the width."""
    width = 8 * a.itemsize
    found = a >> np.minimum(amount, width - 1).astype(a.dtype)
    return found if a.dtype.kind == "i" else np.where(amount < width, found, a.dtype.type(0))


def extract_bits(a: Array, begin: Array, length: Array) -> Array:
    """Return the bit field of `bfe`; that of a signed integer has its sign."""
    width = 8 * a.itemsize
    begin, length = begin & np.uint32(255), length & np.uint32(255)
    found = shift_right(a, begin)
    unused = (width - np.minimum(length, width)).astype(np.uint32)
    found = shift_right(shift_left(found, unused), unused)
    return np.where(length == 0, a.dtype.type(0), found)


def insert_bits(a: Array, b: Array, begin: Array, length: Array) -> Array:
    """Return b with the bit field of `bfi` replaced by the lowest bits of a."""
    one = np.ones_like(b)
    begin, length = begin & np.uint32(255), length & np.uint32(255)
    field = shift_left(shift_left(one, length) - one, begin)
    return (b & ~field) | (shift_left(a, begin) & field)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Return four bytes of the eight of a and b, or their signs, as `prmt`."""
    both: Array = (b.astype(np.uint64) << np.uint64(32)) | a
    found: Array = np.zeros_like(a)
    for position in range(4):
        code = (selector >> np.uint32(4 * position)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (code & np.uint32(7)))) & np.uint64(255)
        byte = np.where(code & 8, (byte >> np.uint64(7)) * np.uint64(255), byte).astype(np.uint32)
        found = found | (byte << np.uint32(8 * position))
    return np.asarray(found)


def lookup_logic(a: Array, b: Array, c: Array, table: int) -> Array:
    """Return the function of three bits that the truth table of `lop3` has."""
    if_a, if_not_a = _logic_of_two(b, c, table >> 4), _logic_of_two(b, c, table & 15)
    return (a & if_a) | (~a & if_not_a)


def _logic_of_two(b: Array, c: Array, table: int) -> Array:
    found = np.zeros_like(b | c)
    terms = [~b & ~c, ~b & c, b & ~c, b & c]
    for position, term in enumerate(terms):
        if table >> position & 1:
            found = found | term
    return found


def funnel_shift(lower: Array, upper: Array, amount: Array, left: bool, wraps: bool) -> Array:
    """Shift two 32-bit words as one, and return the upper word, or with `left=False` the lower."""
    amount = amount & np.uint32(31) if wraps else np.minimum(amount, np.uint32(32))
    both = (upper.astype(np.uint64) << np.uint64(32)) | lower
    if left:
        return ((both << amount.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> amount.astype(np.uint64)).astype(np.uint32)


def count_bits(a: Array) -> Array:
    """Return the number of bits that are set, as u32."""
    a = np.ascontiguousarray(a)
    return _BITS_OF_BYTES[a.view(np.uint8).reshape(*a.shape, a.itemsize)].sum(-1, np.uint32)


_BITS_OF_BYTES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def count_leading_zeros(a: Array) -> Array:
    """Return the number of leading zero bits, as u32."""
    width, found = 8 * a.itemsize, np.asarray(a)
    for step in (1, 2, 4, 8, 16, 32):
        if step < width:
            found = found | (found >> found.dtype.type(step))
    return np.uint32(width) - count_bits(found)


def reverse_bits(a: Array) -> Array:
    """Return the bits in reverse order."""
    width, found = 8 * a.itemsize, np.zeros_like(a)
    for bit in range(width):
        one = (a >> a.dtype.type(bit)) & a.dtype.type(1)
        found = found | (one << a.dtype.type(width - 1 - bit))
    return found
