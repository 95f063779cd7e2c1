"""Predict the PCIe traffic of reading feature rows of public datasets, by thread layout.

    python -m bench.loading.pcie

The figures are computed by the model in `gcnzc.features.pcie_traffic`. Nothing is measured, so they
are the same on every machine.
"""

from collections.abc import Iterator
from typing import Any

from bench.harness import record
from gcnzc.features.pcie_traffic import choose_pitch, traffic
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout, default_layout
from gcnzc.system.nvml import LANE_BYTES_PER_S

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
    """Record every figure."""
    for line in (*requests(), *limits()):
        record("wire", line)


def requests() -> Iterator[dict[str, Any]]:
    """Yield the traffic of a row of each dataset, dtype and layout; padded if it is `pitched`."""
    for name, (num_columns, *dtypes) in SETS.items():
        for dtype in dtypes:
            item_bytes = {"float32": 4, "float16": 2, "int8": 1}[dtype]
            row_bytes = num_columns * item_bytes
            pitch_bytes, _ = choose_pitch(row_bytes, item_bytes)
            for layout in LAYOUTS:
                padding = -row_bytes % LINE_BYTES if layout == "pitched" else 0
                found = traffic(row_bytes, layout=layout, item_bytes=item_bytes)
                yield {
                    "name": name,
                    "dtype": dtype,
                    "row_bytes": row_bytes,
                    "layout": layout,
                    "requests_per_row": float(found.requests_per_row),
                    "wire_bytes_per_row": float(found.wire_bytes),
                    "efficiency": float(found.efficiency),
                    "memory": padding / row_bytes,
                    "pitch_bytes": pitch_bytes,
                    "chosen": layout == default_layout(pitch_bytes),
                }


def limits() -> Iterator[dict[str, Any]]:
    """Yield both limits of the bandwidth of rows, for several buses."""
    for name, layout in LIMITED:
        row_bytes, item_bytes = ROWS[name]
        row = traffic(row_bytes, layout=layout, item_bytes=item_bytes)
        for generation, link_bytes_per_s in LINKS.items():
            for tags in TAGS:
                by_wire = link_bytes_per_s * float(row.efficiency)
                by_tags = tags / LATENCY_S / float(row.requests_per_row) * row_bytes
                yield {
                    "rows": name,
                    "layout": layout,
                    "pcie_generation": generation,
                    "tags": tags,
                    "latency_s": LATENCY_S,
                    "by_wire_bytes_per_s": by_wire,
                    "by_tags_bytes_per_s": by_tags,
                    "binds": "tags" if by_tags < by_wire else "wire",
                }


if __name__ == "__main__":
    main()
