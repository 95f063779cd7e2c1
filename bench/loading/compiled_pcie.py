"""Count the PCIe requests of compiled gathers of public datasets' rows.

    python -m bench.loading.compiled_pcie [--archs 80 90 100]

The gather kernel is compiled for each GPU architecture, and its PTX is executed on the CPU for rows
at every offset within a 128 B line that occurs in the table. No GPU is needed. The requests are
counted, so they are the same on every machine. A table in docs/benchmarks/bus.md compares the
layouts that read unpadded rows.
"""

import argparse
from itertools import product

from bench.harness import record
from bench.loading.pcie import SETS
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.tune.compiled_traffic import compare
from gcnzc.tune.pcie_bench import Shape

ITEM_BYTES = {"float32": 4, "float16": 2, "int8": 1}


def main() -> None:
    """Record the requests of each dataset, dtype, layout and architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100])
    options = parser.parse_args()
    for name, (num_columns, *dtypes) in SETS.items():
        for dtype, layout in product(dtypes, LAYOUTS):
            row_bytes = num_columns * ITEM_BYTES[dtype]
            padding = -row_bytes % LINE_BYTES if layout == "pitched" else 0
            shape = Shape(name, 0, num_columns, dtype, row_bytes + padding)
            figures = compare(shape, options.archs, layout=layout)
            for arch in options.archs:
                counted = figures[f"sm_{arch}"]
                record(
                    "compiled_wire",
                    {
                        "name": shape.name,
                        "dtype": shape.dtype,
                        "row_bytes": row_bytes,
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
