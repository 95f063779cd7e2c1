"""0/1 Adam: gradients, signs of updates, or no exchange, by a schedule of steps.

Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (2022,
https://arxiv.org/abs/2202.06009). Whole gradients refresh the variance ever more rarely. At other
steps workers agree on the sum u of what they did since they last agreed, sent as signs; later they
also take steps that nobody hears of. The variance V only moves when all agree, so that

    refresh   g = mean_i g_i             m <- b1 m + (1 - b1) g     V <- b2 V + (1 - b2) g^2
              x <- x - lr m / (sqrt(V) + eps)
    alone     m_i <- b1 m_i + (1 - b1) g_i     u_i <- u_i + lr m_i
              x_i = a - u_i / (sqrt(V) + eps)
    agreed    as alone, and then         u <- compressed mean of u_i     m <- u / s
              x <- a - u / (sqrt(V) + eps)

where s is the sum of lr since the last agreement, each lr divided by 1 - b1^t, and s multiplied by
1 - lr weight_decay in every step, as u is; and where a is x as all last had it: parameters are the
same on all workers, to the bit, whenever they agree. Beside the paper, m and V are corrected for
their bias, weight decay is decoupled (of a and u alike, so that x is the same), and the step before
a refresh is one of agreement, so that one mean of gradients serves both m and V.

As in `OneBitAdam`, an element whose variance is 0 sleeps: it is left out of scales and errors, and
stays where it is until all have its gradient. What workers see of it until then is kept for that.

Letters: n elements, d of them dense, c = n - d in codes, P parameters, W workers, k notes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Dense, Sign
from gcnzc.exchange import Algorithm, Group, run
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.anchored import Anchored
from gcnzc.optim.synchronous.one_bit_adam import MOST_JOIN_GAP, WAKE
from gcnzc.optim.synchronous.zero_one_schedule import Exchange, ZeroOneSchedule
from gcnzc.optim.validation import check_at_least_zero, check_unsupported
from gcnzc.system.scalars import scalars_like


class ZeroOneAdam(Anchored):
    """Adam with decoupled weight decay that exchanges signs of updates, and at some steps nothing.

    With one worker it is `torch.optim.AdamW` whose variance moves at the steps of the schedule.
    Between agreements workers differ: `parameters_averaged` is for evaluation, and `finalize` for
    the end. A gradient that is not finite makes all skip a step with an exchange, with what they
    have as it was. In a step alone its worker goes on with its momentum, and counts it in
    `left_out`: all have then gone as far, which the mean of updates relies on.

    A group's `compress=False` is exchanged densely at every step, also where the rest is silent.
    Signals are told at steps with an exchange of the rest.

    Args:
        params: as torch's optimizers take them.
        lr: step size.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the variance.
        weight_decay: share of a parameter that is taken off it for each unit of `lr`.
        schedule: what is exchanged when; `ZeroOneSchedule.for_run(total_steps)` if None.
        compress: how updates are exchanged.
        dense: how gradients are exchanged.
        bias_correction: False for the paper's form, with its larger first steps.
        wake: "join" or "stay": what becomes of elements that sleep when a worker has a gradient for
            them: all exchange gradients at the step after the next agreement, or wait for the
            schedule's next refresh.
        floor: least variance of an element that is not refreshed at the next step, as a share of
            the mean over those of its parameter that are not asleep; 0 for none, as in the paper.
        group: of all workers; None for those of torch.distributed as it was initialised.
        clip_norm: largest norm of the gradient; in steps alone, of a worker's own.
        signals: see `Replicated`.
        total_steps: of the run, on which the default schedule depends; None if that is not known.
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
        schedule: ZeroOneSchedule | None = None,
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
        check_at_least_zero("floor", floor)
        self.schedule = ZeroOneSchedule.for_run(total_steps) if schedule is None else schedule
        self.wake, self.floor = wake, floor
        self.compress, self.dense = compress or Sign(), dense or Dense()
        self.bias_correction = bias_correction
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
        self.num_coded = space.num_elements - space.num_dense
        # while workers are apart, the coded momenta are this worker's own, and `anchor` (c,) is
        # where they were before
        self.vectors = {"momentum": space.zeros(), "variance": space.zeros()}
        self.vectors["awake"] = torch.zeros(len(space.segments), dtype=torch.bool)
        # `wakes`: sleepers have a gradient; `lengths`: of each part, the sum of lr since agreement
        self.numbers = {"refreshes": 0, "wakes": False, "lengths": [0.0] * len(space.parts)}
        self.numbers |= {"join_from": 0, "join_gap": 1}
        self.update: Tensor | None = None
        """(c,): u_i, while workers are apart"""
        self.waiting: Tensor | None = None
        """(c,): what this worker saw of the gradients of sleepers since all exchanged theirs"""
        self.left_out = 0
        """gradients of this worker that were not finite in a step alone"""
        self._dense = self.whole(self.dense, space.num_elements)
        self._dense_part = self.whole(self.dense, space.num_dense)
        self.reducers = {"update": self.reducer(self.compress, self.num_coded)}

    def layout(self) -> list[str]:
        """See `Replicated`."""
        options = f"{self.schedule.layout()}, {self.wake}, bias correction {self.bias_correction}"
        options += f", floor {self.floor:g}"
        return [*super().layout(), f"{options}, {self.compress}, {self.dense}"]

    def late_phase(self) -> str:
        """See `DistributedOptimizer`; a schedule may also have no local steps."""
        schedule = self.schedule
        has_local_steps = schedule.warmup is not None and schedule.longest > 1
        is_late = has_local_steps and schedule.local_interval(self.steps) == 1
        return "local steps" if is_late else ""

    @property
    def exchange(self) -> Exchange:
        """What is exchanged at the next step; "gradient" with one worker, who has all of it."""
        if self.group.world_size == 1 or self.numbers["wakes"]:
            return "gradient"
        due = self.schedule.exchange(self.steps + 1)
        return "update" if self.is_apart and due == "gradient" else due

    @property
    def num_notes(self) -> int:
        """Signals, and which parameters have a gradient, or how many elements would wake."""
        more = {"gradient": len(self.space.segments), "update": 1, "nothing": 0}
        return self.num_common_notes + more[self.exchange]

    def algorithm(self) -> Algorithm[None]:
        """See `Replicated`."""
        left_out = self.left_out
        yield from super().algorithm()
        if self.left_out > left_out:
            rank = self.group.rank
            self.skip_reason = (
                f"a gradient of worker {rank} is not finite: it went on with its momentum"
            )

    @torch.no_grad()
    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`."""
        exchange = self.exchange
        if exchange == "gradient":
            return (yield from self._refreshed(values))
        if exchange == "update":
            yield from self.clipped(values)
        else:
            self._clip_own(values)
        dense = self.space.num_dense
        if dense and (skip_reason := (yield from self._dense_part.mean(values[:dense]))):
            return skip_reason
        coded = values[dense : self.space.num_elements]
        if exchange == "nothing":
            self._step_alone(coded)
        else:
            notes = self.notes(values)
            notes[-1] = self._count_waiting(coded)
            if skip_reason := (yield from self._agreed(coded, notes)):
                return skip_reason
            sums = self.reducers["update"].note_sums
            self.hear(sums)
            may_join = self.wake == "join" and self.steps + 2 >= self.numbers["join_from"]
            self.numbers["wakes"] = may_join and sums[-1] > 0
        for part in self.space.parts:
            if part.begin < dense:
                self._average(part, values, with_variance=True)
                self._move(part, values)
        return ""

    # --- with whole gradients

    def _refreshed(self, values: Tensor) -> Algorithm[str]:
        """Take a step with the mean of the gradients; the variance moves if it is time."""
        space, numbers = self.space, self.numbers
        coded = values[space.num_dense : space.num_elements]
        flags = self.notes(values)[self.num_common_notes :]
        flags.copy_(scalars_like(self.space.have_gradients(), values))
        if self.waiting is not None:
            coded += self.waiting
            flags += self._have_waiting()
        if skip_reason := (yield from self.dense_mean(values)):
            return skip_reason
        sums = self._dense.note_sums
        self.hear(sums)
        self.vectors["awake"] |= torch.tensor(sums[self.num_common_notes :]) > 0
        is_due = self.schedule.refreshes(self.steps + 1)
        numbers["refreshes"] += is_due
        for part in space.parts:
            with_variance = is_due or part.begin < space.num_dense
            self._average(part, values, with_variance=with_variance)
        if is_due or self.wake == "join":
            self._let_join(coded)
        self._fall_asleep()
        for part in space.parts:
            self._move(part, values)
        return ""

    def _average(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        here, (beta1, beta2) = slice(part.begin, part.end), part.group["betas"]
        gradient = values[here]
        self.vectors["momentum"][here].lerp_(gradient, 1 - beta1)
        if with_variance:
            variance = self.vectors["variance"][here]
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _move(self, part: GroupSlice, values: Tensor) -> None:
        """Take Adam's step with momenta that all have; `values` is memory to work in."""
        space, lr = self.space, float(part.group["lr"])
        here, size = slice(part.begin, part.end), self._size(part)
        self._root(part, values[here])
        roots, momenta = space.views(values), space.views(self.vectors["momentum"])
        awake, decay = self.vectors["awake"].tolist(), 1 - lr * part.group["weight_decay"]
        for place in range(part.first, part.last):
            if not awake[place]:
                continue
            parameter = space.parameters[place].mul_(decay)
            if parameter.dtype == space.dtype:
                parameter.addcdiv_(momenta[place], roots[place], value=-size)
            else:
                parameter -= (momenta[place] / roots[place] * size).to(parameter.dtype)

    def _let_join(self, gradient: Tensor) -> None:
        """Give sleepers a variance: their first gradient is all that is known of it."""
        active = self.vectors.get("active")
        for part in self._coded_parts():
            if active is not None:
                here = self._of_coded(part)
                asleep, first = ~active[here], gradient[here].square()
                if self.bias_correction:
                    first *= 1 - part.group["betas"][1] ** self.numbers["refreshes"]
                variance = self.vectors["variance"][part.begin : part.end]
                variance.copy_(torch.where(asleep, first, variance))
        if self.numbers["wakes"]:
            # where elements wake all the time, dense steps become rare all the same
            step, gap = self.steps + 1, self.numbers["join_gap"]
            self.numbers |= {"join_from": step + gap, "join_gap": min(2 * gap, MOST_JOIN_GAP)}
            self.numbers["wakes"] = False

    def _fall_asleep(self) -> None:
        """Let elements without a variance sleep, if anything comes before the next refresh."""
        dense = self.space.num_dense
        self.vectors.pop("active", None)
        self.waiting = None
        active = self.vectors["variance"][dense:] > 0
        stands = not self.schedule.refreshes(self.steps + 2)
        if stands:
            self._raise_small_variances(active)
        if stands and not bool(active.all()):
            self.vectors["active"] = active
            self.vectors["momentum"][dense:].masked_fill_(~active, 0)
            self._let_wait()
        self.reducers["update"].keep_to(self.vectors.get("active"))

    def _raise_small_variances(self, active: Tensor) -> None:
        """Keep variances that stand still from what later gradients would make explode."""
        dense = self.space.num_dense
        for segment in self.space.segments if self.floor else []:
            if segment.begin >= dense:
                variance = self.vectors["variance"][segment.begin : segment.end]
                awake = active[segment.begin - dense : segment.end - dense]
                least = self.floor * variance.sum() / awake.sum().clamp(min=1)
                variance.copy_(torch.where(awake, torch.maximum(variance, least), variance))

    # --- with updates

    def _step_alone(self, gradient: Tensor) -> None:
        """Take a step that nobody hears of.

        Args:
            gradient: (c,) of this worker; used as memory to work in.
        """
        self.heard = [False] * len(self.asks)
        if not self.is_apart:
            self.vectors["anchor"] = self._read_coded()
            self.update = torch.zeros_like(gradient)
        assert self.update is not None, "made with the anchor"
        is_finite = bool(are_finite(gradient))
        self.left_out += not is_finite
        if is_finite:
            self._set_aside(gradient)
        momentum = self.vectors["momentum"][self.space.num_dense :]
        self._go_on(momentum, self.update, gradient if is_finite else None)
        self._count_step()
        self._place(self.vectors["anchor"], self.update, out=gradient)

    def _clip_own(self, values: Tensor) -> None:
        """Scale the gradients of this worker by their own norm, without asking others."""
        if self.clip_norm is not None:
            gradients = values[: self.space.num_elements]
            self._clip_finite(gradients, gradients.double().square().sum())

    def _agreed(self, gradient: Tensor | None, notes: Tensor) -> Algorithm[str]:
        """Agree on what was done since the last time, and on a step more.

        Args:
            gradient: (c,) of this worker; None for no step more.
            notes: (k,) of this rank; the reducer's `note_sums` are their sums over the ranks.

        Returns:
            Why nothing was changed, in words; empty if all agree.
        """
        dense, count = self.space.num_dense, self.num_coded
        momentum = self.vectors["momentum"][dense:].clone()
        sent = torch.cat([momentum.new_zeros(count), notes])
        if self.update is not None:
            sent[:count] = self.update
        if gradient is not None:
            self._go_on(momentum, sent[:count], gradient)
        if skip_reason := (yield from self.reducers["update"].mean(sent, len(notes))):
            return skip_reason
        update, anchor = sent[:count], self.vectors.pop("anchor", None)
        if anchor is None:
            anchor = self._read_coded()
        # for what follows of it
        self.vectors["anchor"] = anchor
        if gradient is not None:
            self._set_aside(gradient)
            self._count_step()
        for number, part in self._numbered_coded_parts():
            length = self.numbers["lengths"][number]
            # where all steps were of size 0, momenta are as they were
            if length > 0:
                torch.div(
                    update[self._of_coded(part)],
                    length,
                    out=self.vectors["momentum"][part.begin : part.end],
                )
        self._place(anchor, update, out=update)
        del self.vectors["anchor"]
        self.update = None
        self.numbers["lengths"] = [0.0] * len(self.space.parts)
        return ""

    # --- sleepers

    def _let_wait(self) -> None:
        """Begin to keep gradients of sleepers, if there will be anything to keep."""
        if "active" in self.vectors and self.wake == "join" and self.group.world_size > 1:
            self.waiting = torch.zeros_like(self.vectors["active"], dtype=self.space.dtype)

    def _set_aside(self, gradient: Tensor) -> None:
        """Keep what there is for sleepers until all exchange their gradients."""
        if self.waiting is not None:
            self.waiting += gradient.masked_fill(self.vectors["active"], 0)
            self.bound_sums(self.waiting)

    def _count_waiting(self, gradient: Tensor) -> Tensor:
        """Count the inactive elements of which this rank has a gradient, now or from before.

        NaN if such a gradient is not finite. The exchange checks only active elements; this note
        makes all ranks skip the step.
        """
        active = self.vectors.get("active")
        if active is None:
            return gradient.new_zeros(())
        own = gradient.masked_fill(active, 0)
        # one whose square is 0 gives no variance
        seen = (self.waiting + own).square() > 0 if self.waiting is not None else own[:0]
        return torch.where(are_finite(own), seen.sum().to(own.dtype), torch.nan)

    def _have_waiting(self) -> Tensor:
        """(P,) bool: which parameters have sleepers with a gradient."""
        assert self.waiting is not None, "asked for where there are sleepers"
        dense, none = self.space.num_dense, self.waiting[:0]
        # of no elements none is above 0
        return torch.stack(
            [
                (
                    none
                    if each.begin < dense
                    else self.waiting[each.begin - dense : each.end - dense]
                ).any()
                for each in self.space.segments
            ]
        )

    # --- in the middle, and at the end

    @torch.no_grad()
    def finish(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: workers agree, without a step more."""
        if self.is_apart:
            self.skip_reason = yield from self._agreed(None, self.space.empty()[:0])

    # --- what a checkpoint keeps

    @property
    def state_bytes(self) -> int:
        """See `Replicated`."""
        own = [each for each in (self.update, self.waiting) if each is not None]
        return super().state_bytes + sum(each.numel() * each.element_size() for each in own)

    def snapshot(self) -> dict[str, Any]:
        """See `Replicated`. `local` has what differs while workers are apart.

        A worker's parameters follow from it, and are set by `restore`: they are where all
        last agreed, less its own update.
        """
        state = super().snapshot()
        local: dict[str, Any] = {"left_out": self.left_out}
        if self.waiting is not None:
            local["waiting"] = self.waiting
        if self.is_apart:
            momentum, dense = self.vectors["momentum"], self.space.num_dense
            local |= {"update": self.update, "momentum": momentum[dense:].clone()}
            state["shared"]["vectors"]["momentum"] = momentum[:dense].clone()
        return {**state, "local": local}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`; one worker alone ends what several were in the middle of."""
        super().restore(snapshot)
        local, device = snapshot["local"], self.space.device
        self.left_out = local["left_out"]
        own = {
            name: vector.to(device, copy=True)
            for name, vector in local.items()
            if isinstance(vector, Tensor)
        }
        self.update, self.waiting = own.get("update"), None
        if "waiting" in own:
            self.waiting = self.restore_sums(own["waiting"])
        else:
            self._let_wait()
        if self.update is None:
            return
        self.vectors["momentum"] = torch.cat([self.vectors["momentum"], own["momentum"]])
        self._place(self.vectors["anchor"], self.update, out=torch.empty_like(self.update))
        if self.group.world_size == 1:
            run(self.finalized(), self.group)

    def restore_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See `Replicated`."""
        self.reducers["update"].active = self.vectors.get("active")
        if errors["update"]:
            super().restore_errors(errors)
        else:
            # of one worker, who leaves nothing out
            self.reducers["update"].forget()
