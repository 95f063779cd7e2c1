"""Resources of compiled Triton kernels: registers, spills, shared memory, and loads in flight.

The assembler, ptxas, reports registers and spills. Barriers and loads are counted in its machine
code. An instruction of a load names one of six scoreboards, and an instruction that needs the value
names the scoreboards that it waits for (Jia et al., 2018, https://arxiv.org/abs/1804.06826).
No GPU is needed.
"""

import bisect
import contextlib
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcnzc.testing.threads import WARP_LANES
from gcnzc.testing.triton_driver import assemble, compile_launches, disassemble


class _Limits(NamedTuple):
    """What a multiprocessor has, by the CUDA C++ Programming Guide."""

    threads: int
    blocks: int
    shared_bytes: int


_LIMITS = {
    80: _Limits(2048, 32, 164 << 10),
    86: _Limits(1536, 16, 100 << 10),
    89: _Limits(1536, 24, 100 << 10),
    90: _Limits(2048, 32, 228 << 10),
    100: _Limits(2048, 32, 228 << 10),
    120: _Limits(1536, 24, 100 << 10),
}
# each of the four parts of a multiprocessor has registers of its own, which warps get in units
_PARTS = 4
_PART_REGISTERS = 16384
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_RESERVED_SHARED_BYTES = 1024  # of a block

_INSTRUCTION_BYTES = 16
# address, predicate, operation, and the second half of the encoding
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)[^;]*;\s*/\* 0x[0-9a-f]{16} \*/"
    r"\s*/\* 0x([0-9a-f]{16}) \*/"
)
# Bits of that half: from 52 on the mask (6 bits) of the scoreboards that the instruction waits for,
# from 46 on the index (3 bits) of the scoreboard of its result, 7 for none.
_WAITS_SHIFT, _RESULT_SHIFT, _NO_RESULT = 52, 46, 7
_LOAD_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_JUMPS = {"BRA", "BRX", "JMP", "JMX", "RET", "EXIT"}


