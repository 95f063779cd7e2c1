"""Shared memory of the blocks that are executed together: bounds, undefined bytes, and races."""

from collections.abc import Sequence

import numpy as np

from gcnzc.testing.global_memory import VECTOR_BYTES, AddressError
from gcnzc.testing.number_types import Array
from gcnzc.testing.races import Access, AccessHistory, Written


class SharedMemory:
    """Shared memory of several blocks, one after another.

    The owners in the history of accesses are warps, numbered anew after each barrier. Several warps
    may write equal values to a byte between two barriers, as Triton's replicated layouts do.
    """

    def __init__(self, num_blocks: int, num_bytes: int, warps: int, detect_races: bool) -> None:
        """Allocate undefined memory.

        Args:
            num_blocks: number of blocks.
            num_bytes: of each block.
            warps: of each block.
            detect_races: whether accesses are recorded.
        """
        self.num_bytes, self.warps = num_bytes, warps
        self.stride = -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES
        total = num_blocks * self.stride
        self.bytes = np.zeros(total, np.uint8)
        self.defined = np.zeros(total, bool)
        self.history = AccessHistory(total) if detect_races else None
        self.barriers = np.zeros(num_blocks, np.int64)  # that each block has passed

    def read(
        self, blocks: Array, warps: Array, at: Array, size: int, count: int, access: Access
    ) -> tuple[Array, Array]:
        """Read words.

        Args:
            blocks: (k,) position of each lane's block.
            warps: (k,) warp of each lane in its block.
            at: (k,) offsets in bytes.
            size: bytes of a word.
            count: adjacent words of each lane.
            access: how memory is accessed, for the detection of races.

        Returns:
            (count, k) words, and (count, k) whether all of their bytes are defined.

        Raises:
            AddressError: an offset is misaligned or out of bounds, or a race.
        """
        start = self._start(at, blocks, size * count)
        self._record(blocks, warps, start, size * count, access)
        index = start // size
        words, defined = self.bytes.view(f"u{size}"), self.defined.reshape(-1, size)
        found = np.stack([words[index + number] for number in range(count)])
        return found, np.stack([defined[index + number].all(1) for number in range(count)])

    def write(
        self,
        blocks: Array,
        warps: Array,
        at: Array,
        values: Sequence[Array],
        defined: Sequence[Array | None],
        access: Access,
    ) -> None:
        """Write words, and whether they are defined, None if all are.

        The other arguments are those of `read`.
        """
        size, count = values[0].itemsize, len(values)
        start = self._start(at, blocks, size * count)
        index = start // size
        words, defined_words = self.bytes.view(f"u{size}"), self.defined.reshape(-1, size)
        is_unchanged = self._holds(index, values, defined)
        for number, (value, is_defined) in enumerate(zip(values, defined, strict=True)):
            words[index + number] = value
            defined_words[index + number] = True if is_defined is None else is_defined[:, None]
        written = None
        if access is Access.WRITE:
            written = Written(is_unchanged, self._holds(index, values, defined))
        self._record(blocks, warps, start, size * count, access, written)

    def _holds(
        self, index: Array, values: Sequence[Array], defined: Sequence[Array | None]
    ) -> Array:
        """Return (k, size * count) whether each byte equals what is written.

        Two bytes are equal if both are undefined, or both are defined and have the same value.
        """
        size, found = values[0].itemsize, []
        for number, (value, is_defined) in enumerate(zip(values, defined, strict=True)):
            places = (index + number)[:, None] * size + np.arange(size)
            given = np.ascontiguousarray(value).view(np.uint8).reshape(-1, size)
            here = self.defined[places]
            wanted = True if is_defined is None else is_defined[:, None]
            found.append((here == wanted) & (~here | (self.bytes[places] == given)))
        return np.concatenate(found, axis=1)

    def pass_barrier(self, blocks: Array) -> None:
        """Order the accesses of blocks before and after a barrier."""
        self.barriers[blocks] += 1

    def _start(self, at: Array, blocks: Array, num_bytes: int) -> Array:
        """Return the position of each lane's first byte in the memory of all blocks."""
        misaligned = at % num_bytes != 0
        if misaligned.any():
            lane = int(misaligned.argmax())
            raise AddressError(lane, f"shared address is not a multiple of {num_bytes}")
        outside = at + num_bytes > self.num_bytes
        if outside.any():
            lane = int(outside.argmax())
            raise AddressError(
                lane,
                f"out of bounds of shared memory, which has {self.num_bytes} bytes: offset "
                f"{int(at[lane])}",
            )
        return blocks * self.stride + at

    def _record(
        self,
        blocks: Array,
        warps: Array,
        start: Array,
        num_bytes: int,
        access: Access,
        written: Written | None = None,
    ) -> None:
        if self.history is None:
            return
        # one more owner than warps, which stands for several
        first = self.barriers[blocks] * (self.warps + 1) + 1
        owner, several = first + warps, first + self.warps
        index = start // num_bytes
        race = self.history.record(access, index, num_bytes, owner, first, several, written)
        if race is not None:
            lane, other = race
            raise AddressError(
                lane,
                f"race in shared memory at offset {int(start[lane]) % self.stride}: this access "
                f"conflicts with another warp's {other}, and no barrier is in between",
            )
