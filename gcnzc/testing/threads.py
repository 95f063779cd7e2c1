"""The state of threads that execute together: registers, active lanes, and where they are."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from gcnzc.testing.faults import Fault, unsupported
from gcnzc.testing.number_types import Array, bits_of

WARP_LANES = 32
# (n,) where the lower half of a register is defined, and the upper one; None for everywhere
Halves: TypeAlias = tuple[Array | None, Array | None]


class Threads:
    """Threads of several blocks that execute one program.

    A register is an array over all threads. `defined` says in which threads it has a defined value;
    None means in all.

    Notation: n threads, k of them active.
    """

    def __init__(
        self, dtypes: Sequence[np.dtype], grid: Sequence[int], blocks: Array, block_threads: int
    ) -> None:
        """Create threads whose registers are undefined.

        Args:
            dtypes: of the registers.
            grid: number of blocks along three axes.
            blocks: numbers of the blocks in the grid.
            block_threads: threads of a block, a multiple of 32.
        """
        self.count, self.block_threads, self.grid = len(blocks) * block_threads, block_threads, grid
        self.num_blocks = len(blocks)
        self.block = np.repeat(blocks, block_threads)  # number in the grid
        self.block_position = np.repeat(np.arange(len(blocks)), block_threads)
        self.thread = np.tile(np.arange(block_threads), len(blocks))
        self.lane = self.thread % WARP_LANES
        self.warp = self.thread // WARP_LANES  # in the block
        self.global_warp = self.block * (block_threads // WARP_LANES) + self.warp
        self.active: Array | None = None  # (n,) bool; None: all threads
        self.has_exited: Array = np.zeros(self.count, bool)
        self.registers: list[Array] = [np.zeros(self.count, dtype) for dtype in dtypes]
        nowhere = np.zeros(self.count, bool)
        self.defined: list[Array | None] = [nowhere] * len(dtypes)
        # of 64-bit registers whose halves were written apart; a register is defined if both are
        self._halves: dict[int, Halves] = {}

    @property
    def lanes(self) -> Any:
        """An index of the active threads."""
        return slice(None) if self.active is None else self.active

    def active_mask(self) -> Array:
        """Return (n,) whether each thread is active."""
        return np.ones(self.count, bool) if self.active is None else self.active

    def select(self, values: Array) -> Array:
        """Return (k,) the values of active threads, of (n,) or of one value for all threads."""
        return np.broadcast_to(values, (self.count,))[self.lanes]

    def spread(self, values: Array) -> Array:
        """Return (n,) the values of active threads at their positions, of (k,)."""
        if self.active is None:
            return values
        found = np.zeros(self.count, values.dtype)
        found[self.active] = values
        return found

    def halves(self, register: int) -> Halves:
        """Return where the lower and the upper half of a register are defined."""
        return self._halves.get(register, (self.defined[register], self.defined[register]))

    def write(
        self, register: int, values: Array, defined: Array | None, halves: Halves | None = None
    ) -> None:
        """Assign a register of active threads.

        Args:
            register: index of the register.
            values: (n,), or one value for all threads.
            defined: (n,), or None if all values are defined.
            halves: where the lower and the upper half are defined, if they may differ.
        """
        if halves is not None or register in self._halves:
            self._write_halves(register, halves or (defined, defined))
        bits = bits_of(np.asarray(values))
        if self.active is None:
            self.registers[register] = np.full(self.count, bits) if bits.ndim == 0 else bits
        else:
            self.registers[register] = np.where(self.active, bits, self.registers[register])
            before = self.defined[register]
            if before is None and defined is None:
                return
            now = np.array(True) if defined is None else defined
            defined = np.where(self.active, now, True if before is None else before)
        self.defined[register] = None if defined is None or defined.all() else defined

    def _write_halves(self, register: int, halves: Halves) -> None:
        lower, upper = halves
        if self.active is not None:
            before = self.halves(register)
            lower, upper = (
                np.where(self.active, *(np.array(True) if each is None else each for each in pair))
                for pair in zip(halves, before, strict=True)
            )
        self._halves[register] = lower, upper

    def require_defined(self, defined: Array | None, purpose: str) -> None:
        """Check that a value is defined in all active threads.

        Raises:
            Fault: it is undefined in one of them.
        """
        if defined is None:
            return
        undefined = self.active_mask() & ~defined
        if undefined.any():
            raise Fault(f"undefined value as {purpose}, {self.describe(undefined)}")

    def require_whole_warps(self, name: str) -> None:
        """Check that all lanes of each warp are active, or none.

        Raises:
            Fault: only some lanes of a warp are active.
        """
        if self.active is None:
            return
        by_warp = self.active.reshape(-1, WARP_LANES)
        partial = by_warp.any(1) & ~by_warp.all(1)
        if partial.any():
            raise Fault(
                f"{name} by a part of a warp, {self.describe(np.repeat(partial, WARP_LANES))}"
            )

    def describe(self, threads: Array) -> str:
        """Describe threads, of (n,) bool."""
        first = int(threads.argmax())
        return (
            f"in {int(threads.sum())} of {self.count} threads, first in thread "
            f"{self.thread[first]} of block {self.block[first]}"
        )

    def special_register(self, name: str) -> Array:
        """Return the value of a register such as %tid.x in each thread."""
        stem, _, axis_name = name.partition(".")
        axis = {"": 0, "x": 0, "y": 1, "z": 2}[axis_name]
        if stem == "%tid":
            return self.thread if axis == 0 else np.array(0)
        if stem == "%ntid":
            return np.array(self.block_threads if axis == 0 else 1)
        if stem == "%ctaid":
            before = int(np.prod(self.grid[:axis], dtype=np.int64))
            return self.block // before % self.grid[axis]
        if stem == "%nctaid":
            return np.array(self.grid[axis])
        if stem == "%laneid":
            return self.lane
        if stem == "%warpid":
            return self.warp
        raise unsupported(name)


SPECIAL_REGISTERS = frozenset(
    ["%laneid", "%warpid"]
    + [f"%{stem}.{axis}" for stem in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
)
