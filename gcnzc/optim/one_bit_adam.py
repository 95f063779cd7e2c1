"""1-bit Adam: after a warm-up, freeze the variance and exchange the signs of momenta.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed" (2021, https://arxiv.org/abs/2102.02888). With a constant variance Adam's step is linear in
the momentum, so error feedback corrects the compression error of a step in later steps.

    warm-up   g = mean_i g_i          m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
              V = v / (1 - b2^t)
    freeze    V is constant from now on
    after     m_i = b1 m + (1 - b1) g_i     m <- compressed mean of m_i
    always    x <- x - lr (m / (1 - b1^t) / (sqrt(V) + eps) + weight_decay x)

Three changes to the paper concern sparse gradients, such as those of embeddings: elements with zero
variance at the freeze are inactive until they have a gradient, then they have a warm-up of their
own, and small variances are raised to a floor; see `gcnzc.optim.inactive`.

Notation: n elements, the first d of them in groups with `compress=False`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGatherScalar
from gcnzc.optim.defaults import REFRESH, longest_warmup, warmup_steps
from gcnzc.optim.inactive import InactiveElements
from gcnzc.optim.options import option
from gcnzc.optim.state import scalar
from gcnzc.optim.validation import check_count
from gcnzc.system.scalars import read_scalars

# An automatic warm-up ends when the L1 norm of the variance is stable. Tang et al. (2021) freeze
# when it is at least 0.96 times its value 1 / (1 - b2) steps earlier. This also holds while the
# norm still grows. Here the ratio must therefore be near 1 from both sides for several checks,
# because a run whose variance is frozen too early does not recover.
STABLE_TOLERANCE = 0.04
"""largest difference of the ratio from 1"""
STABLE_CHECKS = 2
"""number of consecutive checks with a ratio within the tolerance"""


class OneBitAdam(InactiveElements):
    """1-bit Adam: AdamW that exchanges the signs of momenta after a warm-up.

    During the warm-up and with default options, it differs in two ways from `torch.optim.AdamW`
    with the mean gradients of the ranks. Once a parameter has had a gradient on any rank, a missing
    gradient counts as zeros, whereas AdamW skips the parameter in that step. If a gradient is not
    finite or too large to be squared on any rank, all ranks skip the step. With a single rank the
    warm-up does not end.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers. A group
            with `compress=False` exchanges its gradients in every step, and its variance is not
            frozen.
        lr: the learning rate.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the square root of the variance.
        weight_decay: coefficient of the decoupled weight decay, as in AdamW.
        warmup: the number of steps before the variance is frozen; 0 counts as 1. "default" is 0.15
            of `total_steps`, or 100 if that is None. None freezes the variance once it is stable,
            and at the latest after the smaller of 5 / (1 - beta2) steps and a quarter of
            `total_steps`.
        refresh: refreshes of the variance begin `refresh`, 2 `refresh`, 4 `refresh`, ... steps
            after the freeze; 0 for none.
        refresh_steps: the number of steps of a refresh, which exchange gradients; `refresh` if that
            is smaller. One refresh decays the old variance as much as Adam does in all steps since
            the previous refresh, or since the freeze.
        compress: compression of the momenta after the warm-up; signs if None.
        gradient_compression: compression of the gradients where gradients are exchanged: in the
            warm-up, refreshes and reactivations, and in groups with `compress=False`; must not use
            error feedback. Uncompressed if None.
        bias_correction: whether to correct the bias of momentum and variance; the paper does not,
            which makes its first steps larger.
        reactivate: when to reactivate inactive elements, those with zero variance at the freeze,
            which are excluded from the compression and updated by weight decay only. "step"
            reactivates them at most 256 steps after they have a gradient; "refresh" reactivates
            them at the next refresh of the variance, and never if `refresh` is 0. Reactivated
            elements have a warm-up of their own: for as many steps as the first warm-up had, at
            most 1,000, their gradients are exchanged in every step.
        variance_floor: the smallest variance of an active element after the warm-up, as a share of
            the mean variance of the active elements of its parameter. If this mean is below a
            hundredth of that of adjacent elements with which the parameter shares scales, as for a
            bias before batch normalization, its variances are raised to this hundredth. 0 disables
            both, as in the paper.
        options: see `Replicated` and `DistributedOptimizer`: `group`, `clip_norm`, `signals`,
            `total_steps`, which determines the default warm-up, `module`, `maximize`. If
            compression begins late in the run, rank 0 warns with a `LatePhaseWarning`.
    """

    warmup: Any = option("default", is_optional=True)
    refresh: int = option(REFRESH, check_count)
    refresh_steps: int = option(16, partial(check_count, least=1))

    frozen_at: int = scalar()
    """the step of the freeze; 0 before it"""
    next_refresh: int = scalar()
    """the first step of the next refresh"""
    refreshed_at: int = scalar()
    """the final step of the previous refresh, or the step of the freeze"""
    norms: list[float] = scalar([])
    """L1 norm of the bias-corrected variance at each check of an automatic warm-up"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        if self.warmup == "default":
            self.warmup = warmup_steps(self.total_steps)
        elif self.warmup is not None:
            check_count("warmup", self.warmup)
        self.check_interval = max(1, round(1 / (1 - self.defaults["betas"][1])))
        """steps between two checks of an automatic warm-up: the averaging period of the variance"""
        self.longest_warmup = longest_warmup(self.check_interval, self.total_steps)
        self.refresh_steps = min(self.refresh_steps, self.refresh)

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`."""
        return super().compared_options() | {"longest_warmup": self.longest_warmup}

    def is_compressing(self, own: Any) -> bool:
        """See `InactiveElements`."""
        return bool(own.frozen_at > 0)

    @property
    def is_frozen(self) -> bool:
        """Whether the variance is frozen, which ends the warm-up."""
        return self.frozen_at > 0

    @property
    def num_warmup_updates(self) -> int:
        """See `InactiveElements`: the length of the warm-up."""
        return self.frozen_at

    def num_updates(self, here: slice) -> int | None:
        """See `InactiveElements`; the freeze corrects the bias."""
        return None if self._is_variance_frozen(here) else self.steps + 1

    def _is_variance_frozen(self, here: slice) -> bool:
        return self.is_frozen and here.start >= self.flat.num_uncompressed

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "" if self.is_frozen else "compression"

    @property
    def is_refresh(self) -> bool:
        """Whether the next step belongs to a refresh of the variance."""
        return self.is_frozen and self.refresh > 0 and self.steps + 1 >= self.next_refresh

    @property
    def is_gradient_step(self) -> bool:
        """Whether the next step exchanges gradients, not momenta."""
        must_reactivate = self.has_inactive_gradient and self.steps + 1 >= self.reactivate_from
        return not self.is_frozen or must_reactivate or self.is_refresh

    @torch.no_grad()
    def update(self, values: Tensor) -> Algorithm[None]:
        """See `Replicated`."""
        was_frozen = self.is_frozen
        if self.is_gradient_step:
            yield from self._exchange_gradients(values)
        else:
            yield from self._exchange_momenta(values)
        self.move_parameters(values)
        self.join_settled()
        if not was_frozen and self.group.world_size > 1 and (yield from self._is_stable()):
            self.freeze()

    def _exchange_gradients(self, gradients: Tensor) -> Algorithm[None]:
        """Update the moments with the mean gradients: in the warm-up, to refresh or reactivate."""
        settling = self.read_settling(gradients)
        yield from self.mean_gradients(gradients)
        for here, options in self.flat.slices():
            is_updated = not self._is_variance_frozen(here)
            self.update_moments(here, options, gradients, with_variance=is_updated)
        if self.is_frozen:
            self.refresh_variance(gradients)
            self.update_settling(settling, gradients)
            self.reactivate_elements(gradients)
            self.update_active()

    def _exchange_momenta(self, values: Tensor) -> Algorithm[None]:
        """Update this rank's momenta with its gradients, and exchange them, compressed.

        The gradients of groups with `compress=False` and of settling elements are exchanged.
        """
        yield from self.clip_gradients(values)
        first, settling = self.flat.num_uncompressed, self.read_settling(values)
        inactive_gradients, count = None, values.new_zeros(1)
        if self.active is not None:
            inactive_gradients = values[self.find_inactive()]
            count = self.count_reactivated(inactive_gradients).reshape(1)
        # this rank's momenta replace its gradients
        work = self.momentum.new_empty(self.flat.tile_elements)
        for here, options in self.flat.tiles(first):
            beta1 = options["betas"][0]
            decayed = torch.mul(self.momentum[here], beta1, out=work[: here.stop - here.start])
            torch.add(decayed, values[here], alpha=1 - beta1, out=values[here])
        self.before_exchange(values)
        yield from self.mean_uncompressed(values, settling)
        (total,) = yield from self.mean(values, "momentum", count, begin=first)
        if inactive_gradients is not None and self.reactivate == "step":
            self.add_pending_gradients(inactive_gradients)
            self.note_inactive_gradients(total, self.steps + 1)
            self.has_inactive_gradient |= total > 0
        self.after_exchange(values, work)
        self.update_uncompressed(values, settling)
        self._mark_uncompressed_gradients(values)

    def before_exchange(self, momenta: Tensor) -> None:
        """Transform this rank's momenta (n,) in place before they are exchanged."""

    def after_exchange(self, momenta: Tensor, work: Tensor) -> None:
        """Store the mean momenta (n,), which may be overwritten like the elements of a tile."""
        first, count = self.flat.num_uncompressed, self.flat.num_elements
        self.momentum[first:] = momenta[first:count]

    def _mark_uncompressed_gradients(self, means: Tensor) -> None:
        """Set `had_gradient` of uncompressed parameters with a mean gradient that is not zero."""
        unmarked = {
            index: means[segment.here].any()
            for index, segment in enumerate(self.flat.segments)
            if segment.here.start < self.flat.num_uncompressed and not self.had_gradient[index]
        }
        if unmarked:
            flags = read_scalars(*unmarked.values())
            for index, (has_gradient,) in zip(unmarked, flags, strict=True):
                self.had_gradient[index] = has_gradient > 0

    def _is_stable(self) -> Algorithm[bool]:
        """Return whether the warm-up ends after this step, the same on all ranks."""
        step, beta2 = self.steps + 1, self.defaults["betas"][1]
        if self.warmup is not None:
            return bool(step >= self.warmup)
        if step % self.check_interval == 0:
            norm = float(self.variance[self.flat.num_uncompressed :].double().sum())
            # rank 0's, since the number of threads affects how a sum is rounded
            norm, *_ = yield AllGatherScalar(norm)
            self.norms.append(norm / (1 - beta2**step))
            return step >= self.longest_warmup or is_stable(self.norms)
        return step >= self.longest_warmup

    def freeze(self) -> None:
        """Freeze the variance after this step, corrected for its bias, and begin to compress."""
        self.frozen_at = self.refreshed_at = step = self.steps + 1
        self.next_refresh = step + self.refresh
        for here, options in self.flat.slices(self.flat.num_uncompressed):
            if self.bias_correction:
                self.variance[here] /= 1 - options["betas"][1] ** step
        self.declared.allocate()
        self.update_active()

    def refresh_variance(self, gradients: Tensor) -> None:
        """Update the variance with mean gradients (n,) if a refresh is due.

        A whole refresh decays it as much as Adam does in the steps since the previous one.
        """
        if not self.is_refresh:
            return
        final = self.next_refresh + self.refresh_steps - 1
        share = (final - self.refreshed_at) / self.refresh_steps
        for here, options in self.flat.slices(self.flat.num_uncompressed):
            beta2, square = options["betas"][1] ** share, gradients[here].square()
            self.variance[here] = self.variance[here] * beta2 + square * (1 - beta2)
        if final == self.steps + 1:
            self.next_refresh, self.refreshed_at = 2 * self.next_refresh - self.frozen_at, final


def is_stable(norms: Sequence[float]) -> bool:
    """Return whether the last ones of the norms of a variance differ little from each other."""
    last = norms[-STABLE_CHECKS - 1 :]
    return len(last) > STABLE_CHECKS and all(
        old > 0 and abs(new / old - 1) <= STABLE_TOLERANCE for old, new in pairwise(last)
    )
