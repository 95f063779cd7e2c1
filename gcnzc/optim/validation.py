"""Check the arguments of optimizers: parameters, groups of ranks and options."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Group
from gcnzc.system.arguments import describe

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNSUPPORTED = ("amsgrad", "capturable", "differentiable", "foreach", "fused")
"""options of torch's Adam that OneBitAdam, OneBitLamb and ZeroOneAdam do not support"""
RATES = ("lr", "eps", "weight_decay")
"""options that are finite numbers of at least 0"""


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


def check_parameters(
    optimizer: str, parameters: Iterable[Tensor], *, accepts_shards: bool = False
) -> None:
    """Check that parameters are plain tensors, and that trained ones are real floating-point.

    Args:
        optimizer: the name of the optimizer, for the message.
        parameters: the parameters of one group.
        accepts_shards: whether they may be sharded by `fully_shard`.

    Raises:
        TypeError: a parameter is a shard of FSDP, a DTensor, complex, or of another dtype that
            cannot be averaged.
    """
    for index, parameter in enumerate(parameters):
        kind = _sharded_kind(parameter)
        if kind and not (accepts_shards and _is_shard_of_replica(parameter)):
            raise TypeError(
                f"parameter {index} is a {kind}; {optimizer} would average shards that belong to "
                "different elements\n\nhint: give the plain tensors of a model that is replicated "
                "on every rank; local methods such as gcnzc.optim.DiLoCo also accept parameters of "
                "torch.distributed.fsdp.fully_shard (torch >= 2.6), with the mesh of one replica"
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


def check_module(module: object, groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that `module` is a model of which an optimizer has parameters.

    Args:
        module: the model; None is valid.
        groups: the parameter groups of the optimizer.

    Raises:
        TypeError: it is not a module.
        ValueError: it has parameters, but none of the optimizer's.
    """
    if module is None:
        return
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {describe(module)}\n\nhint: give the model, a torch.nn.Module")
    own = {id(parameter) for parameter in module.parameters()}
    given = {id(parameter) for group in groups for parameter in group["params"]}
    if own and own.isdisjoint(given):
        raise ValueError(
            f"module is a {type(module).__name__} without any of the optimizer's parameters\n\n"
            "hint: give the model whose parameters the optimizer has"
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
            f"{wrapper} cannot wrap {kind}, which communicates itself\n\nhint: wrap an optimizer "
            f"of torch.optim, or use {kind} without {wrapper}"
        )
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{wrapper} cannot wrap {kind}, whose step calls a closure several times, for "
            "gradients that no other rank has\n\nhint: wrap SGD, AdamW or another optimizer that "
            "takes one step for one gradient"
        )


def check_adam_options(
    optimizer: str, group: Mapping[str, Any], where: str = "", *, with_gpu: bool = True
) -> None:
    """Check the options of a parameter group of an Adam-like optimizer.

    Args:
        optimizer: the name of the optimizer, for the message.
        group: the parameter group.
        where: follows the name of an option in the message, such as " of parameter group 0".
        with_gpu: whether to check tensors on a GPU, which synchronizes with it.

    Raises:
        ValueError: an option is out of its range, of a wrong type, or not supported.
    """
    for name in UNSUPPORTED:
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r}{where} is not supported by {optimizer}\n\nhint: omit "
                f"{name}, or wrap an optimizer of torch that supports it in gcnzc.optim.Averaged"
            )
    for name in RATES:
        if with_gpu or not _is_on_gpu(group.get(name)):
            check_at_least_zero(f"{name}{where}", group.get(name))
    betas = group.get("betas")
    check_pair(f"betas{where}", betas, "two numbers, such as (0.9, 0.999)")
    _check_betas(betas, where, with_gpu=with_gpu, may_be_none=False)  # type: ignore[arg-type]
    for name in ("maximize", "compress"):
        _check_flag(f"{name}{where}", group.get(name, False))


def check_inner_options(
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    where: str = "",
    *,
    with_gpu: bool = True,
) -> None:
    """Check the options of a parameter group of an inner optimizer.

    torch's optimizers check their arguments, but not the options of a single parameter group. `lr`,
    `eps`, `weight_decay` and `betas` are checked for their ranges. Other options whose default is a
    number must be numbers, and those whose default is a flag must be flags.

    Args:
        group: the parameter group.
        defaults: the default options of the optimizer.
        where: see `check_adam_options`.
        with_gpu: see `check_adam_options`.

    Raises:
        ValueError: an option is out of its range, or of a wrong type.
    """
    for name, value in group.items():
        if name == "params" or value is None or (_is_on_gpu(value) and not with_gpu):
            continue
        default = defaults.get(name)
        if name in RATES:
            # Adafactor, for example, has two numbers for eps
            if name == "lr" or not isinstance(value, tuple | list):
                check_at_least_zero(f"{name}{where}", value)
        elif name == "betas":
            if not isinstance(value, tuple | list):
                raise ValueError(f"betas{where} is {value!r}\n\nhint: give a tuple of numbers")
            _check_betas(value, where, with_gpu=with_gpu)
        elif isinstance(default, bool):
            _check_flag(f"{name}{where}", value)
        elif isinstance(default, int | float):
            number = _number(value)
            if number is None or math.isnan(number):
                raise ValueError(f"{name}{where} is {value!r}\n\nhint: give a number")


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


def check_above_zero(name: str, value: object, most: float | None = None) -> None:
    """Check that `value` is a finite number above 0, and at most `most` if that is given.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not 0 < number < math.inf or (most is not None and number > most):
        valid = "a finite number above 0" if most is None else f"a number above 0, at most {most}"
        raise ValueError(f"{name} is {value!r}\n\nhint: give {valid}")


def check_fraction(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1), such as a momentum.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not 0 <= number < 1:
        raise ValueError(f"{name} is {value!r}\n\nhint: give a number in [0, 1)")


def check_count(name: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Check that `value` is a whole number of at least `least`, and at most `most`.

    numpy's integers are accepted; bool, float and tensors are not.

    Raises:
        ValueError: it is not.
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:  # type: ignore[operator]
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}\n\nhint: give a whole number {limits}")


def check_range(name: str, value: object, is_valid: Callable[[float], bool], hint: str) -> None:
    """Check that `value` is a number in a range.

    Args:
        name: of the option.
        value: of the option.
        is_valid: whether a number is in the range; comparisons with NaN are False.
        hint: the valid values, for the message.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if number is None or not is_valid(number):
        raise ValueError(f"{name} is {value!r}\n\nhint: give {hint}")


def check_pair(name: str, value: object, hint: str) -> None:
    """Check that `value` is a tuple or list of two elements.

    Raises:
        ValueError: it is not; the message has `hint`, which describes the elements.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}\n\nhint: give {hint}")


def _check_betas(
    betas: Iterable[object], where: str, *, with_gpu: bool, may_be_none: bool = True
) -> None:
    for index, beta in enumerate(betas):
        # Adafactor of transformers, for example, has None for no momentum
        is_none = beta is None and may_be_none
        if not is_none and (with_gpu or not _is_on_gpu(beta)):
            check_fraction(f"betas[{index}]{where}", beta)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool | int):
        raise ValueError(f"{name} is {value!r}\n\nhint: give True or False")


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _number(value: object) -> float | None:
    if type(value) is float:
        # checked first, because the other checks take longer, and `step` checks every option
        return value
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, int) and abs(value) >= 2**63:
        # torch raises an OverflowError for it
        return None
    return float(value)


def _is_shard_of_replica(parameter: Any) -> bool:
    """Return whether a parameter is sharded by `fully_shard` over the ranks of a replica."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1 and parameter.placements[0].is_shard()


def _sharded_kind(parameter: Tensor) -> str:
    """Return the type name of a sharded parameter; empty for other parameters."""
    kind = type(parameter)
    if kind.__module__.startswith("torch.distributed"):
        return kind.__name__
    is_flat = getattr(parameter, "_is_flat_param", False)
    return "parameter of FSDP" if is_flat or hasattr(parameter, "_fsdp_flattened") else ""
