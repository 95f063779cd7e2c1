"""The number of local steps between exchanges, fixed or measured.

So many as were asked for; or as few as keep the exchange from costing the steps more than a share
of their time, and of their processors: an exchange that goes on beside the steps hides its waiting,
but not the work on its codes and messages.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcnzc.exchange import Algorithm, AllGatherScalar

FIRST = 10  # steps between synchronisations while they are measured


WARM_UP, MEASURED = 5, 20  # steps


HIDDEN = 0.5


"""of the time of steps, that exchanges beside them may take"""


WORKED = 0.025


"""of the work of steps on processors, that exchanges may add: codes and messages take them too, and
caches and the interpreter change hands"""


@dataclass(frozen=True)
class Spent:
    """Time that something took, and the work of processors in it."""

    passed_s: float = 0.0
    worked_s: float = 0.0

    @classmethod
    def usually(cls, seen: Sequence["Spent"]) -> "Spent":
        """The medians; of two the lesser, since a first time may have made kernels ready."""
        return cls(
            statistics.median_low(each.passed_s for each in seen),
            statistics.median_low(each.worked_s for each in seen),
        )


@dataclass(frozen=True)
class Clocks:
    """What tells the seconds."""

    passed: Callable[[], float] = time.perf_counter
    worked: Callable[[], float] = time.process_time
    """by this worker's processors, all threads together"""

    def now(self) -> Spent:
        """Until now."""
        return Spent(self.passed(), self.worked())

    def since(self, then: Spent) -> Spent:
        """From another moment until now."""
        now = self.now()
        return Spent(now.passed_s - then.passed_s, now.worked_s - then.worked_s)


@dataclass
class SyncInterval:
    """How many steps lie between synchronisations: so many as were asked for, or as are measured.

    Args:
        wanted: H, or "auto": after `MEASURED` steps, so many that exchange takes `share` of the
            time of the steps at most, and `WORKED` of their processors' work.
        share: of the time of H steps that their exchange may take: `HIDDEN` if it goes on beside
            them.
        clocks: that tell both.
    """

    wanted: int | str
    share: float = 0.05
    clocks: Clocks = Clocks()
    least: int = 1
    """what H may be at least"""
    steps: int = 0
    """H, as it is now"""
    is_measuring: bool = False
    counts_work: bool = True
    """whether processors' work is what steps take; not where a GPU takes them"""
    seen: int = 0
    left: Spent | None = None
    of_steps: list[Spent] = field(default_factory=list)
    of_exchanges: list[Spent] = field(default_factory=list)
    steps_an_exchange: int = 1
    """whose time, or `share` of it, one exchange takes, when it was measured"""

    def __post_init__(self) -> None:
        if self.wanted != "auto" and not (isinstance(self.wanted, int) and self.wanted >= 1):
            raise ValueError(
                f"local_steps is {self.wanted!r}\n\nhint: a number of steps from 1 on, or 'auto'"
            )
        self.is_measuring = self.wanted == "auto"
        self.steps = FIRST if isinstance(self.wanted, str) else self.wanted

    def stepped(self) -> None:
        """Say that a worker's own step is done."""
        if self.is_measuring:
            self.seen += 1
            if self.left is not None and self.seen > WARM_UP:
                self.of_steps.append(self.clocks.since(self.left))

    def timed(self, exchange: Algorithm[Any]) -> Algorithm[Any]:
        """Go through one exchange, and keep its seconds while these are asked for."""
        began = self.clocks.now() if self.is_measuring else Spent()
        answer = yield from exchange
        if self.is_measuring and self.seen > WARM_UP:
            self.of_exchanges.append(self.clocks.since(began))
        return answer

    def chosen(self, exchanges: int = 1) -> Algorithm[None]:
        """Choose H when enough was measured, the same on all workers.

        Args:
            exchanges: of those measured, in H steps.
        """
        if self.is_measuring and self.seen >= WARM_UP + MEASURED:
            step, exchange = Spent.usually(self.of_steps), Spent.usually(self.of_exchanges)
            # the slowest worker's steps; and its exchange, since others wait for it in theirs
            step_s = max((yield AllGatherScalar(step.passed_s)))
            exchange_s = min((yield AllGatherScalar(exchange.passed_s)))
            work = statistics.median(
                (yield AllGatherScalar(exchange.worked_s / max(step.worked_s, 1e-9)))
            )
            hiding = exchange_s / max(step_s, 1e-9) / self.share
            needed = max(hiding, work / WORKED if self.counts_work else 0.0)
            # what the clock leaves out is no reason for a step more
            self.steps = max(self.least, math.ceil(exchanges * needed - 1e-6))
            self.steps_an_exchange = max(1, math.ceil(hiding - 1e-6))
            self.is_measuring = False
        self.left = self.clocks.now() if self.is_measuring else None
