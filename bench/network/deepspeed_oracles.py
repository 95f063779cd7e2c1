"""Reimplement DeepSpeed 0.19.6's 1-bit optimizers with the same rounding, as test oracles.

`deepspeed_peer.py` compares them with DeepSpeed, and `tests/optim` compares them with recorded
trajectories. They differ from `gcnzc.optim` in the compression of signs, which pads buffers, in the
order in which sums are rounded, and in the algorithm of 0/1 Adam. None has bias correction.
DeepSpeed's first call counts as a step and changes nothing: to match it, set `steps` to 1 and skip
a minibatch.

DeepSpeed's 0/1 Adam differs so much from the paper and from `ZeroOneAdam` that they share no code.
Until the variance freezes, ranks exchange signs of gradients between variance refreshes, and the
momenta are equal on all ranks. After that, ranks take local steps. At a sync step they exchange the
sum u of their updates since the last sync, including weight decay, multiplied by the root of the
variance. Subtracting u restores the parameters of the last sync, up to rounding.

    refresh   v <- b2 v + (1 - b2) g^2       g: mean gradient
    step      m <- b1 m + (1 - b1) g         g: mean gradient, exact or compressed to signs
              x <- x - lr (m / (sqrt(v) + eps) + weight_decay x)
    local     the same with this rank's g, and u <- u - lr (m / (sqrt(v) + eps) + weight_decay x)
    sync      x <- x - u       u <- compressed mean of u (sqrt(v) + eps)
              m <- -u / sum of lr            x <- x + u / (sqrt(v) + eps)

Notation: W ranks.
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
from gcnzc.optim.method import SkipStep
from gcnzc.optim.state import Errors, Field, vector


@dataclass(frozen=True)
class PaddedSign(Compression):
    """Signs of separate buffers, one for each tensor, padded to a multiple of W lcm(W, 8).

    The scales include the padding, which also has errors. The buffer of a rank has one scale, and
    each server's chunk has one. Each tensor takes separate collectives, whereas
    `gcnzc.compress.Sign` exchanges all tensors together, without padding.
    """

    lengths: tuple[int, ...]
    """numbers of elements of the buffers, which are contiguous in the vector"""

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "PaddedSignReducer":
        """See `Compression`."""
        return PaddedSignReducer(num_elements, worker, self.lengths)


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
        non_finite = yield AllGatherScalar(int(count_not_finite(values)))
        if any(non_finite):
            return describe_non_finite(non_finite)
        extra_values = values[self.num_elements :]
        if extras:
            extra_values.copy_((yield AllGather(extra_values.clone())).sum(dim=0))
        self.extra_sums = extra_values.tolist()
        begin = 0
        for index, length in enumerate(self.lengths):
            buffer = values[begin : begin + length]
            buffer.copy_((yield from self._mean_of_buffer(index, buffer))[:length])
            begin += length
        return ""

    def _mean_of_buffer(self, index: int, values: Tensor) -> Algorithm[Tensor]:
        world_size = self.worker.world_size
        worker, server = self.worker_errors[index], self.server_errors[index]
        worker[: len(values)] += values
        scale = worker.norm() / math.sqrt(len(worker))
        signs = _signs(worker)
        worker -= scale * signs
        parts = yield AllToAll(
            list(signs.to(torch.int8).chunk(world_size)), [len(server)] * world_size
        )
        scales = (yield AllGather(scale.view(1))).view(-1)
        shares = torch.stack(parts).to(values.dtype) * (scales * (1 / world_size))[:, None]
        # add the errors after the mean, since the order of additions determines the rounding
        server += shares.sum(dim=0)
        server_scale = server.norm() / math.sqrt(len(server))
        signs = _signs(server)
        server -= server_scale * signs
        rows = yield AllGather(signs.to(torch.int8))
        server_scales = (yield AllGather(server_scale.view(1))).view(-1, 1)
        return (rows.to(values.dtype) * server_scales).view(-1)

    def errors(self) -> dict[str, Tensor]:
        """Return nothing, since comparisons are not resumed."""
        return {}

    def load_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Do nothing, since comparisons are not resumed."""


class RefedPaddedSign(PaddedSign):
    """Signs of the buffer of 1-bit LAMB, whose padding sends the values that it last received."""

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
    """1-bit Adam without bias correction, with DeepSpeed's order of rounding."""

    def update_moments(
        self, here: slice, options: Mapping[str, Any], values: Tensor, *, with_variance: bool
    ) -> None:
        """See `InactiveElements`."""
        _update_moments(self, here, options, values, with_variance)

    def move(
        self, parameter: Tensor, momentum: Tensor, root: Tensor, options: Mapping[str, Any]
    ) -> None:
        """See `InactiveElements`."""
        update = momentum / root
        if options["weight_decay"]:
            update += options["weight_decay"] * parameter
        parameter -= self.step_size(options) * update


class OneBitLambDeepSpeed(OneBitLamb):
    """1-bit LAMB without bias correction, with DeepSpeed's order of rounding."""

    def update_moments(
        self, here: slice, options: Mapping[str, Any], values: Tensor, *, with_variance: bool
    ) -> None:
        """See `InactiveElements`."""
        _update_moments(self, here, options, values, with_variance)


