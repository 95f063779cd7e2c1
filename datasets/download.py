"""Download OGB's node and link property datasets, and resume interrupted downloads.

Names, URLs and versions are read from `master.csv` of the installed `ogb` package, without
importing the package: the import takes seconds and checks for updates. There are no prompts.

    FOLDER/arxiv.zip.partial        the part that is downloaded; renamed to arxiv.zip at the end
    FOLDER/arxiv.zip.partial.json   validator (ETag or Last-Modified) of the partial download
    FOLDER/arxiv.zip.downloaded     size and time of a zip that this module downloaded
    FOLDER/ogbn_arxiv_v1/           unpacked; a zip that this module downloaded is then removed
"""

import csv
import http.client
import importlib.util
import json
import os
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from gcnzc._files import lock, other_process, write_text
from gcnzc.datasets import catalog
from gcnzc.datasets.ogb_hetero import is_hetero_name
from gcnzc.datasets.rows import Progress, no_progress
from gcnzc.datasets.store import NO_SPACE, atomic_folder

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30
# attempts in one call; each resumes the previous one
_TRIES = 3


@dataclass(frozen=True)
class Remote:
    """A dataset that can be downloaded."""

    name: str
    url: str
    version: str

    @property
    def folder_name(self) -> str:
        """Name of the unpacked folder."""
        return f"{self.name.replace('-', '_')}_v{self.version}"


def table() -> dict[str, Remote]:
    """Return OGB's node and link property datasets, except knowledge graphs, by name.

    Raises:
        RuntimeError: the `ogb` package is not installed.
    """
    found = importlib.util.find_spec("ogb")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError(
            "the package ogb, which has the URLs of the datasets, is not installed\n\n"
            "hint: pip install ogb"
        )
    datasets = {}
    for kind in ("nodeproppred", "linkproppred"):
        master = Path(found.submodule_search_locations[0], kind, "master.csv")
        with master.open(newline="") as file:
            lines = {line[0]: line[1:] for line in csv.reader(file)}
        for column, name in enumerate(lines[""]):
            fields = {key: line[column] for key, line in lines.items()}
            # a knowledge graph may have one node type, but has several edge types
            is_supported = fields["is hetero"] != "True" or is_hetero_name(name)
            if is_supported and fields["task type"] != "KG completion":
                datasets[name] = Remote(name, fields["url"], fields["version"])
    return datasets


def lookup(name: str) -> Remote:
    """Return OGB's dataset of this name.

    Raises:
        ValueError: OGB has no such dataset, or it is of an unsupported kind.
    """
    catalog.refuse_other_kinds(name, links=True, hetero=True)
    datasets = table()
    for known, remote in datasets.items():
        if known.lower() == name.lower().replace("_", "-"):
            return remote
    if any(name == known for known in catalog.names()):
        raise ValueError(
            f"{name} is not a dataset of OGB, and cannot be downloaded\n\n"
            f"hint: give the path of its files; {', '.join(datasets)} can be downloaded"
        )
    raise ValueError(f"no dataset {name}\n\nhint: {catalog.suggest_names(name)}")


def fetch(remote: Remote, folder: Path, progress: Progress = no_progress) -> Path:
    """Return the unpacked folder of a dataset; download and unpack it if it does not exist.

    If `folder` has the archive already, it is unpacked without a download, and not removed.

    Raises:
        RuntimeError: the download failed, the archive is not a zip of a dataset, the disk is full,
            or another process is downloading or unpacking it.
    """
    unpacked = folder / remote.folder_name
    if unpacked.is_dir():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / remote.url.rpartition("/")[2]
    if not archive.exists():
        _download(remote.url, archive, progress)
    _unpack(archive, unpacked, progress)
    if _is_downloaded(archive):
        _remove(archive)
    return unpacked


def _receipt(archive: Path) -> Path:
    """Return the path of the file with the size and time of an archive that was downloaded."""
    return archive.with_name(archive.name + ".downloaded")


def _size_and_time(archive: Path) -> str:
    found = archive.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _is_downloaded(archive: Path) -> bool:
    """Whether this module downloaded the archive; otherwise the user provided it."""
    receipt = _receipt(archive)
    return receipt.is_file() and receipt.read_text() == _size_and_time(archive)


def _remove(archive: Path) -> None:
    _receipt(archive).unlink()
    archive.unlink()


