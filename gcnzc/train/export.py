"""Write the best model of a run as a program that torch runs without gcnzc.

The .pt2 file also has a JSON object, `gcnzc.json`, which says what the program reads and returns.
Embeddings of node types without features are in a second file beside the program.
"""

import copy
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gcnzc._files import replacing
from gcnzc.models.export import (
    export_arguments,
    export_model,
    list_program_types,
    needs_degrees,
)
from gcnzc.models.hetero import HeteroModel
from gcnzc.sampling.hetero import build_hetero_blocks
from gcnzc.sampling.neighbor import Sampler
from gcnzc.system.array_file import write_arrays
from gcnzc.train.build import build_hetero_sampler
from gcnzc.train.hetero.inference import with_embeddings
from gcnzc.train.prediction import time_after_all
from gcnzc.train.trained import Trained

# `examples/serve_exported.py` and other readers of the .pt2 file find the description by its name
DESCRIPTION = "gcnzc.json"

# few nodes suffice to compare all operations of the program, and take little time on large graphs
CHECKED_NODES = 256

# The program sums in another order than the kernels, so outputs differ by rounding. A larger
# difference, relative to the largest output, is a defect.
TOLERANCE = 1e-3


def export_run(trained: Trained, path: Path) -> dict[str, Any]:
    """Export the best model of a run, compare it with the model on two minibatches, and write it.

    In link prediction, the encoder is exported, whose outputs are the decoder's inputs.

    Args:
        trained: the model, with a graph to compare on; it is not changed.
        path: .pt2 file, which is written atomically. Embeddings are written to a file of the same
            name with the suffix .embeddings.npz; after an error, both previous files remain.

    Returns:
        The description in the file: `model`, `task`, `outputs`, `num_tasks` (label columns; 1 for
        classes), `fanouts` (of the training), `classes` (names, or None), `in_features`, and
        `largest_difference` of the compared outputs.

        Of graphs of one type: `label_columns` (those of `in_features` that are labels), and
        `needs_degrees`.

        Of heterogeneous graphs: `node_types` and `edge_types` of the graph, `in_features` by node
        type, `arguments` (the types of the arguments, see
        `gcnzc.models.export.ProgramTypes`), `output_types` (node types of the outputs),
        `temporal` and `times` (options of the run), and `embeddings` (`file` and the `node_types`
        in it, or None).

    Raises:
        RuntimeError: the outputs of the program differ from those of the model.
        OSError: the disk is full or may not be written.
    """
    encoder = copy.deepcopy(trained.encoder).cpu().eval()
    config, schema = trained.config, trained.schema
    tables = path.with_suffix(".embeddings.npz")
    program = export_model(encoder)
    if trained.is_hetero:
        minibatches = _typed_minibatches(encoder, trained)
        own = _describe_types(encoder, trained, tables.name)
    else:
        minibatches = _minibatches(trained)
        own = {
            "in_features": encoder.in_features,
            "label_columns": schema.num_outputs if config.graph.label_inputs else 0,
            "needs_degrees": needs_degrees(encoder),
        }
    description = {
        "model": config.model.model.name,
        "task": config.graph.task.name,
        "outputs": encoder.out_features,
        "num_tasks": schema.num_label_columns,
        "fanouts": list(config.loading.fanouts),
        "classes": None if schema.classes is None else list(map(str, schema.classes)),
        **own,
        "largest_difference": compare_outputs(program, encoder, minibatches),
    }
    with ExitStack() as stack:
        if trained.embeddings:
            # an error in writing the program also removes the embeddings
            partial = stack.enter_context(replacing(tables))
            rows = {name: table.rows.numpy() for name, table in trained.embeddings.items()}
            write_arrays(partial, rows, {"epoch": trained.epoch})
        write_program(program, description, path)
    return description


