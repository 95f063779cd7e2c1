"""Local methods whose exchanges have only some of the ranks: the signals have sums of their own.

If the ranks do not wait for one another in every step, a sum of the signals overlaps with the
steps. All ranks start one after the same steps, and receive it when they start the next one. A rank
that is ahead waits there for the slowest one, so it is ahead by at most two intervals of sums.
"""

from abc import abstractmethod
from collections import Counter
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gcnzc.exchange import Algorithm, First, Group, Start, Sum, Wait
from gcnzc.optim.local_method import LocalMethod
from gcnzc.optim.options import option
from gcnzc.optim.validation import check_count

_CLAIMS: "WeakKeyDictionary[Group, Counter[str]]" = WeakKeyDictionary()
_NAMESPACES: "WeakKeyDictionary[LocalMethod, str]" = WeakKeyDictionary()


def namespace(optimizer: LocalMethod) -> str:
    """Return the prefix of an optimizer's channels and store keys; no two of a group have the same.

    An optimizer claims it when it first uses a channel or a key. Copies have the same identity, but
    each copy that communicates has a prefix of its own. Prefixes are the same on all ranks if the
    optimizers and their copies first communicate in the same order; otherwise the ranks open
    channels of different names, which is a `RequestMismatch`.
    """
    if optimizer not in _NAMESPACES:
        claims = _CLAIMS.setdefault(optimizer.group, Counter())
        number, identity = claims[optimizer.identity], optimizer.identity
        claims[identity] += 1
        _NAMESPACES[optimizer] = f"{identity} copy {number}" if number else identity
    return _NAMESPACES[optimizer]


class PartialExchanges(LocalMethod):
    """The base class of local methods whose exchanges have only some of the ranks.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        control_interval: the number of steps from one sum of the signals and comparison of options
            over all ranks to the next.
        options: see `LocalMethod`.
    """

    accepts_shards = False
    control_interval: Any = option(10, partial(check_count, least=1))

    pending_sum: Any
    """the handle of the overlapped sum of signals"""
    sums: list[float] | None
    """its result, if it has ended and has not been received"""
    sent: list[bool]
    """the signals of this rank in the last sum"""
    num_steps = 0
    """the number of steps since the construction"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        vars(self).update(self.outside())

    def outside(self) -> dict[str, Any]:
        """Return the attributes of an optimizer that has not communicated, such as a copy."""
        return {"pending_sum": None, "sums": None, "sent": []}

    def __getstate__(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; a copy has no pending requests."""
        return {**super().__getstate__(), **self.outside()}

    @abstractmethod
    def take_part(self, step: int) -> Algorithm[None]:
        """Exchange with some of the ranks, if that is due after a step."""

    def exchange(self, step: int) -> Algorithm[None]:
        """See `LocalMethod`: an exchange of some ranks, and a sum of signals, if they are due."""
        yield from self.take_part(step)
        if not self.is_uniform:
            yield from self._overlapped_sum()
        elif step % self.control_interval == 0:
            yield from self.sum_common()

    @property
    def channel(self) -> str:
        """The channel of the sums of signals."""
        return f"{namespace(self)}/control"

    def _overlapped_sum(self) -> Algorithm[None]:
        """Start a sum of signals if it is due, and receive the last one; called in each step."""
        # not the number of steps, which a state of another step may have changed on one rank only
        is_due, self.num_steps = self.num_steps % self.control_interval == 0, self.num_steps + 1
        if is_due:
            yield from self.receive_sum()
            bit, *signals = self.common_extras()
            # the caller has not seen yet that signals of the last sum were received
            self.sent = [bool(now) and not was for now, was in zip_longest(signals, self.sent)]
            values = torch.tensor([bit, *self.sent], dtype=torch.float64)
            self.pending_sum = yield Start(Sum(values), self.channel)
        elif self.pending_sum is not None and (yield First([self.pending_sum], 0.0)) is not None:
            # if a rank is lost, the sum has ended with this error
            yield from self._finish_sum()

    def _finish_sum(self) -> Algorithm[None]:
        if self.pending_sum is not None:
            self.sums = (yield from self.wait_for_all(self.pending_sum)).tolist()
            self.pending_sum = None

    def receive_sum(self) -> Algorithm[None]:
        """Wait for the pending sum, and receive its signals, in the same step on all ranks."""
        yield from self._finish_sum()
        if self.sums is not None:
            self.receive_common(self.sums)
            self.sums = None

    def wait_for_all(self, handle: Any) -> Algorithm[Any]:
        """Wait for a request of all ranks, such that slower ranks can continue to exchange."""
        return (yield Wait(handle))

    def on_load(self) -> None:
        """See `DistributedOptimizer`; a sum that has not ended belongs to the earlier run."""
        super().on_load()
        self.pending_sum = self.sums = None

    def apply_pending_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`: receive the signals."""
        yield from self.receive_sum()