def _update_moments(
    optimizer: OneBitAdam,
    here: slice,
    options: Mapping[str, Any],
    values: Tensor,
    with_variance: bool,
) -> None:
    (beta1, beta2), gradient = options["betas"], values[here]
    optimizer.momentum[here].mul_(beta1).add_(gradient, alpha=1 - beta1)
    if with_variance:
        optimizer.variance[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """DeepSpeed's schedule of exchanges. Steps are numbered from 1, and step 1 does nothing."""

    freeze: int = 100_000
    """`var_freeze_step`: the variance freezes after the step after this one"""
    variance_doubling: int = 16
    """`var_update_scaler`: number of refreshes after which their interval doubles"""
    local_doubling: int = 32_678
    """`local_step_scaler`: number of steps after which the sync interval doubles"""
    longest: int = 16
    """`local_step_clipper`: largest sync interval, in steps"""

    def is_frozen(self, step: int) -> bool:
        """Return whether the variance is frozen, and the step is local."""
        return step > self.freeze + 1

    def is_refresh(self, step: int) -> bool:
        """Return whether the variance is refreshed, if it is not frozen."""
        interval, last = 1, self.variance_doubling + 1
        while step > last:
            interval *= 2
            # the last refresh with this interval
            last = (last // interval + self.variance_doubling) * interval
        return step % interval == 0

    def is_sync(self, step: int) -> bool:
        """Return whether ranks synchronize after a local step."""
        doublings = (step - self.freeze - 2) // self.local_doubling
        return step % min(1 << min(doublings, 62), self.longest) == 0


class ZeroOneAdamDeepSpeed(Replicated):
    """DeepSpeed's 0/1 Adam, without checks of its arguments and without a saved state.

    Args:
        params: parameters as for torch's optimizers, of one dtype, in one parameter group.
        lr: learning rate.
        betas: decay rates of the averages of gradients and of their squares.
        eps: term added to the root of the variance.
        weight_decay: coefficient of decoupled weight decay, which is multiplied by `lr`.
        schedule: schedule of the exchanges.
        group: group of all workers; None for the default group of torch.distributed.
    """

    momentum: Tensor = vector()
    variance: Tensor = vector()
    accumulated: Tensor = vector()

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
        self.sum_of_lr = 0.0
        """sum of the learning rates since the last sync"""
        super().__init__(params, defaults, group)

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        compress, count = PaddedSign(self.flat.layers()), self.flat.num_elements
        # errors of gradients do not apply to sums of updates
        signs = [
            Errors(owner=self, name=name, compress=compress, size=count)
            for name in ("signs", "sums")
        ]
        return [*super().declare(), *signs]

    @torch.no_grad()
    def update(self, values: Tensor) -> Algorithm[None]:
        """See `Replicated`."""
        schedule, step = self.schedule, self.steps + 1
        is_local = schedule.is_frozen(step)
        is_refresh = not is_local and schedule.is_refresh(step)
        if is_refresh:
            yield from self.mean_gradients(values)
        elif not is_local:
            yield from self.mean(values, "signs")
        is_sync = is_local and schedule.is_sync(step)
        self.sum_of_lr += float(self.param_groups[0]["lr"])
        # each tensor separately: some processors round differently at the end of a vector
        own = (values, self.momentum, self.variance, self.accumulated)
        tensors = list(zip(self.flat.parameters, *map(self.flat.views, own), strict=True))
        for parameter, gradient, momentum, variance, update in tensors:
            if is_refresh:
                beta2 = self.param_groups[0]["betas"][1]
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            change = self._change(parameter, gradient, momentum, variance)
            parameter += change
            if is_local:
                update += change
            if is_sync:
                parameter -= update
                update *= self._root(variance)
        if is_sync:
            if reason := (yield from self.reducers["sums"].mean(self.accumulated)):
                raise SkipStep(reason)
            for parameter, _, momentum, variance, update in tensors:
                torch.div(update, -self.sum_of_lr, out=momentum)
                parameter += update / self._root(variance)
                update.zero_()
        if is_sync or not is_local:
            self.sum_of_lr = 0.0

    def _change(
        self, parameter: Tensor, gradient: Tensor, momentum: Tensor, variance: Tensor
    ) -> Tensor:
        """Update the momentum, and return the change of the parameter."""
        group = self.param_groups[0]
        beta1 = group["betas"][0]
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        step = momentum / self._root(variance) + group["weight_decay"] * parameter
        return -group["lr"] * step

    def _root(self, variance: Tensor) -> Tensor:
        return variance.sqrt() + self.param_groups[0]["eps"]

    def state_dict(self) -> NoReturn:
        """Raise an error, since comparisons are not resumed."""
        raise RuntimeError("the oracle's state cannot be saved\n\nhint: train with ZeroOneAdam")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Raise an error, since comparisons are not resumed."""
        self.state_dict()


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def _padded(length: int, world_size: int) -> int:
    multiple = world_size * math.lcm(world_size, 8)
    return -(-length // multiple) * multiple
