"""Exact rounding of fractions to binary floating-point formats, as a reference."""

import struct
from fractions import Fraction

# bits of the exponent and of the fraction
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def to_fraction(bits, kind):
    """The value of a finite number, of its bits."""
    exponent_bits, fraction_bits = FORMATS[kind]
    fraction = bits & ((1 << fraction_bits) - 1)
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1 if bits >> (fraction_bits + exponent_bits) & 1 else 1
    if exponent == 0:
        return sign * Fraction(fraction, 1 << fraction_bits) / Fraction(2) ** (bias - 1)
    assert exponent != (1 << exponent_bits) - 1, "not finite"
    significand = Fraction((1 << fraction_bits) + fraction, 1 << fraction_bits)
    return sign * significand * Fraction(2) ** (exponent - bias)


def is_nan(bits, kind):
    """Whether the bits are those of a NaN."""
    exponent_bits, fraction_bits = FORMATS[kind]
    magnitude = bits & ((1 << (exponent_bits + fraction_bits)) - 1)
    return magnitude > ((1 << exponent_bits) - 1) << fraction_bits


def is_finite(bits, kind):
    """Whether the bits are those of a number that is neither infinite nor NaN."""
    exponent_bits, fraction_bits = FORMATS[kind]
    largest = (1 << exponent_bits) - 1
    return bits >> fraction_bits & largest != largest


def from_fraction(exact, kind, rounding="rn"):
    """The bits of a fraction, rounded once; for zero, those of +0."""
    exponent_bits, fraction_bits = FORMATS[kind]
    bias, sign, magnitude = (1 << (exponent_bits - 1)) - 1, int(exact < 0), abs(exact)
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    sign_bit = sign << (exponent_bits + fraction_bits)
    if magnitude == 0:
        return 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while magnitude < Fraction(2) ** exponent:
        exponent -= 1
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    last_bit = Fraction(2) ** (max(exponent, 1 - bias) - fraction_bits)
    whole, rest = divmod(magnitude, last_bit)
    up = {
        "rn": 2 * rest > last_bit or (2 * rest == last_bit and whole % 2 == 1),
        "rz": False,
        "rm": bool(rest) and sign == 1,
        "rp": bool(rest) and sign == 0,
    }[rounding]
    whole += up
    # the bits of adjacent numbers are adjacent, also where the exponent changes
    subnormal = exponent < 1 - bias
    bits = whole if subnormal else whole + ((exponent + bias - 1) << fraction_bits)
    if bits >= infinity:
        away = {"rn": True, "rz": False, "rm": sign == 1, "rp": sign == 0}[rounding]
        bits = infinity if away else infinity - 1
    return int(bits) | sign_bit


def float_bits(value, kind):
    """The bits of a Python float in a format that can represent it."""
    codes = {"f16": "<e", "f32": "<f", "f64": "<d"}
    return int.from_bytes(struct.pack(codes[kind], value), "little")
