"""Small kernels in PTX that tests execute on numpy arrays."""

import numpy as np

from gcnzc.testing.decoder import load_program
from gcnzc.testing.executor import Executor
from gcnzc.testing.global_memory import GlobalMemory

REGISTERS = ".reg .pred %p<20>; .reg .b16 %h<40>; .reg .b32 %r<40>; .reg .b64 %d<40>;"
# byte offsets of each thread in arrays of 1, 2, 4, 8 and 16 bytes
THREAD = """
    mov.u32 %tid, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %threads, %ntid.x;
    mad.lo.s32 %id, %block, %threads, %tid;
    mul.wide.u32 %at1, %id, 1; mul.wide.u32 %at2, %id, 2; mul.wide.u32 %at4, %id, 4;
    mul.wide.u32 %at8, %id, 8; mul.wide.u32 %at16, %id, 16;
"""


def text_of(body, names=(), declarations=""):
    """PTX with a register %NAME for the address of each argument."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 k_{name}" for name in names)
    loads = "\n".join(f".reg .b64 %{name}; ld.param.b64 %{name}, [k_{name}];" for name in names)
    return f"""
        .version 8.7
        .target sm_90a
        .address_size 64
        {declarations}
        .visible .entry k(
            {parameters}
        )
        {{
            {REGISTERS}
            .reg .b32 %tid, %block, %threads, %id;
            .reg .b64 %at1, %at2, %at4, %at8, %at16;
            {loads}
            {THREAD}
            {body}
            ret;
        }}
    """


def run(body, arrays=None, *, grid=(1,), threads=32, shared=0, declarations="", executor=None):
    """Execute a body on arrays, each of which is an argument; return the executor."""
    arrays, executor = arrays or {}, executor or Executor()
    memory, arguments = GlobalMemory(), []
    for name, array in arrays.items():
        address = memory.map(name, array.ctypes.data, array.nbytes, array)
        arguments.append(("u64", address))
    program = load_program(text_of(body, arrays, declarations))
    executor.launch(program, grid, threads, arguments, memory, shared)
    return executor


def results(body, threads=64, **options):
    """What threads store in an array of int32, with -7 for those that store nothing."""
    out = np.full(threads * options.get("grid", (1,))[0], -7, np.int32)
    run(body, {"out": out}, threads=threads, **options)
    return out.tolist()


def apply(instruction, kinds, values, result):
    """Execute one instruction in as many threads as there are values.

    Args:
        instruction: with %x0, %x1, ... for operands, and %y for the result.
        kinds: types of the operands.
        values: for each operand, its values, as unsigned integers.
        result: type of the result; that of a predicate is stored as 0 or 1.

    Returns:
        The bits of the results, as a list of integers.
    """
    count = len(values[0])
    threads = -(-count // 32) * 32
    grid, block = (threads // 32,), 32
    arrays, body = {}, []
    for number, (kind, operand) in enumerate(zip(kinds, values, strict=True)):
        bits = 8 if kind == "pred" else bits_of(kind)
        padded = [*operand, *([operand[0]] * (threads - count))]
        arrays[f"in{number}"] = np.array(padded, f"u{bits // 8}")
        register = "b16" if bits == 8 else f"b{bits}"
        body.append(f".reg .b64 %a{number}; add.s64 %a{number}, %in{number}, %at{bits // 8};")
        loaded = f"%v{number}" if kind == "pred" else f"%x{number}"
        body.append(f".reg .{register} {loaded}; ld.global.b{bits} {loaded}, [%a{number}];")
        if kind == "pred":
            body.append(f".reg .pred %x{number}; setp.ne.b16 %x{number}, {loaded}, 0;")
    bits = 16 if result == "pred" else bits_of(result)
    arrays["out"] = np.zeros(threads, f"u{bits // 8}")
    body.append(f".reg .b64 %o; add.s64 %o, %out, %at{bits // 8};")
    body.append(f".reg .{'pred' if result == 'pred' else f'b{max(bits, 16)}'} %y;")
    body.append(f"{instruction};")
    if result == "pred":
        body.append(".reg .b16 %z; selp.b16 %z, 1, 0, %y;")
    stored = "%z" if result == "pred" else "%y"
    body.append(f"st.global.b{bits} [%o], {stored};")
    run("\n".join(body), arrays, grid=grid, threads=block)
    return arrays["out"][:count].tolist()


def bits_of(kind):
    """Bits of a type."""
    if kind.endswith("x2"):
        return 16 if kind.startswith("e") else 32
    return int(kind.lstrip("bfsu"))


def signed(value, bits):
    """The signed integer of unsigned bits."""
    return value - (1 << bits) if value >> (bits - 1) else value


def integers(kind, count, seed=0):
    """Random bits of a type, with small and extreme numbers among them."""
    bits, random = bits_of(kind), np.random.default_rng(seed)
    size = np.dtype(f"u{bits // 8}")
    values = random.integers(0, 2**bits - 1, count, dtype=size, endpoint=True)
    values[::4] = random.integers(0, 40, len(values[::4])).astype(size)
    edges = [0, 1, 2, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2**bits - 2]
    places = random.choice(count, count // 3, replace=False)
    values[places] = np.array(random.choice(np.array(edges, size), len(places)))
    return values.tolist()
