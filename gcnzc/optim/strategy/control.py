"""Receive signals, and sum signals and votes independently of the exchanges of parameters.

A strategy whose ranks exchange rarely, or in pairs, has a small all-reduce for its common extras:
the signals, such as a request to stop, and the bit that shows whether options differ. The
all-reduce takes log2(W) consecutive messages of a few bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gcnzc.exchange import Algorithm, Sum

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


class Control:
    """Sums the common extras and votes of all ranks, and reads those sums.

    Args:
        strategy: the optimizer whose common extras are sent.
        interval: the number of steps from one sum to the next in `after_step`; None for no sums.
    """

    def __init__(self, strategy: "Strategy", interval: int | None) -> None:
        self.strategy, self.interval = strategy, interval

    def after_step(self) -> Algorithm[None]:
        """Sum the common extras if that is due; called after each step on all ranks."""
        if self.interval is not None and self.strategy.steps % self.interval == 0:
            yield from self.sum()

    def finish_sums(self) -> Algorithm[None]:
        """Wait for sums that have started; called at the same step on all ranks."""
        return
        yield

    def sum(self, votes: Sequence[float] = ()) -> Algorithm[list[float]]:
        """Sum the common extras and votes over the ranks now.

        Args:
            votes: numbers of this rank, of the same length on all ranks.

        Returns:
            The sums of the votes, equal on all ranks.
        """
        extras = self.strategy.common_extras()
        values = torch.tensor([*extras, *votes], dtype=torch.float64)
        return self.receive((yield Sum(values)))

    def receive(self, values: torch.Tensor) -> list[float]:
        """Receive the common extras of all ranks, and return the sums of their votes.

        Args:
            values: the sums (common extras + votes,) on the host.
        """
        sums = values.tolist()
        num_extras = self.strategy.num_common_extras
        self.strategy.receive_common(sums[:num_extras], self.strategy.group.world_size)
        return sums[num_extras:]
