"""SparseLoCo: DiLoCo whose ranks exchange a fraction of the elements, with error feedback.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025,
https://arxiv.org/abs/2508.15706). Each rank sends the largest elements of each segment of its
difference, with values of two bits, and keeps the others as an error that it sends later. The error
takes the place of the outer momentum.
"""

from dataclasses import asdict
from typing import Any

from torch.optim import Optimizer

from gcnzc.compress import TopK
from gcnzc.exchange import Group
from gcnzc.optim.defaults import SPARSE_LOCO
from gcnzc.optim.diloco import DiLoCo


class SparseLoCo(DiLoCo):
    """DiLoCo with the defaults of SparseLoCo: `TopK.sparse_loco()`, and no outer momentum.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        options: those of `DiLoCo`. The defaults are `gcnzc.optim.defaults.SPARSE_LOCO`, and
            `TopK.sparse_loco()` for `compress`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    def __init__(self, inner: Optimizer, group: Group | None = None, **options: Any) -> None:
        compress = TopK.sparse_loco()
        super().__init__(inner, group, **asdict(SPARSE_LOCO) | {"compress": compress} | options)