def _download(url: str, target: Path, progress: Progress) -> None:
    partial = target.with_name(target.name + ".partial")
    with _locked(partial) as file:
        for tries_left in reversed(range(_TRIES)):
            try:
                _resume(url, file, partial, progress)
                break
            except urllib.error.HTTPError as error:
                raise RuntimeError(
                    f"cannot download {url}: {error.code} {error.reason}\n\n"
                    f"hint: download it in another way and move it to {target}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in NO_SPACE:
                    raise RuntimeError(_no_space(partial, "more")) from error
                if tries_left:
                    continue
                received = partial.stat().st_size
                raise RuntimeError(
                    f"the download of {url} failed after {received:,} bytes: {_reason(error)}\n\n"
                    "hint: is there a network? The same command resumes the download; or download "
                    f"the file in another way and move it to {target}"
                ) from error
        os.fsync(file.fileno())
        partial.rename(target)
        write_text(_receipt(target), _size_and_time(target))
        _validator_path(partial).unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__)


@contextmanager
def _locked(partial: Path) -> Iterator[IO[bytes]]:
    with partial.open("ab") as file:
        if not lock(file.fileno()):
            raise RuntimeError(
                f"{other_process(file.fileno())} is downloading to {partial}\n\n"
                "hint: wait for it, or stop it first"
            )
        yield file


def _validator_path(partial: Path) -> Path:
    """Return the path of the file with the validator (ETag or Last-Modified) of `partial`."""
    return partial.with_name(partial.name + ".json")


def _resume(url: str, file: IO[bytes], partial: Path, progress: Progress) -> None:
    """Request the missing range and append it; start again if the server sends the whole file."""
    received = partial.stat().st_size
    validator = _read_validator(partial)
    headers = {"User-Agent": "gcnzc"}
    if received and validator:
        # If-Range: the server sends the whole file if it has changed
        headers |= {"Range": f"bytes={received}-", "If-Range": validator}
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # the partial file is at least as long as the server's, so that its contents are not valid
        file.truncate(0)
        raise ConnectionError("the server has less than was downloaded before") from error
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            received = 0
            file.truncate(0)
        length = response.headers.get("Content-Length")
        total = received + int(length) if length is not None else 0
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        write_text(_validator_path(partial), json.dumps({"stamp": validator}))
        _check_space(partial, total - received)
        while block := response.read(_BLOCK_BYTES):
            file.write(block)
            received += len(block)
            progress("download", received, total)
        file.flush()
    if total and received != total:
        raise ConnectionError(f"received {received:,} of {total:,} bytes")


def _read_validator(partial: Path) -> str | None:
    try:
        validator = json.loads(_validator_path(partial).read_text())["stamp"]
    except (OSError, ValueError, KeyError):
        return None
    # a weak validator does not guarantee equal bytes
    return None if validator is None or validator.startswith("W/") else str(validator)


def _check_space(partial: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(partial.parent).free < needed_bytes:
        raise RuntimeError(_no_space(partial, f"{needed_bytes:,}"))


def _no_space(partial: Path, needed: str) -> str:
    return (
        f"no space for {partial}: {needed} bytes are missing, "
        f"{shutil.disk_usage(partial.parent).free:,} are free\n\n"
        "hint: free some space, or choose a destination on a larger disk; the download resumes"
    )


def _unpack(archive: Path, dest: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if not member.is_dir()]
            sizes = [member.file_size for member in members]
            total = sum(sizes)
            with atomic_folder(dest, sizes) as folder:
                done = 0
                for member in members:
                    path = PurePosixPath(member.filename)
                    if path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
                        raise zipfile.BadZipFile(f"it has a file {member.filename}")
                    target = folder.joinpath(*path.parts[1:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with opened.open(member) as source, target.open("wb") as file:
                        while block := source.read(_BLOCK_BYTES):
                            file.write(block)
                            done += len(block)
                            progress("unpack", done, total)
                missing = [name for name in ("raw", "split") if not (folder / name).is_dir()]
                if missing:
                    raise zipfile.BadZipFile(f"it has no folder {' nor '.join(missing)}")
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        remedy = "remove it, and the same command downloads it; or replace it by a complete one"
        if _is_downloaded(archive):
            _remove(archive)
            remedy = "it has been removed; the same command downloads it again"
        raise RuntimeError(
            f"{archive} is not a complete archive of the dataset: {error}\n\nhint: {remedy}"
        ) from error
