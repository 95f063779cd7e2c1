"""Inner loops of the aggregations as numba intrinsics: sums of scaled rows, and dot products.

The score of GATv2, `sum of a * leaky_relu(x + y)`, and its gradient are two more of these loops.

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

CHUNK_BYTES = 64, 16


INT64 = ir.IntType(64)


def _chunks(scalar: Any) -> list[Any]:
    """Return the types of the vectors that a row is processed in, widest first."""
    itemsize = 8 if isinstance(scalar, ir.DoubleType) else 4
    return [*(ir.VectorType(scalar, num_bytes // itemsize) for num_bytes in CHUNK_BYTES), scalar]


def _each_chunk(builder: Any, count: Any, scalar: Any, body: Callable[[Any, Any], None]) -> None:
    """Generate loops of `body(byte offset, type of the chunk)` that cover `count` elements."""
    itemsize = 8 if isinstance(scalar, ir.DoubleType) else 4
    begin = INT64(0)
    for chunk in _chunks(scalar):
        # `begin` is a multiple of the number of lanes, a power of two
        lanes = getattr(chunk, "count", 1)
        end = builder.and_(count, INT64(-lanes))
        with cgutils.for_range_slice(builder, begin, end, INT64(lanes), INT64) as (index, _):
            body(builder.mul(index, INT64(itemsize)), chunk)
        begin = end


def _pointer(builder: Any, address: Any, offset: Any, chunk: Any) -> Any:
    return builder.inttoptr(builder.add(address, offset), chunk.as_pointer())


def _load(builder: Any, address: Any, offset: Any, chunk: Any) -> Any:
    return builder.load(_pointer(builder, address, offset, chunk), align=4)


def _store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    builder.store(value, _pointer(builder, address, offset, value.type), align=4)


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


def _weighted_sum(
    builder: Any, rows: list[Any], weights: list[Any], offset: Any, chunk: Any
) -> Any:
    """Return the weighted sum of one row or two."""
    factors = [_broadcast(builder, weight, chunk) for weight in weights]
    values = [_load(builder, row, offset, chunk) for row in rows]
    total = builder.fmul(factors[0], values[0])
    return total if len(rows) == 1 else _multiply_add(builder, factors[1], values[1], total)


def _add_rows(_typing: Any, _out: Any, _count: Any, rows: Any, weights: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, count = args[:2]
        sources, scales = (cgutils.unpack_tuple(builder, pack, rows.count) for pack in args[2:])

        def body(offset: Any, chunk: Any) -> None:
            # four rows as two pairs, since the rounding error grows with the depth of a sum
            total = _weighted_sum(builder, sources[:2], scales[:2], offset, chunk)
            if rows.count > 2:
                other = _weighted_sum(builder, sources[2:], scales[2:], offset, chunk)
                total = builder.fadd(total, other)
            current = _load(builder, out, offset, chunk)
            _store(builder, builder.fadd(current, total), out, offset)

        _each_chunk(builder, count, scales[0].type, body)
        return context.get_dummy_value()

    addresses = types.UniTuple(types.int64, rows.count)
    return types.void(types.int64, types.int64, addresses, weights), codegen


def _scale_row(_typing: Any, _out: Any, _count: Any, weight: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, count, scale = args

        def body(offset: Any, chunk: Any) -> None:
            value = builder.fmul(
                _load(builder, out, offset, chunk), _broadcast(builder, scale, chunk)
            )
            _store(builder, value, out, offset)

        _each_chunk(builder, count, scale.type, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, weight), codegen


def _dot(_typing: Any, _one: Any, _other: Any, _count: Any, zero: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        one, other, count, start = args
        # one partial sum for each size of chunk, which LLVM keeps in a register
        sums = {}
        for chunk in _chunks(start.type):
            sums[str(chunk)] = cgutils.alloca_once_value(builder, ir.Constant(chunk, None))

        def body(offset: Any, chunk: Any) -> None:
            total = builder.load(sums[str(chunk)])
            left, right = _load(builder, one, offset, chunk), _load(builder, other, offset, chunk)
            builder.store(_multiply_add(builder, left, right, total), sums[str(chunk)])

        _each_chunk(builder, count, start.type, body)
        total = start
        for pointer in sums.values():
            total = _add_lanes(builder, total, builder.load(pointer))
        return total

    return zero(types.int64, types.int64, types.int64, zero), codegen


def _select_positive(builder: Any, value: Any, positive: Any, other: Any) -> Any:
    """Return `positive` where `value` > 0, otherwise `other`; all are chunks of the same type."""
    zero = _broadcast(
        builder, ir.Constant(getattr(value.type, "element", value.type), 0), value.type
    )
    return builder.select(builder.fcmp_ordered(">", value, zero), positive, other)


def _leaky_dot(_typing: Any, _a: Any, _one: Any, _other: Any, _count: Any, slope: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, one, other, count, factor = args
        sums = {}
        for chunk in _chunks(factor.type):
            sums[str(chunk)] = cgutils.alloca_once_value(builder, ir.Constant(chunk, None))

        def body(offset: Any, chunk: Any) -> None:
            left, right = _load(builder, one, offset, chunk), _load(builder, other, offset, chunk)
            value = builder.fadd(left, right)
            scaled = builder.fmul(value, _broadcast(builder, factor, chunk))
            value = _select_positive(builder, value, value, scaled)
            total = builder.load(sums[str(chunk)])
            total = _multiply_add(builder, _load(builder, a, offset, chunk), value, total)
            builder.store(total, sums[str(chunk)])

        _each_chunk(builder, count, factor.type, body)
        total = ir.Constant(factor.type, 0)
        for pointer in sums.values():
            total = _add_lanes(builder, total, builder.load(pointer))
        return total

    return slope(types.int64, types.int64, types.int64, types.int64, slope), codegen


def _add_leaky_slopes(
    _typing: Any, _out: Any, _one: Any, _count: Any, rows: Any, weights: Any, slope: Any
) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, one, count = args[:3]
        sources, scales = (cgutils.unpack_tuple(builder, pack, rows.count) for pack in args[3:5])
        scaled = [builder.fmul(scale, args[5]) for scale in scales]

        def body(offset: Any, chunk: Any) -> None:
            left, terms = _load(builder, one, offset, chunk), []
            for source, scale, small in zip(sources, scales, scaled, strict=True):
                value = builder.fadd(left, _load(builder, source, offset, chunk))
                factors = (_broadcast(builder, factor, chunk) for factor in (scale, small))
                terms.append(_select_positive(builder, value, *factors))
            # in pairs, since the rounding error grows with the depth of a sum
            while len(terms) > 1:
                terms = [builder.fadd(*terms[at : at + 2]) for at in range(0, len(terms), 2)]
            current = _load(builder, out, offset, chunk)
            _store(builder, builder.fadd(current, terms[0]), out, offset)

        _each_chunk(builder, count, scales[0].type, body)
        return _context.get_dummy_value()

    addresses = types.UniTuple(types.int64, rows.count)
    return types.void(types.int64, types.int64, types.int64, addresses, weights, slope), codegen


def _add_lanes(builder: Any, start: Any, value: Any) -> Any:
    if not isinstance(value.type, ir.VectorType):
        return builder.fadd(start, value)
    kind = ir.FunctionType(start.type, [start.type, value.type])
    function = _intrinsic(builder, "vector.reduce.fadd", kind, value.type)
    # "reassoc" allows the order of the processor's horizontal instructions
    return builder.call(function, [start, value], fastmath=("reassoc",))


# add_rows(out, count, (row, ...), (weight, ...)): out += weight * row + ..., for one, two or four
# rows of `count` elements of the type of the weights; `out` is read and written once for all rows
add_rows: Any = intrinsic(_add_rows)


# scale_row(out, count, weight): out *= weight
scale_row: Any = intrinsic(_scale_row)


# dot(one, other, count, zero): the dot product of `count` elements; `zero` is a 0 of their type
dot: Any = intrinsic(_dot)


# leaky_dot(a, one, other, count, slope): the dot product of `a` and leaky_relu(one + other), of
# `count` elements of the type of `slope`
leaky_dot: Any = intrinsic(_leaky_dot)


# add_leaky_slopes(out, one, count, (row, ...), (weight, ...), slope): out += weight * d(one + row)
# + ..., for one, two or four rows, where d is the derivative of the LeakyReLU: 1 or `slope`
add_leaky_slopes: Any = intrinsic(_add_leaky_slopes)
