"""Measure and choose the settings that load minibatches fastest.

All times come from a `Machine`. The values of a setting
are measured in interleaved rounds, and the fastest is the one with the least median. Values within
`WITHIN` of it, in the median or in enough of the rounds, count as equally fast; the cheapest of
them is chosen: fewest warps, threads, prefetched minibatches, or threads and then
rows for the CPU to gather. Thus measurement noise does not decide, and no resources are wasted. If
the noise of the measurements of threads, prefetched minibatches or copied rows exceeds `NOISY`,
because other programs are running, the default of that setting is kept.

Settings are chosen in sequence, each with the previous ones fixed: programs with warps and vectors;
threads; prefetched minibatches; fraction of rows for the copy engine, which may also
increase the threads and the prefetched minibatches; cache size. Without a GPU, the
settings of the GPU keep their defaults.

In saved profiles "ahead" is the number of prefetched minibatches, and "hot" the fraction of rows in
the feature cache.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from typing import Any

import torch

from gcnzc.features.cache import DEFAULT_CACHED_FRACTION, cache_bytes, num_rows_to_cache
from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.kernels.gather.gpu import VECTORS, WARPS, KernelConfig
from gcnzc.kernels.gpu_launch import DEFAULT_PROGRAMS
from gcnzc.loader.checks import default_threads
from gcnzc.loader.presampling import presample
from gcnzc.tune import pcie_bench, profiles
from gcnzc.tune.machine import Case, LoaderSettings, Machine
from gcnzc.tune.profiles import Setting, TuningProfile
from gcnzc.tune.search import WITHIN, Progress, S, cheapest, measure_in_rounds, medians, spread

NOISY = 0.2  # limit of the noise, see `spread`


# candidates for the GPU's gather kernel: programs, and pairs of warps and vectors in flight
PROGRAMS = (4, 8, 16, 32, 64, 132, 264)


SHAPES = ((4, 4), (8, 2), (8, 4), (8, 8), (16, 4))


THREADS = (1, 2, 3, 4, 6, 8)


IDEAL_STEP = 0.2  # step of the copied shares that are measured, relative to the predicted share


IDEAL_FACTORS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)


@dataclass(frozen=True)
class CacheMemory:
    """The limit for the size of the feature cache."""

    memory_bytes: int | None  # GPU memory for cached rows; None if unknown
    reason: str  # origin of the limit, for messages


def tune(case: Case, cache_memory: float, progress: Progress) -> TuningProfile:
    """Measure on this machine and return the tuning profile for a workload.

    Args:
        case: the workload. With CUDA, its table is page-locked during the measurement.
        cache_memory: memory for the feature cache: bytes (int), or a fraction of the GPU's free
            memory (float).
        progress: see `Progress`.

    Raises:
        ValueError: the table is sparse and there is a GPU.
        RuntimeError: a gather returned wrong rows, or there is not enough memory.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and case.table.is_sparse:
        raise ValueError(
            f"{case.name} has sparse features, but a GPU reads dense rows\n\n"
            "hint: convert them with `gcnzc prepare`"
        )
    with pinned(case.table) as table:
        case = replace(case, table=table)
        gpu = pcie_bench.current_gpu() if can_read_host(device) else None
        bench = Machine(case, device, gpu)
        return tune_on(bench, case, device, _cache_memory(cache_memory, device), progress)


def tune_on(
    bench: Machine, case: Case, device: torch.device, limit: CacheMemory, progress: Progress
) -> TuningProfile:
    """Choose the settings for a workload by the measurements of `bench`."""
    choices = choose_kernel_config(bench, device, progress)
    kernel_config = None
    if bench.has_gpu:
        kernel_config = KernelConfig(*(int(choice.value) for choice in choices.values()))
    choices |= choose_loader_settings(bench, kernel_config, progress)
    threads, ahead = int(choices["threads"].value), int(choices["ahead"].value)
    loading = LoaderSettings(threads, ahead, 0.0, kernel_config)
    both, choices["copied_share"] = choose_copied_share(bench, loading, device, progress)
    if both.threads != threads:
        more = f"some threads gather copied rows; {threads} would suffice without copies"
        choices["threads"] = replace(choices["threads"], value=both.threads, why=more)
        choices["ahead"] = replace(choices["ahead"], value=both.ahead, why="goes with the threads")
    choices["hot"] = choose_cache_size(case, limit, progress)
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    key = profiles.make_key(device, case.table)
    return TuningProfile(key, case.name, case.table.num_rows, measured_at, choices)


