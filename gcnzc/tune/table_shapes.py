"""Predicted PCIe traffic of tables: the user's, public ones, and all widths.

Figures are what JSON can hold, as `gcnzc pcie` prints them.
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

# of float32 rows, in bytes; the picture has every width up to here
WIDEST = 8192


# told of where there is no table: powers of two, a half more, and one element more
_POWERS = [2**power for power in range(2, 13)]


WIDTHS = sorted({w + more for w in _POWERS for more in (0, 4, w // 8 * 4)} | {WIDEST})


Line: TypeAlias = dict[str, Any]


# of each layout, bytes of a row and a share
Curves: TypeAlias = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Shape:
    """A table, as far as the link can tell."""

    name: str
    num_rows: int
    num_columns: int
    dtype: str  # of the elements, as torch names it
    stride_bytes: int  # from one row to the next
    base: int = 0  # where in a line of 128 B the first row begins

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.num_columns * self.item_bytes

    def place(self, layout: Layout) -> tuple[int, int]:
        """The stride and the base of the rows when they are read so.

        They are the table's own, but for `pitched` of a table whose rows do not begin on lines.
        """
        if layout == "pitched" and choose_layout(self.stride_bytes, self.base) != "pitched":
            return self.row_bytes + -self.row_bytes % LINE_BYTES, 0
        return self.stride_bytes, self.base


def shape_of(path: Path) -> Shape:
    """The shape of the feature table of a folder; of one not prepared, as it lies in memory.

    Raises:
        FileNotFoundError: there is no such folder, or a file in it is missing.
        ValueError: it has no features, or keeps them sparse, which no GPU reads.
    """
    found = load.info(path)
    about, name = found["features"], str(found["name"])
    if about is None or about["columns"] == 0:
        raise ValueError(
            f"{path} has no features to read\n\n"
            f"hint: `gcnzc embed {path} DEST` makes some from its edges"
        )
    if found["kind"] != "prepared":
        columns, dtype = about["columns"], about["dtype"]
        return Shape(name, found["num_nodes"], columns, dtype, columns * _item_bytes(dtype))
    if about["kind"] == "sparse":
        raise ValueError(
            f"{path} keeps its features sparse, and a GPU reads dense rows\n\n"
            f"hint: `gcnzc prepare {path} DEST` spreads them out"
        )
    table = load.load(path, allow_nan=True).table
    assert table is not None, "meta.json tells of them"
    rows = table.rows
    stride_bytes = rows.stride(0) * rows.element_size()
    base = rows.data_ptr() % LINE_BYTES
    return Shape(name, rows.shape[0], rows.shape[1], about["dtype"], stride_bytes, base)


def public_shapes() -> list[Shape]:
    """The tables of the public graphs that have features, as float32 and float16, side by side."""
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


def modelled(shape: Shape, split_bytes: int | None = None) -> Line:
    """The model's figures for a table, by layout; and which layout is chosen, and why.

    Returns:
        What JSON can hold: sizes; `layouts`, the figures of each; `layout`, the one that the table
        is read by as it lies; `pitch_bytes`, at which `gcnzc prepare` stores such rows,
        `prepared_layout`, by which they are then read, and `why`.
    """
    layouts = {}
    for layout in LAYOUTS:
        stride_bytes, base = shape.place(layout)
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
        more = vector / shifted
        would = f"would make {float(more):.2f} times as many" if more > 1 else "would make as many"
        why += f"; lanes from the row's start {would}"
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


def sweep(dtype: str, split_bytes: int | None = None, widest: int = WIDEST) -> Curves:
    """Of each layout, bytes of a row and efficiency, for rows side by side; pitched ones on lines.

    Args:
        dtype: of the elements, as torch names it.
        split_bytes: see `gcnzc.features.pcie_traffic`.
        widest: row, in bytes; the narrowest has 4 B.
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
            for width in range(max(4, item_bytes), widest + 1, item_bytes)
        ]
        for layout in LAYOUTS
    }


def roofs(split_bytes: int | None = None) -> dict[str, float]:
    """The efficiency of rows that are all asked for by requests of one size."""
    return {
        f"{front}{width} B": float(
            traffic(width, layout="vector", split_bytes=split_bytes).efficiency
        )
        for front, width in (("requests of ", 128), ("of ", 32))
    }


def _item_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
