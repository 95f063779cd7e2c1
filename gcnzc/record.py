"""What is kept of a run: one JSON line an epoch, with the machine and the versions it came from."""

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
    """What started the workers of a run: a launcher, or one on each of several machines."""

    run_id: str | None = None
    """that the user gave to all launchers; None if they have no id in common"""
    launchers: frozenset[str] = frozenset()
    """the launchers, each by a name that no other process has; empty if there is a run id"""

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
    """Add one JSON line to the file `path`, whole: a line is written by one call."""
    data = (json.dumps(dict(line)) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        file.write(data)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of `path` up to one that is cut off or damaged; none if there is no file."""
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
    """Cut `path` down to its first `num_lines` lines, all at once."""
    rewrite(path, read(path)[:num_lines])


def rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Let `path` have these lines and no others, all at once."""
    write_text(path, "".join(json.dumps(dict(line)) + "\n" for line in lines))


@contextmanager
def board(folder: Path, first_step: int) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Write the numbers of lines for TensorBoard too, where it is installed.

    Args:
        folder: of the event files.
        first_step: what an earlier process wrote from this step on is struck out.

    Yields:
        What takes a step and its line; it does nothing where there is no TensorBoard.
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
    """Write `value` to `path`, whole or not at all."""
    write_text(path, json.dumps(dict(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` at the end; removed if that fails.

    It has the ending of `path`, by which some libraries choose a format.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, until the end of the `with` or of the process.

    Raises:
        ValueError: another process holds it.
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
    """Where what can be made again is kept for this user; it need not be there.

    GCNZC_CACHE in the environment says which folder it is, or XDG_CACHE_HOME in which.
    """
    own = os.environ.get("GCNZC_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcnzc")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

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
    """Write `array` to `path` as .npy, whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        numpy.save(file, array)


def machine() -> dict[str, Any]:
    """Where and with what a figure was made."""
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
    """The processor's own name, or its architecture where it has none to tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
