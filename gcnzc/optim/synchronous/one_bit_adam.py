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
own, and small variances are raised to a floor; see `gcnzc.optim.synchronous.masked` and
`gcnzc.optim.synchronous.settling`.

Notation: n elements, the first d of them in groups with `compress=False`; k extras. Extras are
numbers that are appended to an exchanged vector, such as signals.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Reducer, Sign
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.defaults import REFRESH, WARMUP
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.state_layout import check_numbers, check_value
from gcnzc.optim.synchronous.masked import Masked
from gcnzc.optim.validation import check_count, check_fraction, check_pair, check_unsupported
from gcnzc.system.scalars import read_scalars

# Detect when Adam's variance is stable, so that 1-bit Adam may freeze it.
#
# Tang et al. (2021) freeze when the variance's L1 norm is at least 0.96 times its value 1 / (1 -
# beta2) steps earlier. This also holds while the norm still grows. Here the ratio must therefore
# be near 1 from both sides for several checks, because a run whose variance is frozen too early
# does not recover.


@dataclass
class FreezeRule:
    """Decides when to freeze the variance.

    The variance is equal on all ranks, so all ranks make the same decision.
    """

    beta2: float
    least: int = 0
    """number of steps before the first check, such as those of a learning rate warm-up"""
    most: int | None = None
    """largest number of steps before the freeze; None for no limit"""
    tolerance: float = 0.04
    """largest difference of the ratio from 1"""
    patience: int = 2
    """number of consecutive checks with a ratio within the tolerance"""
    norms: list[float] = field(default_factory=list)
    """L1 norm of the variance at each check"""

    @property
    def interval(self) -> int:
        """Steps between checks: 1 / (1 - beta2), the averaging period of the variance."""
        return max(1, round(1 / (1 - self.beta2)))

    def is_due(self, step: int) -> bool:
        """Return whether to check the norm after a step, counted from 1."""
        return step % self.interval == 0 and step >= self.least

    def should_freeze(self, step: int, norm: float | None) -> bool:
        """Return whether to freeze the variance after a step.

        Args:
            step: the number of the step, counted from 1.
            norm: L1 norm of the bias-corrected variance if `is_due(step)`, else None.
        """
        if norm is not None:
            self.norms.append(norm)
        if self.most is not None and step >= self.most:
            return True
        if norm is None or len(self.norms) <= self.patience:
            return False
        last = self.norms[-self.patience - 1 :]
        return all(old > 0 and abs(new / old - 1) <= self.tolerance for old, new in pairwise(last))


