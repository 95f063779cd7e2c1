"""The command that checks and tunes the machine."""

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gcnzc.cli.options import CheckConfig
from gcnzc.cli.output import print_json
from gcnzc.features.table import FeatureTable
from gcnzc.graph import load
from gcnzc.graph.dataset import Dataset
from gcnzc.system import host_memory, machine
from gcnzc.system.progress import ProgressCallback
from gcnzc.train.progress import Reporter
from gcnzc.train.values import parse_share
from gcnzc.tune import choose, profiles, search
from gcnzc.tune import machine as tune_machine
from gcnzc.tune.profiles import TuningProfile
from gcnzc.tune.search import interleave, medians

ROUNDS = 7


BUSY = 0.5  # fraction of the cores that other processes use, above which a warning is printed


ROW_BYTES = 512  # of 128 float32, as the rows of ogbn-arxiv and ogbn-papers100M


def check_machine(num_bytes: int, advance: ProgressCallback) -> dict[str, Any]:
    """Inspect the machine, and measure how fast its CPU copies and gathers rows.

    Args:
        num_bytes: size of the table to read; it should be larger than the CPU's caches.
        advance: called with the progress.

    Returns:
        Versions (None for a missing package), sizes in bytes, rates in bytes per second, and
        `load`, the load average of the last minute.
    """
    found = machine.machine()
    found["load"] = os.getloadavg()[0]
    for name in ("triton", "dgl", "torch-geometric", "ogb", "tensorboard"):
        found[name] = _version(name)
    found["dgl_works"] = _dgl_works() if found["dgl"] else None
    found["memory_bytes"] = _memory_bytes()
    found["memory_available_bytes"] = host_memory.available_bytes()
    found["lockable_bytes"] = host_memory.lock_limit_bytes()
    found["threads"] = torch.get_num_threads()
    return found | _rates(num_bytes, advance)


def advice(found: Mapping[str, Any]) -> list[str]:
    """Describe what `check_machine` found, and how to fix what is missing, as lines of text."""
    giga = 1e9
    lines = [
        f"gcnzc {found['gcnzc']}, torch {found['torch']}, numba {found['numba']}, "
        f"triton {found['triton'] or 'missing'}, Python {found['python']}",
        f"{found['cpu']}, {found['cores']} cores, {found['memory_bytes'] / giga:.1f} GB of memory, "
        f"{found['memory_available_bytes'] / giga:.1f} GB free",
        f"host memory: {found['copy_bytes_per_s'] / giga:.1f} GB/s for a large copy, "
        f"{found['gather_bytes_per_s'] / giga:.1f} GB/s for a gather of rows of {ROW_BYTES} bytes "
        f"({found['gather_bytes_per_s'] / found['copy_bytes_per_s']:.0%} of the copy)",
    ]
    if found["load"] > BUSY * found["cores"]:
        lines.append(
            f"other processes use {found['load']:.1f} of the {found['cores']} cores, so all "
            "measurements are too low. Fix: measure again when nothing else runs"
        )
    if found["gpu"]:
        lines.append(f"GPU: {found['gpu']}")
        lockable = found["lockable_bytes"]
        if lockable is not None and lockable < found["memory_bytes"]:
            lines.append(
                f"the memlock limit is {lockable / giga:.3g} GB: some drivers do not page-lock a "
                "feature table that is larger. Fix: `ulimit -l unlimited`, or memlock in "
                "limits.conf"
            )
    else:
        build = ", and install a CUDA build of torch" if torch.version.cuda is None else ""
        lines.append(
            "torch finds no GPU: everything runs on the CPU. If this machine has an NVIDIA GPU, "
            f"check that `nvidia-smi` shows it{build}"
        )
    if found["triton"] is None:
        lines.append("Triton is missing: GPU kernels cannot run. Fix: pip install triton")
    if found["dgl"] is None:
        newest = sys.version_info >= (3, 13)
        fix = "use Python 3.12, for which DGL has a wheel" if newest else "pip install dgl==2.1.0"
        lines.append(f"DGL is missing: only --sampler dgl needs it. Fix: {fix}")
    elif not found["dgl_works"]:
        lines.append("DGL is installed, but cannot be imported: --sampler dgl does not work")
    return lines


