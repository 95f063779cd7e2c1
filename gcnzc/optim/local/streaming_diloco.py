"""Streaming DiLoCo: synchronize one fragment of the parameters at a time, overlapped with steps.

Every H steps an exchange of fragment p starts, which finishes D steps later:

    after step t       d_p   <- mean_i (a_p - x_p,i)           started
    after step t + D   b_p   <- m b_p + d_p
                       a_p   <- a_p - lr (d_p + m b_p)
                       x_p,i <- mix x_p,i + (1 - mix) a_p      with the current x

as in Douillard et al., "Streaming DiLoCo with overlapping communication" (2025,
https://arxiv.org/abs/2501.18512). The anchors a and momenta b are equal on all ranks; the
parameters differ until `finalize`. The first exchange of fragment p of P starts after step
round(p H / P) + H.

Notation: n elements, P fragments, H local steps, D the delay.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gcnzc.compress import Compression
from gcnzc.exchange import Group
from gcnzc.optim.defaults import DELAY, FRAGMENTS, STREAMING_DILOCO
from gcnzc.optim.strategy.outer_step import OuterSGD
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.staggered import FragmentExchanges, FragmentSteps, Staggered
from gcnzc.optim.strategy.strategy import Strategy


def streaming_diloco(
    local_steps: int | str = STREAMING_DILOCO.local_steps,
    outer_lr: float = STREAMING_DILOCO.outer_lr,
    outer_momentum: float = STREAMING_DILOCO.outer_momentum,
    *,
    fragments: int | str | Sequence[str] = FRAGMENTS,
    delay: int | str = DELAY,
    mixing: float = 0.5,
    compress: Compression | None = None,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    alone: bool = False,
) -> Recipe:
    """Return the recipe of `StreamingDiLoCo`, which describes the options.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """
    if delay == "auto" and local_steps != "auto":
        raise ValueError(
            f"delay='auto' with local_steps={local_steps}\n\n"
            "hint: give local_steps='auto', which measures both"
        )
    update = FragmentSteps(fragments, named_parameters, OuterSGD(outer_lr, outer_momentum), mixing)
    policy = Staggered(delay, update)
    return Recipe(
        "StreamingDiLoCo",
        policy,
        update,
        FragmentExchanges(compress, policy, update),
        local_steps=local_steps,
        is_for_one_rank=alone,
    )


class StreamingDiLoCo(Strategy):
    """Streaming DiLoCo: DiLoCo that exchanges fragments of the parameters, overlapped with steps.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most half the wall
            time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        fragments: P; or "modules", or regular expressions: see
            `gcnzc.optim.local.fragments.split_into_fragments`.
        delay: D, the number of steps that overlap with an exchange, below H; or "auto", which
            requires local_steps="auto": the smallest D such that an exchange takes at most half
            the time of D steps.
        mixing: the weight of a rank's own parameters when a fragment is synchronized, from 0 to 1.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the Nesterov momentum of the outer optimizer.
        compress: compression of the exchanged differences; None for none.
        named_parameters: the model's `named_parameters()`, for fragments by name.
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
        local_steps: int | str = STREAMING_DILOCO.local_steps,
        fragments: int | str | Sequence[str] = FRAGMENTS,
        delay: int | str = DELAY,
        mixing: float = 0.5,
        outer_lr: float = STREAMING_DILOCO.outer_lr,
        outer_momentum: float = STREAMING_DILOCO.outer_momentum,
        compress: Compression | None = None,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        alone: bool = False,
        **options: Any,
    ) -> None:
        recipe = streaming_diloco(
            local_steps,
            outer_lr,
            outer_momentum,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            compress=compress,
            named_parameters=named_parameters,
            alone=alone,
        )
        super().__init__(inner, recipe, group, **options)
