"""Reductions that overlap with compute.

Notation: k extras, the numbers that are appended to an exchanged vector.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gcnzc.exchange import Algorithm, Wait

CHANNEL = "outer"
"""the channel of exchanges that overlap with compute"""


@dataclass
class PendingReduction:
    """A pending reduction, or a finished one whose result has not been applied yet."""

    values: Tensor
    """(elements + k,); must not be used until the reduction has finished"""
    workers: int | None = None
    """the number of ranks in the mean; the current number if None"""
    handle: Any = None
    """the result of `Start`; None if the reduction has finished"""
    skip_reason: str = ""
    """why there is no mean; empty if there is one, or if no rank's vector is finite"""

    def wait(self) -> Algorithm[None]:
        """Wait until the reduction has finished."""
        if self.handle is not None:
            self.skip_reason = yield Wait(self.handle)
            self.handle = None

    def state(self, name: str) -> dict[str, Any]:
        """Return the state of a finished reduction for a checkpoint."""
        return {
            f"{name} values": self.values,
            f"{name} workers": self.workers,
            f"{name} skip_reason": self.skip_reason,
        }
