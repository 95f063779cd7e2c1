"""Draw from discrete distributions in constant time, many draws at once.

Source: Walker's method as Vose builds it (IEEE Trans. Software Eng. 17, 1991). Every value has a
slot of equal width, which it shares with at most one other.

Letters: R distributions (rows), V slots of all rows together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.rows import Array


@dataclass(frozen=True)
class Alias:
    """Distributions over the values from 0 on, of any lengths."""

    start: Array  # (R,) int64: the first slot of a row
    length: Array  # (R,) float64: its number of slots, as a factor of what is drawn
    keep: Array  # (V,) float64: the share of a slot that is its own value's
    other: Array  # (V,) int64: whose the rest is

    @classmethod
    def of(cls, rows: Sequence[Array]) -> "Alias":
        """The distributions in proportion to weights, each row (n,), not negative.

        A row of zeros becomes the uniform distribution.
        """
        slots = [_slots(np.asarray(weights, np.float64)) for weights in rows]
        lengths = np.array([len(keep) for keep, _ in slots])
        return cls(
            lengths.cumsum() - lengths,
            lengths.astype(np.float64),
            np.concatenate([keep for keep, _ in slots]),
            np.concatenate([other for _, other in slots]),
        )

    def draw(self, random: np.random.Generator, size: int, rows: Array | None = None) -> Array:
        """(size,) int64: a value of each row in `rows`, (size,), or all of the first one."""
        place = random.random(size)
        place *= self.length[0] if rows is None else np.take(self.length, rows)
        value = place.astype(np.int64)
        place -= value
        slot = value if rows is None else np.take(self.start, rows) + value
        own = place < np.take(self.keep, slot)
        return np.where(own, value, np.take(self.other, slot))


def _slots(weights: Array) -> tuple[Array, Array]:
    total = weights.sum()
    keep = weights / total * len(weights) if total > 0 else np.ones(len(weights))
    other = np.arange(len(weights))
    poor = np.flatnonzero(keep < 1).tolist()
    rich = np.flatnonzero(keep >= 1).tolist()
    while poor and rich:
        filled, giver = poor.pop(), rich[-1]
        other[filled] = giver
        keep[giver] -= 1 - keep[filled]
        if keep[giver] < 1:
            poor.append(rich.pop())
    # all that is left is full, but for rounding
    keep[poor + rich] = 1
    return keep, other
