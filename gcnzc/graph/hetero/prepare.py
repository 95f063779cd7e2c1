"""Prepare heterogeneous graphs: convert OGB's layout or a prepared folder to a prepared folder."""

from pathlib import Path
from typing import Any

from gcnzc.datasets.ogb_hetero import OgbHetero, is_hetero_layout
from gcnzc.datasets.rows import Progress
from gcnzc.datasets.store import is_hetero
from gcnzc.graph.hetero import folder as hetero_folder
from gcnzc.graph.hetero.ogb import from_hetero_arrays
from gcnzc.graph.stored_features import FeatureLayout


def is_hetero_source(path: Path) -> bool:
    """Whether `path` has a heterogeneous graph, in OGB's layout or prepared."""
    return is_hetero_layout(path) or is_hetero(path)


def prepare_hetero(
    source: Path,
    dest: Path,
    *,
    name: str | None,
    split: str | None,
    reverse: bool,
    layout: FeatureLayout,
    allow_nan: bool,
    progress: Progress,
) -> None:
    """Write the prepared folder of a heterogeneous graph; see `gcnzc.prepare`.

    The graph is read into memory.

    Args:
        source: a folder in OGB's layout, or a prepared folder.
        dest: the folder to write; must not exist.
        name: of the dataset; None uses the name in the files.
        split: name of the split; None uses the default.
        reverse: add the reverse of every edge type.
        layout: of the features of nodes.
        allow_nan: accept features that are not finite.
        progress: called with counts of edges.

    Raises:
        ValueError: an option does not apply to a prepared folder, or the source is damaged.
    """
    origin: dict[str, Any]
    if is_hetero(source):
        hetero_folder.verify(source, progress)
        if reverse or split is not None:
            raise ValueError(
                f"{source} is prepared: edges and splits are those that it was prepared with\n\n"
                "hint: prepare it again from its source, with --bidirected or --split"
            )
        graph, origin = hetero_folder.load(source), hetero_folder.info(source)["origin"]
    else:
        arrays = OgbHetero(source, name, split).read(progress)
        graph = from_hetero_arrays(arrays, str(source), reverse=reverse, allow_nan=allow_nan)
        origin = dict(arrays.origin) | {
            "num_classes": arrays.num_classes,
            "metric": arrays.metric,
            "split": arrays.split_name,
            "best_accuracy": arrays.best_accuracy,
            "reverse": reverse,
        }
    hetero_folder.save(
        graph,
        dest,
        feature_dtype=layout.dtype,
        scales=layout.scales,
        pitch_bytes=layout.pitch_bytes,
        allow_nan=allow_nan,
        origin=origin,
        progress=progress,
    )
