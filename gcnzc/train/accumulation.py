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

        The sum of the mean losses, each multiplied by its factor, is the mean over this worker's
        seeds. Its weight is its number of seeds in the step, divided by the mean over the workers.

        Args:
            step: of the epoch.
            by_size: whether the optimizer divides by the sizes of the minibatches that all workers
                have computed, as DropCompute does. The factors are these sizes, relative to that of
                a full minibatch.
        """
        counts = self.num_seeds(step)
        if by_size:
            return [count / self.shares.batch_size for count in counts], 1.0
        minibatches, own = self._minibatches(step), sum(counts)
        begin = self.shares.step_start(minibatches.start)
        seeds = self.shares.step_start(minibatches.stop) - begin
        # a worker may have no seeds in the last step of a resumed epoch
        factors = [count / max(own, 1) for count in counts]
        return factors, own * self.shares.world_size / seeds

    def _minibatches(self, step: int) -> range:
        return range(step * self.size, min((step + 1) * self.size, len(self.shares)))
