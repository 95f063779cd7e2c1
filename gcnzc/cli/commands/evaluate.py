"""The command that evaluates a run."""

from gcnzc.cli.output import print_json
from gcnzc.train import evaluation
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.progress import Reporter


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    print_json(evaluation.evaluate(config, reporter))
