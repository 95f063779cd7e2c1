"""Signs packed to words on CPUs: numba kernels over parts of a vector, one thread each."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs_reference import Scale
from gcnzc.kernels.threads import in_parts

WORD = 32  # elements, whose bits fill a word of 4 bytes


LANES = 8  # sums that grow side by side


CHUNK = 4096  # elements, at most, that are done at once: 16 KiB, which stay in the nearest cache


# fewer elements than this are not worth a thread
PART_ELEMENTS = 1 << 17


def encode_numba(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    scale: Scale = "rms",
    threads: int | None = None,
) -> None:
    """`encode_signs_reference` on the CPU, for float32."""
    geometry = _geometry(cut, rows)
    sums = np.empty(_num_chunks(cut))
    counts = np.empty(len(sums), np.int64)
    words, scales = _words_of(cut, rows)
    vectors = _array(values), _array(error), _array(active, torch.bool)
    squares = scale == "rms"
    into = words, sums, counts
    _run(_encode, cut, *vectors, *into, squares, geometry, threads=threads)
    args = sums, counts, scales, squares, geometry
    in_parts(_write_scales, cut.parts * cut.blocks, *args, threads=threads, least=1 << 13)


def update_error_numba(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    threads: int | None = None,
) -> None:
    """`update_error_signs_reference` on the CPU, for float32."""
    _, scales = _words_of(cut, rows)
    vectors = _array(values), _array(error), _array(active, torch.bool)
    _run(_update_error, cut, *vectors, scales, _geometry(cut, rows), threads=threads)


def mean_numba(rows: Tensor, cut: BlockLayout, out: Tensor, threads: int | None = None) -> None:
    """`mean_of_signs_reference` on the CPU, for float32."""
    share, args = np.float32(1 / len(rows)), (*_words_of(cut, rows), _array(out))
    _run(_mean, cut, *args, len(rows), share, _geometry(cut, rows), threads=threads)


def decode_numba(
    rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor, threads: int | None = None
) -> None:
    """`decode_signs_reference` on the CPU, for float32."""
    args = *_words_of(cut, rows), _array(active, torch.bool), _array(out)
    _run(_decode, cut, *args, _geometry(cut, rows), threads=threads)


def _run(kernel: Any, cut: BlockLayout, *args: Any, threads: int | None) -> None:
    least = max(1, PART_ELEMENTS // min(CHUNK, cut.block_elements))
    in_parts(kernel, _num_chunks(cut), *args, threads=threads, least=least)


def _num_chunks(cut: BlockLayout) -> int:
    return cut.parts * cut.blocks * -(-cut.block_elements // CHUNK)


def _geometry(cut: BlockLayout, rows: Tensor) -> tuple[int, ...]:
    """What `_chunk` needs, and how many words are from a row to the next and in front of scales."""
    chunks = -(-cut.block_elements // CHUNK)
    lengths = cut.num_elements, cut.part, cut.block_elements
    return *lengths, cut.blocks, chunks, rows.stride(0) // 4, cut.part // WORD


def _words_of(cut: BlockLayout, rows: Tensor) -> tuple[Any, Any]:
    """Rows and what lies between them, as uint32 and as float32.

    In one dimension, so that numba compiles a kernel once for rows of any stride.
    """
    num_bytes = (len(rows) - 1) * rows.stride(0) + cut.row_bytes
    flat = rows.as_strided((num_bytes,), (1,)).numpy()
    return flat.view(np.uint32), flat.view(np.float32)


def _array(vector: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
    # without elements stands for none: one kernel is compiled for all
    return (torch.empty(0, dtype=dtype) if vector is None else vector.detach()).numpy()


# Intrinsics: the signs of 32 elements at a time, where LLVM knows to compare vectors and to move
# the bits of the outcome to a word at once. From loops it makes neither.

_FLOATS = ir.VectorType(ir.FloatType(), WORD)


_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


_INDICES = ir.VectorType(ir.IntType(32), LANES)


_BYTES = ir.VectorType(ir.IntType(8), WORD)


_BITS = ir.VectorType(ir.IntType(1), WORD)


_INT32 = ir.IntType(32)


# without its types, which count the typing context among the arguments of a call
_intrinsic: Any = intrinsic


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _encoder(with_error, squares):
    @_intrinsic
    def encode(_typing, _values, _error, _live, _sums):
        def codegen(_context, builder, _signature, args):
            values, error, live, sums = args
            y = builder.load(_at(builder, values, _FLOATS), align=4)
            if with_error:
                y = builder.fadd(y, builder.load(_at(builder, error, _FLOATS), align=4))
            live = builder.bitcast(live, _BITS)
            signs = builder.and_(builder.fcmp_ordered(">=", y, ir.Constant(_FLOATS, None)), live)
            # selected, not multiplied: NaN that is not live is nobody's
            y = builder.select(live, y, ir.Constant(_FLOATS, None))
            total, size = _at(builder, sums, _DOUBLES), None
            for begin in range(0, WORD, LANES):
                lanes = ir.Constant(_INDICES, list(range(begin, begin + LANES)))
                wide = builder.fpext(builder.shuffle_vector(y, y, lanes), _DOUBLES)
                one = builder.fmul(wide, wide) if squares else _absolute(builder, wide)
                size = one if size is None else builder.fadd(size, one)
            builder.store(builder.fadd(builder.load(total, align=8), size), total, align=8)
            return builder.bitcast(signs, _INT32)

        address = types.int64
        return types.uint32(address, address, types.uint32, address), codegen

    return encode


def _absolute(builder, x):
    kind = ir.FunctionType(x.type, [x.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fabs.v{LANES}f64")
    return builder.call(function, [x])


# The bits of 32 values at an address, or of their sums with 32 errors, of those that have their bit
# in the word `live`. To 8 float64 at another address they add squares or absolute values, those of
# every eighth.
_encode_squares = _encoder(with_error=False, squares=True)


_encode_sizes = _encoder(with_error=False, squares=False)


_encode_error_squares = _encoder(with_error=True, squares=True)


_encode_error_sizes = _encoder(with_error=True, squares=False)


@_intrinsic
def _flags_word(_typing, _flags):
    """A word whose bits are set where 32 bytes at an address are not 0."""

    def codegen(_context, builder, _signature, args):
        flags = builder.load(_at(builder, args[0], _BYTES), align=1)
        return builder.bitcast(
            builder.icmp_unsigned("!=", flags, ir.Constant(_BYTES, None)), _INT32
        )

    return types.uint32(types.int64), codegen


@_intrinsic
def _count_bits(_typing, _word):
    def codegen(_context, builder, _signature, args):
        return builder.zext(builder.ctpop(args[0]), ir.IntType(64))

    return types.int64(types.uint32), codegen


def _spread(adding):
    @_intrinsic
    def spread(_typing, _out, _word, _scale):
        def codegen(context, builder, _signature, args):
            out, word, scale = args
            one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scale, _INT32(0))
            lanes = ir.Constant(ir.VectorType(_INT32, WORD), [0] * WORD)
            scales = builder.shuffle_vector(one, one, lanes)
            signed = builder.select(builder.bitcast(word, _BITS), scales, builder.fneg(scales))
            place = _at(builder, out, _FLOATS)
            if adding:
                signed = builder.fadd(builder.load(place, align=4), signed)
            builder.store(signed, place, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint32, types.float32), codegen

    return spread


# write 32 times the scale to an address, with the sign of its bit in a word; or add it
_decode_word = _spread(adding=False)


_add_word = _spread(adding=True)


@njit(nogil=True, cache=True, error_model="numpy")
def _chunk(item, geometry):
    """The row of a chunk, its block, where it begins in the part and in the vector, its elements in
    the part, and those of them in the vector."""
    num_elements, part, block, blocks, chunks, _, _ = geometry
    row, rest = divmod(item, blocks * chunks)
    number, chunk = divmod(rest, chunks)
    first = number * block + chunk * CHUNK
    length = max(0, min(CHUNK, block - chunk * CHUNK, part - first))
    begin = row * part + first
    return row, number, first, begin, length, max(0, min(length, num_elements - begin))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(values, error, active, words, sums, counts, squares, geometry, begin, end):
    stride, lanes = geometry[5], np.empty(LANES)
    # the last elements of a vector, with what makes a word of them
    rest, rest_live = np.zeros((2, WORD), np.float32), np.zeros(WORD, np.bool_)
    with_error, some = len(error) > 0, len(active) > 0
    rests = rest[0].ctypes.data, rest[1].ctypes.data, rest_live.ctypes.data
    for item in range(begin, end):
        row, _, first, at, length, count = _chunk(item, geometry)
        into = words[row * stride + first // WORD :][: length // WORD]
        lanes[:] = 0
        lanes_at = lanes.ctypes.data
        values_at, error_at = values.ctypes.data + 4 * at, error.ctypes.data + 4 * at
        whole, kind = count // WORD, (with_error, squares)
        if some:
            active_at = active.ctypes.data + at
            live = 0
            for i in range(whole):
                flags = _flags_word(active_at + WORD * i)
                live += _count_bits(flags)
                place = 4 * WORD * i
                into[i] = _encode_word(values_at + place, error_at + place, flags, lanes_at, kind)
        else:
            live = whole * WORD
            flags = np.uint32(0xFFFFFFFF)
            for i in range(whole):
                place = 4 * WORD * i
                into[i] = _encode_word(values_at + place, error_at + place, flags, lanes_at, kind)
        into[whole:] = 0
        if count % WORD:
            for i in range(count % WORD):
                k = at + whole * WORD + i
                rest[0, i] = values[k]
                rest[1, i] = error[k] if with_error else np.float32(0)
                rest_live[i] = active[k] if some else True
            flags = _flags_word(rests[2])
            live += _count_bits(flags)
            into[whole] = _encode_word(rests[0], rests[1], flags, lanes_at, kind)
        sums[item] = _sum_of(lanes)
        counts[item] = live


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _encode_word(values, error, live, sums, kind):
    with_error, squares = kind
    if with_error:
        if squares:
            return _encode_error_squares(values, error, live, sums)
        return _encode_error_sizes(values, error, live, sums)
    if squares:
        return _encode_squares(values, error, live, sums)
    return _encode_sizes(values, error, live, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_of(lanes):
    # by halves, so that additions do not wait for each other
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def _write_scales(sums, counts, scales, squares, geometry, begin, end):
    blocks, chunks, stride, code_words = geometry[3:]
    for block in range(begin, end):
        total, count = 0.0, 0
        for item in range(block * chunks, (block + 1) * chunks):
            total += sums[item]
            count += counts[item]
        mean = total / max(count, 1)
        row, number = divmod(block, blocks)
        scales[row * stride + code_words + number] = np.sqrt(mean) if squares else mean


@njit(nogil=True, cache=True, error_model="numpy")
def _update_error(values, error, active, scales, geometry, begin, end):
    stride, code_words = geometry[5:]
    for item in range(begin, end):
        row, number, _, at, _, count = _chunk(item, geometry)
        scale = scales[row * stride + code_words + number]
        left = error[at : at + count]
        _take_sign(values[at : at + count], left, scale)
        if len(active):
            _clear(left, active[at : at + count])


# On slices, whose indices are never below 0: with others there is a branch, and no vectors.


@njit(nogil=True, cache=True, error_model="numpy")
def _take_sign(values, error, scale):
    for i in range(len(error)):
        y = values[i] + error[i]
        error[i] = y - (scale if y >= 0 else -scale)


@njit(nogil=True, cache=True, error_model="numpy")
def _clear(x, active):
    for i in range(len(x)):
        x[i] = x[i] if active[i] else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _mean(words, scales, out, workers, share, geometry, begin, end):
    stride, code_words = geometry[5:]
    for item in range(begin, end):
        _, number, first, at, _, count = _chunk(item, geometry)
        out[at : at + count] = 0
        for row in range(workers):
            scale = scales[row * stride + code_words + number] * share
            word = row * stride + first // WORD
            whole = count // WORD
            for i in range(whole):
                _add_word(out.ctypes.data + 4 * (at + WORD * i), words[word + i], scale)
            for i in range(whole * WORD, count):
                bit = words[word + whole] >> np.uint32(i % WORD) & np.uint32(1)
                out[at + i] += scale if bit else -scale


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(words, scales, active, out, geometry, begin, end):
    stride, code_words = geometry[5:]
    for item in range(begin, end):
        row, number, first, at, _, count = _chunk(item, geometry)
        scale = scales[row * stride + code_words + number]
        word = row * stride + first // WORD
        whole = count // WORD
        for i in range(whole):
            _decode_word(out.ctypes.data + 4 * (at + WORD * i), words[word + i], scale)
        for i in range(whole * WORD, count):
            bit = words[word + whole] >> np.uint32(i % WORD) & np.uint32(1)
            out[at + i] = scale if bit else -scale
        if len(active):
            _clear(out[at : at + count], active[at : at + count])
