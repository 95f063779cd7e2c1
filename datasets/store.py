"""Prepared folders: plain `.npy` arrays and one `meta.json`.

The data of each file starts at a page boundary, and files are memory-mapped, so that opening a
folder takes no time and processes share the pages. A folder is written under a temporary name,
synchronized to disk (fsync) and renamed, so that an incomplete folder is never visible.

    meta.json                 format, sizes, checksums, origin, options
    indptr.npy indices.npy    the graph, CSC of in-edges: (N + 1,) int64; (E,) int32 or int64
    features.npy              (N, pitch / itemsize): the first D columns are the features
    features_scales.npy       of quantized features: (N,) float32, or one per block of columns
    features_indptr.npy features_indices.npy features_values.npy     instead, if sparse (CSR)
    labels.npy                (N,) int64, or (N, T)
    split/train.npy valid.npy test.npy     int64
    links/train.npy valid.npy test.npy     edge split: (2, E of the split), dtype of `indices`
    links/valid_negatives.npy test_negatives.npy   (2, pairs); for mrr (E, K), see `EdgeSplitArrays`
    mapping/                  names of nodes, classes and features, see `gcnzc.datasets.names`, or
                              copied from the source

The folder of a heterogeneous graph has a folder for each type instead:

    nodes/0/                  the first node type: features*.npy, labels.npy, time.npy,
                              split_*.npy and mapping/, as far as it has them
    edges/0/                  the first edge type: indptr.npy and indices.npy, and edge_ids.npy,
                              time.npy, weight.npy and features*.npy, as far as it has them

Notation: N nodes, E edges, D columns, T tasks.
"""

import contextlib
import csv
import errno
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

import numpy as np

from gcnzc._files import checksum, lock, other_process, sync
from gcnzc.datasets.names import FOLDER as NAMES_FOLDER
from gcnzc.datasets.names import Names
from gcnzc.datasets.rows import (
    CHUNK_BYTES,
    Allocate,
    Array,
    Csr,
    Progress,
    QuantizedRows,
    Rows,
    as_bytes,
    no_progress,
    rows_from_array,
    rows_from_codes,
    rows_from_csr,
)
from gcnzc.datasets.source import SPLITS, EdgeSplitArrays

FORMAT = "gcnzc-graph"
# versions of folders of graphs of one node type, and of heterogeneous graphs
VERSION, HETERO_VERSION = 1, 3
# data starts at a page boundary, so that whole pages can be mapped, locked and read by a device
HEADER_BYTES = 4096
AGAIN = "hint: prepare the folder again from its source"
VERIFY = "hint: `gcnzc info {} --verify` reports what is damaged; prepare the folder again"
# names of files that a GPU driver may lock begin with one of these
LOCKED = ("indptr", "indices", "features")
# Python has the name since 3.13; the number is that of Linux on x86-64 and 64-bit Arm
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# errors of a full disk, an exhausted quota, and the limit for the size of a file
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_folder(dest: Path, needed_bytes: Sequence[int] = ()) -> Iterator[Path]:
    """Create a folder atomically: yield a temporary folder, and rename it to `dest` at the end.

    If the block raises, the temporary folder is removed. One that a killed process left behind is
    removed first.

    Args:
        dest: must not exist.
        needed_bytes: lower bounds for the sizes of files; compared with the free disk space before
            anything is written.

    Raises:
        FileExistsError: `dest` exists.
        OSError: the folder that contains `dest` cannot be created.
        RuntimeError: another process is writing `dest`, or the disk is full.
    """
    _refuse_existing(dest)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"{dest} cannot be created: {error.strerror} ({error.filename})\n\n"
            "hint: choose a folder in which you may write"
        ) from error
    partial = dest.with_name(f".{dest.name}.partial")
    own = _LockedFolder(partial)
    # a signal may raise an exception anywhere, also while the folder is created
    try:
        own.create(dest)
        _empty(partial)
        _refuse_existing(dest)
        _check_space(dest, needed_bytes)
        yield partial
        for folder, _, files in os.walk(partial):
            for name in (*files, "."):
                sync(Path(folder, name))
        _rename(partial, dest)
        sync(dest.parent)
    except BaseException as error:
        own.remove()
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise RuntimeError(_no_space(dest, needed_bytes)) from error
        raise
    finally:
        own.close()


