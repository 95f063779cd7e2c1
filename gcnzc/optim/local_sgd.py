"""Local SGD: average the parameters of all ranks every H steps.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    x_i <- mean_j x_j                                synchronization

as in Stich, "Local SGD converges fast and communicates little" (2019,
https://arxiv.org/abs/1805.09767). With compression the ranks average the differences from the last
mean, which are smaller than the parameters, so a compression error is smaller too:

    x_i <- a - mean_j (a - x_j)                      a: the last mean, equal on all ranks

Notation: n elements, H local steps.
"""

from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Dense
from gcnzc.optim.defaults import LOCAL_SGD
from gcnzc.optim.local_method import Fragment, LocalMethod, outer_vector
from gcnzc.optim.options import option


class LocalSGD(LocalMethod):
    """Local SGD: take local steps, and average the parameters of all ranks every H steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H, or "auto"; see `LocalMethod`.
        options: the other options of `LocalMethod`, except `sharded`: `compress` of the exchanged
            differences, and so on.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    local_steps: Any = option(LOCAL_SGD.local_steps)
    sharded = False

    anchor: Tensor = outer_vector(when=lambda own: own.has_anchor)
    """(n,): the last mean, if the differences from it are exchanged"""

    @property
    def has_anchor(self) -> bool:
        """Whether the differences from the last mean are exchanged."""
        return self.compress != Dense()

    def restart(self) -> None:
        """See `LocalMethod`."""
        if self.has_anchor:
            self.anchor = self.parameters

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """See `LocalMethod`: the parameters, or the anchor minus them."""
        super().read(fragment, out)
        if self.has_anchor:
            torch.sub(self.anchor, out, out=out)

    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`: set the parameters to their mean."""
        self.set_parameters(fragment, self.anchor.sub_(mean) if self.has_anchor else mean)
