"""MuLoCo: DiLoCo with Muon as the inner optimizer, and outer gradients of two bits per element.

Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (2025,
https://arxiv.org/abs/2505.23725), find that the outer gradients of Muon lose little accuracy when
they are compressed to two bits with error feedback. The default outer learning rate and momentum
are those of the authors' implementation (https://github.com/bentherien/muloco-1). The number
format, the interval and the two compressed stages of the exchange differ from it: see
`gcnzc.kernels.codec.blocks` for int2 and `gcnzc.compress.two_stage` for the exchange.
"""

import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch.optim import Optimizer

from gcnzc.compress import Blocks
from gcnzc.exchange import Group
from gcnzc.optim.defaults import MULOCO
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.muon import Muon


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

    def __init__(self, inner: Optimizer, group: Group | None = None, **options: Any) -> None:
        if not isinstance(inner, (Muon, getattr(torch.optim, "Muon", Muon))):
            warnings.warn(
                f"MuLoCo has {type(inner).__name__} as the inner optimizer, but its defaults are "
                "those for Muon; use gcnzc.optim.Muon(model.parameters(), module=model)",
                stacklevel=2,
            )
        compress = Blocks("int2", has_feedback=True)
        super().__init__(inner, group, **asdict(MULOCO) | {"compress": compress} | options)
