"""Divide the minibatches of an epoch into optimizer steps, for gradient accumulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gcnzc.loader.seeds import Shares


@dataclass(frozen=True)
class Accumulation:
    """The optimizer steps of an epoch, each of which takes `size` minibatches of every worker.

    The last step takes the remaining minibatches. The gradient of a step is the mean over the seeds
    of all its minibatches on all workers, as that of one large minibatch.
    """

    shares: Shares
    """the seeds of each minibatch; a step of `Shares` is one minibatch on each worker"""
    size: int = 1
    """minibatches of an optimizer step on one worker"""

    def __len__(self) -> int:
        """Return the number of optimizer steps of the epoch, or of the rest of a resumed one."""
        return math.ceil(len(self.shares) / self.size)

    def first_step(self, minibatch: int) -> int:
        """Return the step that begins with the given minibatch, with which a run resumes."""
        return math.ceil(minibatch / self.size)

    def num_seeds(self, step: int) -> list[int]:
        """Return the number of this worker's seeds in each minibatch of a step."""
        ranges = [self.shares.seed_range(minibatch) for minibatch in self._minibatches(step)]
        return [seeds.stop - seeds.start for seeds in ranges]

    def weights(self, step: int, *, by_size: bool) -> tuple[Sequence[float], float]:
        """Return the factor of the mean loss of each minibatch, and the weight of this worker.

        Args:
            step: of the epoch.
            by_size: whether the optimizer divides by the sizes of the minibatches that all workers
                have computed, as DropCompute does.
        """
        if by_size:
            return self.sizes(step), 1.0
        return self.loss_factors(step), self.loss_weight(step)

    def loss_weight(self, step: int) -> float:
        """Return this worker's number of seeds in a step, divided by the mean over the workers."""
        minibatches = self._minibatches(step)
        begin = self.shares.step_start(minibatches.start)
        seeds = self.shares.step_start(minibatches.stop) - begin
        return sum(self.num_seeds(step)) * self.shares.world_size / seeds

    def loss_factors(self, step: int) -> Sequence[float]:
        """Return each minibatch's fraction of this worker's seeds in a step.

        The sum of the mean losses, each multiplied by its factor, is the mean over these seeds.
        """
        counts = self.num_seeds(step)
        # a worker may have no seeds in the last step of a resumed epoch
        return [count / max(sum(counts), 1) for count in counts]

    def sizes(self, step: int) -> Sequence[float]:
        """Return each minibatch's number of seeds divided by that of a full minibatch."""
        return [count / self.shares.batch_size for count in self.num_seeds(step)]

    def _minibatches(self, step: int) -> range:
        return range(step * self.size, min((step + 1) * self.size, len(self.shares)))
