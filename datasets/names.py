"""Names of nodes, classes and features, for graphs whose source does not number them.

A prepared folder has them in csv files with a header line:

    mapping/nodes.csv       node,id       the id in the source of node 0, 1, ...
    mapping/classes.csv     class,name    the name of class 0, 1, ...
    mapping/features.csv    column,name   the name of feature column 0, 1, ...

A file is absent if the source has numbers only.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcnzc._files import checksum
from gcnzc.datasets.rows import Array

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "mapping"
# files, and the names of their columns
FILES = {
    "nodes": ("nodes.csv", "node", "id"),
    "classes": ("classes.csv", "class", "name"),
    "features": ("features.csv", "column", "name"),
}


@dataclass(frozen=True)
class Names:
    """Names by number; None where the source has the numbers themselves.

    Attributes:
        nodes: (N,) ids of the nodes, all different: text or int64; always text if read from a file.
        classes: names of the classes, all different.
        features: names of the columns of features.
    """

    nodes: Array | None = None
    classes: Sequence[str] | None = None
    features: Sequence[str] | None = None

    def files(self) -> "dict[str, pd.DataFrame]":
        """Return the tables to write, by the name of the file."""
        import pandas as pd

        found = {}
        for kind, (file, number, name) in FILES.items():
            values = getattr(self, kind)
            if values is not None:
                found[file] = pd.DataFrame({number: np.arange(len(values)), name: list(values)})
        return found


@dataclass(frozen=True)
class NamesFolder:
    """The files of names in a prepared folder, which `read_names` reads.

    Attributes:
        path: folder that has the folder `mapping`.
        checksums: for each file in `mapping`, its CRC-32 in `meta.json`.
    """

    path: Path
    checksums: Mapping[str, str]

    @classmethod
    def find(cls, folder: Path, files: Mapping[str, Any], front: str = "") -> "NamesFolder | None":
        """Return where a prepared folder has names; None if it has none.

        Args:
            folder: the prepared folder.
            files: "files" of its `meta.json`.
            front: prefix of the file names, such as `nodes/0/`.
        """
        front_of_names = f"{front}{FOLDER}/"
        found = {
            name.removeprefix(front_of_names): entry["crc32"]
            for name, entry in files.items()
            if name.startswith(front_of_names)
        }
        return cls(folder.resolve() / front, found) if found else None

    def verify(self, file: str) -> Path:
        """Compare a file's checksum with `meta.json`, and return its path.

        Raises:
            FileNotFoundError: the file is missing.
            ValueError: the checksum differs.
        """
        path = self.path / FOLDER / file
        if not path.is_file():
            raise FileNotFoundError(
                f"no file {path}, which meta.json lists\n\n"
                "hint: was the folder moved or removed? Load it again"
            )
        if checksum(path) != self.checksums[file]:
            raise ValueError(
                f"{path} is damaged: its checksum is not that in meta.json\n\n"
                "hint: was it edited? Prepare the folder again from its source"
            )
        return path


def read_names(folder: NamesFolder | None, kinds: Collection[str] = tuple(FILES)) -> Names:
    """Read the names that a prepared folder has; None where it has none.

    Args:
        folder: the folder; None if it has no names.
        kinds: attributes of `Names` to read; the others are None.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.
    """
    if folder is None:
        return Names()
    import pandas as pd

    found: dict[str, Any] = {}
    for kind, (file, number, name) in FILES.items():
        if kind not in kinds or file not in folder.checksums:
            continue
        path = folder.verify(file)
        try:
            table = pd.read_csv(path, dtype={name: str}, na_filter=False)
            values = table[name].to_numpy(object)
            is_valid = bool((table[number].to_numpy() == np.arange(len(table))).all())
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged: {error}\n\nhint: prepare the folder again from its source"
            ) from None
        if not is_valid:
            raise ValueError(
                f"{path}: the column {number!r} does not count from 0\n\n"
                "hint: was it edited? Prepare the folder again from its source"
            )
        found[kind] = values if kind == "nodes" else [str(value) for value in values]
    return Names(**found)


def as_integers(texts: Array) -> Array | None:
    """Convert (n,) texts to int64 if all are integers without signs, spaces or leading zeros.

    None is returned for other texts, since two of them, such as 7 and 007, could be one number.
    """
    try:
        numbers = np.array(texts, dtype=str).astype(np.int64)
    except (ValueError, OverflowError):
        return None
    return numbers if bool((numbers.astype(str) == np.array(texts, dtype=str)).all()) else None
