"""Predict the PCIe traffic of feature tables: those of a dataset, of public graphs, of any width.

Results are JSON values, as `gcnzc pcie` prints them.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gcnzc.datasets import catalog
from gcnzc.features.pcie_traffic import choose_layout, choose_pitch, traffic
from gcnzc.graph import load
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout

# the plot has every width of float32 rows up to this one
MAX_ROW_BYTES = 8192


# the widths in bytes that are reported without a dataset: powers of two, 1.5 times these, and one
# element more than these
_POWERS = [2**power for power in range(2, 13)]


WIDTHS = sorted({w + more for w in _POWERS for more in (0, 4, w // 8 * 4)} | {MAX_ROW_BYTES})


Figures: TypeAlias = dict[str, Any]


# for each layout, points of row bytes and efficiency
Curves: TypeAlias = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Shape:
    """Size and alignment of a feature table, which determine its PCIe traffic."""

    name: str
    num_rows: int
    num_columns: int
    dtype: str  # name of a torch dtype
    stride_bytes: int  # from one row to the next
    base: int = 0  # offset of the first row in its 128 B line
    has_scales: bool = False  # rows are quantized codes
    scale_columns: int | None = None  # number of columns that share a scale; None: those of a row

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.num_columns * self.item_bytes

    def stride_and_base(self, layout: Layout) -> tuple[int, int]:
        """Return the stride and the base of the rows when they are read with `layout`.

        They are the table's own, except that `pitched` pads rows which do not begin on 128 B lines.
        """
        if layout == "pitched" and choose_layout(self.stride_bytes, self.base) != "pitched":
            return self.row_bytes + -self.row_bytes % LINE_BYTES, 0
        return self.stride_bytes, self.base


def shape_of(path: Path) -> Shape:
    """Return the shape of a folder's feature table; rows of a raw folder are contiguous.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: it has no features, or stores them sparse, which GPUs do not read.
    """
    found = load.info(path)
    about, name = found["features"], str(found["name"])
    if about is None or about["columns"] == 0:
        raise ValueError(
            f"{path} has no features to read\n\n"
            f"hint: `gcnzc embed {path} DEST` computes features from its edges"
        )
    if found["kind"] != "prepared":
        columns, dtype = about["columns"], about["dtype"]
        return Shape(name, found["num_nodes"], columns, dtype, columns * _item_bytes(dtype))
    if about["kind"] == "sparse":
        raise ValueError(
            f"{path} has sparse features, but a GPU reads dense rows\n\n"
            f"hint: convert them with `gcnzc prepare {path} DEST`"
        )
    table = load.load(path, allow_nan=True).table
    assert table is not None, "meta.json lists features"
    rows = table.rows
    stride_bytes = rows.stride(0) * rows.element_size()
    base = rows.data_ptr() % LINE_BYTES
    return Shape(
        name,
        rows.shape[0],
        rows.shape[1],
        about["dtype"],
        stride_bytes,
        base,
        has_scales=table.scales is not None,
        scale_columns=table.scale_columns,
    )


def public_shapes() -> list[Shape]:
    """Return the shapes of public graphs' feature tables, in float32 and in float16."""
    return [
        Shape(
            entry.name,
            entry.num_nodes,
            entry.num_features,
            dtype,
            entry.num_features * _item_bytes(dtype),
        )
        for entry, dtype in product(catalog.ENTRIES, ("float32", "float16"))
        if entry.num_features > 0
    ]


def predict_traffic(shape: Shape, split_bytes: int | None = None) -> Figures:
    """Predict a table's PCIe traffic for each layout, and the layout that is chosen.

    Returns:
        JSON values: sizes; `layouts`, the traffic with each layout; `layout`, the one chosen for
        the table in its present memory; `pitch_bytes`, the row pitch at which `gcnzc prepare`
        stores such rows; `prepared_layout`, the one chosen for that pitch; and `why`.
    """
    layouts = {}
    for layout in LAYOUTS:
        stride_bytes, base = shape.stride_and_base(layout)
        found = traffic(
            shape.row_bytes,
            layout=layout,
            item_bytes=shape.item_bytes,
            stride_bytes=stride_bytes,
            base=base,
            split_bytes=split_bytes,
        )
        layouts[layout] = {
            "stride_bytes": stride_bytes,
            "requests_per_row": float(found.requests_per_row),
            "requests": {str(size): float(count) for size, count in found.requests.items()},
            "read_bytes_per_row": float(found.read_bytes),
            "wire_bytes_per_row": float(found.wire_bytes),
            "efficiency": float(found.efficiency),
            "memory": stride_bytes / shape.row_bytes - 1,
        }
    pitch_bytes, why = choose_pitch(shape.row_bytes, shape.item_bytes)
    prepared_layout = choose_layout(pitch_bytes)
    if prepared_layout == "shifted":
        vector, shifted = (
            traffic(shape.row_bytes, layout=layout, item_bytes=shape.item_bytes).requests_per_row
            for layout in ("vector", "shifted")
        )
        ratio = vector / shifted
        more = f"{float(ratio):.2f} times as many" if ratio > 1 else "as many"
        why += f"; with lanes from the row's start there would be {more}"
    return {
        "name": shape.name,
        "rows": shape.num_rows,
        "columns": shape.num_columns,
        "dtype": shape.dtype,
        "row_bytes": shape.row_bytes,
        "stride_bytes": shape.stride_bytes,
        "base": shape.base,
        "layouts": layouts,
        "layout": choose_layout(shape.stride_bytes, shape.base),
        "pitch_bytes": pitch_bytes,
        "prepared_layout": prepared_layout,
        "why": why,
    }


def sweep(dtype: str, split_bytes: int | None = None, max_row_bytes: int = MAX_ROW_BYTES) -> Curves:
    """Predict the efficiency of each layout for all row sizes; rows are contiguous, or pitched.

    Args:
        dtype: name of a torch dtype.
        split_bytes: see `gcnzc.features.pcie_traffic`.
        max_row_bytes: largest row; the smallest has 4 B.

    Returns:
        For each layout, points of row bytes and efficiency.
    """
    item_bytes = _item_bytes(dtype)
    return {
        layout: [
            (
                width,
                float(
                    traffic(
                        width, layout=layout, item_bytes=item_bytes, split_bytes=split_bytes
                    ).efficiency
                ),
            )
            for width in range(max(4, item_bytes), max_row_bytes + 1, item_bytes)
        ]
        for layout in LAYOUTS
    }


def roofs(split_bytes: int | None = None) -> dict[str, float]:
    """Return the efficiency of reads whose requests are all of 128 B, or all of 32 B."""
    return {
        f"{front}{width} B": float(
            traffic(width, layout="vector", split_bytes=split_bytes).efficiency
        )
        for front, width in (("requests of ", 128), ("of ", 32))
    }


def _item_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
