"""Operands of instructions: how registers, constants, symbols and addresses are read and written.

Each operand is prepared once, when a program is decoded, as a function of the threads.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gcnzc.testing.faults import unsupported
from gcnzc.testing.number_types import DTYPES, Array, encode, is_float
from gcnzc.testing.program import Symbols
from gcnzc.testing.threads import SPECIAL_REGISTERS, Halves, Threads

# a value in each thread, or one for all; and in which threads it is defined, None for all
Value: TypeAlias = tuple[Array, Array | None]
Read: TypeAlias = Callable[[Threads], Value]
Write: TypeAlias = Callable[[Threads, Array, Array | None], None]

_INTEGER = re.compile(r"-?(?:0[xX][\da-fA-F]+|0[bB][01]+|\d+)U?")
_FLOAT_BITS = re.compile(r"0[fFdD][\da-fA-F]+")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]")


class Operands:
    """Prepares the operands of one program."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols

    def reader(self, text: str, kind: str) -> Read:
        """Return a function that reads an operand as a type.

        A register that is wider than the type is truncated.

        Raises:
            UnsupportedInstruction: the operand is unknown, or narrower than the type.
        """
        if text.startswith("!"):
            return self._negated(self.reader(text[1:], kind))
        if text in self.symbols.registers:
            return self._register_reader(self.symbols.registers[text], text, kind)
        if text in SPECIAL_REGISTERS:
            dtype = DTYPES[kind]
            return lambda threads: (threads.special_register(text).astype(dtype), None)
        constant = self._constant(text, kind)
        return lambda threads: (constant, None)

    def _negated(self, read: Read) -> Read:
        def negated(threads: Threads) -> Value:
            value, defined = read(threads)
            return ~value, defined

        return negated

    def _register_reader(self, register: int, text: str, kind: str) -> Read:
        dtype, own = DTYPES[kind], self.symbols.register_dtypes[register]
        if (dtype.kind == "b") != (own.kind == "b") or own.itemsize < dtype.itemsize:
            raise unsupported(text, f"its register is not a .{kind}")
        if own.itemsize == dtype.itemsize:
            return lambda threads: (
                threads.registers[register].view(dtype),
                threads.defined[register],
            )
        bits = np.dtype(f"u{dtype.itemsize}")
        return lambda threads: (
            threads.registers[register].astype(bits).view(dtype),
            threads.defined[register],
        )

    def _constant(self, text: str, kind: str) -> Array:
        dtype = DTYPES[kind]
        if text in self.symbols.shared:
            return np.array(self.symbols.shared[text], dtype)
        if _FLOAT_BITS.fullmatch(text):
            bits = np.array(int(text[2:], 16), f"u{(len(text) - 2) // 2}")
            if is_float(kind) and bits.itemsize != dtype.itemsize:
                values = bits.view(f"f{bits.itemsize}").astype(np.float64)
                return encode(values.reshape(1), kind)[0] if kind != "f64" else values
            # a NaN keeps its bits
            return bits.astype(f"u{dtype.itemsize}").view(dtype)
        if _INTEGER.fullmatch(text):
            number = int(text.rstrip("U"), 0)
            if dtype.kind == "b":
                return np.array(bool(number))
            if dtype.kind == "f":
                raise unsupported(text, f"an integer as .{kind}")
            masked = number & ((1 << 8 * dtype.itemsize) - 1)
            return np.array(masked, f"u{dtype.itemsize}").view(dtype)
        raise unsupported(text, "unknown operand")

    def halves_reader(self, text: str) -> Callable[[Threads], Halves]:
        """Return a function that says where the halves of a 64-bit operand are defined."""
        if text not in self.symbols.registers:
            return lambda threads: (None, None)
        register = self.symbols.registers[text]
        return lambda threads: threads.halves(register)

    def immediate(self, text: str) -> int:
        """Return an integer constant."""
        if not _INTEGER.fullmatch(text):
            raise unsupported(text, "not an integer constant")
        return int(text.rstrip("U"), 0)

    def writer(self, text: str, kind: str) -> Write:
        """Return a function that writes a register of active threads.

        A value that is narrower than the register is extended by its sign, or with zeros.
        """
        if text == "_":
            return lambda threads, values, defined: None
        if text not in self.symbols.registers:
            raise unsupported(text, "not a register")
        register, dtype = self.symbols.registers[text], DTYPES[kind]
        own = self.symbols.register_dtypes[register]
        if (dtype.kind == "b") != (own.kind == "b") or own.itemsize < dtype.itemsize:
            raise unsupported(text, f"its register is not a .{kind}")
        wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{own.itemsize}")

        def write(threads: Threads, values: Array, defined: Array | None) -> None:
            if own.itemsize > values.itemsize:
                values = values.view(dtype).astype(wide)
            threads.write(register, values, defined)

        return write

    def address(self, text: str, kind: str) -> Callable[[Threads], Array]:
        """Return a function that computes (k,) addresses, which must be defined.

        Args:
            text: such as [%rd1 + 8].
            kind: u32 or u64.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise unsupported(text, "unknown address")
        base, dtype = self.reader(found[1], kind), DTYPES[kind]
        offset = dtype.type(int(found[2] or "0", 0) % (1 << 8 * dtype.itemsize))

        def compute(threads: Threads) -> Array:
            values, defined = base(threads)
            threads.require_defined(defined, "an address")
            return threads.select(values + offset)

        return compute


def both_defined(*defined: Array | None) -> Array | None:
    """Return where all of several values are defined."""
    found: Array | None = None
    for each in defined:
        if each is not None:
            found = each if found is None else found & each
    return found
