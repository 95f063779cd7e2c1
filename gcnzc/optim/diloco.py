"""DiLoCo: H local steps, then one step of an outer optimizer on all ranks.

    x_i <- InnerOpt(x_i, gradient of rank i)         H local steps
    d   <- mean_i (a - x_i)                          a: the anchor, where all ranks started
    b   <- μ b + d
    a   <- a - lr (d + μ b)                          Nesterov momentum; lr b without it
    x_i <- a

as in Douillard et al., "DiLoCo" (2023, https://arxiv.org/abs/2311.08105). The mean difference d is
the outer gradient. Without Nesterov momentum it is SlowMo (Wang et al., 2020,
https://arxiv.org/abs/1910.00643) if the inner learning rate is constant: SlowMo divides d by it.
With μ = 0 and lr = 1 it is local SGD. The states of the inner optimizers are not exchanged.

Notation: n elements, s of a rank's shard, m of a fragment or shard, H local steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.defaults import DILOCO
from gcnzc.optim.flat import TILE_ELEMENTS
from gcnzc.optim.local_method import Fragment, LocalMethod, outer_vector
from gcnzc.optim.options import option
from gcnzc.optim.state import Field, Inner
from gcnzc.optim.validation import check_at_least_zero, check_fraction
from gcnzc.system.arguments import check_flag


def is_offloaded(own: Any) -> bool:
    """Whether the outer state is in host memory."""
    return bool(own.offload)


class DiLoCo(LocalMethod):
    """DiLoCo: take local steps, and every H steps one step of an outer optimizer on all ranks.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H, or "auto"; see `LocalMethod`.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        nesterov: whether to use Nesterov momentum.
        outer: returns any other outer optimizer of torch for a list of parameters, as in
            `lambda parameters: torch.optim.Adam(parameters, lr=0.1)`, in place of the three options
            above; each fragment has one. Not with `sharded`.
        offload: whether the anchor and the momentum are in host memory, and the outer optimizer
            runs on the CPU, so that they take no memory of a GPU.
        options: the other options of `LocalMethod`: `compress` of the exchanged differences,
            `sharded` for the anchor and the momentum, and so on.

    Raises:
        ValueError: an option is out of range, options contradict each other, or the parameters of
            the ranks differ.
    """

    local_steps: Any = option(DILOCO.local_steps)
    outer_lr: float = option(DILOCO.outer_lr, check_at_least_zero)
    outer_momentum: float = option(DILOCO.outer_momentum, check_fraction)
    nesterov: bool = option(True, check_flag)
    outer: Callable[[list[nn.Parameter]], Optimizer] | None = option(None, is_compared=False)
    offload: bool = option(False, check_flag, is_compared=False)

    anchor: Tensor = outer_vector(on_host=is_offloaded)
    """(n,): the outer optimizer's parameters, or this rank's shard (s,) of them"""
    momentum: Tensor = outer_vector(on_host=is_offloaded, when=lambda own: own.outer is None)
    """(n,) or (s,): the outer momentum"""
    mixing = 0.0
    """the weight of a rank's own parameters after an outer step"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        if self.outer is not None and self.sharded:
            raise ValueError("sharded=True with outer\n\nhint: omit one of them")

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`; with an outer optimizer of torch, its state."""
        fields = super().declare()
        if self.outer is None:
            return fields
        for fragment in self.fragments:
            if fragment.outer is None:
                device = "cpu" if self.offload else self.flat.device
                empty = torch.empty(fragment.num_elements, dtype=self.flat.dtype, device=device)
                fragment.outer = self.outer([nn.Parameter(empty)])
            fields.append(Inner(owner=fragment, name="outer", kind="shared"))
        return fields

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; includes the class and options of the outer optimizer."""
        found = self.fragments[0].outer
        outer = "SGD" if found is None else f"{type(found).__name__}({found.defaults})"
        return super().compared_options() | {"outer": outer}

    def restart(self) -> None:
        """See `LocalMethod`: the next outer step starts from the current parameters."""
        self.anchor = self._place(self.own_part(self.parameters))

    def _place(self, vector: Tensor) -> Tensor:
        """Return a vector where the outer state is."""
        return vector.cpu() if self.offload else vector

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """See `LocalMethod`: the anchor minus the parameters; the parameters if it is sharded."""
        super().read(fragment, out)
        if not self.sharded:
            torch.sub(self.anchor[fragment.here].to(out.device), out, out=out)

    def apply(self, fragment: Fragment, mean: Tensor) -> Algorithm[None]:
        """See `LocalMethod`: take an outer step, and set the parameters to the anchor."""
        device, mean = mean.device, self._place(mean)
        if not self.sharded:
            anchor = self.anchor[fragment.here]
            if fragment.outer is None:
                self.outer_step(anchor, self.momentum[fragment.here], mean)
            else:
                step_parameter(fragment.outer, anchor, mean)
            self.set_parameters(fragment, anchor.to(device), self.mixing)
            return
        anchor, momentum = self.anchor.clone(), self.momentum.clone()
        self.outer_step(anchor, momentum, anchor - mean)
        parameters = yield from self.gather(anchor.to(device))
        # all ranks detect a sum that overflows on one rank
        if not bool(are_finite(parameters)):
            self.note_drop("synchronization skipped: the mean overflows")
            return
        self.anchor, self.momentum = anchor, momentum
        self.set_parameters(fragment, parameters)

    @torch.no_grad()
    def outer_step(self, anchor: Tensor, momentum: Tensor, difference: Tensor) -> None:
        """Take a step of SGD with momentum, as in torch; all vectors (m,) are overwritten."""
        # on a CPU the tiles of three vectors fit into the cache of a core
        size = TILE_ELEMENTS if anchor.device.type == "cpu" else max(1, len(anchor))
        tiles = (each.split(size) for each in (anchor, momentum, difference))
        for a, b, step in zip(*tiles, strict=True):
            if self.outer_momentum:
                b.mul_(self.outer_momentum).add_(step)
                step = step.add_(b, alpha=self.outer_momentum) if self.nesterov else b
            a.add_(step, alpha=-self.outer_lr)


def step_parameter(optimizer: Optimizer, values: Tensor, gradient: Tensor) -> None:
    """Take a step of an optimizer of a single parameter, whose values and gradient are given."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.data, parameter.grad = values, gradient
    optimizer.step()
    parameter.grad = None
