"""Build the samplers and the optimizer of a run from its options."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gcnzc.compress import compression
from gcnzc.exchange import Group
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.graph import Graph
from gcnzc.optim import (
    DistributedOptimizer,
    DropCompute,
    LocalMethod,
    StreamingDiLoCo,
    ZeroOneSchedule,
)
from gcnzc.optim.defaults import WARMUP_SHARE
from gcnzc.sampling.neighbor import Sampler, SamplerProtocol
from gcnzc.train.config import ONE_BIT, LoadingOptions, TrainConfig, TrainingOptions
from gcnzc.train.models import build_gnn
from gcnzc.train.values import MAX_COUNT


def build_sampler(loading: LoadingOptions, data: Dataset) -> SamplerProtocol:
    """Build the neighbour sampler that --sampler selects."""
    if loading.sampler == "dgl":
        from gcnzc.interop.dgl import DglSampler

        return DglSampler(data.graph, list(loading.fanouts), seed=loading.seed)
    return Sampler(data.graph, list(loading.fanouts), seed=loading.seed)


def choose_fanouts(given: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Return the given fanouts, input layer first; all neighbours of each layer if None."""
    return [-1] * num_layers if given is None else given


def build_hetero_sampler(config: TrainConfig, graph: Graph, fanouts: Sequence[int]) -> Sampler:
    """Build the neighbour sampler of a run.

    Args:
        config: options of the run.
        graph: the graph to sample from.
        fanouts: neighbours per node and edge type, input layer first.
    """
    temporal: Any = config.graph.temporal.name if config.graph.is_temporal else None
    return Sampler(
        graph,
        fanouts,
        seed=config.loading.seed,
        temporal=temporal,
        time=config.graph.time_kind,
        once=True,
    )


def build_optimizer(
    config: TrainConfig, model: nn.Module, group: Group, steps: int, signals: int = 0
) -> DistributedOptimizer:
    """Build the update rule of a run, and the strategy that exchanges gradients or updates.

    Args:
        config: options of the run.
        model: on this worker's device.
        group: all workers.
        steps: steps of the whole run.
        signals: number of flags that are sent with each exchange.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """
    training, strategy = config.training, config.run.strategy
    run: dict[str, Any] = {"signals": signals, "module": model}
    clip_norm = training.clip_gradients
    if training.optimizer.name in ONE_BIT:
        run |= {"group": group, "total_steps": steps, "clip_norm": clip_norm}
        return _update_rule(config, model, group, steps, run)
    inner = _update_rule(config, model, group, steps, {})
    kind, own = strategy.load(), _with_compression(strategy.given)
    if issubclass(kind, LocalMethod):
        if clip_norm is not None:
            _clip_before_steps(inner, clip_norm)
        run["total_steps"] = steps
    else:
        run["clip_norm"] = clip_norm
    if issubclass(kind, DropCompute):
        run["micro_batches"] = training.accumulate
    if issubclass(kind, StreamingDiLoCo) and own.get("local_steps") == "auto":
        own.setdefault("delay", "auto")  # both are measured together
    method: DistributedOptimizer = kind(inner, group, **run, **own)
    return method


def _update_rule(
    config: TrainConfig, model: nn.Module, group: Group, steps: int, run: dict[str, Any]
) -> Any:
    """Build the optimizer that --optimizer selects."""
    training = config.training
    chosen = training.optimizer
    own = _with_compression(chosen.given)
    if chosen.name == "muon":
        run["module"] = model
    if config.run.strategy.name == "fedglomo":
        own["momentum"] = 0.0  # it has a momentum of its own
    if chosen.name in ONE_BIT:
        warmup = warmup_steps(training, steps)
        own.pop("warmup", None)
        if chosen.name == "zero-one-adam":
            own["schedule"] = zero_one_schedule(steps, warmup=warmup)
        else:
            own["warmup"] = warmup
    scale = {"none": 1.0, "linear": group.world_size, "sqrt": group.world_size**0.5}
    lr = training.learning_rate * scale[training.scale_lr]
    return chosen.load()(parameter_groups(training, model), lr=lr, **run, **own)


def zero_one_schedule(steps: int, *, warmup: int | str | None = "default") -> ZeroOneSchedule:
    """Return the schedule of 0/1 Adam.

    Args:
        steps: steps of the whole run.
        warmup: steps before the first local steps, or their fraction of the run, by default 0.15;
            auto: there are no local steps.
    """
    return ZeroOneSchedule.for_run(steps, warmup)


def _with_compression(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of a compression, such as topk:0.01, by the compression."""
    for name in ("compress", "gradient_compression"):
        if isinstance(options.get(name), str):
            options[name] = compression(options[name])
    return options


def parameter_groups(training: TrainingOptions, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of a model in groups for an optimizer, by their weight decay.

    With --decay weights, parameters of fewer than two dimensions have none: biases, and the scales
    and shifts of normalization.
    """
    if training.decay == "all":
        return [{"params": list(model.parameters())}]
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _clip_before_steps(inner: Optimizer, norm: float) -> None:
    """Clip the gradients of this worker before each step of an inner optimizer."""

    def clip(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, norm)

    inner.register_step_pre_hook(clip)


def warmup_steps(training: TrainingOptions, steps: int) -> int | None:
    """Return the length of a warm-up in steps, of `steps` in the run; None if it is automatic."""
    given = training.optimizer.given.get("warmup", "default")
    if given == "default":
        given = WARMUP_SHARE
    if given in (None, "auto"):
        return None
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not (0 < number < 1 or (1 <= number <= MAX_COUNT and number.is_integer())):
        raise ValueError(
            f"warmup of --optimizer {training.optimizer.name} must be a number of steps, a "
            f"fraction of the run or auto, got {given!r:.100}\n\n"
            "hint: such as warmup=100 or warmup=0.3"
        )
    return max(1, round(number * steps if number < 1 else number))


def check_options(config: TrainConfig, workers: int) -> None:
    """Build a small model and its optimizer, so that their classes check their options.

    Args:
        config: options of the run.
        workers: the number of workers, also if torchrun has started them.

    Raises:
        ValueError: an option of --model, --optimizer or --strategy is not valid.
    """
    # of typed models, the hidden features are divided between the heads
    heads = config.model.model.given.get("heads", 4)
    options = config.model.replace(hidden=max(1, heads) if config.model.is_hetero else 1)
    with torch.random.fork_rng([]):
        inputs: tuple[Any, ...] = (1,)
        outputs: tuple[Any, ...] = (2,)
        if options.is_hetero:
            inputs, outputs = ((["node"], [("node", "to", "node")]), {"node": 1}), (2, "node")
        model = build_gnn(options, inputs, outputs, config.layers)
        try:
            build_optimizer(config, model, Group(0, workers), steps=100)
        except re.error as error:
            raise ValueError(
                f"--strategy {config.run.strategy} has an invalid regular expression: {error}\n\n"
                "hint: fragments are selected by expressions such as 0,bias$"
            ) from None
