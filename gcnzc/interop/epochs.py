"""Epochs of a drop-in loader, and the samplers that order its items.

Every iteration over a loader is an epoch of its own, also while others are in progress. The
samplers are torch's `RandomSampler` and `SequentialSampler`, so that Lightning and Accelerate
recognise them and put samplers of their own in their place.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from gcnzc.loader import order

MAX_EPOCHS = 2**32


@dataclass(eq=False)
class Iteration:
    """How far one iteration over a loader is."""

    epoch: int
    position: int = 0  # minibatches that were handed out, or skipped on resuming
    done: int = 0  # items at the beginning of the epoch's order that came in other minibatches
    num_steps: int | None = None  # minibatches of the epoch; None if its sampler has no length
    is_exhausted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether every minibatch was handed out."""
        return self.is_exhausted or self.position == self.num_steps


class Epochs:
    """Which epoch each iteration over a loader is, and how far those in progress are.

    An iteration gets its epoch when its first minibatch is requested, so that an iterator that
    nobody uses takes none.
    """

    def __init__(self) -> None:
        # the epoch of the next iteration, unless an iteration is to be resumed
        self.next = 0
        # the epoch of the last iteration over a sampler alone, by another loader than its own
        self.of_sampler = 0
        self._resumed: deque[Iteration] = deque()
        self._begun: list[tuple[weakref.ref[object], Iteration]] = []

    @property
    def present(self) -> int:
        """The epoch of the iteration in progress that began last, or of the next one."""
        return self.unfinished()[-1].epoch

    def begin(self, iterator: object) -> Iteration:
        """Begin the next iteration, or resume the first of those that a state has left.

        Args:
            iterator: iterates; as long as it lives, its iteration belongs to the loader's state.
        """
        iteration = self._resumed.popleft() if self._resumed else Iteration(self.advance())
        living = [(ref, other) for ref, other in self._begun if ref() is not None]
        self._begun = [(ref, other) for ref, other in living if not other.is_over]
        self._begun.append((weakref.ref(iterator), iteration))
        return iteration

    def advance(self) -> int:
        """Take the next epoch.

        Raises:
            ValueError: there are no more.
        """
        _demand_epoch(self.next)
        self.next += 1
        return self.next - 1

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch: from its start, or where a loaded state left it.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        _demand_epoch(epoch)
        if self._resumed and self._resumed[0].epoch == epoch:
            return
        self._resumed.clear()
        self._begun.clear()
        self.next = epoch

    def unfinished(self) -> list[Iteration]:
        """The iterations that a state consists of: one at least, in the order in which they began.

        They are those in progress, those yet to be resumed, or else the next one. One whose
        iterator was dropped is in progress until another begins.
        """
        begun = [iteration for _, iteration in self._begun if not iteration.is_over]
        return [*begun, *self._resumed] or [Iteration(self.next)]

    def resume(self, iterations: list[Iteration]) -> None:
        """Let the next iterations go on where these are."""
        self._begun.clear()
        self._resumed = deque(iterations)
        self.next = iterations[-1].epoch + 1


class ShuffledItems(RandomSampler):
    """All items of a loader, in another order each epoch.

    Iterating over it alone, as Accelerate's loaders do, takes an epoch. If somebody sets
    `generator`, as Accelerate does to have one order on all ranks, that decides the order.

    Args:
        num_items: at least 1.
        seed: of the order.
        epochs: of the loader.
    """

    def __init__(self, num_items: int, seed: int, epochs: Epochs) -> None:
        super().__init__(range(num_items))
        self.seed = seed
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """(N,) int64 numbers of the items, in the order of an epoch."""
        return order(torch.arange(len(self)), self.seed, epoch)

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = epoch = self._epochs.advance()
        if self.generator is not None:
            return super().__iter__()
        return iter(self.items(epoch).tolist())


class OrderedItems(SequentialSampler):
    """All items of a loader, in the order in which they were given.

    Args:
        num_items: how many there are.
        epochs: of the loader.
    """

    def __init__(self, num_items: int, epochs: Epochs) -> None:
        super().__init__(range(num_items))
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """(N,) int64 numbers of the items."""
        return torch.arange(len(self))

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = self._epochs.advance()
        return super().__iter__()


def _demand_epoch(epoch: int) -> None:
    if not 0 <= epoch < MAX_EPOCHS:
        raise ValueError(
            f"epoch {epoch}: it must be 0 or more, and below 2**32\n\nhint: count from 0"
        )
