"""Predict the hit rate of a feature cache as a function of its size."""

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

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # cache sizes, as fractions of the rows


def forecast(
    counted: Presample,
    table: FeatureTable,
    degrees: Tensor,
    fresh: Tensor | None = None,
    shares: Sequence[float] = SHARES,
    gpus: int = 1,
) -> dict[str, Any]:
    """Predict the hit rates of caches of several sizes, for both cache policies.

    Args:
        counted: access counts of presampled minibatches.
        table: feature table of the run.
        degrees: (N,) in-degrees.
        fresh: (N,) access counts of other minibatches, for example of `count_accesses`, to measure
            the hit rates that are predicted.
        shares: cache sizes, as fractions of the rows.
        gpus: number of GPUs that the cache is sharded across.

    Returns:
        A dict of JSON values: `gpus`, `row_bytes`, `batches`, `nodes_per_batch`, `bytes_per_batch`
        without a cache, and `sizes`. Each size has its `share`, `rows`, `memory_bytes` per GPU, and
        for each policy in `RANKINGS` the `predicted_hit_rate`, the `bytes_per_batch` that are read
        from the host, and with `fresh` the `measured_hit_rate`. A sharded cache also has
        `predicted_own_hit_rates` for the rows on each GPU and `predicted_peer_hit_rate` for rows on
        other GPUs, averaged over GPUs; and the same measured.
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
    for index, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        line: dict[str, Any] = {
            "share": share,
            "rows": size,
            "memory_bytes": cache_bytes(table, size, gpus),
        }
        for name in RANKINGS:
            rate = predicted[name][index]
            line[name] = {
                "predicted_hit_rate": rate,
                "bytes_per_batch": round(all_bytes * (1 - rate)),
            }
            if measured:
                line[name]["measured_hit_rate"] = measured[name][index]
        lines.append(line)
    if gpus > 1:
        predicted_own = {
            "in-degree": counted.own_hit_rates_by(degrees, sizes, gpus),
            "presampled": counted.own_hit_rates(sizes, gpus),
        }
        _add_peer_rates(lines, "predicted", predicted_own)
        _add_peer_rates(lines, "measured", measured_own)
    return {
        "gpus": gpus,
        "row_bytes": table.row_bytes,
        "batches": 2 * counted.batches,
        "nodes_per_batch": counted.nodes_per_batch,
        "bytes_per_batch": round(all_bytes),
        "sizes": lines,
    }


def _add_peer_rates(
    lines: Sequence[dict[str, Any]], kind: str, own: Mapping[str, list[list[float]]]
) -> None:
    """Add the hit rates of each GPU's own rows, and the mean hit rate of rows on other GPUs.

    Args:
        lines: of all sizes.
        kind: "predicted" or "measured".
        own: by policy, for each size the rates of all GPUs.
    """
    for name, of_sizes in own.items():
        for line, rates in zip(lines, of_sizes, strict=True):
            figures = line[name]
            figures[f"{kind}_own_hit_rates"] = rates
            figures[f"{kind}_peer_hit_rate"] = figures[f"{kind}_hit_rate"] - sum(rates) / len(rates)
