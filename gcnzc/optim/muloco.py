"""MuLoCo: DiLoCo with Muon as the inner optimizer, and outer gradients of two bits per element.

Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (2025,
https://arxiv.org/abs/2505.23725), find that the outer gradients of Muon lose little accuracy when
they are compressed to two bits with error feedback. The default outer learning rate and momentum
are those of the authors' implementation (https://github.com/bentherien/muloco-1). The number
format, the interval and the two compressed stages of the exchange differ from it: see
`gcnzc.kernels.codec.blocks` for int2 and `gcnzc.compress.two_stage` for the exchange.
"""

import warnings
from typing import Any

import torch

from gcnzc.compress import Blocks, Compression
from gcnzc.compress.registry import check_compression
from gcnzc.optim.defaults import MULOCO
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.muon import Muon
from gcnzc.optim.options import option
from gcnzc.optim.validation import check_at_least_zero, check_fraction


class MuLoCo(DiLoCo):
    """DiLoCo with the defaults of MuLoCo: outer gradients of two bits, with error feedback.

    Use `gcnzc.optim.Muon` as the inner optimizer; another one causes a warning. A single rank only
    takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        options: those of `DiLoCo`. The defaults are `gcnzc.optim.defaults.MULOCO`, and
            `Blocks("int2", has_feedback=True)` for `compress`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    accepts_shards = False

    local_steps: Any = option(MULOCO.local_steps)
    outer_lr: float = option(MULOCO.outer_lr, check_at_least_zero)
    outer_momentum: float = option(MULOCO.outer_momentum, check_fraction)
    compress: Compression = option(
        Blocks("int2", has_feedback=True), check_compression, is_optional=True
    )

    def configure(self) -> None:
        """See `DistributedOptimizer`; warns of another inner optimizer than Muon."""
        super().configure()
        if not isinstance(self.inner, (Muon, getattr(torch.optim, "Muon", Muon))):
            warnings.warn(
                f"MuLoCo has {type(self.inner).__name__} as the inner optimizer, but its defaults "
                "are those for Muon; use gcnzc.optim.Muon(model.parameters(), module=model)",
                stacklevel=4,
            )
