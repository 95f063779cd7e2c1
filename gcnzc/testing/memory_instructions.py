"""Instructions that access memory: loads, stores, and atomic operations."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gcnzc.testing.elementwise import find_operation
from gcnzc.testing.faults import unsupported
from gcnzc.testing.global_memory import LARGEST_ACCESS_BYTES, VECTOR_BYTES
from gcnzc.testing.launch_state import LaunchState, Step
from gcnzc.testing.number_types import DTYPES, Array, bits_of, join_halves
from gcnzc.testing.operands import Operands
from gcnzc.testing.program import Instruction, list_of
from gcnzc.testing.races import Access
from gcnzc.testing.threads import WARP_LANES

# modifiers that do not change the values of a program without races
_CACHE_MODIFIERS = {
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak"),
    *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last"),
    *("L1::no_allocate", "L2::evict_first", "L2::evict_last", "L2::evict_normal"),
    *("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"),
}
_ORDERED = {"relaxed", "acquire", "release", "acq_rel", "volatile"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_SPACES = {"global": False, "shared": True, "shared::cta": True}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_ATOMIC_OPERATIONS = ("add", "and", "or", "xor", "min", "max", "exch", "cas", "inc", "dec")


def decode_memory_instruction(instruction: Instruction, operands: Operands) -> Step:
    """Return what a load, store or atomic operation does.

    Raises:
        UnsupportedInstruction: this form is not implemented.
    """
    if "param" in instruction.opcode:
        return _load_parameter(instruction, operands)
    name, kind, modifiers = instruction.name, instruction.opcode[-1], list(instruction.opcode[1:-1])
    spaces = [modifier for modifier in modifiers if modifier in _SPACES]
    if len(spaces) != 1:
        raise unsupported(instruction.text, "neither .global nor .shared")
    modifiers.remove(spaces[0])
    is_shared = _SPACES[spaces[0]]
    if name in ("ldmatrix", "stmatrix"):
        return _matrix(instruction, operands)
    allowed = _CACHE_MODIFIERS | _ORDERED | _SCOPES
    allowed |= set(_VECTORS) if name in ("ld", "st") else {*_ATOMIC_OPERATIONS, "noftz"}
    unknown = set(modifiers) - allowed
    if unknown or kind not in DTYPES or kind == "pred":
        raise unsupported(instruction.text, ", ".join(sorted(unknown)))
    if name in ("atom", "red"):
        return _atomic(instruction, operands, is_shared)
    is_atomic = bool(_ORDERED & set(modifiers))
    texts = instruction.operands
    if len(texts) != 2 + ("L2::cache_hint" in modifiers):
        raise unsupported(instruction.text)
    register_text, address_text = texts[:2] if name == "ld" else texts[1::-1]
    parts = list_of(register_text)
    if len(parts) != max((_VECTORS[m] for m in modifiers if m in _VECTORS), default=1):
        raise unsupported(instruction.text)
    if len(parts) * DTYPES[kind].itemsize > (VECTOR_BYTES if is_shared else LARGEST_ACCESS_BYTES):
        raise unsupported(instruction.text, "the vector is too large")
    if name == "ld":
        return _load(instruction, operands, address_text, parts, is_shared, is_atomic)
    return _store(instruction, operands, address_text, parts, is_shared, is_atomic)


def _load_parameter(instruction: Instruction, operands: Operands) -> Step:
    kind, name = instruction.opcode[-1], instruction.operands[1].strip("[] ")
    if name not in operands.symbols.parameters or len(instruction.opcode) != 3:
        raise unsupported(instruction.text)
    number, dtype = operands.symbols.parameters.index(name), DTYPES[kind]
    write = operands.writer(instruction.operands[0], kind)

    def step(state: LaunchState) -> None:
        value = state.arguments[number][: dtype.itemsize].view(dtype)[0]
        write(state.threads, value, None)

    return step


def _address(operands: Operands, text: str, is_shared: bool) -> Callable[[Any], Array]:
    return operands.address(text, "u32" if is_shared else "u64")


def _load(
    instruction: Instruction,
    operands: Operands,
    address_text: str,
    parts: Sequence[str],
    is_shared: bool,
    is_atomic: bool,
) -> Step:
    kind = instruction.opcode[-1]
    address, dtype = _address(operands, address_text, is_shared), DTYPES[kind]
    writes = [operands.writer(part, kind) for part in parts]
    access = Access.ATOMIC_READ if is_atomic else Access.READ

    def step(state: LaunchState) -> None:
        threads, at = state.threads, address(state.threads)
        if is_shared:
            words, defined = state.read_shared(at, dtype.itemsize, len(writes), access)
            for write, word, is_defined in zip(writes, words, defined, strict=True):
                everywhere = None if is_defined.all() else threads.spread(is_defined)
                write(threads, threads.spread(word.view(dtype)), everywhere)
            return
        words = state.read_global(at, dtype.itemsize, len(writes), access)
        for write, word in zip(writes, words, strict=True):
            write(threads, threads.spread(word.view(dtype)), None)

    return step


def _store(
    instruction: Instruction,
    operands: Operands,
    address_text: str,
    parts: Sequence[str],
    is_shared: bool,
    is_atomic: bool,
) -> Step:
    kind = instruction.opcode[-1]
    address = _address(operands, address_text, is_shared)
    reads = [operands.reader(part, kind) for part in parts]
    access = Access.ATOMIC if is_atomic else Access.WRITE

    def step(state: LaunchState) -> None:
        threads, at = state.threads, address(state.threads)
        values = [read(threads) for read in reads]
        words = [threads.select(bits_of(np.asarray(value))) for value, _ in values]
        if is_shared:
            # undefined values may be moved through shared memory, where each byte is tracked
            defined = [None if each is None else threads.select(each) for _, each in values]
            state.write_shared(at, words, defined, access)
            return
        for _, defined_value in values:
            threads.require_defined(defined_value, "a stored value")
        state.write_global(at, words, access)

    return step


def _atomic(instruction: Instruction, operands: Operands, is_shared: bool) -> Step:
    """Return an atomic operation, which the active lanes execute one after another."""
    name, kind = instruction.name, instruction.opcode[-1]
    operations = [part for part in instruction.opcode if part in _ATOMIC_OPERATIONS]
    texts = list(instruction.operands)
    destination = texts.pop(0) if name == "atom" else None
    if len(operations) != 1 or len(texts) != (3 if operations == ["cas"] else 2):
        raise unsupported(instruction.text)
    address, dtype = _address(operands, texts[0], is_shared), DTYPES[kind]
    function = _atomic_function(operations[0], kind, is_shared)
    reads = [operands.reader(text, kind) for text in texts[1:]]
    write = None if destination is None else operands.writer(destination, kind)

    def step(state: LaunchState) -> None:
        threads, at = state.threads, address(state.threads)
        given = []
        for read in reads:
            value, defined = read(threads)
            threads.require_defined(defined, "an operand of an atomic operation")
            given.append(threads.select(value))
        if is_shared:
            words, are_defined = state.read_shared(at, dtype.itemsize, 1, Access.ATOMIC)
            threads.require_defined(threads.spread(are_defined[0]), "the operand in shared memory")
        else:
            words = state.read_global(at, dtype.itemsize, 1, Access.ATOMIC)
        owners = state.memory_keys(at, is_shared)
        before = words[0].view(dtype).copy()
        latest: dict[int, Array] = {}
        after = before.copy()
        for lane, key in enumerate(owners.tolist()):
            old = latest.get(key, before[lane : lane + 1])
            before[lane] = old[0]
            new = function(old, *(operand[lane : lane + 1] for operand in given))
            latest[key] = np.asarray(new, dtype)
        for lane, key in enumerate(owners.tolist()):
            after[lane] = latest[key][0]
        if is_shared:
            state.write_shared(at, [bits_of(after)], [None], Access.ATOMIC)
        else:
            state.write_global(at, [bits_of(after)], Access.ATOMIC, record=False)
        if write is not None:
            write(threads, threads.spread(before), None)

    return step


def _atomic_function(operation: str, kind: str, is_shared: bool) -> Callable[..., Array]:
    if operation == "exch":
        return lambda old, new: new
    if operation == "cas":
        return lambda old, expected, new: np.asarray(np.where(old == expected, new, old))
    if operation == "inc":
        return lambda old, limit: np.where(old >= limit, old.dtype.type(0), old + 1)
    if operation == "dec":
        return lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1)
    # sums in global memory flush subnormals, those in shared memory do not
    flushes = operation == "add" and kind == "f32" and not is_shared
    return find_operation(operation, ("ftz",) if flushes else (), kind).function


def _matrix(instruction: Instruction, operands: Operands) -> Step:
    """Return `ldmatrix` or `stmatrix`: matrices of 8 rows of 16 B, one row per address.

    The addresses of matrix i are those of the lanes from 8 i on.
    """
    is_load = instruction.name == "ldmatrix"
    modifiers = set(instruction.opcode[1:-1]) - {"sync", "aligned", "m8n8", "shared", "shared::cta"}
    counts = {"x1": 1, "x2": 2, "x4": 4}
    count = max((counts[m] for m in modifiers if m in counts), default=0)
    if modifiers - {*counts, "trans"} or instruction.opcode[-1] != "b16" or not count:
        raise unsupported(instruction.text)
    register_text, address_text = (
        instruction.operands if is_load else reversed(instruction.operands)
    )
    parts = list_of(register_text)
    if len(parts) != count:
        raise unsupported(instruction.text)
    address = operands.address(address_text, "u32")
    reads = [] if is_load else [operands.reader(part, "b32") for part in parts]
    writes = [operands.writer(part, "b32") for part in parts] if is_load else []
    lane = np.arange(WARP_LANES)
    # row and column of the two elements of each lane
    row, column = lane // 4, 2 * (lane % 4)
    cells = [(row, column), (row, column + 1)]
    if "trans" in modifiers:
        cells = [(second, first) for first, second in cells]

    def step(state: LaunchState) -> None:
        threads = state.threads
        threads.require_whole_warps(instruction.name)
        rows = address(threads).reshape(-1, WARP_LANES)
        state.require_shared_alignment(np.where(lane < 8 * count, rows, 0).reshape(-1), 16)
        for number in range(count):
            places = [
                (rows[:, 8 * number + r] + 2 * c).reshape(-1).astype(np.uint32) for r, c in cells
            ]
            if is_load:
                halves = [state.read_shared(place, 2, 1, Access.READ) for place in places]
                words = join_halves(*(words[0] for words, _ in halves))
                defined = halves[0][1][0] & halves[1][1][0]
                everywhere = None if defined.all() else threads.spread(defined)
                writes[number](threads, threads.spread(words), everywhere)
                continue
            value, is_defined = reads[number](threads)
            words = threads.select(value)
            lanes_defined = None if is_defined is None else threads.select(is_defined)
            for half, place in enumerate(places):
                word = (words >> np.uint32(16 * half)).astype(np.uint16)
                state.write_shared(place, [word], [lanes_defined], Access.WRITE)

    return step
