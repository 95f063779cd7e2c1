"""Reimplement DeepSpeed 0.19.6's 1-bit optimizers with the same rounding, as test oracles.

`deepspeed_peer.py` compares them with DeepSpeed, and `tests/optim` with recorded trajectories. They
differ from `gcnzc.optim` in the signs of padded buffers, the order in which sums are rounded, and
the form of 0/1 Adam; none corrects the bias. DeepSpeed's first call counts as a step and changes
nothing: set `steps` to 1 and skip a minibatch.

DeepSpeed's 0/1 Adam differs from the paper, and from `ZeroOneAdam`, so much that it shares no code
with them. Until the variance freezes, signs of gradients are exchanged between refreshes, and the
momenta are the same on all ranks. After that the sum u of the steps themselves is exchanged, weight
decay included, times the root of the variance; subtracting u takes the parameters back to where all
ranks were, up to rounding.

    refresh   v <- b2 v + (1 - b2) g^2       g: the mean gradient
    before    m <- b1 m + (1 - b1) g         g: the mean gradient, or what its signs make of it
              x <- x - lr (m / (sqrt(v) + eps) + weight_decay x)
    alone     the same with this rank's g, and u <- u - lr (m / (sqrt(v) + eps) + weight_decay x)
    agreed    x <- x - u       u <- compressed mean of u (sqrt(v) + eps)
              m <- -u / sum of lr            x <- x + u / (sqrt(v) + eps)

Notation: n elements, W ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from gcnzc.compress import Compression, Reducer, WorkerInfo
from gcnzc.compress.reducer import count_not_finite, describe_non_finite
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, AllToAll, Group
from gcnzc.optim import OneBitAdam, OneBitLamb, Replicated
from gcnzc.optim.flat_parameters import GroupSlice


@dataclass(frozen=True)
class PaddedSign(Compression):
    """Each tensor is a buffer of its own, padded to a multiple of W lcm(W, 8).

    Padding counts in the scales and has errors. There is one magnitude for a rank's buffer, and one
    for each server's chunk. It takes two collectives for each tensor; `gcnzc.compress.Sign` takes
    two in all, and leaves the padding out.
    """

    lengths: tuple[int, ...]
    """of the buffers, which follow one another in the vector"""

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "PaddedSignReducer":
        """See `Compression`."""
        return PaddedSignReducer(num_elements, worker, self.lengths)

    def bytes_sent(self, num_elements: int, world_size: int, extras: int = 0) -> int:
        """See `Compression`; bits are sent as bytes, since nobody trains with this."""
        chunks = [_padded(length, world_size) // world_size for length in self.lengths]
        rounds = sum((world_size - 1) * (2 * (chunk + 4)) for chunk in chunks)
        return rounds + (8 + 4 * extras) * (world_size - 1)


class PaddedSignReducer(Reducer):
    """See `PaddedSign`."""

    def __init__(self, num_elements: int, worker: WorkerInfo, lengths: tuple[int, ...]) -> None:
        super().__init__(num_elements, worker)
        assert sum(lengths) == num_elements, "buffers cover the vector"
        self.lengths = lengths
        world_size = worker.world_size
        padded = [_padded(length, world_size) for length in lengths]
        self.worker_errors = [torch.zeros(size, dtype=worker.dtype) for size in padded]
        self.server_errors = [
            error.new_zeros(len(error) // world_size) for error in self.worker_errors
        ]

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        bad = yield AllGatherScalar(int(count_not_finite(values)))
        if any(bad):
            return describe_non_finite(bad)
        extra_values = values[self.num_elements :]
        if extras:
            extra_values.copy_((yield AllGather(extra_values.clone())).sum(dim=0))
        self.extra_sums = extra_values.tolist()
        begin = 0
        for place, length in enumerate(self.lengths):
            here = values[begin : begin + length]
            here.copy_((yield from self._buffer(place, here))[:length])
            begin += length
        return ""

    def _buffer(self, place: int, values: Tensor) -> Algorithm[Tensor]:
        world_size = self.worker.world_size
        worker, server = self.worker_errors[place], self.server_errors[place]
        worker[: len(values)] += values
        scale = worker.norm() / math.sqrt(len(worker))
        signs = _signs(worker)
        worker -= scale * signs
        parts = yield AllToAll(
            list(signs.to(torch.int8).chunk(world_size)), [len(server)] * world_size
        )
        scales = (yield AllGather(scale.view(1))).view(-1)
        shares = torch.stack(parts).to(values.dtype) * (scales * (1 / world_size))[:, None]
        # the errors come after the mean: sums are rounded in this order
        server += shares.sum(dim=0)
        magnitude = server.norm() / math.sqrt(len(server))
        signs = _signs(server)
        server -= magnitude * signs
        rows = yield AllGather(signs.to(torch.int8))
        magnitudes = (yield AllGather(magnitude.view(1))).view(-1, 1)
        return (rows.to(values.dtype) * magnitudes).view(-1)

    def errors(self) -> dict[str, Tensor]:
        """See `Reducer`; not kept, since a comparison is not resumed."""
        return {}

    def load_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Do nothing, since a comparison is not resumed."""


