"""The order of seeds in an epoch, and their shares among ranks."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.system.arguments import check_flag, check_integer


def epoch_order(seeds: Tensor, seed: int, epoch: int) -> Tensor:
    """Return `seeds` in the order of an epoch, which is the same on every rank.

    Args:
        seeds: (S,) on the host.
        seed: random seed of the run; any integer, of which the low 64 bits are used.
        epoch: counted from 0.
    """
    # torch's indexing uses threads, which do not exist in a forked child
    return torch.from_numpy(seeds.numpy()[permutation(len(seeds), seed, epoch)])


def permutation(size: int, seed: int, number: int, stream: int = 0) -> NDArray[np.int64]:
    """Return a random permutation of `range(size)`.

    It is drawn by NumPy's generator over Philox 4x64 with the key (seed, number).

    Args:
        size: number of elements.
        seed: random seed of the run; any integer, of which the low 64 bits are used.
        number: a number of the permutation, such as the epoch.
        stream: permutations of different streams are independent.
    """
    key = np.array([seed % 2**64, number], np.uint64)
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, stream], key=key))
    return generator.permutation(size)


@dataclass(frozen=True)
class Shares:
    """The division of an epoch's seeds into steps, and of each step among the ranks.

    Each step takes the next `world_size * batch_size` seeds, and the last step the remainder. Of
    the m seeds of a step, rank r of W takes those from m * r // W to m * (r + 1) // W, which are
    `batch_size` except in the last step. With an `offset`, it takes those of another rank. So all
    ranks have the same number of steps, every seed is used once, except those that `drop_last`
    drops, and W ranks together take the same seeds as one rank with a W times larger batch. A last
    step with fewer seeds than ranks takes some from the step before, so that every rank has at
    least one.

    Raises:
        TypeError: an argument has another type.
        ValueError: there are too few seeds, or rank, world size or batch size are out of range.
    """

    num_seeds: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False  # drop the last step if it is not full
    seeds_done: int = 0  # seeds at the beginning of the order that were used before resuming
    may_be_empty: bool = False  # accept an epoch without steps
    offset: int = 0  # rank r takes the range of rank r + offset, modulo the world size

    def __post_init__(self) -> None:
        ranks = "ranks are counted from 0 to world_size - 1"
        checked = {
            "batch_size": check_integer("batch_size", self.batch_size, 1),
            "world_size": check_integer("world_size", self.world_size, 1),
            "rank": check_integer("rank", self.rank, 0, hint=ranks),
            "drop_last": check_flag("drop_last", self.drop_last),
        }
        for name, value in checked.items():
            # Python's integers, which any checkpoint format can store, instead of NumPy's
            object.__setattr__(self, name, value)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank is {self.rank} with a world_size of {self.world_size}\n\nhint: {ranks}"
            )
        if self.seeds_done:
            # the remainder of a resumed epoch may be smaller than a step
            return
        if self.may_be_empty and len(self) == 0:
            return
        if self.num_seeds < self.world_size:
            raise ValueError(
                f"{self.num_seeds} seeds for {self.world_size} ranks: some would have none\n\n"
                "hint: use at most as many ranks as seeds"
            )
        if self.drop_last and self.num_seeds < self._step_seeds:
            raise ValueError(
                f"{self.num_seeds} seeds do not fill one step of {self.world_size} batches with a "
                f"batch_size of {self.batch_size}, and drop_last drops the rest\n\n"
                "hint: drop_last=False, or a smaller batch_size"
            )
        left = self.num_seeds % self._step_seeds
        if not self.drop_last and self.batch_size == 1 and left:
            raise ValueError(
                f"{self.num_seeds} seeds in batches of 1 for {self.world_size} ranks: {left} are "
                "left for the last step, in which every rank needs one\n\n"
                "hint: drop_last=True, or batch_size=2"
            )

    def resumed(self, seeds_done: int, batch_size: int, world_size: int) -> "Shares":
        """Return the shares with other sizes, of which the first `seeds_done` seeds were used.

        They are those of rank 0; `len` and `step_start` are the same for all ranks.
        """
        resumed = replace(self, rank=0, seeds_done=seeds_done)
        return replace(resumed, batch_size=batch_size, world_size=world_size)

    @property
    def _step_seeds(self) -> int:
        return self.world_size * self.batch_size

    def __len__(self) -> int:
        full, left = divmod(self.num_seeds - self.seeds_done, self._step_seeds)
        return full + (left > 0 and not self.drop_last)

    def seed_range(self, step: int) -> slice:
        """Return the range of this rank's seeds of a step, within the epoch's order."""
        begin, end = self.step_start(step), self.step_start(step + 1)
        seeds, world_size = end - begin, self.world_size
        slot = (self.rank + self.offset) % world_size
        return slice(begin + seeds * slot // world_size, begin + seeds * (slot + 1) // world_size)

    def step_start(self, step: int) -> int:
        """Return the start of a step's seeds of all ranks, within the epoch's order."""
        begin = self.seeds_done + step * self._step_seeds
        if step == len(self):
            return min(self.num_seeds, begin)
        # after resuming there may be fewer seeds than ranks, of which some then have none
        return min(begin, max(self.num_seeds - self.world_size, self.seeds_done))

    def loss_weight(self, step: int) -> float:
        """Return this rank's number of seeds in a step, divided by the mean over the ranks."""
        own_batch, seeds = self.seed_range(step), self.step_start(step + 1) - self.step_start(step)
        return (own_batch.stop - own_batch.start) * self.world_size / seeds
