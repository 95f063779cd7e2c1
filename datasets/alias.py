"""Draw from a discrete distribution in constant time, for many draws at once.

Source: Walker's method as Vose builds it (IEEE Trans. Software Eng. 17, 1991). Every value has a
slot of equal width, which it shares with at most one other.

Letters: R distributions (rows) over V values each.
"""

from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.rows import Array


@dataclass(frozen=True)
class Alias:
    """Several distributions over as many values."""

    keep: Array  # (R, V) float64: the share of a slot that is its own value's
    other: Array  # (R, V) int64: whose the rest is

    @classmethod
    def of(cls, weights: Array) -> "Alias":
        """The distributions in proportion to the rows of `weights`, (R, V), not negative.

        A row of zeros becomes the uniform distribution.
        """
        num_rows, num_values = weights.shape
        totals = weights.sum(axis=1, keepdims=True)
        shares = np.where(totals > 0, weights, 1) / np.where(totals > 0, totals, num_values)
        keep = shares * num_values
        other = np.tile(np.arange(num_values), (num_rows, 1))
        for keep_V, other_V in zip(keep, other, strict=True):
            poor = np.flatnonzero(keep_V < 1).tolist()
            rich = np.flatnonzero(keep_V >= 1).tolist()
            while poor and rich:
                filled, giver = poor.pop(), rich[-1]
                other_V[filled] = giver
                keep_V[giver] -= 1 - keep_V[filled]
                if keep_V[giver] < 1:
                    poor.append(rich.pop())
            # all that is left is full, but for rounding
            keep_V[poor + rich] = 1
        return cls(keep, other)

    def draw(self, random: np.random.Generator, size: int, rows: Array | int = 0) -> Array:
        """(size,) int64: a value of each row in `rows`, (size,), or all of one row."""
        num_values = self.keep.shape[1]
        place = random.random(size)
        place *= num_values
        value = place.astype(np.int64)
        place -= value
        slot = value + np.multiply(rows, num_values)
        own = place < np.take(self.keep, slot)
        return np.where(own, value, np.take(self.other, slot))