def _refuse_existing(dest: Path) -> None:
    if os.path.lexists(dest):
        raise FileExistsError(
            f"{dest} already exists\n\nhint: choose another destination, or remove it first"
        )


class _LockedFolder:
    """A folder that one process writes; the kernel releases the lock of a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1  # holds the lock

    def create(self, dest: Path) -> None:
        """Create the folder and lock it; `dest` is its later name, for the message.

        Raises:
            RuntimeError: another process has the lock.
        """
        while True:
            self.path.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                if not lock(self.descriptor):
                    other = other_process(self.descriptor)
                    raise RuntimeError(
                        f"{other} is writing {dest}\n\nhint: wait for it, or stop it first"
                    )
                if self._is_current():
                    return
            self.close()

    def _is_current(self) -> bool:
        """Whether the path still is the open folder; another process may have renamed that."""
        return self.path.exists() and os.path.samestat(os.fstat(self.descriptor), self.path.stat())

    def remove(self) -> None:
        """Remove the folder with all files, unless another process has the lock."""
        with contextlib.suppress(OSError):
            if self.descriptor < 0:
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            if lock(self.descriptor) and self._is_current():
                shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _rename(partial: Path, dest: Path) -> None:
    _refuse_existing(dest)
    try:
        partial.rename(dest)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            _refuse_existing(dest)
        raise


def _check_space(dest: Path, needed_bytes: Sequence[int]) -> None:
    if shutil.disk_usage(dest.parent).free < _on_disk(dest, needed_bytes):
        raise RuntimeError(_no_space(dest, needed_bytes))


def _on_disk(dest: Path, needed_bytes: Sequence[int]) -> int:
    """Return the bytes that files need on the disk, on which they consist of blocks."""
    block = os.statvfs(dest.parent).f_frsize
    return sum(-(-size // block) * block for size in needed_bytes)


def _no_space(dest: Path, needed_bytes: Sequence[int]) -> str:
    needed, free = _on_disk(dest, needed_bytes), shutil.disk_usage(dest.parent).free
    # the files may be larger than the lower bound
    reason = f"about {needed:,} bytes are needed, {free:,} are free"
    if needed <= free:
        reason = f"the disk became full; without the folder {free:,} bytes are free"
    return (
        f"no space for {dest}: {reason}\n\n"
        "hint: free some space, or choose a destination on a larger disk"
    )


def scratch_allocator(folder: Path) -> Allocate:
    """Return an `Allocate` for temporary arrays in unlinked, memory-mapped files in `folder`.

    The disk space is released with the array.
    """

    def allocate(name: str, size: int, dtype: Any) -> Array:
        num_bytes = size * np.dtype(dtype).itemsize
        if num_bytes == 0:
            return np.empty(size, dtype)
        path = folder / f"scratch-{name}"
        with path.open("x+b") as file:
            path.unlink()
            # if the disk filled up later, writing to the mapping would raise SIGBUS
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)

    return allocate


class Writer:
    """Write the files of a prepared folder and record their shapes and checksums.

    Args:
        folder: from `atomic_folder`.
        progress: called with the bytes written to each array file.
    """

    def __init__(self, folder: Path, progress: Progress = no_progress) -> None:
        self._folder, self._progress = folder, progress
        self._files: dict[str, dict[str, Any]] = {}
        self._front = ""

    def within(self, front: str) -> "Writer":
        """Return a writer for the same folder that puts `front` before the names of files."""
        inner = Writer(self._folder, self._progress)
        inner._files, inner._front = self._files, f"{self._front}{front}"
        return inner

    def save(self, name: str, array: Array) -> None:
        """Write an array, memory-mapped or not."""
        flat = np.ascontiguousarray(array).reshape(-1)
        step = max(1, CHUNK_BYTES // flat.dtype.itemsize)
        parts = (flat[begin : begin + step] for begin in range(0, flat.size, step))
        self._write(name, array.shape, array.dtype, parts)

    def save_rows(
        self, name: str, rows: Rows, dtype: np.dtype, pitch_bytes: int, chunks: Iterable[Array]
    ) -> None:
        """Write a table chunk by chunk, with each row zero-padded to `pitch_bytes`."""
        columns = pitch_bytes // dtype.itemsize
        self._write(
            name,
            (rows.num_rows, columns),
            dtype,
            (_pad(chunk, columns) for chunk in chunks),
        )

    def save_names(self, names: Names) -> None:
        """Write the names of nodes, classes and features to the subfolder `mapping`."""
        for file, table in names.files().items():
            name = f"{self._front}{NAMES_FOLDER}/{file}"
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # pandas quotes newlines, but not carriage returns, which end lines, too
            is_quoted = any("\r" in str(each) for each in table.iloc[:, 1])
            quoting = csv.QUOTE_NONNUMERIC if is_quoted else csv.QUOTE_MINIMAL
            table.to_csv(path, index=False, quoting=quoting)
            self._files[name] = {"bytes": path.stat().st_size, "crc32": checksum(path)}

    def copy(self, source: Path, folder: str, leave_out: Container[str] = ()) -> None:
        """Copy all files of the folder `source`, except some, to the subfolder `folder`."""
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.name not in leave_out:
                name = f"{self._front}{folder}/{path.relative_to(source)}"
                target = self._folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                size = target.stat().st_size
                self._files[name] = {"bytes": size, "crc32": checksum(target)}

    def finish(self, meta: dict[str, Any], version: int = VERSION) -> None:
        """Write `meta.json`, which completes the folder."""
        contents = {"format": FORMAT, "version": version, **meta, "files": self._files}
        contents |= {"crc32": checksum_of(contents)}
        (self._folder / "meta.json").write_text(json.dumps(contents, indent=1) + "\n")

    def _write(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[Array]
    ) -> None:
        name = f"{self._front}{name}"
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        header = npy_header(shape, dtype)
        total = len(header) + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        code, done = zlib.crc32(header), len(header)
        with path.open("xb") as file:
            # fails here, before the data is computed, if the disk is too small
            os.posix_fallocate(file.fileno(), 0, total)
            file.write(header)
            for part in parts:
                view = as_bytes(part)
                file.write(view)
                code = zlib.crc32(view, code)
                done += len(view)
                self._progress(name, done, total)
        assert done == total, f"{name}: {done} bytes for {total}"
        entry = {"shape": list(shape), "dtype": dtype.str, "bytes": total, "crc32": f"{code:08x}"}
        self._files[name] = entry


def _pad(chunk: Array, columns: int) -> Array:
    if chunk.shape[1] == columns:
        return chunk
    wide = np.zeros((len(chunk), columns), chunk.dtype)
    wide[:, : chunk.shape[1]] = chunk
    return wide


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, whose arrays are memory-mapped; see `open_folder`."""

    folder: Path
    meta: dict[str, Any]
    indptr: Array
    indices: Array
    features: Array | None  # (N, D), a view of the padded rows
    csr: Csr | None  # instead of `features`, if they are sparse
    codes: QuantizedRows | None  # instead of `features`, if they are stored as codes
    labels: Array
    split: dict[str, Array]
    links: EdgeSplitArrays | None = None

    @property
    def rows(self) -> Rows | None:
        """The features as `Rows`, whether dense, sparse or quantized; None without features."""
        where = str(self.folder)
        if self.csr is not None:
            return rows_from_csr(self.csr, self.meta["features"]["columns"], where)
        if self.codes is not None:
            return rows_from_codes(self.codes, where)
        return None if self.features is None else rows_from_array(self.features, where)


