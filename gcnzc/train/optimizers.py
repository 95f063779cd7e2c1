"""Build the optimizer of a run from its options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gcnzc.compress import compression
from gcnzc.exchange import Group
from gcnzc.optim import (
    DistributedOptimizer,
    Muon,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from gcnzc.train.optimizer_options import ONE_BIT, OptimizerOptions
from gcnzc.train.strategies import TrainingSetup, build_strategy, choose_lr

# fewest steps of a warm-up without a warning
SHORT_WARMUP_STEPS = 10


def build_optimizer(
    config: OptimizerOptions, model: torch.nn.Module, workers: int = 1
) -> torch.optim.Optimizer:
    """Build the torch optimizer of a run, which a strategy then wraps.

    Args:
        config: options of the run.
        model: the model whose parameters it updates.
        workers: number of workers, which may scale the learning rate.
    """
    parameters, decay = parameter_groups(config, model), config.weight_decay
    lr = learning_rate(config, workers)
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay)
    if config.optimizer == "muon":
        return Muon(parameters, lr, weight_decay=decay, module=model)
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


def learning_rate(config: OptimizerOptions, workers: int) -> float:
    """Return the learning rate for a number of workers, scaled by --scale-lr."""
    return (
        choose_lr(config) * {"none": 1.0, "linear": workers, "sqrt": workers**0.5}[config.scale_lr]
    )


def build_method(
    config: OptimizerOptions,
    model: nn.Module,
    group: Group,
    steps: int,
    signals: int = 0,
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
    return build_strategy(TrainingSetup(config, model, inner, group, steps, signals))


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
    options |= {"total_steps": steps, "clip_norm": config.clip_gradients}
    if config.compress != "auto":
        options["compress"] = compression(config.compress)
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
