"""1-bit LAMB: 1-bit Adam with a trust ratio for each tensor.

Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed" (2021, https://arxiv.org/abs/2104.06069). LAMB scales the update u of each tensor
x by the trust ratio |x| / |u|. With a frozen variance this ratio is no longer meaningful. Its
average over the warm-up is used instead, scaled by the ratio of the frozen variance to a fresh one,
which is computed from gradients that are reconstructed from the received momenta.

    always    u = m / (1 - b1^t) / (sqrt(V) + eps) + weight_decay x
    warm-up   m, v, V as in 1-bit Adam     c = |x| / |u| in trust_range     C = average of c
              x <- x - lr c u
    freeze    w = v / (1 - b2^t)     k = (mean over the tensors of rms(m)) / rms(m)
    after     k m <- compressed mean of k (b1 m + (1 - b1) g_i)
              g = (m - b1 m_before) / (1 - b1)     w <- b2 w + (1 - b2) g^2
              f = max (sqrt(V) + eps) / (sqrt(w) + eps), in factor_range, near the last f
              x <- x - lr C f u

C is an exponential average with trust_beta over the T steps in which |x| and |u| are above 0. At
the freeze it is divided by 1 - trust_beta^T, unless bias_correction is off. With weight decay, f
applies only to the fraction of u that is not decay. The scaling k gives all tensors the same
magnitude while they are compressed. Elements that never had a gradient are inactive as in
`one_bit_adam`; a tensor with zero momentum at the freeze is inactive as a whole. While a tensor has
elements that are settling (`gcnzc.optim.synchronous.settling`), its c and C are computed as in the
warm-up, and a new tensor gets its k when they have settled. After elements have begun late, C f is
at most 2 c: their gradients may increase those of other tensors, whose C no longer fits.

Notation: P parameters, n elements, the first d of them in groups with `compress=False`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression
from gcnzc.exchange import Group
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.state_layout import SavedTensor, check_tensor
from gcnzc.optim.synchronous.one_bit_adam import OneBitAdam
from gcnzc.optim.validation import check_above_zero, check_fraction, check_pair, check_unsupported

# largest k: a tensor whose momentum has almost vanished must not dominate the others when it grows
MAX_SCALING = 1e6

# After elements have begun late, the largest ratio of a tensor's coefficient to its present trust
# ratio. Compression errors increase updates, so that a limit of 1 would slow all tensors down.
MAX_LATE_RATIO = 2.0


class OneBitLamb(OneBitAdam):
    """1-bit LAMB: LAMB that exchanges the signs of momenta after a warm-up.

    With a single rank, and during the warm-up, it is LAMB with the mean gradient of the ranks.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers. A group
            with `compress=False` exchanges gradients in every step; its variance and trust
            ratios are not frozen.
        lr: the learning rate, for a trust ratio of 1.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the square root of the variance.
        weight_decay: coefficient of the weight decay, which is part of the update.
        trust_range: the smallest and the largest trust ratio. The ratio is the norm of the
            parameter divided by that of its update, or 1 if one of them is 0.
        trust_beta: coefficient of the running average of trust ratios; the warm-up should be longer
            than 1 / (1 - trust_beta) steps.
        factor_range: the smallest and the largest factor of that average after the warm-up.
        factor_change: the largest relative change of the factor in a step.
        warmup: the number of uncompressed steps before the variance is frozen. "default" is 0.15 of
            `total_steps`, or 100 if that is None. None freezes the variance once it is stable.
        warmup_range: the smallest and the largest number of these steps if `warmup` is None. If the
            largest is None, it is the smaller of 5 / (1 - beta2) and a quarter of `total_steps`.
        compress: compression of the momenta after the warm-up; signs if None.
        gradient_compression: compression of the gradients where gradients are exchanged: in the
            warm-up and in groups with `compress=False`; must not use error feedback. Uncompressed
            if None.
        bias_correction: whether to correct the bias of momentum and variance; the paper does not,
            which makes its first steps larger.
        reactivate: "step" reactivates elements that were inactive at the freeze once they have a
            gradient, as in `OneBitAdam`; "refresh" leaves them inactive.
        variance_floor: the smallest variance of an active element after the warm-up, frozen or
            fresh, as a fraction of the mean variance of the active elements of its parameter; 0 for
            none, as in the paper.
        group: the ranks that communicate; see `DistributedOptimizer`.
        clip_norm: the maximum gradient norm; see `Replicated`. None does not clip.
        signals: see `Replicated`.
        total_steps: the number of steps of the run, from which the default warm-up follows; None if
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
        trust_range: tuple[float, float] = (0.01, 10.0),
        trust_beta: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        warmup: int | str | None = "default",
        warmup_range: tuple[int, int | None] = (0, None),
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
        for name, limits in {"trust_range": trust_range, "factor_range": factor_range}.items():
            hint = "the smallest value, above 0, and the largest"
            check_pair(name, limits, hint)
            for index, limit in enumerate(limits):
                check_above_zero(f"{name}[{index}]", limit)
            if limits[0] > limits[1]:
                raise ValueError(f"{name} is {limits}\n\nhint: give {hint}")
        check_fraction("trust_beta", trust_beta)
        check_fraction("factor_change", factor_change)
        self.trust_range, self.trust_beta = trust_range, trust_beta
        self.factor_range, self.factor_change = factor_range, factor_change
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup=warmup,
            warmup_range=warmup_range,
            compress=compress,
            gradient_compression=gradient_compression,
            bias_correction=bias_correction,
            reactivate=reactivate,
            variance_floor=variance_floor,
            group=group,
            clip_norm=clip_norm,
            signals=signals,
            total_steps=total_steps,
            maximize=maximize,
            module=module,
        )
        # (P,) each. `trust`: the average C, and `trust_weight` its sum of weights; `factor`: the
        # last f; `scaling`: k, 0 for an inactive tensor
        zeros = self._tensor_values([0.0] * len(self.flat_params.segments))
        self.vectors |= {"trust": zeros, "trust_weight": zeros.clone()}
        self.vectors |= {"factor": zeros + 1, "scaling": zeros.clone()}

    def layout_lines(self) -> list[str]:
        """See `Replicated`."""
        trust = f"trust {self.trust_range} {self.trust_beta}"
        return [
            *super().layout_lines(),
            f"{trust}, factor {self.factor_range} {self.factor_change}",
        ]

    def check_state(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().check_state(snapshot)
        flat_params, shared = self.flat_params, snapshot["shared"]
        each = SavedTensor((len(flat_params.segments),), dtype=torch.float64, least=0)
        for name in ("trust", "trust_weight", "factor", "scaling"):
            check_tensor(shared["vectors"], name, each)
        if shared["numbers"]["frozen_at"]:
            shape = (flat_params.num_elements - flat_params.num_uncompressed,)
            fresh = SavedTensor(shape, dtype=flat_params.dtype, least=0)
            check_tensor(shared["vectors"], "fresh", fresh)

    @property
    def scale_elements(self) -> int | None:
        """See `Masked`; 1, because momenta are scaled to similar magnitudes in all tensors."""
        return 1

    def _before_exchange(self, momenta: Tensor) -> None:
        scaling = self.vectors["scaling"][self._first_compressed :]
        torch._foreach_mul_(self._split_by_tensor(momenta), list(scaling))

    def _after_exchange(self, momenta: Tensor, work: Tensor) -> None:
        """See `OneBitAdam`; also updates the fresh variance."""
        flat_params, scaling = self.flat_params, self.vectors["scaling"]
        offset = flat_params.num_uncompressed
        momentum, fresh = self.vectors["momentum"], self.vectors["fresh"]
        divisors = scaling.where(scaling > 0, torch.inf)
        for part in flat_params.compressed_parts:
            beta1, beta2 = part.group["betas"]
            for index in range(part.first, part.last):
                segment = flat_params.segments[index]
                for here in segment.tiles:
                    there = slice(here.start - offset, here.stop - offset)
                    own = momenta[there].div_(divisors[index])
                    # the mean gradient, reconstructed from the new momentum
                    gradient = torch.mul(momentum[here], beta1, out=work[: len(own)])
                    torch.sub(own, gradient, out=gradient).div_(1 - beta1)
                    fresh[there].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                    momentum[here] = own
        # a compressed mean of 0 is no momentum of these
        fresh[self.settling] = 0

    def _update_fresh_variance(self, gradients: Tensor) -> None:
        """Update the fresh variance with the mean gradients (n,)."""
        for part in self.flat_params.compressed_parts:
            gradient, beta = gradients[part.begin : part.end], part.group["betas"][1]
            self._fresh(part).mul_(beta).addcmul_(gradient, gradient, value=1 - beta)

    def _refresh_variance(self, values: Tensor) -> None:
        """See `OneBitAdam`; also updates the fresh variance."""
        super()._refresh_variance(values)
        self._update_fresh_variance(values)
        if (active := self.vectors.get("active")) is not None:
            self.vectors["fresh"].masked_fill_(~active, 0)

    def _join(self, joined: Tensor) -> None:
        """See `Masked`; also initializes the fresh variance, and the scaling of new tensors."""
        super()._join(joined)
        variance = self.vectors["variance"][self.flat_params.num_uncompressed :]
        self.vectors["fresh"][joined] = variance[joined]
        self._scale()

    def _freeze(self, step: int) -> None:
        offset = self.flat_params.num_uncompressed
        if offset == self.flat_params.num_elements:
            # no group is compressed, so it remains LAMB
            return
        # a tensor with zero momentum has no scaling, so all its elements are inactive
        moves = self._norms(self._split_by_tensor(self.vectors["momentum"][offset:])) > 0
        torch._foreach_mul_(self._split_by_tensor(self.vectors["variance"][offset:]), list(moves))
        super()._freeze(step)
        self.vectors["fresh"] = self.vectors["variance"][offset:].clone()
        self._scale()

    def _scale(self) -> None:
        """Set the scaling of active tensors that have none yet.

        At the freeze it follows from their momenta. A tensor that begins late has a variance, but
        perhaps hardly any momentum; it gets the mean magnitude of the others.
        """
        scaling = self.vectors["scaling"][self._first_compressed :]
        momentum, variance = (
            self.vectors[name][self.flat_params.num_uncompressed :]
            for name in ("momentum", "variance")
        )
        if (active := self.vectors.get("active")) is not None:
            momentum, variance = momentum.where(active, 0), variance.where(active, 0)
        roots = self._num_active().sqrt().to(self.flat_params.dtype)
        magnitudes = [
            (self._norms(self._split_by_tensor(each)) / roots).double()
            for each in (momentum, variance.sqrt())
        ]
        # computed on the host, with one synchronization with a GPU
        known, sent, of_variance = torch.stack([scaling, *magnitudes]).cpu()
        are_known = known > 0
        if bool(are_known.any()):
            target, magnitude = (known * sent)[are_known].mean(), of_variance
        else:
            target, magnitude = sent[sent > 0].mean(), sent
        are_new = ~are_known & (magnitude > 0)
        known[are_new] = (target / magnitude[are_new]).clamp(max=MAX_SCALING)
        scaling.copy_(known, non_blocking=True)

    @torch.no_grad()
    def _apply(self, values: Tensor) -> None:
        """Update the parameters; `values` (n + k,) is overwritten."""
        flat_params, had_gradient = self.flat_params, self.vectors["had_gradient"].tolist()
        longest = max((each.stop - each.start for each in self._tiles()), default=0)
        work = values.new_empty(longest)
        floors = self._variance_floors()
        measured = [
            self._compute_update(part, index, floors[index], values, work)
            for part, index in self._indexed_tensors()
        ]
        rates = [-float(part.group["lr"]) for part, _ in self._indexed_tensors()]
        sizes = self._tensor_values(rates) * self._compute_ratios(*torch.stack(measured).unbind(1))
        for part, index in self._indexed_tensors():
            if not had_gradient[index]:
                continue
            segment = flat_params.segments[index]
            flat = _flat(segment.parameter)
            for here in segment.tiles:
                own = flat[here.start - segment.begin : here.stop - segment.begin]
                update = work[: len(own)].copy_(own).mul_(part.group["weight_decay"])
                update.add_(values[here]).mul_(sizes[index])
                own += update.to(own.dtype)
            if flat.data_ptr() != segment.parameter.data_ptr():
                segment.parameter.copy_(flat.view_as(segment.parameter))

    def _compute_update(
        self, part: GroupSlice, index: int, floor: Tensor, values: Tensor, work: Tensor
    ) -> Tensor:
        """Write a tensor's update without weight decay into `values`, and measure its norms.

        Args:
            part: the group slice of the tensor.
            index: the index of the tensor.
            floor: (), the lower limit of its fresh variance.
            values: (n + k,), receives the update.
            work: (elements of a tile,), overwritten.

        Returns:
            (4,) float64: the largest ratio of the frozen to the fresh denominator sqrt(V) + eps, or
            0 if the variance is not frozen or the tensor is inactive; and the norms of the
            parameter, of this update, and of the update with weight decay.
        """
        flat_params, options, step = self.flat_params, part.group, self.steps + 1
        segment, (beta1, beta2) = flat_params.segments[index], part.group["betas"]
        flat, is_frozen = _flat(segment.parameter), self._is_variance_frozen(part)
        # limits the ratio if the fresh variance and eps are 0
        most = torch.finfo(flat_params.dtype).max
        found: list[list[Tensor]] = [[], [], [], []]
        for here in segment.tiles:
            update = torch.sqrt(self.vectors["variance"][here], out=values[here])
            if self.bias_correction and not is_frozen:
                update /= (1 - beta2**step) ** 0.5
            update += options["eps"]
            own = work[: len(update)]
            if is_frozen:
                change = self._variance_ratio(here, update, floor, own, options["eps"])
                found[0].append(change.amax().clamp(max=most))
            torch.div(self.vectors["momentum"][here], update, out=update)
            if self.bias_correction:
                update /= 1 - beta1**step
            found[2].append(torch.linalg.vector_norm(update))
            own.copy_(flat[here.start - segment.begin : here.stop - segment.begin])
            found[1].append(torch.linalg.vector_norm(own))
            own.mul_(options["weight_decay"]).add_(update)
            found[3].append(torch.linalg.vector_norm(own))
        nothing = floor.new_zeros((), dtype=torch.float64)
        change, *parameter_norms = (
            torch.stack(each).double() if each else nothing for each in found
        )
        # the norm of the tiles' norms; with one tile, exactly its norm
        return torch.stack([change.amax(), *map(torch.linalg.vector_norm, parameter_norms)])

    def _variance_ratio(
        self, here: slice, root: Tensor, floor: Tensor, out: Tensor, eps: float
    ) -> Tensor:
        """Return the ratio of the frozen to the fresh denominator; 0 for inactive elements."""
        there = slice(
            here.start - self.flat_params.num_uncompressed,
            here.stop - self.flat_params.num_uncompressed,
        )
        # the same floor as of the frozen variance; else the smallest elements would determine the
        # maximum over their tensor
        torch.clamp(self.vectors["fresh"][there], min=floor, out=out).sqrt_().add_(eps)
        torch.div(root, out, out=out)
        active = self.vectors.get("active")
        return out if active is None else out.masked_fill_(~active[there], 0)

    def _variance_floors(self) -> Tensor:
        """Return the lower limit (P,) of each tensor's fresh variance; 0 if it has none."""
        floors = self._tensor_values([0.0] * len(self.flat_params.segments))
        if self.is_frozen and self.variance_floor:
            sums = torch.stack(
                [each.sum() for each in self._split_by_tensor(self.vectors["fresh"])]
            )
            floors[self._first_compressed :] = self.variance_floor * sums / self._num_active()
        return floors.to(self.flat_params.dtype)

    def _compute_ratios(
        self,
        variance_ratios: Tensor,
        parameter_norms: Tensor,
        update_norms: Tensor,
        decayed_norms: Tensor,
    ) -> Tensor:
        """Return the factor (P,) of each tensor's update; all arguments are (P,).

        Args:
            variance_ratios: see `_compute_update`.
            parameter_norms: the norms of the parameters.
            update_norms: the norms of the updates without weight decay.
            decayed_norms: the norms of the updates with weight decay.
        """
        average, weight = self.vectors["trust"], self.vectors["trust_weight"]
        is_known = (parameter_norms > 0) & (decayed_norms > 0)
        # norms that overflow have no ratio
        trust = (parameter_norms / decayed_norms).double().nan_to_num(1.0)
        trust = trust.clamp(*self.trust_range).where(is_known, 1.0)
        is_frozen = torch.zeros_like(is_known)
        # as in the warm-up, the ratio of a tensor with settling elements is up to date
        is_frozen[self._first_compressed :] = self.is_frozen
        for _, index, _ in self.settling_slices():
            is_frozen[index] = False
        is_updated = is_known & (update_norms > 0) & ~(is_frozen & (weight > 0))
        beta = self.trust_beta
        average.copy_((beta * average + (1 - beta) * trust).where(is_updated, average))
        weight.copy_((beta * weight + (1 - beta)).where(is_updated, weight))
        kept = average / weight if self.bias_correction else average
        share = (update_norms / decayed_norms).double().nan_to_num(1.0).clamp(max=1.0)
        factor = (
            (variance_ratios * share + (1 - share))
            .where(variance_ratios > 0, 1.0)
            .clamp(*self.factor_range)
        )
        last = self.vectors["factor"]
        least, most = last * (1 - self.factor_change), last * (1 + self.factor_change)
        last.copy_(factor.clamp(least, most))
        frozen = kept.where(weight > 0, 1.0) * last
        if self.has_late_elements:
            # their gradients may increase those of all tensors, whose averages no longer fit
            frozen = torch.minimum(frozen, MAX_LATE_RATIO * trust)
        return torch.where(is_frozen, frozen, trust)

    @property
    def _first_compressed(self) -> int:
        """Index of the first tensor that is compressed."""
        offset = self.flat_params.num_uncompressed
        return max((part.last for part in self.flat_params.parts if part.begin < offset), default=0)

    def _indexed_tensors(self) -> Iterator[tuple[GroupSlice, int]]:
        """Iterate over the indices of all tensors, each with its group slice."""
        for part in self.flat_params.parts:
            for index in range(part.first, part.last):
                yield part, index

    def _tiles(self) -> Iterator[slice]:
        """Iterate over the tiles of all tensors."""
        for segment in self.flat_params.segments:
            yield from segment.tiles

    def _fresh(self, part: GroupSlice) -> Tensor:
        offset = self.flat_params.num_uncompressed
        return self.vectors["fresh"][part.begin - offset : part.end - offset]

    def _split_by_tensor(self, coded: Tensor) -> list[Tensor]:
        """Return a view of `coded` (n - d,) for each compressed tensor."""
        offset = self.flat_params.num_uncompressed
        segments = self.flat_params.segments[self._first_compressed :]
        return [coded[each.begin - offset : each.end - offset] for each in segments]

    def _num_active(self) -> Tensor:
        """Return the number of active elements of each compressed tensor, at least 1."""
        active = self.vectors.get("active")
        if active is None:
            sizes = self.flat_params.segments[self._first_compressed :]
            counts = self._tensor_values([each.end - each.begin for each in sizes])
        else:
            counts = torch.stack([each.sum() for each in self._split_by_tensor(active)]).double()
        return counts.clamp(min=1)

    def _tensor_values(self, numbers: Sequence[float]) -> Tensor:
        """Return numbers as a float64 tensor on the device, without waiting for the device."""
        on_host = torch.tensor(numbers, dtype=torch.float64)
        return on_host.to(self.flat_params.device, non_blocking=True)

    def _norms(self, tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors))


def _flat(parameter: Tensor) -> Tensor:
    """Return the parameter as (elements,): a view if it is contiguous, else a copy."""
    return parameter.detach().flatten()
