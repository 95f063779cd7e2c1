"""Global memory of a launch: the arguments, each in its own address range, with checked accesses.

The memory of an argument is used in place. Its device address is the host address with the number
of the argument in the bits from bit 47 on, which programs on x86-64 do not use. So an access that
leaves an argument reaches an address that belongs to no other, even if they are adjacent on the
host, or share memory. Host addresses of 48 bits, such as on aarch64, are rejected.
"""

import bisect
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcnzc.testing.number_types import Array

TAG_SHIFT = 47
VECTOR_BYTES = 16
LARGEST_ACCESS_BYTES = 32
_MAX_SEGMENTS = 1 << 16
_HOST_MASK = np.uint64((1 << TAG_SHIFT) - 1)


class AddressError(Exception):
    """One of the addresses of an instruction is wrong."""

    def __init__(self, lane: int, reason: str) -> None:
        super().__init__(reason)
        self.lane, self.reason = lane, reason


@dataclass(frozen=True)
class Segment:
    """A contiguous range of host memory that a kernel may access."""

    name: str
    begin: int  # device address
    num_bytes: int
    keep: object  # owner of the memory

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.begin + self.num_bytes


class GlobalMemory:
    """The segments that a launch may access."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []  # of the tags 1, 2, ...
        self.untagged: list[Segment] = []  # at their host addresses, sorted, disjoint
        self._words: dict[tuple[int, int], tuple[int, Array]] = {}
        self._writable: set[int] = set()  # the begins of segments that may be written to

    def map(self, name: str, address: int, num_bytes: int, keep: object = None) -> int:
        """Add a segment.

        Args:
            name: of the argument, for messages and counters.
            address: on the host.
            num_bytes: of the segment; 0 for one that must not be accessed.
            keep: an object that owns the memory.

        Returns:
            The device address of its first byte.

        Raises:
            ValueError: there are too many segments, or the address has more than 47 bits.
        """
        if len(self.segments) + 1 >= _MAX_SEGMENTS or address >> TAG_SHIFT:
            raise ValueError(
                f"no device address for {name} at {address:#x}, segment {len(self.segments)}\n\n"
                f"hint: use at most {_MAX_SEGMENTS - 1} segments at addresses below 2**47"
            )
        device_address = address + (len(self.segments) + 1 << TAG_SHIFT)
        self.segments.append(Segment(name, device_address, num_bytes, keep))
        return device_address

    def map_at_host_address(
        self, name: str, address: int, num_bytes: int, keep: object = None
    ) -> None:
        """Add a segment that kernels reach by host addresses which are stored in other memory.

        Segments that overlap become one. An access that leaves such a segment and reaches an
        adjacent one is not detected.
        """
        begin, end = address, address + num_bytes
        overlapping = [s for s in self.untagged if s.begin < end and begin < s.end]
        self.untagged = [s for s in self.untagged if s not in overlapping]
        names = dict.fromkeys([*(s.name for s in overlapping), name])
        begin = min([begin, *(s.begin for s in overlapping)])
        end = max([end, *(s.end for s in overlapping)])
        kept = (keep, *(s.keep for s in overlapping))
        self.untagged.append(Segment("/".join(names), begin, end - begin, kept))
        self.untagged.sort(key=lambda segment: segment.begin)

    def host_ranges(self) -> list[tuple[int, int]]:
        """Return the disjoint ranges of host addresses of all segments.

        They begin and end at multiples of 32 B, the size of the largest access. So the offset of an
        aligned access in its range is a multiple of its size.
        """
        ranges: list[tuple[int, int]] = []
        for segment in sorted(self.segments + self.untagged, key=_host_begin):
            first, unit = _host_begin(segment), LARGEST_ACCESS_BYTES
            begin = first // unit * unit
            end = -(-(first + segment.num_bytes) // unit) * unit
            if ranges and begin < ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
            elif segment.num_bytes:
                ranges.append((begin, end))
        return ranges

    def split(self, addresses: Array, num_bytes: int) -> Iterator[tuple[Segment, Any]]:
        """Find the segments that an instruction accesses.

        Args:
            addresses: (k,) uint64, device addresses of the lanes.
            num_bytes: of each access, a power of two.

        Yields:
            Each segment, and an index of the lanes that access it.

        Raises:
            AddressError: an address is misaligned or out of bounds.
        """
        misaligned = addresses & np.uint64(num_bytes - 1) != 0
        if misaligned.any():
            lane = int(misaligned.argmax())
            raise AddressError(lane, f"address is not a multiple of {num_bytes}")
        rest: Array | None = None
        while rest is None or rest.any():
            lane = 0 if rest is None else int(rest.argmax())
            segment = self._segment_at(int(addresses[lane]))
            if segment is None or segment.num_bytes < num_bytes:
                raise AddressError(lane, self._describe(segment, int(addresses[lane])))
            # negative offsets become large numbers
            offsets = addresses - np.uint64(segment.begin)
            inside = offsets <= np.uint64(segment.num_bytes - num_bytes)
            if not inside[lane]:
                raise AddressError(lane, self._describe(segment, int(addresses[lane])))
            if rest is None and inside.all():
                yield segment, slice(None)
                return
            yield segment, inside
            rest = ~inside if rest is None else rest & ~inside

    def _segment_at(self, address: int) -> Segment | None:
        tag = address >> TAG_SHIFT
        if tag:
            return self.segments[tag - 1] if tag <= len(self.segments) else None
        number = bisect.bisect_right(self.untagged, address, key=lambda s: s.begin)
        return self.untagged[number - 1] if number else None

    def _describe(self, segment: Segment | None, address: int) -> str:
        if segment is None:
            return "address belongs to no argument"
        return (
            f"out of bounds of {segment.name}, which has {segment.num_bytes} bytes: offset "
            f"{address - segment.begin}"
        )

    def words(self, segment: Segment, size: int) -> tuple[int, Array]:
        """Return the memory of a segment as unsigned words.

        Returns:
            The device address of the first word, and the words; those at the ends may be partly
            outside of the segment, but in the same 16 B.
        """
        key = (segment.begin, size)
        if key not in self._words:
            host = _host_begin(segment)
            offset = host % VECTOR_BYTES
            num_bytes = -(-(offset + segment.num_bytes) // VECTOR_BYTES) * VECTOR_BYTES
            raw = (ctypes.c_uint8 * num_bytes).from_address(host - offset)
            self._words[key] = segment.begin - offset, np.frombuffer(memoryview(raw), f"u{size}")
        return self._words[key]

    def read(self, addresses: Array, size: int, count: int) -> Array:
        """Return (count, k) words of `size` bytes."""
        found = np.empty((count, len(addresses)), f"u{size}")
        for segment, lanes in self.split(addresses, size * count):
            base, words = self.words(segment, size)
            index = (addresses[lanes] - np.uint64(base)) // np.uint64(size)
            for number in range(count):
                found[number, lanes] = words[index + np.uint64(number)]
        return found

    def write(self, addresses: Array, values: Sequence[Array]) -> None:
        """Write words; if lanes write to the same address, the last lane's word remains.

        Raises:
            AddressError: an address is misaligned, out of bounds or of read-only memory.
        """
        size = values[0].itemsize
        for segment, lanes in self.split(addresses, size * len(values)):
            if segment.begin not in self._writable:
                if not _is_writable(segment):
                    lane = int(np.arange(len(addresses))[lanes][0])
                    raise AddressError(lane, f"write to {segment.name}, which is read-only memory")
                self._writable.add(segment.begin)
            base, words = self.words(segment, size)
            index = (addresses[lanes] - np.uint64(base)) // np.uint64(size)
            for number, value in enumerate(values):
                words[index + np.uint64(number)] = value[lanes]


def _is_writable(segment: Segment) -> bool:
    """Whether the process may write to the first and the last byte of a segment."""
    first, reader, writer = _host_begin(segment), *os.pipe()
    try:
        for address in (first, first + segment.num_bytes - 1):
            byte = (ctypes.c_uint8 * 1).from_address(address)
            os.write(writer, byte)
            # the same byte: the kernel reports what would be a SIGSEGV in this process
            os.readv(reader, [byte])
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(reader)
        os.close(writer)
    return True


def _host_begin(segment: Segment) -> int:
    return segment.begin & int(_HOST_MASK)


def host_addresses(addresses: Array) -> Array:
    """Return the host addresses of device addresses."""
    return addresses & _HOST_MASK