class RefedPaddedSign(PaddedSign):
    """The buffer of 1-bit LAMB: what its padding receives is what it sends at the next step."""

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "RefedPaddedSignReducer":
        """See `Compression`."""
        return RefedPaddedSignReducer(num_elements, worker, self.lengths)


class RefedPaddedSignReducer(PaddedSignReducer):
    """See `RefedPaddedSign`."""

    def __init__(self, num_elements: int, worker: WorkerInfo, lengths: tuple[int, ...]) -> None:
        super().__init__(num_elements, worker, lengths)
        padded = len(self.worker_errors[0])
        self.padding = torch.zeros(padded - num_elements, dtype=worker.dtype)
        self.whole = PaddedSign((padded,)).reducer(padded, worker)

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`."""
        sizes = [self.num_elements, len(self.padding), extras]
        whole = torch.cat([values[: sizes[0]], self.padding, values[sizes[0] :]])
        if skip_reason := (yield from self.whole.mean(whole, extras)):
            return skip_reason
        own, self.padding, extra_values = whole.split(sizes)
        values.copy_(torch.cat([own, extra_values]))
        self.extra_sums = extra_values.tolist()
        return ""


class OneBitAdamDeepSpeed(OneBitAdam):
    """1-bit Adam without bias correction, whose sums are rounded in DeepSpeed's order."""

    def _update_moments(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        _update_moments(self, part, values, with_variance)

    def _move(
        self,
        parameter: Tensor,
        momentum: Tensor,
        root: Tensor,
        size: float,
        lr: float,
        decay: float,
    ) -> None:
        update = momentum / root
        if decay:
            update += decay * parameter
        parameter += size * update


class OneBitLambDeepSpeed(OneBitLamb):
    """1-bit LAMB without bias correction, whose sums are rounded in DeepSpeed's order."""

    def _update_moments(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        _update_moments(self, part, values, with_variance)


def _update_moments(
    optimizer: OneBitAdam, part: GroupSlice, values: Tensor, with_variance: bool
) -> None:
    here, (beta1, beta2) = slice(part.begin, part.end), part.group["betas"]
    gradient = values[here]
    optimizer.vectors["momentum"][here].mul_(beta1).add_(gradient, alpha=1 - beta1)
    if with_variance:
        variance = optimizer.vectors["variance"][here]
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """What DeepSpeed exchanges at which step; steps count from 1, of which the first is idle."""

    freeze: int = 100_000
    """`var_freeze_step`: the variance freezes after the step after this one"""
    variance_doubling: int = 16
    """`var_update_scaler`: refreshes after which the steps between them double"""
    local_doubling: int = 32_678
    """`local_step_scaler`: steps after which the steps between agreements double"""
    longest: int = 16
    """`local_step_clipper`: most steps between agreements"""

    def is_frozen(self, step: int) -> bool:
        """Whether workers take this step alone, before they may agree."""
        return step > self.freeze + 1

    def refreshes(self, step: int) -> bool:
        """Whether the variance is refreshed, if it is not frozen."""
        interval, last = 1, self.variance_doubling + 1
        while step > last:
            interval *= 2
            # the first multiple after the last refresh, and as many as before
            last = (last // interval + self.variance_doubling) * interval
        return step % interval == 0

    def agrees(self, step: int) -> bool:
        """Whether workers agree after a step that they took alone."""
        doublings = (step - self.freeze - 2) // self.local_doubling
        return step % min(1 << min(doublings, 62), self.longest) == 0


class ZeroOneAdamDeepSpeed(Replicated):
    """0/1 Adam as DeepSpeed has it: without guards, and without a state to resume from.

    Args:
        params: as torch's optimizers take them, of one dtype, in one group.
        lr: step size.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the variance.
        weight_decay: share of a parameter that is taken off it for each unit of `lr`.
        schedule: what is exchanged when.
        group: of all workers; None for those of torch.distributed as it was initialised.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        schedule: DeepSpeedSchedule | None = None,
        group: Group | None = None,
    ) -> None:
        self.schedule = schedule or DeepSpeedSchedule()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, group)
        names = ("momentum", "variance", "update")
        self.vectors = {name: self.flat_params.zeros() for name in names}
        lengths = tuple(each.end - each.begin for each in self.flat_params.segments)
        self.signs = PaddedSign(lengths)
        self.reducers = {"signs": self.reducer(self.signs, self.flat_params.num_elements)}
        self.length = 0.0
        """sum of step sizes since all agreed"""

    @torch.no_grad()
    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`."""
        schedule, step = self.schedule, self.steps + 1
        is_alone, signs = schedule.is_frozen(step), self.reducers["signs"]
        refreshes = not is_alone and schedule.refreshes(step)
        if is_alone and not schedule.is_frozen(step - 1):
            # what is left out of updates is no continuation of what was left out of gradients
            signs = self.reducers["signs"] = self.reducer(self.signs, self.flat_params.num_elements)
        if refreshes:
            skip_reason = yield from self.mean_gradients(values)
        elif not is_alone:
            skip_reason = yield from signs.mean(values)
        else:
            skip_reason = ""
        if skip_reason:
            return skip_reason
        agrees = is_alone and schedule.agrees(step)
        self.length += float(self.param_groups[0]["lr"])
        # each tensor by itself: where a vector ends, some processors round otherwise
        vectors = map(self.flat_params.views, self._with(values))
        tensors = list(zip(self.flat_params.parameters, *vectors, strict=True))
        for parameter, gradient, momentum, variance, update in tensors:
            if refreshes:
                beta2 = self.param_groups[0]["betas"][1]
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            change = self._change(parameter, gradient, momentum, variance)
            parameter += change
            if is_alone:
                update += change
            if agrees:
                parameter -= update
                update *= self._root(variance)
        if agrees:
            if skip_reason := (yield from signs.mean(self.vectors["update"])):
                return skip_reason
            for parameter, _, momentum, variance, update in tensors:
                torch.div(update, -self.length, out=momentum)
                parameter += update / self._root(variance)
                update.zero_()
        if agrees or not is_alone:
            self.length = 0.0
        return ""

    def _with(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values, *(self.vectors[name] for name in ("momentum", "variance", "update")))

    def _change(
        self, parameter: Tensor, gradient: Tensor, momentum: Tensor, variance: Tensor
    ) -> Tensor:
        """Return the update of a parameter, and update the momentum."""
        group = self.param_groups[0]
        beta1 = group["betas"][0]
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        step = momentum / self._root(variance) + group["weight_decay"] * parameter
        return -group["lr"] * step

    def _root(self, variance: Tensor) -> Tensor:
        return variance.sqrt() + self.param_groups[0]["eps"]

    def state_dict(self) -> NoReturn:
        """Refuse: a comparison is not resumed."""
        raise RuntimeError("it has no state to keep\n\nhint: train with ZeroOneAdam")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refuse: a comparison is not resumed."""
        self.state_dict()


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def _padded(length: int, world_size: int) -> int:
    multiple = world_size * math.lcm(world_size, 8)
    return -(-length // multiple) * multiple
