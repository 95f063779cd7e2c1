"""1-bit Adam: signs of momenta in place of gradients, once the variance is frozen.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed" (2021, https://arxiv.org/abs/2102.02888). With a constant variance Adam's step is linear in
the momentum, so that what compression leaves out of one step is made up for in later ones.

    warm-up   g = mean_i g_i          m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
    freeze    V = v / (1 - b2^t)
    after     m_i = b1 m + (1 - b1) g_i     m <- compressed mean of m_i
    always    x <- x - lr (m / (1 - b1^t) / (sqrt(V) + eps) + weight_decay x)

Beyond the paper: an element whose variance is 0 when it freezes, such as of an embedding's row that
was never looked up, would take steps of lr times scale / eps. It is left out of scales and errors,
and stays where it is until a worker has a gradient for it; then all take a dense step, to
which workers give all gradients that such elements had by then, and which gives these a variance.
From one such step to the next there are 1, 2, 4, ... 256 others at least. An element whose variance
is small, such as of a row that was looked up long ago, would take large steps; its variance is
raised to a share of the mean of its parameter's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Dense, Reducer, Sign
from gcnzc.exchange import Algorithm, Group
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.defaults import REFRESH, WARMUP
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.base import Replicated
from gcnzc.optim.synchronous.freeze_rule import FreezeRule
from gcnzc.optim.validation import (
    check_at_least_zero,
    check_count,
    check_fraction,
    check_unsupported,
)
from gcnzc.system.scalars import read_scalars, scalars_like

# most steps between two dense steps in which elements join; they begin at 1, and double
MOST_JOIN_GAP = 256


# what becomes of elements that have a gradient for the first time after the variance froze
WAKE = ("join", "stay")


class OneBitAdam(Replicated):
    """Adam with decoupled weight decay, whose momenta are exchanged as signs after a warm-up.

    With one worker it is `torch.optim.AdamW`, and during the warm-up that of the mean gradients. A
    parameter that never had a gradient on any worker is left alone; one without a gradient at some
    step takes part with zeros.

    Args:
        params: as torch's optimizers take them; a group's `compress=False` stays dense, with a
            variance that moves on.
        lr: step size.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the variance.
        weight_decay: share of a parameter that is taken off it for each unit of `lr`.
        warmup: steps before the variance freezes; None to see when it has settled. "default" takes
            0.15 of `total_steps`, or 100 steps if these are not known.
        warmup_range: fewest and most steps, if `warmup` is None. If the most is None, the warm-up
            ends after 5 / (1 - beta2) steps and a quarter of `total_steps` at the latest.
        refresh: steps from the freeze to the first refresh of the variance; each next one is twice
            as far from it. 0 for none.
        refresh_steps: dense steps of a refresh, at most `refresh`. Together they forget as much of
            the variance as steps of Adam would have since the last one.
        compress: how momenta are exchanged after the warm-up.
        dense: how gradients are exchanged before.
        bias_correction: False for the paper's form, with its larger first steps.
        wake: "join" or "stay": what becomes of elements that were asleep when the variance froze.
        floor: least variance of an element after the warm-up, as a share of the mean over those of
            its parameter that are not asleep; 0 for none, as in the paper.
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
        warmup: int | str | None = "default",
        warmup_range: tuple[int, int | None] = (0, None),
        refresh: int = REFRESH,
        refresh_steps: int = 16,
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
        if wake not in WAKE:
            raise ValueError(f"no way {wake!r} to wake\n\nhint: {' or '.join(WAKE)}")
        if refresh_steps < 1:
            raise ValueError(
                f"a refresh of {refresh_steps} steps\n\nhint: at least 1; refresh=0 for no refresh"
            )
        check_at_least_zero("floor", floor)
        check_count("refresh", refresh)
        if isinstance(warmup, str):
            if warmup != "default":
                raise ValueError(
                    f"warmup is {warmup!r}\n\nhint: a number of steps, 'default', or None to see "
                    "when the variance has settled"
                )
            warmup = WARMUP.warmup_steps(total_steps)
        elif warmup is not None:
            check_count("warmup", warmup)
        check_count("warmup_range[0]", warmup_range[0])
        if warmup_range[1] is not None:
            check_count("warmup_range[1]", warmup_range[1], warmup_range[0])
        check_fraction("betas[1]", betas[1])
        self.wake, self.floor = wake, floor
        self.warmup: int | None = warmup
        self.refresh, self.refresh_steps = refresh, min(refresh_steps, refresh)
        self.compress, self.dense = compress or Sign(), dense or Dense()
        self.bias_correction = bias_correction
        self.rule = FreezeRule(betas[1], warmup_range[0])
        most = warmup_range[1]
        if most is None:
            # a variance that never settles must not prevent compression
            most = WARMUP.most_auto_steps(self.rule.interval, total_steps)
        self.rule.most = max(most, warmup_range[0])
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["maximize"] = maximize
        super().__init__(
            params,
            defaults,
            group,
            clip_norm=clip_norm,
            signals=signals,
            total_steps=total_steps,
            module=module,
        )
        space = self.space
        self.vectors = {"momentum": space.zeros(), "variance": space.zeros()}
        self.vectors["awake"] = torch.zeros(len(space.segments), dtype=torch.bool)
        # `wakes`: elements that slept have a gradient; the next step from `join_from` on is dense
        self.numbers = {"frozen_at": 0, "wakes": False, "norms": []}
        # `next_refresh`: the first step of it; `fresh_at`: the last step of the one before
        self.numbers |= {"next_refresh": 0, "fresh_at": 0, "join_from": 0, "join_gap": 1}
        self.waiting: Tensor | None = None
        """(elements that sleep,): sums of this worker's gradients since they might join last"""
        self._inactive: Tensor | None = None
        self._dense = self.whole(self.dense, space.num_elements)
        self._dense_part = self.whole(self.dense, space.num_dense)

    def layout(self) -> list[str]:
        """See `Replicated`."""
        options = f"warmup {self.warmup} {self.rule}, {self.wake}"
        options += f", refresh {self.refresh} {self.refresh_steps}"
        options += f", floor {self.floor:g}"
        return [*super().layout(), f"{options}, {self.compress}, {self.dense}"]

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over."""
        return bool(self.numbers["frozen_at"])

    def late_phase(self) -> str:
        """See `DistributedOptimizer`."""
        return "" if self.is_frozen else "compression"

    @property
    def is_dense_step(self) -> bool:
        """Whether the next step exchanges whole gradients."""
        if not self.is_frozen:
            return True
        if self.numbers["wakes"] and self.steps + 1 >= self.numbers["join_from"]:
            return True
        return bool(self.refresh) and self.steps + 1 >= self.numbers["next_refresh"]

    @property
    def num_notes(self) -> int:
        """Signals, and which parameters have a gradient, or how many elements would wake."""
        return self.num_common_notes + (len(self.space.segments) if self.is_dense_step else 1)

    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`."""
        if self.is_dense_step:
            return (yield from self._dense_step(values))
        return (yield from self._compressed_step(values))

    @torch.no_grad()
    def _dense_step(self, values: Tensor) -> Algorithm[str]:
        flags = self.notes(values)[self.num_common_notes :]
        flags.copy_(scalars_like(self.space.have_gradients(), values))
        if self.waiting is not None:
            # what woke elements since the last dense step is given to this one
            dense, end = self.space.num_dense, self.space.num_elements
            values[dense:end].index_add_(0, self._find_inactive(), self.waiting)
        if skip_reason := (yield from self.dense_mean(values)):
            return skip_reason
        sums = self._dense.note_sums
        self.hear(sums)
        self.vectors["awake"] |= torch.tensor(sums[self.num_common_notes :]) > 0
        for part in self.space.parts:
            self._average(part, values, with_variance=not self._is_still(part))
        if self.is_frozen:
            self._bring_up_to_date(values)
        self._apply(values)
        self._consider_freezing()
        return ""

    @torch.no_grad()
    def _compressed_step(self, values: Tensor) -> Algorithm[str]:
        yield from self.clipped(values)
        space, active = self.space, self.vectors.get("active")
        dense, end = space.num_dense, space.num_elements
        coded = values[dense:].clone()
        momenta, notes = coded[: end - dense], coded[end - dense :]
        asleep = None if active is None else values[dense:end][self._find_inactive()]
        notes[-1] = 0 if asleep is None else self._count_waking(asleep)
        for part in space.parts:
            if part.begin >= dense:
                beta = part.group["betas"][0]
                for here in space.tiles(part.begin, part.end):
                    own = momenta[here.start - dense : here.stop - dense]
                    torch.mul(self.vectors["momentum"][here], beta, out=own)
                    own.add_(values[here], alpha=1 - beta)
        self._before_exchange(momenta)
        if dense and (skip_reason := (yield from self._dense_part.mean(values[:dense]))):
            return skip_reason
        if skip_reason := (yield from self.reducers["momentum"].mean(coded, self.num_notes)):
            return skip_reason
        sums = self.reducers["momentum"].note_sums
        self.hear(sums)
        self.wait(asleep, sums[-1])
        for part in space.parts:
            if part.begin < dense:
                self._average(part, values, with_variance=True)
        self._after_exchange(momenta, values)
        self._awaken_dense(values)
        self._apply(values)
        return ""

    def _before_exchange(self, momenta: Tensor) -> None:
        """Change this worker's momenta (n - d,) in place to what is exchanged."""

    def _after_exchange(self, momenta: Tensor, values: Tensor) -> None:
        """Take up what was exchanged (n - d,), and may change; `values` is memory to work in."""
        self.vectors["momentum"][self.space.num_dense :] = momenta

    def wait(self, asleep: Tensor | None, waking: float) -> None:
        """Keep the gradients of elements that sleep until the next step in which they may join.

        Args:
            asleep: their gradients on this worker; None if no element sleeps.
            waking: how many would wake, on all workers.
        """
        if asleep is None or self.wake == "stay":
            return
        self.waiting = asleep if self.waiting is None else self.waiting.add_(asleep)
        self.bound_sums(self.waiting)
        self.numbers["wakes"] |= waking > 0

    def _count_waking(self, gradients: Tensor) -> Tensor:
        """Count the elements whose gradient can give them a variance.

        NaN if a gradient is not finite. The exchange checks only active elements; this note makes
        all ranks skip the step before such a gradient is added to `waiting`.
        """
        # a square that is rounded to 0 would ask for one dense step after the other
        count = (gradients.square() > torch.finfo(gradients.dtype).tiny).sum()
        return torch.where(are_finite(gradients), count.to(gradients.dtype), torch.nan)

    def _awaken_dense(self, means: Tensor) -> None:
        """Note which dense parameters have a gradient for the first time, as all workers see it."""
        awake = self.vectors["awake"]
        asleep = {
            place: means[segment.begin : segment.end].any()
            for place, segment in enumerate(self.space.segments)
            if segment.begin < self.space.num_dense and not awake[place]
        }
        if asleep:
            for place, (has_gradient,) in zip(asleep, read_scalars(*asleep.values()), strict=True):
                awake[place] = has_gradient > 0

    def _average(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        here, (beta1, beta2) = slice(part.begin, part.end), part.group["betas"]
        gradient = values[here]
        self.vectors["momentum"][here].lerp_(gradient, 1 - beta1)
        if with_variance:
            variance = self.vectors["variance"][here]
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _is_still(self, part: GroupSlice) -> bool:
        """Whether the variance of a part is frozen, and without bias."""
        return self.is_frozen and part.begin >= self.space.num_dense

    def _apply(self, values: Tensor) -> None:
        """Take the step; `values` is memory to work in."""
        step, space = self.steps + 1, self.space
        roots, momenta = space.views(values), space.views(self.vectors["momentum"])
        parameters, awake = space.parameters, self.vectors["awake"].tolist()
        for part in space.parts:
            here, options = slice(part.begin, part.end), part.group
            (beta1, beta2), lr = options["betas"], float(options["lr"])
            decay, size = options["weight_decay"], -lr
            root = torch.sqrt(self.vectors["variance"][here], out=values[here])
            if self.bias_correction:
                size /= 1 - beta1**step
                if not self._is_still(part):
                    root /= (1 - beta2**step) ** 0.5
            root += options["eps"]
            for place in range(part.first, part.last):
                if awake[place]:
                    pair = momenta[place], roots[place]
                    self._move(parameters[place], *pair, size, lr, decay)

    def _move(
        self,
        parameter: Tensor,
        momentum: Tensor,
        root: Tensor,
        size: float,
        lr: float,
        decay: float,
    ) -> None:
        parameter.mul_(1 - lr * decay)
        if parameter.dtype == momentum.dtype:
            parameter.addcdiv_(momentum, root, value=size)
        else:
            parameter += (momentum / root * size).to(parameter.dtype)

    def _consider_freezing(self) -> None:
        step = self.steps + 1
        if self.is_frozen or self.group.world_size == 1:
            return
        if self.warmup is not None:
            if step >= self.warmup:
                self._freeze(step)
            return
        norm = None
        self.rule.norms = self.numbers["norms"]
        if self.rule.is_due(step):
            norm = float(self.vectors["variance"][self.space.num_dense :].double().sum())
            norm /= 1 - self.rule.beta2**step
        if self.rule.wants(step, norm):
            self._freeze(step)

    def _freeze(self, step: int) -> None:
        self.numbers["frozen_at"] = step
        self.numbers |= {"next_refresh": step + self.refresh, "fresh_at": step}
        variance, dense = self.vectors["variance"], self.space.num_dense
        if self.bias_correction:
            for part in self.space.parts:
                if part.begin >= dense:
                    variance[part.begin : part.end] /= 1 - part.group["betas"][1] ** step
        self._raise_small_variances()
        self.reducers = {"momentum": self._coder()}
        self._keep_to(variance[dense:] > 0)

    def _find_inactive(self) -> Tensor:
        """(elements that sleep,) int64: where they lie in (n - d,).

        Kept as long as the same elements are inactive: the host waits for a GPU to find them.
        """
        if self._inactive is None:
            # of a state that was loaded
            self._inactive = (~self.vectors["active"]).nonzero().flatten()
        return self._inactive

    def _raise_small_variances(self) -> None:
        if not self.floor:
            return
        for segment in self.space.segments:
            if segment.begin < self.space.num_dense:
                continue
            variance = self.vectors["variance"][segment.begin : segment.end]
            awake = variance > 0
            least = self.floor * variance.sum() / awake.sum().clamp(min=1)
            variance.copy_(torch.where(awake, torch.maximum(variance, least), variance))

    def _coder(self) -> Reducer:
        return self.reducer(self.compress, self.space.num_elements - self.space.num_dense)

    def _keep_to(self, active: Tensor) -> None:
        """Let the elements that are not active sleep."""
        self.vectors.pop("active", None)
        self.waiting = self._inactive = None
        inactive = (~active).nonzero().flatten()
        if len(inactive):
            self._inactive = inactive
            self.vectors["active"] = active
            self.vectors["momentum"][self.space.num_dense :].masked_fill_(~active, 0)
        self.reducers["momentum"].keep_to(self.vectors.get("active"))

    def _bring_up_to_date(self, values: Tensor) -> None:
        """Let elements join, and refresh the variance if it is time, from mean gradients."""
        dense, step, numbers = self.space.num_dense, self.steps + 1, self.numbers
        is_refresh = bool(self.refresh) and step >= numbers["next_refresh"]
        # of this refresh, and the steps from the end of the one before to its end
        last = numbers["next_refresh"] + self.refresh_steps - 1
        passed = last - numbers["fresh_at"]
        if is_refresh and step == last:
            gap = numbers["next_refresh"] - numbers["frozen_at"]
            numbers |= {"next_refresh": numbers["next_refresh"] + gap, "fresh_at": step}
        active = self.vectors.get("active")
        for part in self.space.parts:
            if part.begin < dense:
                continue
            gradient = values[part.begin : part.end]
            variance = self.vectors["variance"][part.begin : part.end]
            square = gradient.square()
            if is_refresh:
                beta2 = part.group["betas"][1] ** (passed / self.refresh_steps)
                refreshed = variance * beta2 + square * (1 - beta2)
            else:
                refreshed = variance.clone()
            if active is not None:
                # the first gradient of an element is all that is known of its variance
                asleep = ~active[part.begin - dense : part.end - dense]
                refreshed = torch.where(asleep, square, refreshed)
            variance.copy_(refreshed)
        if self.numbers["wakes"] or is_refresh:
            self._raise_small_variances()
            self._keep_to(self.vectors["variance"][dense:] > 0)
        if self.numbers["wakes"]:
            # where elements wake all the time, dense steps become rare all the same
            gap = self.numbers["join_gap"]
            self.numbers |= {"join_from": step + gap, "join_gap": min(2 * gap, MOST_JOIN_GAP)}
            self.numbers["wakes"] = False

    @property
    def state_bytes(self) -> int:
        """See `Replicated`; with what is kept of elements that sleep."""
        kept = [each for each in (self.waiting, self._inactive) if each is not None]
        return super().state_bytes + sum(each.nbytes for each in kept)

    def snapshot(self) -> dict[str, Any]:
        """See `Replicated`; `local` has the gradients of elements that sleep."""
        local = {} if self.waiting is None else {"waiting": self.waiting}
        return {**super().snapshot(), "local": local}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().restore(snapshot)
        self._inactive = None
        waiting = snapshot["local"].get("waiting")
        self.waiting = None if waiting is None else self.restore_sums(waiting)

    def restore_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See `Replicated`."""
        self.reducers = {"momentum": self._coder()} if self.is_frozen else {}
        for reducer in self.reducers.values():
            reducer.active = self.vectors.get("active")
        super().restore_errors(errors)
