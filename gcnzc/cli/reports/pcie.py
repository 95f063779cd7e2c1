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

    The efficiency of a measured layout is its rate, as a fraction of the measured rate of a dense
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
        return [*lines, *_format_tables(tables), *_compiled_summary(tables)]
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
    return [*lines, *_format_compiled(table), *_compiled_summary(tables)]


def _format_compiled(table: Mapping[str, Any]) -> list[str]:
    """Format the traffic of the compiled kernel and of the model, for each layout of a table."""
    compiled = {
        layout: figures["compiled"]
        for layout, figures in table["layouts"].items()
        if "compiled" in figures
    }
    if not compiled:
        return []
    rows = [["layout", "", "requests per row", "bytes requested", "bytes on the bus"]]
    for layout, figures in compiled.items():
        for source in ("model", *_architectures(figures)):
            traffic = figures[source]
            rows.append(
                [
                    layout if source == "model" else "",
                    source,
                    f"{traffic['requests_per_row']:.2f}",
                    f"{traffic['read_bytes_per_row']:.1f}",
                    f"{traffic['wire_bytes_per_row']:.1f}",
                    "" if traffic.get("equals_model", True) else "differs",
                ]
            )
    counts = sorted({figures["sampled_rows"] for figures in compiled.values()})
    numbers = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [
        f"the compiled gather kernel, executed on the CPU for {numbers} rows of each layout:",
        *align_columns(rows, left=(0, 1, 5)),
    ]


def _compiled_summary(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """State whether the compiled kernel makes the predicted requests, with a line if not."""
    lines: list[str] = []
    architectures: list[str] = []
    for table, layout in product(tables, LAYOUTS):
        figures = table["layouts"][layout].get("compiled")
        if figures is None:
            continue
        for arch in _architectures(figures):
            if arch not in architectures:
                architectures.append(arch)
            if not figures[arch]["equals_model"]:
                counted, predicted = (
                    f"{figures[source]['requests_per_row']:.2f} requests and "
                    f"{figures[source]['wire_bytes_per_row']:.1f} B on the bus per row"
                    for source in (arch, "model")
                )
                lines.append(
                    f"warning: {table['name']} {table['dtype']}, {layout}: compiled for {arch}, "
                    f"the gather makes {counted}; the model predicts {predicted}"
                )
    if architectures and not lines:
        lines.append(
            "the compiled gather makes the requests that the model predicts, with every layout, "
            f"for {' and '.join(architectures)}"
        )
    return lines


def _architectures(figures: Mapping[str, Any]) -> list[str]:
    return [name for name in figures if name.startswith("sm_")]


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
        rows.append([*cells, *_compiled_cells(layouts)])
    return align_columns(rows, left=(0,))


def _compiled_cells(layouts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a cell that says where the compiled kernel's requests differ from the model's."""
    compiled = {
        layout: figures["compiled"] for layout, figures in layouts.items() if "compiled" in figures
    }
    if not compiled:
        return []
    different = [
        f"{layout} {arch}"
        for layout, figures in compiled.items()
        for arch in _architectures(figures)
        if not figures[arch]["equals_model"]
    ]
    return [f"differs: {', '.join(different)}" if different else "compiled: equal"]