class OneBitAdam(Masked):
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
            of `total_steps`, or 100 if that is None. None freezes the variance once it is stable.
        warmup_range: the limits of the warm-up length, in steps, if `warmup` is None. If the upper
            limit is None, it is the smaller of 5 / (1 - beta2) and a quarter of `total_steps`, but
            at least the lower limit.
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
        group: the ranks that communicate; see `DistributedOptimizer`.
        clip_norm: the maximum gradient norm; see `Replicated`. None does not clip.
        signals: see `Replicated`.
        total_steps: the number of steps of the run, which determines the default warm-up; None if
            it is not known. If compression begins late in the run, rank 0 warns with a
            `LatePhaseWarning`.
        module: see `DistributedOptimizer`.
        maximize: whether to maximize the objective instead of minimizing it.
        unsupported: options of torch's Adam that are accepted only if they are off: `amsgrad`,
            `foreach`, `fused`, `capturable`, `differentiable`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warmup: int | str | None = "default",
        warmup_range: tuple[int, int | None] = (0, None),
        refresh: int = REFRESH,
        refresh_steps: int = 16,
        compress: Compression | None = None,
        gradient_compression: Compression | None = None,
        bias_correction: bool = True,
        reactivate: str = "step",
        variance_floor: float = 1e-4,
        group: Group | None = None,
        clip_norm: float | None = None,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        maximize: bool = False,
        **unsupported: object,
    ) -> None:
        check_unsupported(type(self).__name__, unsupported)
        check_count("refresh_steps", refresh_steps, 1)
        check_count("refresh", refresh)
        if total_steps is not None:
            check_count("total_steps", total_steps, 1)
        if isinstance(warmup, str):
            if warmup != "default":
                raise ValueError(
                    f"warmup is {warmup!r}\n\nhint: give a number of steps, 'default', or None to "
                    "end it when the variance is stable"
                )
            warmup = WARMUP.warmup_steps(total_steps)
        elif warmup is not None:
            check_count("warmup", warmup)
        check_pair(
            "warmup_range", warmup_range, "the smallest and the largest length, such as (0, None)"
        )
        check_count("warmup_range[0]", warmup_range[0])
        if warmup_range[1] is not None:
            check_count("warmup_range[1]", warmup_range[1], warmup_range[0])
        check_pair("betas", betas, "two numbers, such as (0.9, 0.999)")
        check_fraction("betas[1]", betas[1])
        self.warmup: int | None = warmup
        self.refresh, self.refresh_steps = refresh, min(refresh_steps, refresh)
        check_compression(compress)
        self.compress = compress or Sign()
        self.bias_correction = bias_correction
        self.rule = FreezeRule(betas[1], warmup_range[0])
        max_warmup = warmup_range[1]
        if max_warmup is None:
            # compression must begin even if the variance never becomes stable
            max_warmup = WARMUP.most_auto_steps(self.rule.interval, total_steps)
        self.rule.most = max(max_warmup, warmup_range[0])
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["maximize"] = maximize
        super().__init__(
            params,
            defaults,
            reactivate=reactivate,
            variance_floor=variance_floor,
            gradient_compression=gradient_compression,
            group=group,
            clip_norm=clip_norm,
            signals=signals,
            total_steps=total_steps,
            module=module,
        )
        # `next_refresh`: first step of the next refresh; `refreshed_at`: final step of the previous
        # refresh, or the step of the freeze
        self.numbers |= {"frozen_at": 0, "norms": [], "next_refresh": 0, "refreshed_at": 0}

    def layout_lines(self) -> list[str]:
        """See `Replicated`."""
        options = f"warmup {self.warmup} {self.rule}, {self.reactivate}"
        options += f", refresh {self.refresh} {self.refresh_steps}"
        options += f", floor {self.variance_floor:g}"
        return [*super().layout_lines(), f"{options}, {self.compress}, {self.gradient_compression}"]

    @property
    def is_frozen(self) -> bool:
        """Whether the variance is frozen, which ends the warm-up."""
        return bool(self.numbers["frozen_at"])

    @property
    def num_warmup_updates(self) -> int:
        """See `Settling`: the length of the warm-up."""
        return int(self.numbers["frozen_at"])

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "" if self.is_frozen else "compression"

    @property
    def is_gradient_step(self) -> bool:
        """Whether the next step exchanges gradients, not momenta."""
        if not self.is_frozen:
            return True
        if (
            self.numbers["has_inactive_gradient"]
            and self.steps + 1 >= self.numbers["reactivate_from"]
        ):
            return True
        return bool(self.refresh) and self.steps + 1 >= self.numbers["next_refresh"]

    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`: update the momenta, exchange them, and then move the parameters.

        If a step with gradients is due, and in groups with `compress=False`, the gradients are
        exchanged instead.
        """
        if self.is_gradient_step:
            return (yield from self._gradient_step(values))
        if self.clip_norm is not None:
            yield from self.clip_gradients(values)
        flat_params, momentum = self.flat_params, self.vectors["momentum"]
        offset, end = flat_params.num_uncompressed, flat_params.num_elements
        num_extras = self.num_common_extras + 1
        settling = self.read_settling(values) if "settling" in self.vectors else None
        # the payload is this rank's momenta, which replace its gradients, and then the extras: the
        # common ones, and the number of elements to reactivate
        payload, momenta = values[offset : end + num_extras], values[offset:end]
        inactive_gradients = None
        payload[-1] = 0
        if "active" in self.vectors:
            inactive_gradients, payload[-1] = self.read_inactive(momenta)
        work = momentum.new_empty(flat_params.tile_elements)
        for part in flat_params.compressed_parts:
            beta = part.group["betas"][0]
            for here in part.tiles:
                decayed = torch.mul(momentum[here], beta, out=work[: here.stop - here.start])
                torch.add(decayed, values[here], alpha=1 - beta, out=values[here])
        self._before_exchange(momenta)
        if (offset or settling is not None) and (
            skip_reason := (yield from self._mean_uncompressed(values, settling))
        ):
            return skip_reason
        reducer = self.reducers["momentum"]
        if skip_reason := (yield from reducer.mean(payload, num_extras)):
            return skip_reason
        self.extra_sums = reducer.extra_sums
        if inactive_gradients is not None and self.reactivate == "step":
            self.add_pending_gradients(inactive_gradients)
            self.note_inactive_gradients(reducer.extra_sums[-1], self.steps + 1)
            self.numbers["has_inactive_gradient"] |= reducer.extra_sums[-1] > 0
        for part in flat_params.uncompressed_parts:
            self._update_moments(part, values, with_variance=True)
        self._after_exchange(momenta, work)
        if settling is not None:
            self.average_settling(settling)
            self.write_settling(settling)
        if offset:
            self._mark_uncompressed_gradients(values)
        self._apply(values)
        if settling is not None:
            self._join_settled()
        return ""

    @torch.no_grad()
    def _gradient_step(self, values: Tensor) -> Algorithm[str]:
        """Take a step with the mean gradients: exchange them, update moments and parameters."""
        settling = self.read_settling(values)
        if skip_reason := (yield from self.exchange_gradients(values)):
            return skip_reason
        is_frozen, flat_params = self.is_frozen, self.flat_params
        for part in flat_params.parts:
            with_variance = not is_frozen or part.begin < flat_params.num_uncompressed
            self._update_moments(part, values, with_variance=with_variance)
        if is_frozen:
            self._refresh_variance(values)
            self.update_settling(settling, values)
            self._reactivate(values)
            self._update_active()
        self._apply(values)
        self._join_settled()
        if not is_frozen and self.group.world_size > 1:
            self._freeze_if_due()
        return ""

    def _before_exchange(self, momenta: Tensor) -> None:
        """Transform this rank's momenta (n - d,) in place before they are exchanged."""

    def _after_exchange(self, momenta: Tensor, work: Tensor) -> None:
        """Store the exchanged momenta.

        Args:
            momenta: (n - d,), the mean; may be overwritten.
            work: (elements of a tile,), overwritten.
        """
        self.vectors["momentum"][self.flat_params.num_uncompressed :] = momenta

    def _mark_uncompressed_gradients(self, means: Tensor) -> None:
        """Set `had_gradient` of uncompressed parameters with a mean gradient that is not zero."""
        had_gradient = self.vectors["had_gradient"]
        unmarked = {
            index: means[segment.begin : segment.end].any()
            for index, segment in enumerate(self.flat_params.segments)
            if segment.begin < self.flat_params.num_uncompressed and not had_gradient[index]
        }
        if unmarked:
            for index, (has_gradient,) in zip(
                unmarked, read_scalars(*unmarked.values()), strict=True
            ):
                had_gradient[index] = has_gradient > 0

    def _is_variance_frozen(self, part: GroupSlice) -> bool:
        """Whether the variance of a group slice is frozen.

        A frozen variance is bias-corrected if `bias_correction` is on.
        """
        return self.is_frozen and part.begin >= self.flat_params.num_uncompressed

    @torch.no_grad()
    def _apply(self, values: Tensor) -> None:
        """Update the parameters; `values` (n + k,) is overwritten."""
        for part in self.flat_params.parts:
            is_corrected = self._is_variance_frozen(part)
            self._take_adam_step(part, None if is_corrected else self.steps + 1, values)

    def _freeze_if_due(self) -> None:
        step = self.steps + 1
        if self.warmup is not None:
            if step >= self.warmup:
                self._freeze(step)
            return
        norm = None
        self.rule.norms = self.numbers["norms"]
        if self.rule.is_due(step):
            norm = float(
                self.vectors["variance"][self.flat_params.num_uncompressed :].double().sum()
            )
            norm /= 1 - self.rule.beta2**step
        if self.rule.should_freeze(step, norm):
            self._freeze(step)

    def _freeze(self, step: int) -> None:
        self.numbers["frozen_at"] = step
        self.numbers |= {"next_refresh": step + self.refresh, "refreshed_at": step}
        variance = self.vectors["variance"]
        for part in self.flat_params.compressed_parts if self.bias_correction else ():
            variance[part.begin : part.end] /= 1 - part.group["betas"][1] ** step
        self.reducers = {"momentum": self._make_reducer()}
        self._update_active()

    def _make_reducer(self) -> Reducer:
        return self.reducer(
            self.compress, self.flat_params.num_elements - self.flat_params.num_uncompressed
        )

    def _refresh_variance(self, values: Tensor) -> None:
        """Refresh the variance with the mean gradients if a refresh is due."""
        step, numbers = self.steps + 1, self.numbers
        if not self.refresh or step < numbers["next_refresh"]:
            return
        # the final step of this refresh, and its distance from the final step of the previous one
        final_step = numbers["next_refresh"] + self.refresh_steps - 1
        num_steps = final_step - numbers["refreshed_at"]
        if step == final_step:
            gap = numbers["next_refresh"] - numbers["frozen_at"]
            numbers |= {"next_refresh": numbers["next_refresh"] + gap, "refreshed_at": step}
        for part in self.flat_params.compressed_parts:
            square = values[part.begin : part.end].square()
            beta2 = part.group["betas"][1] ** (num_steps / self.refresh_steps)
            variance = self.vectors["variance"][part.begin : part.end]
            variance.copy_(variance * beta2 + square * (1 - beta2))

    def make_reducers(self, numbers: Mapping[str, Any]) -> dict[str, Reducer]:
        """See `Replicated`."""
        return {"momentum": self._make_reducer()} if numbers["frozen_at"] else {}

    def check_state(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().check_state(snapshot)
        numbers = snapshot["shared"]["numbers"]
        for name in ("frozen_at", "next_refresh", "refreshed_at"):
            check_value(numbers, name)
        check_numbers(numbers, "norms", least=0)
