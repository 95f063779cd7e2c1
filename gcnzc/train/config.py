"""Options of `gcnzc train` and `gcnzc evaluate`, for the command line, Python and the run folder.

Each class is a subcommand: its fields are the options, and the string below a field is its help.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gcnzc.train.evaluation_options import (
    EvaluationOptions,
    Method,
    check_evaluate_fanouts,
    check_samples,
)
from gcnzc.train.given_options import given_options, remember_given
from gcnzc.train.hetero_options import HETERO_MODELS, HeteroOptions, check_hetero
from gcnzc.train.model_options import ModelOptions
from gcnzc.train.optimizer_options import OptimizerOptions
from gcnzc.train.option_groups import (
    DEFAULT_FANOUTS,
    AverageOptions,
    CorrectAndSmoothOptions,
    DataOptions,
    FeatureOptions,
    LearningRateOptions,
    LoaderOptions,
    LossOptions,
    Metric,
    OutputOptions,
    PrecisionOptions,
    ScheduleOptions,
    TaskOptions,
    WorkerOptions,
)
from gcnzc.train.options import Fanouts, at_least, check_layer_fanouts, option_name
from gcnzc.train.presets import accept_preset
from gcnzc.train.strategies import choose_accumulate, choose_lr, choose_optimizer
from gcnzc.train.strategy_checks import check_strategy


# dataclasses order inherited fields from the last base to the first
@remember_given
@accept_preset
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    OutputOptions,
    WorkerOptions,
    FeatureOptions,
    PrecisionOptions,
    AverageOptions,
    LearningRateOptions,
    OptimizerOptions,
    EvaluationOptions,
    ScheduleOptions,
    LoaderOptions,
    LossOptions,
    HeteroOptions,
    TaskOptions,
    ModelOptions,
    DataOptions,
):
    """Train a model on a graph, and keep the weights with the best validation metric.

    Prints one JSON line; the run folder has the records, curves.png and the checkpoints.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        names = given_options(self)
        object.__setattr__(self, "optimizer", choose_optimizer(self, names))
        object.__setattr__(self, "lr", choose_lr(self))
        object.__setattr__(self, "accumulate", choose_accumulate(self, names))
        check_strategy(self)
        if self.is_hetero:
            check_hetero(self)
        if self.is_full_batch:
            _check_full_batch(self)
            if self.fanouts == DEFAULT_FANOUTS:
                object.__setattr__(self, "fanouts", (-1,) * self.layers)
        if len(self.fanouts) != self.layers:
            given = ",".join(map(str, self.fanouts))
            hint = f"; use --layers {len(self.fanouts)} with these"
            what = f"{len(self.fanouts)} fanouts ({given})"
            if self.fanouts == DEFAULT_FANOUTS:
                what, hint = f"the {len(self.fanouts)} default fanouts ({given})", ""
            raise ValueError(
                f"{what} for {self.layers} layers\n\n"
                f"hint: give --fanouts one number per layer, input layer first{hint}"
            )
        check_evaluate_fanouts(self.evaluate_fanouts, self.layers)
        if self.evaluate == "sampled" and not self.evaluate_fanouts:
            check_samples(self.fanouts)
        if self.warmup_epochs and self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"--warmup-epochs {self.warmup_epochs:g} with --epochs {self.epochs}: the warm-up "
                "would be the whole run\n\nhint: use a smaller --warmup-epochs, or more --epochs"
            )

    @property
    def is_hetero(self) -> bool:
        """Whether the model is for graphs with several types of nodes and edges."""
        return self.model in HETERO_MODELS


