"""The checksums of a run's graph, so that the run does not resume on another graph."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gcnzc.datasets.store import HETERO_VERSION, VERSION, is_hetero, is_prepared, read_meta
from gcnzc.graph.dataset import Dataset
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.inference import fingerprint

# rows of features that are compared if the data is not prepared
COMPARED_ROWS = 1000


def describe_files(data: Dataset | HeteroDataset) -> dict[str, list[Any]]:
    """Return shape, dtype and checksum of the arrays of a prepared folder.

    Of other data, return those of the edges, labels and splits, and of some rows of features.
    """
    if not is_prepared(data.folder):
        assert isinstance(data, Dataset), "heterogeneous graphs are in prepared folders"
        arrays = {"indptr": data.graph.indptr, "indices": data.graph.indices}
        arrays |= {"labels": data.labels, **data.split}
        if data.table is not None:
            rows = torch.arange(COMPARED_ROWS) * len(data.table) // COMPARED_ROWS
            arrays["features"] = data.table.gather_stored(rows)
        return {
            f"loaded/{name}": [list(array.shape), str(array.dtype), fingerprint(array)]
            for name, array in arrays.items()
        }
    version = HETERO_VERSION if is_hetero(data.folder) else VERSION
    files = read_meta(data.folder, version)["files"].items()
    return {
        name: [entry["shape"], entry["dtype"], entry["crc32"]]
        for name, entry in files
        if "shape" in entry
    }


def check_files(
    here: Mapping[str, list[Any]], there: Mapping[str, list[Any]], graph: Path, run: Path
) -> None:
    """Check that a graph is the one that a run was trained on.

    The same features may have other padding, and the same node ids another dtype: such files are
    not compared. Files that only one side lists are not compared either, but a prepared folder is
    another graph than data that is not prepared.

    Args:
        here: files of the graph, see `describe_files`.
        there: files of the graph that the run was trained on.
        graph: folder of the graph.
        run: run folder.

    Raises:
        ValueError: the contents of a file differ, or no file can be compared.
    """
    differing = [] if here.keys() & there.keys() else ["prepared and other data"]
    for name in sorted(here.keys() & there.keys()):
        (shape, dtype, code), (its_shape, its_dtype, its_code) = here[name], there[name]
        is_other_size = shape != its_shape and not name.startswith("features")
        if is_other_size or ((shape, dtype) == (its_shape, its_dtype) and code != its_code):
            differing.append(name)
    if differing:
        raise ValueError(
            f"{graph} is not the graph that the run in {run} was trained on: "
            f"{', '.join(differing)} differ\n\n"
            f"hint: `gcnzc train DATA --resume {run}` takes another folder of that graph; "
            "train on this graph with another --out"
        )
