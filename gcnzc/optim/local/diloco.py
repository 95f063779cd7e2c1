"""DiLoCo: H local steps, then one step of an outer optimizer on all ranks.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    d   <- mean_i (a - x_i)                          a: the anchor, where all ranks started
    b   <- m b + d
    a   <- a - lr (d + m b)                          Nesterov momentum; lr b without it
    x_i <- a

as in Douillard et al., "DiLoCo" (2023, https://arxiv.org/abs/2311.08105). The mean difference d is
the outer gradient. Without Nesterov momentum it is SlowMo (Wang et al., 2020,
https://arxiv.org/abs/1910.00643) if the inner learning rate is constant: SlowMo divides d by it.
With m = 0 and lr = 1 it is local SGD. The states of the inner optimizers are not exchanged.

Notation: W ranks, n elements, H local steps.
"""

from typing import Any

from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Group
from gcnzc.optim.defaults import DILOCO
from gcnzc.optim.strategy.all_ranks import AllRanks, Shards
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.outer_step import OuterSGD, OuterStep, ShardedOuterStep
from gcnzc.optim.strategy.quorum import Quorum, QuorumMean, QuorumOuterStep
from gcnzc.optim.strategy.recipe import Exchange, Recipe, Update
from gcnzc.optim.strategy.strategy import Strategy


def diloco(
    local_steps: int | str = DILOCO.local_steps,
    outer_lr: float = DILOCO.outer_lr,
    outer_momentum: float = DILOCO.outer_momentum,
    *,
    nesterov: bool = True,
    compress: Compression | None = None,
    sharded: bool = False,
    alone: bool = False,
    name: str = "DiLoCo",
    quorum: int | None = None,
    grace_s: float = 0.0,
    control_interval: int = 32,
) -> Recipe:
    """Return the recipe of `DiLoCo`.

    With a quorum, an outer step begins as soon as at least `quorum` ranks have taken H steps, and
    uses the differences of these ranks; see `gcnzc.optim.strategy.quorum`. As with
    `backup_workers`, do not run other collectives between two steps.

    Args:
        local_steps: H, or "auto"; see `DiLoCo`.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        nesterov: whether to use Nesterov momentum.
        compress: compression of the exchanged differences.
        sharded: whether to shard the anchor and the momentum over the ranks.
        alone: whether a single rank also takes outer steps.
        quorum: the number of ranks, more than half of them, that an outer step needs; None to wait
            for all ranks. Not with `compress`, `sharded`, `alone` or `local_steps="auto"`.
        grace_s: with a quorum, the seconds for which an outer step waits for further ranks.
        control_interval: with a quorum, the number of steps from one sum of signals to the next;
            see `backup_workers`. A fast rank is ahead of a slow one by at most twice as many steps.
        name: the name of a variant, in messages and checkpoints.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """
    if quorum is not None:
        for option, is_given in {
            "compress": compress is not None and compress != Dense(),
            "sharded": sharded,
            "alone": alone,
            "local_steps='auto'": local_steps == "auto",
        }.items():
            if is_given:
                raise ValueError(f"quorum with {option}\n\nhint: omit one of them")
        rounds = Quorum(quorum, grace_s, control_interval)
        step = QuorumOuterStep(OuterSGD(outer_lr, outer_momentum, nesterov), rounds)
        return Recipe(name, rounds, step, QuorumMean(rounds, step), local_steps=local_steps)
    if grace_s:
        raise ValueError(
            f"grace_s is {grace_s!r} without a quorum\n\nhint: give quorum, the number of ranks "
            "that an outer step needs, or omit grace_s"
        )
    if sharded and compress is not None and compress != Dense():
        raise ValueError(
            f"sharded=True with compress={compress}\n\nhint: omit one of them, because shards "
            "are exchanged uncompressed"
        )
    outer = OuterSGD(outer_lr, outer_momentum, nesterov)
    update: Update = OuterStep(outer)
    exchange: Exchange = AllRanks(compress, "difference")
    if sharded:
        exchange = shards = Shards()
        update = ShardedOuterStep(outer, shards)
    return Recipe(
        name,
        EveryInterval(),
        update,
        exchange,
        local_steps=local_steps,
        is_for_one_rank=alone,
    )


class DiLoCo(Strategy):
    """DiLoCo: take local steps, and every H steps one step of an outer optimizer on all ranks.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most `target` of the
            wall time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        nesterov: whether to use Nesterov momentum.
        compress: compression of the exchanged differences; None for none.
        sharded: whether to shard the anchor and the momentum over the ranks; not with compression.
        alone: whether a single rank also takes outer steps.
        options: the other options of `Strategy`.

    Raises:
        ValueError: an option is out of range, options contradict each other, or the parameters of
            the ranks differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = DILOCO.local_steps,
        outer_lr: float = DILOCO.outer_lr,
        outer_momentum: float = DILOCO.outer_momentum,
        nesterov: bool = True,
        compress: Compression | None = None,
        sharded: bool = False,
        alone: bool = False,
        **options: Any,
    ) -> None:
        recipe = diloco(
            local_steps,
            outer_lr,
            outer_momentum,
            nesterov=nesterov,
            compress=compress,
            sharded=sharded,
            alone=alone,
            name=type(self).__name__,
        )
        super().__init__(inner, recipe, group, **options)
