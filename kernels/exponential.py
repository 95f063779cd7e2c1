"""The exponential function in numba kernels, for loops that LLVM vectorizes.

numba calls the C library for each element, which prevents vectorization. Here float32 is computed
by arithmetic alone: `exp(x) = 2**n * exp(r)` with the integer `n` nearest to `x / ln 2` and
`r = x - n ln 2` from -0.35 to 0.35, where a polynomial approximates `exp(r)`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT, DOUBLE, INT32 = ir.FloatType(), ir.DoubleType(), ir.IntType(32)

LOG2_E = 1.4426950408889634
# ln 2 in two parts: a product of the first one, of 9 bits, with an integer is exact
LN2_HIGH, LN2_LOW = 0.693359375, -2.1219444005469057e-4

# Coefficients, highest power first, of the polynomial that interpolates (exp(r) - 1 - r) / r**2 at
# the six Chebyshev nodes of [-a, a], where a = 1.001 * ln(2) / 2.
COEFFICIENTS = (
    0.000198910799,
    0.00139337312,
    0.00833331048,
    0.041666463,
    0.166666672,
    0.5,
)

# smallest float32 argument with a normal result; those below give 0
MIN_ARGUMENT = -87.3365

BIAS, MANTISSA_BITS = 127, 23


@intrinsic
def exp_nonpositive(_typing: Any, x: Any) -> Any:
    """Return exp(x) for x <= 0 or NaN. float32 uses the polynomial, float64 `llvm.exp`.

    The relative error of a float32 result is below 2e-7. Results below 1.2e-38, which are not
    normal numbers of float32, are 0.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if x == types.float64:
            return _call(builder, "exp", DOUBLE, *args)
        small, scale = _reduce(builder, *args)
        result = builder.fmul(builder.fadd(small, FLOAT(1.0)), scale)
        return _with_limit(builder, args[0], result, 0.0)

    return (x(x), codegen) if x in (types.float32, types.float64) else None


@intrinsic
def expm1_nonpositive(_typing: Any, x: Any) -> Any:
    """Compute exp(x) - 1 of a float32 x <= 0 or NaN, with a relative error below 4e-7."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        small, scale = _reduce(builder, *args)
        result = _call(builder, "fmuladd", FLOAT, small, scale, builder.fsub(scale, FLOAT(1.0)))
        return _with_limit(builder, args[0], result, -1.0)

    return (x(x), codegen) if x == types.float32 else None


def _reduce(builder: Any, value: Any) -> tuple[Any, Any]:
    """Return exp(r) - 1 and 2**n for `value` = n ln 2 + r."""
    nearest = _call(builder, "rint", FLOAT, builder.fmul(value, FLOAT(LOG2_E)))
    # not of arguments that are too small, or NaN, whose conversion to an integer is undefined
    is_normal = builder.fcmp_ordered(">=", value, FLOAT(MIN_ARGUMENT))
    n = builder.select(is_normal, nearest, FLOAT(0.0))
    r = _call(builder, "fmuladd", FLOAT, n, FLOAT(-LN2_HIGH), value)
    r = _call(builder, "fmuladd", FLOAT, n, FLOAT(-LN2_LOW), r)
    polynomial = FLOAT(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        polynomial = _call(builder, "fmuladd", FLOAT, polynomial, r, FLOAT(coefficient))
    small = _call(builder, "fmuladd", FLOAT, polynomial, builder.fmul(r, r), r)
    # 2**n, by its bits
    exponent = builder.add(builder.fptosi(n, INT32), INT32(BIAS))
    return small, builder.bitcast(builder.shl(exponent, INT32(MANTISSA_BITS)), FLOAT)


def _with_limit(builder: Any, value: Any, result: Any, limit: float) -> Any:
    """Return `result`, or `limit` if `value` is too small."""
    is_small = builder.fcmp_ordered("<", value, FLOAT(MIN_ARGUMENT))
    return builder.select(is_small, FLOAT(limit), result)


def _call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """Call a floating-point intrinsic of LLVM, whose arguments and result have the type `kind`."""
    suffix = "f64" if kind is DOUBLE else "f32"
    signature = ir.FunctionType(kind, [kind] * len(values))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, values)
