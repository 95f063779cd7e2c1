"""Tuning profiles: measured settings for a device and a shape of table, kept in a file.

`gcnzc.tune.choose` makes a plan, and training takes the one whose key is its own: the device, the
driver and the versions, and the shape of the table's rows. A plan changes how long a minibatch
takes and nothing of what is in it.

All plans are one JSON file in `gcnzc.system.files.cache_folder`. A file that is broken or was
written by something else counts as no plans, and is written anew with the next plan.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import triton

from gcnzc._version import VERSION
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather import gpu, lanes
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.system import files, nvml
from gcnzc.system import machine as system_machine

FILE = "plans.json"


FORMAT = 1


MOST = 100  # plans that are kept; the oldest go


KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


# what a choice rests on; `default` if nothing could be told, and then training does not use it
Basis: TypeAlias = Literal["measured", "modelled", "predicted", "default"]


Key: TypeAlias = dict[str, dict[str, Any]]


Say: TypeAlias = Callable[[str], object]


# what is chosen, and which values a plan may hold
CHOICES: dict[str, Callable[[Any], bool]] = {
    "layout": lambda value: value in LAYOUTS,
    "programs": lambda value: _is_count(value, 1 << 16),
    "warps": lambda value: value in (1, 2, 4, 8, 16, 32),
    "vectors": lambda value: value in (1, 2, 4, 8, 16, 32),
    "threads": lambda value: _is_count(value, 1 << 10),
    "ahead": lambda value: _is_count(value, 1 << 12),
    "copied_share": lambda value: _is_share(value),
    "hot": lambda value: _is_share(value) and value > 0,
}


@dataclass(frozen=True)
class Setting:
    """One setting of a plan."""

    value: int | float | str
    why: str  # a sentence
    basis: Basis
    figures: dict[str, Any]  # that it was chosen from; what JSON can hold


@dataclass(frozen=True)
class TuningProfile:
    """All settings for one device and one shape of rows."""

    key: Key  # what `key_of` says
    data: str  # the graph it was made with
    rows: int  # of that graph's table; the hot set is of no use for another number
    made: str  # when
    choices: dict[str, Setting]  # of each of `CHOICES`

    def value(self, name: str) -> Any:
        """The setting `name`; None if nothing is known that is better than what is usual."""
        choice = self.choices[name]
        return None if choice.basis == "default" else choice.value

    @property
    def way(self) -> KernelConfig | None:
        """How the GPU's threads share a gather; None on a machine without one."""
        if self.key["device"]["kind"] != "cuda":
            return None
        return KernelConfig(
            **{name: self.value(name) for name in ("layout", "programs", "warps", "vectors")}
        )

    def hot(self, num_rows: int) -> float | None:
        """The share of a table's rows to keep on the GPU; None for a table of other length."""
        share = self.value("hot") if num_rows == self.rows else None
        return None if share is None else float(share)

    def told(self) -> str:
        """The settings that count, in one line."""
        words = []
        if self.way is not None:
            programs = self.way.programs or "as many"
            words.append(f"{self.way.layout or 'usual'} gather by {programs} programs")
        for name, one, more in (
            ("threads", "thread", "threads"),
            ("ahead", "batch ahead", "batches ahead"),
        ):
            if (value := self.value(name)) is not None:
                words.append(f"{value} {one if value == 1 else more}")
        if self.value("copied_share"):
            words.append(f"{self.value('copied_share'):.0%} of the rows copied")
        return ", ".join(words) or "all as usual"


def file() -> Path:
    """Where plans are kept."""
    return files.cache_folder() / FILE


def key_of(device: torch.device, table: FeatureTable) -> Key:
    """What a plan depends on.

    Args:
        device: that gets the minibatches.
        table: that is gathered from, as it will lie: inside `gcnzc.pinned` for a GPU.
    """
    rows = table.rows
    at = {"pitch_bytes": 0, "alignment": LINE_BYTES}
    if not table.is_sparse:
        # a single row may have any stride
        pitch = rows.stride(0) * rows.element_size() if len(table) > 1 else table.row_bytes
        at = {"pitch_bytes": pitch, "alignment": gcd(rows.data_ptr(), LINE_BYTES)}
    scales = None if table.scales is None else table.scale_columns or "row"
    return _of_the_machine(device) | {
        "table": {
            "row_bytes": table.row_bytes,
            **at,
            "dtype": str(table.stored_dtype).removeprefix("torch."),
            "sparse": table.is_sparse,
            "scales": scales,
            "lies": "host" if table.device.type == "cpu" else "device",
        }
    }


