"""Options of `gcnzc train` and `gcnzc evaluate`, for the command line, Python and the run folder.

Each class is a subcommand: its fields are the options, and the string below a field is its help.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gcnzc.train.learning_options import LearningRateOptions, LossOptions
from gcnzc.train.old_names import accept_old_options
from gcnzc.train.option_groups import (
    DataOptions,
    FeatureOptions,
    LoaderOptions,
    ModelOptions,
    OptimizerOptions,
    OutputOptions,
    ScheduleOptions,
    TaskOptions,
    WorkerOptions,
)
from gcnzc.train.options import check_options


# dataclasses order inherited fields from the last base to the first
@accept_old_options("train")
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    OutputOptions,
    WorkerOptions,
    FeatureOptions,
    LearningRateOptions,
    OptimizerOptions,
    ScheduleOptions,
    LoaderOptions,
    LossOptions,
    TaskOptions,
    ModelOptions,
    DataOptions,
):
    """Train a model on a graph, and keep the weights with the best validation metric.

    Prints one JSON line; the run folder has the records, curves.png and the checkpoints.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.fanouts) != self.layers:
            given = ",".join(map(str, self.fanouts))
            raise ValueError(
                f"{len(self.fanouts)} fanouts ({given}) for {self.layers} layers\n\n"
                "hint: --fanouts takes one number per layer, input layer first; use --layers "
                f"{len(self.fanouts)} with these"
            )
        if self.warmup_epochs and self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"--warmup-epochs {self.warmup_epochs:g} with --epochs {self.epochs}: the warm-up "
                "would be the whole run\n\nhint: use a smaller --warmup-epochs, or more --epochs"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluate the best model of a run with all neighbours, and print one JSON line."""

    run: tyro.conf.Positional[Path]
    """run folder that `gcnzc train` wrote"""
    data: Path | None = None
    """folder of another graph to evaluate on; the graph of the run if not given"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to evaluate; auto takes CUDA if there is a GPU"""
    predictions: Path | None = None
    """also write the logits of all nodes to this .npy"""

    def __post_init__(self) -> None:
        check_options(self)
