"""Tuning profiles: measured settings for a device and a table layout, saved in a file.

`gcnzc.tune.choose` measures a profile. Training uses the profile whose key is equal to its own: the
device, the versions of the driver and of software, and the layout of the table's rows. A profile
changes the time of a minibatch, never its contents.

All profiles are in one JSON file in `gcnzc.system.files.cache_folder`. A file that is damaged or
has another format is treated as empty, and replaced when a profile is saved.
"""

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

from gcnzc._files import locked_file
from gcnzc._version import VERSION
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather import gpu, lanes
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.system import files, nvml
from gcnzc.system import machine as system_machine

FILE = "plans.json"


FORMAT = 1


MAX_PROFILES = 100  # in the file; the oldest are removed


KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


# how a setting was chosen; training ignores settings with the basis "default"
Basis: TypeAlias = Literal["measured", "predicted", "default"]


Key: TypeAlias = dict[str, dict[str, Any]]


Warn: TypeAlias = Callable[[str], object]


# names of settings, and predicates for valid values; "ahead" is the number of prefetched
# minibatches, "hot" the fraction of rows in the feature cache
SETTINGS: dict[str, Callable[[Any], bool]] = {
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
    """One setting of a tuning profile."""

    value: int | float | str
    why: str  # reason for the choice, one sentence
    basis: Basis
    figures: dict[str, Any]  # measurements that it was chosen from, as JSON values


@dataclass(frozen=True)
class TuningProfile:
    """The settings for one device and one table layout.

    Attributes:
        key: see `make_key`.
        data: name of the dataset that was measured.
        rows: number of rows of its table; the cache size applies only to tables of this length.
        made: time of the measurement, ISO 8601 in UTC.
        choices: the settings by the names in `SETTINGS`.
    """

    key: Key
    data: str
    rows: int
    made: str
    choices: dict[str, Setting]

    def value(self, name: str) -> Any:
        """Return the value of the setting `name`; None if it is the default."""
        choice = self.choices[name]
        return None if choice.basis == "default" else choice.value

    @property
    def kernel_config(self) -> KernelConfig | None:
        """Launch configuration of the GPU's gather kernel; None for a profile of a CPU."""
        if self.key["device"]["kind"] != "cuda":
            return None
        return KernelConfig(*map(self.value, ("programs", "warps", "vectors")))

    def cache_share(self, num_rows: int) -> float | None:
        """Return the fraction of rows to cache on the GPU; None for a table of another length."""
        share = self.value("hot") if num_rows == self.rows else None
        return None if share is None else float(share)

    def summary(self) -> str:
        """Describe the settings that are not defaults, in one line."""
        words = {
            "programs": "gathers by {} programs",
            "threads": "{} thread{s}",
            "ahead": "{} prefetched batch{es}",
            "copied_share": "{:.0%} of the rows copied",
        }
        found = []
        for name, text in words.items():
            if name == "programs" and self.kernel_config is None:
                continue  # of a CPU
            if value := self.value(name):
                endings = {"s": "", "es": ""} if value == 1 else {"s": "s", "es": "es"}
                found.append(text.format(value, **endings))
        return ", ".join(found) or "all defaults"


def profiles_path() -> Path:
    """Return the path of the file of profiles."""
    return files.cache_folder() / FILE


def make_key(device: torch.device, table: FeatureTable) -> Key:
    """Return the key of a profile: everything that the best settings depend on.

    Args:
        device: device that receives the minibatches.
        table: feature table, for a GPU inside `gcnzc.pinned`, because its address is in the key.
    """
    rows = table.rows
    layout = {"pitch_bytes": 0, "alignment": LINE_BYTES}
    if not table.is_sparse:
        # the stride of a single row is arbitrary
        pitch = rows.stride(0) * rows.element_size() if len(table) > 1 else table.row_bytes
        layout = {"pitch_bytes": pitch, "alignment": gcd(rows.data_ptr(), LINE_BYTES)}
    scales = None if table.scales is None else table.scale_columns or "row"
    return _machine_key(device) | {
        "table": {
            "row_bytes": table.row_bytes,
            **layout,
            "dtype": str(table.stored_dtype).removeprefix("torch."),
            "sparse": table.is_sparse,
            "scales": scales,
            "lies": "host" if table.device.type == "cpu" else "device",
        }
    }


def find(
    device: torch.device, table: FeatureTable, say: Warn | None = None
) -> TuningProfile | None:
    """Find the profile for a device and a table; None if there is none.

    Profiles of a table with the same number of rows are preferred, then newer ones.

    Args:
        device: see `make_key`.
        table: see `make_key`.
        say: called with a warning if the file cannot be read.
    """
    key = make_key(device, table)
    matching = [profile for profile in read(say) if profile.key == key]
    # stable: the newest remains the last
    found = sorted(matching, key=lambda profile: profile.rows == table.num_rows)
    return found[-1] if found else None


def find_for_device(device: torch.device, say: Warn | None = None) -> list[TuningProfile]:
    """Return the profiles for a device with its present driver and versions, for any table."""
    machine = _machine_key(device)
    return [found for found in read(say) if found.key | machine == found.key]


def read(say: Warn | None = None) -> list[TuningProfile]:
    """Read all profiles, oldest first; an empty list if the file is missing or damaged.

    Args:
        say: called with a warning, in one line, if the file is damaged or of another format.
    """
    try:
        found = json.loads(profiles_path().read_text())
        if found["format"] != FORMAT:
            raise ValueError("another format")
        return [_parse_profile(fields) for fields in found["plans"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if say is not None:
            reason = " ".join(str(error).split()) or type(error).__name__
            say(f"cannot read tuning profiles in {profiles_path()} ({reason}): ignored")
        return []


def save(profile: TuningProfile) -> Path:
    """Add a profile to the file atomically; it replaces one with the same key and number of rows.

    Returns:
        The path of the file.

    Raises:
        OSError: the folder is not writable.
    """
    path = profiles_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    # another process may be adding a profile
    with locked_file(path.parent / f".{FILE}.lock"):
        others = [old for old in read() if (old.key, old.rows) != (profile.key, profile.rows)]
        profiles = [*others, profile][-MAX_PROFILES:]
        files.write_json(path, {"format": FORMAT, "plans": [asdict(one) for one in profiles]})
    return path


def _machine_key(device: torch.device) -> Key:
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
        # devices with the same name may be in different slots
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
    """Return a checksum of the gather kernels' sources; a changed kernel needs a new profile."""
    sources = [Path(str(module.__file__)).read_bytes() for module in (gpu, lanes)]
    return f"{zlib.crc32(b''.join(sources)):08x}"


def _parse_profile(fields: Mapping[str, Any]) -> TuningProfile:
    settings = {}
    for name, is_valid in SETTINGS.items():
        setting = Setting(**fields["choices"][name])
        if not is_valid(setting.value) or setting.basis not in get_args(Basis):
            raise ValueError(f"{name} cannot be {setting.value!r}, {setting.basis}")
        settings[name] = setting
    profile = TuningProfile(**(dict(fields) | {"choices": settings}))
    if profile.key["device"]["kind"] not in ("cpu", "cuda") or not isinstance(profile.rows, int):
        raise ValueError("a profile without a device")
    return profile


def _is_count(value: Any, maximum: int) -> bool:
    return type(value) is int and 1 <= value <= maximum


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1