def is_prepared(path: Path) -> bool:
    """Whether `path` is a prepared folder."""
    return (path / "meta.json").is_file()


def is_hetero(folder: Path) -> bool:
    """Whether `folder` is a prepared folder of a heterogeneous graph."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and meta.get("version") == HETERO_VERSION


def front_of(kind: str, number: int) -> str:
    """Return the begin of the names of the files of a type; `kind` is "nodes" or "edges"."""
    return f"{kind}/{number}/"


def read_meta(folder: Path, version: int = VERSION) -> dict[str, Any]:
    """Read the `meta.json` of a prepared folder.

    Its checksum shows that it is what `Writer.finish` wrote, so that its values need no checks.

    Raises:
        ValueError: the file is damaged, or has another format version.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}\n\n{AGAIN}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not the meta.json of a prepared folder\n\n{AGAIN}")
    found = meta.get("version")
    if found != version:
        raise ValueError(f"{folder} has format version {shortened(found)}\n\n{AGAIN}")
    if meta.get("crc32") != checksum_of(meta):
        raise ValueError(
            f"{path} was changed after it was written: its checksum is {checksum_of(meta)}, not "
            f"{shortened(meta.get('crc32'))}\n\n{AGAIN}"
        )
    return meta


def checksum_of(meta: Mapping[str, Any]) -> str:
    """Return the CRC-32 of all values in `meta` except the checksum itself."""
    rest = dict(meta)
    rest.pop("crc32", None)
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Return the `.npy` header of an array, padded to `HEADER_BYTES`."""
    magic = np.lib.format.magic(1, 0)
    length = HEADER_BYTES - len(magic) - 2
    fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    text = f"{fields!r}".encode().ljust(length - 1) + b"\n"
    return magic + length.to_bytes(2, "little") + text


def map_arrays(
    folder: Path, files: Mapping[str, Mapping[str, Any]], read_only: bool
) -> dict[str, Array]:
    """Memory-map the files that have a shape, and compare their headers with `meta.json`.

    Args:
        folder: a prepared folder.
        files: the files that `meta.json` describes, by name.
        read_only: see `open_folder`.

    Raises:
        ValueError: a header differs.
    """
    arrays: dict[str, Array] = {}
    for name, entry in files.items():
        if "shape" not in entry:
            continue
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
        with (folder / name).open("rb") as file:
            if file.read(HEADER_BYTES) != npy_header(shape, dtype):
                raise ValueError(
                    f"{folder / name} has no header of an array of shape {shape} and type {dtype}"
                    f"\n\n{AGAIN}"
                )
            if entry["bytes"] == HEADER_BYTES:
                arrays[name] = np.empty(shape, dtype)
                continue
            is_locked = read_only and PurePosixPath(name).name.startswith(LOCKED)
            mapped = _map_file(file.fileno(), entry["bytes"], is_locked)
        arrays[name] = np.ndarray(shape, dtype, mapped, offset=HEADER_BYTES)
    return arrays


def _map_file(file: int, num_bytes: int, read_only: bool) -> mmap.mmap:
    if not read_only:
        # without MAP_NORESERVE, the kernel refuses a private mapping that is larger than memory;
        # with vm.overcommit_memory=2 it does so in any case
        with contextlib.suppress(OSError):
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            return mmap.mmap(file, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ)


def open_folder(folder: Path, *, read_only: bool = False) -> Prepared:
    """Memory-map a prepared folder; validate `meta.json`, file sizes and headers, not the contents.

    Args:
        folder: the folder.
        read_only: map the graph and the features read-only, so that a GPU driver can lock their
            pages without copying them. A write to them then ends the process with SIGSEGV. All
            other arrays are mapped copy-on-write: a write changes the memory of this process, and
            not the file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the format version is not supported, or the size or dtype of a file does not
            match `meta.json`.
    """
    meta = read_meta(folder)
    arrays = _open_arrays(folder, meta["files"], read_only)
    check_ends(folder, arrays["indptr.npy"], len(arrays["indices.npy"]))
    features, csr, codes = open_features(folder, arrays, meta["features"])
    return Prepared(
        folder,
        meta,
        arrays["indptr.npy"],
        arrays["indices.npy"],
        features,
        csr,
        codes,
        arrays["labels.npy"],
        {part: arrays[f"split/{part}.npy"] for part in SPLITS},
        _links(arrays, meta["links"]) if meta["links"] else None,
    )


def open_hetero(
    folder: Path, *, read_only: bool = False
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Memory-map the folder of a heterogeneous graph; see `open_folder`.

    Returns:
        The metadata, and the mapped arrays by the names of their files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: `meta.json` or the size or dtype of a file is invalid.
    """
    if not is_prepared(folder):
        raise FileNotFoundError(f"no prepared folder {folder}\n\nhint: is the path right?")
    meta = read_meta(folder, HETERO_VERSION)
    arrays = _open_arrays(folder, meta["files"], read_only)
    for number, own in enumerate(meta["edges"]):
        front = front_of("edges", number)
        check_ends(folder, arrays[f"{front}indptr.npy"], own["num_edges"], front)
    return meta, arrays


