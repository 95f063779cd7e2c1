"""SparseLoCo: DiLoCo whose ranks exchange a fraction of the elements, with error feedback.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025,
https://arxiv.org/abs/2508.15706). Each rank sends the largest elements of each segment of its
difference, with values of two bits, and keeps the others as an error that it sends later. The error
takes the place of the outer momentum.
"""

from typing import Any

from gcnzc.compress import Compression, TopK
from gcnzc.compress.registry import check_compression
from gcnzc.optim.defaults import SPARSE_LOCO
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.options import option
from gcnzc.optim.validation import check_at_least_zero, check_fraction


class SparseLoCo(DiLoCo):
    """DiLoCo with the defaults of SparseLoCo: exchanges the largest elements, without momentum.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        options: those of `DiLoCo`. The defaults are `gcnzc.optim.defaults.SPARSE_LOCO`, and
            `TopK.sparse_loco()` for `compress`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    local_steps: Any = option(SPARSE_LOCO.local_steps)
    outer_lr: float = option(SPARSE_LOCO.outer_lr, check_at_least_zero)
    outer_momentum: float = option(SPARSE_LOCO.outer_momentum, check_fraction)
    compress: Compression = option(TopK.sparse_loco(), check_compression, is_optional=True)
