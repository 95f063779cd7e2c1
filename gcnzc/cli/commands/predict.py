"""The commands that evaluate a run, and predict classes of nodes and scores of pairs."""

import difflib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcnzc.cli.options import PredictConfig
from gcnzc.cli.output import print_json
from gcnzc.datasets.parquet_tables import import_parquet
from gcnzc.datasets.source import SPLITS
from gcnzc.system import files
from gcnzc.train import evaluation
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.layerwise.scratch import remove_scratch
from gcnzc.train.prediction import (
    check_task,
    embed,
    parse_time,
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
from gcnzc.train.progress import Reporter
from gcnzc.train.trained import Trained, open_trained


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    print_json(evaluation.evaluate(config, reporter))


def predict_command(config: PredictConfig, reporter: Reporter) -> None:
    """`gcnzc predict`."""
    began = time.perf_counter()
    if config.out.suffix == ".parquet":
        import_parquet()
    trained = open_trained(config.run, config.data, config.device)
    is_replaced = config.out.exists()
    how = {
        "fanouts": config.fanouts or None,
        "scratch": config.scratch,
        "memory": config.memory_bytes,
    }
    if config.embeddings:
        found = _write_embeddings(config, trained, reporter, how)
    else:
        check_task(trained, has_pairs=config.pairs is not None)
        write = _predict_nodes if config.pairs is None else _predict_links
        count, columns = write(config, trained, reporter, how)
        found = {"predictions": count, "columns": columns}
    if config.scratch is not None:
        remove_scratch(config.scratch)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "data": trained.data.name,
            "task": trained.config.graph.task.name,
            "out": str(config.out),
            **found,
            "best_epoch": trained.epoch,
            "seconds": time.perf_counter() - began,
        }
    )


def _write_embeddings(
    config: PredictConfig, trained: Trained, reporter: Reporter, how: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the outputs of a layer for all nodes."""
    moment = None if config.time is None else parse_time(trained, config.time)
    found = embed(trained, reporter, config.layer, node_type=config.node_type, time=moment, **how)
    files.write_array(config.out, found.rows)
    node_type = {} if found.node_type is None else {"node_type": found.node_type}
    shape = {"nodes": len(found.rows), "columns": found.rows.shape[1]}
    return {**shape, **node_type, "layer": found.layer}


def _predict_nodes(
    config: PredictConfig, trained: Trained, reporter: Reporter, how: Mapping[str, Any]
) -> tuple[int, list[str]]:
    if config.nodes == "all":
        nodes = None
    elif config.nodes in SPLITS:
        nodes = split_indices(trained, config.nodes)
    else:
        path = Path(config.nodes)
        if not path.exists():
            near = difflib.get_close_matches(config.nodes, ("all", *SPLITS), 1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise FileNotFoundError(
                f"--nodes: there is no file {config.nodes}\n\n"
                f"hint: {suggestion}give all, train, valid, test or a file of ids"
            )
        nodes = read_nodes(path, trained.target_index)
    found = predict_nodes(trained, nodes, reporter, **how)
    return len(found.nodes), write_nodes(config.out, found, config.probabilities)


def _predict_links(
    config: PredictConfig, trained: Trained, reporter: Reporter, how: Mapping[str, Any]
) -> tuple[int, list[str]]:
    assert config.pairs is not None
    sources, targets = read_pairs(config.pairs, trained.end_indices)
    times: Any = None
    if config.time is not None:
        times = parse_time(trained, config.time)
    elif trained.config.graph.is_temporal:
        times = read_times(config.pairs, trained.data.graph.time_unit)
    found = predict_pairs(trained, sources, targets, reporter, times=times, **how)
    return len(found.scores), write_links(config.out, found, config.probabilities)
