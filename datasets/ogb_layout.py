"""Parts that all datasets in OGB's layout have: metadata, splits and archives."""

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gcnzc.datasets import pickled
from gcnzc.datasets.source import METRICS, Metric


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


def find_task(folder: Path, name: str | None) -> Task | None:
    """Read the task from `task.json`, or from the `meta_dict.pt` of OGB's `DatasetSaver`.

    Args:
        folder: of the dataset.
        name: of the dataset; None uses the name in the file.

    Returns:
        The task; None if there is no file, or it is of another dataset.

    Raises:
        ValueError: a file is damaged, or the task or metric is not supported.
    """
    for path in (folder / "task.json", folder / "meta_dict.pt", folder.parent / "meta_dict.pt"):
        if path.is_file() and (task := _read_task(path, folder.name, name)):
            return task
    return None


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


def _read_task(path: Path, folder: str, name: str | None) -> Task | None:
    """Read a task from `task.json` or `meta_dict.pt`; None if it is of another dataset."""
    try:
        fields = json.loads(path.read_text()) if path.suffix == ".json" else pickled.load(path)
        if path.suffix == ".pt" and Path(str(fields["dir_path"])).name != folder:
            return None
        kind, metric = str(fields["task type"]), str(fields["eval metric"])
        num_classes, inverse = int(fields["num classes"]), str(fields["add_inverse_edge"]) == "True"
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} does not describe a task: {error!r}\n\n"
            "hint: download or write the dataset again, or remove the file"
        ) from None
    if "classification" not in kind:
        raise ValueError(f"{path}: the task is {kind}\n\nhint: only classification is supported")
    if metric not in METRICS:
        raise ValueError(
            f"{path}: unknown metric {metric}\n\nhint: supported are {', '.join(METRICS)}"
        )
    return Task(
        name or fields.get("name") or folder,
        num_classes,
        METRICS[metric],
        inverse,
        fields.get("split"),
        fields.get("best_accuracy"),
        fields.get("origin"),
    )


@contextmanager
def npz_member(
    archive: zipfile.ZipFile, key: str, shape: tuple[int, ...], dtype: np.dtype
) -> Iterator[IO[bytes]]:
    """Open an array member of an uncompressed npz for writing, after its header."""
    with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as file:
        fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, fields)
        yield file