def _check_full_batch(config: TrainConfig) -> None:
    """Raise a ValueError if an option does not support --batch-size all."""
    if config.fanouts != DEFAULT_FANOUTS and set(config.fanouts) != {-1}:
        raise ValueError(fanouts_message(config.fanouts))
    number = "give --batch-size a number, such as 1024"
    for name, value, reason, hint in (
        ("task", "link", "link prediction samples edges and negatives in minibatches", number),
        ("sampler", "dgl", "nothing is sampled", f"omit --sampler, or {number}"),
        ("seed_order", "rotating", "each step uses all seeds", f"omit --seed-order, or {number}"),
        ("seed_order", "local", "each step uses all seeds", f"omit --seed-order, or {number}"),
        ("features", "cached", "features are gathered only once", "use --features host"),
    ):
        if getattr(config, name) == value:
            given = f"{option_name(name)} {value} with --batch-size all"
            raise ValueError(f"{given}: {reason}\n\nhint: {hint}")
    if config.strategy == "dropcompute":
        raise ValueError(
            "--strategy dropcompute with --batch-size all: an epoch is a single step, without "
            f"minibatches to drop\n\nhint: use another --strategy, or {number}"
        )
    if config.accumulate > 1:
        raise ValueError(
            f"--accumulate {config.accumulate} with --batch-size all: an epoch is a single step\n\n"
            f"hint: omit --accumulate, or {number}"
        )
    if config.workers > 1:
        raise ValueError(workers_message(f"--workers {config.workers}"))


def fanouts_message(fanouts: Sequence[object]) -> str:
    """Return the message that fanouts do not fit --batch-size all."""
    return (
        f"--fanouts {','.join(map(str, fanouts))} with --batch-size all: a full-batch step uses "
        "all neighbours\n\nhint: omit --fanouts, or give -1 for each layer; to sample "
        "neighbours, give --batch-size a number, such as 1024"
    )


def workers_message(given: str) -> str:
    """Return the message that `given`, such as "--workers 2", does not fit --batch-size all."""
    return (
        f"{given} with --batch-size all: one process computes the whole graph, on all cores or on "
        "one GPU\n\nhint: use one worker, or give --batch-size a number, such as 1024"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(CorrectAndSmoothOptions):
    """Evaluate the best model of a run, and print one JSON line."""

    run: tyro.conf.Positional[Path]
    """run folder that `gcnzc train` wrote"""
    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph with the same features and classes; the graph of the run if not given"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to evaluate; auto uses CUDA if there is a GPU"""
    predictions: Path | None = None
    """also write the logits of all nodes to this .npy file; with --correct-and-smooth, class
    probabilities, and in link prediction, the embeddings of all nodes"""
    metric: Metric = "as-is"
    """node classification: metric to compute; as-is: that of the run"""
    evaluate: Method = "exact"
    """nodes for which hidden layers are computed: all nodes (exact), those that the evaluated nodes
    depend on (needed), or sampled neighbours of the evaluated nodes (sampled); auto chooses the
    cheaper one of needed and exact, or sampled if layer outputs would take more than half of RAM
    plus swap, and prints why"""
    evaluate_fanouts: Fanouts = ()
    """--evaluate sampled or auto: neighbours sampled per node, one number per layer, input layer
    first; by default those of the run"""
    evaluate_negatives: int | Literal["all"] | None = None
    """link prediction in heterogeneous graphs: random destinations with which each held-out edge is
    ranked, or all; by default as in the run"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_fanouts:
            check_layer_fanouts(self.evaluate_fanouts)
            if self.evaluate not in ("sampled", "auto"):
                raise ValueError(
                    f"--evaluate-fanouts has no effect with --evaluate {self.evaluate}\n\n"
                    "hint: only --evaluate sampled or auto uses it"
                )
        if isinstance(self.evaluate_negatives, int):
            at_least(1, "evaluate_negatives", self.evaluate_negatives)
        for name in ("predictions", "correct_and_smooth"):
            if getattr(self, name) and self.evaluate != "exact":
                raise ValueError(
                    f"{option_name(name)} with --evaluate {self.evaluate}: it needs the outputs of "
                    "all nodes\n\nhint: use --evaluate exact"
                )
