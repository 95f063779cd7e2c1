"""Tables and figures of predicted hit rates."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from gcnzc.features.access_counts import RANKINGS

# of each ranking, sizes and hit rates
Points: TypeAlias = dict[str, list[tuple[float, float]]]


def drawn(found: Mapping[str, Any]) -> tuple[Points, Points]:
    """What there is to draw of a `plan`: shares and hit rates, predicted and measured."""
    points: list[Points] = []
    for key in ("predicted_hit_rate", "measured_hit_rate"):
        points.append(
            {
                name: [(line["share"], line[name][key]) for line in found["sizes"]]
                for name in RANKINGS
                if key in found["sizes"][0][name]
            }
        )
    return points[0], points[1]


def lines(found: Mapping[str, Any]) -> list[str]:
    """What `plan` found, as lines for a person."""
    has_measured = "measured_hit_rate" in found["sizes"][0][RANKINGS[0]]
    is_split = found["gpus"] > 1
    heads = ["hot rows", "memory a GPU" if is_split else "GPU memory"]
    for name in RANKINGS:
        heads += [name, *["measured"] * has_measured, *["of it by peers"] * is_split, "MB a batch"]
    rows = [heads]
    for line in found["sizes"]:
        cells = [f"{line['share']:.1%}", f"{line['memory_bytes'] / 1e6:.1f} MB"]
        for name in RANKINGS:
            figures = line[name]
            cells.append(f"{figures['predicted_hit_rate']:.1%}")
            if has_measured:
                cells.append(f"{figures['measured_hit_rate']:.1%}")
            if is_split:
                cells.append(f"{figures['predicted_peer_hit_rate']:.1%}")
            cells.append(f"{figures['bytes_per_batch'] / 1e6:.2f}")
        rows.append(cells)
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    split = f"that {found['gpus']} GPUs split " if is_split else ""
    told = [
        f"a minibatch needs {found['nodes_per_batch']:,.0f} rows of {found['row_bytes']} B, "
        f"{found['bytes_per_batch'] / 1e6:.2f} MB, of which a hot set {split}keeps off the bus the "
        f"share predicted from {found['batches']} minibatches:"
    ]
    for row in rows:
        told.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return told
