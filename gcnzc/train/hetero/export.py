"""Write the best model of a run on a heterogeneous graph as a program that torch runs alone.

Embeddings of node types without features are in a second file beside the program.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gcnzc.models.hetero import HeteroModel
from gcnzc.models.hetero.export import (
    export_hetero_model,
    hetero_export_arguments,
    program_types,
)
from gcnzc.sampling.hetero_block import build_hetero_blocks
from gcnzc.system.array_file import write_arrays
from gcnzc.train.export import CHECKED_NODES, check_difference, write_program
from gcnzc.train.hetero.encoder import build_hetero_sampler
from gcnzc.train.hetero.prediction import TrainedHeteroModel, after_everything


def export_hetero_run(loaded: TrainedHeteroModel, path: Path) -> dict[str, Any]:
    """Export the best model of a run, compare it with the model on two minibatches, and write it.

    In link prediction, the encoder is exported, whose outputs are the decoder's inputs.

    Args:
        loaded: the model, with a graph to compare on.
        path: .pt2 file, which is written atomically. Embeddings are written before it to a file of
            the same name with the suffix .embeddings.npz.

    Returns:
        The description in the file: `model`, `task`, `node_types` and `edge_types` of the graph,
        `in_features` (columns by node type), `arguments` (the types of the arguments, see
        `gcnzc.models.hetero.export.ProgramTypes`), `targets` (node types of the outputs),
        `outputs`, `num_tasks` (label columns; 1 for classes), `fanouts` (of the training),
        `temporal`, `embeddings` (`file` and the `node_types` in it, or None), `classes` (names, or
        None), and `largest_difference` of the compared outputs.

    Raises:
        RuntimeError: the outputs of the program differ from those of the model.
        OSError: the disk is full or may not be written.
    """
    encoder: HeteroModel = loaded.model.encoder if loaded.config.task == "link" else loaded.model
    encoder = encoder.cpu().eval()
    program, schema = export_hetero_model(encoder), loaded.schema
    types = program_types(encoder)
    tables = path.with_suffix(".embeddings.npz")
    node_types, edge_types = loaded.graph.metadata()
    description = {
        "model": loaded.config.model,
        "task": loaded.config.task,
        "node_types": node_types,
        "edge_types": list(map(list, edge_types)),
        "in_features": {name: encoder.in_features[name] for name in types.x},
        "arguments": types._asdict(),
        "targets": list(encoder.targets),
        "outputs": encoder.out_features,
        "num_tasks": schema.num_label_columns,
        "fanouts": list(loaded.config.fanouts),
        "temporal": loaded.config.temporal,
        "embeddings": None,
        "classes": None if schema.classes is None else list(map(str, schema.classes)),
        "largest_difference": _compare(program, encoder, loaded),
    }
    if loaded.embeddings:
        description["embeddings"] = {"file": tables.name, "node_types": list(loaded.embeddings)}
        rows = {name: table.rows.numpy() for name, table in loaded.embeddings.items()}
        write_arrays(tables, rows, {"epoch": loaded.epoch})
    write_program(program, description, path)
    return description


def _compare(program: ExportedProgram, encoder: HeteroModel, loaded: TrainedHeteroModel) -> float:
    """Return the largest difference between the outputs of the program and the model."""
    config, graph, largest = loaded.config, loaded.graph, 0.0
    run = program.module()
    sampler = build_hetero_sampler(config, graph, config.fanouts)
    tables = loaded.data.table.tables
    # several minibatches, because sizes differ
    for count in (1, CHECKED_NODES):
        seeds = {name: torch.arange(min(count, graph.num_nodes(name))) for name in encoder.targets}
        times = None
        if loaded.is_temporal:
            times = torch.full((sum(map(len, seeds.values())),), after_everything(graph))
        batch = sampler.sample(seeds, epoch=0, seed_times=times)
        batch.blocks = build_hetero_blocks(batch)
        batch.x = {name: table.gather(batch.nodes[name]) for name, table in tables.items()}
        with torch.no_grad():
            x = loaded.inputs(batch)
            expected = _by_type(encoder, encoder(batch.blocks, x))
            found = _by_type(encoder, run(*hetero_export_arguments(encoder, batch.blocks, x)))
        for name in encoder.targets:
            largest = max(largest, check_difference(found[name], expected[name]))
    return largest


def _by_type(encoder: HeteroModel, outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {encoder.targets[0]: outputs} if isinstance(outputs, Tensor) else outputs
