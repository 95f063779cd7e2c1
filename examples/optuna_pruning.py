"""Search the learning rate and the dropout of a run with Optuna, and prune bad trials.

pip install optuna
python examples/optuna_pruning.py GRAPH [--trials 10] [--epochs 10]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import optuna

from gcnzc.train import Callback, StopTraining, TrainConfig, train


class Pruning(Callback):
    """Reports the validation score of each epoch to a trial, and stops it if Optuna prunes it."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.is_pruned = trial, False

    def on_evaluate(self, run: Any) -> None:
        """See `Callback`."""
        self.trial.report(run.scores[run.task.metric]["valid"], run.epoch)
        if self.trial.should_prune():
            self.is_pruned = True
            raise StopTraining(f"trial {self.trial.number} is pruned")


def main() -> None:
    """Search, and print the best options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    def score(trial: optuna.Trial) -> float:
        config = TrainConfig(
            data=options.graph,
            epochs=options.epochs,
            lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            dropout=trial.suggest_float("dropout", 0.0, 0.8),
        )
        pruning = Pruning(trial)
        with tempfile.TemporaryDirectory() as folder:
            result = train(config, Path(folder), callbacks=[pruning])
        if pruning.is_pruned:
            raise optuna.TrialPruned
        return float(result[f"valid_{result['metric']}"])

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(score, n_trials=options.trials)
    pruned = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.PRUNED]
    print(f"{len(pruned)} of {len(study.trials)} trials were pruned")
    print(f"best: {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
