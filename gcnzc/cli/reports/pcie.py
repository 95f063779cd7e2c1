"""Format predictions and measurements of the PCIe bus: tables, and points to draw."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from gcnzc.cli.plots import Efficiencies
from gcnzc.cli.reports.tables import align_columns
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.tune.table_shapes import MAX_ROW_BYTES, Curves, roofs, sweep


def efficiency_points(found: Mapping[str, Any]) -> Efficiencies:
    """Return what to draw of a `pcie_bench.report`: for its only table's dtype, or for float32.

    The efficiency of a measured layout is its rate, as a share of the measured rate of a dense
    read, times the predicted efficiency of a dense read.
    """
    split_bytes, tables = found["split_bytes"], found["tables"]
    dtype = tables[0]["dtype"] if len(tables) == 1 else "float32"
    highest = roofs(split_bytes)
    points: Curves = {layout: [] for layout in LAYOUTS}
    for table, layout in product(tables, LAYOUTS):
        share = table["layouts"][layout].get("share_of_dense")
        if share is not None and table["row_bytes"] <= MAX_ROW_BYTES:
            points[layout].append((table["row_bytes"], share * max(highest.values())))
    return Efficiencies(dtype, sweep(dtype, split_bytes), points, highest)


def format_report(found: Mapping[str, Any]) -> list[str]:
    """Format a `pcie_bench.report` as lines of text: rates, a table, and the chosen layout."""
    bus, tables = found["link"], found["tables"]
    if bus is None:
        lines = ["no CUDA device: these figures are predicted, not measured"]
    else:
        lines = [_describe_bus(bus)]
    if len(tables) > 1:
        return [*lines, *_format_tables(tables)]
    (table,) = tables
    base = table["base"]
    offset = f", from {base} B after a multiple of {LINE_BYTES} B" if base else ""
    lines.append(
        f"{table['name']}: {table['rows']:,} rows of {table['columns']} {table['dtype']}, "
        f"{table['row_bytes']} B, with a pitch of {table['stride_bytes']} B{offset}"
    )
    lines += align_columns(
        [_heads(bus), *(_cells(*item) for item in table["layouts"].items())], left=(0,)
    )
    lines.append(f"layout in this memory: {table['layout']}")
    lines.append(
        f"layout after `gcnzc prepare`, with a pitch of {table['pitch_bytes']} B: "
        f"{table['prepared_layout']}, because {table['why']}"
    )
    return lines


def _describe_bus(bus: Mapping[str, Any]) -> str:
    copy, dense = (bus[f"{name}_bytes_per_s"] / 1e9 for name in ("copy", "dense"))
    text = (
        f"the copy engine reaches {copy:.1f} GB/s; a dense read by {bus['dense_programs']} "
        f"programs {dense:.1f} GB/s; a load takes {bus['latency_s'] * 1e6:.2f} us, so "
        f"{bus['requests_in_flight']:.0f} requests of {LINE_BYTES} B are in flight"
    )
    if bus.get("pcie_bytes_per_s") is not None:
        text += (
            f"; PCIe {bus['pcie_generation']} with {bus['pcie_lanes']} lanes carries "
            f"{bus['pcie_bytes_per_s'] / 1e9:.1f} GB/s with headers"
        )
    return text


def _heads(bus: Mapping[str, Any] | None) -> list[str]:
    heads = ["layout", "requests per row", "bytes on the bus", "efficiency", "more memory"]
    return heads if bus is None else [*heads, "GB/s of rows", "of the dense read", "of the copy"]


def _cells(layout: str, figures: Mapping[str, Any]) -> list[str]:
    cells = [
        layout,
        f"{figures['requests_per_row']:.2f}",
        f"{figures['wire_bytes_per_row']:.1f}",
        f"{figures['efficiency']:.1%}",
        f"{figures['memory']:.1%}",
    ]
    if "payload_bytes_per_s" in figures:
        cells.append(f"{figures['payload_bytes_per_s'] / 1e9:.2f}")
        cells += [f"{figures[share]:.1%}" for share in ("share_of_dense", "share_of_copy")]
    return cells


def _format_tables(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format several feature tables, one line each."""
    rows = [["requests per row:", "", "row B", *LAYOUTS, "pitched memory", "chosen", "efficiency"]]
    for table in tables:
        layouts, chosen = table["layouts"], table["prepared_layout"]
        cells = [table["name"], table["dtype"], str(table["row_bytes"])]
        cells += [f"{layouts[layout]['requests_per_row']:.2f}" for layout in LAYOUTS]
        cells += [f"{layouts['pitched']['memory']:+.1%}", chosen]
        cells.append(f"{layouts[chosen]['efficiency']:.1%}")
        rate = layouts[chosen].get("payload_bytes_per_s")
        if rate is not None:
            cells.append(f"{rate / 1e9:.2f} GB/s, {layouts[chosen]['share_of_dense']:.1%} of dense")
        rows.append(cells)
    return align_columns(rows, left=(0,))
