"""The policy of gossip that is overlapped with the steps, with time in units of a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Now
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.overlapped_gossip import MAX_OVERLAPPING, OverlappedPairs
from gcnzc.optim.strategy.recipe import Policy
from gcnzc.optim.strategy.two_variables import TwoVariables
from gcnzc.optim.validation import check_above_zero

RATE_WEIGHT = 0.1
"""the weight of the newest step in the moving average of the exchanges per step"""
MAX_TIME = 10.0
"""limit of the mixing time after a step, in steps; it applies after a pause of the process"""


class GossipTimes(Policy):
    """Process messages and make offers after each step.

    The unit of time is the duration of a step of this rank: an exponential moving average, in which
    the newest step has the weight 1/2. eta is proportional to the exchanges per step, and was
    computed for `rate` of them. If fewer exchanges end, mixing is reduced in proportion.

    Args:
        rate: the largest number of exchanges of this rank per step, on average.
        update: the vectors of this rank.
        exchange: its exchanges.
    """

    is_uniform = False

    def __init__(self, rate: float, update: TwoVariables, exchange: OverlappedPairs) -> None:
        check_above_zero("gossip_rate", rate)
        self.rate, self.update, self.exchange = rate, update, exchange
        self.measured_rate = rate
        """exchanges per step, a moving average"""
        self.num_before = 0
        """the number of exchanges up to the end of the last step"""
        self.step_s = 0.0
        """the duration of a step, in seconds; 0 until it is measured"""
        self.last_s: float | None = None
        """when the last step ended; None after a pause"""

    def initialize(self) -> None:
        """See `RecipePart`; also called if the state before the first step is loaded."""
        # exchanges with parameters from before the load are ignored
        self.exchange.generation += self.exchange.is_open

    def describe(self) -> str:
        """See `Policy`."""
        return f"gossip_rate={self.rate}"

    def observe(self) -> None:
        """See `Policy`."""
        self.update.observe()

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`: whether this rank makes an offer; differs between ranks."""
        return self.exchange.credit >= 0 and self.exchange.can_offer()
        yield

    def after_step(self) -> Algorithm[None]:
        """See `Policy`: apply the events since the last step, and make offers."""
        exchange = self.exchange
        yield from exchange.open()
        self.update.apply_gradient()
        time = self._time_since_last((yield Now()))
        self.update.mix(time * min(1.0, self.measured_rate / self.rate))
        yield from exchange.process_messages()
        exchange.credit = min(max(exchange.credit, -MAX_OVERLAPPING) + self.rate, MAX_OVERLAPPING)
        while (yield from self.is_due()):
            yield from self.strategy.synchronize_algorithm()
        self.update.write()
        applied, self.num_before = exchange.num_exchanges - self.num_before, exchange.num_exchanges
        self.measured_rate += RATE_WEIGHT * (applied - self.measured_rate)

    def pause_exchanges(self) -> Algorithm[None]:
        """See `RecipePart`; the pause does not count as the time of a step."""
        self.last_s = None
        return
        yield

    def _time_since_last(self, now: float) -> float:
        """Return the time since the last call in steps, and update the duration of a step."""
        last, self.last_s = self.last_s, now
        if last is None or now <= last:
            return 1.0
        elapsed = now - last
        self.step_s = (self.step_s + elapsed) / 2 if self.step_s else elapsed
        return min(elapsed / self.step_s, MAX_TIME)

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        exchange = self.exchange
        return {
            "gossip": torch.tensor(
                [self.step_s, self.measured_rate, exchange.credit], dtype=torch.float64
            ),
            "num_gossips": torch.tensor(exchange.num_exchanges),
        }

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        if "gossip" not in snapshot["local"] and "num_gossips" not in snapshot["local"]:
            return {}
        return {
            "gossip": SavedTensor((3,)),
            "num_gossips": SavedTensor((), dtype=torch.int64, least=0),
        }

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        exchange = self.exchange
        self.last_s = None
        # exchanges with parameters from before the load are ignored
        exchange.generation += 1
        # a state that was saved without `asynchronous` does not have them
        if "gossip" in local:
            self.step_s, self.measured_rate, exchange.credit = local["gossip"].tolist()
            exchange.num_exchanges = self.num_before = int(local["num_gossips"])
