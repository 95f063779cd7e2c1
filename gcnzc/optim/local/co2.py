"""CO2: rounds of local steps; the exchange of a round overlaps with the next round.

    x_i <- s_r - e d_i                               start of round r on rank i; d_i of round r - 1
    x_i <- x_i - InnerOpt(gradient of rank i)        H local steps
    d_i <- the decrease of x_i in these steps        exchanged during round r + 1
    d   <- mean_i d_i / g                            of round r - 1, whose exchange finishes now
    b   <- clip(m b + d)                             every element to [-c, c]
    s   <- s_r - lr b                                start of round r + 1

after Sun et al., "CO2: efficient distributed training with full communication-computation overlap"
(2024, https://arxiv.org/abs/2401.16265), which has e = 0. The mean of a round is applied
one round late, so training may diverge with a large momentum or in long rounds. A small momentum
and the gap g make this less likely, and `CO2` warns of it; the clip c bounds each step.

The text of the paper was not available when this was written. Two details are therefore not
verified against it: its staleness gap, equation (3), for which the gap of Barkai et al., "Gap-aware
mitigation of gradient staleness" (2020, https://arxiv.org/abs/1909.10802), is used; and that the
first two rounds have the same start s, because no mean is available after the first. The divisor in
the authors' code (https://github.com/weigao266/fairscale-CO2, commit 55aaca5) is a constant.

With e > 0, a rank applies this fraction of its own last outer gradient d_i at once, until the mean
replaces it (`EagerRound`). A gap is then not needed.

Notation: W ranks, n elements, k extras, H steps of a round.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, Group
from gcnzc.optim import defaults
from gcnzc.optim.local.staleness_gap import StalenessGap
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.all_ranks import AllRanks, Collective, PaddedShards
from gcnzc.optim.strategy.clipped_step import ClippedStep
from gcnzc.optim.strategy.delayed import Delayed, DelayedRound, DelayedSteps
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_fraction

# Eager updates: a rank applies a fraction of its own difference before the mean is known.
#
#     x_i <- s - e d_i                                 start of a round on rank i
#     x_i <- x_i - InnerOpt(gradient of rank i)        local steps
#     d_i <- the decrease of x_i in these steps        exchanged during the next round
#
# s is the common start, which the update computes from the means of earlier rounds. When the mean
# of d_i is applied, it replaces e d_i. Kale et al. (2025, https://arxiv.org/abs/2502.12996) apply
# eager updates to DiLoCo; the text was not available, so details may differ.
#
# Notation: n elements, e the weight.


class EagerRound(DelayedRound):
    """Start each round from the common start minus a fraction of this rank's last difference.

    It exchanges the differences itself, so `Update.read` is not called.

    Args:
        exchange: computes the means.
        weight: e, in (0, 1).
    """

    own: Tensor
    """(n,): this rank's parameters at the start of the current round"""

    def __init__(self, exchange: Collective, weight: float) -> None:
        super().__init__(exchange)
        self.weight = weight

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        # no elements before `initialize`
        self.own = strategy.flat_params.zeros()[:0]

    def describe(self) -> str:
        """See `BaseExchange`."""
        return f"{super().describe()}, eager={self.weight}"

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        super().reinitialize()
        self.own = self.strategy.vector()

    initialize = reinitialize

    def read(self, out: Tensor) -> None:
        """See `DelayedRound`: this rank's start of the round minus the parameters."""
        values = self.strategy.flat_params.read_parameters(out)[: len(self.own)]
        torch.sub(self.own, values, out=values)

    def begin_round(self, values: Tensor) -> None:
        """See `DelayedRound`: apply a fraction of the difference to the common start."""
        flat_params = self.strategy.flat_params
        flat_params.read_parameters(self.own).sub_(values[: len(self.own)], alpha=self.weight)
        flat_params.write_parameters(self.own)
        self.strategy.is_in_sync = False

    @property
    def state_bytes(self) -> int:
        """See `RecipePart`."""
        return super().state_bytes + self.own.nbytes

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"own": self.own}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        own = SavedTensor((self.source.num_elements,))
        return {**super().saved_tensors(snapshot), "own": own}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        super().load(shared, local, shards)
        self.own = self.strategy.vector(local["own"])


# number of steps above which a large momentum was harmful on a least-squares problem
LONG_ROUND = 20

Gap = str | float | Callable[[float, float], float] | None