def choose_kernel_config(
    bench: Machine, device: torch.device, progress: Progress
) -> dict[str, Setting]:
    """Choose programs, warps and vectors of the GPU's gather kernel."""
    if not bench.has_gpu:
        defaults = {"programs": DEFAULT_PROGRAMS, "warps": WARPS, "vectors": VECTORS}
        return {name: _not_measured(value, device) for name, value in defaults.items()}
    candidates = [(programs, *shape) for shape, programs in product(SHAPES, PROGRAMS)]
    times = measure_in_rounds(
        candidates, lambda one: bench.gather_s(KernelConfig(*one)), "programs", progress
    )
    # registers of resident warps are not available to the model's kernels
    chosen = cheapest(times, lambda one: (one[0] * one[1], one[0], one[2]))
    programs, warps, vectors = chosen
    why = (
        f"{_describe_lead(times, chosen)} of {len(candidates)} candidates; of those about as fast, "
        "the one with the fewest resident warps"
    )
    median_s = medians(times)
    by_programs = {str(count): median_s[count, warps, vectors] for count in PROGRAMS}
    by_shape = {f"{w} x {v}": min(median_s[count, w, v] for count in PROGRAMS) for w, v in SHAPES}
    figures = {"best_gather_s": by_shape}
    return {
        "programs": Setting(programs, why, "measured", {"gather_s": by_programs}),
        "warps": Setting(warps, "goes with the programs", "measured", figures),
        "vectors": Setting(vectors, "goes with the programs", "measured", figures),
    }


def choose_loader_settings(
    bench: Machine, kernel_config: KernelConfig | None, progress: Progress
) -> dict[str, Setting]:
    """Choose the number of loading threads, then the number of prefetched minibatches."""

    def batch_s(threads: int, ahead: int) -> float:
        return bench.batch_s(LoaderSettings(threads, ahead, 0.0, kernel_config))

    def choose(
        name: str, counts: list[int], seconds: Callable[[int], float], default: int, more: str
    ) -> Setting:
        times = measure_in_rounds(counts, seconds, name, progress)
        count = cheapest(times, int)
        figures = {"batch_s": {str(count): median_s for count, median_s in medians(times).items()}}
        why = f"{_describe_lead(times, count)}{more}"
        return _unless_noisy(Setting(count, why, "measured", figures), times, default)

    counts = _thread_counts()
    chosen = choose(
        "threads",
        counts,
        lambda count: batch_s(count, count + 1),
        default_threads(),
        f" of {_range(counts)} threads",
    )
    threads = int(chosen.value)
    ahead = choose(
        "ahead",
        [threads + more for more in (1, 2, 4)],
        partial(batch_s, threads),
        threads + 1,
        "; at least one more than threads, so that one is ready",
    )
    return {"threads": chosen, "ahead": ahead}


def choose_copied_share(
    bench: Machine, loading: LoaderSettings, device: torch.device, progress: Progress
) -> tuple[LoaderSettings, Setting]:
    """Choose the fraction of rows that is copied instead of read, and the threads that gather it.

    If reading all rows takes time r, and gathering and copying all of them takes c, both finish at
    the same time with the fraction r / (r + c). But threads also sample, so that fractions around
    it are measured in the whole loader, with the threads chosen so far and with the largest number.

    Returns:
        `loading` with the chosen fraction, threads and prefetched minibatches; and the setting of
        the share.
    """
    if not bench.has_gpu:
        return loading, _not_measured(0.0, device)
    kernel_config = loading.kernel_config
    assert kernel_config is not None, "chosen before"
    counts = sorted({loading.threads, max(_thread_counts())})
    engines: dict[str, Callable[[], float]] = {
        "read": lambda: bench.gather_s(kernel_config),
        "copy": bench.copy_s,
        **{f"gather, {count} threads": partial(bench.host_s, count) for count in counts},
    }
    alone_s = medians(
        measure_in_rounds(list(engines), lambda name: engines[name](), "engines", progress)
    )
    # gathering and copying are pipelined
    copied_s = {n: max(alone_s["copy"], alone_s[f"gather, {n} threads"]) for n in counts}
    ideal = {n: alone_s["read"] / (alone_s["read"] + copied_s[n]) for n in counts}

    def with_share(count: int, share: float) -> LoaderSettings:
        ahead = count + loading.ahead - loading.threads
        return LoaderSettings(count, ahead, round(min(share, 0.95), 3), kernel_config)

    def measure(candidates: Iterable[LoaderSettings]) -> dict[LoaderSettings, list[float]]:
        ordered = [loading, *sorted(set(candidates), key=_cost)]
        return measure_in_rounds(ordered, bench.batch_s, "engines", progress)

    times = measure(with_share(n, ideal[n] * factor) for n in counts for factor in IDEAL_FACTORS)
    chosen = cheapest(times, _cost)
    if chosen.copied_share > 0:
        # refine between the fastest share and its neighbours
        median_s = medians(times)
        fastest = min(median_s, key=lambda one: median_s[one])
        step = ideal[fastest.threads] * IDEAL_STEP
        shares = [fastest.copied_share + step * factor for factor in (-0.5, -0.25, 0, 0.25, 0.5)]
        refined = measure(
            [chosen, *(with_share(fastest.threads, share) for share in shares if share > 0)]
        )
        chosen, times = cheapest(refined, _cost), times | refined
    lead = _describe_lead(times, chosen)
    if chosen.copied_share == 0:
        lead = f"no share is faster by {WITHIN:.0%} in the median and in most rounds"
    best = ideal[chosen.threads]
    why = f"{lead}; a share of {best:.2f} is predicted for threads that do not sample"
    batch_s = {
        f"{one.copied_share:.3g}, {one.threads} threads": s for one, s in medians(times).items()
    }
    figures = {"alone_s": alone_s, "batch_s": batch_s}
    share = _unless_noisy(Setting(chosen.copied_share, why, "measured", figures), times, 0.0)
    return (loading if share.basis == "default" else chosen), share


