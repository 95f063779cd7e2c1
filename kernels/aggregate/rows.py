"""Inner loops of the aggregations as numba intrinsics: sums of scaled rows, and dot products.

The score of GATv2, `sum of a * leaky_relu(x + y)`, and its gradient are two more of these loops.

Rows of bfloat16 and float16 are converted to float32 when they are loaded; an argument `kind` has
the type of their elements, see `gcnzc.kernels.half_precision`. Sums are float32, or float64 for
rows of float64. Converted rows have the sums of the same float32 rows, bit for bit.

LLVM vectorizes and unrolls such a loop to steps of about 64 columns, and processes the remaining
columns one by one: all of them in a row of 16, 25 or 47 columns. Here a row is processed in vectors
of 64 B, then of 16 B, and then one by one. Addresses are integers, as in memory.py; the caller
guarantees that they are valid.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gcnzc.kernels.half_precision import BITS16, is_half, like, narrow, widen

CHUNK_BYTES = 64, 16


INT64 = ir.IntType(64)


def _chunks(scalar: Any) -> list[Any]:
    """Return the types of the vectors that a row is processed in, widest first."""
    itemsize = _itemsize(scalar)
    return [*(ir.VectorType(scalar, num_bytes // itemsize) for num_bytes in CHUNK_BYTES), scalar]


def _each_chunk(builder: Any, count: Any, scalar: Any, body: Callable[[Any, Any], None]) -> None:
    """Generate loops of `body(first element, type of the chunk)` that cover `count` elements."""
    begin = INT64(0)
    for chunk in _chunks(scalar):
        # `begin` is a multiple of the number of lanes, a power of two
        lanes = getattr(chunk, "count", 1)
        end = builder.and_(count, INT64(-lanes))
        with cgutils.for_range_slice(builder, begin, end, INT64(lanes), INT64) as (index, _):
            body(index, chunk)
        begin = end


def _pointer(builder: Any, address: Any, index: Any, chunk: Any) -> Any:
    element = getattr(chunk, "element", chunk)
    itemsize = element.width // 8 if isinstance(element, ir.IntType) else _itemsize(element)
    offset = builder.mul(index, INT64(itemsize))
    return builder.inttoptr(builder.add(address, offset), chunk.as_pointer())


def _itemsize(scalar: Any) -> int:
    return 8 if isinstance(scalar, ir.DoubleType) else 4


def _load(builder: Any, address: Any, index: Any, chunk: Any) -> Any:
    return builder.load(_pointer(builder, address, index, chunk), align=4)


def _load_row(context: Any, builder: Any, address: Any, index: Any, chunk: Any, kind: Any) -> Any:
    """Load a chunk of a row whose elements have the type `kind`, as floats."""
    if not is_half(kind):
        return _load(builder, address, index, chunk)
    pointer = _pointer(builder, address, index, like(chunk, BITS16))
    return widen(context, builder, builder.load(pointer, align=2), kind)


def _store(builder: Any, value: Any, address: Any, index: Any) -> None:
    builder.store(value, _pointer(builder, address, index, value.type), align=4)


def _broadcast(builder: Any, value: Any, chunk: Any) -> Any:
    """Broadcast `value` to all elements of a chunk."""
    if not isinstance(chunk, ir.VectorType):
        return value
    one = builder.insert_element(ir.Constant(chunk, ir.Undefined), value, INT64(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), chunk.count), [0] * chunk.count)
    return builder.shuffle_vector(one, one, lanes)


def _multiply_add(builder: Any, one: Any, other: Any, total: Any) -> Any:
    """Return `one * other + total`, fused where the processor has such an instruction."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.call(_intrinsic(builder, "fmuladd", kind, total.type), [one, other, total])


def _intrinsic(builder: Any, name: str, kind: Any, chunk: Any) -> Any:
    element = getattr(chunk, "element", chunk)
    lanes = f"v{chunk.count}" if element is not chunk else ""
    suffix = f"{lanes}{'f64' if isinstance(element, ir.DoubleType) else 'f32'}"
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix}")