def co2(
    local_steps: int | str = defaults.CO2.local_steps,
    outer_lr: float = defaults.CO2.outer_lr,
    outer_momentum: float = defaults.CO2.outer_momentum,
    *,
    gap: Gap = None,
    clip: float | None = 1.0,
    compress: Compression | None = None,
    sharded: bool = False,
    delay: int = 1,
    eager: float | None = None,
) -> Recipe:
    """Return the recipe of `CO2`, which describes the options.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """
    if sharded and compress not in (None, Dense()):
        raise ValueError(
            f"sharded=True with compress={compress}\n\nhint: omit one of them, because shards "
            "are exchanged uncompressed"
        )
    if delay not in (0, 1):
        raise ValueError(f"a delay of {delay} rounds\n\nhint: give 1, or 0 for no overlap")
    if eager is None:
        eager = defaults.EAGER if delay else 0.0
    check_fraction("eager", eager)
    if eager and not delay:
        raise ValueError(
            f"eager is {eager}, with a delay of {delay} rounds\n\nhint: give 0 without a delay"
        )
    if gap is None:
        # delayed means are divided by a gap so that training does not diverge; eager updates
        # make it unnecessary
        gap = "none" if eager else "gap_aware"
    shards = PaddedShards() if sharded else None
    step = ClippedStep(outer_lr, outer_momentum, StalenessGap(gap), clip, shards)
    mean = AllRanks(compress, "difference") if shards is None else shards
    exchange: Delayed = DelayedRound(mean) if delay else DelayedSteps(mean, 0, "difference")
    if eager:
        exchange = EagerRound(mean, eager)
    return Recipe("CO2", Rounds(step, eager), step, exchange, local_steps=local_steps)


class Rounds(EveryInterval):
    """Exchange after every H steps; warn if means that are one round old may cause divergence.

    Args:
        step: the outer step.
        eager: e.
    """

    def __init__(self, step: ClippedStep, eager: float) -> None:
        self.step, self.eager = step, eager
        self.is_warned = False

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.warn_of_momentum()

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`."""
        is_due = yield from super().is_due()
        if is_due:
            self.warn_of_momentum()
        return is_due

    def warn_of_momentum(self) -> None:
        """Warn once, when H is known, if the momentum may make training diverge."""
        strategy, step = self.strategy, self.step
        interval, is_overlapped = strategy.sync_interval, strategy.recipe.exchange.is_overlapped
        if self.is_warned or strategy.is_inner_only or not is_overlapped or interval.is_measuring:
            return
        self.is_warned = True
        steps, momentum = interval.steps, step.outer_momentum
        may_diverge = step.gap.may_diverge(step.lr, momentum, self.eager)
        if may_diverge and (momentum > 0.5 or steps > LONG_ROUND):
            warnings.warn(
                f"CO2: with outer_momentum={momentum} and gap={step.gap}, means delayed by one "
                f"round of {steps} steps may make training diverge; outer_momentum=0.2 with "
                "gap='gap_aware' or eager=0.5 is safer, or shorter rounds",
                # of the constructor of CO2
                stacklevel=5,
            )


class CO2(Strategy):
    """CO2: rounds of local steps whose exchange overlaps with the next round.

    After the last step of a round the parameters are bitwise equal on all ranks, unless `eager` is
    above 0. Signals are sent at the end of a round, and received when its mean is applied. A rank
    whose parameters or difference are not finite or too large at the end of a round is excluded
    from its mean. If there is no mean, the start s does not change. A single rank only takes the
    inner optimizer's steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most half the wall
            time (1/20 without a delay) and, if the parameters are on a CPU, add at most 1/40 to
            the CPU time of the steps (`SyncInterval`).
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: m, the momentum of the outer optimizer. With a delay, use values above the
            default only with short rounds.
        gap: the divisor of delayed differences: "gap_aware", "none", a number, or a function; see
            `StalenessGap`. If None, it is "none" if `eager` is above 0, else "gap_aware".
        clip: c, the largest absolute value of an element of the momentum, in units of the
            parameters; None for no limit.
        compress: compression of the exchanged differences; None for none.
        sharded: whether to shard the vectors of the outer optimizer over the ranks; not with
            compression.
        delay: the number of rounds that overlap with an exchange: 1; or 0 to wait for it at once,
            which is SlowMo if gap="none" and clip=None.
        eager: e, in [0, 1). A value above 0 requires a delay and memory for one more
            vector, and works best with gap="none". If None, it is 0.5 with a delay and 0 without.
            The published method has no eager updates: eager=0.
        options: the other options of `Strategy`.

    Raises:
        TypeError: see `Strategy`.
        ValueError: an option is out of range, options contradict each other, or options, or shapes
            or dtypes of parameters, differ between ranks.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = defaults.CO2.local_steps,
        outer_lr: float = defaults.CO2.outer_lr,
        outer_momentum: float = defaults.CO2.outer_momentum,
        gap: Gap = None,
        clip: float | None = 1.0,
        compress: Compression | None = None,
        sharded: bool = False,
        delay: int = 1,
        eager: float | None = None,
        **options: Any,
    ) -> None:
        recipe = co2(
            local_steps,
            outer_lr,
            outer_momentum,
            gap=gap,
            clip=clip,
            compress=compress,
            sharded=sharded,
            delay=delay,
            eager=eager,
        )
        super().__init__(inner, recipe, group, **options)
