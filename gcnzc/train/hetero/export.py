"""Write the best model of a run on a heterogeneous graph as a program that torch runs alone.

Embeddings of node types without features are in a second file beside the program.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gcnzc._files import replacing
from gcnzc.models.hetero import HeteroModel
from gcnzc.models.hetero.export import (
    export_hetero_model,
    hetero_export_arguments,
    list_program_types,
)
from gcnzc.sampling.hetero import build_hetero_blocks
from gcnzc.system.array_file import write_arrays
from gcnzc.train.export import (
    CHECKED_NODES,
    compare_outputs,
    copy_encoder,
    describe_run,
    write_program,
)
from gcnzc.train.hetero.encoder import build_hetero_sampler
from gcnzc.train.hetero.prediction import TrainedHeteroModel, time_after_all


def export_hetero_run(loaded: TrainedHeteroModel, path: Path) -> dict[str, Any]:
    """Export the best model of a run, compare it with the model on two minibatches, and write it.

    In link prediction, the encoder is exported, whose outputs are the decoder's inputs.

    Args:
        loaded: the model, with a graph to compare on; it is not changed.
        path: .pt2 file, which is written atomically. Embeddings are written to a file of the same
            name with the suffix .embeddings.npz; after an error, both previous files remain.

    Returns:
        The description in the file: `model`, `task`, `node_types` and `edge_types` of the graph,
        `in_features` (columns by node type), `arguments` (the types of the arguments, see
        `gcnzc.models.hetero.export.ProgramTypes`), `output_types` (node types of the outputs),
        `outputs`, `num_tasks` (label columns; 1 for classes), `fanouts` (of the training),
        `temporal` and `times` (options of the run), `embeddings` (`file` and the `node_types` in
        it, or None), `classes` (names, or None), and `largest_difference` of the compared outputs.

    Raises:
        RuntimeError: the outputs of the program differ from those of the model.
        OSError: the disk is full or may not be written.
    """
    encoder: HeteroModel = copy_encoder(loaded)
    program = export_hetero_model(encoder)
    types = list_program_types(encoder)
    tables = path.with_suffix(".embeddings.npz")
    node_types, edge_types = loaded.graph.metadata()
    description = {
        **describe_run(loaded, encoder),
        "node_types": node_types,
        "edge_types": list(map(list, edge_types)),
        "in_features": {name: encoder.in_features[name] for name in types.x},
        "arguments": types._asdict(),
        "output_types": list(encoder.targets),
        "temporal": loaded.config.graph.temporal.name,
        "times": loaded.config.graph.time_kind,
        "embeddings": None,
        "largest_difference": compare_outputs(program, encoder, _minibatches(encoder, loaded)),
    }
    if loaded.embeddings:
        description["embeddings"] = {"file": tables.name, "node_types": list(loaded.embeddings)}
        rows = {name: table.rows.numpy() for name, table in loaded.embeddings.items()}
        # an error in writing the program also removes the embeddings
        with replacing(tables) as partial:
            write_arrays(partial, rows, {"epoch": loaded.epoch})
            write_program(program, description, path)
    else:
        write_program(program, description, path)
    return description


def _minibatches(encoder: HeteroModel, loaded: TrainedHeteroModel) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of the model and of its program for several minibatches."""
    config, graph = loaded.config, loaded.graph
    sampler = build_hetero_sampler(config, graph, config.loading.fanouts)
    tables = loaded.data.table.tables
    # their sizes differ
    for count in (1, CHECKED_NODES):
        seeds = {name: torch.arange(min(count, graph.num_nodes(name))) for name in encoder.targets}
        times = None
        if loaded.is_temporal:
            times = torch.full((sum(map(len, seeds.values())),), time_after_all(graph))
        batch = sampler.sample(seeds, epoch=0, seed_times=times)
        batch.blocks = build_hetero_blocks(batch)
        batch.x = {name: table.gather(batch.nodes[name]) for name, table in tables.items()}
        x = loaded.inputs(batch)
        yield (batch.blocks, x), hetero_export_arguments(encoder, batch.blocks, x)
