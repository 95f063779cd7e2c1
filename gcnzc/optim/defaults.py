"""Defaults of the optimizers' options, for their classes and for the command line.

They suit short runs, of some hundred steps and more; `bench/defaults.py` compares them with others.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupDefaults:
    """Steps with whole gradients, before momenta or updates are compressed."""

    share: float = 0.15
    """of the run, where its length is known"""
    steps: int = 100
    """where it is not known"""
    auto_share: float = 0.25
    """of the run, after which an automatic warm-up ends at the latest; where that is known"""
    auto_intervals: int = 5
    """the same in units of 1 / (1 - beta2) steps, whether the length is known or not"""

    def warmup_steps(self, total_steps: int | None) -> int:
        """Steps of the warm-up.

        Args:
            total_steps: of the run; None if that is not known.
        """
        return self.steps if total_steps is None else max(1, round(self.share * total_steps))

    def most_auto_steps(self, interval: int, total_steps: int | None) -> int:
        """Most steps of a warm-up that ends when the variance has settled.

        Args:
            interval: steps between two looks at the variance.
            total_steps: of the run; None if that is not known.
        """
        most = self.auto_intervals * interval
        return (
            most if total_steps is None else max(1, min(most, round(self.auto_share * total_steps)))
        )


@dataclass(frozen=True)
class ZeroOneDefaults:
    """The schedule of 0/1 Adam after its warm-up."""

    longest: int = 4
    """most steps between agreements"""
    variance_doubling: int = 16
    """refreshes of the variance after which the steps between them double"""
    windows: int = 4
    """parts of a run of known length; the steps between agreements double after each"""
    local_doubling: int = 100
    """steps after which they double, where the length is not known"""

    def local_doubling_steps(self, total_steps: int | None) -> int:
        """Steps after which the steps between agreements double.

        Args:
            total_steps: of the run; None if that is not known.
        """
        return self.local_doubling if total_steps is None else max(1, total_steps // self.windows)


@dataclass(frozen=True)
class LocalDefaults:
    """How often ranks with local steps exchange, and the outer optimizer."""

    local_steps: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


WARMUP = WarmupDefaults()
REFRESH = 0
"""steps from the end of the warm-up to the first refresh of the variance; 0 for none"""
ZERO_ONE = ZeroOneDefaults()
LOCAL_SGD = LocalDefaults(8)
DILOCO = LocalDefaults(12, 0.4, 0.9)
STREAMING_DILOCO = LocalDefaults(12, 0.4, 0.9)
FRAGMENTS = 4
DELAY = 1
"""steps beside which an exchange of Streaming DiLoCo goes on"""
CO2 = LocalDefaults(8, 0.4, 0.7)
EAGER = 0.5
"""share of its own last round with which a rank of CO2 goes on at once"""
LOCAL = {
    "local-sgd": LOCAL_SGD,
    "diloco": DILOCO,
    "streaming-diloco": STREAMING_DILOCO,
    "co2": CO2,
}
"""by the names of the command line"""

LATE_SHARE = 0.5
"""of a run of known length, after which a phase that has not begun causes a warning"""
LATE_STEPS = 1000
"""the same where the length is not known"""
