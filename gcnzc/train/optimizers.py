"""Build the optimizer of a run from its options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gcnzc.compress import compression
from gcnzc.exchange import Group
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    DistributedOptimizer,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from gcnzc.optim.defaults import DELAY
from gcnzc.optim.defaults import LOCAL as LOCAL_DEFAULTS
from gcnzc.train.option_groups import LOCAL, ONE_BIT, OptimizerOptions
from gcnzc.train.options import parse_fragments

# fewest steps of a warm-up without a warning
SHORT_WARMUP_STEPS = 10


def build_optimizer(
    config: OptimizerOptions, model: torch.nn.Module, workers: int = 1
) -> torch.optim.Optimizer:
    """Build the torch optimizer of a run; with local steps, the inner optimizer.

    Args:
        config: options of the run.
        model: the model whose parameters it updates.
        workers: number of workers, which may scale the learning rate.
    """
    parameters, decay = parameter_groups(config, model), config.weight_decay
    lr = learning_rate(config, workers)
    name = config.inner_optimizer if config.optimizer in LOCAL else config.optimizer
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=decay)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay)
    return torch.optim.Adam(parameters, lr, weight_decay=decay)


def parameter_groups(config: OptimizerOptions, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of a model in groups for an optimizer, by their weight decay.

    With --decay weights, parameters of fewer than two dimensions have none: biases, and the scales
    and shifts of normalization.
    """
    if config.decay == "all":
        return [{"params": list(model.parameters())}]
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _clip_local_steps(config: OptimizerOptions, inner: torch.optim.Optimizer) -> None:
    """Clip the gradients of this worker before each step of an inner optimizer."""
    norm = config.clip_gradients
    if norm is None:
        return

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, norm)

    inner.register_step_pre_hook(clip)


def learning_rate(config: OptimizerOptions, workers: int) -> float:
    """Return the learning rate for a number of workers, scaled by --scale-lr."""
    return config.lr * {"none": 1.0, "linear": workers, "sqrt": workers**0.5}[config.scale_lr]


def build_method(
    config: OptimizerOptions, model: nn.Module, group: Group, steps: int, signals: int = 0
) -> DistributedOptimizer:
    """Build the distributed optimizer of a run.

    Args:
        config: options of the run.
        model: on this worker's device.
        group: all workers.
        steps: steps of the whole run; --warmup may be a fraction of them.
        signals: number of flags that are sent with each exchange.

    Raises:
        ValueError: options contradict each other.
    """
    if config.optimizer in ONE_BIT:
        return _one_bit(config, model, group, steps, signals)
    inner = build_optimizer(config, model, group.world_size)
    options: dict[str, Any]
    if config.optimizer not in LOCAL:
        options = {"clip_norm": config.clip_gradients, "module": model, **_compress(config)}
        return Averaged(inner, group, signals, **options)
    _clip_local_steps(config, inner)
    options = {"signals": signals, "total_steps": steps, "module": model, **_compress(config)}
    options["local_steps"] = _local_steps(config)
    if config.optimizer == "local-sgd":
        return LocalSGD(inner, group, **options)
    default = LOCAL_DEFAULTS[config.optimizer]
    options["outer_lr"] = default.outer_lr if config.outer_lr is None else config.outer_lr
    momentum = config.outer_momentum
    options["outer_momentum"] = default.outer_momentum if momentum is None else momentum
    if config.optimizer == "diloco":
        return DiLoCo(inner, group, **options)
    if config.optimizer == "co2":
        return CO2(inner, group, eager=config.eager_weight, **options)
    options["delay"] = _delay(config)
    options["fragments"] = parse_fragments(config.fragments)
    return StreamingDiLoCo(inner, group, named_parameters=model.named_parameters(), **options)


def _one_bit(
    config: OptimizerOptions, model: nn.Module, group: Group, steps: int, signals: int
) -> DistributedOptimizer:
    kinds: dict[str, Callable[..., DistributedOptimizer]] = {
        "onebit-adam": OneBitAdam,
        "onebit-lamb": OneBitLamb,
        "zero-one-adam": ZeroOneAdam,
    }
    options: dict[str, Any] = {"lr": learning_rate(config, group.world_size), "group": group}
    options |= {"weight_decay": config.weight_decay, "signals": signals, "module": model}
    options |= {"total_steps": steps, "clip_norm": config.clip_gradients, **_compress(config)}
    warmup = warmup_steps(config, steps)
    if config.optimizer == "zero-one-adam":
        options["schedule"] = ZeroOneSchedule.for_run(steps, warmup)
    else:
        options["warmup"] = warmup
    if config.optimizer == "onebit-adam":
        options["refresh"] = config.refresh
    return kinds[config.optimizer](parameter_groups(config, model), **options)


def warmup_steps(config: OptimizerOptions, steps: int) -> int | None:
    """Return the length of the warm-up in steps, of `steps` in the run; None if it is automatic."""
    if config.warmup == "auto":
        return None
    number = float(config.warmup)
    return max(1, round(number * steps if number < 1 else number))


def format_warmup_warning(config: OptimizerOptions, steps: int) -> str:
    """Return a warning if the warm-up is too short to estimate the variance; else "".

    Args:
        config: options of the run.
        steps: steps of the whole run.
    """
    warmup = warmup_steps(config, steps) if config.optimizer in ONE_BIT else None
    if warmup is None or warmup >= SHORT_WARMUP_STEPS:
        return ""
    return (
        f"{config.optimizer} has a warm-up of {warmup} of {steps} steps. The variance is estimated "
        "from the gradients of these steps, so training may diverge; use more --epochs, a smaller "
        "--batch-size, a longer --warmup or another --optimizer"
    )


def _delay(config: OptimizerOptions) -> int | str:
    text = config.delay
    if text == "default":
        return "auto" if config.local_steps == "auto" else DELAY
    return text if text == "auto" else int(text)


def _compress(config: OptimizerOptions) -> dict[str, Any]:
    """Return the optimizer's argument `compress`; auto takes the default of its class."""
    return {} if config.compress == "auto" else {"compress": compression(config.compress)}


def _local_steps(config: OptimizerOptions) -> int | str:
    text = config.local_steps
    if text == "default":
        return LOCAL_DEFAULTS[config.optimizer].local_steps
    return text if text == "auto" else int(text)
