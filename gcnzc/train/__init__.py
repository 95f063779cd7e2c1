"""Training runs: `gcnzc train` and `gcnzc evaluate` as functions."""

from typing import TYPE_CHECKING

from gcnzc._lazy import lazy_attributes

if TYPE_CHECKING:
    from gcnzc.train.callbacks import Callback
    from gcnzc.train.config import EvaluateConfig, TrainConfig
    from gcnzc.train.errors import StopTraining
    from gcnzc.train.evaluation import evaluate
    from gcnzc.train.prediction import embed_nodes, predict, predict_links
    from gcnzc.train.repeated_runs import train_runs
    from gcnzc.train.run import train

__all__ = [
    "Callback",
    "EvaluateConfig",
    "StopTraining",
    "TrainConfig",
    "embed_nodes",
    "evaluate",
    "predict",
    "predict_links",
    "train",
    "train_runs",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "gcnzc.train.callbacks": ("Callback",),
        "gcnzc.train.errors": ("StopTraining",),
        "gcnzc.train.config": ("EvaluateConfig", "TrainConfig"),
        "gcnzc.train.evaluation": ("evaluate",),
        "gcnzc.train.prediction": ("embed_nodes", "predict", "predict_links"),
        "gcnzc.train.repeated_runs": ("train_runs",),
        "gcnzc.train.run": ("train",),
    },
)
