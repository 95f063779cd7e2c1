"""The commands that evaluate a run, and predict classes of nodes and scores of pairs."""

import difflib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.datasets.source import SPLITS
from gcnzc.train import evaluation
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.hetero.prediction import TrainedHeteroModel, parse_time
from gcnzc.train.options import Fanouts, check_layer_fanouts
from gcnzc.train.prediction import (
    TrainedModel,
    delete_scratch,
    load_model,
    predict_nodes,
    predict_pairs,
    split_indices,
)
from gcnzc.train.prediction_files import (
    read_nodes,
    read_pairs,
    read_times,
    write_links,
    write_nodes,
)
from gcnzc.train.prediction_outputs import check_task
from gcnzc.train.progress import Reporter
from gcnzc.train.scratch_options import ScratchOptions


@dataclass(frozen=True, kw_only=True)
class PredictConfig(ScratchOptions):
    """Predict the classes of nodes, or the scores of pairs, with the best model of a run.

    Reads all neighbours of each node, writes a file, and prints one JSON line.
    """

    run: tyro.conf.Positional[Path]
    """run folder that `gcnzc train` wrote"""
    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph with the same features, which may have other nodes and no labels; the graph
    of the run if not given"""
    out: Path
    """file to write, .csv, .csv.gz, .parquet or .npy"""
    nodes: str = "all"
    """nodes to predict: all; train, valid or test; or a file of ids, .csv or .parquet with a column
    `node`, or .npy"""
    pairs: Path | None = None
    """link prediction: file of pairs of ids, .csv or .parquet with the columns `source` and
    `target`, or .npy of shape (2, pairs)"""
    probabilities: bool = False
    """also write the probability of each class, or that a pair is an edge"""
    time: str | None = None
    """link prediction in heterogeneous graphs, with --temporal: time of all pairs, whose neighbours
    are earlier: an integer, or a date such as 2024-03-01 if the graph has a time unit; by default
    that of the column `time` in the file of pairs, and without such a column after all edges and
    nodes"""
    fanouts: Fanouts = ()
    """heterogeneous graphs: neighbours sampled per node and edge type, one number per layer, input
    layer first; by default all neighbours are read"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto uses CUDA if there is a GPU"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs is not None and self.nodes != "all":
            raise ValueError(
                f"--nodes {self.nodes} with --pairs {self.pairs}\n\n"
                "hint: --pairs is of link prediction, and --nodes of node classification"
            )
        if self.time is not None and self.pairs is None:
            raise ValueError(
                f"--time {self.time} has no effect without --pairs\n\nhint: omit --time"
            )
        if self.fanouts:
            check_layer_fanouts(self.fanouts)


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    print_json(evaluation.evaluate(config, reporter))


def predict_command(config: PredictConfig, reporter: Reporter) -> None:
    """`gcnzc predict`."""
    began = time.perf_counter()
    loaded = load_model(config.run, config.data, config.device)
    check_task(loaded.config.task, has_pairs=config.pairs is not None)
    write = _predict_nodes if config.pairs is None else _predict_links
    is_replaced = config.out.exists()
    count, columns = write(config, loaded, reporter)
    delete_scratch(config.scratch)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "data": loaded.data.name,
            "task": loaded.config.task,
            "out": str(config.out),
            "predictions": count,
            "columns": columns,
            "best_epoch": loaded.epoch,
            "seconds": time.perf_counter() - began,
        }
    )


def _predict_nodes(
    config: PredictConfig, loaded: TrainedModel | TrainedHeteroModel, reporter: Reporter
) -> tuple[int, list[str]]:
    if config.nodes == "all":
        nodes = None
    elif config.nodes in SPLITS:
        nodes = split_indices(loaded.data, config.nodes)
    else:
        path = Path(config.nodes)
        if not path.exists():
            near = difflib.get_close_matches(config.nodes, ("all", *SPLITS), 1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise FileNotFoundError(
                f"--nodes: there is no file {config.nodes}\n\n"
                f"hint: {suggestion}give all, train, valid, test or a file of ids"
            )
        nodes = read_nodes(path, loaded.node_index)
    found = predict_nodes(
        loaded,
        nodes,
        reporter,
        config.scratch,
        config.memory_bytes,
        fanouts=config.fanouts or None,
    )
    return len(found.nodes), write_nodes(config.out, found, config.probabilities)


def _predict_links(
    config: PredictConfig, loaded: TrainedModel | TrainedHeteroModel, reporter: Reporter
) -> tuple[int, list[str]]:
    assert config.pairs is not None
    sources, targets = read_pairs(config.pairs, loaded.end_indices)
    times: Any = config.time
    if isinstance(loaded, TrainedHeteroModel):
        if times is not None:
            times = parse_time(loaded, times)
        elif loaded.is_temporal:
            times = read_times(config.pairs, loaded.graph.time_unit)
    found = predict_pairs(
        loaded,
        sources,
        targets,
        reporter,
        config.scratch,
        config.memory_bytes,
        times=times,
        fanouts=config.fanouts or None,
    )
    return len(found.scores), write_links(config.out, found, config.probabilities)
