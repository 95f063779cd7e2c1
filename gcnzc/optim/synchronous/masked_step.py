"""Steps of an optimizer at some elements of its parameters only.

With a sparse compression and error feedback, each element of the mean gradient is 0 in most steps.
When the element is sent, it is the sum of its gradients since it was last sent. Heavy-ball momentum
would apply that sum again in the following steps, without new gradients that correct it. A masked
step leaves parameters and momentum unchanged where no rank has sent an element, so an element's
momentum is updated as often as its gradient.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Compression

Momentum: TypeAlias = Literal["everywhere", "masked"]


def choose_momentum(momentum: Momentum | None, compress: Compression | None) -> Momentum:
    """Return the argument `momentum` of `Averaged`, or the default for a compression.

    Raises:
        ValueError: there is no such value, or it is "masked" without compression.
    """
    if momentum is None:
        return "everywhere" if compress is None else compress.momentum
    if momentum not in get_args(Momentum):
        raise ValueError(
            f"momentum={momentum!r}\n\nhint: use one of {', '.join(get_args(Momentum))}, or None"
        )
    if momentum == "masked" and compress is None:
        raise ValueError(
            "momentum='masked' without compression, which sends all elements\n\nhint: also give a "
            "sparse compression, such as compress=RandomK(0.05)"
        )
    return momentum


@torch.no_grad()
def step_on_supports(inner: Optimizer, supports: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take an optimizer's step, and undo it at the elements that are not in a support.

    It undoes changes of the parameters and of the tensors of the optimizer's state that have a
    parameter's shape. A tensor that the step creates becomes 0 there. The state `step`, with which
    Adam corrects its bias, counts all steps.

    Args:
        inner: the optimizer.
        supports: parameters, and for each a bool mask of its shape. The step is not restricted for
            other parameters.
    """
    saved = [
        ({name: each.clone() for name, each in _elementwise(inner, parameter)}, parameter.clone())
        for parameter, _ in supports
    ]
    inner.step()
    for (parameter, support), (state, values) in zip(supports, saved, strict=True):
        torch.where(support, parameter, values, out=parameter.detach())
        for name, tensor in _elementwise(inner, parameter):
            if name in state:
                torch.where(support, tensor, state[name], out=tensor)
            else:
                tensor.masked_fill_(~support, 0)


def _elementwise(inner: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter's state that have an element for each of its elements."""
    # the count of steps has the shape of a parameter that is a scalar
    return [
        (name, each)
        for name, each in inner.state.get(parameter, {}).items()
        if isinstance(each, Tensor) and each.shape == parameter.shape and name != "step"
    ]
