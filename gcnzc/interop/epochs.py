"""Epochs of a drop-in loader, and the samplers that order its items.

Every iteration over a loader is an epoch of its own, also while others are in progress. The
samplers are subclasses of torch's `RandomSampler` and `SequentialSampler`, so that Lightning and
Accelerate recognize them and replace them by their own samplers.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from gcnzc.loader.seeds import epoch_order

MAX_EPOCHS = 2**32


@dataclass(eq=False)
class EpochProgress:
    """The progress of one iteration over a loader."""

    epoch: int
    position: int = 0  # minibatches that were yielded, or skipped on resuming
    done: int = 0  # items of the epoch used before with another batch or world size
    num_steps: int | None = None  # minibatches of the epoch; None if its sampler has no length
    is_exhausted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether every minibatch was yielded."""
        return self.is_exhausted or self.position == self.num_steps


class EpochCounter:
    """Assigns epochs to the iterations over a loader, and tracks those in progress.

    An iteration gets its epoch when its first minibatch is requested, so an unused iterator does
    not advance the epoch.
    """

    def __init__(self) -> None:
        # the epoch of the next iteration, unless that resumes an earlier one
        self.next = 0
        # the epoch of the last direct iteration over a sampler, as another loader does
        self.of_sampler = 0
        self._resumed: deque[EpochProgress] = deque()
        self._begun: list[tuple[weakref.ref[object], EpochProgress]] = []

    @property
    def present(self) -> int:
        """The epoch of the iteration in progress that began last, or of the next one."""
        return self.unfinished()[-1].epoch

    def begin(self, iterator: object) -> EpochProgress:
        """Begin the next iteration, or resume the first remaining one of a loaded state.

        Args:
            iterator: the iterator; while it exists, the loader's state includes the iteration.
        """
        iteration = self._resumed.popleft() if self._resumed else EpochProgress(self.advance())
        living = [(ref, other) for ref, other in self._begun if ref() is not None]
        self._begun = [(ref, other) for ref, other in living if not other.is_over]
        self._begun.append((weakref.ref(iterator), iteration))
        return iteration

    def advance(self) -> int:
        """Return the next epoch, and advance.

        Raises:
            ValueError: the epoch would be 2**32 or above.
        """
        _check_epoch(self.next)
        self.next += 1
        return self.next - 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; if a loaded state is in that epoch, resume it.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        _check_epoch(epoch)
        if self._resumed and self._resumed[0].epoch == epoch:
            return
        self._resumed.clear()
        self._begun.clear()
        self.next = epoch

    def unfinished(self) -> list[EpochProgress]:
        """Return the iterations of a state, at least one, in the order in which they began.

        These are the iterations in progress and those that are still to be resumed, or else the
        next one. An iteration whose iterator was deleted is in progress until another begins.
        """
        begun = [iteration for _, iteration in self._begun if not iteration.is_over]
        return [*begun, *self._resumed] or [EpochProgress(self.next)]

    def resume(self, iterations: list[EpochProgress]) -> None:
        """Let the next iterations resume these."""
        self._begun.clear()
        self._resumed = deque(iterations)
        self.next = iterations[-1].epoch + 1


class ShuffledItems(RandomSampler):
    """Samples all items of a loader, in another order each epoch.

    Direct iteration over the sampler, as by Accelerate's loaders, advances the epoch. If
    `generator` is set, as Accelerate does to have the same order on all ranks, it decides the
    order.

    Args:
        num_items: the number of items, at least 1.
        seed: the random seed of the order.
        epochs: the epochs of the loader.
    """

    def __init__(self, num_items: int, seed: int, epochs: EpochCounter) -> None:
        super().__init__(range(num_items))
        self.seed = seed
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """Return the indices of the items in the order of an epoch, (N,) int64 on the host."""
        return epoch_order(torch.arange(len(self)), self.seed, epoch)

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = epoch = self._epochs.advance()
        if self.generator is not None:
            return super().__iter__()
        return iter(self.items(epoch).tolist())


class OrderedItems(SequentialSampler):
    """Samples all items of a loader in the order in which they were given.

    Args:
        num_items: the number of items.
        epochs: the epochs of the loader.
    """

    def __init__(self, num_items: int, epochs: EpochCounter) -> None:
        super().__init__(range(num_items))
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """Return the indices of the items, (N,) int64 on the host."""
        return torch.arange(len(self))

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = self._epochs.advance()
        return super().__iter__()


def _check_epoch(epoch: int) -> None:
    if not 0 <= epoch < MAX_EPOCHS:
        raise ValueError(
            f"epoch {epoch}: it must be 0 or more, and below 2**32\n\nhint: count from 0"
        )
