"""Model of PCIe traffic: requests and bytes when a GPU reads rows from host memory.

The lanes of a warp load together. What one such load touches, in sectors of 32 B, is asked for in
requests of 32, 64, 96 or 128 B: each run of adjoining sectors is cut where a line of 128 B ends,
and every piece is one request (Min et al., EMOGI, VLDB 2020, https://arxiv.org/abs/2006.06890, sees
such requests on the bus). A request comes back as a packet with a header. Everything follows from
`gcnzc.kernels.gather.lanes`, exactly; what is assumed of the machine is this:

- Sectors of a line with a gap between them make two requests: a request is one range, and a GPU
  fetches no sector that nobody touched. Only `wrapped` rows of items of 1 or 2 B have such loads.
- Loads share nothing: a sector that two loads touch crosses the bus twice, whatever caches there
  are. Rows asked for one after another do not lie beside each other.
- A request is answered by one packet, or, by root complexes that are said to cut answers at
  multiples of 64 B, by as many as it has such pieces: `split_bytes`.
- Only packets from the host are counted. Requests travel the other way, `REQUEST_BYTES` each.

Letters: S starts of rows within a line, P passes of lanes over a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from gcnzc.kernels.gather.lanes import LINE_BYTES, Lanes, Layout, lanes_of

Array: TypeAlias = np.ndarray[Any, Any]


Run: TypeAlias = tuple[Array, Array]  # the first sector of each load, and the one after its last


SECTOR_BYTES = 32


# of a completion: a header of 12 B, 4 B to begin a packet and 4 B of checksum (PCI Express 3.0)
HEADER_BYTES = 20


# of a request for memory above 4 GB: a header of 16 B, and the same 8 B around it
REQUEST_BYTES = 24


SIZES = (32, 64, 96, 128)


LINE_SECTORS = LINE_BYTES // SECTOR_BYTES


# `choose_pitch`: requests that a pitch must save, and memory that it may cost
LEAST_SAVED = Fraction(5, 100)


MOST_MEMORY = Fraction(10, 100)


@dataclass(frozen=True)
class Traffic:
    """What one row costs on the bus, on average over the rows it was asked about."""

    payload_bytes: int  # of a row
    requests: Mapping[int, Fraction]  # how many of each of `SIZES`
    wire_bytes: Fraction  # from the host, headers included

    @property
    def requests_per_row(self) -> Fraction:
        """Of all sizes."""
        return sum(self.requests.values(), Fraction(0))

    @property
    def read_bytes(self) -> Fraction:
        """Bytes that are asked for."""
        return sum((size * count for size, count in self.requests.items()), Fraction(0))

    @property
    def efficiency(self) -> Fraction:
        """Bytes of the row for each byte on the wire; at most 128 / 148."""
        return self.payload_bytes / self.wire_bytes


class HasRows(Protocol):
    """Such as `gcnzc.FeatureTable`."""

    @property
    def rows(self) -> Tensor:
        """(N, D), each row contiguous."""


def traffic(
    row_bytes: int,
    *,
    layout: Layout,
    item_bytes: int = 4,
    stride_bytes: int | None = None,
    base: int = 0,
    split_bytes: int | None = None,
) -> Traffic:
    """The traffic of a row, on average over a table without end, each of its rows once.

    Args:
        row_bytes: of one row.
        layout: of lanes over rows, see `gcnzc.kernels.gather.lanes.Lanes`.
        item_bytes: of one element, a power of two, of which the other sizes are multiples.
        stride_bytes: from one row to the next; if None rows are side by side, or for `pitched` on
            the lines that follow.
        base: the address of the first row, or what remains of it modulo 128.
        split_bytes: where answers are cut, a power of two of at least 32; nowhere if None.

    Raises:
        ValueError: sizes are not whole elements, or `layout` is `pitched` and rows do not begin on
            lines.
    """
    if stride_bytes is None:
        stride_bytes = row_bytes + (-row_bytes % LINE_BYTES if layout == "pitched" else 0)
    _check(row_bytes, item_bytes, stride_bytes, base, split_bytes)
    period = LINE_BYTES // gcd(stride_bytes, LINE_BYTES)
    starts = (base + np.arange(period) * stride_bytes) % LINE_BYTES
    lanes = lanes_of(layout, row_bytes, stride_bytes, base, item_bytes)
    return _traffic(lanes, starts, np.ones_like(starts), split_bytes)


def table_traffic(
    table: Tensor | HasRows,
    ids: Tensor | None = None,
    *,
    layout: Layout,
    split_bytes: int | None = None,
) -> Traffic:
    """The traffic of a table that is there, or of some of its rows.

    Args:
        table: (N, D), each row contiguous, wherever it lies; nothing of it is read.
        ids: (B,) integers in [0, N); one that occurs twice counts twice. All rows once if None.
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
            f"{tuple(rows.shape)}\n\nhint: `traffic` takes sizes instead of a table"
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
                "\n\nhint: is the table that of another graph?"
            )
        counts = np.bincount(chosen % period, minlength=period)
    starts = (base + residues * stride_bytes) % LINE_BYTES
    lanes = lanes_of(layout, row_bytes, stride_bytes, base, item_bytes)
    return _traffic(lanes, starts, counts, split_bytes)


def choose_layout(stride_bytes: int, base: int = 0) -> Layout:
    """The layout of a gather that is not told one: it asks for no line of a row twice."""
    on_lines = stride_bytes % LINE_BYTES == 0 and base % LINE_BYTES == 0
    return "pitched" if on_lines else "shifted"


