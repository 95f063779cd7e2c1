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
from gcnzc.exchange import Algorithm, Start, Sum, Wait
from gcnzc.optim.defaults import MAX_SYNC_WINDOW
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.parameter_mean import DifferenceMean, ParameterMean
from gcnzc.optim.strategy.recipe import Policy, Recipe
from gcnzc.optim.validation import check_at_least_zero, check_count, check_fraction

CHANNEL = "votes"
"""the channel of overlapped votes"""


def selsync(
    threshold: float = 0.3,
    window: int = 25,
    *,
    decay: float = 0.01,
    overlapped_votes: bool = False,
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
        decay: the decay of the EWMA, in [0, 1).
        overlapped_votes: whether the votes of a step are summed while the next step computes, and
            decide after that step. This hides the latency of the sum.
        compress: compression of the exchanged differences from the last mean; None for none.

    Raises:
        ValueError: an option is out of range.
    """
    is_dense = compress is None or compress == Dense()
    return Recipe(
        "SelSync",
        GradientChange(threshold, window, decay, is_overlapped=overlapped_votes),
        ParameterMean() if is_dense else DifferenceMean(),
        AllRanks(compress, "parameters"),
    )


class GradientChange(Policy):
    """Exchange when the smoothed squared gradient norm of a rank changes; see `selsync`.

    Each step sums the votes of all ranks, together with the common extras.
    """

    def __init__(self, threshold: float, window: int, decay: float, *, is_overlapped: bool) -> None:
        if threshold != math.inf:
            check_at_least_zero("threshold", threshold)
        check_count("window", window, 1, MAX_SYNC_WINDOW)
        check_fraction("decay", decay)
        self.threshold, self.window, self.decay = threshold, window, decay
        self.is_overlapped = is_overlapped
        self.squares = torch.zeros(window, dtype=torch.float64)
        """(w,): the squared gradient norms of the last steps of this rank, the newest first"""
        self.num_squares = torch.zeros((), dtype=torch.int64)
        """(): the number of squared norms so far"""
        self.change = math.inf
        """the relative change of the last step of this rank; infinity if it is not known"""
        self.pending: Any = None
        """the handle of the overlapped sum of votes"""
        self.votes: Tensor | None = None
        """sums (common extras + 1,) of the last overlapped votes, which have not been applied"""

    def describe(self) -> str:
        """See `Policy`."""
        return (
            f"threshold={self.threshold}, window={self.window}, decay={self.decay}, "
            f"overlapped_votes={self.is_overlapped}"
        )

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
        if not self.is_overlapped:
            (votes,) = yield from strategy.control.sum([vote])
            return votes > 0
        yield from self.finish_pending()
        is_due = strategy.steps <= self.window
        if self.votes is not None:
            (votes,) = strategy.control.receive(self.votes)
            is_due, self.votes = is_due or votes > 0, None
        values = torch.tensor([*strategy.common_extras(), vote], dtype=torch.float64)
        self.pending = yield Start(Sum(values), CHANNEL)
        return is_due

    def finish_pending(self) -> Algorithm[None]:
        """See `RecipePart`."""
        if self.pending is not None:
            self.votes = yield Wait(self.pending)
            self.pending = None

    def apply_pending(self) -> Algorithm[None]:
        """See `RecipePart`; the votes have no effect at the end, since all ranks exchange then."""
        yield from self.finish_pending()
        if self.votes is not None:
            self.strategy.control.receive(self.votes)
            self.votes = None

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
        weights = (1 - self.decay) ** torch.arange(1, count + 1, dtype=torch.float64)
        return float(self.squares[:count] @ weights / weights.sum())

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        return {} if self.votes is None else {"votes": self.votes[-1:]}

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        return {"squares": self.squares, "num_squares": self.num_squares}

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        squares = SavedTensor((self.window,), dtype=torch.float64)
        found = {"squares": squares, "num_squares": SavedTensor((), dtype=torch.int64, least=0)}
        votes = SavedTensor((1,), dtype=torch.float64, least=0)
        return found | ({"votes": votes} if "votes" in snapshot["shared"] else {})

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        self.squares, self.num_squares = local["squares"].clone(), local["num_squares"].clone()
        # pending votes belong to the earlier run
        self.pending = self.votes = None
        votes = shared.get("votes")
        if votes is not None:
            # the signals that were sent with the votes belong to the earlier run
            self.votes = torch.cat([votes.new_zeros(self.strategy.num_common_extras), votes])