def _add_rows(_typing: Any, _out: Any, _count: Any, rows: Any, weights: Any, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, count = args[:2]
        sources, scales = (cgutils.unpack_tuple(builder, pack, rows.count) for pack in args[2:4])

        def weighted_sum(numbers: slice, index: Any, chunk: Any) -> Any:
            """Return the weighted sum of one row or two."""
            factors = [_broadcast(builder, scale, chunk) for scale in scales[numbers]]
            values = [
                _load_row(context, builder, row, index, chunk, kind) for row in sources[numbers]
            ]
            total = builder.fmul(factors[0], values[0])
            if len(values) == 1:
                return total
            return _multiply_add(builder, factors[1], values[1], total)

        def body(index: Any, chunk: Any) -> None:
            # four rows as two pairs, since the rounding error grows with the depth of a sum
            total = weighted_sum(slice(2), index, chunk)
            if rows.count > 2:
                total = builder.fadd(total, weighted_sum(slice(2, 4), index, chunk))
            current = _load(builder, out, index, chunk)
            _store(builder, builder.fadd(current, total), out, index)

        _each_chunk(builder, count, scales[0].type, body)
        return context.get_dummy_value()

    addresses = types.UniTuple(types.int64, rows.count)
    return types.void(types.int64, types.int64, addresses, weights, kind), codegen


def _scale_row(_typing: Any, _out: Any, _count: Any, weight: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, count, scale = args

        def body(index: Any, chunk: Any) -> None:
            value = builder.fmul(
                _load(builder, out, index, chunk), _broadcast(builder, scale, chunk)
            )
            _store(builder, value, out, index)

        _each_chunk(builder, count, scale.type, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, weight), codegen


def _clear_row(_typing: Any, _out: Any, _count: Any, zero: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, count, value = args

        def body(index: Any, chunk: Any) -> None:
            _store(builder, _broadcast(builder, value, chunk), out, index)

        _each_chunk(builder, count, value.type, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, zero), codegen


def _round_row(_typing: Any, _out: Any, _row: Any, _count: Any, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, row, count = args[:3]

        def body(index: Any, chunk: Any) -> None:
            value = narrow(context, builder, _load(builder, row, index, chunk), kind)
            builder.store(value, _pointer(builder, out, index, value.type), align=2)

        if is_half(kind):
            _each_chunk(builder, count, ir.FloatType(), body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, kind), codegen


def _partial_sums(builder: Any, scalar: Any) -> dict[str, Any]:
    """Return one partial sum for each type of chunk, which LLVM keeps in a register."""
    return {
        str(chunk): cgutils.alloca_once_value(builder, ir.Constant(chunk, None))
        for chunk in _chunks(scalar)
    }


def _dot(_typing: Any, _one: Any, _other: Any, _count: Any, zero: Any, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        one, other, count, start = args[:4]
        sums = _partial_sums(builder, start.type)

        def body(index: Any, chunk: Any) -> None:
            total = builder.load(sums[str(chunk)])
            left = _load_row(context, builder, one, index, chunk, kind)
            right = _load_row(context, builder, other, index, chunk, kind)
            builder.store(_multiply_add(builder, left, right, total), sums[str(chunk)])

        _each_chunk(builder, count, start.type, body)
        total = start
        for pointer in sums.values():
            total = _add_lanes(builder, total, builder.load(pointer))
        return total

    return zero(types.int64, types.int64, types.int64, zero, kind), codegen


def _select_positive(builder: Any, value: Any, positive: Any, other: Any) -> Any:
    """Return `positive` where `value` > 0, otherwise `other`; all are chunks of the same type."""
    zero = _broadcast(
        builder, ir.Constant(getattr(value.type, "element", value.type), 0), value.type
    )
    return builder.select(builder.fcmp_ordered(">", value, zero), positive, other)


def _leaky_dot(
    _typing: Any, _a: Any, _one: Any, _other: Any, _count: Any, slope: Any, kind: Any
) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, one, other, count, factor = args[:5]
        sums = _partial_sums(builder, factor.type)

        def body(index: Any, chunk: Any) -> None:
            left = _load_row(context, builder, one, index, chunk, kind)
            right = _load_row(context, builder, other, index, chunk, kind)
            value = builder.fadd(left, right)
            scaled = builder.fmul(value, _broadcast(builder, factor, chunk))
            value = _select_positive(builder, value, value, scaled)
            total = builder.load(sums[str(chunk)])
            total = _multiply_add(builder, _load(builder, a, index, chunk), value, total)
            builder.store(total, sums[str(chunk)])

        _each_chunk(builder, count, factor.type, body)
        total = ir.Constant(factor.type, 0)
        for pointer in sums.values():
            total = _add_lanes(builder, total, builder.load(pointer))
        return total

    signature = slope(types.int64, types.int64, types.int64, types.int64, slope, kind)
    return signature, codegen


def _add_leaky_slopes(
    _typing: Any, _out: Any, _one: Any, _count: Any, rows: Any, weights: Any, slope: Any, kind: Any
) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, one, count = args[:3]
        sources, scales = (cgutils.unpack_tuple(builder, pack, rows.count) for pack in args[3:5])
        scaled = [builder.fmul(scale, args[5]) for scale in scales]

        def body(index: Any, chunk: Any) -> None:
            left, terms = _load_row(context, builder, one, index, chunk, kind), []
            for source, scale, small in zip(sources, scales, scaled, strict=True):
                right = _load_row(context, builder, source, index, chunk, kind)
                value = builder.fadd(left, right)
                factors = (_broadcast(builder, factor, chunk) for factor in (scale, small))
                terms.append(_select_positive(builder, value, *factors))
            # in pairs, since the rounding error grows with the depth of a sum
            while len(terms) > 1:
                terms = [builder.fadd(*terms[at : at + 2]) for at in range(0, len(terms), 2)]
            current = _load(builder, out, index, chunk)
            _store(builder, builder.fadd(current, terms[0]), out, index)

        _each_chunk(builder, count, scales[0].type, body)
        return context.get_dummy_value()

    addresses = types.UniTuple(types.int64, rows.count)
    given = types.int64, types.int64, types.int64, addresses, weights, slope, kind
    return types.void(*given), codegen


def _add_lanes(builder: Any, start: Any, value: Any) -> Any:
    if not isinstance(value.type, ir.VectorType):
        return builder.fadd(start, value)
    kind = ir.FunctionType(start.type, [start.type, value.type])
    function = _intrinsic(builder, "vector.reduce.fadd", kind, value.type)
    # "reassoc" allows the order of the processor's horizontal instructions
    return builder.call(function, [start, value], fastmath=("reassoc",))


# add_rows(out, count, (row, ...), (weight, ...), kind): out += weight * row + ..., for one, two or
# four rows of `count` elements of `kind`; `out` has the type of the weights, and is read and
# written once for all rows
add_rows: Any = intrinsic(_add_rows)


# scale_row(out, count, weight): out *= weight
scale_row: Any = intrinsic(_scale_row)


# clear_row(out, count, zero): out = 0, of the type of `zero`
clear_row: Any = intrinsic(_clear_row)


# round_row(out, row, count, kind): out = the float32 elements of `row`, rounded to `kind`; nothing
# if `kind` is not one of 16 bits
round_row: Any = intrinsic(_round_row)


# dot(one, other, count, zero, kind): the dot product of two rows of `kind`, with the type of
# `zero`, which is a 0
dot: Any = intrinsic(_dot)


# leaky_dot(a, one, other, count, slope, kind): the dot product of `a` and leaky_relu(one + other);
# `a` has the type of `slope`, and the rows `one` and `other` are of `kind`
leaky_dot: Any = intrinsic(_leaky_dot)


# add_leaky_slopes(out, one, count, (row, ...), (weight, ...), slope, kind): out += weight *
# d(one + row) + ..., for one, two or four rows, where d is the derivative of the LeakyReLU: 1 or
# `slope`; `one` and the rows are of `kind`, and `out` has the type of the weights
add_leaky_slopes: Any = intrinsic(_add_leaky_slopes)