def measure_profile(
    config: CheckConfig, data: Dataset | None, progress: search.Progress
) -> TuningProfile:
    """Measure a tuning profile for this machine.

    Args:
        config: the minibatches to tune for, and the memory for the feature cache.
        data: the graph to tune for; a random graph if None.
        progress: see `gcnzc.tune.search.Progress`.

    Raises:
        ValueError, RuntimeError: as `gcnzc.tune.choose` does.
    """
    if data is None:
        case = tune_machine.default_case(config.row_bytes, config.fanouts, config.batch_size)
    else:
        case = tune_machine.case_of(data, config.fanouts, config.batch_size)
    return choose.tune(
        case,
        parse_share(config.cache_memory, "--cache-memory", "of the GPU's free memory"),
        progress,
    )


def store_profile(found: TuningProfile, say: profiles.Warn) -> str | None:
    """Store a tuning profile; return its file, or None if the file cannot be written."""
    # reports a damaged file, before it is replaced
    profiles.read(say)
    try:
        path = profiles.save(found)
    except OSError as error:
        say(f"the tuning profile could not be stored: {error}. Set GCNZC_CACHE to another folder")
        return None
    say(f"stored in {path}; `gcnzc train` uses it for features of this layout on this machine")
    return str(path)


def format_profile(found: TuningProfile) -> list[str]:
    """Format a tuning profile: each setting, the reason for it, and the measurements behind it."""
    device = found.key["device"]
    table = found.key["table"]
    lines = [
        f"tuning profile for {device['name']} and rows of {table['row_bytes']} B {table['dtype']}, "
        f"with a pitch of {table['pitch_bytes']} B; measured with {found.data}, {found.made}"
    ]
    values = {name: _format_setting(name, choice.value) for name, choice in found.choices.items()}
    name_width, value_width = (max(map(len, texts)) for texts in (values, values.values()))
    for name, choice in found.choices.items():
        value = values[name].rjust(value_width)
        lines.append(f"{name.ljust(name_width)}  {value}  {choice.basis}: {choice.why}")
        for kind, figures in choice.figures.items():
            # the measurements of `vectors` are those of `warps`
            if isinstance(figures, dict) and name != "vectors":
                cells = (f"{tried}: {1e3 * seconds:.3g} ms" for tried, seconds in figures.items())
                title = kind.removesuffix("_s").replace("_", " ")
                indent = " " * (name_width + value_width + 4)
                lines.append(f"{indent}{title}: {', '.join(cells)}")
    return lines


def _format_setting(name: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name == "hot" else f"{value:.2f}"
    return str(value)


def profiles_for(data: Dataset | None, say: profiles.Warn) -> list[TuningProfile]:
    """Return the stored profiles of this machine, or only the one for the features of `data`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if data is None or data.table is None:
        return profiles.find_for_device(device, say)
    # the table need not be page-locked: this takes long, and does not change its alignment
    found = profiles.find(device, data.table, say)
    return [] if found is None else [found]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dgl_works() -> bool:
    from gcnzc.interop.dgl import import_dgl

    try:
        import_dgl()
    except (ImportError, RuntimeError):
        return False
    return True


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemTotal\n\nhint: gcnzc runs on Linux")


def _rates(num_bytes: int, advance: ProgressCallback) -> dict[str, float]:
    num_rows = max(1, num_bytes // ROW_BYTES)
    rows = torch.ones(num_rows, ROW_BYTES // 4)
    table, out = FeatureTable(rows), torch.empty_like(rows[: num_rows // 4 + 1])
    ids = torch.randint(num_rows, (len(out),), generator=torch.Generator().manual_seed(0))
    functions: dict[str, Callable[[], object]] = {
        "copy_bytes_per_s": lambda: out.copy_(rows[: len(out)]),
        "gather_bytes_per_s": lambda: table.gather(ids, out),
    }

    def seconds(name: str) -> float:
        begin = time.perf_counter()
        functions[name]()
        return time.perf_counter() - begin

    taken = interleave(
        functions, seconds, ROUNDS, advance=lambda done, total: advance(done, total, "")
    )
    return {name: out.nbytes / median_s for name, median_s in medians(taken).items()}


def check_command(config: CheckConfig, reporter: Reporter) -> None:
    """`gcnzc check`."""
    with reporter.task("measure the memory") as advance:
        found = check_machine(config.megabytes << 20, advance)
    for line in advice(found):
        reporter.say(line)
    loaded = None if config.data is None else load.load(config.data, allow_nan=True)
    if config.tune:
        with reporter.stages("tune") as progress:
            found_profiles = [measure_profile(config, loaded, progress)]
        found["kept_in"] = store_profile(found_profiles[0], reporter.say)
    else:
        found_profiles = profiles_for(loaded, reporter.say)
    for profile in found_profiles:
        for line in format_profile(profile):
            reporter.say(line)
    print_json(found | {"plans": [asdict(profile) for profile in found_profiles]})
