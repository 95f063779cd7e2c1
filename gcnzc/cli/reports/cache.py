"""Format predicted hit rates of feature caches: a table, and points to draw."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from gcnzc.cli.reports.tables import align_columns
from gcnzc.features.access_counts import RANKINGS

# cache sizes, as shares of the rows, and hit rates; by cache policy
Points: TypeAlias = dict[str, list[tuple[float, float]]]


def hit_rate_points(found: Mapping[str, Any]) -> tuple[Points, Points]:
    """Return the predicted and the measured hit rates of a `cache_forecast.forecast`, to draw."""
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


def format_forecast(found: Mapping[str, Any]) -> list[str]:
    """Format a `cache_forecast.forecast` as lines of text: an introduction and a table."""
    has_measured = "measured_hit_rate" in found["sizes"][0][RANKINGS[0]]
    is_sharded = found["gpus"] > 1
    heads = ["cached rows", "memory per GPU" if is_sharded else "GPU memory"]
    for name in RANKINGS:
        heads += [name, *["measured"] * has_measured, *["peer GPUs"] * is_sharded, "MB per batch"]
    rows = [heads]
    for line in found["sizes"]:
        cells = [f"{line['share']:.1%}", f"{line['memory_bytes'] / 1e6:.1f} MB"]
        for name in RANKINGS:
            figures = line[name]
            cells.append(f"{figures['predicted_hit_rate']:.1%}")
            if has_measured:
                cells.append(f"{figures['measured_hit_rate']:.1%}")
            if is_sharded:
                cells.append(f"{figures['predicted_peer_hit_rate']:.1%}")
            cells.append(f"{figures['bytes_per_batch'] / 1e6:.2f}")
        rows.append(cells)
    sharded = f" sharded over {found['gpus']} GPUs" if is_sharded else ""
    return [
        f"a minibatch reads {found['nodes_per_batch']:,.0f} rows of {found['row_bytes']} B, "
        f"{found['bytes_per_batch'] / 1e6:.2f} MB; hit rates of a feature cache{sharded}, "
        f"predicted from {found['batches']} minibatches, and the bytes that still cross the bus:",
        *align_columns(rows),
    ]
