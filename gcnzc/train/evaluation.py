"""Evaluate the best model of a run, as `gcnzc evaluate` does."""

import time
from dataclasses import replace
from typing import Any

from gcnzc.datasets.source import SPLITS
from gcnzc.system import files
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.correct_and_smooth import correct_and_smooth
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run_folder import read_config
from gcnzc.train.tasks import build_task
from gcnzc.train.tasks.base import flatten_scores
from gcnzc.train.tasks.hetero_link import HeteroLinkTask
from gcnzc.train.tasks.hetero_node import HeteroNodeTask
from gcnzc.train.trained import open_trained


def evaluate(config: EvaluateConfig, reporter: Reporter | None = None) -> dict[str, Any]:
    """Evaluate the best model of a run on the splits that its task scores.

    Args:
        config: the run folder, and the options of `gcnzc evaluate`.
        reporter: shows the progress; None shows nothing.

    Returns:
        The values of the JSON line of `gcnzc evaluate`: the scores by split and metric, such as
        `test_accuracy`; `run`, `data`, `metric`, `evaluation` (the method), `best_epoch` (of the
        model, from 1), `seconds`, and with Correct & Smooth the chosen options,
        `correct_and_smooth`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        ValueError: one of

            - the graph does not fit the model, or has no features;
            - Correct & Smooth is given for link prediction or a heterogeneous graph;
            - `evaluate_negatives` is given, and the run is not of link prediction in a
              heterogeneous graph;
            - the metric does not fit the task;
            - the fanouts are invalid, or `evaluate` is "sampled", and the run reads all neighbours;
            - a score to rank is NaN or infinite.

        OSError: the file of the predictions cannot be written.
    """
    reporter = reporter or NullReporter()
    options = _options_of_evaluation(config, reporter)
    trained = open_trained(config.run, config.data, config.device, config=options, has_labels=True)
    data, task = trained.data, build_task(options, trained.data)
    if isinstance(task, HeteroNodeTask | HeteroLinkTask):
        task.embeddings = trained.embeddings
    begin = time.perf_counter()
    with trained.open_features(has_labels=False) as table:
        of = Evaluated(trained.model, table, trained.device)
        task.choose_evaluation(of, reporter.say, SPLITS)
        with reporter.task("evaluate") as bar:
            of, is_whole = replace(of, progress=bar), trained.is_hetero and config.predictions
            if task.evaluator.method == "exact" or is_whole:
                outputs, scores = task.outputs(of)
            else:
                scores = task.evaluate(of, SPLITS)
    line: dict[str, Any] = {}
    if config.postprocess.name != "none":
        with reporter.task("correct and smooth") as bar:
            found = correct_and_smooth(outputs, data, task, bar, **config.postprocess.given)
        outputs = found.probabilities
        scores = scores | found.scores
        line = {"correct_and_smooth": found.choice}
    if config.predictions is not None:
        files.write_array(config.predictions, outputs.numpy())
    return {
        "run": str(config.run),
        "data": data.name,
        "metric": task.metric,
        "evaluation": task.evaluator.method,
        **flatten_scores(scores),
        **line,
        "best_epoch": trained.epoch,
        "seconds": time.perf_counter() - begin,
    }


def _options_of_evaluation(config: EvaluateConfig, reporter: Reporter) -> TrainConfig:
    """Return the options of the run, with those of the evaluation in place of its own."""
    trained = read_config(config.run)
    task, model, evaluate = trained.graph.task, trained.model, config.evaluate
    if config.postprocess.name != "none" and (task.name == "link" or model.is_hetero):
        raise ValueError(
            f"--postprocess {config.postprocess.name} is for the classes of nodes of graphs of one "
            f"node type, and this run has --task {task.name} and --model {model.model.name}\n\n"
            "hint: omit --postprocess"
        )
    # the options of the training steps need not fit this graph and machine
    options = {
        name: value
        for name, value in task.options.items()
        if name not in ("class_weights", "label_smoothing")
    }
    if config.metric != "as-is":
        options["metric"] = config.metric
    if config.evaluate_negatives is not None:
        if not model.is_hetero or task.name != "link":
            raise ValueError(
                f"--evaluate-negatives {config.evaluate_negatives} is for link prediction in "
                f"heterogeneous graphs, and this run has --model {model.model.name} and --task "
                f"{task.name}\n\nhint: omit --evaluate-negatives"
            )
        options["evaluate_negatives"] = config.evaluate_negatives
    own = trained.training.evaluate
    if evaluate.name in ("sampled", "auto") and "fanouts" not in evaluate.options:
        evaluate = replace(evaluate, options=own.options)
    if model.is_hetero and evaluate.name != "sampled":
        # outputs of nodes that are not evaluated would only take time
        evaluate = replace(evaluate, name="needed", options={})
        if own.name == "sampled":
            reporter.say(
                "evaluation: needed, with all neighbours; the run was scored with sampled "
                "neighbours; --evaluate sampled repeats that"
            )
    return trained.replace(task=replace(task, options=options), evaluate=evaluate, sampler="gcnzc")