def _describe_types(encoder: HeteroModel, trained: Trained, file: str) -> dict[str, Any]:
    """Return the part of a description that is for heterogeneous graphs only."""
    types, graph = list_program_types(encoder), trained.config.graph
    node_types, edge_types = trained.data.graph.metadata()
    names = list(trained.embeddings)
    return {
        "node_types": node_types,
        "edge_types": list(map(list, edge_types)),
        "in_features": {name: encoder.in_features[name] for name in types.x},
        "arguments": types._asdict(),
        "output_types": list(encoder.targets),
        "temporal": graph.temporal.name,
        "times": graph.time_kind,
        "embeddings": {"file": file, "node_types": names} if names else None,
    }


def write_program(program: ExportedProgram, description: Mapping[str, Any], path: Path) -> None:
    """Write a program and its description to a .pt2 file atomically.

    Raises:
        OSError: the disk is full or may not be written.
    """
    # torch aborts the process if it cannot write to a file
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={DESCRIPTION: json.dumps(dict(description))})
    with replacing(path) as partial:
        partial.write_bytes(buffer.getbuffer())


def check_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference between the outputs of a program and its model.

    Raises:
        RuntimeError: it exceeds rounding errors.
    """
    if not expected.numel():
        return 0.0
    difference = float((found - expected).abs().max())
    limit = TOLERANCE * max(1.0, float(expected.abs().max()))
    if not difference <= limit:
        raise RuntimeError(
            f"the outputs of the exported program differ from the model's by {difference:g}"
            f", more than {limit:g}\n\nhint: check that the features are finite, with "
            "`gcnzc info DATA --verify`; otherwise report this with the version of torch"
        )
    return difference


def compare_outputs(
    program: ExportedProgram, encoder: Any, minibatches: Iterable[tuple[Any, Any]]
) -> float:
    """Return the largest difference between the outputs of a program and its model.

    Args:
        program: of the model.
        encoder: the model, in evaluation mode.
        minibatches: blocks, and features of the sources of the first block.

    Raises:
        RuntimeError: it exceeds rounding errors.
    """
    run, largest = program.module(), 0.0
    with torch.no_grad():
        for blocks, x in minibatches:
            found = _by_type(run(*export_arguments(encoder, blocks, x)))
            expected = _by_type(encoder(blocks, x))
            for name, rows in expected.items():
                largest = max(largest, check_difference(found[name], rows))
    return largest


def _by_type(outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"": outputs} if isinstance(outputs, Tensor) else outputs


def _minibatches(trained: Trained) -> Iterator[tuple[Any, Any]]:
    """Yield the blocks and the features of several minibatches."""
    graph, loading = trained.graph, trained.config.loading
    sampler = Sampler(graph, loading.fanouts, loading.seed)
    with trained.open_features() as table:
        # their sizes differ
        for count in (1, min(CHECKED_NODES, graph.num_nodes)):
            batch = sampler.sample(torch.arange(count), epoch=0)
            yield batch.blocks, table.gather(batch.nodes.to(table.device)).cpu()


def _typed_minibatches(encoder: HeteroModel, trained: Trained) -> Iterator[tuple[Any, Any]]:
    """As `_minibatches`, of a heterogeneous graph."""
    config, graph = trained.config, trained.graph
    sampler = build_hetero_sampler(config, graph, config.loading.fanouts)
    tables = trained.data.table.tables
    for count in (1, CHECKED_NODES):
        seeds = {
            name: torch.arange(min(count, graph.nodes(name).num_nodes)) for name in encoder.targets
        }
        times = None
        if config.graph.is_temporal:
            times = torch.full((sum(map(len, seeds.values())),), time_after_all(graph))
        batch = sampler.sample(seeds, epoch=0, seed_times=times)
        batch.blocks = build_hetero_blocks(batch)
        batch.x = {name: table.gather(batch.nodes[name]) for name, table in tables.items()}
        yield batch.blocks, with_embeddings(batch, trained.embeddings)
