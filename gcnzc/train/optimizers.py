"""The optimizers of a run, built from its options."""

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
from gcnzc.train.config import LOCAL, ONE_BIT, TrainConfig
from gcnzc.train.options import parse_fragments


def build_optimizer(
    config: TrainConfig, model: torch.nn.Module, workers: int = 1
) -> torch.optim.Optimizer:
    """The optimizer of torch over the parameters of `model`, for one of so many workers.

    Of optimizers with local steps it is the inner one.
    """
    parameters, decay = model.parameters(), config.weight_decay
    lr = step_size(config, workers)
    name = config.inner_optimizer if config.optimizer in LOCAL else config.optimizer
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=decay)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay)
    return torch.optim.Adam(parameters, lr, weight_decay=decay)


def step_size(config: TrainConfig, workers: int) -> float:
    """Of one of so many workers."""
    return config.lr * {"none": 1.0, "linear": workers, "sqrt": workers**0.5}[config.scale_lr]


def build_method(
    config: TrainConfig, model: nn.Module, group: Group, steps: int, signals: int = 0
) -> DistributedOptimizer:
    """The optimizer of a run, which exchanges with the other workers.

    Args:
        config: of the run.
        model: on this worker's device.
        group: of all workers.
        steps: of the whole run, of which a warm-up may be a share.
        signals: how many things are told with an exchange.

    Raises:
        ValueError: the options do not fit each other.
    """
    if config.optimizer in ONE_BIT:
        return _one_bit(config, model, group, steps, signals)
    inner = build_optimizer(config, model, group.world_size)
    if config.optimizer not in LOCAL:
        return Averaged(inner, group, signals, module=model, **_compress(config))
    options: dict[str, Any] = {
        "signals": signals,
        "total_steps": steps,
        "module": model,
        **_compress(config),
    }
    options["local_steps"] = _local_steps(config)
    if config.optimizer == "local-sgd":
        return LocalSGD(inner, group, **options)
    usual = LOCAL_DEFAULTS[config.optimizer]
    options["outer_lr"] = usual.outer_lr if config.outer_lr is None else config.outer_lr
    momentum = config.outer_momentum
    options["outer_momentum"] = usual.outer_momentum if momentum is None else momentum
    if config.optimizer == "diloco":
        return DiLoCo(inner, group, **options)
    if config.optimizer == "co2":
        return CO2(inner, group, eager=config.eager_weight, **options)
    options["delay"] = _delay(config)
    options["fragments"] = parse_fragments(config.fragments)
    return StreamingDiLoCo(inner, group, named_parameters=model.named_parameters(), **options)


def _one_bit(
    config: TrainConfig, model: nn.Module, group: Group, steps: int, signals: int
) -> DistributedOptimizer:
    kinds: dict[str, Callable[..., DistributedOptimizer]] = {
        "onebit-adam": OneBitAdam,
        "onebit-lamb": OneBitLamb,
        "zero-one-adam": ZeroOneAdam,
    }
    options: dict[str, Any] = {"lr": step_size(config, group.world_size), "group": group}
    options |= {"weight_decay": config.weight_decay, "signals": signals, "module": model}
    options |= {"total_steps": steps, **_compress(config)}
    warmup = warmup_steps(config, steps)
    if config.optimizer == "zero-one-adam":
        options["schedule"] = ZeroOneSchedule.for_run(steps, warmup)
    else:
        options["warmup"] = warmup
    if config.optimizer == "onebit-adam":
        options["refresh"] = config.refresh
    return kinds[config.optimizer](model.parameters(), **options)


def warmup_steps(config: TrainConfig, steps: int) -> int | None:
    """Steps with whole gradients, of so many in all; None to see when the variance has settled."""
    if config.warmup == "auto":
        return None
    number = float(config.warmup)
    return max(1, round(number * steps if number < 1 else number))


def _delay(config: TrainConfig) -> int | str:
    words = config.delay
    if words == "default":
        return "auto" if config.local_steps == "auto" else DELAY
    return words if words == "auto" else int(words)


def _compress(config: TrainConfig) -> dict[str, Any]:
    """The option of that name, unless the class's default is asked for."""
    return {} if config.compress == "auto" else {"compress": compression(config.compress)}


def _local_steps(config: TrainConfig) -> int | str:
    words = config.local_steps
    if words == "default":
        return LOCAL_DEFAULTS[config.optimizer].local_steps
    return words if words == "auto" else int(words)
