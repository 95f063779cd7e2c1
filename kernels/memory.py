"""Prefetches, streaming stores and wide copies as numba intrinsics, for memory-bound kernels.

Addresses are integers, so that one compiled kernel works for every dtype. The caller keeps the
tensors alive and guarantees that addresses are valid.

A streaming (non-temporal) store writes a whole cache line without reading it first and without
allocating it in the cache. LLVM lowers a 64 B copy to one, two or four instructions, as the
processor allows.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINE_BYTES = 64

# untyped: numba's annotations count the typing context among the arguments of a call
_intrinsic: Any = intrinsic

_BYTE = ir.IntType(8)
_INT32 = ir.IntType(32)


def _prefetch(locality):
    @_intrinsic
    def ask(_typing, _address):
        def codegen(context, builder, _signature, args):
            pointer = _BYTE.as_pointer()
            wanted = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], wanted)
            # arguments: 0 for a read, the locality, 1 for the data cache
            line = builder.inttoptr(args[0], pointer)
            builder.call(function, [line, _INT32(0), _INT32(locality), _INT32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return ask


# Prefetch the line at an address; an invalid address is allowed. Hints that a line is read once
# (`prefetchnta`) make a gather on Intel's Xeon 1.5 times slower: the line skips the second cache.
prefetch = _prefetch(3)


@_intrinsic
def fence(_typing):
    """Make earlier streaming stores visible to other threads before later stores."""

    def codegen(context, builder, _signature, _args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _move(num_bytes, streaming=False, count=1):
    # copies `count` consecutive vectors: all loads, then all stores
    @_intrinsic
    def move(_typing, _to, _from):
        def codegen(context, builder, _signature, args):
            pointer = ir.VectorType(_BYTE, num_bytes).as_pointer()

            def at(address, i):
                moved = builder.add(address, ir.IntType(64)(i * num_bytes))
                return builder.inttoptr(moved, pointer)

            values = [builder.load(at(args[1], i), align=1) for i in range(count)]
            for i, value in enumerate(values):
                align = num_bytes if streaming else 1
                store = builder.store(value, at(args[0], i), align=align)
                if streaming:
                    store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return move


# move(to, from), from any address to any address
move_1 = _move(1)
move_2 = _move(2)
move_4 = _move(4)
move_8 = _move(8)
move_16 = _move(16)
move_32 = _move(32)
move_64 = _move(64)
move_256 = _move(64, count=4)
# to an address aligned to 64 B
stream_64 = _move(64, streaming=True)
stream_256 = _move(64, streaming=True, count=4)
stream_512 = _move(64, streaming=True, count=8)


def _load(bits):
    @_intrinsic
    def load(_typing, _address):
        def codegen(_context, builder, _signature, args):
            pointer = ir.IntType(bits).as_pointer()
            value = builder.load(builder.inttoptr(args[0], pointer), align=1)
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


# load a signed integer from any address, as int64
load_int32 = _load(32)
load_int64 = _load(64)


@_intrinsic
def pointer(_typing, _address):
    """Return an address as a pointer, for `numba.carray`."""

    def codegen(_context, builder, _signature, args):
        return builder.inttoptr(args[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), codegen


@_intrinsic
def lines_on_stack(_typing):
    """Return the address of four cache lines on the stack, valid until the caller returns."""

    def codegen(_context, builder, _signature, _args):
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(_BYTE, 4 * LINE_BYTES))
            scratch.align = LINE_BYTES
        return builder.ptrtoint(scratch, ir.IntType(64))

    return types.int64(), codegen


@njit(nogil=True, cache=True)
def move_few(to, from_, num_bytes):
    """Copy fewer than 64 bytes, in pieces that may overlap; no other bytes are accessed."""
    if num_bytes >= 32:
        move_32(to, from_)
        move_32(to + num_bytes - 32, from_ + num_bytes - 32)
    elif num_bytes >= 16:
        move_16(to, from_)
        move_16(to + num_bytes - 16, from_ + num_bytes - 16)
    elif num_bytes >= 8:
        move_8(to, from_)
        move_8(to + num_bytes - 8, from_ + num_bytes - 8)
    elif num_bytes >= 4:
        move_4(to, from_)
        move_4(to + num_bytes - 4, from_ + num_bytes - 4)
    elif num_bytes >= 2:
        move_2(to, from_)
        move_2(to + num_bytes - 2, from_ + num_bytes - 2)
    elif num_bytes == 1:
        move_1(to, from_)
