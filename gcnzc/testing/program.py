"""Parsing of PTX: the instructions of a kernel, its registers, parameters and shared memory."""

import re
from dataclasses import dataclass

import numpy as np

from gcnzc.testing.faults import UnsupportedInstruction, in_kernel, unsupported
from gcnzc.testing.number_types import DTYPES

_STATEMENT = re.compile(
    r"\s*(?:(\.loc\s[^\n]*)(?:\n|$)|([$\w]+):|([{}])|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_SHARED = re.compile(
    r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(\d+)\s+([$\w]+)\s*(?:\[(\d*)\])?"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction as it is written."""

    text: str
    source: str  # file and line of the source
    guard: str | None  # register of the predicate
    is_negated: bool  # executed where the predicate is false
    opcode: tuple[str, ...]  # name, modifiers and types, such as ("ld", "global", "b32")
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first part of the opcode."""
        return self.opcode[0]


@dataclass(frozen=True)
class Symbols:
    """What names in operands refer to."""

    registers: dict[str, int]  # index of each register
    register_dtypes: list[np.dtype]  # unsigned, or bool for predicates
    parameters: list[str]
    shared: dict[str, int]  # offset of each variable in shared memory


@dataclass(frozen=True)
class ParsedKernel:
    """The first kernel of a PTX text."""

    name: str
    symbols: Symbols
    static_shared_bytes: int  # besides dynamic shared memory
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction after each label


def parse(ptx: str) -> ParsedKernel:
    """Parse the first kernel of a PTX text.

    Raises:
        UnsupportedInstruction: the text has a declaration that is not implemented.
    """
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", ptx), flags=re.DOTALL)
    entry = re.search(r"\.entry\s+([$\w]+)\s*\(([^)]*)\)[^{]*\{", text)
    if entry is None:
        raise unsupported(
            " ".join(text.split())[:80],
            "there is no .entry; if it is from Triton's cache, the cache is damaged: delete it",
        )
    parameters = re.findall(r"([$\w]+)\s*(?:,|$)", entry[2].strip())
    shared, static_bytes = _shared_variables(text)
    reader = _BodyReader(dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)))
    try:
        reader.read(text, entry.end())
    except UnsupportedInstruction as error:
        raise in_kernel(error, entry[1]) from None
    symbols = Symbols(reader.registers, reader.register_dtypes, parameters, shared)
    return ParsedKernel(entry[1], symbols, static_bytes, reader.instructions, reader.labels)


def list_of(operand: str) -> list[str]:
    """Return the parts of a vector operand, such as {%r1, %r2}, or the operand itself."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _shared_variables(text: str) -> tuple[dict[str, int], int]:
    """Return offsets of variables, and bytes before the dynamic shared memory."""
    offsets, dynamic, end = {}, [], 0
    for align, _, bits, name, count in _SHARED.findall(text):
        if count == "" and re.search(rf"\.extern\s[^;]*\b{re.escape(name)}\b", text):
            dynamic.append(name)
            continue
        end += -end % int(align or int(bits) // 8)
        offsets[name] = end
        end += int(count or 1) * int(bits) // 8
    # dynamic shared memory begins at a multiple of 128; its `.align`, which is at most that, is not
    # read
    end += -end % 128
    return offsets | dict.fromkeys(dynamic, end), end


class _BodyReader:
    """Collects the statements of a kernel's body."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files, self.source = files, ""
        self.registers: dict[str, int] = {}
        self.register_dtypes: list[np.dtype] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}

    def read(self, text: str, position: int) -> None:
        """Read from the start of the body to its end."""
        # for each scope, the registers that have the name of an earlier one, and their unique names
        scopes: list[dict[str, str]] = [{}]
        while scopes:
            found = _STATEMENT.match(text, position)
            if found is None:
                raise unsupported(" ".join(text[position : position + 80].split()), "no statement")
            position = found.end()
            location, label, brace, statement = found.groups()
            if location:
                number, line = location.split()[1:3]
                self.source = f"{self.files.get(number, number).rsplit('/', 1)[-1]}:{line}"
            elif label:
                self.labels[label] = len(self.instructions)
            elif brace == "{":
                scopes.append(dict(scopes[-1]))
            elif brace == "}":
                scopes.pop()
            elif statement.startswith("."):
                self._declare(" ".join(statement.split()), scopes[-1])
            elif statement.strip():
                self._add(" ".join(statement.split()), scopes[-1])

    def _declare(self, text: str, renamed: dict[str, str]) -> None:
        if text.startswith(".pragma"):
            return
        found = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if text.startswith(".param"):
            raise unsupported(text, "calls of functions, such as of tl.device_assert")
        if text.startswith(".local"):
            raise unsupported(text, "local memory, such as of tl.sin and tl.cos")
        if found is None or found[1] not in DTYPES:
            raise unsupported(text)
        is_predicate = found[1] == "pred"
        dtype = np.dtype(bool if is_predicate else f"u{DTYPES[found[1]].itemsize}")
        for declared in found[2].split(","):
            parts = re.fullmatch(r"\s*([%$\w]+)(?:<(\d+)>)?\s*", declared)
            if parts is None:
                raise unsupported(text)
            numbers = [str(n) for n in range(int(parts[2]))] if parts[2] else [""]
            for name in [parts[1] + number for number in numbers]:
                index = len(self.register_dtypes)
                if name in self.registers:
                    renamed[name] = f"{name}_{index}"
                self.registers[renamed.get(name, name)] = index
                self.register_dtypes.append(dtype)

    def _add(self, text: str, renamed: dict[str, str]) -> None:
        if renamed:
            text = re.sub(r"[%$\w]+", lambda name: renamed.get(name[0], name[0]), text)
        found = re.fullmatch(r"(?:@(!?)\s*([%$\w]+)\s+)?([\w.:]+)\s*(.*)", text)
        if found is None or (found[2] is not None and found[2] not in self.registers):
            raise unsupported(text)
        # commas within braces and brackets belong to one operand
        operands = [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", found[4])]
        self.instructions.append(
            Instruction(
                text,
                self.source,
                found[2],
                bool(found[1]),
                tuple(found[3].split(".")),
                tuple(operand for operand in operands if operand),
            )
        )
