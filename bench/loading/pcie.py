"""Predict the PCIe traffic of reading feature rows of public datasets, by thread layout.

    python -m bench.loading.pcie

The figures are computed by the model in `gcnzc.features.pcie_traffic`. Nothing is measured, so they
are the same on every machine. They are recorded in `bench/results/wire.jsonl` and printed as
Markdown tables.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness import record
from gcnzc.features.pcie_traffic import ceiling, traffic
from gcnzc.kernels.gather.lanes import LAYOUTS, Layout
from gcnzc.system.nvml import LANE_BYTES_PER_S
from gcnzc.tune.table_shapes import Shape, predict_traffic

# columns and dtypes; MAG240M is stored as float16 (Hu et al., OGB-LSC, 2021); IGB is from Khatua et
# al. (2023) and PubMed from Sen et al. (2008); the others are in datasets/catalog.py
SETS = {
    "arxiv": (128, "float32", "float16"),
    "papers100M": (128, "float32", "float16"),
    "MAG240M": (768, "float16"),
    "IGB": (1024, "float32", "float16"),
    "products": (100, "float32", "float16"),
    "reddit": (602, "float32", "float16"),
    "Cora": (1_433, "float32", "float16"),
    "CiteSeer": (3_703, "float32", "float16"),
    "PubMed": (500, "float32", "float16"),
    "Computers": (767, "float32", "float16"),
    "Photo": (745, "float32", "float16"),
    "CS": (6_805, "float32", "float16"),
    # rows of 128 int8 codes, each followed by its float32 scale
    "papers100M, scale inside": (132, "int8"),
}
# bytes per second of 16 PCIe lanes, by generation
LINKS = {generation: 16 * LANE_BYTES_PER_S[generation] for generation in (3, 4, 5)}
TAGS = (256, 768)
# latency of a load from host memory; an assumption
LATENCY_S = 1e-6
LIMITED: list[tuple[str, Layout]] = [
    ("products, float32", "scalar"),
    ("products, float32", "shifted"),
    ("reddit, float32", "scalar"),
    ("reddit, float32", "vector"),
    ("reddit, float32", "shifted"),
    ("reddit, float16", "vector"),
    ("reddit, float16", "shifted"),
]
ROWS = {
    "products, float32": (400, 4),
    "reddit, float32": (2408, 4),
    "reddit, float16": (1204, 2),
}


def main() -> None:
    """Record every figure, and print the tables."""
    for table in tables():
        for layout, figures in table["layouts"].items():
            case = {key: table[key] for key in ("name", "dtype", "row_bytes")} | {"layout": layout}
            chosen = layout == table["prepared_layout"]
            record("wire", case, **figures, chosen=chosen, pitch_bytes=table["pitch_bytes"])
    for line in limits():
        record("wire", line)
    for text in (set_table(), limit_table()):
        print("", *text, sep="\n")


def tables() -> Iterator[dict[str, Any]]:
    """Return the predictions for every dataset and dtype, with packed rows."""
    for name, (num_columns, *dtypes) in SETS.items():
        for dtype in dtypes:
            item_bytes = {"float32": 4, "float16": 2, "int8": 1}[dtype]
            shape = Shape(name, 0, num_columns, dtype, num_columns * item_bytes)
            yield predict_traffic(shape)


def limits() -> Iterator[dict[str, Any]]:
    """Return both limits of the bandwidth of rows, for several buses."""
    for name, layout in LIMITED:
        row_bytes, item_bytes = ROWS[name]
        row = traffic(row_bytes, layout=layout, item_bytes=item_bytes)
        for generation, link_bytes_per_s in LINKS.items():
            for tags in TAGS:
                found = ceiling(link_bytes_per_s, LATENCY_S, tags, row)
                yield {
                    "rows": name,
                    "layout": layout,
                    "pcie_generation": generation,
                    "tags": tags,
                    "latency_s": LATENCY_S,
                    "by_wire_bytes_per_s": found.by_wire_bytes_per_s,
                    "by_tags_bytes_per_s": found.by_tags_bytes_per_s,
                    "binds": found.binds,
                }


def set_table() -> list[str]:
    """Format the requests per row and the efficiency of each dataset as a Markdown table."""
    heads = ["set", "type", "row B", *LAYOUTS, "memory for lines", "stored, read as"]
    rows = []
    for table in tables():
        layouts = table["layouts"]
        cells = [table["name"], table["dtype"], str(table["row_bytes"])]
        for figures in layouts.values():
            cells.append(f"{figures['requests_per_row']:.2f}, {figures['efficiency']:.1%}")
        cells.append(f"{layouts['pitched']['memory']:+.1%}")
        cells.append(f"{table['pitch_bytes']} B apart, {table['prepared_layout']}")
        rows.append(cells)
    return markdown(heads, rows)


def limit_table() -> list[str]:
    """Format the lower limit in GB/s of rows as a Markdown table."""
    cases = [(generation, tags) for generation in LINKS for tags in TAGS]
    heads = ["rows", "layout", *(f"PCIe {g}, {tags} tags" for g, tags in cases)]
    rows: dict[tuple[str, str], list[str]] = {}
    for line in limits():
        least = min(line["by_wire_bytes_per_s"], line["by_tags_bytes_per_s"])
        cells = rows.setdefault((line["rows"], line["layout"]), [line["rows"], line["layout"]])
        cells.append(f"{least / 1e9:.1f}, {line['binds']}")
    return markdown(heads, list(rows.values()))


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table with a line for each of `rows`."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    main()
