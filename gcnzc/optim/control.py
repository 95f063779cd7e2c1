"""Signals of ranks that do not wait for one another in steps, and the names of their channels.

A sum of step t ends when the slowest rank has taken step t. Meanwhile the other ranks take further
steps, and start further sums. They read the result of a sum at different steps, so a signal is
delivered at a later step, which is the same on all ranks: the channel's threads gather the ranks'
numbers of steps, and the signal is delivered in the step after the largest of them. Only a rank
that has taken that step waits for the result.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gcnzc.exchange import Algorithm, AllGatherScalar, First, Group, Start, Sum, Wait
from gcnzc.exchange.sync import all_gather_text
from gcnzc.optim.group_options import find_difference
from gcnzc.optim.local_method import LocalMethod

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


@dataclass(frozen=True)
class Received:
    """The result of a sum, equal on all ranks."""

    signals: list[bool]
    """for each signal, whether a rank sent it"""
    deliver_at: int
    """the step at which the signals are delivered; 0 without signals"""
    is_compared: bool
    """whether bits differed, so that the lines of the ranks were compared"""
    difference: str
    """the error message if lines differ, else empty"""


class OverlappedControl:
    """Sums the signals of all ranks, overlapped with the steps.

    Each rank starts the sums after the same steps. The options of the ranks in these steps are
    compared. Checksums of frozen parameters are only compared in `finalize`. A signal that is sent
    in the last steps of a run may not be delivered.

    Args:
        optimizer: whose signals are sent.
        interval: the number of steps from one sum to the next.
    """

    def __init__(self, optimizer: LocalMethod, interval: int) -> None:
        self.optimizer, self.interval = optimizer, interval
        self.step = 0
        """the current step; also read by the channel's thread"""
        self._forget_sums()

    def _forget_sums(self) -> None:
        self.pending: deque[Any] = deque()
        """the handles of sums whose results have not been received"""
        self.is_undelivered = [False] * len(self.optimizer.signals)
        """for each signal, whether a sum contains it that has started, and whose result was not
        delivered"""
        self.num_counts = 0
        """the number of sums for which steps were gathered; set by the channel's thread"""
        self.num_received_counts = 0
        """the number of these sums whose results have been received"""
        self.deliveries: dict[int, list[bool]] = {}
        """signals by the step of their delivery"""
        self.is_open = False
        """whether the channel of the sums is open"""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy gets; without the sums, which it does not receive.

        A copy delivers none of their signals: some ranks may have received the sums, and others
        not.
        """
        return {name: vars(self)[name] for name in ("optimizer", "interval", "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy."""
        vars(self).update(state)
        # the optimizer of a copy may have no attributes yet
        self.pending, self.deliveries, self.is_undelivered = deque(), {}, []
        self.num_counts, self.num_received_counts, self.is_open = 0, 0, False

    @property
    def channel(self) -> str:
        """The channel of the sums."""
        return f"{namespace(self.optimizer)}/control"

    def after_step(self) -> Algorithm[None]:
        """Start a sum if it is due, and receive those that have ended; called in each step."""
        if not self.is_open:
            # all ranks wait for one another to open a channel, so they do it before their speeds
            # have led to different steps
            yield Wait((yield Start(Sum(torch.zeros(1)), self.channel)))
            self.is_open = True
        if self.step % self.interval == 0:
            yield from self._start_sum()
        while self.pending:
            must_wait = self.num_counts > self.num_received_counts
            if not must_wait and (yield First([self.pending[0]], 0.0)) is None:
                break
            yield from self._receive_oldest()
        signals = self.deliveries.pop(self.step, None)
        if signals is not None:
            self.optimizer.received_signals = signals
            self.is_undelivered = [
                was and not now for was, now in zip(self.is_undelivered, signals, strict=True)
            ]

    def finish_sums(self) -> Algorithm[None]:
        """Wait for the sums that have started; called after the same step on all ranks."""
        while self.pending:
            yield from self._receive_oldest()

    def _start_sum(self) -> Algorithm[None]:
        optimizer = self.optimizer
        was_sent = self.is_undelivered or [False] * len(optimizer.signals)
        bit = optimizer.common_extras()[0]
        # this sum contains the request
        optimizer.comparison.is_requested = False
        # the caller sends a signal in each step until it is received; one sum of it is sufficient
        signals = [now and not was for now, was in zip(optimizer.signals, was_sent, strict=True)]
        self.is_undelivered = [was or now for was, now in zip(was_sent, signals, strict=True)]
        values = torch.tensor([bit, *signals], dtype=torch.float64)
        algorithm = self._sum_and_compare(values, "\n".join(optimizer.compared_lines()))
        self.pending.append((yield Start(algorithm, self.channel)))

    def _sum_and_compare(self, values: torch.Tensor, text: str) -> Algorithm[Received]:
        """Sum (1 + signals,); compare the ranks' lines, and gather numbers of steps, if needed."""
        bits, *sums = (yield Sum(values)).tolist()
        world_size = self.optimizer.group.world_size
        is_compared, difference, deliver_at = bits not in (0, world_size), "", 0
        if is_compared:
            texts = yield from all_gather_text(text)
            difference = find_difference(dict(enumerate(texts)))
        signals = [round(each) > 0 for each in sums]
        if any(signals):
            # set before the steps are read: a rank that takes one more step then waits
            self.num_counts += 1
            deliver_at = 1 + max((yield AllGatherScalar(self.step)))
        return Received(signals, deliver_at, is_compared, difference)

    def _receive_oldest(self) -> Algorithm[None]:
        received: Received = yield Wait(self.pending.popleft())
        if received.difference:
            raise ValueError(received.difference)
        if received.is_compared:
            self.optimizer.check_trainable()
        if received.deliver_at:
            self.num_received_counts += 1
            before = self.deliveries.get(received.deliver_at, [False] * len(received.signals))
            self.deliveries[received.deliver_at] = [
                was or now for was, now in zip(before, received.signals, strict=True)
            ]
