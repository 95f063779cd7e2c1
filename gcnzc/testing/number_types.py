"""Number types of PTX: numpy dtypes of registers, and conversions between floating-point formats.

Values of bf16 and of packed types (f16x2, bf16x2, u16x2, s16x2, f32x2) are held as their bits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    **{kind: np.dtype(np.uint32) for kind in ("f16x2", "bf16x2", "u16x2", "s16x2")},
    "f32x2": np.dtype(np.uint64),
    **{f"b{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"u{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
}
# a rounding modifier of PTX, and the function that rounds to integers in this direction
ROUNDINGS = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


@dataclass(frozen=True)
class FloatFormat:
    """Bits of a binary floating-point format."""

    fraction_bits: int
    min_exponent: int  # of normal numbers
    largest: float


FORMATS = {
    "f16": FloatFormat(10, -14, 65504.0),
    "bf16": FloatFormat(7, -126, float((2 - 2.0**-7) * 2.0**127)),
    "f32": FloatFormat(23, -126, float((2 - 2.0**-23) * 2.0**127)),
}


def is_float(kind: str) -> bool:
    """Whether a type is a single floating-point number."""
    return kind in ("f16", "bf16", "f32", "f64")


def is_integer(kind: str) -> bool:
    """Whether a type is a single integer or untyped bits."""
    return kind[0] in "bus" and kind[1:].isdigit()


def bits_of(values: Array) -> Array:
    """Return the bits of numbers as unsigned integers; booleans are returned as they are."""
    return values if values.dtype == bool else values.view(f"u{values.itemsize}")


def with_canonical_nan(values: Array) -> Array:
    """Replace NaNs by the one that instructions return: 0x7FFF or 0x7FFFFFFF; f64 is unchanged."""
    if values.dtype == np.float64:
        return values
    is_nan = np.isnan(values)
    if not is_nan.any():
        return values
    bits = np.uint16(0x7FFF) if values.itemsize == 2 else np.uint32(0x7FFFFFFF)
    return np.where(is_nan, bits.view(values.dtype), values)


def decode(values: Array, kind: str) -> Array:
    """Return registers of a floating-point type as float64, exactly."""
    if kind == "bf16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64)


def encode(values: Array, kind: str, rounding: str = "rn") -> Array:
    """Round float64 to a floating-point type once.

    Args:
        values: float64.
        kind: f16, bf16, f32 or f64.
        rounding: rn (to nearest, ties to even), rz (toward zero), rm (down) or rp (up).
    """
    if kind == "f64":
        return values
    if rounding == "rn" and kind in ("f16", "f32"):
        return with_canonical_nan(values.astype(DTYPES[kind]))
    rounded = _round(values, FORMATS[kind], rounding)
    if kind != "bf16":
        return with_canonical_nan(rounded.astype(DTYPES[kind]))
    bits = rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), bits).astype(np.uint16)


def _round(values: Array, float_format: FloatFormat, rounding: str) -> Array:
    """Round float64 to multiples of the last bit, by scaling with powers of two."""
    exponent = np.maximum(np.frexp(values)[1] - 1, float_format.min_exponent)
    last_bit = exponent - float_format.fraction_bits
    rounded = np.ldexp(ROUNDINGS[rounding](np.ldexp(values, -last_bit)), last_bit)
    too_large = np.isfinite(values) & (np.abs(rounded) > float_format.largest)
    if too_large.any():
        stays_finite = {
            "rn": np.zeros_like(too_large),
            "rz": np.ones_like(too_large),
            "rm": values > 0,
            "rp": values < 0,
        }[rounding]
        limit = np.where(stays_finite, float_format.largest, np.inf)
        rounded = np.where(too_large, np.copysign(limit, values), rounded)
    return np.where(np.isfinite(values), rounded, values)


@cache
def float8_to_half(kind: str) -> Array:
    """Return the f16 value of each of the 256 codes of e4m3 or e5m2."""
    codes = np.arange(256, dtype=np.uint16)
    if kind == "e5m2":
        # the upper half of a float16
        return with_canonical_nan((codes << np.uint16(8)).view(np.float16))
    half = ((codes & np.uint16(0x7F)) << np.uint16(7)) | ((codes & np.uint16(0x80)) << np.uint16(8))
    values = (half.view(np.float16).astype(np.float32) * 256).astype(np.float16)
    return np.where(codes & 0x7F == 0x7F, np.uint16(0x7FFF).view(np.float16), values)


def split_halves(words: Array) -> tuple[Array, Array]:
    """Return the lower and upper halves of 32-bit or 64-bit words."""
    half = np.dtype(f"u{words.itemsize // 2}")
    return words.astype(half), (words >> words.dtype.type(8 * half.itemsize)).astype(half)


def join_halves(lower: Array, upper: Array) -> Array:
    """Return the words of which these are the lower and upper halves."""
    word = np.dtype(f"u{2 * lower.itemsize}")
    return lower.astype(word) | (upper.astype(word) << word.type(8 * lower.itemsize))


def pack_argument(kind: str, value: Any) -> Array:
    """Return the bytes of a kernel argument, followed by padding for reads as a wider type.

    Args:
        kind: type of the value in PTX, such as u64 or bf16.
        value: a number.
    """
    if kind == "bf16":
        bits = encode(np.array([value], np.float64), kind)
    elif is_float(kind):
        bits = np.array([value], DTYPES[kind])
    else:
        size = DTYPES[kind].itemsize
        bits = np.array([int(value) & ((1 << 8 * size) - 1)], f"u{size}")
    return np.concatenate([bits.view(np.uint8), np.zeros(8, np.uint8)])
