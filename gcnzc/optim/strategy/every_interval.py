"""The policy of local SGD, DiLoCo and relatives: exchange after every H local steps."""

from gcnzc.exchange import Algorithm
from gcnzc.optim.strategy.recipe import Policy


class EveryInterval(Policy):
    """Exchange after every H steps; `Recipe.local_steps` is H."""

    def describe(self) -> str:
        """See `Policy`."""
        return f"local_steps={self.strategy.sync_interval.requested}"

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`; without communication."""
        return self.strategy.steps_since_sync >= self.strategy.sync_interval.steps
        yield
