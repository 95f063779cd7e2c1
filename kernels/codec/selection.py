"""Select the elements of largest magnitude from each segment of a vector.

float32 vectors on the CPU use numba. A segment's magnitudes are counted by their highest 11 bits,
which finds the interval that contains the k-th largest one; only the elements of this interval and
those above it are read again. Other vectors use `torch.topk`. Elements that are NaN count as the
largest.

Notation: n elements, S segments, K selected elements of all segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numba import njit, uint64
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign
# the bits of a magnitude in three digits, from the highest: 11, 10 and 10 bits
SHIFT_1, SHIFT_2 = 20, 10
DIGIT = (1 << 10) - 1
BUCKETS = 1 << 11
GRAIN_ELEMENTS = 1 << 17  # fewest elements for a thread


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive segments of a vector, and how many elements to select from each."""

    bounds: NDArray[np.int64]
    """(S + 1,): the segments are the elements `bounds[s]` to `bounds[s + 1]`"""
    counts: NDArray[np.int64]
    """(S,): k of each segment, at most its length"""

    @classmethod
    def of_density(cls, lengths: Sequence[int] | NDArray[np.int64], density: float) -> "Segments":
        """Return segments of some lengths, with k = max(1, floor(density * length)).

        Segments without elements are left out.
        """
        sizes = np.asarray(lengths, np.int64)
        sizes = sizes[sizes > 0]
        counts = np.maximum(1, np.floor(sizes * density).astype(np.int64))
        return cls(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), counts)

    @classmethod
    def of_chunks(cls, num_elements: int, chunk: int, density: float) -> "Segments":
        """Return segments of `chunk` elements, the last of which may be shorter."""
        begins = np.arange(0, num_elements, chunk)
        return cls.of_density(np.minimum(chunk, num_elements - begins), density)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(S + 1,): the positions of the segments among the K selected elements."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def total(self) -> int:
        """K, the number of selected elements."""
        return int(self.offsets[-1])

    def __len__(self) -> int:
        return len(self.counts)


@njit(nogil=True, cache=True)
def _last_bucket(histogram, remaining):
    """Return the bucket of the `remaining`-th largest, and how many of it are needed."""
    bucket = len(histogram) - 1
    while bucket > 0 and histogram[bucket] < remaining:
        remaining -= histogram[bucket]
        bucket -= 1
    return bucket, remaining


@njit(nogil=True, cache=True)
def _select_segment(bits, begin, end, k, out, histogram, partial):
    """Write the sorted indices of the k largest magnitudes; return the k-th largest."""
    if k <= 0:
        return np.int32(0)
    mask = np.int32(MAGNITUDE)
    # neighbours often have the same digit, so alternate counters do not wait for each other
    for b in range(BUCKETS):
        histogram[b] = 0
        partial[b] = 0
    pairs = (end - begin) // 2
    for p in range(pairs):
        at = begin + 2 * p
        histogram[uint64((bits[uint64(at)] & mask) >> SHIFT_1)] += 1
        partial[uint64((bits[uint64(at + 1)] & mask) >> SHIFT_1)] += 1
    if (end - begin) % 2:
        histogram[uint64((bits[uint64(end - 1)] & mask) >> SHIFT_1)] += 1
    for b in range(BUCKETS):
        histogram[b] += partial[b]
    first, remaining = _last_bucket(histogram, k)
    # elements above the interval, and those in it
    num_candidates = k - remaining + histogram[first]
    candidates = np.empty(num_candidates, np.int64)
    lowest = np.int32(first << SHIFT_1)
    found = 0
    for at in range(begin, end):
        if bits[uint64(at)] & mask >= lowest:
            candidates[uint64(found)] = at
            found += 1
    prefix = np.int32(first)
    for shift in (SHIFT_2, 0):
        for b in range(DIGIT + 1):
            histogram[b] = 0
        for c in range(num_candidates):
            magnitude = bits[candidates[c]] & mask
            if magnitude >> (shift + 10) == prefix:
                histogram[(magnitude >> shift) & DIGIT] += 1
        digit, remaining = _last_bucket(histogram[: DIGIT + 1], remaining)
        prefix = np.int32((prefix << 10) | digit)
    written = 0
    for c in range(num_candidates):
        at = candidates[c]
        magnitude = bits[at] & mask
        # of equal magnitudes, those of the lowest indices
        is_tie = magnitude == prefix and remaining > 0
        if magnitude > prefix or is_tie:
            out[written] = at
            written += 1
            remaining -= is_tie
    return prefix


@njit(nogil=True, cache=True)
def _select(bits, bounds, counts, offsets, indices, limits, begin, end):
    histogram = np.empty(BUCKETS, np.int64)
    partial = np.empty(BUCKETS, np.int64)
    for s in range(begin, end):
        out = indices[offsets[s] : offsets[s + 1]]
        limits[s] = _select_segment(
            bits, bounds[s], bounds[s + 1], counts[s], out, histogram, partial
        )


@njit(nogil=True, cache=True)
def _count_above(bits, bounds, limits, counts, begin, end):
    mask = np.int32(MAGNITUDE)
    for s in range(begin, end):
        limit = max(limits[s], np.int32(1))
        count = np.int64(0)
        for at in range(bounds[s], bounds[s + 1]):
            count += bits[uint64(at)] & mask >= limit
        counts[s] = count


@njit(nogil=True, cache=True)
def _collect_above(bits, bounds, limits, offsets, indices, begin, end):
    mask = np.int32(MAGNITUDE)
    for s in range(begin, end):
        limit = max(limits[s], np.int32(1))
        found = offsets[s]
        for at in range(bounds[s], bounds[s + 1]):
            if bits[uint64(at)] & mask >= limit:
                indices[uint64(found)] = at
                found += 1


