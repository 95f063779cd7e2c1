"""Local SGD: average the parameters of all ranks every H steps.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    x_i <- mean_j x_j                                synchronization

as in Stich, "Local SGD converges fast and communicates little" (2019,
https://arxiv.org/abs/1805.09767). With compression the ranks average the differences from the last
mean, which are smaller than the parameters:

    x_i <- a - mean_j (a - x_j)                      a: the last mean, equal on all ranks

Notation: H local steps.
"""

from typing import Any

from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Group
from gcnzc.optim.defaults import LOCAL_SGD
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.parameter_mean import DifferenceMean, ParameterMean
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.strategy import Strategy


def local_sgd(
    local_steps: int | str = LOCAL_SGD.local_steps, compress: Compression | None = None
) -> Recipe:
    """Return the recipe of `LocalSGD`, which describes the options."""
    is_dense = compress is None or compress == Dense()
    return Recipe(
        "LocalSGD",
        EveryInterval(),
        ParameterMean() if is_dense else DifferenceMean(),
        AllRanks(compress, "parameters"),
        local_steps=local_steps,
    )


class LocalSGD(Strategy):
    """Local SGD: take local steps, and average the parameters of all ranks every H steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most `target` of the
            wall time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        compress: compression of the exchanged differences; None for none.
        options: the other options of `Strategy`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = LOCAL_SGD.local_steps,
        compress: Compression | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner, local_sgd(local_steps, compress), group, **options)
