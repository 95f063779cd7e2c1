"""Download OGB's node- and link-property sets, and resume interrupted downloads.

Names, addresses and versions are read from the table that the installed `ogb` package carries,
without importing it: an import takes seconds and looks for updates. Nothing is ever asked.

    FOLDER/arxiv.zip.partial        what has come so far; arxiv.zip once it is whole
    FOLDER/arxiv.zip.downloaded     size and time of a zip that was downloaded, not put there
    FOLDER/ogbn_arxiv_v1/           unpacked; a zip that was downloaded is then removed
"""

import csv
import fcntl
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

from gcnzc.datasets import catalog
from gcnzc.datasets.rows import Progress, no_progress
from gcnzc.datasets.store import NO_SPACE, building

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30
# in one call; each goes on where the last one broke off
_TRIES = 3


@dataclass(frozen=True)
class Remote:
    """A set that can be had."""

    name: str
    url: str
    version: str

    @property
    def folder_name(self) -> str:
        """What the unpacked folder is called."""
        return f"{self.name.replace('-', '_')}_v{self.version}"


def table() -> dict[str, Remote]:
    """OGB's node-property and link-property sets of one type of nodes and of edges, by name.

    Raises:
        RuntimeError: the `ogb` package is not installed.
    """
    found = importlib.util.find_spec("ogb")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError(
            "the package ogb, which knows where the sets are, is not installed\n\n"
            "hint: pip install ogb"
        )
    sets = {}
    for kind in ("nodeproppred", "linkproppred"):
        master = Path(found.submodule_search_locations[0], kind, "master.csv")
        with master.open(newline="") as file:
            lines = {line[0]: line[1:] for line in csv.reader(file)}
        for place, name in enumerate(lines[""]):
            told = {key: line[place] for key, line in lines.items()}
            # knowledge graphs have one type of nodes at times, but several of edges
            if told["is hetero"] != "True" and told["task type"] != "KG completion":
                sets[name] = Remote(name, told["url"], told["version"])
    return sets


def lookup(name: str) -> Remote:
    """The set of this name.

    Raises:
        ValueError: OGB has none, or one of another kind.
    """
    catalog.refuse_other_kinds(name, links=True)
    sets = table()
    for known, remote in sets.items():
        if known.lower() == name.lower().replace("_", "-"):
            return remote
    if any(name == known for known in catalog.names()):
        raise ValueError(
            f"{name} is known, but it is not one of OGB's sets\n\n"
            f"hint: give the path of its files; {', '.join(sets)} can be downloaded"
        )
    raise ValueError(f"no dataset {name}\n\nhint: {catalog.nearest(name)}")


def fetch(remote: Remote, folder: Path, progress: Progress = no_progress) -> Path:
    """The unpacked folder of a set, downloaded into `folder` if it is not there.

    An archive that the user put into `folder` is unpacked instead, and stays there.

    Raises:
        RuntimeError: there is no network, it broke off, the archive is no zip or holds no data set,
            the disk is full, or another process is at it.
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
    """Beside an archive that was downloaded here: its size and time."""
    return archive.with_name(archive.name + ".downloaded")


def _stamp_of(archive: Path) -> str:
    found = archive.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _is_downloaded(archive: Path) -> bool:
    """Whether this module wrote the archive; else the user put it there."""
    receipt = _receipt(archive)
    return receipt.is_file() and receipt.read_text() == _stamp_of(archive)


def _remove(archive: Path) -> None:
    _receipt(archive).unlink()
    archive.unlink()


def _download(url: str, target: Path, progress: Progress) -> None:
    partial = target.with_name(target.name + ".partial")
    with _locked(partial) as file:
        for left in reversed(range(_TRIES)):
            try:
                _go_on(url, file, partial, progress)
                break
            except urllib.error.HTTPError as error:
                raise RuntimeError(
                    f"{url} cannot be had: {error.code} {error.reason}\n\n"
                    f"hint: get it another way and put it at {target}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in NO_SPACE:
                    raise RuntimeError(_no_room(partial, "more")) from error
                if left:
                    continue
                come = partial.stat().st_size
                raise RuntimeError(
                    f"the download of {url} broke off after {come:,} bytes: {_reason(error)}\n\n"
                    "hint: is there a network? The same command goes on from there; or get the "
                    f"file another way and put it at {target}"
                ) from error
        os.fsync(file.fileno())
        partial.rename(target)
        _receipt(target).write_text(_stamp_of(target))
        _notes(partial).unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__)


@contextmanager
def _locked(partial: Path) -> Iterator[IO[bytes]]:
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process is downloading to {partial}\n\nhint: wait for it, or end it first"
            ) from None
        yield file


def _notes(partial: Path) -> Path:
    """Beside what has come: which version of the file it is of."""
    return partial.with_name(partial.name + ".json")


def _go_on(url: str, file: IO[bytes], partial: Path, progress: Progress) -> None:
    """Ask for what is missing and append it; from the start if the server will not go on."""
    come = partial.stat().st_size
    stamp = _stamp(partial)
    headers = {"User-Agent": "gcnzc"}
    if come and stamp:
        # the rest only if the file is still the same, else all of it
        headers |= {"Range": f"bytes={come}-", "If-Range": stamp}
    try:
        answer = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # as many bytes as there are have come, or more: they cannot be trusted
        file.truncate(0)
        raise ConnectionError("the server has less than was downloaded before") from error
    with answer:
        if answer.status != http.client.PARTIAL_CONTENT:
            come = 0
            file.truncate(0)
        length = answer.headers.get("Content-Length")
        total = come + int(length) if length is not None else 0
        stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        _notes(partial).write_text(json.dumps({"stamp": stamp}))
        _check_room(partial, total - come)
        while block := answer.read(_BLOCK_BYTES):
            file.write(block)
            come += len(block)
            progress("download", come, total)
        file.flush()
    if total and come != total:
        raise ConnectionError(f"{come:,} of {total:,} bytes came")


def _stamp(partial: Path) -> str | None:
    try:
        told = json.loads(_notes(partial).read_text())["stamp"]
    except (OSError, ValueError, KeyError):
        return None
    # a weak one does not promise the same bytes
    return None if told is None or told.startswith("W/") else str(told)


def _check_room(partial: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(partial.parent).free < needed_bytes:
        raise RuntimeError(_no_room(partial, f"{needed_bytes:,}"))


def _no_room(partial: Path, needed: str) -> str:
    return (
        f"no room for {partial}: {needed} bytes are to come, "
        f"{shutil.disk_usage(partial.parent).free:,} are free\n\n"
        "hint: free some, or name a destination on a larger disk; what has come is kept"
    )


def _unpack(archive: Path, dest: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if not member.is_dir()]
            total = sum(member.file_size for member in members)
            with building(dest, total) as folder:
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
        remedy = "remove it, and the same command downloads it; or put a whole one there"
        if _is_downloaded(archive):
            _remove(archive)
            remedy = "it has been removed; the same command downloads it again"
        raise RuntimeError(
            f"{archive} is no whole archive of the data set: {error}\n\nhint: {remedy}"
        ) from error
