"""Check the arguments of optimizers: parameters, groups of ranks and options."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.exchange import Group

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNSUPPORTED = ("amsgrad", "capturable", "differentiable", "foreach", "fused")
"""options of torch's Adam that OneBitAdam, OneBitLamb and ZeroOneAdam do not support"""


def check_group(group: object) -> None:
    """Check that `group` is a `Group`.

    Raises:
        TypeError: it is something else, such as a process group of torch.distributed.
    """
    if isinstance(group, Group):
        return
    raise TypeError(
        f"group is a {type(group).__name__}, not a gcnzc.exchange.Group\n\nhint: for the ranks of "
        "a process group of torch.distributed, give gcnzc.exchange.current_group().subgroup("
        "torch.distributed.get_process_group_ranks(process_group)); for all ranks, omit group"
    )


def check_parameters(optimizer: str, parameters: Iterable[Tensor]) -> None:
    """Check that parameters are plain tensors, and that trained ones are real floating-point.

    Args:
        optimizer: the name of the optimizer, for the message.
        parameters: the parameters of one group.

    Raises:
        TypeError: a parameter is a shard of FSDP, a DTensor, complex, or of another dtype that
            cannot be averaged.
    """
    for index, parameter in enumerate(parameters):
        if kind := _sharded_kind(parameter):
            raise TypeError(
                f"parameter {index} is a {kind}; {optimizer} would average shards that belong to "
                "different elements\n\nhint: give the plain tensors of a model that is replicated "
                "on every rank, not sharded"
            )
        if not parameter.requires_grad or parameter.dtype in DTYPES:
            continue
        hint = f"use one of {', '.join(map(str, DTYPES))}"
        if parameter.is_complex():
            hint = (
                "store its real and imaginary parts in a parameter of shape (..., 2), and use "
                "torch.view_as_complex(parameter) in forward"
            )
        raise TypeError(
            f"parameter {index}, of shape {tuple(parameter.shape)}, is {parameter.dtype}, which "
            f"{optimizer} does not support\n\nhint: {hint}"
        )


def check_inner(wrapper: str, inner: object) -> None:
    """Check that `inner` is an optimizer of torch that takes one step for one gradient.

    Args:
        wrapper: the name of the wrapping optimizer, for the message.
        inner: the object to check.

    Raises:
        TypeError: it is not an optimizer, it communicates itself, or it requires a closure, as
            LBFGS does.
    """
    kind = type(inner).__name__
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"{wrapper} wraps an optimizer of torch, not a {kind}\n\nhint: "
            f"{wrapper}(torch.optim.AdamW(model.parameters()), ...)"
        )
    if hasattr(inner, "algorithm"):
        raise TypeError(
            f"{wrapper} cannot wrap a {kind}, which communicates itself\n\nhint: wrap an optimizer "
            f"of torch.optim, or use {kind} without {wrapper}"
        )
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{wrapper} cannot wrap {kind}, whose step calls a closure several times, for "
            "gradients that no other rank has\n\nhint: wrap SGD, AdamW or another optimizer that "
            "takes one step for one gradient"
        )


def check_adam_options(optimizer: str, group: Mapping[str, Any]) -> None:
    """Check the options of a parameter group of an Adam-like optimizer.

    Raises:
        ValueError: an option is out of its range, or not supported.
    """
    for name in UNSUPPORTED:
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r} is not supported by {optimizer}\n\nhint: omit {name}, or "
                "wrap an optimizer of torch that supports it in gcnzc.optim.Averaged"
            )
    for name in ("lr", "eps", "weight_decay"):
        check_at_least_zero(name, group[name])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}\n\nhint: give two numbers, such as (0.9, 0.999)")
    for index, beta in enumerate(betas):
        check_fraction(f"betas[{index}]", beta)


def check_param_group(optimizer: str, group: Mapping[str, Any]) -> None:
    """Check the parameters of a group, and `lr`, `eps`, `weight_decay` and `betas` if it has them.

    torch's optimizers check their arguments, but not the options of a single parameter group.

    Raises:
        TypeError: see `check_parameters`.
        ValueError: an option is out of its range.
    """
    check_parameters(optimizer, group["params"])
    for name in ("lr", "eps", "weight_decay"):
        # Adafactor, for example, has two numbers for eps
        if _number(group.get(name)) is not None:
            check_at_least_zero(name, group[name])
    betas = group.get("betas", ())
    for index, beta in enumerate(betas if isinstance(betas, tuple | list) else ()):
        if _number(beta) is not None:
            check_fraction(f"betas[{index}]", beta)


def check_unsupported(optimizer: str, options: Mapping[str, object]) -> None:
    """Check that all additional options are in `UNSUPPORTED`, and are off.

    Raises:
        ValueError: one of `UNSUPPORTED` is on.
        TypeError: the name of an option is unknown.
    """
    for name in options:
        if name not in UNSUPPORTED:
            raise TypeError(f"{optimizer} has no option {name!r}\n\nhint: see help({optimizer})")
    off = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0, "betas": (0.0, 0.0)}
    check_adam_options(optimizer, {**off, **options})


def check_at_least_zero(name: str, value: object) -> None:
    """Check that `value` is a finite number of at least 0, or a tensor of one such number.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value!r}\n\nhint: give a finite number of at least 0")


def check_above_zero(name: str, value: object) -> None:
    """Check that `value` is a finite number above 0.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}\n\nhint: give a finite number above 0")


def check_fraction(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1), such as a momentum.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not 0 <= number < 1:
        raise ValueError(f"{name} is {value!r}\n\nhint: give a number of at least 0 and below 1")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Check that `value` is a whole number of at least `least`.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}\n\nhint: give a whole number of at least {least}")


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _sharded_kind(parameter: Tensor) -> str:
    """Return the type name of a sharded parameter; empty for other parameters."""
    kind = type(parameter)
    if kind.__module__.startswith("torch.distributed"):
        return kind.__name__
    is_flat = getattr(parameter, "_is_flat_param", False)
    return "parameter of FSDP" if is_flat or hasattr(parameter, "_fsdp_flattened") else ""