def open_features(
    folder: Path, arrays: Mapping[str, Array], fields: Mapping[str, Any] | None, front: str = ""
) -> tuple[Array | None, Csr | None, QuantizedRows | None]:
    """Return mapped features as dense rows, sparse rows or codes; the other two are None.

    Args:
        folder: for messages.
        arrays: the mapped files by name.
        fields: the description of the features; None if there are none.
        front: begin of the names of the files.
    """
    if fields is None:
        return None, None, None
    if fields["kind"] == "sparse":
        parts = ("indptr", "indices", "values")
        csr = Csr(*(arrays[f"{front}features_{part}.npy"] for part in parts))
        check_ends(folder, csr.indptr, len(csr.indices), f"{front}features_")
        return None, csr, None
    features = arrays[f"{front}features.npy"][:, : fields["columns"]]
    if fields["kind"] != "codes":
        return features, None, None
    scales = None if fields["scales"] is None else arrays[f"{front}features_scales.npy"]
    codes = QuantizedRows(features, fields["dtype"], scales, fields["scale_columns"])
    return None, None, codes


def check_ends(folder: Path, indptr: Array, count: int, front: str = "") -> None:
    """Check that offsets go from 0 to `count`, the length of the indices."""
    if indptr[0] != 0 or indptr[-1] != count:
        raise ValueError(
            f"{folder}: {front}indptr.npy goes from {indptr[0]} to {indptr[-1]}, not from 0 to "
            f"{count}, the length of {front}indices.npy\n\n{VERIFY.format(folder)}"
        )


