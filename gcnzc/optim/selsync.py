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
from functools import partial

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.defaults import MAX_SYNC_WINDOW
from gcnzc.optim.local_method import Fragment
from gcnzc.optim.local_sgd import LocalSGD
from gcnzc.optim.options import option
from gcnzc.optim.state import OWN, scalar, vector
from gcnzc.optim.sync_interval import Clocks
from gcnzc.optim.validation import check_count, check_range

DECAY = 0.01
"""a, the decay of the smoothed squared gradient norm"""


class SelSync(LocalSGD):
    """SelSync: average the parameters of all ranks when the gradients of one of them change.

    Each step sums the votes of all ranks, together with the signals.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        threshold: the relative change of the smoothed squared gradient norm from which a rank
            requests a synchronization of all ranks. With the same threshold, more ranks therefore
            synchronize more often. With 0, all steps synchronize; with infinity, none does after
            the first `window` steps.
        window: w, the number of steps over which the norm is smoothed, at most 10,000. The first
            `window` steps always synchronize.
        options: `compress` and `alone` of `LocalMethod`, and the options of `DistributedOptimizer`.

    Raises:
        ValueError: an option is out of range, or the parameters of the ranks differ.
    """

    accepts_shards = False
    local_steps = 1
    target = None
    clocks = Clocks()
    threshold: float = option(
        0.3, partial(check_range, is_valid=lambda x: x >= 0, hint="a number of at least 0")
    )
    window: int = option(25, partial(check_count, least=1, most=MAX_SYNC_WINDOW))

    squares: Tensor = vector(lambda own: own.window, torch.float64, on_host=True, **OWN)
    """(w,) float64: the squared gradient norms of the last steps of this rank, the newest first"""
    num_squares: int = scalar(kind="local")
    """the number of squared norms so far"""
    change = math.inf
    """c_t: the relative change of the last step of this rank; infinity if it is not known"""

    def load_alone(self) -> None:
        """See `LocalMethod`: forget the gradients of several ranks."""
        self.num_squares = 0

    def local_step(self) -> None:
        """See `LocalMethod`: also measures the change of the gradients."""
        if not self.is_inner_only:
            self.change = self._measure_change()
        super().local_step()

    def find_due(self, step: int) -> Algorithm[list[Fragment]]:
        """See `LocalMethod`: all ranks exchange if one of them votes for it."""
        vote = step <= self.window or self.change >= self.threshold
        (votes,) = yield from self.sum_common([float(vote)])
        return self.fragments if votes else []

    def _measure_change(self) -> float:
        """Return the relative change of the smoothed squared gradient norm."""
        square = self._squared_norm()
        if not math.isfinite(square):
            # request a synchronization: this rank needs the mean of the other ranks' parameters
            return math.inf
        before = self._smoothed()
        self.squares = self.squares.roll(1)
        self.squares[0] = square
        self.num_squares += 1
        return abs(self._smoothed() - before) / before if before else math.inf

    def _squared_norm(self) -> float:
        """Return the squared norm of this rank's gradients, without weight and gradient scale."""
        found = [each.grad for each in self.flat.parameters if each.grad is not None]
        gradients = [each.coalesce().values() if each.is_sparse else each for each in found]
        if not gradients:
            return 0.0
        norms = torch.stack([each.double() for each in torch._foreach_norm(gradients)])
        square = norms.square().sum()
        scale = getattr(self, "grad_scale", None)
        return float(square if scale is None else square / scale.to(square.device).double() ** 2)

    def _smoothed(self) -> float:
        """Return the weighted mean of the squared norms so far; 0 if there are none."""
        count = min(self.num_squares, self.window)
        weights = (1 - DECAY) ** torch.arange(1, count + 1, dtype=torch.float64)
        return float(self.squares[:count] @ weights / weights.sum()) if count else 0.0
