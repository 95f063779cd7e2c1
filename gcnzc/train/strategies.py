"""Strategies: what the workers of a run exchange, and when; the choices of `--strategy`.

`STRATEGIES` has all that a strategy needs besides its name in `StrategyName` and its options in
`OptimizerOptions`, both in `gcnzc.train.optimizer_options`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, RandomK, Threshold, TopK, compression
from gcnzc.exchange import Group
from gcnzc.optim import (
    CO2,
    SAPS,
    A2CiD2,
    Averaged,
    BackupWorkers,
    DecoupledDiLoCo,
    DiLoCo,
    DistributedOptimizer,
    DropCompute,
    FedGLOMO,
    LocalSGD,
    MuLoCo,
    SelSync,
    SparseLoCo,
    StreamingDiLoCo,
)
from gcnzc.train.optimizer_options import (
    LR,
    ONE_BIT,
    SGD_LR,
    UPDATE_RULES,
    OptimizerName,
    OptimizerOptions,
    UpdateRule,
)
from gcnzc.train.options import parse_fragments


@dataclass(frozen=True)
class TrainingSetup:
    """What the optimizer of a run is built from."""

    config: OptimizerOptions
    """the options of the run"""
    model: nn.Module
    """on this worker's device"""
    inner: Optimizer
    """the update rule that --optimizer names"""
    group: Group
    """all workers"""
    steps: int
    """number of steps of the whole run"""
    signals: int = 0
    """number of flags that are sent with each exchange"""


Build: TypeAlias = Callable[[TrainingSetup, dict[str, Any]], DistributedOptimizer]


@dataclass(frozen=True)
class StrategyChoice:
    """How the distributed optimizer of a strategy is built."""

    build: Build
    """returns the optimizer for a setup and the keyword arguments that `options` selects"""
    options: Mapping[str, str] = field(default_factory=dict)
    """options that the strategy uses, and the keyword argument of each; an option that is not given
    is omitted, so that the default of the optimizer's class applies"""
    clips_own_gradients: bool = False
    """whether --clip-gradients limits each worker's gradients before its own step; otherwise it is
    the keyword argument `clip_norm`, which limits the mean gradient"""
    optimizer: UpdateRule | None = None
    """the only --optimizer that the strategy supports, which replaces the default; None for all
    update rules"""
    accumulate: int = 1
    """value of --accumulate that replaces its default, 1"""
    needs_closure: bool = False
    """whether the optimizer computes several gradients in a step, by a closure; excludes
    GradScaler and --clip-gradients"""


def build_strategy(setup: TrainingSetup) -> DistributedOptimizer:
    """Build the distributed optimizer of the strategy that `setup.config` names.

    Raises:
        ValueError: options contradict each other.
    """
    config = setup.config
    strategy = STRATEGIES[config.strategy]
    arguments: dict[str, Any] = {}
    for option, argument in strategy.options.items():
        value = getattr(config, option)
        if value not in (None, NOT_GIVEN.get(option)):
            arguments[argument] = PARSERS.get(option, lambda value: value)(value)
    if not strategy.clips_own_gradients:
        arguments["clip_norm"] = config.clip_gradients
    elif config.clip_gradients is not None:
        _clip_before_steps(setup.inner, config.clip_gradients)
    return strategy.build(setup, arguments)


def choose_optimizer(config: OptimizerOptions, given: Collection[str] = ()) -> OptimizerName:
    """Return the optimizer of a run: --optimizer, or the only one that --strategy supports.

    Args:
        config: the options of the run.
        given: the names of the options that the caller has given, even with the default value.

    Raises:
        ValueError: --optimizer does not support --strategy.
    """
    if config.optimizer in ONE_BIT and config.strategy != "average":
        raise ValueError(
            f"--optimizer {config.optimizer} with --strategy {config.strategy}: "
            f"{config.optimizer} has an exchange of its own\n\n"
            f"hint: omit --strategy, or use --strategy {config.strategy} with --optimizer "
            f"{' or '.join(UPDATE_RULES)}"
        )
    required = STRATEGIES[config.strategy].optimizer
    is_given = "optimizer" in given or config.optimizer != OptimizerOptions.optimizer
    if required is not None and config.optimizer != required and is_given:
        raise ValueError(optimizer_message(config.strategy, config.optimizer))
    return required or config.optimizer


def choose_lr(config: OptimizerOptions) -> float:
    """Return the learning rate of a run: --lr, or the default of --optimizer."""
    if config.lr is not None:
        return config.lr
    return SGD_LR if config.optimizer == "sgd" else LR


def choose_accumulate(config: OptimizerOptions, given: Collection[str] = ()) -> int:
    """Return the number of minibatches of a step: --accumulate, or the default of --strategy.

    Args:
        config: the options of the run.
        given: see `choose_optimizer`.

    Raises:
        ValueError: --accumulate is given, and --strategy does not support it.
    """
    default, of_strategy = OptimizerOptions.accumulate, STRATEGIES[config.strategy].accumulate
    if config.accumulate != default:
        return config.accumulate
    if of_strategy != default and "accumulate" in given:
        raise ValueError(accumulate_message(config.strategy, str(default)))
    return of_strategy


def accumulate_message(strategy: str, accumulate: str) -> str:
    """Return the message that a strategy needs several minibatches in a step."""
    return (
        f"--accumulate {accumulate} with --strategy {strategy}, which needs several minibatches in "
        f"a step\n\nhint: give at least 2, or omit --accumulate for "
        f"{STRATEGIES[strategy].accumulate}"
    )


def optimizer_message(strategy: str, optimizer: str) -> str:
    """Return the message that a strategy does not support an update rule."""
    required = STRATEGIES[strategy].optimizer
    return (
        f"--optimizer {optimizer} with --strategy {strategy}, which is a strategy for {required}"
        f"\n\nhint: use --optimizer {required}, or another --strategy"
    )


