"""Read the processed files of PyG's data sets without unpickling objects."""

from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import pickled
from gcnzc.graph.arrays import ArrayGraph, from_attributes

# the classes that PyG names, but does not pickle, in the files of `InMemoryDataset`
CLASSES = ("torch_geometric.data.data.Data",)


def read_pyg_file(path: Path, name: str | None = None, split: str | None = None) -> ArrayGraph:
    """Read a graph that `torch.save` has written as plain tensors.

    Args:
        path: of a file of `InMemoryDataset`, such as `processed/data.pt`, or of a dict of tensors
            with the names of PyG: `edge_index`, `x`, `y` and masks.
        name: of the graph; None uses the name of the file.
        split: the column of masks with several splits; None requires masks of one split.

    Raises:
        ValueError: the file has pickled objects, several graphs, or no graph.
    """
    try:
        contents = pickled.load(path, CLASSES)
    except ValueError as error:
        reason = str(error).partition("\n\n")[0]
        raise ValueError(
            f"{reason}\n\nhint: if you trust the file, load it in Python, and pass the Data: "
            f'gcnzc.prepare(torch.load("{path}", weights_only=False), DEST); for a PyG data set, '
            "gcnzc.prepare(dataset[0], DEST)"
        ) from None
    slices = None
    # (attributes, offsets of the graphs, class)
    if isinstance(contents, tuple) and len(contents) in (2, 3):
        contents, slices = contents[0], contents[1]
    if not isinstance(contents, dict) or "edge_index" not in contents:
        found = ", ".join(map(str, contents)) if isinstance(contents, dict) else type(contents)
        raise ValueError(
            f"{path} is not a graph of PyG: it has {found}\n\n"
            "hint: a graph of one node type has edge_index, x, y, train_mask, val_mask, test_mask"
        )
    if _num_graphs(slices) > 1:
        raise ValueError(
            f"{path} has {_num_graphs(slices)} graphs\n\n"
            "hint: a prepared folder has one: gcnzc.prepare(dataset[0], DEST) in Python"
        )
    graph = from_attributes(contents, name or path.stem, split)
    graph.origin = {"format": "pyg", "source": str(path)}
    return graph


def _num_graphs(slices: Any) -> int:
    if not isinstance(slices, dict) or "edge_index" not in slices:
        return 1
    return len(np.asarray(slices["edge_index"])) - 1
