"""The state of a launch that instructions read and change: threads, memory and counters."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gcnzc.testing.counters import AccessCounters
from gcnzc.testing.faults import Fault
from gcnzc.testing.global_memory import AddressError, GlobalMemory, Segment, host_addresses
from gcnzc.testing.number_types import Array
from gcnzc.testing.races import Access, AccessHistory
from gcnzc.testing.shared_memory import SharedMemory
from gcnzc.testing.threads import Threads


@dataclass
class GlobalState:
    """Global memory of a launch, shared by all of its blocks, and what is recorded of it."""

    memory: GlobalMemory
    counts: bool  # whether accesses are counted
    detects_races: bool  # whether accesses of several blocks are compared
    allowed_races: Collection[str] = ()  # names of arguments in which races are permitted
    counters: dict[tuple[str, str], AccessCounters] = field(default_factory=dict)
    _histories: dict[int, AccessHistory] = field(default_factory=dict)

    def count(self, verb: str, segment: Segment, warps: Array, addresses: Array) -> None:
        """Count one instruction; the verb is load, store or atomic."""
        key = verb, segment.name
        self.counters.setdefault(key, AccessCounters()).add(warps, host_addresses(addresses))

    def check_races(
        self, access: Access, segment: Segment, addresses: Array, num_bytes: int, blocks: Array
    ) -> None:
        """Compare accesses with those of other blocks, also through other arguments.

        Raises:
            AddressError: another block accesses the same byte, one of the two writes it, and one is
                not atomic. Order by release and acquire is not modelled.
        """
        if segment.name in self.allowed_races:
            return
        hosts = host_addresses(addresses).astype(np.int64)
        begin, history = self._history_at(int(hosts[0]))
        # 0 stands for no access, and the largest number for several blocks
        owners = blocks.astype(np.int32) + np.int32(1)
        race = history.record(
            access,
            (hosts - begin) // num_bytes,
            num_bytes,
            owners,
            np.ones_like(owners),
            np.full_like(owners, np.iinfo(np.int32).max),
        )
        if race is not None:
            lane, other = race
            raise AddressError(
                lane,
                f"race in {segment.name} at offset {int(addresses[lane]) - segment.begin}: "
                f"this access conflicts with another block's {other}",
            )

    def _history_at(self, host: int) -> tuple[int, AccessHistory]:
        """Return the first host address of a range of memory, and its history."""
        for begin, end in self.memory.host_ranges():
            if begin <= host < end:
                if begin not in self._histories:
                    self._histories[begin] = AccessHistory(end - begin, np.int32)
                return begin, self._histories[begin]
        raise AssertionError("an access outside of all segments was not found")


@dataclass
class LaunchState:
    """Blocks that execute together, and the memory that they access."""

    threads: Threads
    shared: SharedMemory
    global_state: GlobalState
    arguments: Sequence[Array]  # bytes of each parameter

    def read_shared(self, at: Array, size: int, count: int, access: Access) -> tuple[Array, Array]:
        """Read words of active threads from shared memory; see `SharedMemory.read`."""
        threads = self.threads
        blocks, warps = threads.select(threads.block_position), threads.select(threads.warp)
        try:
            return self.shared.read(blocks, warps, at.astype(np.int64), size, count, access)
        except AddressError as error:
            raise self._fault(error, size * count, at) from None

    def write_shared(
        self,
        at: Array,
        words: Sequence[Array],
        defined: Sequence[Array | None],
        access: Access,
    ) -> None:
        """Write words of active threads to shared memory; see `SharedMemory.write`."""
        threads = self.threads
        blocks, warps = threads.select(threads.block_position), threads.select(threads.warp)
        try:
            self.shared.write(blocks, warps, at.astype(np.int64), words, defined, access)
        except AddressError as error:
            raise self._fault(error, words[0].itemsize * len(words), at) from None

    def require_shared_alignment(self, at: Array, num_bytes: int) -> None:
        """Check that the shared addresses of active threads are multiples of `num_bytes`."""
        misaligned = at % num_bytes != 0
        if misaligned.any():
            reason = f"shared address is not a multiple of {num_bytes}"
            raise self._fault(AddressError(int(misaligned.argmax()), reason), num_bytes, at)

    def read_global(self, at: Array, size: int, count: int, access: Access) -> Array:
        """Return (count, k) words of active threads from global memory."""
        verb = "atomic" if access is Access.ATOMIC else "load"
        try:
            found = self.global_state.memory.read(at, size, count)
            self._record(verb, access, at, size * count)
        except AddressError as error:
            raise self._fault(error, size * count, at) from None
        return found

    def write_global(
        self, at: Array, words: Sequence[Array], access: Access, record: bool = True
    ) -> None:
        """Write words of active threads to global memory.

        Args:
            at: (k,) device addresses.
            words: adjacent words of each thread, each of (k,).
            access: how memory is accessed.
            record: count the access and check it for races; False for the write of an atomic
                operation, whose read is recorded.
        """
        num_bytes = words[0].itemsize * len(words)
        try:
            self.global_state.memory.write(at, words)
            if record:
                self._record("store", access, at, num_bytes)
        except AddressError as error:
            raise self._fault(error, num_bytes, at) from None

    def _record(self, verb: str, access: Access, at: Array, num_bytes: int) -> None:
        state, threads = self.global_state, self.threads
        if not (state.counts or state.detects_races):
            return
        warps, blocks = threads.select(threads.global_warp), threads.select(threads.block)
        for segment, lanes in state.memory.split(at, num_bytes):
            if state.counts:
                state.count(verb, segment, warps[lanes], at[lanes])
            if state.detects_races:
                try:
                    state.check_races(access, segment, at[lanes], num_bytes, blocks[lanes])
                except AddressError as error:
                    lane = int(np.arange(len(at))[lanes][error.lane])
                    raise AddressError(lane, error.reason) from None

    def memory_keys(self, at: Array, is_shared: bool) -> Array:
        """Return (k,) integers that are equal where active threads access the same address."""
        if not is_shared:
            return host_addresses(at)
        blocks = self.threads.select(self.threads.block_position)
        return blocks * self.shared.stride + at.astype(np.int64)

    def _fault(self, error: AddressError, num_bytes: int, at: Array) -> Fault:
        threads = self.threads
        thread = int(np.arange(threads.count)[threads.lanes][error.lane])
        return Fault(
            f"{num_bytes} B at {int(at[error.lane]):#x} by thread {threads.thread[thread]} of "
            f"block {threads.block[thread]}: {error.reason}"
        )


Step: TypeAlias = Callable[[LaunchState], Any]
