"""Read and write the records of a run: JSON lines, launch, lock, machine and versions."""

import fcntl
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy
import torch
import triton

from gcnzc._version import VERSION

LAUNCH = "launch.json"


@dataclass(frozen=True)
class Launch:
    """The launch of a run's workers, by a launcher on each machine."""

    run_id: str | None = None
    """the id that all launchers have in common; None if there is none"""
    launchers: frozenset[str] = frozenset()
    """unique names of the launchers; empty if there is a run id"""

    def has_started(self, folder: Path) -> bool:
        """Whether this launch was the last one that started the run in `folder`.

        Launchers without a run id belong to a launch if one of them has started its workers before:
        others may have been replaced, and worker 0 may have moved from one to another.
        """
        earlier = self._read(folder)
        if earlier is None:
            return False
        if self.run_id is not None:
            return earlier.run_id == self.run_id
        return not earlier.launchers.isdisjoint(self.launchers)

    def write(self, folder: Path) -> None:
        """Store this launch in `folder`, with all launchers that have belonged to it."""
        known = self.launchers
        if self.has_started(folder):
            earlier = self._read(folder)
            known |= earlier.launchers if earlier is not None else frozenset()
        write_json(folder / LAUNCH, {"run_id": self.run_id, "launchers": sorted(known)})

    @staticmethod
    def _read(folder: Path) -> "Launch | None":
        # a damaged file belongs to no launch
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            found = read_json(folder / LAUNCH)
            return Launch(found["run_id"], frozenset(found["launchers"]))
        return None


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append one JSON line to the file `path`, with a single write."""
    data = (json.dumps(dict(line)) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        file.write(data)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path` before the first damaged one; none if there is no file."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def keep(path: Path, num_lines: int) -> None:
    """Truncate `path` to its first `num_lines` lines, atomically."""
    rewrite(path, read(path)[:num_lines])


def rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the contents of `path` by these lines, atomically."""
    write_text(path, "".join(json.dumps(dict(line)) + "\n" for line in lines))


@contextmanager
def board(folder: Path, first_step: int) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Write numbers to TensorBoard event files, if TensorBoard is installed.

    Args:
        folder: the folder of the event files.
        first_step: events of earlier processes from this step on are purged.

    Yields:
        A function of a step and its line; it does nothing without TensorBoard.
    """
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda step, line: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=first_step) as writer:

        def write(step: int, line: Mapping[str, Any]) -> None:
            for name, value in line.items():
                if isinstance(value, int | float):
                    writer.add_scalar(name, value, step)
            writer.flush()

        yield write


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as JSON to `path`, atomically."""
    write_text(path, json.dumps(dict(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, atomically."""
    with replacing(path) as partial:
        partial.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end, or is removed after an error.

    It has the suffix of `path`, from which some libraries choose a format.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder until the end of the `with` or of the process.

    File systems without locks are accepted, without a lock.

    Raises:
        ValueError: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {folder}\n\n"
                "hint: wait for it, or end it first; `fuser` on the folder says which it is"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the user's cache folder, which need not exist.

    It is GCNZC_CACHE of the environment, or the folder gcnzc in XDG_CACHE_HOME or ~/.cache.
    """
    own = os.environ.get("GCNZC_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcnzc")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a JSON object.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__}, not an object")
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}\n\nhint: was it edited? Start the run again"
        ) from error


def write_array(path: Path, array: numpy.ndarray) -> None:
    """Write `array` to `path` as .npy, atomically."""
    with replacing(path) as partial, partial.open("wb") as file:
        numpy.save(file, array)


def machine() -> dict[str, Any]:
    """Return the versions of gcnzc and its dependencies, the CPU, its cores and the GPU."""
    return {
        "gcnzc": VERSION,
        "python": platform.python_version(),
        # a plain string, which torch.load reads with weights_only
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "numba": numba.__version__,
        "numpy": numpy.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
