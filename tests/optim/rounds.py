"""Ranks of methods with rounds, which minimize |x - target|^2 / 2, and the log of their rounds."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Compute, Group, Now, lockstep

LR = 0.1


@dataclass
class Taken:
    """A round in which a rank was a member."""

    closed: Any
    difference: Tensor | None
    """of the anchor from the parameters after the local step"""
    x: Tensor
    anchor: Tensor | None
    momentum: Tensor | None


class Rank:
    """A rank; `make(inner, group)` constructs its optimizer, whose rounds it logs."""

    def __init__(self, make, rank, world_size, group=None):
        self.rank, self.target = rank, torch.tensor([1.0, -2.0, 3.0]) * (rank + 1)
        self.x = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optimizer = make(torch.optim.SGD([self.x], lr=LR), group or Group(rank, world_size))
        self.rounds, self.after = [], []

    def begin_step(self):
        """Set the gradient, and note what the step begins with."""
        self.x.grad = self.x.detach() - self.target
        self.last = getattr(self.optimizer, "last", None)
        self.anchor = self.vector("anchor")
        self.local = self.x.detach() - LR * self.x.grad

    def vector(self, name):
        value = getattr(self.optimizer, name, None)
        return None if value is None else value.clone()

    def end_step(self):
        """Log a new round of which this rank is a member."""
        self.after.append(self.x.detach().clone())
        closed = self.optimizer.last
        is_new = self.last is None or closed.round > self.last.round
        if is_new and self.rank in closed.members:
            difference = None if self.anchor is None else self.anchor - self.local
            vectors = self.vector("anchor"), self.vector("momentum")
            self.rounds.append(Taken(closed, difference, self.after[-1], *vectors))

    def step(self, seconds):
        """A step in virtual time."""
        self.begin_step()
        yield Compute(seconds)
        yield from self.optimizer.algorithm()
        self.end_step()

    def train(self, times, *, finalizes=True, change=None):
        """Steps of these times; `change(rank, step)` is called before each."""
        yield from self.optimizer.broadcast_model_algorithm()
        for step, seconds in enumerate(times):
            if change is not None:
                with torch.no_grad():
                    change(self, step)
            yield from self.step(seconds)
        self.end = yield Now()
        if finalizes:
            yield from self.optimizer.finalize_algorithm()


def make_ranks(world_size, make):
    return [Rank(make, rank, world_size) for rank in range(world_size)]


def run_ranks(ranks, times, link=None, *, store_s=0.0, faults=None, **options):
    pairs = zip(ranks, times, strict=True)
    algorithms = [rank.train(own, **options) for rank, own in pairs]
    return lockstep(algorithms, link, store_s=store_s, faults=faults)


def rounds_of(ranks):
    """The rounds by number, after a check that all members know the same ones."""
    found = {}
    for each in ranks:
        numbers = [taken.closed.round for taken in each.rounds]
        assert numbers == sorted(set(numbers)), "each step has a later round"
        for taken in each.rounds:
            assert found.setdefault(taken.closed.round, taken.closed) == taken.closed
    return dict(sorted(found.items()))
