"""Evaluate the best model of a run, as `gcnzc evaluate` does."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gcnzc.datasets.source import SPLITS
from gcnzc.exchange import Group
from gcnzc.graph.dataset import Dataset
from gcnzc.models.hetero import HeteroModel
from gcnzc.system import files
from gcnzc.train import checkpoint
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.correct_and_smooth import correct_and_smooth
from gcnzc.train.hetero.data import HeteroDataset, load_graph, open_tables
from gcnzc.train.hetero.embeddings import embedded_types, load_embeddings
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run_folder import BEST, CONFIG, read_config
from gcnzc.train.schema import check_names, read_schema, schema_of
from gcnzc.train.setup import choose_device, feature_table
from gcnzc.train.tasks import build_task
from gcnzc.train.tasks.hetero_link import HeteroLinkTask
from gcnzc.train.tasks.hetero_node import HeteroNodeTask

BEST_KEYS: Mapping[str, type] = {"epoch": int, "valid": float, "scores": dict, "model": dict}


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
    trained = _options_of_evaluation(config, reporter)
    source = config.data or graph_of_run(config.run, trained)
    data = load_graph(trained, source)
    if isinstance(data, Dataset):
        check_features(data, source)
    device = choose_device(config.device)
    task = build_task(trained, data)
    schema = read_schema(config.run)
    check_names(schema, data, source)
    if isinstance(data, HeteroDataset) and trained.graph.task.name == "node":
        own = schema_of(data)
        if own.num_outputs != schema.num_outputs:
            sizes = "outputs (classes)", own.num_outputs, schema.num_outputs
            raise _size_error(source, trained.graph.data, *sizes)
    model = task.model().to(device)
    best = load_best(model, config.run, source, trained.graph.data)
    if isinstance(data, HeteroDataset):
        assert isinstance(task, HeteroNodeTask | HeteroLinkTask), "`build_task` has built it"
        names = embedded_types(model, data)
        task.embeddings = load_embeddings(config.run, best["epoch"], names, data)
    begin = time.perf_counter()
    with ExitStack() as stack:
        table: Any
        if isinstance(data, Dataset):
            where = trained.loading.features.name
            table = stack.enter_context(feature_table(data, where, device, Group()))
        else:
            table = stack.enter_context(open_tables(data.table, device, Group()))
        task.choose_evaluation(model, table, Group(), reporter.say, splits=SPLITS)
        with reporter.task("evaluate") as bar:
            is_whole = trained.model.is_hetero and config.predictions
            if task.evaluator.method == "exact" or is_whole:
                outputs, scores = task.outputs(model, table, device, bar)
            else:
                scores = task.evaluate(model, table, device, bar, splits=SPLITS)
    line: dict[str, Any] = {}
    if config.postprocess.name != "none":
        assert isinstance(data, Dataset), "checked above"
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
        "best_epoch": best["epoch"] + 1,
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


def graph_of_run(run: Path, trained: TrainConfig) -> Path:
    """Return the folder of the graph of a run.

    Raises:
        FileNotFoundError: it does not exist.
    """
    path = trained.graph.data
    assert path is not None, "read_config has checked"
    if not path.exists():
        raise FileNotFoundError(
            f"the graph of the run in {run} is not at {path}\n\n"
            "hint: give its folder as DATA, or change to the folder in which the run was started"
        )
    return path


def check_features(data: Dataset, source: Path) -> None:
    """Check that a graph has features, before a model is built for it.

    Raises:
        ValueError: it has none.
    """
    if data.table is None:
        raise ValueError(
            f"{source} has no features, which the model reads\n\n"
            "hint: prepare it with the features of the graph that the model was trained on"
        )


def load_best(model: nn.Module, run: Path, source: Path, trained_on: Path | None) -> dict[str, Any]:
    """Load the best weights of a run into a new model for a graph.

    Args:
        model: built with the options of the run, for the graph.
        run: the run folder.
        source: the graph.
        trained_on: the graph of the run.

    Returns:
        The contents of the checkpoint, such as `epoch`, which counts from 0.

    Raises:
        FileNotFoundError: the run has no evaluation yet.
        ValueError: the graph does not fit the model, or the checkpoint is damaged.
    """
    if (run / CONFIG).is_file() and not (run / BEST).exists():
        raise FileNotFoundError(
            f"the run in {run} has no evaluated model yet: it has no {BEST}\n\n"
            "hint: wait for its first evaluation, of epoch 1 or of --evaluate-every; if the run "
            f"was stopped, `gcnzc train --resume {run}` resumes it"
        )
    try:
        best = checkpoint.load(run / BEST, BEST_KEYS)
    except ValueError as error:
        cause = str(error).partition("\n\n")[0]
        raise ValueError(
            f"{cause}\n\nhint: `gcnzc train --resume {run}` writes it again from the checkpoint"
        ) from None
    _check_sizes(model.state_dict(), best["model"], source, trained_on)
    for part in model.modules():
        if isinstance(part, HeteroModel):
            _check_typed_columns(part, model.state_dict(), best["model"], source, trained_on)
    checkpoint.match(model, best["model"], run / BEST)
    return best


def _check_sizes(
    new_state: Mapping[str, Any],
    trained_state: Mapping[str, Any],
    source: Path,
    trained_on: Path | None,
) -> None:
    """Check that a graph has as many feature columns and classes as the graph of the run.

    Args:
        new_state: state dict of a new model for the graph to evaluate.
        trained_state: state dict of the trained model.
        source: the graph to evaluate.
        trained_on: the graph of the run.

    Raises:
        ValueError: a number differs.
    """
    for what, size_of in (("outputs (classes)", _num_outputs), ("feature columns", _num_columns)):
        found, expected = size_of(new_state), size_of(trained_state)
        if found != expected and None not in (found, expected):
            raise _size_error(source, trained_on, what, found, expected)


def _size_error(
    source: Path, trained_on: Path | None, what: str, found: int | None, expected: int | None
) -> ValueError:
    return ValueError(
        f"{source} has {found} {what}, but the model was trained on {trained_on} with {expected}"
        "\n\nhint: a model fits only graphs with the same numbers of feature columns and classes; "
        "without DATA, the graph of the run is evaluated"
    )


def _check_typed_columns(
    encoder: HeteroModel,
    new_state: Mapping[str, Any],
    trained_state: Mapping[str, Any],
    source: Path,
    trained_on: Path | None,
) -> None:
    """Check that each node type has as many columns as in the graph of the run.

    Args:
        encoder: of the new model, for the graph to evaluate.
        new_state: state dict of the new model.
        trained_state: state dict of the trained model.
        source: the graph to evaluate.
        trained_on: the graph of the run.

    Raises:
        ValueError: a number differs.
    """
    for number, t in enumerate(encoder.in_types):
        name, ending = encoder.metadata.node_types[t], f"input_linears.{number}.weight"
        key = next((each for each in new_state if each.endswith(ending)), "")
        if key not in trained_state or trained_state[key].shape == new_state[key].shape:
            continue
        found, expected = new_state[key].shape[1], trained_state[key].shape[1]
        raise ValueError(
            f"with {source}, node type {name!r} has {found} input columns, but the model was "
            f"trained on {trained_on} with {expected}\n\n"
            "hint: a model fits only graphs with the same features; a node type without features "
            "has the columns of its embeddings"
        )


def _num_columns(state: Mapping[str, Any]) -> int | None:
    """Return the input width of the model; None if there is no such layer."""
    for name, value in state.items():
        if name.endswith("input_linear.weight"):
            return int(value.shape[1])
        # attention vectors also have two axes
        is_weight = "layers.0." in name and name.endswith("weight")
        if is_weight and isinstance(value, Tensor) and value.ndim > 1:
            return value.shape[-1]
    return None


def _num_outputs(state: Mapping[str, Any]) -> int | None:
    """Return the output width of the model; None if there is no such layer."""
    for name, value in state.items():
        if name.endswith("output_linear.bias"):
            return len(value)
    biases = {
        name: value
        for name, value in state.items()
        if "layers." in name and name.endswith("bias") and isinstance(value, Tensor)
    }
    # a layer's own bias is of its output; GATv2's projections have biases of all heads
    own = [value for name, value in biases.items() if name.split(".")[-2].isdigit()]
    found = own or list(biases.values())
    return found[-1].shape[0] if found else None


def flatten_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flatten scores by metric and split to keys such as `valid_accuracy`."""
    return {
        f"{split}_{metric}": value
        for metric, values in scores.items()
        for split, value in values.items()
    }
