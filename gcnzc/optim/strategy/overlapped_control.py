"""Sum signals over all ranks, overlapped with the steps, for ranks that do not wait for each other.

A sum of step t ends when the slowest rank has taken step t. Meanwhile the other ranks take further
steps, and start further sums. They read the result of a sum at different steps, so a signal is
delivered at a later step, which is the same on all ranks: the channel's threads gather the ranks'
numbers of steps, and the signal is delivered in the step after the largest of them. Only a rank
that has taken that step waits for the result.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gcnzc.exchange import Algorithm, AllGatherScalar, First, Start, Sum, Wait
from gcnzc.exchange.sync import all_gather_text
from gcnzc.optim.group_options import find_difference
from gcnzc.optim.strategy.control import Control

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


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


class OverlappedControl(Control):
    """Sums the signals of all ranks, overlapped with the steps; see `Control`.

    Each rank starts the sums after the same steps. The options of the ranks in these steps are
    compared. Checksums of frozen parameters are only compared in `finalize`. A signal that is sent
    in the last steps of a run may not be delivered.

    Args:
        strategy: the optimizer.
        interval: the number of steps from one sum to the next; None for no sums.
    """

    def __init__(self, strategy: "Strategy", interval: int | None) -> None:
        super().__init__(strategy, interval)
        self.pending: deque[Any] = deque()
        """the handles of sums whose results have not been received"""
        self.is_undelivered = [False] * len(strategy.signals)
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
        """Return the attributes without the pending sums, which a copy does not receive.

        A copy delivers none of their signals: some ranks may have received the sums, and others
        not.
        """
        own = {"pending": deque(), "num_counts": 0, "num_received_counts": 0, "is_open": False}
        signals = {"is_undelivered": [False] * len(self.is_undelivered), "deliveries": {}}
        return {**vars(self), **own, **signals}

    @property
    def channel(self) -> str:
        """The channel of the sums."""
        return f"{self.strategy.namespace}/control"

    def after_step(self) -> Algorithm[None]:
        """See `Control`: start a sum if it is due, and receive those that have ended."""
        strategy = self.strategy
        if not self.is_open and self.interval is not None:
            # all ranks wait for one another to open a channel, so they do it before their speeds
            # have led to different steps
            yield Wait((yield Start(Sum(torch.zeros(1)), self.channel)))
            self.is_open = True
        if self.interval is not None and strategy.steps % self.interval == 0:
            yield from self._start_sum()
        while self.pending:
            must_wait = self.num_counts > self.num_received_counts
            if not must_wait and (yield First([self.pending[0]], 0.0)) is None:
                break
            yield from self._receive_oldest()
        signals = self.deliveries.pop(strategy.steps, None)
        if signals is not None:
            strategy.received_signals = signals
            self.is_undelivered = [
                was and not now for was, now in zip(self.is_undelivered, signals, strict=True)
            ]

    def finish_sums(self) -> Algorithm[None]:
        """See `Control`."""
        while self.pending:
            yield from self._receive_oldest()

    def _start_sum(self) -> Algorithm[None]:
        strategy, comparison = self.strategy, self.strategy.comparison
        bit = strategy.hash_bit()
        # this sum contains the request
        comparison.is_requested = False
        # the caller sends a signal in each step until it is received; one sum of it is sufficient
        signals = [
            now and not was for now, was in zip(strategy.signals, self.is_undelivered, strict=True)
        ]
        self.is_undelivered = [
            was or now for was, now in zip(self.is_undelivered, signals, strict=True)
        ]
        values = torch.tensor([bit, *signals], dtype=torch.float64)
        algorithm = self._sum_and_compare(values, "\n".join(strategy.compared_lines()))
        self.pending.append((yield Start(algorithm, self.channel)))

    def _sum_and_compare(self, values: torch.Tensor, text: str) -> Algorithm[Received]:
        """Sum (1 + signals,); compare the ranks' lines, and gather numbers of steps, if needed."""
        bits, *sums = (yield Sum(values)).tolist()
        is_compared, difference, deliver_at = bits not in (0, self.strategy.group.world_size), "", 0
        if is_compared:
            texts = yield from all_gather_text(text)
            difference = find_difference(dict(enumerate(texts)))
        signals = [round(each) > 0 for each in sums]
        if any(signals):
            # set before the steps are read: a rank that takes one more step then waits
            self.num_counts += 1
            deliver_at = 1 + max((yield AllGatherScalar(self.strategy.steps)))
        return Received(signals, deliver_at, is_compared, difference)

    def _receive_oldest(self) -> Algorithm[None]:
        received: Received = yield Wait(self.pending.popleft())
        if received.difference:
            raise ValueError(received.difference)
        if received.is_compared:
            self.strategy.check_trainable()
        if received.deliver_at:
            self.num_received_counts += 1
            before = self.deliveries.get(received.deliver_at, [False] * len(received.signals))
            self.deliveries[received.deliver_at] = [
                was or now for was, now in zip(before, received.signals, strict=True)
            ]
