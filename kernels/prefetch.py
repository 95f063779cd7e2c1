"""Ask for a cache line before it is needed, from inside a numba kernel.

Reading rows at random spends its time waiting for memory; a kernel that knows which rows come next
asks for them early and finds them in the cache.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
READ, KEEP, DATA = 0, 3, 1  # what LLVM calls rw, locality and cache type


def _prefetch(typing_context: Any, array: Any, position: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        # beyond the array the address must not be `inbounds`
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(ask, [address, word(READ), word(KEEP), word(DATA)])
        return context.get_dummy_value()

    return types.void(array, position), generate


# prefetch(array, position): ask for the cache line of `array[position]`. The array is 1-dimensional
# and contiguous. The position is not checked, and one outside the array does no harm.
prefetch: Any = intrinsic(_prefetch)
