"""Tables and figures of PCIe measurements."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from gcnzc.cli.plots import Efficiencies
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.tune.table_shapes import WIDEST, Curves, roofs, sweep


def drawn(found: Mapping[str, Any]) -> Efficiencies:
    """What there is to draw of a `report`, for rows of the table's type, or of float32 of several.

    A measured point is at the share of the dense read that was measured, times the efficiency of
    such a read: the dense read itself would be on the upper roof.
    """
    split_bytes, tables = found["split_bytes"], found["tables"]
    dtype = tables[0]["dtype"] if len(tables) == 1 else "float32"
    highest = roofs(split_bytes)
    points: Curves = {layout: [] for layout in LAYOUTS}
    for table, layout in product(tables, LAYOUTS):
        share = table["layouts"][layout].get("share_of_dense")
        if share is not None and table["row_bytes"] <= WIDEST:
            points[layout].append((table["row_bytes"], share * max(highest.values())))
    return Efficiencies(dtype, sweep(dtype, split_bytes), points, highest)


def lines(found: Mapping[str, Any]) -> list[str]:
    """What `report` found, as lines for a person: a table, and what is chosen."""
    link, tables = found["link"], found["tables"]
    if link is None:
        told = ["no CUDA device: these figures are the model's, and nothing is measured"]
    else:
        told = [_of_the_link(link)]
    if len(tables) > 1:
        return [*told, *_overview(tables)]
    (table,) = tables
    where = f", the first {table['base']} B after a line" if table["base"] else ""
    told.append(
        f"{table['name']}: {table['rows']:,} rows of {table['columns']} {table['dtype']}, "
        f"{table['row_bytes']} B, {table['stride_bytes']} B apart{where}"
    )
    told += _columns([_heads(link), *(_cells(*item) for item in table["layouts"].items())])
    told.append(f"read as it lies: {table['layout']}")
    told.append(
        f"as `gcnzc prepare` stores such rows, {table['pitch_bytes']} B apart: "
        f"{table['prepared_layout']}, because {table['why']}"
    )
    return told


def _of_the_link(link: Mapping[str, Any]) -> str:
    copy, dense = (link[f"{way}_bytes_per_s"] / 1e9 for way in ("copy", "dense"))
    told = (
        f"the copy engine makes {copy:.1f} GB/s; a dense read by {link['dense_programs']} programs "
        f"{dense:.1f} GB/s; a load takes {link['latency_s'] * 1e6:.2f} us, so "
        f"{link['requests_in_flight']:.0f} requests of {LINE_BYTES} B are on their way"
    )
    if link.get("pcie_bytes_per_s") is not None:
        told += (
            f"; PCIe {link['pcie_generation']} with {link['pcie_lanes']} lanes carries "
            f"{link['pcie_bytes_per_s'] / 1e9:.1f} GB/s with headers"
        )
    return told


def _heads(link: Mapping[str, Any] | None) -> list[str]:
    heads = ["layout", "requests a row", "bytes on the wire", "efficiency", "more memory"]
    return heads if link is None else [*heads, "GB/s of rows", "of the dense read", "of the copy"]


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


def _overview(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of several tables."""
    rows = [["requests a row:", "", "row B", *LAYOUTS, "pitched memory", "chosen", "efficiency"]]
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
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells below each other: the first column from the left, the others from the right."""
    widths = [
        max(len(row[place]) for row in rows if place < len(row))
        for place in range(max(map(len, rows)))
    ]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
