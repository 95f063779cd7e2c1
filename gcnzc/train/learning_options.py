"""Groups of the options of `gcnzc train` for the loss, learning rate, precision and averages."""

from dataclasses import dataclass
from typing import Literal

from gcnzc.train.options import Options, at_least


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """The loss of node classification."""

    label_smoothing: float = 0.0
    """node classification: fraction of the target probability that is spread evenly over all
    classes"""
    class_weights: Literal["none", "balanced"] = "none"
    """node classification: weights of the classes in the loss; balanced: inversely proportional to
    their numbers of training nodes, or with several columns of labels, the weight of the label 1 is
    the number of zeros divided by that of ones"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"--label-smoothing must be in [0, 1), got {self.label_smoothing}\n\n"
                "hint: 0.1 is common; 0 turns label smoothing off"
            )


@dataclass(frozen=True, kw_only=True)
class LearningRateOptions(Options):
    """How the learning rate changes during a run."""

    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """learning rate after the warm-up: constant; decay to 0 at the end of the run along a cosine,
    or linearly; or multiplied by --step-factor every --step-epochs, counted from the start of the
    run (step)"""
    warmup_epochs: float = 0.0
    """epochs at the start of the run in which the learning rate increases linearly to --lr"""
    step_epochs: float = 10.0
    """--schedule step: epochs between two reductions of the learning rate"""
    step_factor: float = 0.1
    """--schedule step: factor by which each reduction multiplies the learning rate"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, "warmup_epochs", self.warmup_epochs)
        if not self.step_epochs > 0:
            raise ValueError(
                f"--step-epochs must be above 0, got {self.step_epochs}\n\nhint: the default is 10"
            )
        if not 0 < self.step_factor < 1:
            raise ValueError(
                f"--step-factor must be in (0, 1), got {self.step_factor}\n\n"
                "hint: the default is 0.1"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The precision of training steps."""

    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"
    """precision of training steps: float32; TF32 for matrix products (tf32, on a GPU); or mixed
    precision, whose layers compute with bfloat16 (bf16) or float16 (fp16) and sum in float32.
    Weights, losses and evaluations are float32"""


@dataclass(frozen=True, kw_only=True)
class AverageOptions(Options):
    """The average of the weights, which is evaluated instead of the weights themselves."""

    average: Literal["none", "ema", "swa"] = "none"
    """evaluate and keep an average of the weights: the exponential moving average over the steps
    (ema), or the mean over the ends of the last epochs (swa, stochastic weight averaging)"""
    average_decay: float = 0.99
    """--average ema: factor of the previous average in each step, smaller in the first ones; the
    average is over about 1 / (1 - decay) steps"""
    average_start: float = 0.75
    """--average swa: fraction of --epochs after which the weights are averaged"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.average_decay < 1:
            raise ValueError(
                f"--average-decay must be in (0, 1), got {self.average_decay}\n\n"
                "hint: 0.99 averages about 100 steps, 0.999 about 1000"
            )
        if not 0 <= self.average_start < 1:
            raise ValueError(
                f"--average-start must be in [0, 1), got {self.average_start}\n\n"
                "hint: the default is 0.75, the last quarter of the epochs"
            )
