"""Count the PCIe requests of compiled gathers of public datasets' rows.

    python -m bench.loading.compiled_pcie [--archs 80 90 100]

The gather kernel is compiled for each GPU architecture, and its PTX is executed on the CPU for rows
at every offset within a 128 B line that occurs in the table. No GPU is needed. The requests are
counted, so they are the same on every machine. A table in docs/benchmarks/bus.md compares the
layouts that read unpadded rows.
"""

import argparse

from bench.harness import record
from bench.loading.pcie import SETS
from gcnzc.tune.compiled_traffic import compare_layouts
from gcnzc.tune.table_shapes import Shape

ITEM_BYTES = {"float32": 4, "float16": 2, "int8": 1}


def main() -> None:
    """Record the requests of each dataset, dtype, layout and architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100])
    options = parser.parse_args()
    shapes = [
        Shape(name, 0, num_columns, dtype, num_columns * ITEM_BYTES[dtype])
        for name, (num_columns, *dtypes) in SETS.items()
        for dtype in dtypes
    ]
    for shape in shapes:
        # one at a time: long rows take minutes, and what is recorded stays
        (layouts,) = compare_layouts([shape], options.archs, advance=lambda *_: None)
        for layout, figures in layouts.items():
            for arch in options.archs:
                counted = figures[f"sm_{arch}"]
                record(
                    "compiled_wire",
                    {
                        "name": shape.name,
                        "dtype": shape.dtype,
                        "row_bytes": shape.row_bytes,
                        "layout": layout,
                        "arch": arch,
                    },
                    sampled_rows=figures["sampled_rows"],
                    requests_per_row=counted["requests_per_row"],
                    wire_bytes_per_row=counted["wire_bytes_per_row"],
                    equals_model=counted["equals_model"],
                )


if __name__ == "__main__":
    main()
