"""Check the arguments of optimizers: parameters, groups of ranks and options."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Group
from gcnzc.optim.fully_shard import is_shard, is_shard_of_replica
from gcnzc.system.arguments import INTEGER_LIMIT, check_integer

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RATES = ("lr", "eps", "weight_decay")
"""options that are finite numbers of at least 0"""


def check_group(group: object) -> None:
    """Check that `group` is a `Group`.

    Raises:
        TypeError: it is something else, such as a process group of torch.distributed.
    """
    if not isinstance(group, Group):
        raise TypeError(
            f"group is a {type(group).__name__}, not a gcnzc.exchange.Group\n\nhint: for the ranks "
            "of a process group of torch.distributed, give gcnzc.exchange.current_group().subgroup("
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
        is_flat = hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_is_flat_param")
        is_accepted = accepts_shards and is_shard_of_replica(parameter)
        if is_flat or (is_shard(parameter) and not is_accepted):
            raise TypeError(
                f"parameter {index} is a shard ({type(parameter).__name__}); {optimizer} would "
                "average shards that belong to different elements\n\nhint: give the plain tensors "
                "of a model that is replicated on every rank; local methods such as "
                "gcnzc.optim.DiLoCo also accept parameters of torch.distributed.fsdp.fully_shard "
                "(torch >= 2.6), with the mesh of one replica"
            )
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            hint = f"use one of {', '.join(map(str, DTYPES))}"
            if parameter.is_complex():
                hint = (
                    "store its real and imaginary parts in a parameter of shape (..., 2), and use "
                    "torch.view_as_complex(parameter) in forward"
                )
            raise TypeError(
                f"parameter {index}, of shape {tuple(parameter.shape)}, is {parameter.dtype}, "
                f"which {optimizer} does not support\n\nhint: {hint}"
            )


def check_module(module: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that `module` is a model of which an optimizer has parameters.

    Args:
        module: the model.
        groups: the parameter groups of the optimizer.

    Raises:
        ValueError: it has parameters, but none of the optimizer's.
    """
    own = set(map(id, module.parameters()))
    if own and own.isdisjoint(id(each) for group in groups for each in group["params"]):
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
        raise TypeError(f"{wrapper} wraps an optimizer of torch, not a {kind}")
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    why = ""
    if hasattr(inner, "algorithm"):
        why = "which communicates itself"
    elif closure is not None and closure.default is inspect.Parameter.empty:
        why = "whose step calls a closure several times, for gradients that no other rank has"
    if why:
        raise TypeError(
            f"{wrapper} cannot wrap {kind}, {why}\n\nhint: wrap SGD, AdamW or another optimizer of "
            "torch that takes one step for one gradient"
        )


def check_options(
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    where: str = "",
    *,
    with_gpu: bool = True,
) -> None:
    """Check the options of a parameter group.

    torch's optimizers check their arguments, but not the options of a single parameter group. `lr`,
    `eps`, `weight_decay` and `betas` are checked for their ranges. Other options whose default is a
    number must be numbers, and those whose default is a flag must be flags.

    Args:
        group: the parameter group.
        defaults: the default options of the optimizer.
        where: follows the name of an option in the message, such as " of parameter group 0".
        with_gpu: whether to check tensors on a GPU, which synchronizes with it.

    Raises:
        ValueError: an option is out of its range, or of a wrong type.
    """
    for name, value in group.items():
        label, default = f"{name}{where}", defaults.get(name)
        if name == "params" or value is None or (_is_on_gpu(value) and not with_gpu):
            continue
        if name == "betas":
            if not isinstance(value, tuple | list):
                raise ValueError(f"{label} is {value!r}\n\nhint: give a tuple of numbers")
            for index, beta in enumerate(value):
                # Adafactor of transformers, for example, has None for no momentum
                if beta is not None and (with_gpu or not _is_on_gpu(beta)):
                    check_fraction(f"betas[{index}]{where}", beta)
        elif name in RATES:
            # Adafactor, for example, has two numbers for eps
            if name == "lr" or not isinstance(value, tuple | list):
                check_at_least_zero(label, value)
        elif isinstance(default, bool):
            if not isinstance(value, bool | int):
                raise ValueError(f"{label} is {value!r}\n\nhint: give True or False")
        elif isinstance(default, int | float):
            check_range(label, value, lambda number: not math.isnan(number), "a number")


def check_range(name: str, value: object, is_valid: Callable[[float], bool], hint: str) -> None:
    """Check that `value` is a number in a range, or a tensor of one such number.

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


def check_at_least_zero(name: str, value: object) -> None:
    """Check that `value` is a finite number of at least 0; raises ValueError."""
    check_range(name, value, lambda x: 0 <= x < math.inf, "a finite number of at least 0")


def check_above_zero(name: str, value: object, most: float | None = None) -> None:
    """Check that `value` is a finite number above 0, and at most `most`; raises ValueError."""
    hint = "a finite number above 0" if most is None else f"a number above 0, at most {most}"
    check_range(name, value, lambda x: 0 < x < math.inf and (most is None or x <= most), hint)


def check_fraction(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1), such as a momentum; raises ValueError."""
    check_range(name, value, lambda x: 0 <= x < 1, "a number in [0, 1)")


def check_share(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1], such as a weight; raises ValueError."""
    check_range(name, value, lambda x: 0 <= x <= 1, "a number in [0, 1]")


def check_count(name: str, value: object, least: int = 0, most: int = INTEGER_LIMIT) -> int:
    """Return a whole number of at least `least` and at most `most`; see `check_integer`."""
    return check_integer(name, value, least, most)


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    # torch raises an OverflowError for an integer of more than 64 bits
    return None if isinstance(value, int) and abs(value) >= 2**63 else float(value)
