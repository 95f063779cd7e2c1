"""Arithmetic, logical and comparison instructions: the function and the types of each form."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gcnzc.testing import arithmetic
from gcnzc.testing.faults import unsupported
from gcnzc.testing.number_types import (
    DTYPES,
    Array,
    bits_of,
    decode,
    encode,
    is_float,
    is_integer,
    join_halves,
    split_halves,
    with_canonical_nan,
)
from gcnzc.testing.operands import Value, both_defined

Function: TypeAlias = Callable[..., Array]


@dataclass(frozen=True)
class Operation:
    """What an instruction computes in each thread."""

    function: Function
    sources: Sequence[str]  # types of the operands that it reads
    result: str  # type
    # where the result is defined, by the operands; by default where all operands are
    defined: Callable[..., Array | None] | None = None

    def __call__(self, *operands: Value) -> Value:
        """Return the value of each thread, and where it is defined."""
        values = self.function(*(value for value, _ in operands))
        if all(defined is None for _, defined in operands):
            return values, None
        if self.defined is not None:
            return values, self.defined(*operands)
        return values, both_defined(*(defined for _, defined in operands))


def find_operation(
    name: str, modifiers: Sequence[str], kind: str, num_operands: int = 2
) -> Operation:
    """Return the operation of an instruction.

    Args:
        name: such as add.
        modifiers: between the name and the type, such as rn.
        kind: the type, the last part of the opcode.
        num_operands: that the instruction reads; only of `min` and `max` do several have a form.

    Raises:
        UnsupportedInstruction: this form is not implemented.
    """
    found = None
    if kind in _PACKED:
        found = _packed(name, modifiers, kind)
    elif kind == "pred":
        found = _predicate(name, modifiers)
    elif is_float(kind):
        found = _floating(name, modifiers, kind, num_operands)
    if found is None and is_integer(kind):
        found = _integer(name, modifiers, kind)
    if found is None and kind in DTYPES:
        found = _any_type(name, modifiers, kind)
    if found is None:
        raise unsupported(".".join([name, *modifiers, kind]))
    return found


# -- predicates and selection


def _absorbing_defined(absorbing: bool) -> Callable[[Value, Value], Array | None]:
    """Return where `and` or `or` is defined: also where one operand alone decides."""

    def defined(a: Value, b: Value) -> Array | None:
        decides = np.zeros_like(a[0], dtype=bool) | np.zeros_like(b[0], dtype=bool)
        for value, is_defined in (a, b):
            same = value if absorbing else ~value
            decides = decides | (same if is_defined is None else same & is_defined)
        both = both_defined(a[1], b[1])
        return None if both is None else both | decides

    return defined


def _predicate(name: str, modifiers: Sequence[str]) -> Operation | None:
    binary: dict[str, tuple[Function, Any]] = {
        "and": (operator.and_, _absorbing_defined(False)),
        "or": (operator.or_, _absorbing_defined(True)),
        "xor": (operator.xor, None),
    }
    if modifiers:
        return None
    if name in binary:
        function, defined = binary[name]
        return Operation(function, ("pred", "pred"), "pred", defined)
    if name == "not":
        return Operation(operator.invert, ("pred",), "pred")
    return Operation(np.asarray, ("pred",), "pred") if name == "mov" else None


def _selected_defined(a: Value, b: Value, predicate: Value) -> Array | None:
    chosen = np.where(
        predicate[0],
        True if a[1] is None else a[1],
        True if b[1] is None else b[1],
    )
    return both_defined(chosen, predicate[1])


def _select(a: Array, b: Array, predicate: Array) -> Array:
    return np.where(predicate, a, b)


def _any_type(name: str, modifiers: Sequence[str], kind: str) -> Operation | None:
    """Return an operation that only moves values."""
    if name == "mov" and not modifiers:
        return Operation(np.asarray, (kind,), kind)
    if name == "selp" and not modifiers:
        return Operation(_select, (kind, kind, "pred"), kind, _selected_defined)
    if name == "cvta" and kind == "u64" and set(modifiers) <= {"to", "global"}:
        return Operation(np.asarray, (kind,), kind)
    return None


def find_comparison(
    comparison: str, join: str | None, flushes: bool, kind: str
) -> Callable[..., tuple[Value, Value]]:
    """Return the function of `setp`: the predicate, and the one of its second destination.

    Args:
        comparison: such as lt.
        join: and, or, xor, with which a third operand is joined; or None.
        flushes: whether subnormal f32 count as zero.
        kind: type of the first two operands.

    Raises:
        UnsupportedInstruction: there is no such comparison.
    """
    base = comparison[:-1] if comparison.endswith("u") and is_float(kind) else comparison
    ordered = {"num", "nan"} if is_float(kind) else set()
    is_known = base in arithmetic.COMPARISONS or comparison in ordered
    # the two results of a packed comparison are those of its halves
    if not is_known or not (is_float(kind) or is_integer(kind)):
        raise unsupported(f"setp.{comparison}.{kind}")
    join_predicates = _predicate(join, ()) if join else None

    def compare(a: Value, b: Value, other: Value | None = None) -> tuple[Value, Value]:
        x, y = a[0], b[0]
        if kind == "bf16":
            x, y = decode(x, kind), decode(y, kind)
        if flushes:
            x, y = arithmetic.flush_subnormals(x), arithmetic.flush_subnormals(y)
        found = arithmetic.compare(comparison, x, y)
        defined = both_defined(a[1], b[1])
        first, second = (found, defined), (~found, defined)
        if join_predicates is None or other is None:
            return first, second
        return join_predicates(first, other), join_predicates(second, other)

    return compare


# -- floating point

_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_UNARY: dict[str, Function] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "sin": np.sin,
    "cos": np.cos, "tanh": np.tanh, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


def _floating(
    name: str, modifiers: Sequence[str], kind: str, num_operands: int
) -> Operation | None:
    if kind in ("f16", "bf16") and modifiers and modifiers[-1] == "f32":
        return _mixed_precision(name, modifiers[:-1], kind)
    allowed = {"rn", "ftz"}
    if name in ("div", *_UNARY):
        # the results of approximations are rounded correctly here
        allowed |= {"approx", "full"}
    if name in ("min", "max"):
        allowed = {"ftz", "NaN"}
    if name in ("abs", "neg"):
        allowed = {"ftz"}
    if name == "copysign":
        allowed = set()
    flushes = "ftz" in modifiers
    can_flush = kind in ("f32", "f16") or (name, kind) == ("ex2", "bf16")
    if not set(modifiers) <= allowed or (flushes and not can_flush):
        return None
    if (name, kind) == ("ex2", "bf16") and not flushes:
        return None
    found: tuple[Function, int] | None = None
    if name in ("abs", "neg"):
        return _sign_operation(name, flushes, kind)
    if name == "copysign":
        # the sign of the first operand, and the magnitude of the second
        return None if kind not in ("f32", "f64") else _copysign(kind)
    if name in _BINARY:
        found = _rounded(_BINARY[name], kind), 2
    elif name in ("fma", "mad"):
        found = _decoded_fma(kind), 3
    elif name in ("min", "max"):
        function = arithmetic.minimum if name == "min" else arithmetic.maximum
        nan = "NaN" in modifiers
        extremum = _through_single(lambda a, b: function(a, b, nan), kind)
        found = extremum, 2
        if (num_operands, kind) == (3, "f32"):
            found = (lambda a, b, c: extremum(extremum(a, b), c)), 3
    elif name in _UNARY:
        found = _rounded(_UNARY[name], kind), 1
    if found is None:
        return None
    function_of_values, count = found
    if flushes:
        function_of_values = _flushing(function_of_values, kind)
    return Operation(function_of_values, [kind] * count, kind)


def _mixed_precision(name: str, modifiers: Sequence[str], kind: str) -> Operation | None:
    """Return the operation on operands of 16 bits of which the last, and the result, are f32."""
    is_fma = name == "fma"
    if name not in ("add", "sub", "fma") or not set(modifiers) <= {"rn"}:
        return None
    sources = [kind] * (2 if is_fma else 1) + ["f32"]

    def function(*values: Array) -> Array:
        numbers = [decode(value, source) for value, source in zip(values, sources, strict=True)]
        if is_fma:
            return arithmetic.fma(*numbers, kind="f32")
        return encode(_BINARY[name](*numbers), "f32")

    return Operation(function, sources, "f32")


def _rounded(function: Function, kind: str) -> Function:
    """Round the result of a function once.

    In float64 the sum, product, quotient and square root of shorter numbers have so many bits that
    a second rounding is without error.
    """
    if kind in ("f32", "f64") and isinstance(function, np.ufunc) and function in _BINARY.values():
        return lambda *values: with_canonical_nan(function(*values))
    return lambda *values: encode(function(*(decode(value, kind) for value in values)), kind)


def _decoded_fma(kind: str) -> Function:
    return lambda *values: arithmetic.fma(*(decode(value, kind) for value in values), kind=kind)


def _through_single(function: Function, kind: str) -> Function:
    if kind != "bf16":
        return function
    return lambda *values: encode(function(*(decode(value, kind) for value in values)), kind)


def _flushing(function: Function, kind: str) -> Function:
    flush = arithmetic.flush_subnormals
    return lambda *values: flush(function(*(flush(value, kind) for value in values)), kind)


def _sign_operation(name: str, flushes: bool, kind: str) -> Operation:
    dtype = DTYPES[kind]
    sign = np.array(1 << (8 * dtype.itemsize - 1), f"u{dtype.itemsize}")

    def function(values: Array) -> Array:
        if flushes:
            values = arithmetic.flush_subnormals(values, kind)
        bits = bits_of(np.asarray(values))
        return np.asarray(bits & ~sign if name == "abs" else bits ^ sign).view(dtype)

    return Operation(function, (kind,), kind)


def _copysign(kind: str) -> Operation:
    return Operation(lambda sign, value: np.copysign(value, sign), (kind, kind), kind)


# -- integers

_INTEGER_BINARY: dict[str, Function] = {
    "add": operator.add, "sub": operator.sub, "xor": operator.xor, "and": operator.and_,
    "or": operator.or_, "div": arithmetic.divide, "rem": arithmetic.remainder,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
_INTEGER_UNARY: dict[str, Function] = {
    "not": operator.invert, "neg": operator.neg, "abs": np.abs, "brev": arithmetic.reverse_bits,
}  # fmt: skip
_COUNTS: dict[str, Function] = {
    "popc": arithmetic.count_bits,
    "clz": arithmetic.count_leading_zeros,
}


def _integer(name: str, modifiers: Sequence[str], kind: str) -> Operation | None:
    if name in ("mul", "mad"):
        return _multiplication(name, modifiers, kind)
    if name == "shf":
        return _funnel_shift(modifiers, kind)
    if name == "prmt" and not modifiers and kind == "b32":
        return Operation(arithmetic.permute_bytes, [kind] * 3, kind, _permuted_defined)
    if modifiers:
        return None
    if name in _INTEGER_BINARY:
        defined = _masked_defined if name == "and" else None
        return Operation(_INTEGER_BINARY[name], [kind] * 2, kind, defined)
    if name in _INTEGER_UNARY:
        return Operation(_INTEGER_UNARY[name], [kind], kind)
    if name in _COUNTS:
        return Operation(_COUNTS[name], [kind], "u32")
    if name in ("shl", "shr"):
        shift = arithmetic.shift_left if name == "shl" else arithmetic.shift_right
        return Operation(shift, (kind, "u32"), kind)
    if name == "bfe":
        return Operation(arithmetic.extract_bits, (kind, "u32", "u32"), kind)
    if name == "bfi":
        return Operation(arithmetic.insert_bits, (kind, kind, "u32", "u32"), kind)
    if name == "lop3":
        logic: Function = lambda a, b, c, table: arithmetic.lookup_logic(  # noqa: E731
            a, b, c, int(table)
        )
        return Operation(logic, (kind, kind, kind, "u32"), kind)
    return None


def _permuted_defined(a: Value, b: Value, selector: Value) -> Array | None:
    """Return where `prmt` is defined: where any selected byte is.

    Triton fills words up with undefined bytes, whose results it does not use.
    """
    chosen = selector[0]
    nibbles = [
        (chosen >> chosen.dtype.type(shift)) & chosen.dtype.type(7) for shift in range(0, 16, 4)
    ]
    uses_a = np.logical_or.reduce([nibble < 4 for nibble in nibbles])
    uses_b = np.logical_or.reduce([nibble >= 4 for nibble in nibbles])
    of_a = uses_a if a[1] is None else uses_a & a[1]
    of_b = uses_b if b[1] is None else uses_b & b[1]
    return both_defined(of_a | of_b, selector[1])


def _masked_defined(a: Value, b: Value) -> Array | None:
    """Return where `and` of integers is defined: also where one operand is a defined zero."""
    is_zero = np.array(False)
    for value, defined in (a, b):
        is_zero = is_zero | ((value == 0) if defined is None else (value == 0) & defined)
    both = both_defined(a[1], b[1])
    return None if both is None else both | is_zero


def _multiplication(name: str, modifiers: Sequence[str], kind: str) -> Operation | None:
    if list(modifiers) not in (["lo"], ["hi"], ["wide"]):
        return None
    result = f"{kind[0]}{2 * int(kind[1:])}" if modifiers[0] == "wide" else kind
    if result not in DTYPES:
        return None
    dtype = DTYPES[result]
    multiply: Function = lambda a, b: a.astype(dtype) * b.astype(dtype)  # noqa: E731
    if modifiers[0] == "hi":
        multiply = arithmetic.multiply_high
    if name == "mul":
        return Operation(multiply, [kind] * 2, result)
    return Operation(lambda a, b, c: multiply(a, b) + c, (kind, kind, result), result)


def _funnel_shift(modifiers: Sequence[str], kind: str) -> Operation | None:
    if len(modifiers) != 2 or kind != "b32":
        return None
    direction, mode = modifiers
    if direction not in ("l", "r") or mode not in ("clamp", "wrap"):
        return None
    shift: Function = lambda lower, upper, amount: arithmetic.funnel_shift(  # noqa: E731
        lower, upper, amount, direction == "l", mode == "wrap"
    )
    return Operation(shift, (kind, kind, "u32"), kind)


# -- packed types

_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16", "f32x2": "f32"}


def _packed(name: str, modifiers: Sequence[str], kind: str) -> Operation | None:
    """Return the operation on both halves of words."""
    half = _PACKED[kind]
    if is_integer(half) and name not in ("add", "min", "max"):
        return None
    names = {"add", "sub", "mul", "fma"}
    if kind != "f32x2":
        names |= {"min", "max", "abs", "neg", "ex2", "tanh"}
    if name not in names:
        return None
    operation = find_operation(name, modifiers, half)
    dtype = DTYPES[half]

    def function(*words: Array) -> Array:
        halves = [split_halves(word) for word in words]
        results = [
            bits_of(operation.function(*(part[place].view(dtype) for part in halves)))
            for place in range(2)
        ]
        return join_halves(*results)

    return Operation(function, [kind] * len(operation.sources), kind)
