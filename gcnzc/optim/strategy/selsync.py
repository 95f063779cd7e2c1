"""SelSync: synchronize only when the gradient of a rank changes significantly.

    s_t = EWMA(|g_t|^2)                              over a window of w steps
    c_t = |s_t - s_(t-1)| / s_(t-1)                  relative change
    x_i <- InnerOpt(x_i, g_t)                        a local step
    x_i <- mean_j x_j                                if c_t of any rank is at least the threshold

as in Tyagi and Swany, "Accelerating Distributed ML Training via Selective Synchronization" (2023,
https://arxiv.org/abs/2307.07950). The first w steps always synchronize. The newest value of the
EWMA has the weight 1 - a, the one before it (1 - a)^2, and so on, divided by their sum.

Notation: w steps of the window, a decay of the EWMA.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm
from gcnzc.optim.defaults import MAX_SYNC_WINDOW
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.parameter_mean import DifferenceMean, ParameterMean
from gcnzc.optim.strategy.recipe import Policy, Recipe
from gcnzc.optim.validation import check_at_least_zero, check_count

DECAY = 0.01
"""the decay of the smoothed squared gradient norm"""


def selsync(
    threshold: float = 0.3,
    window: int = 25,
    *,
    compress: Compression | None = None,
) -> Recipe:
    """Return the recipe of SelSync.

    Args:
        threshold: the relative change of the smoothed squared gradient norm from which a rank
            requests a synchronization of all ranks. With the same threshold, more ranks therefore
            synchronize more often. With 0, all steps synchronize; with infinity, none does after
            the first `window` steps.
        window: the number of steps over which the norm is smoothed, at most 10,000. The first
            `window` steps always synchronize.
        compress: compression of the exchanged differences from the last mean; None for none.

    Raises:
        ValueError: an option is out of range.
    """
    is_dense = compress is None or compress == Dense()
    return Recipe(
        "SelSync",
        GradientChange(threshold, window),
        ParameterMean() if is_dense else DifferenceMean(),
        AllRanks(compress, "parameters"),
    )


class GradientChange(Policy):
    """Exchange when the smoothed squared gradient norm of a rank changes; see `selsync`.

    Each step sums the votes of all ranks, together with the common extras.
    """

    def __init__(self, threshold: float, window: int) -> None:
        if threshold != math.inf:
            check_at_least_zero("threshold", threshold)
        check_count("window", window, 1, MAX_SYNC_WINDOW)
        self.threshold, self.window = threshold, window
        self.squares = torch.zeros(window, dtype=torch.float64)
        """(w,): the squared gradient norms of the last steps of this rank, the newest first"""
        self.num_squares = torch.zeros((), dtype=torch.int64)
        """(): the number of squared norms so far"""
        self.change = math.inf
        """the relative change of the last step of this rank; infinity if it is not known"""

    def describe(self) -> str:
        """See `Policy`."""
        return f"threshold={self.threshold}, window={self.window}"

    def observe(self) -> None:
        """See `Policy`: compute the relative change of the smoothed squared gradient norm."""
        square = self._squared_norm()
        if not math.isfinite(square):
            # request a synchronization: this rank needs the mean of the other ranks' parameters
            self.change = math.inf
            return
        before = self._smoothed()
        self.squares = self.squares.roll(1)
        self.squares[0] = square
        self.num_squares += 1
        after = self._smoothed()
        self.change = abs(after - before) / before if before else math.inf

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`."""
        strategy = self.strategy
        vote = float(strategy.steps <= self.window or self.change >= self.threshold)
        (votes,) = yield from strategy.control.sum([vote])
        return votes > 0

    def _squared_norm(self) -> float:
        """Return the squared norm of this rank's gradients, without weight and gradient scale."""
        gradients = [
            each.grad.coalesce().values() if each.grad.is_sparse else each.grad
            for each in self.strategy.flat_params.parameters
            if each.grad is not None
        ]
        if not gradients:
            return 0.0
        norms = torch.stack([each.double() for each in torch._foreach_norm(gradients)])
        square = norms.square().sum()
        scale = getattr(self.strategy, "grad_scale", None)
        return float(square if scale is None else square / scale.to(square.device).double() ** 2)

    def _smoothed(self) -> float:
        """Return the weighted mean of the squared norms so far; 0 if there are none."""
        count = min(int(self.num_squares), self.window)
        if not count:
            return 0.0
        weights = (1 - DECAY) ** torch.arange(1, count + 1, dtype=torch.float64)
        return float(self.squares[:count] @ weights / weights.sum())

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"squares": self.squares, "num_squares": self.num_squares}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        squares = SavedTensor((self.window,), dtype=torch.float64)
        return {"squares": squares, "num_squares": SavedTensor((), dtype=torch.int64, least=0)}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.squares, self.num_squares = local["squares"].clone(), local["num_squares"].clone()
