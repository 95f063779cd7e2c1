"""The command that writes the outputs of a layer for all nodes."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.system import files
from gcnzc.train.embedding import embed_loaded
from gcnzc.train.hetero.prediction import TrainedHeteroModel, parse_time
from gcnzc.train.options import Fanouts, at_least, check_layer_fanouts
from gcnzc.train.prediction import delete_scratch, load_model
from gcnzc.train.progress import Reporter
from gcnzc.train.scratch_options import ScratchOptions


@dataclass(frozen=True, kw_only=True)
class EmbedNodesConfig(ScratchOptions):
    """Write an embedding of every node: the output of a layer of the best model of a run.

    Reads all neighbours of each node, writes a .npy file with a row for each node, and prints one
    JSON line.
    """

    run: tyro.conf.Positional[Path]
    """run folder that `gcnzc train` wrote"""
    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph with the same features, which may have other nodes and no labels; the graph
    of the run if not given"""
    out: Path
    """.npy file to write"""
    node_type: str | None = None
    """heterogeneous graphs: type of the nodes; by default that which the model classifies, or which
    both ends of the predicted edges have"""
    layer: int | None = None
    """layer whose output is written, from 1; without it, the last hidden layer, or in link
    prediction the rows from which the scores are computed"""
    time: str | None = None
    """heterogeneous graphs, with --temporal: time of all nodes, whose neighbours are not later, and
    in link prediction earlier: an integer, or a date such as 2024-03-01 if the graph has a time
    unit; by default the nodes' own times, and for nodes without times and in link prediction after
    all edges and nodes"""
    fanouts: Fanouts = ()
    """heterogeneous graphs: neighbours sampled per node and edge type, one number per layer, input
    layer first; by default all neighbours are read"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto uses CUDA if there is a GPU"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            at_least(1, "layer", self.layer)
        if self.fanouts:
            check_layer_fanouts(self.fanouts)


def embed_nodes_command(config: EmbedNodesConfig, reporter: Reporter) -> None:
    """`gcnzc embed-nodes`."""
    began = time.perf_counter()
    loaded = load_model(config.run, config.data, config.device)
    is_replaced = config.out.exists()
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
    delete_scratch(config.scratch)
    reporter.say(f"{'replaced' if is_replaced else 'wrote'} {config.out}")
    print_json(
        {
            "run": str(config.run),
            "data": loaded.data.name,
            "task": loaded.config.task,
            "out": str(config.out),
            "nodes": len(found.rows),
            "columns": found.rows.shape[1],
            **({"node_type": found.node_type} if found.node_type is not None else {}),
            "layer": found.layer,
            "best_epoch": found.epoch,
            "seconds": time.perf_counter() - began,
        }
    )