def choose_cache_size(case: Case, limit: CacheMemory, progress: Progress) -> Setting:
    """Choose the fraction of the rows to cache on the GPU.

    A larger cache is never slower, so memory is the limit.

    Args:
        case: the workload, whose minibatches are presampled.
        limit: limit for the cache.
        progress: see `Progress`.
    """
    table = case.table
    if not case.is_real:
        why = "not predicted: the measured graph is random; give a dataset: gcnzc check DATA --tune"
        return Setting(DEFAULT_CACHED_FRACTION, why, "default", {})
    if limit.memory_bytes is None:
        return Setting(DEFAULT_CACHED_FRACTION, f"not measured: {limit.reason}", "default", {})
    size = 0
    with suppress(ValueError):  # no row fits
        size = num_rows_to_cache(table, limit.memory_bytes)
    memory = f"{limit.memory_bytes / 1e9:.3g} GB ({limit.reason})"
    if size == 0:
        # training ignores the value of a setting with the basis "default"
        why = f"no row fits in {memory}; do not use a cache"
        return Setting(DEFAULT_CACHED_FRACTION, why, "default", {})
    counted = presample(
        case.graph,
        case.seeds,
        case.fanouts,
        case.batch_size,
        progress=lambda done, total: progress("cache", done, total),
    )
    (rate,) = counted.hit_rates([size])
    figures = {"chosen_hit_rate": rate, "chosen_memory_bytes": cache_bytes(table, size)}
    why = "all rows fit" if size == table.num_rows else "the most that fit"
    # not rounded, so that the share gives the same number of rows
    share = size / table.num_rows
    return Setting(share, f"{why} in {memory}; hits {rate:.1%}", "predicted", figures)


def _cache_memory(size: float, device: torch.device) -> CacheMemory:
    if isinstance(size, int):
        return CacheMemory(size, "set by --cache-memory")
    if device.type != "cuda":
        return CacheMemory(None, "no GPU; set the memory for the cache with --cache-memory")
    free, _ = torch.cuda.mem_get_info(device)
    return CacheMemory(int(free * size), f"{size:.0%} of the GPU's free memory")


def _unless_noisy(
    choice: Setting, taken_s: Mapping[Any, Sequence[float]], default: float
) -> Setting:
    """Return a setting, or its default if it was measured with too much noise."""
    noise = spread(taken_s)
    if noise <= NOISY:
        return choice
    why = f"rounds of one setting differ by {noise:.0%}: stop other programs and tune again"
    return replace(choice, value=default, why=why, basis="default")


def _not_measured(default: float, device: torch.device) -> Setting:
    missing = "no GPU" if device.type != "cuda" else "this GPU cannot read host memory"
    return Setting(default, f"not measured: {missing}", "default", {})


def _thread_counts() -> list[int]:
    cores = os.cpu_count() or 1
    return [count for count in THREADS if count <= cores]


def _cost(loading: LoaderSettings) -> tuple[int, float]:
    return loading.threads, loading.copied_share


def _describe_lead(taken_s: Mapping[S, Sequence[float]], chosen: S) -> str:
    """Describe how much slower a setting is than the fastest."""
    median_s = medians(taken_s)
    behind = median_s[chosen] / min(median_s.values()) - 1
    return "the fastest" if behind == 0 else f"{behind:.1%} slower than the fastest"


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