@dataclass(frozen=True)
class KernelResources:
    """What a block of a compiled kernel and its threads use.

    Loads of a thread are in flight from the instruction that issues them to the first one that
    waits for their scoreboard. `load_bytes_in_flight` is the maximum over the machine code, which
    is read from the first instruction to the last. It is neither an upper nor a lower bound:

    - Loads with a predicate count as if they were executed, so it may be too high.
    - A `DEPBAR` counts as a wait for all loads, although it may wait for some only. After an
      unconditional jump no load counts; `BRA.U` is taken for one, although it may have a condition.
      Loads that a loop keeps in flight from one iteration to the next are not followed. So it may
      be too low where the code has one of these.
    """

    name: str
    """name of the kernel"""
    arch: int
    """compute capability, such as 90 for sm_90"""
    threads: int
    """threads of a block"""
    registers: int
    """registers of a thread"""
    spill_store_bytes: int
    """bytes of registers that a thread stores in local memory"""
    spill_load_bytes: int
    """bytes that a thread loads from there"""
    shared_bytes: int
    """shared memory of a block"""
    barriers: int
    """instructions that wait for all threads of a block"""
    widest_load_bytes: int
    """bytes of a thread's widest load from global memory; 0 if it loads nothing"""
    load_bytes_in_flight: int
    """most bytes that a thread loads from global memory at the same time, see above"""

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that are resident on a multiprocessor at the same time."""
        limits = _limits(self.arch)
        warps = -(-self.threads // WARP_LANES)
        of_warp = -(-self.registers * WARP_LANES // _REGISTER_UNIT) * _REGISTER_UNIT
        by_registers = _PARTS * (_PART_REGISTERS // of_warp) // warps
        shared_bytes = -(-self.shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_SHARED_BYTES
        by_shared_memory = limits.shared_bytes // shared_bytes
        by_threads = limits.threads // (warps * WARP_LANES)
        return min(limits.blocks, by_threads, by_registers, by_shared_memory)

    @property
    def load_bytes_in_flight_per_multiprocessor(self) -> int:
        """Most bytes that the resident threads of a multiprocessor load at the same time."""
        return self.blocks_per_multiprocessor * self.threads * self.load_bytes_in_flight


@contextlib.contextmanager
def record_resources(arch: int = 90) -> Iterator[list[KernelResources]]:
    """Compile the Triton kernels that are launched in this context, and record their resources.

    Nothing is executed, so results of the launches are undefined.

    Args:
        arch: compute capability, such as 90 for sm_90.

    Yields:
        A list that has the resources of each compiled kernel once the context has ended, in the
        order of their first launches.

    Raises:
        ValueError: the limits of this compute capability are not known.
        RuntimeError: this version of Triton is not supported, or its interpreter is in use.
    """
    _limits(arch)
    recorded: list[KernelResources] = []
    kernels: dict[str, Any] = {}

    def record(_function: Any, kernel: Any, _grid: Any, _arguments: Any) -> None:
        kernels.setdefault(kernel.hash, kernel)

    with compile_launches(arch, record):
        yield recorded
    recorded += resources_of(list(kernels.values()))


def resources_of(kernels: Sequence[Any]) -> list[KernelResources]:
    """Return the resources of kernels for one architecture.

    Args:
        kernels: kernels that `compile_launches` passes to `on_launch`.
    """
    if not kernels:
        return []
    assembled = [assemble(kernel) for kernel in kernels]
    codes = [_instructions_of(cubin) for cubin, _ in assembled]
    # together, as the start of the disassembler takes longer than a kernel
    text = disassemble(b"".join(codes), kernels[0].metadata.target.arch)
    bounds = list(itertools.accumulate(map(len, codes)))
    instructions: list[list[Instruction]] = [[] for _ in kernels]
    for instruction in parse(text):
        instructions[bisect.bisect(bounds, instruction.address)].append(instruction)
    found = []
    for kernel, code, (_, report), parsed in zip(
        kernels, codes, assembled, instructions, strict=True
    ):
        if len(parsed) != len(code) // _INSTRUCTION_BYTES:
            raise RuntimeError(
                f"{len(parsed)} of {len(code) // _INSTRUCTION_BYTES} instructions of "
                f"{kernel.metadata.name} were read\n\nhint: use the nvdisasm of Triton's wheel"
            )
        widest, in_flight = measure_loads(parsed)
        found.append(
            KernelResources(
                name=kernel.metadata.name,
                arch=kernel.metadata.target.arch,
                threads=WARP_LANES * kernel.metadata.num_warps,
                registers=_number(r"Used (\d+) registers", report),
                spill_store_bytes=_number(r"(\d+) bytes spill stores", report),
                spill_load_bytes=_number(r"(\d+) bytes spill loads", report),
                shared_bytes=kernel.metadata.shared,
                barriers=sum(each.operation.startswith("BAR.") for each in parsed),
                widest_load_bytes=widest,
                load_bytes_in_flight=in_flight,
            )
        )
    return found


def _limits(arch: int) -> _Limits:
    if arch not in _LIMITS:
        raise ValueError(
            f"the resources of a multiprocessor of sm_{arch} are not known\n\n"
            f"hint: use one of {', '.join(map(str, _LIMITS))}"
        )
    return _LIMITS[arch]


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(
            f"ptxas does not report `{pattern}`:\n{report}\n\nhint: use the ptxas of Triton's wheel"
        )
    return int(found[1])


def _instructions_of(cubin: bytes) -> bytes:
    """Return the section of an ELF file that has the instructions of its only kernel."""
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + i * size) for i in range(count)]
    (code,) = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    ]
    return code


class Instruction(NamedTuple):
    """An instruction of a kernel."""

    address: int
    operation: str  # with its modifiers, such as LDG.E.128
    has_predicate: bool
    waits: int  # a mask: bit i for scoreboard i
    scoreboard: int | None  # of its result


def parse(text: str) -> Iterator[Instruction]:
    """Yield the instructions of machine code, see `disassemble`."""
    for address, predicate, operation, encoding in _INSTRUCTION.findall(text):
        control = int(encoding, 16)
        result = control >> _RESULT_SHIFT & 7
        yield Instruction(
            int(address, 16),
            operation,
            bool(predicate),
            control >> _WAITS_SHIFT & 63,
            None if result == _NO_RESULT else result,
        )


def measure_loads(instructions: Iterable[Instruction]) -> tuple[int, int]:
    """Return the bytes of a thread's widest global load, and the most bytes that are in flight."""
    in_flight: dict[int | None, int] = {}  # bytes by scoreboard
    widest = most = 0
    for instruction in instructions:
        for number in [each for each in in_flight if each is None or instruction.waits >> each & 1]:
            del in_flight[number]
        name, *modifiers = instruction.operation.split(".")
        if name == "LDG":
            num_bytes = next((_LOAD_BYTES[each] for each in modifiers if each in _LOAD_BYTES), 4)
            board = instruction.scoreboard
            in_flight[board] = in_flight.get(board, 0) + num_bytes
            widest, most = max(widest, num_bytes), max(most, sum(in_flight.values()))
        elif name == "DEPBAR" or (name in _JUMPS and not instruction.has_predicate):
            in_flight.clear()
    return widest, most