def find(device: torch.device, table: FeatureTable, say: Say | None = None) -> TuningProfile | None:
    """The plan for a device and a table, if one was kept.

    One that was made for as many rows goes before others; of those the newest counts.

    Args:
        device: see `key_of`.
        table: see `key_of`.
        say: told if the file is no file of plans.
    """
    key = key_of(device, table)
    fitting = [plan for plan in read(say) if plan.key == key]
    exact = [plan for plan in fitting if plan.rows == table.num_rows]
    found = exact or fitting
    return found[-1] if found else None


def of_this_machine(device: torch.device, say: Say | None = None) -> list[TuningProfile]:
    """The plans for a device with its present driver and versions, whatever the table."""
    machine = _of_the_machine(device)
    return [
        plan
        for plan in read(say)
        if {name: part for name, part in plan.key.items() if name != "table"} == machine
    ]


def read(say: Say | None = None) -> list[TuningProfile]:
    """All plans that are kept, the oldest first; none if the file is not there, or not ours.

    Args:
        say: told, in one line, if it is there and no file of plans.
    """
    try:
        found = json.loads(file().read_text())
        if found["format"] != FORMAT:
            raise ValueError("another format")
        return [_plan(words) for words in found["plans"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if say is not None:
            what = " ".join(str(error).split()) or type(error).__name__
            say(f"{file()} holds no plans that can be read ({what}): taken as empty")
        return []


def keep(plan: TuningProfile) -> Path:
    """Add a plan to the file, in the place of the one it replaces; all at once.

    Returns:
        The file.

    Raises:
        OSError: the folder cannot be written.
    """
    place = file()
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{FILE}.lock").open("w") as lock:
        # another process may have one to add
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [old for old in read() if (old.key, old.rows) != (plan.key, plan.rows)]
        plans = [*others, plan][-MOST:]
        files.write_json(place, {"format": FORMAT, "plans": [asdict(one) for one in plans]})
    return place


def _of_the_machine(device: torch.device) -> Key:
    versions = {
        "torch": torch.__version__,
        "gcnzc": VERSION,
        "kernels": _kernels(),
        "triton": triton.__version__,
    }
    if device.type != "cuda":
        about = {"kind": "cpu", "name": system_machine.cpu_name(), "cores": os.cpu_count()}
        return {"device": about, "versions": versions}
    found, properties = nvml.slot(device), torch.cuda.get_device_properties(device)
    about = {"kind": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    if found["pcie_generation"] is None:
        # devices of one name may be in different slots
        about["uuid"] = str(getattr(properties, "uuid", None))
    else:
        about |= {name: found[name] for name in ("pcie_generation", "pcie_lanes")}
    about |= {"host": system_machine.cpu_name(), "cores": os.cpu_count()}
    versions |= {"driver": found["driver"] or _driver(), "cuda": torch.version.cuda}
    return {"device": about, "versions": versions}


def _driver() -> str | None:
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...
    try:
        words = KERNEL_DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word.replace(".", "").isdigit()), None)


def _kernels() -> str:
    """A checksum of the gather's sources: another kernel has another best."""
    sources = [Path(str(module.__file__)).read_bytes() for module in (gpu, lanes)]
    return f"{zlib.crc32(b''.join(sources)):08x}"


def _plan(words: Mapping[str, Any]) -> TuningProfile:
    choices = {}
    for name, allows in CHOICES.items():
        choice = Setting(**words["choices"][name])
        if not allows(choice.value) or choice.basis not in get_args(Basis):
            raise ValueError(f"{name} cannot be {choice.value!r}, {choice.basis}")
        choices[name] = choice
    plan = TuningProfile(**(dict(words) | {"choices": choices}))
    if plan.key["device"]["kind"] not in ("cpu", "cuda") or not isinstance(plan.rows, int):
        raise ValueError("a plan of no device")
    return plan


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1
