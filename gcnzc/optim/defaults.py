"""Defaults of the optimizers' options, for their classes and for the command line.

They were chosen for runs of a few hundred steps or more.
"""

from dataclasses import dataclass

WARMUP_SHARE = 0.15
"""share of `total_steps` for the warm-up, in which gradients are not compressed"""
WARMUP_STEPS = 100
"""number of steps of the warm-up if `total_steps` are not known"""
AUTO_SHARE = 0.25
"""limit of an automatic warm-up as a fraction of `total_steps`, if they are known"""
AUTO_INTERVALS = 5
"""limit of an automatic warm-up in units of 1 / (1 - beta2) steps"""


def warmup_steps(total_steps: int | None) -> int:
    """Return the number of steps of the warm-up.

    Args:
        total_steps: the number of steps of the run; None if it is not known.
    """
    return WARMUP_STEPS if total_steps is None else max(1, round(WARMUP_SHARE * total_steps))


def longest_warmup(interval: int, total_steps: int | None) -> int:
    """Return the largest number of steps of a warm-up that ends when the variance is stable.

    Args:
        interval: steps between two checks of the variance, 1 / (1 - beta2).
        total_steps: the number of steps of the run; None if it is not known.
    """
    most = AUTO_INTERVALS * interval
    return most if total_steps is None else max(1, min(most, round(AUTO_SHARE * total_steps)))


@dataclass(frozen=True)
class LocalDefaults:
    """Options of optimizers with local steps: sync interval and outer optimizer."""

    local_steps: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


REFRESH = 0
"""steps from the end of the warm-up to the first refresh of the variance; 0 for none"""
LOCAL_SGD = LocalDefaults(8)
DILOCO = LocalDefaults(12, 0.4, 0.9)
MULOCO = LocalDefaults(12, 0.7, 0.6)
# error feedback replaces the outer momentum
SPARSE_LOCO = LocalDefaults(12, 1.0, 0.0)
STREAMING_DILOCO = LocalDefaults(12, 0.4, 0.9)
FRAGMENTS = 4
DELAY = 1
"""number of steps that overlap with an exchange of Streaming DiLoCo"""
CO2 = LocalDefaults(8, 0.4, 0.7)
EAGER = 0.5
"""share of its own last update that a rank of CO2 applies before the mean is available"""
LOCAL = {
    "local-sgd": LOCAL_SGD,
    "diloco": DILOCO,
    "muloco": MULOCO,
    "sparseloco": SPARSE_LOCO,
    "streaming-diloco": STREAMING_DILOCO,
    "co2": CO2,
}
"""defaults by the names of the strategies on the command line"""

MAX_GOSSIP_RATE = 1000
"""largest number of exchanges of A2CiD2 per step; each takes at least a message in each direction,
so that with a much larger number, a step would take so long that the run seems to hang"""
MAX_SYNC_WINDOW = 10_000
"""largest number of steps over which SelSync smooths gradient norms; each step reads all of them"""

LATE_SHARE = 0.5
"""share of `total_steps` after which a phase that has not begun causes a warning"""
LATE_STEPS = 1000
"""the same in steps, if `total_steps` are not known"""
