"""The command that checks and tunes this machine."""

import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from gcnzc.cli.output import print_json
from gcnzc.cli.reports import tuning
from gcnzc.features.table import FeatureTable
from gcnzc.graph import load
from gcnzc.graph.dataset import Dataset
from gcnzc.system import host_memory, machine
from gcnzc.system.progress import ProgressCallback
from gcnzc.train.options import Fanouts, at_least, check_fanouts, check_numbers, parse_cache_size
from gcnzc.train.progress import Reporter
from gcnzc.tune import choose, profiles, search
from gcnzc.tune import machine as tune_machine
from gcnzc.tune.profiles import TuningProfile


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Say what this machine can do, and what to mend; with --tune, how it gathers fastest.

    Prints one JSON line. What --tune finds is kept, and `gcnzc train` uses it.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph to tune for, prepared or in OGB's layout; without it one at random"""
    tune: bool = False
    """measure which settings gather fastest, and keep them as the plan for this machine"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept in the minibatches of --tune, as of `gcnzc train`"""
    batch_size: int = 1024
    """seeds of a minibatch of --tune"""
    row_bytes: int = 512
    """bytes of a row, where there is no DATA"""
    cache_memory: str = "0.5"
    """of the GPU, for hot rows: a share of what is free, or bytes such as 8GB"""
    compute_ms: float = 0.0
    """milliseconds that the model takes for a minibatch, if known: hot rows then hide the rest"""
    megabytes: int = 512
    """size of the table whose reading is measured"""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("batch_size", "row_bytes", "megabytes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "compute_ms", self.compute_ms)
        check_fanouts(self.fanouts)
        parse_cache_size(self.cache_memory, "--cache-memory", "of the GPU's free memory")


ROUNDS = 7


BUSY = 0.5  # of the cores, wanted by something else


ROW_BYTES = 512  # ogbn-arxiv's and ogbn-papers100M's rows: 128 float32


def check_machine(num_bytes: int, advance: ProgressCallback) -> dict[str, Any]:
    """Look at the machine, and measure how fast its CPU copies and gathers rows.

    Args:
        num_bytes: size of the table that is read; larger than the caches to mean anything.
        advance: told how far the measuring is.

    Returns:
        Versions (None where a package is missing), sizes in bytes, rates in bytes per second, and
        `load`, the processes that wanted a core in the minute before.
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
    """What `machine` found, in sentences: what there is, and what would mend what is missing."""
    giga = 1e9
    lines = [
        f"gcnzc {found['gcnzc']}, torch {found['torch']}, numba {found['numba']}, "
        f"triton {found['triton'] or 'missing'}, Python {found['python']}",
        f"{found['cpu']}, {found['cores']} cores, {found['memory_bytes'] / giga:.1f} GB of memory, "
        f"{found['memory_available_bytes'] / giga:.1f} GB free",
        f"a large copy moves {found['copy_bytes_per_s'] / giga:.1f} GB/s; gathering rows of "
        f"{ROW_BYTES} bytes {found['gather_bytes_per_s'] / giga:.1f} GB/s, "
        f"{found['gather_bytes_per_s'] / found['copy_bytes_per_s']:.0%} of it",
    ]
    if found["load"] > BUSY * found["cores"]:
        lines.append(
            f"other work wants {found['load']:.1f} of the {found['cores']} cores: what is measured "
            "is of a machine shared with it. Mend: measure again when nothing else runs"
        )
    if found["gpu"]:
        lines.append(f"GPU: {found['gpu']}")
        lockable = found["lockable_bytes"]
        if lockable is not None and lockable < found["memory_bytes"]:
            lines.append(
                f"only {lockable / giga:.3g} GB may be page-locked, where the driver keeps to that "
                "limit: a larger feature table is then refused to the GPU. Mend: `ulimit -l "
                "unlimited`, or memlock in limits.conf"
            )
    else:
        lines.append(
            "no GPU that torch can use: everything runs on the CPU. With an NVIDIA GPU in this "
            "machine, look at `nvidia-smi`, and install a CUDA build of torch"
        )
    if found["triton"] is None:
        lines.append("no Triton: GPU kernels cannot run. Mend: pip install triton")
    if found["dgl"] is None:
        newest = sys.version_info >= (3, 13)
        mend = "it has no wheel for this Python; use 3.12" if newest else "pip install dgl==2.1.0"
        lines.append(f"no DGL: --sampler dgl is not there; all else is. Mend: {mend}")
    elif not found["dgl_works"]:
        lines.append("DGL is installed but does not import: --sampler dgl is not there")
    return lines


def tuned(config: CheckConfig, data: Dataset | None, progress: search.Progress) -> TuningProfile:
    """Measure a plan for this machine.

    Args:
        config: what minibatches are like, and what hot rows may take.
        data: the graph to tune for; one at random if None.
        progress: see `gcnzc.tune.search.Progress`.

    Raises:
        ValueError, RuntimeError: as `gcnzc.tune.choose` does.
    """
    if data is None:
        case = tune_machine.default_case(config.row_bytes, config.fanouts, config.batch_size)
    else:
        case = tune_machine.case_of(data, config.fanouts, config.batch_size)
    room = parse_cache_size(config.cache_memory)
    compute_s = config.compute_ms / 1e3 or None
    return choose.tune(case, room=room, compute_s=compute_s, progress=progress)


def kept(found: TuningProfile, say: profiles.Say) -> str | None:
    """Keep a plan, and say where: its file, or None if that cannot be written."""
    # said here, once, before the file is written anew
    profiles.read(say)
    try:
        place = profiles.keep(found)
    except OSError as error:
        say(f"the plan is not kept: {error}. GCNZC_CACHE names another folder")
        return None
    say(f"kept in {place}; `gcnzc train` uses it for such rows on this machine")
    return str(place)


def plans_for(data: Dataset | None, say: profiles.Say) -> list[TuningProfile]:
    """The plans that are kept for this machine, or the one for the features of `data`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if data is None or data.table is None:
        return profiles.of_this_machine(device, say)
    # not page-locked, which a large table takes long for, and which moves no row within its line
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
    table, kept = FeatureTable(rows), torch.empty_like(rows[: num_rows // 4 + 1])
    ids = torch.randint(num_rows, (len(kept),), generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], object]] = {
        "copy_bytes_per_s": lambda: kept.copy_(rows[: len(kept)]),
        "gather_bytes_per_s": lambda: table.gather(ids, kept),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
        advance(turn + 1, ROUNDS + 1, "")
    # the first round touches fresh pages and compiles
    return {name: kept.nbytes / statistics.median(s[1:]) for name, s in seconds.items()}


def check_command(config: CheckConfig, reporter: Reporter) -> None:
    """`gcnzc check`."""
    with reporter.task("measure") as advance:
        found = check_machine(config.megabytes << 20, advance)
    for line in advice(found):
        reporter.say(line)
    loaded = None if config.data is None else load.load(config.data, allow_nan=True)
    if config.tune:
        with reporter.stages("tune") as progress:
            plans = [tuned(config, loaded, progress)]
        found["kept_in"] = kept(plans[0], reporter.say)
    else:
        plans = plans_for(loaded, reporter.say)
    for plan in plans:
        for line in tuning.lines(plan):
            reporter.say(line)
    print_json(found | {"plans": [asdict(plan) for plan in plans]})
