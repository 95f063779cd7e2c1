"""SparseLoCo: DiLoCo whose ranks exchange a fraction of the elements, with error feedback.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025,
https://arxiv.org/abs/2508.15706). Each rank sends the largest elements of each segment of its
difference, with values of two bits, and keeps the others as an error that it sends later. The error
takes the place of the outer momentum.
"""

from typing import Any

from torch.optim import Optimizer

from gcnzc.compress import Compression, TopK
from gcnzc.exchange import Group
from gcnzc.optim.defaults import SPARSE_LOCO
from gcnzc.optim.diloco import DiLoCo


class SparseLoCo(DiLoCo):
    """DiLoCo with the defaults of SparseLoCo: `TopK.sparse_loco()`, and no outer momentum.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: see `DiLoCo`.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the Nesterov momentum of the outer optimizer.
        compress: compression of the exchanged differences.
        options: the other options of `DiLoCo`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = SPARSE_LOCO.local_steps,
        outer_lr: float = SPARSE_LOCO.outer_lr,
        outer_momentum: float = SPARSE_LOCO.outer_momentum,
        compress: Compression = TopK.sparse_loco(),  # noqa: B008 - it cannot change
        **options: Any,
    ) -> None:
        super().__init__(
            inner,
            group,
            local_steps=local_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            compress=compress,
            **options,
        )
