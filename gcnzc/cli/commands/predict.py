"""The commands that evaluate a run, and predict classes of nodes and scores of pairs."""

import difflib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.cli.options import PredictConfig
from gcnzc.cli.output import print_json
from gcnzc.datasets.source import SPLITS
from gcnzc.datasets.table_graph import open_table
from gcnzc.system import files
from gcnzc.train import evaluation
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.layerwise.scratch import remove_scratch
from gcnzc.train.prediction import embed_nodes, predict, predict_links
from gcnzc.train.prediction_files import write_predictions
from gcnzc.train.progress import Reporter
from gcnzc.train.trained import Trained, open_trained


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    print_json(evaluation.evaluate(config, reporter))


def predict_command(config: PredictConfig, reporter: Reporter) -> None:
    """`gcnzc predict`."""
    began = time.perf_counter()
    _check_nodes(config.nodes)
    trained = open_trained(config.run, config.data, config.device)
    is_replaced = config.out.exists()
    how = {
        "fanouts": config.fanouts or None,
        "scratch": config.scratch,
        "memory": config.memory_bytes,
        "reporter": reporter,
    }
    write = _write_nodes if config.pairs is None else _write_links
    found = (_write_embeddings if config.embeddings else write)(config, trained, how)
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


def _check_nodes(nodes: str) -> None:
    """Check what can be checked of --nodes before the graph is loaded."""
    if nodes in ("all", *SPLITS):
        return
    if not Path(nodes).exists():
        near = difflib.get_close_matches(nodes, ("all", *SPLITS), 1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise FileNotFoundError(
            f"--nodes: there is no file {nodes}\n\n"
            f"hint: {suggestion}give all, train, valid, test or a file of ids"
        )
    if not nodes.endswith(".npy"):
        open_table(Path(nodes))


def _write_embeddings(
    config: PredictConfig, trained: Trained, how: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the outputs of a layer for all nodes."""
    found = embed_nodes(
        trained, layer=config.layer, node_type=config.node_type, time=config.time, **how
    )
    files.write_array(config.out, found.rows)
    node_type = {} if found.node_type is None else {"node_type": found.node_type}
    shape = {"nodes": len(found.rows), "columns": found.rows.shape[1]}
    return {**shape, **node_type, "layer": found.layer}


def _write_nodes(config: PredictConfig, trained: Trained, how: Mapping[str, Any]) -> dict[str, Any]:
    """Write the classes of nodes, and their probabilities as `probability`, or columns `p_NAME`."""
    nodes: str | Path = config.nodes
    if nodes not in ("all", *SPLITS):
        nodes = Path(nodes)
    found = predict(trained, nodes=nodes, **how)
    fields = {"node": found.nodes, "class": found.classes}
    if config.probabilities:
        fields["probability" if config.out.suffix == ".npy" else "p"] = found.probabilities
    columns = write_predictions(config.out, fields, found.columns)
    return {"predictions": len(found.nodes), "columns": columns}


def _write_links(config: PredictConfig, trained: Trained, how: Mapping[str, Any]) -> dict[str, Any]:
    """Write the scores of pairs."""
    found = predict_links(trained, pairs=config.pairs, times=config.time, **how)
    fields = {"source": found.sources, "target": found.targets, "score": found.scores}
    if config.probabilities:
        fields["probability"] = 1 / (1 + np.exp(-found.scores.astype(np.float64)))
    return {"predictions": len(found.scores), "columns": write_predictions(config.out, fields)}
