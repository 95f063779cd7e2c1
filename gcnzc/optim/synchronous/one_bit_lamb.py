"""1-bit LAMB: 1-bit Adam with a trust ratio for each tensor.

Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed" (2021, https://arxiv.org/abs/2104.06069). LAMB takes a step of |x| / |u| for each
tensor. That ratio is lost with the variance when it freezes; its average over the warm-up is kept,
and scaled by how far a variance of the momenta that are received has moved from the frozen one.

    always    u = m / (1 - b1^t) / (sqrt(V) + eps) + weight_decay x
    warm-up   m, v, V as in 1-bit Adam     c = |x| / |u| in trust_range     C = average of c
              x <- x - lr c u
    freeze    w = v / (1 - b2^t)     k = (mean over the tensors of rms(m)) / rms(m)
    after     k m <- compressed mean of k (b1 m + (1 - b1) g_i)
              g = (m - b1 m_before) / (1 - b1)     w <- b2 w + (1 - b2) g^2
              f = max (sqrt(V) + eps) / (sqrt(w) + eps), in factor_range, near the f before
              x <- x - lr C f u

C is an exponential average with trust_beta over the n steps in which c is not 1. At the freeze it
is divided by 1 - trust_beta^n, unless bias_correction is off. With a weight decay f counts in the
share of u that is not decay. By k all tensors are of one magnitude while they are compressed.
Elements that never had a gradient sleep as in `one_bit_adam`; a tensor whose momentum is 0 at the
freeze sleeps as a whole, and gets its k and C when it wakes.

Letters: P parameters, n elements, d of them dense.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression
from gcnzc.exchange import Group
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.one_bit_adam import OneBitAdam
from gcnzc.optim.validation import check_fraction, check_unsupported

# of k: a tensor whose momentum has all but died away must not drown the others when it comes back
MOST_SCALING = 1e6


class OneBitLamb(OneBitAdam):
    """LAMB, whose momenta are exchanged as signs after a warm-up.

    With one worker, and during the warm-up, it is LAMB with the mean gradient.

    Args:
        params: as torch's optimizers take them; a group's `compress=False` stays dense, with a
            variance and trust ratios that move on.
        lr: step size, for a trust ratio of 1.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the variance.
        weight_decay: share of a parameter that is added to its update.
        trust_range: least and largest trust ratio: the norm of x divided by that of u, or 1 where
            one of them is 0.
        trust_beta: of the average of trust ratios; the warm-up should be longer than 1 / (1 -
            trust_beta).
        factor_range: least and largest factor by which that average is scaled.
        factor_change: share by which the factor may change in a step.
        warmup: steps before the variance freezes; None to see when it has settled. "default" takes
            0.15 of `total_steps`, or 100 steps if these are not known.
        warmup_range: fewest and most steps, if `warmup` is None. If the most is None, the warm-up
            ends after 5 / (1 - beta2) steps and a quarter of `total_steps` at the latest.
        compress: how momenta are exchanged after the warm-up.
        dense: how gradients are exchanged before.
        bias_correction: False for the paper's form, with its larger first steps.
        wake: "join" or "stay": what becomes of elements that were asleep when the variance froze.
        floor: least variance of an element after the warm-up, frozen or fresh, as a share of the
            mean over those of its parameter that are not asleep; 0 for none, as in the paper.
        group: of all workers; None for those of torch.distributed as it was initialised.
        clip_norm: largest norm of the gradient.
        signals: see `Replicated`.
        total_steps: of the run, of which the warm-up is a share; None if that is not known. One of
            rank 0's warnings, `LatePhaseWarning`, says that compression begins late in it.
        module: see `DistributedOptimizer`.
        maximize: whether to step along the gradient instead of against it.
        unsupported: options of torch's Adam that may be given if they are off: `amsgrad`,
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
        dense: Compression | None = None,
        bias_correction: bool = True,
        wake: str = "join",
        floor: float = 1e-4,
        group: Group | None = None,
        clip_norm: float | None = None,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        maximize: bool = False,
        **unsupported: object,
    ) -> None:
        check_unsupported(type(self).__name__, unsupported)
        for name, (least, most) in {"trust": trust_range, "factor": factor_range}.items():
            if not 0 < least <= most:
                raise ValueError(
                    f"no {name}_range from {least} to {most}\n\nhint: give the least, above 0, and "
                    "the most"
                )
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
            dense=dense,
            bias_correction=bias_correction,
            wake=wake,
            floor=floor,
            group=group,
            clip_norm=clip_norm,
            signals=signals,
            total_steps=total_steps,
            maximize=maximize,
            module=module,
        )
        # (P,) each. `trust`: the average C, of which `trust_weight` is known; `factor`: the last f;
        # `scaling`: k, 0 for a tensor that sleeps
        zeros = self._of_tensors([0.0] * len(self.space.segments))
        self.vectors |= {"trust": zeros, "trust_weight": zeros.clone()}
        self.vectors |= {"factor": zeros + 1, "scaling": zeros.clone()}

    def layout(self) -> list[str]:
        """See `Replicated`."""
        trust = f"trust {self.trust_range} {self.trust_beta}"
        return [*super().layout(), f"{trust}, factor {self.factor_range} {self.factor_change}"]

    def _before_exchange(self, momenta: Tensor) -> None:
        scaling = self.vectors["scaling"][self._first :]
        torch._foreach_mul_(self._each(momenta), list(scaling))

    def _after_exchange(self, momenta: Tensor, values: Tensor) -> None:
        space, dense, scaling = self.space, self.space.num_dense, self.vectors["scaling"]
        momentum, fresh = self.vectors["momentum"], self.vectors["fresh"]
        divisors = scaling.where(scaling > 0, torch.inf)
        for part, place in self._places():
            if not self._is_still(part):
                continue
            beta1, beta2 = part.group["betas"]
            for here in space.tiles(space.segments[place].begin, space.segments[place].end):
                there = slice(here.start - dense, here.stop - dense)
                own = momenta[there].div_(divisors[place])
                # the gradient that the new momentum stands for
                gradient = torch.mul(momentum[here], beta1, out=values[here])
                torch.sub(own, gradient, out=gradient).div_(1 - beta1)
                fresh[there].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                momentum[here] = own

    def _renew(self, gradients: Tensor) -> None:
        """Bring the fresh variance up to date."""
        for part in self._still_parts():
            gradient, beta = gradients[part.begin : part.end], part.group["betas"][1]
            self._fresh(part).mul_(beta).addcmul_(gradient, gradient, value=1 - beta)

    def _bring_up_to_date(self, values: Tensor) -> None:
        """Let elements join, with all that depends on their variance."""
        dense, active = self.space.num_dense, self.vectors.get("active")
        super()._bring_up_to_date(values)
        self._renew(values)
        if active is not None:
            fresh, variance = self.vectors["fresh"], self.vectors["variance"][dense:]
            fresh.copy_(fresh.where(active, variance))
        self._scale()

    def _freeze(self, step: int) -> None:
        dense = self.space.num_dense
        if dense == self.space.num_elements:
            # nothing is exchanged in codes: LAMB goes on
            return
        # a tensor without momentum has no scaling: it sleeps, whatever its variance
        moves = self._norms(self._each(self.vectors["momentum"][dense:])) > 0
        torch._foreach_mul_(self._each(self.vectors["variance"][dense:]), list(moves))
        super()._freeze(step)
        self.vectors["fresh"] = self.vectors["variance"][dense:].clone()
        self._scale()

    def _scale(self) -> None:
        """Give a scaling to the tensors that have momentum, and had none."""
        momenta = self._each(self.vectors["momentum"][self.space.num_dense :])
        scaling = self.vectors["scaling"][self._first :]
        roots = self._counts().sqrt().to(self.space.dtype)
        # on the host, which waits for a GPU once
        known, magnitudes = torch.stack([scaling, (self._norms(momenta) / roots).double()]).cpu()
        are_known = known > 0
        are_new = ~are_known & (magnitudes > 0)
        sent = magnitudes[are_new]
        if bool(are_known.any()):
            # tensors that wake take the magnitude that the others are sent with now
            sent = (known * magnitudes)[are_known]
        known[are_new] = (sent.mean() / magnitudes[are_new]).clamp(max=MOST_SCALING)
        scaling.copy_(known, non_blocking=True)

    def _apply(self, values: Tensor) -> None:
        """Take the step; `values` is memory to work in."""
        space, awake = self.space, self.vectors["awake"].tolist()
        longest = max((each.stop - each.start for each in self._tiles()), default=0)
        work = values.new_empty(longest)
        floors = self._floors()
        measured = [
            self._straighten(part, place, floors[place], values, work)
            for part, place in self._places()
        ]
        rates = [-float(part.group["lr"]) for part, _ in self._places()]
        sizes = self._of_tensors(rates) * self._ratios(*torch.stack(measured).unbind(1))
        for part, place in self._places():
            if not awake[place]:
                continue
            segment, flat = space.segments[place], _flat(space.segments[place].parameter)
            for here in space.tiles(segment.begin, segment.end):
                own = flat[here.start - segment.begin : here.stop - segment.begin]
                update = work[: len(own)].copy_(own).mul_(part.group["weight_decay"])
                update.add_(values[here]).mul_(sizes[place])
                own += update.to(own.dtype)
            if flat.data_ptr() != segment.parameter.data_ptr():
                segment.parameter.copy_(flat.view_as(segment.parameter))

    def _straighten(
        self, part: GroupSlice, place: int, floor: Tensor, values: Tensor, work: Tensor
    ) -> Tensor:
        """Put a tensor's update without decay into `values`, and measure what its step depends on.

        Args:
            part: that the tensor is of.
            place: of the tensor.
            floor: (), what its fresh variance is at least.
            values: (n + k,).
            work: (elements of a tile,), to work in.

        Returns:
            (4,) float64: how many times the root of its fresh variance the frozen one is, at most,
            0 where nothing is frozen, or all sleeps; and the lengths of the parameter, of this
            update, and of the update with decay.
        """
        space, options, step = self.space, part.group, self.steps + 1
        segment, (beta1, beta2) = space.segments[place], part.group["betas"]
        flat, is_still = _flat(segment.parameter), self._is_still(part)
        # finite even if the fresh variance has died away and eps is 0
        most = torch.finfo(space.dtype).max
        found: list[list[Tensor]] = [[], [], [], []]
        for here in space.tiles(segment.begin, segment.end):
            update = torch.sqrt(self.vectors["variance"][here], out=values[here])
            if self.bias_correction and not is_still:
                update /= (1 - beta2**step) ** 0.5
            update += options["eps"]
            own = work[: len(update)]
            if is_still:
                change = self._change(here, update, floor, own, options["eps"])
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
        change, *lengths = (torch.stack(each).double() if each else nothing for each in found)
        # the length of lengths; one tile's own to the bit
        return torch.stack([change.amax(), *map(torch.linalg.vector_norm, lengths)])

    def _change(self, here: slice, root: Tensor, floor: Tensor, out: Tensor, eps: float) -> Tensor:
        """How many times the root of the fresh variance the frozen one is; 0 where it sleeps."""
        there = slice(here.start - self.space.num_dense, here.stop - self.space.num_dense)
        # raised as the frozen one was: else the smallest elements would decide for their tensors
        torch.clamp(self.vectors["fresh"][there], min=floor, out=out).sqrt_().add_(eps)
        torch.div(root, out, out=out)
        active = self.vectors.get("active")
        return out if active is None else out.masked_fill_(~active[there], 0)

    def _floors(self) -> Tensor:
        """(P,): what elements of the fresh variance of each tensor are at least; 0 without one."""
        floors = self._of_tensors([0.0] * len(self.space.segments))
        if self.is_frozen and self.floor:
            sums = torch.stack([each.sum() for each in self._each(self.vectors["fresh"])])
            floors[self._first :] = self.floor * sums / self._counts()
        return floors.to(self.space.dtype)

    def _ratios(self, changes: Tensor, lengths: Tensor, straight: Tensor, norms: Tensor) -> Tensor:
        """(P,): the lengths of the steps, in those of updates; all arguments are (P,).

        Args:
            changes: of their variances; see `_straighten`.
            lengths: of the parameters.
            straight: lengths of the updates without decay.
            norms: lengths of the updates.
        """
        average, weight = self.vectors["trust"], self.vectors["trust_weight"]
        is_known = (lengths > 0) & (norms > 0)
        trust = (lengths / norms).double().clamp(*self.trust_range).where(is_known, 1.0)
        is_still = torch.zeros_like(is_known)
        is_still[self._first :] = self.is_frozen
        # a tensor that wakes after the freeze learns its first ratio then
        learns = is_known & (straight > 0) & ~(is_still & (weight > 0))
        beta = self.trust_beta
        average.copy_((beta * average + (1 - beta) * trust).where(learns, average))
        weight.copy_((beta * weight + (1 - beta)).where(learns, weight))
        kept = average / weight if self.bias_correction else average
        share = (straight / norms).double().clamp(max=1.0).where(norms > 0, 1.0)
        factor = (changes * share + (1 - share)).where(changes > 0, 1.0).clamp(*self.factor_range)
        last = self.vectors["factor"]
        least, most = last * (1 - self.factor_change), last * (1 + self.factor_change)
        last.copy_(factor.clamp(least, most))
        return torch.where(is_still, kept.where(weight > 0, 1.0) * last, trust)

    @property
    def _first(self) -> int:
        """Of the tensors that are exchanged in codes."""
        dense = self.space.num_dense
        return max((part.last for part in self.space.parts if part.begin < dense), default=0)

    def _places(self) -> Iterator[tuple[GroupSlice, int]]:
        """The numbers of all tensors, with the part that each is of."""
        for part in self.space.parts:
            for place in range(part.first, part.last):
                yield part, place

    def _tiles(self) -> Iterator[slice]:
        """Of all tensors."""
        for segment in self.space.segments:
            yield from self.space.tiles(segment.begin, segment.end)

    def _still_parts(self) -> list[GroupSlice]:
        return [part for part in self.space.parts if part.begin >= self.space.num_dense]

    def _fresh(self, part: GroupSlice) -> Tensor:
        dense = self.space.num_dense
        return self.vectors["fresh"][part.begin - dense : part.end - dense]

    def _each(self, coded: Tensor) -> list[Tensor]:
        """The part of each tensor in (n - d,), of those that are exchanged in codes."""
        dense = self.space.num_dense
        segments = self.space.segments[self._first :]
        return [coded[each.begin - dense : each.end - dense] for each in segments]

    def _counts(self) -> Tensor:
        """How many elements of each tensor that is exchanged in codes are awake; at least 1."""
        active = self.vectors.get("active")
        if active is None:
            sizes = self.space.segments[self._first :]
            counts = self._of_tensors([each.end - each.begin for each in sizes])
        else:
            counts = torch.stack([each.sum() for each in self._each(active)]).double()
        return counts.clamp(min=1)

    def _of_tensors(self, numbers: Sequence[float]) -> Tensor:
        """(P,) float64 on the device: some things of tensors."""
        # an ordinary copy would make the host wait for the device
        on_host = torch.tensor(numbers, dtype=torch.float64)
        return on_host.to(self.space.device, non_blocking=True)

    def _norms(self, tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors))


def _flat(parameter: Tensor) -> Tensor:
    """(elements,): a view of the parameter if it lies in one piece, else a copy."""
    return parameter.detach().flatten()
