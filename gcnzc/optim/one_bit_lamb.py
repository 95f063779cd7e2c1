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
`gcnzc.optim.inactive`; a tensor with zero momentum at the freeze is inactive as a
whole. While a tensor has elements that are settling, its c and C are computed as in the warm-up,
and a new tensor gets its k when they have settled. After elements have begun late, C f is at most
2 c: their gradients may increase those of other tensors, whose C no longer fits.

Notation: P parameters, n elements, the first d of them in groups with `compress=False`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.flat import Segment
from gcnzc.optim.one_bit_adam import OneBitAdam
from gcnzc.optim.options import option
from gcnzc.optim.state import vector
from gcnzc.optim.validation import check_above_zero, check_fraction

# largest k: a tensor whose momentum has almost vanished must not dominate the others when it grows
MAX_SCALING = 1e6

# After elements have begun late, the largest ratio of a tensor's coefficient to its present trust
# ratio. Compression errors increase updates, so that a limit of 1 would slow all tensors down.
MAX_LATE_RATIO = 2.0


def check_limits(name: str, limits: tuple[float, float]) -> None:
    """Check a smallest and a largest value above 0; raises ValueError."""
    for index, limit in enumerate(limits):
        check_above_zero(f"{name}[{index}]", limit)
    if limits[0] > limits[1]:
        raise ValueError(f"{name} is {limits}\n\nhint: give the smaller value first")


