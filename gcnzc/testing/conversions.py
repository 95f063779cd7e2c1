"""Conversion instructions, `cvt`: of integers, f16, bf16, f32 and f64, and from float8 to f16x2.

Two f32 are also converted to f16x2 or bf16x2. Conversions to float8, tf32 and narrower types,
`.relu`, and those of 64-bit integers to bf16, or with a rounding other than rn, are not
implemented.
"""

from collections.abc import Callable, Sequence

import numpy as np

from gcnzc.testing import arithmetic
from gcnzc.testing.elementwise import Operation
from gcnzc.testing.faults import unsupported
from gcnzc.testing.number_types import (
    DTYPES,
    ROUNDINGS,
    Array,
    bits_of,
    decode,
    encode,
    float8_to_half,
    is_float,
    is_integer,
    join_halves,
)

# roundings to integral values
_INTEGRAL = {f"{rounding}i": function for rounding, function in ROUNDINGS.items()}


def find_conversion(modifiers: Sequence[str], result: str, source: str) -> Operation:
    """Return the operation of `cvt`.

    Args:
        modifiers: before the types, such as rn.
        result: type of the result.
        source: type of the operand.

    Raises:
        UnsupportedInstruction: this conversion is not implemented.
    """
    operation = None
    rest = [modifier for modifier in modifiers if modifier not in ("sat", "ftz")]
    rounding = rest[0] if rest else None
    if len(rest) <= 1 and (rounding is None or rounding in (*ROUNDINGS, *_INTEGRAL)):
        if result in ("f16x2", "bf16x2"):
            if not {"sat", "ftz"} & set(modifiers) and rounding in (*ROUNDINGS, None):
                operation = _to_pair(result, source, rounding or "rn")
        else:
            operation = _single(modifiers, rounding, result, source)
    if operation is None:
        raise unsupported(".".join(["cvt", *modifiers, result, source]))
    return operation


def _to_pair(result: str, source: str, rounding: str) -> Operation | None:
    half = result[:-2]
    if source == "f32":
        # the first operand becomes the upper half
        def join(upper: Array, lower: Array) -> Array:
            halves = [encode(decode(value, "f32"), half, rounding) for value in (lower, upper)]
            return join_halves(*(bits_of(each) for each in halves))

        return Operation(join, ("f32", "f32"), result)
    if result == "f16x2" and source in ("e4m3x2", "e5m2x2"):
        table = bits_of(float8_to_half(source[:-2]))
        return Operation(
            lambda codes: join_halves(table[codes & 255], table[codes >> np.uint16(8)]),
            (source,),
            result,
        )
    return None


def _single(
    modifiers: Sequence[str], rounding: str | None, result: str, source: str
) -> Operation | None:
    saturates, flushes = "sat" in modifiers, "ftz" in modifiers
    if not (is_float(result) or is_integer(result)) or not (is_float(source) or is_integer(source)):
        return None
    if flushes and "f32" not in (result, source):
        return None
    function: Callable[[Array], Array]
    if is_integer(source) and is_integer(result):
        if rounding is not None:
            return None
        function = _integer_to_integer(result, saturates)
    elif is_integer(source):
        if rounding in _INTEGRAL or (int(source[1:]) == 64 and result == "bf16"):
            return None
        exact = int(source[1:]) < 64
        if not exact and rounding not in (None, "rn"):
            return None
        to, mode = DTYPES[result], rounding or "rn"
        if exact:
            function = lambda x: encode(x.astype(np.float64), result, mode)  # noqa: E731
        else:
            # numpy rounds 64-bit integers once
            function = lambda x: x.astype(to)  # noqa: E731
    elif is_integer(result):
        if rounding not in _INTEGRAL:
            return None
        dtype, round_integral = DTYPES[result], _INTEGRAL[rounding]
        function = lambda x: arithmetic.to_integer(  # noqa: E731
            decode(x, source), dtype, source, round_integral
        )
    else:
        function = _float_to_float(rounding, result, source)
    if saturates and is_float(result):
        function = _clamped(function, result)
    if flushes:
        function = _flushed(function, result, source)
    return Operation(function, (source,), result)


def _integer_to_integer(result: str, saturates: bool) -> Callable[[Array], Array]:
    dtype = DTYPES[result]
    limits = np.iinfo(dtype)

    def convert(values: Array) -> Array:
        if saturates:
            own = np.iinfo(values.dtype)
            low, high = max(limits.min, own.min), min(limits.max, own.max)
            values = np.clip(values, values.dtype.type(low), values.dtype.type(high))
        return values.astype(dtype)

    return convert


def _float_to_float(rounding: str | None, result: str, source: str) -> Callable[[Array], Array]:
    if rounding in _INTEGRAL:
        round_integral = _INTEGRAL[str(rounding)]
        return lambda x: encode(round_integral(decode(x, source)), result)
    return lambda x: encode(decode(x, source), result, rounding or "rn")


def _clamped(function: Callable[[Array], Array], result: str) -> Callable[[Array], Array]:
    def convert(values: Array) -> Array:
        found = decode(function(values), result)
        # NaN becomes 0
        return encode(np.where(found > 0, np.minimum(found, 1.0), 0.0), result)

    return convert


def _flushed(
    function: Callable[[Array], Array], result: str, source: str
) -> Callable[[Array], Array]:
    def convert(values: Array) -> Array:
        found = function(arithmetic.flush_subnormals(values) if source == "f32" else values)
        return arithmetic.flush_subnormals(found) if result == "f32" else found

    return convert