def select_largest(
    values: Tensor, segments: Segments, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select the k elements of largest magnitude of each segment.

    Args:
        values: (n,) float32 or float64, which is compared as float32.
        segments: of the vector.
        threads: number of threads on the CPU; `torch.get_num_threads()` if None.

    Returns:
        The indices (K,) int64 of the selected elements, in ascending order, and (S,) float32, the
        smallest selected magnitude of each segment, or 0 where k is 0; both on the device of
        `values`. On the CPU, of several equal magnitudes those of the lowest indices are selected.
    """
    if values.device.type != "cpu":
        return select_largest_reference(values, segments)
    bits = _to_bits(values)
    indices = np.empty(segments.total, np.int64)
    limits = np.empty(len(segments), np.int32)
    args = bits, segments.bounds, segments.counts, segments.offsets, indices, limits
    parallel_for(_select, len(segments), *args, threads=threads, grain_size=_grain(segments))
    return torch.from_numpy(indices), torch.from_numpy(limits.view(np.float32))


def select_largest_reference(values: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Reference for `select_largest` in torch, also for GPUs.

    Of several equal magnitudes, it selects any.
    """
    magnitudes = values.detach().float().abs()
    indices = magnitudes.new_empty(segments.total, dtype=torch.int64)
    limits = magnitudes.new_zeros(len(segments))
    at = 0
    for first, count, k, length in _runs(segments):
        begin = int(segments.bounds[first])
        rows = magnitudes[begin : begin + count * length].view(count, length)
        found = rows.topk(k, dim=1, sorted=False)
        columns = found.indices.sort(dim=1).values
        starts = torch.arange(count, device=values.device)[:, None] * length + begin
        indices[at : at + count * k] = (columns + starts).view(-1)
        if k:
            limits[first : first + count] = found.values.amin(dim=1)
        at += count * k
    return indices, limits


def count_above(
    values: Tensor, segments: Segments, limits: Tensor, threads: int | None = None
) -> NDArray[np.int64]:
    """Count the elements of each segment whose magnitude is at least a limit, except zeros.

    Args:
        values: (n,) float32 or float64, which is compared as float32.
        segments: of the vector; their counts are not used.
        limits: (S,) float32, at least 0, on the device of `values`.
        threads: see `select_largest`.

    Returns:
        (S,), on the host.
    """
    if values.device.type != "cpu":
        is_above = _mark_above(values, segments, limits)
        sums = torch.cat([is_above.new_zeros(1, dtype=torch.int64), is_above.cumsum(0)])
        counts: NDArray[np.int64] = np.diff(sums[segments.bounds].cpu().numpy())
        return counts
    counts = np.empty(len(segments), np.int64)
    args = _to_bits(values), segments.bounds, limits.numpy().view(np.int32), counts
    grain = _grain(segments)
    parallel_for(_count_above, len(segments), *args, threads=threads, grain_size=grain)
    return counts


def select_above(
    values: Tensor,
    segments: Segments,
    limits: Tensor,
    counts: NDArray[np.int64],
    threads: int | None = None,
) -> Tensor:
    """Select the elements that `count_above` counts.

    Args:
        values: see `count_above`.
        segments: see `count_above`.
        limits: see `count_above`.
        counts: (S,), the result of `count_above` for the other arguments.
        threads: see `select_largest`.

    Returns:
        Their indices (K,) int64, in ascending order, on the device of `values`.
    """
    if values.device.type != "cpu":
        return select_above_reference(values, segments, limits)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    indices = np.empty(int(offsets[-1]), np.int64)
    least, grain = limits.numpy().view(np.int32), _grain(segments)
    args = _to_bits(values), segments.bounds, least, offsets, indices
    parallel_for(_collect_above, len(segments), *args, threads=threads, grain_size=grain)
    return torch.from_numpy(indices)


def select_above_reference(values: Tensor, segments: Segments, limits: Tensor) -> Tensor:
    """Reference for `select_above` in torch, also for GPUs."""
    return _mark_above(values, segments, limits).nonzero()[:, 0]


def _mark_above(values: Tensor, segments: Segments, limits: Tensor) -> Tensor:
    magnitudes = values.detach().float().abs()
    lengths = torch.from_numpy(np.diff(segments.bounds)).to(values.device)
    least = limits.repeat_interleave(lengths, output_size=len(values))
    # a NaN is not below its limit
    return ~(magnitudes < least) & (magnitudes != 0)


def _to_bits(values: Tensor) -> NDArray[np.int32]:
    """Return the bits of a vector on the CPU, rounded to float32."""
    bits: NDArray[np.int32] = values.detach().float().contiguous().numpy().view(np.int32)
    return bits


def _runs(segments: Segments) -> list[tuple[int, int, int, int]]:
    """Return runs of segments of one length and k: first segment, their number, k and length."""
    lengths = np.diff(segments.bounds)
    is_new = np.ones(len(segments), bool)
    is_new[1:] = (np.diff(lengths) != 0) | (np.diff(segments.counts) != 0)
    firsts = np.flatnonzero(is_new)
    numbers = np.diff(np.append(firsts, len(segments)))
    return [
        (int(first), int(number), int(segments.counts[first]), int(lengths[first]))
        for first, number in zip(firsts, numbers, strict=True)
    ]


def _grain(segments: Segments) -> int:
    """Return the fewest segments for a thread."""
    return max(1, GRAIN_ELEMENTS * len(segments) // max(1, int(segments.bounds[-1])))