def of_tensors(initial: float = 0) -> Any:
    """Declare a number (P,) float64 for each tensor."""
    return vector(lambda own: len(own.flat.segments), torch.float64, initial=initial)


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
        reactivate: "step" reactivates elements that were inactive at the freeze once they have a
            gradient, as in `OneBitAdam`; "refresh" leaves them inactive.
        options: see `OneBitAdam`; there is no refresh. `variance_floor` also limits the fresh
            variance.
    """

    trust_range: tuple[float, float] = option((0.01, 10.0), check_limits)
    trust_beta: float = option(0.9, check_fraction)
    factor_range: tuple[float, float] = option((0.5, 4.0), check_limits)
    factor_change: float = option(0.1, check_fraction)
    refresh = refresh_steps = 0

    trust: Tensor = of_tensors()
    """(P,) float64: the average C of each tensor"""
    trust_weight: Tensor = of_tensors()
    """(P,) float64: its sum of weights"""
    factor: Tensor = of_tensors(1)
    """(P,) float64: the last f"""
    scaling: Tensor = of_tensors()
    """(P,) float64: k, 0 for an inactive tensor"""
    fresh: Tensor = vector(exists=lambda own: own.frozen_at > 0)
    """(n,): the fresh variance w, after the freeze"""

    @property
    def scale_elements(self) -> int | None:
        """See `InactiveElements`; 1, because k gives all tensors the same magnitude."""
        return 1

    @property
    def compressed(self) -> list[tuple[int, Segment]]:
        """The compressed tensors, with their indices."""
        first = self.flat.num_uncompressed
        return [pair for pair in enumerate(self.flat.segments) if pair[1].here.start >= first]

    def before_exchange(self, momenta: Tensor) -> None:
        """See `OneBitAdam`."""
        scaling = [self.scaling[index] for index, _ in self.compressed]
        torch._foreach_mul_(self._split(momenta), scaling)

    def after_exchange(self, momenta: Tensor, work: Tensor) -> None:
        """See `OneBitAdam`; also updates the fresh variance."""
        divisors = self.scaling.where(self.scaling > 0, torch.inf)
        for index, segment in self.compressed:
            beta1, beta2 = segment.options["betas"]
            for here in self.flat.tiles_of(segment.here):
                own = momenta[here].div_(divisors[index])
                # the mean gradient, reconstructed from the new momentum
                gradient = torch.mul(self.momentum[here], beta1, out=work[: len(own)])
                torch.sub(own, gradient, out=gradient).div_(1 - beta1)
                self.fresh[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                self.momentum[here] = own
        # a compressed mean of 0 is no momentum of these
        self.fresh[self.settling] = 0

    def refresh_variance(self, gradients: Tensor) -> None:
        """See `OneBitAdam`; updates the fresh variance."""
        for here, options in self.flat.slices(self.flat.num_uncompressed):
            gradient, beta2 = gradients[here], options["betas"][1]
            self.fresh[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.active is not None:
            self.fresh.masked_fill_(~self.active, 0)

    def join(self, joined: Tensor) -> None:
        """See `InactiveElements`; also initializes the fresh variance, and k of new tensors."""
        super().join(joined)
        self.fresh[joined] = self.variance[joined]
        self._scale()

    def freeze(self) -> None:
        """See `OneBitAdam`."""
        if not self.compressed:
            # it remains LAMB
            return
        # a tensor with zero momentum has no scaling, so all its elements are inactive
        moves = _norms(self._split(self.momentum)) > 0
        torch._foreach_mul_(self._split(self.variance), list(moves))
        super().freeze()
        self.fresh = self.variance.clone()
        self._scale()

    def _scale(self) -> None:
        """Set the scaling of active tensors that have none yet.

        At the freeze it follows from their momenta. A tensor that begins late has a variance, but
        perhaps hardly any momentum; it gets the mean magnitude of the others.
        """
        momentum, variance = self.momentum, self.variance
        if self.active is not None:
            momentum, variance = momentum.where(self.active, 0), variance.where(self.active, 0)
        roots = self._num_active().sqrt().to(self.flat.dtype)
        magnitudes = [
            (_norms(self._split(each)) / roots).double() for each in (momentum, variance.sqrt())
        ]
        scaling = self.scaling[self.compressed[0][0] :]
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

    def move_parameters(self, work: Tensor, end: int | None = None) -> None:
        """See `InactiveElements`: compute each tensor's update in `work`, scale it, and take it."""
        segments, had_gradient = self.flat.segments, self.had_gradient.tolist()
        tile, floors = work.new_empty(self.flat.tile_elements), self._variance_floors()
        measured = [
            self._compute_update(segment, floors[index], work, tile)
            for index, segment in enumerate(segments)
        ]
        rates = self._tensor_values([-float(segment.options["lr"]) for segment in segments])
        sizes = rates * self._compute_ratios(*torch.stack(measured).unbind(1))
        for index, segment in enumerate(segments):
            if not had_gradient[index]:
                continue
            for own, here in self._tiles(segment):
                update = tile[: len(own)].copy_(own).mul_(segment.options["weight_decay"])
                update.add_(work[here]).mul_(sizes[index])
                own += update.to(own.dtype)

    def _tiles(self, segment: Segment) -> Iterator[tuple[Tensor, slice]]:
        """Iterate over the tiles of a tensor: its elements, which may be changed, and the slice."""
        # a view if it is contiguous, else a copy
        flat = segment.parameter.detach().flatten()
        for here in self.flat.tiles_of(segment.here):
            yield flat[here.start - segment.here.start : here.stop - segment.here.start], here
        if flat.data_ptr() != segment.parameter.data_ptr():
            segment.parameter.copy_(flat.view_as(segment.parameter))

    def _compute_update(
        self, segment: Segment, floor: Tensor, work: Tensor, tile: Tensor
    ) -> Tensor:
        """Write a tensor's update without weight decay into `work`, and measure its norms.

        Args:
            segment: the tensor.
            floor: (), the lower limit of its fresh variance.
            work: (n,), receives the update.
            tile: (elements of a tile,), overwritten.

        Returns:
            (4,) float64: the largest ratio of the frozen to the fresh denominator sqrt(V) + eps, or
            0 if the variance is not frozen or the tensor is inactive; and the norms of the
            parameter, of this update, and of the update with weight decay.
        """
        options, is_frozen = segment.options, self.num_updates(segment.here) is None
        # limits the ratio if the fresh variance and eps are 0
        most = torch.finfo(self.flat.dtype).max
        found: list[list[Tensor]] = [[], [], [], []]
        for parameter, here in self._tiles(segment):
            update, own = work[here], tile[: here.stop - here.start]
            self.write_roots(here, options, update)
            if is_frozen:
                # the same floor as of the frozen variance; else the smallest elements would
                # determine the maximum over their tensor
                fresh = torch.clamp(self.fresh[here], min=floor, out=own)
                change = torch.div(update, fresh.sqrt_().add_(options["eps"]), out=own)
                if self.active is not None:
                    change.masked_fill_(~self.active[here], 0)
                found[0].append(change.amax().clamp(max=most))
            torch.div(self.momentum[here], update, out=update)
            if self.bias_correction:
                update /= 1 - options["betas"][0] ** (self.steps + 1)
            found[2].append(torch.linalg.vector_norm(update))
            own.copy_(parameter)
            found[1].append(torch.linalg.vector_norm(own))
            own.mul_(options["weight_decay"]).add_(update)
            found[3].append(torch.linalg.vector_norm(own))
        nothing = floor.new_zeros((), dtype=torch.float64)
        change, *norms = (torch.stack(each).double() if each else nothing for each in found)
        # the norm of the tiles' norms; with one tile, exactly its norm
        return torch.stack([change.amax(), *map(torch.linalg.vector_norm, norms)])

    def _variance_floors(self) -> Tensor:
        """Return the lower limit (P,) of each tensor's fresh variance; 0 if it has none."""
        floors = self._tensor_values([0.0] * len(self.flat.segments))
        if self.is_frozen and self.variance_floor:
            sums = torch.stack([each.sum() for each in self._split(self.fresh)])
            first = self.compressed[0][0]
            floors[first:] = self.variance_floor * sums / self._num_active()
        return floors.to(self.flat.dtype)

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
        average, weight = self.trust, self.trust_weight
        is_known = (parameter_norms > 0) & (decayed_norms > 0)
        # norms that overflow have no ratio
        trust = (parameter_norms / decayed_norms).double().nan_to_num(1.0)
        trust = trust.clamp(*self.trust_range).where(is_known, 1.0)
        is_frozen = torch.zeros_like(is_known)
        # as in the warm-up, the ratio of a tensor with settling elements is up to date
        settling = [segment for segment, _ in self.settling_slices()]
        for index, segment in self.compressed if self.is_frozen else ():
            is_frozen[index] = segment not in settling
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
        last = self.factor
        least, most = last * (1 - self.factor_change), last * (1 + self.factor_change)
        last.copy_(factor.clamp(least, most))
        frozen = kept.where(weight > 0, 1.0) * last
        if self.reactivate_from:
            # their gradients may increase those of all tensors, whose averages no longer fit
            frozen = torch.minimum(frozen, MAX_LATE_RATIO * trust)
        return torch.where(is_frozen, frozen, trust)

    def _split(self, vector: Tensor) -> list[Tensor]:
        """Return a view of a vector (n,) for each compressed tensor."""
        return [vector[segment.here] for _, segment in self.compressed]

    def _num_active(self) -> Tensor:
        """Return the number of active elements of each compressed tensor, at least 1."""
        if self.active is None:
            counts = self._tensor_values([s.parameter.numel() for _, s in self.compressed])
        else:
            counts = torch.stack([each.sum() for each in self._split(self.active)]).double()
        return counts.clamp(min=1)

    def _tensor_values(self, numbers: Sequence[float]) -> Tensor:
        """Return numbers as a float64 tensor on the device, without waiting for the device."""
        on_host = torch.tensor(numbers, dtype=torch.float64)
        return on_host.to(self.flat.device, non_blocking=True)


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors))
