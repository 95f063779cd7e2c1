"""Write the best model of a run as a program that torch runs without gcnzc.

The .pt2 file also has a JSON object, `gcnzc.json`, which says what the program reads and returns.
"""

import copy
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gcnzc._files import replacing
from gcnzc.features.table import FeatureTable
from gcnzc.models.export import export_arguments, export_model, needs_degrees
from gcnzc.models.stack import Model
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.hetero.prediction import TrainedHeteroModel
from gcnzc.train.prediction import TrainedModel, feature_rows

# `examples/serve_exported.py` and other readers of the .pt2 file find the description by its name
DESCRIPTION = "gcnzc.json"

# few nodes suffice to compare all operations of the program, and take little time on large graphs
CHECKED_NODES = 256

# The program sums in another order than the kernels, so outputs differ by rounding. A larger
# difference, relative to the largest output, is a defect.
TOLERANCE = 1e-3


def export_run(loaded: TrainedModel, path: Path) -> dict[str, Any]:
    """Export the best model of a run, compare it with the model on two minibatches, and write it.

    In link prediction, the encoder is exported, whose outputs are the decoder's inputs.

    Args:
        loaded: the model, with a graph to compare on; it is not changed.
        path: .pt2 file, which is written atomically.

    Returns:
        The description in the file: `model`, `task`, `in_features`, `label_columns` (those of
        `in_features` that are labels), `outputs`, `num_tasks` (label columns; 1 for classes),
        `fanouts` (of the training), `needs_degrees`, `classes` (names, or None), and
        `largest_difference` of the compared outputs.

    Raises:
        RuntimeError: the outputs of the program differ from those of the model.
        OSError: the disk is full or may not be written.
    """
    encoder: Model = copy_encoder(loaded)
    program = export_model(encoder)
    with feature_rows(loaded) as table:
        difference = compare_outputs(program, encoder, _minibatches(encoder, loaded, table))
    description = {
        **describe_run(loaded, encoder),
        "in_features": encoder.in_features,
        "label_columns": loaded.schema.num_outputs if loaded.config.graph.label_inputs else 0,
        "needs_degrees": needs_degrees(encoder),
        "largest_difference": difference,
    }
    write_program(program, description, path)
    return description


def copy_encoder(loaded: TrainedModel | TrainedHeteroModel) -> Any:
    """Return a copy of the encoder of a loaded model, on the CPU and in evaluation mode."""
    encoder = loaded.model.encoder if loaded.config.graph.task.name == "link" else loaded.model
    return copy.deepcopy(encoder).cpu().eval()


def describe_run(loaded: TrainedModel | TrainedHeteroModel, encoder: Any) -> dict[str, Any]:
    """Return the part of a description that is the same for graphs of one and of several types."""
    schema = loaded.schema
    return {
        "model": loaded.config.model.model.name,
        "task": loaded.config.graph.task.name,
        "outputs": encoder.out_features,
        "num_tasks": schema.num_label_columns,
        "fanouts": list(loaded.config.loading.fanouts),
        "classes": None if schema.classes is None else list(map(str, schema.classes)),
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
        minibatches: the arguments of the model, and those of the program.

    Raises:
        RuntimeError: it exceeds rounding errors.
    """
    run, largest = program.module(), 0.0
    with torch.no_grad():
        for inputs, arguments in minibatches:
            expected, found = _by_type(encoder(*inputs)), _by_type(run(*arguments))
            for name, rows in expected.items():
                largest = max(largest, check_difference(found[name], rows))
    return largest


def _by_type(outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"": outputs} if isinstance(outputs, Tensor) else outputs


def _minibatches(
    encoder: Model, loaded: TrainedModel, table: FeatureTable
) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of the model and of its program for several minibatches."""
    graph = loaded.data.graph
    sampler = Sampler(graph, loaded.config.loading.fanouts, loaded.config.loading.seed)
    # their sizes differ
    for count in (1, min(CHECKED_NODES, graph.num_nodes)):
        batch = sampler.sample(torch.arange(count), epoch=0)
        x = table.gather(batch.nodes.to(table.device)).cpu()
        yield (batch.blocks, x), export_arguments(encoder, batch, x)
