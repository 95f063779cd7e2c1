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
`gcnzc.optim.synchronous.masked` and `gcnzc.optim.synchronous.settling`.

Notation: n elements, the first d of them in groups with `compress=False`, c = n - d compressed,
P parameters, W ranks, k extras.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Sign
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, Group, run
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.state_layout import SavedTensor, check_numbers, check_tensor, check_value
from gcnzc.optim.synchronous.anchored import Anchored
from gcnzc.optim.synchronous.zero_one_schedule import Exchange, ZeroOneSchedule
from gcnzc.optim.validation import check_unsupported
from gcnzc.system.arguments import check_kind


class ZeroOneAdam(Anchored):
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
        group: the ranks that communicate; see `DistributedOptimizer`.
        clip_norm: the maximum norm of the gradient, in local steps that of the rank's own gradient;
            None does not clip.
        signals: see `Replicated`.
        total_steps: the number of steps of the run, from which the default schedule follows; None
            if it is not known.
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
        schedule: ZeroOneSchedule | None = None,
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
        if schedule is not None:
            hint = "schedule=ZeroOneSchedule(warmup=100), or None for the default"
            check_kind("schedule", schedule, ZeroOneSchedule, hint)
        self.schedule = ZeroOneSchedule.for_run(total_steps) if schedule is None else schedule
        check_compression(compress)
        self.compress = compress or Sign()
        self.bias_correction = bias_correction
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
        flat_params = self.flat_params
        self.num_compressed = flat_params.num_elements - flat_params.num_uncompressed
        # `lr_sums`: s of each group slice
        self.numbers |= {"num_variance_updates": 0, "lr_sums": [0.0] * len(flat_params.parts)}
        self.update: Tensor | None = None
        """(c,): u_i while the ranks are out of sync; then the compressed momenta are this rank's
        own, and `anchor` (c,) in `vectors` has the parameters of the last synchronization"""
        self.num_nonfinite = 0
        """number of local steps of this rank in which its gradient was not finite or too large"""
        self.is_momentum_unchanged = False
        """whether the last step was one of them"""
        self.reducers = {"update": self.reducer(self.compress, self.num_compressed)}

    @property
    def num_ignored_gradients(self) -> int:
        """See `DistributedOptimizer`; includes local steps with an unchanged momentum."""
        return self.skipped + self.num_nonfinite

    def layout_lines(self) -> list[str]:
        """See `Replicated`."""
        options = (
            f"{self.schedule.layout()}, {self.reactivate}, bias correction {self.bias_correction}"
        )
        options += f", floor {self.variance_floor:g}"
        return [*super().layout_lines(), f"{options}, {self.compress}, {self.gradient_compression}"]

    def late_phase(self) -> str:
        """See `DistributedOptimizer`; a schedule may also have no local steps."""
        schedule = self.schedule
        has_local_steps = schedule.warmup is not None and schedule.max_local_interval > 1
        is_late = has_local_steps and schedule.local_interval(self.steps) == 1
        return "local steps" if is_late else ""

    @property
    def exchange(self) -> Exchange:
        """What is exchanged at the next step; always "gradient" with a single rank."""
        if self.group.world_size == 1 or self.numbers["has_inactive_gradient"]:
            return "gradient"
        due = self.schedule.exchange(self.steps + 1)
        return "update" if self.is_out_of_sync and due == "gradient" else due

    @torch.no_grad()
    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`."""
        exchange, self.is_momentum_unchanged = self.exchange, False
        if exchange == "gradient":
            return (yield from self._gradient_step(values))
        if exchange == "update":
            yield from self.clip_gradients(values)
        else:
            self._clip_own(values)
        offset, end = self.flat_params.num_uncompressed, self.flat_params.num_elements
        settling = self.read_settling(values)
        if (offset or settling is not None) and (
            skip_reason := (yield from self._mean_uncompressed(values, settling))
        ):
            return skip_reason
        coded = values[offset:end]
        if exchange == "nothing":
            self._local_step(coded)
        else:
            # the common extras, and the number of inactive elements with a gradient
            extras = values[end : end + self.num_common_extras + 1]
            extras[-1] = self._count_inactive_gradients(coded)
            if skip_reason := (yield from self._synchronize(coded, extras)):
                return skip_reason
            sums = self.extra_sums = self.reducers["update"].extra_sums
            first = self.steps + 1
            while first > 1 and self.schedule.exchange(first - 1) == "nothing":
                first -= 1
            self.note_inactive_gradients(sums[-1], first)
            may_reactivate = (
                self.reactivate == "step" and self.steps + 2 >= self.numbers["reactivate_from"]
            )
            self.numbers["has_inactive_gradient"] = may_reactivate and sums[-1] > 0
        if settling is not None:
            self.average_settling(settling)
            self._move_settling(settling)
            self.write_settling(settling)
        for part in self.flat_params.uncompressed_parts:
            self._update_moments(part, values, with_variance=True)
            self._take_adam_step(part, self._count_updates(part), values)
        if not self.is_out_of_sync:
            self._join_settled()
        return ""

    # --- steps that exchange gradients

    def _gradient_step(self, values: Tensor) -> Algorithm[str]:
        """Take a step with the mean gradients, and update the variance if it is due."""
        flat_params, numbers, settling = self.flat_params, self.numbers, self.read_settling(values)
        if skip_reason := (yield from self.exchange_gradients(values)):
            return skip_reason
        is_due = self.schedule.updates_variance(self.steps + 1)
        numbers["num_variance_updates"] += is_due
        for part in flat_params.parts:
            with_variance = is_due or part.begin < flat_params.num_uncompressed
            self._update_moments(part, values, with_variance=with_variance)
        self.update_settling(settling, values)
        if is_due or self.reactivate == "step":
            self._reactivate(values)
        if self.schedule.updates_variance(self.steps + 2) and not len(self.settling):
            # the next step exchanges all gradients
            self._set_active(None)
        else:
            self._update_active()
        for part in flat_params.parts:
            self._take_adam_step(part, self._count_updates(part), values)
        self._join_settled()
        return ""

    @property
    def num_warmup_updates(self) -> int:
        """See `Settling`."""
        return int(self.numbers["num_variance_updates"])

    # --- steps with updates

    def end_step(self, skip_reason: str) -> None:
        """See `DistributedOptimizer`."""
        super().end_step(skip_reason)
        if not skip_reason and self.is_momentum_unchanged:
            self.skip_reason = (
                f"the local step of rank {self.group.rank} uses its unchanged momentum, because a "
                "gradient is not finite or too large"
            )

    def _local_step(self, gradient: Tensor) -> None:
        """Take a local step, without an exchange.

        Args:
            gradient: (c,), this rank's gradient; overwritten.
        """
        if not self.is_out_of_sync:
            self.vectors["anchor"] = self._read_coded()
            self.update = torch.zeros_like(gradient)
        assert self.update is not None, "created with the anchor"
        is_finite = bool(are_finite(gradient))
        self.is_momentum_unchanged = not is_finite
        self.num_nonfinite += not is_finite
        if is_finite:
            self._add_inactive(gradient)
        momentum = self.vectors["momentum"][self.flat_params.num_uncompressed :]
        self._accumulate_update(momentum, self.update, gradient if is_finite else None)
        self._count_step()
        self._set_parameters(self.vectors["anchor"], self.update, out=gradient)

    def _clip_own(self, values: Tensor) -> None:
        """Clip the gradients of this rank by their own norm, without communication."""
        if self.clip_norm is not None:
            gradients = values[: self.flat_params.num_elements]
            self._clip_finite(gradients, gradients.double().square().sum())

    def _synchronize(self, gradient: Tensor | None, extras: Tensor) -> Algorithm[str]:
        """Take a local step, and exchange the updates since the last synchronization.

        Args:
            gradient: (c,), this rank's gradient; None to synchronize without a step.
            extras: (k,), this rank's extras; the reducer's `extra_sums` are their sums over ranks.

        Returns:
            Why the step was skipped, without changes; empty if it was not.
        """
        offset, count = self.flat_params.num_uncompressed, self.num_compressed
        momentum = self.vectors["momentum"][offset:].clone()
        sent = torch.cat([momentum.new_zeros(count), extras])
        if self.update is not None:
            sent[:count] = self.update
        if gradient is not None:
            self._accumulate_update(momentum, sent[:count], gradient)
        if skip_reason := (yield from self.reducers["update"].mean(sent, len(extras))):
            return skip_reason
        update, anchor = sent[:count], self.vectors.pop("anchor", None)
        if anchor is None:
            anchor = self._read_coded()
        # `_count_step` applies weight decay to it
        self.vectors["anchor"] = anchor
        if gradient is not None:
            self._add_inactive(gradient)
            self._count_step()
        for number, part in self._numbered_coded_parts():
            length = self.numbers["lr_sums"][number]
            # if all learning rates were 0, the momenta have not changed
            if length > 0:
                torch.div(
                    update[self._coded_slice(part)],
                    length,
                    out=self.vectors["momentum"][part.begin : part.end],
                )
        self._set_parameters(anchor, update, out=update)
        del self.vectors["anchor"]
        self.update = None
        self.numbers["lr_sums"] = [0.0] * len(self.flat_params.parts)
        return ""

    def _add_inactive(self, gradient: Tensor) -> None:
        """Add the gradients of inactive elements, from gradients (c,), to the pending ones."""
        if self.pending_gradients is not None:
            self.add_pending_gradients(gradient[self.find_inactive()])

    def _count_inactive_gradients(self, gradient: Tensor) -> Tensor:
        """Count the inactive elements of which this rank has a gradient, now or from before."""
        if "active" not in self.vectors:
            return gradient.new_zeros(())
        own = gradient[self.find_inactive()]
        pending = self.pending_gradients
        return self.count_reactivated(own if pending is None else own + pending)

    # --- the end of the run

    @torch.no_grad()
    def finish(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: synchronize the updates."""
        if self.is_out_of_sync:
            settling = self.read_settling(self.flat_params.empty())
            self.skip_reason = yield from self._synchronize(None, self.flat_params.empty()[:0])
            if settling is not None and not self.skip_reason:
                self.write_settling(settling)
            return self.skip_reason
        return ""

    # --- checkpoints

    @property
    def state_bytes(self) -> int:
        """See `Replicated`."""
        return super().state_bytes + (0 if self.update is None else self.update.nbytes)

    def snapshot(self) -> dict[str, Any]:
        """See `Replicated`; `local` has the state that differs between ranks.

        `restore` computes this rank's parameters from the anchor and its own update.
        """
        state = super().snapshot()
        local = {**state["local"], "num_nonfinite": self.num_nonfinite}
        if self.is_out_of_sync:
            momentum, offset = self.vectors["momentum"], self.flat_params.num_uncompressed
            local |= {"update": self.update, "momentum": momentum[offset:].clone()}
            state["shared"]["vectors"]["momentum"] = momentum[:offset].clone()
        return {**state, "local": local}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`; a single rank also applies the updates since the last exchange."""
        super().restore(snapshot)
        local, device = snapshot["local"], self.flat_params.device
        self.num_nonfinite = local["num_nonfinite"]
        own = {
            name: vector.to(device, copy=True)
            for name, vector in local.items()
            if isinstance(vector, Tensor)
        }
        self.update = own.get("update")
        if self.update is None:
            return
        self.vectors["momentum"] = torch.cat([self.vectors["momentum"], own["momentum"]])
        self._set_parameters(self.vectors["anchor"], self.update, out=torch.empty_like(self.update))
        if self.group.world_size == 1:
            run(self.finalize_algorithm(), self.group)

    def check_state(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().check_state(snapshot)
        numbers, local = snapshot["shared"]["numbers"], snapshot["local"]
        check_value(numbers, "num_variance_updates")
        check_numbers(numbers, "lr_sums", len(self.flat_params.parts), least=0)
        check_value(local, "num_nonfinite")
        coded = SavedTensor((self.num_compressed,), dtype=self.flat_params.dtype)
        if "update" in local or "anchor" in snapshot["shared"]["vectors"]:
            check_tensor(snapshot["shared"]["vectors"], "anchor", coded)
            for name in ("update", "momentum"):
                check_tensor(local, name, coded)

    def count_momentum_elements(self, snapshot: Mapping[str, Any]) -> int:
        """See `Masked`; between synchronizations, compressed momenta are in `local`."""
        is_local = "update" in snapshot["local"]
        return self.flat_params.num_uncompressed if is_local else self.flat_params.num_elements