def _links(arrays: dict[str, Array], fields: dict[str, Any]) -> EdgeSplitArrays:
    return EdgeSplitArrays(
        {part: arrays[f"links/{part}.npy"] for part in SPLITS},
        {part: arrays[f"links/{part}_negatives.npy"] for part in SPLITS[1:]},
        fields["metric"],
        fields["name"],
    )


def _open_arrays(
    folder: Path, files: Mapping[str, Mapping[str, Any]], read_only: bool
) -> dict[str, Array]:
    """Check that all files exist and have the sizes that `meta.json` says, and map the arrays."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}, which meta.json lists\n\n{AGAIN}")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(
                f"{path} has {size:,} bytes, but meta.json says {entry['bytes']:,}\n\n{AGAIN}"
            )
    return map_arrays(folder, files, read_only)


def verify(folder: Path, progress: Progress = no_progress, version: int = VERSION) -> None:
    """Read every file of a prepared folder and compare its checksum with `meta.json`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a checksum differs; the message names the file.
    """
    files = read_meta(folder, version)["files"]
    _open_arrays(folder, files, read_only=False)
    total = sum(entry["bytes"] for entry in files.values())
    done = 0
    for name, entry in files.items():
        found = checksum(folder / name)
        if found != entry["crc32"]:
            raise ValueError(
                f"{folder / name} has the checksum {found}, but meta.json says "
                f"{entry['crc32']}\n\n{AGAIN}; the disk may be faulty, or the copy incomplete"
            )
        done += entry["bytes"]
        progress("verify", done, total)