def choose_pitch(row_bytes: int, item_bytes: int) -> tuple[int, str]:
    """How far apart to store the rows of a table, and why.

    They are put on lines of 128 B if that saves a share `LEAST_SAVED` of the requests that a
    shifted gather of rows side by side makes, for at most a share `MOST_MEMORY` more memory; else
    they lie side by side.

    Raises:
        ValueError: a row is not whole elements.
    """
    packed = traffic(row_bytes, layout="shifted", item_bytes=item_bytes).requests_per_row
    pitch_bytes = row_bytes + -row_bytes % LINE_BYTES
    if pitch_bytes == row_bytes:
        return row_bytes, "rows side by side begin on lines"
    pitched = traffic(row_bytes, layout="pitched", item_bytes=item_bytes).requests_per_row
    saved, memory = 1 - pitched / packed, Fraction(pitch_bytes, row_bytes) - 1
    told = (
        f"lines of {LINE_BYTES} B save {float(100 * saved):.3g} % of the requests "
        f"and cost {float(100 * memory):.3g} % of memory"
    )
    if saved < LEAST_SAVED:
        return row_bytes, f"{told}: too few"
    if memory > MOST_MEMORY:
        return row_bytes, f"{told}: too much"
    return pitch_bytes, told


@dataclass(frozen=True)
class Ceiling:
    """Bytes of rows a second that a link lets through, by each of its two limits."""

    by_wire_bytes_per_s: float  # its bytes, headers included
    by_tags_bytes_per_s: float  # how many requests may be on their way

    @property
    def bytes_per_s(self) -> float:
        """By both."""
        return min(self.by_wire_bytes_per_s, self.by_tags_bytes_per_s)

    @property
    def binds(self) -> Literal["wire", "tags"]:
        """The lower limit."""
        return "tags" if self.by_tags_bytes_per_s < self.by_wire_bytes_per_s else "wire"


def ceiling(link_bytes_per_s: float, latency_s: float, tags: int, row_traffic: Traffic) -> Ceiling:
    """What no gather of such rows passes.

    Args:
        link_bytes_per_s: of the link in one direction, headers included.
        latency_s: from a request to its answer.
        tags: requests that may be on their way at once; 256 with the 8-bit tags of PCI Express up
            to its third version, 768 with 10-bit ones. What a GPU really has is not published.
        row_traffic: what each row costs.
    """
    rows_per_s = tags / latency_s / float(row_traffic.requests_per_row)
    return Ceiling(
        link_bytes_per_s * float(row_traffic.efficiency), rows_per_s * row_traffic.payload_bytes
    )


def _check(
    row_bytes: int, item_bytes: int, stride_bytes: int, base: int, split_bytes: int | None
) -> None:
    sizes = (row_bytes, stride_bytes, base)
    whole = item_bytes in (1, 2, 4, 8, 16) and all(size % item_bytes == 0 for size in sizes)
    if not whole or row_bytes < 1:
        raise ValueError(
            f"rows of {row_bytes} bytes, {stride_bytes} bytes apart from address {base:#x}, are "
            f"not whole elements of {item_bytes} bytes\n\n"
            "hint: item_bytes is that of the table's type, such as 2 for float16"
        )
    if split_bytes is not None and (
        split_bytes < SECTOR_BYTES or split_bytes & (split_bytes - 1) != 0
    ):
        raise ValueError(
            f"answers cannot be cut at multiples of {split_bytes} bytes\n\n"
            "hint: a root complex that cuts them does so at 64 or 128 bytes"
        )


def _traffic(lanes: Lanes, starts: Array, counts: Array, split_bytes: int | None) -> Traffic:
    """The mean over rows that begin at each of `starts` as often as `counts` says."""
    totals = dict.fromkeys(SIZES, 0)
    packets = 0
    # a request ends where its line does
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
        payload_bytes=lanes.row_bytes,
        requests={size: Fraction(count, num_rows) for size, count in totals.items()},
        wire_bytes=Fraction(read_bytes + packets * HEADER_BYTES, num_rows),
    )


def _pieces(first: Array, end: Array, size: int) -> Array:
    """Into how many pieces [first, end) is cut at the multiples of `size`."""
    return (end - 1) // size - first // size + 1


def _touched(lanes: Lanes, starts: Array) -> list[Run]:
    """The runs of sectors that each load of a warp touches, each (S, P); some of them are empty."""
    vector_bytes = lanes.vector_bytes
    begin_S1 = (starts - starts % vector_bytes)[:, None]
    count_S1 = np.array([[lanes.vectors(int(start))] for start in starts])
    lead_S1 = np.array([[lanes.lead(int(start))] for start in starts])
    number_P = np.arange(lanes.passes) * lanes.lanes
    if lanes.layout == "wrapped":
        lead_S1 %= count_S1
        last_S1 = count_S1
    else:
        last_S1 = lead_S1 + count_S1

    def sectors(low_SP: Array, high_SP: Array) -> Run:
        first_SP = (begin_S1 + low_SP * vector_bytes) // SECTOR_BYTES
        end_SP = -(-(begin_S1 + high_SP * vector_bytes) // SECTOR_BYTES)
        # a lane with nothing to load touches nothing, and no sector is half touched
        return first_SP, np.where(low_SP < high_SP, end_SP, first_SP)

    stop_SP = np.minimum(number_P + lanes.lanes, last_S1)
    head = sectors(np.maximum(number_P, lead_S1) - lead_S1, stop_SP - lead_S1)
    if lanes.layout != "wrapped":
        return [head]
    # the lanes in front of the row's first vector load its last ones
    turn_S1 = count_S1 - lead_S1
    tail = sectors(number_P + turn_S1, np.minimum(stop_SP, lead_S1) + turn_S1)
    joined = tail[0] <= head[1]
    head_end = np.where(joined, np.maximum(head[1], tail[1]), head[1])
    return [(head[0], head_end), (tail[0], np.where(joined, tail[0], tail[1]))]
