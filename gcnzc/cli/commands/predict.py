"""The commands that evaluate a run, and predict classes of nodes and scores of pairs."""

import difflib
import time
from pathlib import Path
from typing import Any

from gcnzc.cli.options import PredictConfig
from gcnzc.cli.output import print_json
from gcnzc.datasets.parquet_tables import import_parquet
from gcnzc.datasets.source import SPLITS
from gcnzc.system import files
from gcnzc.train import evaluation
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.embedding import embed_loaded
from gcnzc.train.hetero.prediction import TrainedHeteroModel, parse_time
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


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    print_json(evaluation.evaluate(config, reporter))


def predict_command(config: PredictConfig, reporter: Reporter) -> None:
    """`gcnzc predict`."""
    began = time.perf_counter()
    if config.out.suffix == ".parquet":
        import_parquet()
    loaded = load_model(config.run, config.data, config.device)
    is_replaced = config.out.exists()
    if config.embeddings:
        found = _write_embeddings(config, loaded, reporter)
    else:
        check_task(loaded.config.graph.task.name, has_pairs=config.pairs is not None)
        write = _predict_nodes if config.pairs is None else _predict_links
        count, columns = write(config, loaded, reporter)
        found = {"predictions": count, "columns": columns}
    delete_scratch(config.scratch)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "data": loaded.data.name,
            "task": loaded.config.graph.task.name,
            "out": str(config.out),
            **found,
            "best_epoch": loaded.epoch,
            "seconds": time.perf_counter() - began,
        }
    )


def _write_embeddings(
    config: PredictConfig, loaded: TrainedModel | TrainedHeteroModel, reporter: Reporter
) -> dict[str, Any]:
    """Write the outputs of a layer for all nodes."""
    moment: Any = config.time
    if moment is not None and isinstance(loaded, TrainedHeteroModel):
        moment = parse_time(loaded, moment)
    found = embed_loaded(
        loaded,
        config.layer,
        reporter,
        config.scratch,
        config.memory_bytes,
        node_type=config.node_type,
        time=moment,
        fanouts=config.fanouts or None,
    )
    files.write_array(config.out, found.rows)
    node_type = {} if found.node_type is None else {"node_type": found.node_type}
    shape = {"nodes": len(found.rows), "columns": found.rows.shape[1]}
    return {**shape, **node_type, "layer": found.layer}


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
