"""0/1 Adam: exchange gradients, signs of updates, or nothing, by a schedule.

Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (2022,
https://arxiv.org/abs/2202.06009). Exchanged gradients update the variance at growing intervals. At
other steps the ranks synchronize: they exchange the signs of u, the sum of their updates since the
last synchronization. After the warm-up some steps are local, without an exchange. The variance V
changes only in steps that exchange gradients:

    gradient  g = mean_i g_i             m <- b1 m + (1 - b1) g     V <- b2 V + (1 - b2) g^2
              x <- x - lr m / (sqrt(V) + eps)
    local     m_i <- b1 m_i + (1 - b1) g_i     u_i <- u_i + lr m_i
              x_i = a - u_i / (sqrt(V) + eps)
    update    a local step, and then     u <- compressed mean of u_i     m <- u / s
              x <- a - u / (sqrt(V) + eps)

Here s is the sum of lr since the last synchronization, each lr divided by 1 - b1^t; like u, s is
multiplied by 1 - lr weight_decay in every step. The anchor a is x at the last synchronization,
after which the parameters are bitwise equal on all ranks. Unlike in the paper, m and V are
bias-corrected, weight decay is decoupled (it applies to a and u in the same way), and the step
before a variance update synchronizes, so that one mean gradient updates both m and V.

Elements with zero variance are inactive until the ranks exchange their gradients. Then their
gradients are exchanged in every step, also in local ones, until their variance has settled; see
`gcnzc.optim.inactive`.

Notation: n elements, the first d of them in groups with `compress=False`, k extras.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gcnzc.compress import Dense
from gcnzc.exchange import Algorithm, run
from gcnzc.exchange.engine import identify_caller
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.defaults import WARMUP_STEPS, warmup_steps
from gcnzc.optim.inactive import InactiveElements, SettlingElements
from gcnzc.optim.method import SkipStep
from gcnzc.optim.options import option
from gcnzc.optim.state import OWN, Kind, scalar, vector
from gcnzc.optim.validation import check_count
from gcnzc.system.arguments import check_flag

Exchange: TypeAlias = Literal["gradient", "update", "nothing"]
LOCAL_WINDOWS = 4
"""number of parts of a run by default; the synchronization interval doubles after each"""


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The schedule of 0/1 Adam: what is exchanged at each step, counted from 1.

    In the warm-up the ranks exchange gradients or updates at every step. After it they synchronize
    their updates every 1, 2, 4, ... steps, up to `max_local_interval`, and take local steps in
    between. The interval doubles after every `local_doubling` steps, so that the first of them have
    no local step. The schedule depends only on the number of the step.

    Raises:
        ValueError: an option is out of range.
        TypeError: `updates_variance_after_warmup` is not a flag.
    """

    warmup: int | None = WARMUP_STEPS
    """number of first steps that all exchange; should cover a learning rate warm-up; None for no
    local steps at all"""
    variance_doubling: int = 16
    """number of variance updates after which the interval between them doubles"""
    local_doubling: int = 100
    """number of steps after which the synchronization interval doubles, after the warm-up"""
    max_local_interval: int = 4
    """largest synchronization interval, in steps; a power of two"""
    updates_variance_after_warmup: bool = False
    """whether the variance is also updated after the warm-up"""

    def __post_init__(self) -> None:
        if self.warmup is not None:
            # the first step initializes the variance
            check_count("warmup", self.warmup, 1)
        for name in ("variance_doubling", "local_doubling", "max_local_interval"):
            check_count(name, getattr(self, name), 1)
        if self.max_local_interval & (self.max_local_interval - 1):
            raise ValueError(
                f"max_local_interval is {self.max_local_interval}\n\nhint: give a power of two"
            )
        check_flag("updates_variance_after_warmup", self.updates_variance_after_warmup)

    @classmethod
    def for_run(
        cls, total_steps: int | None = None, warmup: int | str | None = "default"
    ) -> "ZeroOneSchedule":
        """Return the default schedule.

        Args:
            total_steps: the number of steps of the run. The warm-up is 0.15 of it, and the
                synchronization interval doubles after each quarter of it. If None, the warm-up is
                100 steps, and the interval doubles every 100 steps.
            warmup: the number of warm-up steps if not "default"; None for no local steps.
        """
        options: dict[str, Any] = {
            "warmup": warmup_steps(total_steps) if warmup == "default" else warmup
        }
        if total_steps is not None:
            check_count("total_steps", total_steps, 1)
            options["local_doubling"] = max(1, total_steps // LOCAL_WINDOWS)
        return cls(**options)

    def exchange(self, step: int) -> Exchange:
        """Return what is exchanged at a step: "gradient", "update" or "nothing"."""
        if self.updates_variance(step):
            return "gradient"
        # also before a variance update, which needs all ranks' gradients at the same parameters
        is_due = step % self.local_interval(step) == 0 or self.updates_variance(step + 1)
        return "update" if is_due else "nothing"

    def updates_variance(self, step: int) -> bool:
        """Return whether the variance is updated at a step."""
        is_after_warmup = self.warmup is not None and step > self.warmup
        if is_after_warmup and not self.updates_variance_after_warmup:
            return False
        interval = self.variance_interval(step)
        return (step - 1 - self.variance_doubling * (interval - 1)) % interval == 0

    def variance_interval(self, step: int) -> int:
        """Return the steps to the next variance update.

        After update j, counted from 0, it is 2^floor(j / variance_doubling).
        """
        # the interval 2^i begins after variance_doubling (1 + 2 + ... + 2^(i - 1)) steps
        return 1 << ((step - 1) // self.variance_doubling + 1).bit_length() - 1

    def local_interval(self, step: int) -> int:
        """Return the synchronization interval; steps that are its multiples synchronize."""
        if self.warmup is None or step <= self.warmup:
            return 1
        doublings = (step - self.warmup - 1) // self.local_doubling
        return min(1 << min(doublings, 62), self.max_local_interval)


class ZeroOneAdam(InactiveElements):
    """0/1 Adam: AdamW that exchanges signs of updates, and takes local steps without an exchange.

    With a single rank it is `torch.optim.AdamW` whose variance is updated at the steps of the
    schedule. Between synchronizations the parameters differ between ranks: use `average_parameters`
    for evaluation, and `finalize` after the last step. If a gradient is not finite or too large to
    be squared, all ranks skip a step with an exchange, and their state does not change. In a local
    step, its rank steps with the unchanged momentum instead, and counts it in `num_nonfinite`; the
    mean of updates requires that all ranks take the same number of steps.

    A group with `compress=False` exchanges gradients at every step, including local steps. Signals
    are exchanged only at steps that exchange the other groups.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers.
        lr: the learning rate.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the square root of the variance.
        weight_decay: coefficient of the decoupled weight decay, as in AdamW.
        schedule: the steps of each kind; `ZeroOneSchedule.for_run(total_steps)` if None.
        compress: compression of the updates; signs if None.
        gradient_compression: compression of the gradients, without error feedback; uncompressed if
            None.
        bias_correction: whether to correct the bias of momentum and variance; the paper does not,
            which makes its first steps larger.
        reactivate: how inactive elements with a gradient are reactivated: "step" exchanges
            gradients at the step after the next synchronization; "refresh" waits for the schedule's
            next variance update. They have a warm-up of their own, of as many steps as there were
            variance updates, at most 1,000, in which their gradients are exchanged in every step.
        variance_floor: the smallest variance of an active element, as a fraction of the mean
            variance of the active elements of its parameter, unless the next step updates the
            variance. Variances far below those of adjacent elements are raised as in `OneBitAdam`.
            0 disables both, as in the paper.
        clip_norm: the maximum norm of the gradient, in local steps that of the rank's own gradient;
            None does not clip.
        total_steps: the number of steps of the run, from which the default schedule follows; None
            if it is not known.
        options: see `Replicated` and `DistributedOptimizer`: `group`, `signals`, `module`,
            `maximize`.
    """

    schedule: ZeroOneSchedule = option(None)

    anchor: Tensor | None = vector(is_optional=True)
    """(n,): the parameters of the last synchronization, with weight decay; None in sync"""
    accumulated: Tensor | None = vector(is_optional=True, **OWN)
    """(n,): u_i while the ranks are out of sync; their momenta differ as well then"""
    num_variance_updates: int = scalar()
    lr_sums: list[float] = scalar(lambda own: [0.0] * len(own.compressed_groups))
    """s of each compressed parameter group"""
    num_nonfinite: int = scalar(kind="local")
    """number of local steps of this rank in which its gradient was not finite or too large"""
    reducer_name = "update"

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        self.schedule = self.schedule or ZeroOneSchedule.for_run(self.total_steps)

    @property
    def compressed_groups(self) -> list[dict[str, Any]]:
        """The options of the parameter groups that are compressed."""
        return [options for _, options in self.flat.slices(self.flat.num_uncompressed)]

    @property
    def momentum_kind(self) -> Kind:
        """See `InactiveElements`."""
        return "shared" if self.anchor is None else "local"

    @property
    def is_out_of_sync(self) -> bool:
        """Whether the ranks have taken local steps since the last synchronization."""
        return self.anchor is not None

    @property
    def num_ignored_gradients(self) -> int:
        """See `DistributedOptimizer`; includes local steps with an unchanged momentum."""
        return self.skipped + self.num_nonfinite

    @property
    def num_warmup_updates(self) -> int:
        """See `InactiveElements`."""
        return self.num_variance_updates

    def num_updates(self, here: slice) -> int | None:
        """See `InactiveElements`."""
        is_compressed = here.start >= self.flat.num_uncompressed
        return self.num_variance_updates if is_compressed else self.steps + 1

    def variance_correction(self, options: Mapping[str, Any]) -> float:
        """See `InactiveElements`."""
        if not self.bias_correction:
            return 1.0
        return float(1 - options["betas"][1] ** self.num_variance_updates)

    def late_phase(self) -> str:
        """See `DistributedOptimizer`; a schedule may also have no local steps."""
        schedule = self.schedule
        has_local_steps = schedule.warmup is not None and schedule.max_local_interval > 1
        is_late = has_local_steps and schedule.local_interval(self.steps) == 1
        return "local steps" if is_late else ""

    def replicated_parameters(self) -> list[tuple[str, Tensor]] | None:
        """See `DistributedOptimizer`."""
        return None if self.is_out_of_sync else super().replicated_parameters()

    @property
    def exchange(self) -> Exchange:
        """What is exchanged at the next step; always "gradient" with a single rank."""
        if self.group.world_size == 1 or self.has_inactive_gradient:
            return "gradient"
        due = self.schedule.exchange(self.steps + 1)
        return "update" if self.is_out_of_sync and due == "gradient" else due

    @torch.no_grad()
    def update(self, values: Tensor) -> Algorithm[None]:
        """See `Replicated`."""
        exchange, first = self.exchange, self.flat.num_uncompressed
        if exchange == "gradient":
            yield from self._exchange_gradients(values)
            return
        if exchange == "update":
            yield from self.clip_gradients(values)
        else:
            self.clip_own_gradients(values)
        settling = self.read_settling(values)
        yield from self.mean_uncompressed(values, settling)
        if exchange == "nothing":
            self._take_local_step(values)
        else:
            yield from self._exchange_updates(values)
        self.update_uncompressed(values, settling)
        if settling is not None:
            self._move_settling(settling)
        self.move_parameters(values, end=first)
        if not self.is_out_of_sync:
            self.join_settled()

    def _exchange_gradients(self, gradients: Tensor) -> Algorithm[None]:
        """Take a step with the mean gradients, and update the variance if it is due."""
        settling = self.read_settling(gradients)
        yield from self.mean_gradients(gradients)
        is_due = self.schedule.updates_variance(self.steps + 1)
        self.num_variance_updates += is_due
        for here, options in self.flat.slices():
            with_variance = is_due or here.start < self.flat.num_uncompressed
            self.update_moments(here, options, gradients, with_variance=with_variance)
        self.update_settling(settling, gradients)
        if is_due or self.reactivate == "step":
            self.reactivate_elements(gradients)
        if self.schedule.updates_variance(self.steps + 2) and not len(self.settling):
            # the next step exchanges all gradients
            self.set_active(None)
        else:
            self.update_active()
        self.move_parameters(gradients)
        self.join_settled()

    def _take_local_step(self, gradients: Tensor) -> None:
        """Take a local step with this rank's gradients (n,), without an exchange."""
        own = gradients[self.flat.num_uncompressed : self.flat.num_elements]
        if self.anchor is None or self.accumulated is None:
            self.anchor, self.accumulated = self.flat.values, self.flat.zeros()
        is_finite = bool(are_finite(own))
        if is_finite:
            self._add_pending(gradients)
        else:
            self.num_nonfinite += 1
            self.skip_reason = (
                f"the local step of rank {self.group.rank} uses its unchanged momentum, because a "
                "gradient is not finite or too large"
            )
        self._accumulate(self.momentum, self.accumulated, gradients if is_finite else None)
        self._count_step(self.anchor)
        self._set_parameters(self.anchor, self.accumulated)

    def _exchange_updates(self, gradients: Tensor) -> Algorithm[None]:
        """Take a local step with this rank's gradients (n,), and synchronize the updates."""
        count = gradients.new_zeros(1)
        if self.active is not None:
            # those of which this rank has a gradient, now or from before
            own = gradients[self.find_inactive()]
            pending = self.pending_gradients
            count = self.count_reactivated(own if pending is None else own + pending).reshape(1)
        (total,) = yield from self._synchronize(gradients, count)
        since = self.steps + 1
        while since > 1 and self.schedule.exchange(since - 1) == "nothing":
            since -= 1
        self.note_inactive_gradients(total, since)
        may_reactivate = self.reactivate == "step" and self.steps + 2 >= self.reactivate_from
        self.has_inactive_gradient = may_reactivate and total > 0

    def _synchronize(self, gradients: Tensor | None, extras: Tensor) -> Algorithm[Sequence[float]]:
        """Exchange the updates since the last synchronization, and set momenta and parameters.

        Args:
            gradients: (n,), this rank's gradients for a local step before it; None for no step.
            extras: see `mean`.

        Returns:
            The sums of the extras.

        Raises:
            SkipStep: the step was skipped, without changes.
        """
        first, count = self.flat.num_uncompressed, self.flat.num_elements
        sent = self.flat.empty(self.num_common_extras + len(extras))
        sums: Sequence[float] = ()
        sent[:count] = 0 if self.accumulated is None else self.accumulated
        if gradients is not None:
            self._accumulate(self.momentum.clone(), sent, gradients)
            sums = yield from self.mean(sent, "update", extras, begin=first)
        elif reason := (yield from self.reducers["update"].mean(sent[first:count])):
            raise SkipStep(reason)
        anchor = self.flat.values if self.anchor is None else self.anchor
        if gradients is not None:
            self._add_pending(gradients)
            self._count_step(anchor)
        for length, (here, _) in zip(self.lr_sums, self.flat.slices(first), strict=True):
            # if all learning rates were 0, the momenta have not changed
            if length > 0:
                torch.div(sent[here], length, out=self.momentum[here])
        self._set_parameters(anchor, sent)
        self.anchor = self.accumulated = None
        self.lr_sums = [0.0] * len(self.lr_sums)
        return sums

    def _accumulate(self, momentum: Tensor, update: Tensor, gradients: Tensor | None) -> None:
        """Take a local step: change momenta (n,) and accumulated updates (n,) in place.

        Without gradients, it steps with the unchanged momenta. With a learning rate of 0 nothing
        changes, so that momenta in sync remain in sync.
        """
        for here, options in self.flat.slices(self.flat.num_uncompressed):
            size, decay = self.step_size(options), _decay_factor(options)
            if size == 0:
                continue
            if gradients is not None:
                momentum[here].lerp_(gradients[here], 1 - options["betas"][0])
            if self.active is not None:
                momentum[here].masked_fill_(~self.active[here], 0)
            update[here].mul_(decay).add_(momentum[here], alpha=size)

    def _count_step(self, anchor: Tensor) -> None:
        """Apply weight decay to the anchor (n,) and `lr_sums`, as `_accumulate` to the update."""
        first, groups = self.flat.num_uncompressed, self.compressed_groups
        self.lr_sums = [
            length * _decay_factor(options) + self.step_size(options)
            for length, options in zip(self.lr_sums, groups, strict=True)
        ]
        for segment in self.trained():
            if segment.here.start >= first and (decay := _decay_factor(segment.options)) != 1:
                anchor[segment.here] *= decay

    def _set_parameters(self, anchor: Tensor, update: Tensor) -> None:
        """Set the compressed parameters to anchor - update / (sqrt(V) + eps); both are (n,)."""
        roots, first = torch.empty_like(anchor), self.flat.num_uncompressed
        for here, options in self.flat.slices(first):
            self.write_roots(here, options, roots[here])
            torch.addcdiv(anchor[here], update[here], roots[here], value=-1, out=roots[here])
        for segment in self.flat.segments:
            if segment.here.start >= first:
                segment.parameter.copy_(roots[segment.here].view(segment.parameter.shape))

    def _move_settling(self, settling: SettlingElements) -> None:
        """Take a step of Adam with the settling elements; others are set from anchor and update."""
        for segment, here in self.settling_slices():
            roots = settling.variances[here].sqrt() + segment.options["eps"]
            moves = settling.momenta[here] / roots * self.step_size(segment.options)
            positions, flat = self.settling[here], segment.parameter.flatten()
            own = positions - segment.here.start
            before = flat[own] if self.anchor is None else self.anchor[positions]
            moved = before.to(moves.dtype) - moves
            if self.anchor is not None:
                self.anchor[positions] = moved
            flat[own] = moved.to(flat.dtype)
            segment.parameter.copy_(flat.view_as(segment.parameter))

    def _add_pending(self, gradients: Tensor) -> None:
        """Add the gradients of inactive elements, of gradients (n,), to the pending ones."""
        if self.pending_gradients is not None:
            self.add_pending_gradients(gradients[self.find_inactive()])

    # --- the end of the run, evaluation, and states

    @torch.no_grad()
    def finish(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: synchronize the updates."""
        if self.is_out_of_sync:
            settling = self.read_settling(self.flat.empty())
            try:
                yield from self._synchronize(None, self.flat.empty()[:0])
            except SkipStep as skip:
                self.skip_reason = str(skip)
                return str(skip)
            if settling is not None:
                self.write_settling(settling)
        return ""

    @identify_caller
    def average_parameters_algorithm(self) -> Algorithm[Tensor | None]:
        """See `DistributedOptimizer`.

        Returns:
            This rank's own parameters (n,) if the ranks are out of sync; else None.
        """
        if not self.is_out_of_sync:
            return None
        own, mean = self.flat.values, self.flat.values
        worker = self.flat.worker_info(self.group.rank, self.group.world_size)
        if not (yield from Dense().reducer(self.flat.num_elements, worker).mean(mean)):
            self.flat.write_parameters(mean)
        return own

    def restore_parameters(self, own: Tensor | None) -> None:
        """See `DistributedOptimizer`."""
        if own is not None:
            self.flat.write_parameters(own)

    @torch.no_grad()
    def on_load(self) -> None:
        """See `DistributedOptimizer`; a single rank applies the updates since the last exchange."""
        super().on_load()
        if self.anchor is not None and self.accumulated is not None:
            self._set_parameters(self.anchor, self.accumulated)
            if self.group.world_size == 1:
                run(self.finalize_algorithm(), self.group)


def _decay_factor(options: Mapping[str, Any]) -> float:
    """Return the factor of the parameters by weight decay in the next step."""
    return 1 - float(options["lr"]) * options["weight_decay"]
