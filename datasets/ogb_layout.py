"""Parts that all datasets in OGB's layout have: metadata, splits and archives."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import csvgz, pickled
from gcnzc.datasets.rows import Allocate, Array, Progress, Rows
from gcnzc.datasets.source import METRICS, SPLITS, Metric, allocate_ends, check_ends

_AGAIN = "hint: download or write the dataset again, or remove the file"


@dataclass(frozen=True)
class Task:
    """Metadata of a dataset that OGB has in its `master.csv`."""

    name: str
    num_classes: int | None = None  # of each task
    metric: Metric = "accuracy"
    add_inverse_edge: bool | None = None  # None: not stated
    split: str | None = None
    best_accuracy: float | None = None
    origin: dict[str, Any] | None = None


def is_link_layout(folder: Path) -> bool:
    """Whether `folder` looks like a link property dataset: it has a split, but no node labels."""
    labels = ("node-label.csv.gz", "node-label.npz", "nodetype-has-label.csv.gz")
    if any((folder / "raw" / name).is_file() for name in labels):
        return False
    return any(any(folder.glob(f"split/*/{name}.pt")) for name in ("train", "split_dict"))


def read_metadata(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Read `task.json`, or the `meta_dict.pt` that OGB's `DatasetSaver` writes beside the folder.

    Returns:
        The path of the file and its fields; None if there is no file, or the one beside the folder
        is of another dataset.

    Raises:
        ValueError: the file is damaged.
    """
    for path in (folder / "task.json", folder / "meta_dict.pt", folder.parent / "meta_dict.pt"):
        if not path.is_file():
            continue
        try:
            fields = json.loads(path.read_text()) if path.suffix == ".json" else pickled.load(path)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}\n\n{_AGAIN}") from None
        if not isinstance(fields, Mapping):
            raise ValueError(f"{path} does not describe a task: it is no dict\n\n{_AGAIN}")
        if path.parent == folder or Path(str(fields.get("dir_path"))).name == folder.name:
            return path, fields
    return None


def read_split_dict(path: Path, by_type: bool | None = None) -> Mapping[str, Any]:
    """Read `split_dict.pt`: a dict of the train, valid and test split.

    Args:
        path: of the file.
        by_type: whether each split is a dict of ids by node type; None if it may be any dict.

    Raises:
        ValueError: the file contains something else, or objects other than numbers and texts.
    """
    split = pickled.load(path)
    if not isinstance(split, Mapping) or not set(SPLITS) <= set(split):
        raise ValueError(
            f"{path} is not a dict of {', '.join(SPLITS)}\n\nhint: download the dataset again"
        )
    if by_type is not None and any(isinstance(split[part], Mapping) != by_type for part in SPLITS):
        raise ValueError(
            f"{path} has splits {'without' if by_type else 'by'} node types, but the dataset is "
            f"{'heterogeneous' if by_type else 'homogeneous'}\n\nhint: download or write it again"
        )
    return split


def find_task(folder: Path, name: str | None) -> Task | None:
    """Return the task of node classification in a dataset's metadata.

    Args:
        folder: of the dataset.
        name: of the dataset; None uses the name in the file.

    Returns:
        The task; None if there is no metadata.

    Raises:
        ValueError: the metadata is damaged, or the task or metric is not supported.
    """
    found = read_metadata(folder)
    if found is None:
        return None
    path, fields = found
    try:
        kind, metric = str(fields["task type"]), str(fields["eval metric"])
        num_classes, inverse = int(fields["num classes"]), str(fields["add_inverse_edge"]) == "True"
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a task: {error!r}\n\n{_AGAIN}") from None
    if "classification" not in kind:
        raise ValueError(f"{path}: the task is {kind}\n\nhint: only classification is supported")
    if metric not in METRICS:
        raise ValueError(
            f"{path}: unknown metric {metric}\n\nhint: supported are {', '.join(METRICS)}"
        )
    return Task(
        name or fields.get("name") or folder.name,
        num_classes,
        METRICS[metric],
        inverse,
        fields.get("split"),
        fields.get("best_accuracy"),
        fields.get("origin"),
    )


def release_names(folder: Path) -> list[str]:
    """Return dataset names in the release files, which begin `# Release note for NAME`."""
    notes = [path.read_text(errors="replace") for path in folder.glob("RELEASE_v*.txt")]
    return [found[1] for note in notes if (found := re.match(r"# Release note for (\S+)", note))]


def choose_split(folder: Path, wanted: str | None, default: str | None) -> str:
    """Return the name of the split: the wanted one, the default, or the only one.

    Raises:
        FileNotFoundError: there are no splits.
        ValueError: there is no such split, or there are several and none is the default.
    """
    names = sorted(path.name for path in folder.glob("split/*") if path.is_dir())
    if not names:
        raise FileNotFoundError(
            f"no split in {folder / 'split'}\n\n"
            "hint: add split/<type>/train.csv.gz, valid.csv.gz and test.csv.gz, or "
            "split/<type>/split_dict.pt"
        )
    if wanted is None:
        wanted = default if default in names else None
    if wanted is None:
        if len(names) > 1:
            raise ValueError(
                f"{folder} has several splits\n\nhint: choose one of {', '.join(names)}"
            )
        return names[0]
    if wanted not in names:
        raise ValueError(f"{folder} has no split {wanted}\n\nhint: it has {', '.join(names)}")
    return wanted


def check_edge_count(where: object, shape: tuple[int, ...], count: int) -> None:
    """Check that a list of edges has the stored number of edges.

    Args:
        where: name of the list in the message.
        shape: (E,).
        count: the stored number.

    Raises:
        ValueError: the numbers differ.
    """
    if shape != (count,):
        found = f"{shape[0]:,} edges" if shape else "no edges"
        raise ValueError(
            f"{where} has {found}, but the stored number of edges is {count:,}\n\n"
            "hint: the file is truncated or from another dataset; download or write it again"
        )


def read_edge_table(
    path: Path, sizes: tuple[int, int], count: int, allocate: Allocate, progress: Progress
) -> tuple[Array, Array]:
    """Read a csv.gz of edges as sources and targets, see `Source.edges`.

    Args:
        path: of the file.
        sizes: numbers of nodes of the types of the sources and of the targets.
        count: the stored number of edges.
        allocate: allocates the arrays.
        progress: called with numbers of edges.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, has another number of edges, or an id is out of range.
    """
    ends = allocate_ends(sizes, count, allocate)
    done = 0
    for chunk in csvgz.read_integers(path, 2):
        for end, ids, size in zip(ends, chunk.T, sizes, strict=True):
            check_ends(ids, size, str(path), done)
            end[done : done + len(ids)] = ids[: max(0, count - done)]
        done += len(chunk)
        progress("edges", done, count)
    check_edge_count(path, (done,), count)
    return ends


def read_rows(path: Path, count: int) -> Rows:
    """Return a csv.gz of features as `Rows`, whose values are parsed as float64, as in OGB."""
    columns = csvgz.count_columns(path)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        return csvgz.read(path, np.float64, columns)

    return Rows(count, columns, np.dtype(np.float64), chunks, str(path))
