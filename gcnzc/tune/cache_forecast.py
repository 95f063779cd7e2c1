"""The predicted hit rate of a feature cache, by its size."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gcnzc.features.access_counts import (
    RANKINGS,
    Presample,
    compute_hit_rates,
    compute_own_hit_rates,
    rank_by_score,
)
from gcnzc.features.cache import cache_bytes, num_rows_to_cache
from gcnzc.features.table import FeatureTable

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of a table's rows, that a plan is made for


def forecast(
    counted: Presample,
    table: FeatureTable,
    degrees: Tensor,
    fresh: Tensor | None = None,
    shares: Sequence[float] = SHARES,
    gpus: int = 1,
) -> dict[str, Any]:
    """What hot sets of several sizes would bring, by both rankings.

    Args:
        counted: minibatches as the run will have them.
        table: that the run gathers from.
        degrees: (N,) in-degrees.
        fresh: (N,) counts of minibatches that had no part in `counted`, such as `needed` gives; to
            measure what is predicted.
        shares: of the rows, the sizes to plan for.
        gpus: that split the hot set.

    Returns:
        What JSON can hold: `gpus`, `nodes_per_batch`, `bytes_per_batch` without a hot set, and
        `sizes`, each with its `share`, `rows`, `memory_bytes` on a GPU, and of each of `RANKINGS`
        `predicted_hit_rate` and the `bytes_per_batch` that are left to the host, and
        `measured_hit_rate` if there is `fresh`. Of a split set also `predicted_own_hit_rates` by
        the rows that each GPU has, and `predicted_peer_hit_rate` by those that the others have,
        the mean of all GPUs; and the same measured.
    """
    sizes = [num_rows_to_cache(table, float(share)) for share in shares]
    predicted = {
        "in-degree": counted.hit_rates_by(degrees, sizes),
        "presampled": counted.hit_rates(sizes),
    }
    measured, measured_own = {}, {}
    if fresh is not None:
        scores = {"in-degree": degrees, "presampled": counted.scores}
        for name in RANKINGS:
            ranking = rank_by_score(scores[name])
            measured[name] = compute_hit_rates(ranking, fresh, sizes)
            measured_own[name] = compute_own_hit_rates(ranking, fresh, sizes, gpus)
    all_bytes = counted.nodes_per_batch * table.row_bytes
    lines = []
    for place, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        line: dict[str, Any] = {
            "share": share,
            "rows": size,
            "memory_bytes": cache_bytes(table, size, gpus),
        }
        for name in RANKINGS:
            rate = predicted[name][place]
            line[name] = {
                "predicted_hit_rate": rate,
                "bytes_per_batch": round(all_bytes * (1 - rate)),
            }
            if measured:
                line[name]["measured_hit_rate"] = measured[name][place]
        lines.append(line)
    if gpus > 1:
        predicted_own = {
            "in-degree": counted.own_hit_rates_by(degrees, sizes, gpus),
            "presampled": counted.own_hit_rates(sizes, gpus),
        }
        _tell_apart(lines, "predicted", predicted_own)
        _tell_apart(lines, "measured", measured_own)
    return {
        "gpus": gpus,
        "row_bytes": table.row_bytes,
        "batches": 2 * counted.batches,
        "nodes_per_batch": counted.nodes_per_batch,
        "bytes_per_batch": round(all_bytes),
        "sizes": lines,
    }


def _tell_apart(
    lines: Sequence[dict[str, Any]], how: str, own: Mapping[str, list[list[float]]]
) -> None:
    """Add which of the hits each GPU has itself, and which on the mean the others have."""
    for name, of_sizes in own.items():
        for line, rates in zip(lines, of_sizes, strict=True):
            figures = line[name]
            figures[f"{how}_own_hit_rates"] = rates
            figures[f"{how}_peer_hit_rate"] = figures[f"{how}_hit_rate"] - sum(rates) / len(rates)
