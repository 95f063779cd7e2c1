"""Model of PCIe traffic: requests and bytes when a GPU reads rows from host memory.

The lanes of a warp execute one load together. The GPU reads the sectors of 32 B that the load
touches by requests of 32, 64, 96 or 128 B: each run of adjacent sectors is split at the boundaries
of 128 B lines, and each piece is one request (Min et al., EMOGI, VLDB 2020,
https://arxiv.org/abs/2006.06890, observes such requests on the bus). The answer to a request is a
packet with a header. The counts follow exactly from `gcnzc.kernels.gather.lanes` and these
assumptions:

- A request covers one contiguous range, and no sector that the load does not touch. So a gap within
  a line results in two requests. Only `wrapped` rows with items of 1 or 2 B have such loads.
- Loads do not share sectors: a sector that two loads touch is read twice, since caches are ignored.
  Rows that are gathered consecutively are not adjacent in memory.
- A request is answered by one packet, or with `split_bytes` by several: some root complexes are
  reported to split answers at multiples of 64 B.
- Only packets from the host are counted. Requests have the opposite direction, and take
  24 B each: a header of 16 B, framing and checksum.

Notation: S starts of rows within a line, P passes of lanes over a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from gcnzc.kernels.gather.lanes import (
    LINE_BYTES,
    Lanes,
    Layout,
    assign_lanes,
    default_layout,
)

Array: TypeAlias = np.ndarray[Any, Any]


Run: TypeAlias = tuple[Array, Array]  # the first sector of each load, and the one after its last


SECTOR_BYTES = 32


# of a completion packet: header 12 B, framing 4 B and checksum 4 B (PCI Express 3.0)
HEADER_BYTES = 20


SIZES = (32, 64, 96, 128)


LINE_SECTORS = LINE_BYTES // SECTOR_BYTES


# `choose_pitch`: the least share of requests to save, and the largest share of memory to add
MIN_SAVED = Fraction(5, 100)


MAX_MEMORY = Fraction(10, 100)


@dataclass(frozen=True)
class Traffic:
    """The PCIe traffic of one row, averaged over rows."""

    row_bytes: int  # bytes of a row
    requests: Mapping[int, Fraction]  # number of requests of each of `SIZES`
    wire_bytes: Fraction  # from the host, headers included

    @property
    def requests_per_row(self) -> Fraction:
        """Number of requests of all sizes."""
        return sum(self.requests.values(), Fraction(0))

    @property
    def read_bytes(self) -> Fraction:
        """Bytes that are requested."""
        return sum((size * count for size, count in self.requests.items()), Fraction(0))

    @property
    def efficiency(self) -> Fraction:
        """Bytes of the row divided by bytes on the wire; at most 128 / 148."""
        return self.row_bytes / self.wire_bytes


class HasRows(Protocol):
    """An object with `rows`, such as `gcnzc.FeatureTable`."""

    @property
    def rows(self) -> Tensor:
        """(N, D), each row contiguous."""


def traffic(
    row_bytes: int,
    *,
    layout: Layout | None = None,
    item_bytes: int = 4,
    stride_bytes: int | None = None,
    base: int = 0,
    split_bytes: int | None = None,
) -> Traffic:
    """Return the traffic of a row, averaged over all rows of an unbounded table.

    Args:
        row_bytes: bytes of one row.
        layout: of lanes over rows, see `gcnzc.kernels.gather.lanes.Lanes`; that of gathers if None.
        item_bytes: bytes of one element, a power of two that divides the other sizes.
        stride_bytes: from the start of a row to the next. Default: rows are contiguous, or for
            `pitched` padded to lines.
        base: address of the first row, or its remainder modulo 128.
        split_bytes: the root complex splits answers at multiples of this power of two, at least
            32; None if it does not.

    Raises:
        ValueError: sizes are not whole elements, or `layout` is `pitched` and rows do not begin on
            lines.
    """
    if stride_bytes is None:
        stride_bytes = row_bytes + (-row_bytes % LINE_BYTES if layout == "pitched" else 0)
    _check(row_bytes, item_bytes, stride_bytes, base, split_bytes)
    period = LINE_BYTES // gcd(stride_bytes, LINE_BYTES)
    starts = (base + np.arange(period) * stride_bytes) % LINE_BYTES
    layout = layout or default_layout(stride_bytes, base)
    lanes = assign_lanes(layout, row_bytes, stride_bytes, base, item_bytes)
    return _traffic(lanes, starts, np.ones_like(starts), split_bytes)


def table_traffic(
    table: Tensor | HasRows,
    ids: Tensor | None = None,
    *,
    layout: Layout | None = None,
    split_bytes: int | None = None,
) -> Traffic:
    """Return the traffic of a row, averaged over the rows of a table or some of them.

    Args:
        table: (N, D), each row contiguous, on any device; its values are not read.
        ids: (B,) integers in [0, N); repeated ids are counted repeatedly. All rows if None.
        layout: see `traffic`.
        split_bytes: see `traffic`.

    Raises:
        ValueError: there are no bytes to read, or `layout` is `pitched` and rows do not begin on
            lines.
        IndexError: an id is outside [0, N).
    """
    rows = table if isinstance(table, Tensor) else table.rows
    item_bytes = rows.element_size()
    num_rows, row_bytes = rows.shape[0], rows.shape[1] * item_bytes
    if num_rows == 0 or row_bytes == 0 or (ids is not None and len(ids) == 0):
        raise ValueError(
            f"no bytes to read: {'all' if ids is None else 'no'} rows of a table of shape "
            f"{tuple(rows.shape)}"
        )
    base = rows.data_ptr()
    # a single row may have any stride
    stride_bytes = rows.stride(0) * item_bytes if num_rows > 1 else row_bytes
    _check(row_bytes, item_bytes, stride_bytes, base, split_bytes)
    period = LINE_BYTES // gcd(stride_bytes, LINE_BYTES)
    residues = np.arange(period)
    counts = (num_rows - residues + period - 1) // period
    if ids is not None:
        chosen = ids.detach().cpu().numpy()
        if chosen.min() < 0 or chosen.max() >= num_rows:
            raise IndexError(
                f"ids from {chosen.min()} to {chosen.max()} are not in a table of {num_rows} rows"
            )
        counts = np.bincount(chosen % period, minlength=period)
    starts = (base + residues * stride_bytes) % LINE_BYTES
    layout = layout or default_layout(stride_bytes, base)
    lanes = assign_lanes(layout, row_bytes, stride_bytes, base, item_bytes)
    return _traffic(lanes, starts, counts, split_bytes)


def choose_pitch(row_bytes: int, item_bytes: int) -> tuple[int, str]:
    """Choose the pitch of a table's rows, in bytes, and return it with the reason.

    Rows are padded to lines of 128 B if that saves at least a share `MIN_SAVED` of the requests
    of a shifted gather of contiguous rows, and takes at most a share `MAX_MEMORY` more memory.
    Otherwise they are contiguous.

    Raises:
        ValueError: a row is not whole elements.
    """
    packed = traffic(row_bytes, layout="shifted", item_bytes=item_bytes).requests_per_row
    pitch_bytes = row_bytes + -row_bytes % LINE_BYTES
    if pitch_bytes == row_bytes:
        return row_bytes, "contiguous rows begin on lines"
    pitched = traffic(row_bytes, layout="pitched", item_bytes=item_bytes).requests_per_row
    saved, memory = 1 - pitched / packed, Fraction(pitch_bytes, row_bytes) - 1
    reason = (
        f"lines of {LINE_BYTES} B save {float(100 * saved):.3g} % of the requests "
        f"and cost {float(100 * memory):.3g} % of memory"
    )
    if saved < MIN_SAVED:
        return row_bytes, f"{reason}: too few"
    if memory > MAX_MEMORY:
        return row_bytes, f"{reason}: too much"
    return pitch_bytes, reason


def _check(
    row_bytes: int, item_bytes: int, stride_bytes: int, base: int, split_bytes: int | None
) -> None:
    sizes = (row_bytes, stride_bytes, base)
    whole = item_bytes in (1, 2, 4, 8, 16) and all(size % item_bytes == 0 for size in sizes)
    if not whole or row_bytes < 1:
        raise ValueError(
            f"rows of {row_bytes} bytes, {stride_bytes} bytes apart from address {base:#x}, are "
            f"not whole elements of {item_bytes} bytes"
        )
    if split_bytes is not None and (
        split_bytes < SECTOR_BYTES or split_bytes & (split_bytes - 1) != 0
    ):
        raise ValueError(f"answers cannot be split at multiples of {split_bytes} bytes")


def _traffic(lanes: Lanes, starts: Array, counts: Array, split_bytes: int | None) -> Traffic:
    """Return the mean over rows, `counts` of which begin at each of `starts`."""
    totals = dict.fromkeys(SIZES, 0)
    packets = 0
    # a request does not extend beyond its line
    split = min(split_bytes or LINE_BYTES, LINE_BYTES) // SECTOR_BYTES
    for first_SP, end_SP in _touched(lanes, starts):
        some = first_SP < end_SP
        first, end = first_SP[some], end_SP[some]
        weight = np.broadcast_to(counts[:, None], some.shape)[some]
        between = _pieces(first, end, LINE_SECTORS)
        in_first = np.minimum(end, first - first % LINE_SECTORS + LINE_SECTORS) - first
        in_last = (end - 1) % LINE_SECTORS + 1
        for size in SIZES:
            sectors = size // SECTOR_BYTES
            totals[size] += int(weight[in_first == sectors].sum())
            totals[size] += int(weight[(between > 1) & (in_last == sectors)].sum())
        totals[LINE_BYTES] += int((weight * (between - 2).clip(min=0)).sum())
        packets += int((weight * _pieces(first, end, split)).sum())
    num_rows = int(counts.sum())
    read_bytes = sum(size * count for size, count in totals.items())
    return Traffic(
        row_bytes=lanes.row_bytes,
        requests={size: Fraction(count, num_rows) for size, count in totals.items()},
        wire_bytes=Fraction(read_bytes + packets * HEADER_BYTES, num_rows),
    )


def _pieces(first: Array, end: Array, size: int) -> Array:
    """Return the number of pieces of [first, end) when split at multiples of `size`."""
    return (end - 1) // size - first // size + 1


def _touched(lanes: Lanes, starts: Array) -> list[Run]:
    """Return the runs of sectors that each load of a warp touches, each (S, P); may be empty."""
    vector_bytes = lanes.vector_bytes
    begin_S1 = (starts - starts % vector_bytes)[:, None]
    count_S1 = np.array([[lanes.num_vectors(int(start))] for start in starts])
    lead_S1 = np.array([[lanes.leading_lanes(int(start))] for start in starts])
    number_P = np.arange(lanes.passes) * lanes.lanes
    if lanes.layout == "wrapped":
        lead_S1 %= count_S1
        last_S1 = count_S1
    else:
        last_S1 = lead_S1 + count_S1

    def sectors(low_SP: Array, high_SP: Array) -> Run:
        first_SP = (begin_S1 + low_SP * vector_bytes) // SECTOR_BYTES
        end_SP = -(-(begin_S1 + high_SP * vector_bytes) // SECTOR_BYTES)
        # lanes without elements touch no sector, and sectors are touched as a whole
        return first_SP, np.where(low_SP < high_SP, end_SP, first_SP)

    stop_SP = np.minimum(number_P + lanes.lanes, last_S1)
    head = sectors(np.maximum(number_P, lead_S1) - lead_S1, stop_SP - lead_S1)
    if lanes.layout != "wrapped":
        return [head]
    # the lanes before the row's first vector load its last vectors
    turn_S1 = count_S1 - lead_S1
    tail = sectors(number_P + turn_S1, np.minimum(stop_SP, lead_S1) + turn_S1)
    joined = tail[0] <= head[1]
    head_end = np.where(joined, np.maximum(head[1], tail[1]), head[1])
    return [(head[0], head_end), (tail[0], np.where(joined, tail[0], tail[1]))]
