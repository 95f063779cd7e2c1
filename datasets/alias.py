"""Sample from discrete distributions in constant time per sample, vectorized (alias method).

Walker's alias method with Vose's construction (IEEE Trans. Software Eng. 17, 1991). Each value has
a slot of equal width, which it shares with at most one other value.

Notation: R distributions (rows), V slots of all rows together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.rows import Array


@dataclass(frozen=True)
class AliasTable:
    """Alias tables of discrete distributions over the values 0, 1, ..., with individual lengths."""

    start: Array  # (R,) int64: first slot of each row
    length: Array  # (R,) float64: number of slots, as a factor for uniform random numbers
    keep: Array  # (V,) float64: probability of the slot's own value
    other: Array  # (V,) int64: the other value of the slot

    @classmethod
    def from_weights(cls, rows: Sequence[Array]) -> "AliasTable":
        """Build tables for rows of (n,) non-negative weights; zeros give a uniform distribution."""
        slots = [_slots(np.asarray(weights, np.float64)) for weights in rows]
        lengths = np.array([len(keep) for keep, _ in slots])
        return cls(
            lengths.cumsum() - lengths,
            lengths.astype(np.float64),
            np.concatenate([keep for keep, _ in slots]),
            np.concatenate([other for _, other in slots]),
        )

    def draw(self, random: np.random.Generator, size: int, rows: Array | None = None) -> Array:
        """Sample (size,) int64 values.

        Args:
            random: generator.
            size: number of samples.
            rows: (size,) distribution of each sample; None samples all from the first one.
        """
        position = random.random(size)
        position *= self.length[0] if rows is None else np.take(self.length, rows)
        value = position.astype(np.int64)
        position -= value
        slot = value if rows is None else np.take(self.start, rows) + value
        is_own = position < np.take(self.keep, slot)
        return np.where(is_own, value, np.take(self.other, slot))


def _slots(weights: Array) -> tuple[Array, Array]:
    total = weights.sum()
    keep = weights / total * len(weights) if total > 0 else np.ones(len(weights))
    other = np.arange(len(weights))
    small = np.flatnonzero(keep < 1).tolist()
    large = np.flatnonzero(keep >= 1).tolist()
    while small and large:
        filled, donor = small.pop(), large[-1]
        other[filled] = donor
        keep[donor] -= 1 - keep[filled]
        if keep[donor] < 1:
            small.append(large.pop())
    # the remaining slots are full, up to rounding
    keep[small + large] = 1
    return keep, other
