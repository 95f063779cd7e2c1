"""Check that files can be written to the paths that options name, before the work begins."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from gcnzc._files import check_regular

PICTURES, PREDICTIONS = (".png", ".svg", ".pdf"), (".csv", ".csv.gz", ".parquet", ".npy")


def check_output(flag: str, path: Path | None, suffixes: Sequence[str], hint: str = "") -> None:
    """Raise a ValueError unless a file with one of the suffixes can be written to `path`.

    Args:
        flag: the option, for the message.
        path: the file; None is valid.
        suffixes: in lower case.
        hint: what reads the file.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder\n\nhint: name a file, such as {path / 'x'}")
    if not path.name.lower().endswith(tuple(suffixes)):
        raise ValueError(
            f"{flag}: {path.name!r} does not end in {' or '.join(suffixes)}\n\n"
            f"hint: use a name that ends in {', '.join(suffixes)}{'; ' * bool(hint)}{hint}"
        )
    check_regular(path)
    # where a symbolic link leads to; a file of a node type may be in graph/nodes/0/mapping
    target = path.resolve().parent
    for place in (target, *target.parents[:3]):
        if path.exists() and _is_file_of_graph(path.resolve(), place):
            raise ValueError(
                f"{flag}: {path} is a file of the prepared graph {place}\n\n"
                "hint: choose another name"
            )
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(
            f"{flag}: there is no folder {folder}\n\nhint: `mkdir -p {folder}` creates it"
        )
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"{flag}: this user may not write to {folder}\n\nhint: choose another folder"
        )


def _is_file_of_graph(path: Path, folder: Path) -> bool:
    """Whether a file is one of the prepared graph in a folder above it; True if it may be."""
    meta_path = folder / "meta.json"
    try:
        meta = json.loads(meta_path.read_bytes())
        files = meta["files"] if "format" in meta else ()
    except (OSError, ValueError, LookupError, TypeError):
        # also a damaged one
        return path == meta_path
    return path == meta_path or str(path.relative_to(folder)) in files