def _clip_before_steps(inner: Optimizer, norm: float) -> None:
    """Clip the gradients of this worker before each step of an inner optimizer."""

    def clip(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, norm)

    inner.register_step_pre_hook(clip)


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


# by option: the value that, like None, selects the default of the optimizer's class
NOT_GIVEN = {
    "compress": "auto",
    "local_steps": "default",
    "delay": "default",
    "compute_threshold": "auto",
}
# by option: the function that converts its value to the keyword argument
PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "compress": compression,
    "local_steps": _number_or_word,
    "delay": _number_or_word,
    "fragments": parse_fragments,
    "compute_threshold": lambda text: None if text == "none" else float(text),
}


def _average(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    run = {"signals": setup.signals, "module": setup.model}
    return Averaged(setup.inner, setup.group, **run, **arguments)


def _sparse(make: Callable[..., Compression]) -> Build:
    """Return a function that builds an optimizer that averages compressed gradients."""

    def build(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
        density = {"density": arguments.pop("density")} if "density" in arguments else {}
        return _average(setup, {**arguments, "compress": make(**density)})

    return build


def _drop_compute(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    return DropCompute(
        setup.inner,
        setup.group,
        signals=setup.signals,
        micro_batches=setup.config.accumulate,
        module=setup.model,
        **arguments,
    )


def _with_local_steps(kind: Callable[..., DistributedOptimizer]) -> Build:
    """Return a function that builds a local method."""

    def build(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
        run = {"signals": setup.signals, "total_steps": setup.steps, "module": setup.model}
        return kind(setup.inner, setup.group, **run, **arguments)

    return build


def _sparse_loco(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    if "density" in arguments:
        arguments["compress"] = TopK.sparse_loco(arguments.pop("density"))
    return _with_local_steps(SparseLoCo)(setup, arguments)


def _diloco(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    if "quorum" in arguments:
        return _with_local_steps(DecoupledDiLoCo)(setup, arguments)
    return _with_local_steps(DiLoCo)(setup, arguments)


def _fedglomo(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    # `check_strategy` rejects --clip-gradients
    del arguments["clip_norm"]
    for group in (*setup.inner.param_groups, setup.inner.defaults):
        group["momentum"] = 0.0
    return _with_local_steps(FedGLOMO)(setup, arguments)


def _streaming_diloco(setup: TrainingSetup, arguments: dict[str, Any]) -> DistributedOptimizer:
    if setup.config.local_steps == "auto":
        arguments.setdefault("delay", "auto")
    return _with_local_steps(StreamingDiLoCo)(setup, arguments)


_COMPRESS = {"compress": "compress"}
_LOCAL = {**_COMPRESS, "local_steps": "local_steps"}
_OUTER = {**_LOCAL, "outer_lr": "outer_lr", "outer_momentum": "outer_momentum"}

STRATEGIES: Mapping[str, StrategyChoice] = {
    "average": StrategyChoice(_average, _COMPRESS),
    "local-sgd": StrategyChoice(_with_local_steps(LocalSGD), _LOCAL, clips_own_gradients=True),
    "diloco": StrategyChoice(
        _diloco,
        {**_OUTER, "quorum": "quorum", "grace_s": "grace_s"},
        clips_own_gradients=True,
    ),
    "muloco": StrategyChoice(
        _with_local_steps(MuLoCo), _OUTER, clips_own_gradients=True, optimizer="muon"
    ),
    "streaming-diloco": StrategyChoice(
        _streaming_diloco,
        {**_OUTER, "delay": "delay", "fragments": "fragments"},
        clips_own_gradients=True,
    ),
    "co2": StrategyChoice(
        _with_local_steps(CO2), {**_OUTER, "eager_weight": "eager"}, clips_own_gradients=True
    ),
    "selsync": StrategyChoice(
        _with_local_steps(SelSync),
        {**_COMPRESS, "sync_threshold": "threshold", "sync_window": "window"},
        clips_own_gradients=True,
    ),
    "dropcompute": StrategyChoice(
        _drop_compute,
        {**_COMPRESS, "compute_threshold": "threshold", "max_dropped": "max_dropped"},
        accumulate=4,
    ),
    "topk": StrategyChoice(_sparse(TopK), {"density": "density"}),
    "randomk": StrategyChoice(_sparse(RandomK), {"density": "density"}),
    "dct": StrategyChoice(_sparse(Threshold), {"density": "density"}),
    "sparseloco": StrategyChoice(
        _sparse_loco,
        {
            "local_steps": "local_steps",
            "density": "density",
            "outer_lr": "outer_lr",
            "outer_momentum": "outer_momentum",
        },
        clips_own_gradients=True,
    ),
    "saps": StrategyChoice(
        _with_local_steps(SAPS),
        {"density": "density", "local_steps": "local_steps", "probe_interval": "probe_interval"},
        clips_own_gradients=True,
    ),
    "a2cid2": StrategyChoice(
        _with_local_steps(A2CiD2),
        {"topology": "topology", "gossip_rate": "gossip_rate", "asynchronous": "asynchronous"},
        clips_own_gradients=True,
    ),
    "backup": StrategyChoice(
        _with_local_steps(BackupWorkers),
        {"topology": "topology", "grace": "grace"},
        clips_own_gradients=True,
    ),
    "fedglomo": StrategyChoice(
        _fedglomo,
        {
            **_LOCAL,
            "participants": "participants",
            "local_momentum": "local_momentum",
            "round_weight": "round_weight",
        },
        optimizer="sgd",
        needs_closure=True,
    ),
}
