"""Decoding of a parsed kernel: for each instruction, the function that executes it.

An instruction that is not implemented is rejected here, before anything is executed.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcnzc.testing.conversions import find_conversion
from gcnzc.testing.elementwise import Operation, find_comparison, find_operation
from gcnzc.testing.faults import UnsupportedInstruction, in_kernel, unsupported
from gcnzc.testing.launch_state import LaunchState, Step
from gcnzc.testing.memory_instructions import decode_memory_instruction
from gcnzc.testing.number_types import DTYPES, Array
from gcnzc.testing.operands import Operands, both_defined
from gcnzc.testing.program import Instruction, ParsedKernel, list_of, parse
from gcnzc.testing.warp_instructions import NAMES as WARP_INSTRUCTIONS
from gcnzc.testing.warp_instructions import decode_warp_instruction

_CONTROL_INSTRUCTIONS = ("bra", "ret", "exit", "bar", "barrier")
_MEMORY_INSTRUCTIONS = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix")
# they order memory accesses, or change the cache
_WITHOUT_EFFECT = ("membar", "fence", "prefetch")


@dataclass(frozen=True)
class Program:
    """A kernel that can be executed."""

    kernel: ParsedKernel
    steps: Sequence[Step | None]  # None for control instructions
    next_control: Sequence[int]  # for each index, that of the first control instruction at or after
    targets: dict[int, int]  # index of the instruction that each branch goes to
    guards: dict[int, tuple[int, bool]]  # register and negation of guarded control instructions
    barrier_ids: dict[int, int]
    is_warp_sync: Array  # (instructions + 1,) whether lanes of a warp wait for each other at it

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.kernel.name


def load_program(ptx: str) -> Program:
    """Parse and decode the first kernel of a PTX text.

    Raises:
        UnsupportedInstruction: the executor does not implement one of its instructions.
    """
    kernel = parse(ptx)
    try:
        return _decode_all(kernel)
    except UnsupportedInstruction as error:
        raise in_kernel(error, kernel.name) from None


def _decode_all(kernel: ParsedKernel) -> Program:
    operands = Operands(kernel.symbols)
    steps: list[Step | None] = []
    targets, guards, barrier_ids = {}, {}, {}
    for index, instruction in enumerate(kernel.instructions):
        if not _is_control(instruction):
            steps.append(_guarded(instruction, kernel, _decode_or_explain(instruction, operands)))
            continue
        steps.append(None)
        if instruction.guard is not None:
            register = kernel.symbols.registers[instruction.guard]
            guards[index] = register, instruction.is_negated
        if instruction.name == "bra":
            target = instruction.operands[0]
            if target not in kernel.labels:
                raise unsupported(instruction.text, "unknown label")
            targets[index] = kernel.labels[target]
        elif instruction.name in ("bar", "barrier"):
            barrier_ids[index] = _barrier_id(instruction, operands)
    controls = [index for index, step in enumerate(steps) if step is None] + [len(steps)]
    next_control = [
        controls[bisect.bisect_left(controls, index)] for index in range(len(steps) + 1)
    ]
    is_warp_sync = np.array([*map(_is_warp_sync, kernel.instructions), False])
    return Program(kernel, steps, next_control, targets, guards, barrier_ids, is_warp_sync)


def _is_warp_sync(instruction: Instruction) -> bool:
    return not _is_control(instruction) and "sync" in instruction.opcode[1:]


def _is_control(instruction: Instruction) -> bool:
    return instruction.name in _CONTROL_INSTRUCTIONS and instruction.opcode[1:2] != ("warp",)


def _barrier_id(instruction: Instruction, operands: Operands) -> int:
    is_known = set(instruction.opcode[1:]) <= {"sync", "cta", "aligned"}
    if not is_known or "sync" not in instruction.opcode or len(instruction.operands) != 1:
        raise unsupported(instruction.text, "only barriers of all threads of a block")
    return operands.immediate(instruction.operands[0])


def _decode_or_explain(instruction: Instruction, operands: Operands) -> Step:
    where = f" at {instruction.source}" if instruction.source else ""
    try:
        return _decode(instruction, operands)
    except UnsupportedInstruction as error:
        reason = str(error).split("implement ")[-1].split("\n")[0]
        same = instruction.text in str(error)
        because = reason.partition("`: ")[2] if same else reason
        raise unsupported(instruction.text, because, where) from None
    except (KeyError, IndexError, ValueError) as error:
        # a form with other operands than those that the decoders expect
        raise unsupported(instruction.text, where=where) from error


def _guarded(instruction: Instruction, kernel: ParsedKernel, step: Step) -> Step:
    """Execute a step only in the threads in which its guard predicate holds."""
    if instruction.guard is None:
        return step
    register, is_negated = kernel.symbols.registers[instruction.guard], instruction.is_negated

    def guarded(state: LaunchState) -> None:
        threads = state.threads
        threads.require_defined(threads.defined[register], "a guard predicate")
        before = threads.active
        wanted = threads.registers[register] ^ is_negated
        active = wanted if before is None else wanted & before
        if active.any():
            threads.active = None if active.all() else active
            step(state)
            threads.active = before

    return guarded


def _decode(instruction: Instruction, operands: Operands) -> Step:
    name, texts = instruction.name, instruction.operands
    kind = instruction.opcode[-1]
    if name in _MEMORY_INSTRUCTIONS:
        return decode_memory_instruction(instruction, operands)
    if name in WARP_INSTRUCTIONS:
        return decode_warp_instruction(instruction, operands)
    if name in _WITHOUT_EFFECT or instruction.opcode[:3] == ("bar", "warp", "sync"):
        return lambda state: None
    if name == "createpolicy":
        # a policy of the cache changes no value
        write = operands.writer(texts[0], "b64")
        return lambda state: write(state.threads, np.array(0, np.uint64), None)
    if name == "setp":
        return _comparison(instruction, operands)
    if name == "mov" and texts[0].startswith("{"):
        return _unpack(texts, kind, operands)
    if name == "mov" and texts[1].startswith("{"):
        return _pack(texts, kind, operands)
    if len(instruction.opcode) == 1:
        raise unsupported(instruction.text)
    if name == "cvt":
        operation = find_conversion(
            instruction.opcode[1:-2], instruction.opcode[-2], instruction.opcode[-1]
        )
    else:
        operation = find_operation(name, instruction.opcode[1:-1], kind, len(texts) - 1)
    if len(texts) != 1 + len(operation.sources):
        raise unsupported(instruction.text, f"{len(texts)} operands")
    write = operands.writer(texts[0], operation.result)
    reads = [
        operands.reader(text, source)
        for text, source in zip(texts[1:], operation.sources, strict=True)
    ]

    if kind == "f32x2":
        return _packed_floats(texts, operation, operands)

    def step(state: LaunchState) -> None:
        threads = state.threads
        write(threads, *operation(*[read(threads) for read in reads]))

    return step


def _packed_floats(texts: Sequence[str], operation: Operation, operands: Operands) -> Step:
    """Return an operation on both halves of registers, of which one may be undefined."""
    register = operands.symbols.registers[texts[0]]
    reads = [operands.reader(text, "f32x2") for text in texts[1:]]
    halves = [operands.halves_reader(text) for text in texts[1:]]

    def step(state: LaunchState) -> None:
        threads = state.threads
        values, defined = operation(*[read(threads) for read in reads])
        lower, upper = zip(*(each(threads) for each in halves), strict=True)
        found = both_defined(*lower), both_defined(*upper)
        threads.write(register, values, defined, found)

    return step


def _comparison(instruction: Instruction, operands: Operands) -> Step:
    comparison, *modifiers, kind = instruction.opcode[1:]
    joins = [modifier for modifier in modifiers if modifier in ("and", "or", "xor")]
    flushes = "ftz" in modifiers
    if set(modifiers) - {*joins, "ftz"} or len(joins) > 1 or (flushes and kind != "f32"):
        raise unsupported(instruction.text)
    compare = find_comparison(comparison, joins[0] if joins else None, flushes, kind)
    writes = [operands.writer(text, "pred") for text in instruction.operands[0].split("|")]
    kinds = [kind, kind, *("pred" for _ in joins)]
    reads = [
        operands.reader(text, each)
        for text, each in zip(instruction.operands[1:], kinds, strict=True)
    ]

    def step(state: LaunchState) -> None:
        threads = state.threads
        results = compare(*[read(threads) for read in reads])
        for write, (value, defined) in zip(writes, results, strict=False):
            write(threads, value, defined)

    return step


def _pack(texts: Sequence[str], kind: str, operands: Operands) -> Step:
    """Return `mov` of several registers to one."""
    parts, wide = list_of(texts[1]), DTYPES[kind]
    bits = 8 * wide.itemsize // len(parts)
    reads = [operands.reader(text, f"b{bits}") for text in parts]
    register, own = operands.symbols.registers[texts[0]], operands.writer(texts[0], kind)

    def step(state: LaunchState) -> None:
        packed: Array = np.zeros((), wide)
        found = [read(state.threads) for read in reads]
        for number, (value, _) in enumerate(found):
            packed = packed | (value.astype(wide) << wide.type(number * bits))
        defined = [each for _, each in found]
        if bits == 32:
            halves = defined[0], defined[1]
            state.threads.write(register, packed, both_defined(*defined), halves)
        else:
            own(state.threads, packed, both_defined(*defined))

    return step


def _unpack(texts: Sequence[str], kind: str, operands: Operands) -> Step:
    """Return `mov` of one register to several."""
    parts, wide = list_of(texts[0]), DTYPES[kind]
    bits = 8 * wide.itemsize // len(parts)
    writes = [operands.writer(text, f"b{bits}") for text in parts]
    read, halves = operands.reader(texts[1], kind), operands.halves_reader(texts[1])

    def step(state: LaunchState) -> None:
        value, defined = read(state.threads)
        each_defined = halves(state.threads) if bits == 32 else [defined] * len(parts)
        for number, (write, part_defined) in enumerate(zip(writes, each_defined, strict=True)):
            part = (value >> wide.type(number * bits)).astype(f"u{bits // 8}")
            write(state.threads, part, part_defined)

    return step
