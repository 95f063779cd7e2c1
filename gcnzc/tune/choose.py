"""Choose the settings that move a table's rows to the model fastest, by measurement.

Everything is timed on a `Bench`, which is this machine, or in tests the model of one. Settings of a
kind take turns in rounds, and the fastest is that of the least median. Settings that are within
`WITHIN` of it, or were in a good part of the rounds, are as good; of these the cheapest is taken:
the fewest warps, threads, batches, or rows for the CPU to gather. So noise does not choose, and
nothing is spent in vain. Where the rounds of a setting differ by more than `NOISY` something else
runs, and what is usual stays.

Settings are chosen one after another, each with those before it: layout, then programs with warps
and vectors, threads, look-ahead, the share of rows for the copy engine, the hot set. Without a GPU
the first and the last are told by a model, and those of the GPU are left as usual.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from typing import Any

import torch

from gcnzc.features.access_counts import Presample
from gcnzc.features.cache import DEFAULT_CACHED_SHARE, cache_bytes, num_rows_to_cache
from gcnzc.features.pcie_traffic import choose_layout, table_traffic
from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather.gpu import DEFAULT_PROGRAMS, VECTORS, WARPS, KernelConfig
from gcnzc.kernels.gather.lanes import LAYOUTS, Layout
from gcnzc.loader.presampling import presample
from gcnzc.loader.threads import default_threads
from gcnzc.tune import pcie_bench, profiles
from gcnzc.tune.cache_forecast import SHARES
from gcnzc.tune.machine import Bench, Case, LoaderSettings, Machine
from gcnzc.tune.profiles import Setting, TuningProfile
from gcnzc.tune.search import WITHIN, Progress, S, cheapest, in_rounds, medians, spread

NOISY = 0.2  # of the median, between the quarters of the rounds


# of the GPU's gather: how many programs, and warps with vectors in flight
PROGRAMS = (4, 8, 16, 32, 64, 132, 264)


SHAPES = ((4, 4), (8, 2), (8, 4), (8, 8), (16, 4))


THREADS = (1, 2, 3, 4, 6, 8)


IDEAL_STEP = 0.2  # of the share by the engines alone, from one that is tried to the next


IDEAL_PARTS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)


HOT_SIZES = 200  # that are looked at, if the model's own time is known


@dataclass(frozen=True)
class Room:
    """What bounds a hot set."""

    memory_bytes: int | None  # of the GPU that hot rows may take; None if nobody knows
    told: str  # where that comes from
    compute_s: float | None = None  # of the model for a minibatch, if it is known


def tune(
    case: Case, *, room: str | int | float = 0.5, compute_s: float | None, progress: Progress
) -> TuningProfile:
    """Measure on this machine, and return the plan for `case`.

    Args:
        case: what a run would do. Its table is page-locked meanwhile, if there is CUDA.
        room: for hot rows: a share of the GPU's free memory if it is a float, or bytes.
        compute_s: of the model for a minibatch; None if it is not known.
        progress: see `Progress`.

    Raises:
        ValueError: the table is sparse, and there is a GPU to read it.
        RuntimeError: a gather brought wrong rows, or memory is short.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and case.table.is_sparse:
        raise ValueError(
            f"{case.name} keeps its features sparse, and a GPU reads dense rows\n\n"
            f"hint: `gcnzc prepare` spreads them out"
        )
    with pinned(case.table) as table:
        case = replace(case, table=table)
        where = pcie_bench.gpu() if can_read_host(device) else None
        bench = Machine(case, device, where)
        return plan_for(bench, case, device, _room(room, device, compute_s), progress)


def plan_for(
    bench: Bench, case: Case, device: torch.device, room: Room, progress: Progress
) -> TuningProfile:
    """The plan for `case` by what `bench` says; see the module."""
    choices = choose_kernel_config(bench, case.table, device, progress)
    way = None
    if bench.has_gpu:
        way = KernelConfig(**{name: choice.value for name, choice in choices.items()})  # type: ignore[arg-type]
    choices |= choose_loading(bench, way, progress)
    threads, ahead = int(choices["threads"].value), int(choices["ahead"].value)
    loading = LoaderSettings(threads, ahead, 0.0, way)
    both, choices["copied_share"], transfer_s = choose_copied_share(
        bench, loading, device, progress
    )
    if both.threads != threads:
        more = f"some gather what is copied; {threads} would do without that"
        choices["threads"] = replace(choices["threads"], value=both.threads, why=more)
        choices["ahead"] = replace(choices["ahead"], value=both.ahead, why="goes with the threads")
    choices["hot"] = choose_cache_size(case, room, transfer_s, progress)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    key = profiles.key_of(device, case.table)
    return TuningProfile(key, case.name, case.table.num_rows, made, choices)


def choose_kernel_config(
    bench: Bench, table: FeatureTable, device: torch.device, progress: Progress
) -> dict[str, Setting]:
    """Layout, programs, warps and vectors of the GPU's gather."""
    requests = _requests(table)
    usual = _default_layout(table)
    figures: dict[str, Any] = {"requests_per_row": requests}
    if not bench.has_gpu:
        why = "fewest requests where the rows lie, by the model of the bus; only a GPU uses it"
        if not requests:
            why = "no GPU, and rows that none reads"
        choices = {"layout": Setting(usual, why, "modelled" if requests else "default", figures)}
        missing = f"not measured: {_missing(device)}"
        for name, value, more in (
            ("programs", DEFAULT_PROGRAMS, "at most two a multiprocessor"),
            ("warps", WARPS, "of each program"),
            ("vectors", VECTORS, "of 16 B that each lane has in flight"),
        ):
            choices[name] = Setting(value, f"{missing}; {more}", "default", {})
        return choices
    layouts = in_rounds(
        [layout for layout in LAYOUTS if layout in requests],
        lambda layout: bench.gather_s(KernelConfig(layout=layout)),
        "layout",
        progress,
    )
    layout: Layout = cheapest(layouts, lambda name: (requests[name], name != usual))
    figures["gather_s"] = medians(layouts)
    choices = {
        "layout": Setting(
            layout,
            f"{_lead(layouts, layout)}, and fewest requests a row of those",
            "measured",
            figures,
        )
    }
    ways = [KernelConfig(layout, programs, *shape) for shape, programs in product(SHAPES, PROGRAMS)]
    taken = in_rounds(ways, bench.gather_s, "programs", progress)
    # registers of warps that stay are not there for the model's kernels
    way = cheapest(taken, lambda one: (_warps(one), one.programs, one.vectors))
    middle = medians(taken)
    of_shape = {
        f"{warps} x {vectors}": min(
            s for w, s in middle.items() if (w.warps, w.vectors) == (warps, vectors)
        )
        for warps, vectors in SHAPES
    }
    same = {
        str(w.programs): s
        for w, s in middle.items()
        if (w.warps, w.vectors) == (way.warps, way.vectors)
    }
    assert way.programs is not None, "all are said"
    assert way.warps is not None, "all are said"
    assert way.vectors is not None, "all are said"
    why = f"{_lead(taken, way)}, with the fewest warps resident of {len(ways)} ways"
    of_both = {"best_gather_s": of_shape}
    return choices | {
        "programs": Setting(way.programs, why, "measured", {"gather_s": same}),
        "warps": Setting(way.warps, "goes with the programs", "measured", of_both),
        "vectors": Setting(way.vectors, "goes with the programs", "measured", of_both),
    }


def choose_loading(
    bench: Bench, way: KernelConfig | None, progress: Progress
) -> dict[str, Setting]:
    """The loader's threads, then how many batches it is ahead."""
    counts = _thread_counts()
    by_threads = in_rounds(
        counts,
        lambda count: bench.batch_s(LoaderSettings(count, count + 1, 0.0, way)),
        "threads",
        progress,
    )
    threads, wild = cheapest(by_threads, int), spread(by_threads)
    usual = default_threads()
    choices = {
        "threads": Setting(
            threads,
            f"{_lead(by_threads, threads)} of {_range(counts)} threads",
            "measured",
            {"batch_s": _named(by_threads)},
        )
    }
    if wild > NOISY:
        threads = usual
        choices["threads"] = _left(choices["threads"], usual, wild)
    by_ahead = in_rounds(
        sorted({threads + more for more in (1, 2, 4)}),
        lambda ahead: bench.batch_s(LoaderSettings(threads, ahead, 0.0, way)),
        "ahead",
        progress,
    )
    ahead, wild = cheapest(by_ahead, int), spread(by_ahead)
    choices["ahead"] = Setting(
        ahead,
        f"{_lead(by_ahead, ahead)}; no fewer than one more than threads, so that one is ready",
        "measured",
        {"batch_s": _named(by_ahead)},
    )
    if wild > NOISY:
        choices["ahead"] = _left(choices["ahead"], threads + 1, wild)
    return choices


def choose_copied_share(
    bench: Bench, loading: LoaderSettings, device: torch.device, progress: Progress
) -> tuple[LoaderSettings, Setting, float | None]:
    """The share of rows that the copy engine sends, and the threads that gather them.

    With r the time of reading all rows and c that of gathering and copying all of them, both
    engines end together at the share r / (r + c). The threads also sample, so shares below it are
    tried in the whole loader, with the threads chosen so far and with the most there are.

    Returns:
        `loading` with share, threads and ahead; the share's choice; the seconds that reading the
        other rows of a minibatch takes, None without a GPU.
    """
    if not bench.has_gpu:
        why = f"not measured: {_missing(device)}; one engine does all"
        return loading, Setting(0.0, why, "default", {}), None
    way = loading.way
    assert way is not None, "chosen before"
    counts = sorted({loading.threads, max(_thread_counts())})
    engines: dict[str, Callable[[], float]] = {
        "read": lambda: bench.gather_s(way),
        "copy": bench.copy_s,
    }
    engines |= {f"gather, {n} threads": partial(bench.host_s, n) for n in counts}
    alone = medians(in_rounds(list(engines), lambda name: engines[name](), "engines", progress))
    ideal = {}
    for count in counts:
        # parts are gathered while others are copied
        copied_s = max(alone["copy"], alone[f"gather, {count} threads"])
        ideal[count] = alone["read"] / (alone["read"] + copied_s)

    def tried(count: int, share: float) -> LoaderSettings:
        ahead = count + loading.ahead - loading.threads
        return LoaderSettings(count, ahead, round(min(share, 0.95), 3), way)

    settings = {tried(count, ideal[count] * part) for count in counts for part in IDEAL_PARTS}
    taken = in_rounds([loading, *sorted(settings, key=_cost)], bench.batch_s, "engines", progress)
    chosen = cheapest(taken, _cost)
    if chosen.copied_share > 0:
        # again, with what is between the fastest and its neighbours
        middle = medians(taken)
        top = min(middle, key=lambda one: middle[one])
        beside = ideal[top.threads] * IDEAL_STEP
        shares = [top.copied_share + beside * part for part in (-0.5, -0.25, 0, 0.25, 0.5)]
        near = {chosen, *(tried(top.threads, share) for share in shares if share > 0)}
        again = in_rounds([loading, *sorted(near, key=_cost)], bench.batch_s, "engines", progress)
        chosen, taken = cheapest(again, _cost), taken | again
    best = ideal[chosen.threads]
    why = f"{_lead(taken, chosen)}; {best:.2f} by the engines alone, but threads sample too"
    if chosen.copied_share == 0:
        why = f"no share is faster by {WITHIN:.0%}; {best:.2f} by the engines alone"
    named = {f"{one.copied_share:.3g}, {one.threads} threads": one for one in taken}
    middle = medians(taken)
    figures = {"alone_s": alone, "batch_s": {name: middle[one] for name, one in named.items()}}
    share = Setting(chosen.copied_share, why, "measured", figures)
    if (wild := spread(taken)) > NOISY:
        return loading, _left(share, 0.0, wild), alone["read"]
    return chosen, share, alone["read"] * (1 - chosen.copied_share)


def choose_cache_size(
    case: Case, room: Room, transfer_s: float | None, progress: Progress
) -> Setting:
    """The share of the rows to keep on the GPU.

    A larger one is never slower, so memory decides; unless the model takes so long that a smaller
    one hides the rest.

    Args:
        case: whose minibatches are drawn.
        room: for the hot rows.
        transfer_s: of all rows of a minibatch; None without a GPU.
        progress: see `Progress`.
    """
    table = case.table
    if not case.is_real:
        why = "not predicted: only the graph of DATA says how often rows are needed"
        return Setting(DEFAULT_CACHED_SHARE, why, "default", {})
    counted = presample(
        case.graph,
        case.seeds,
        case.fanouts,
        case.batch_size,
        seed=case.seed,
        progress=lambda done, total: progress("hot set", done, total),
    )
    sizes = {str(share): num_rows_to_cache(table, float(share)) for share in SHARES}
    figures: dict[str, Any] = {
        "hit_rate": dict(zip(sizes, counted.hit_rates(list(sizes.values())), strict=True)),
        "memory_bytes": {name: cache_bytes(table, size) for name, size in sizes.items()},
    }
    if room.memory_bytes is None:
        return Setting(DEFAULT_CACHED_SHARE, f"not measured: {room.told}", "default", figures)
    fitting = _fitting(table, room.memory_bytes)
    if fitting == 0:
        why = f"no row fits in {room.memory_bytes / 1e9:.3g} GB ({room.told}); leave the set away"
        return Setting(DEFAULT_CACHED_SHARE, why, "default", figures)
    size, why = fitting, f"the most that fit in {room.memory_bytes / 1e9:.3g} GB ({room.told})"
    if fitting == table.num_rows:
        why = f"all rows fit in {room.memory_bytes / 1e9:.3g} GB ({room.told})"
    if room.compute_s is not None and transfer_s is not None:
        size, more = _smallest_cache(counted, fitting, transfer_s, room.compute_s)
        why = more or why
    elif room.compute_s is not None:
        why += "; the model's time is left aside, as no transfer was measured"
    (rate,) = counted.hit_rates([size])
    figures |= {"chosen_hit_rate": rate, "chosen_memory_bytes": cache_bytes(table, size)}
    # so that as many rows follow from it again
    return Setting(size / table.num_rows, f"{why}; hits {rate:.1%}", "predicted", figures)


def _room(room: str | float, device: torch.device, compute_s: float | None) -> Room:
    if isinstance(room, int):
        return Room(room, "as --cache-memory says", compute_s)
    if device.type != "cuda":
        told = "no GPU, so no free memory to fill; --cache-memory says how much to plan for"
        return Room(None, told, compute_s)
    free, _ = torch.cuda.mem_get_info(device)
    return Room(int(free * float(room)), f"{float(room):.0%} of the GPU's free memory", compute_s)


def _fitting(table: FeatureTable, memory_bytes: int) -> int:
    try:
        return num_rows_to_cache(table, memory_bytes)
    except ValueError:
        return 0


def _smallest_cache(
    counted: Presample, most: int, transfer_s: float, compute_s: float
) -> tuple[int, str | None]:
    """The fewest hot rows with which the others arrive while the model computes, and why."""
    sizes = sorted({max(1, round(most * part / HOT_SIZES)) for part in range(1, HOT_SIZES + 1)})
    for size, rate in zip(sizes, counted.hit_rates(sizes), strict=True):
        if transfer_s * (1 - rate) <= compute_s:
            left_s = transfer_s * (1 - rate)
            why = (
                f"the fewest with which the others take {left_s * 1e3:.3g} ms, below the model's "
                f"{compute_s * 1e3:.3g} ms"
            )
            return size, why
    return most, None


def _requests(table: FeatureTable) -> dict[Layout, float]:
    """Requests a row by each layout that the table takes."""
    if table.is_sparse or table.rows.numel() == 0:
        return {}
    usual = _default_layout(table)
    return {
        layout: float(table_traffic(table, layout=layout).requests_per_row)
        for layout in LAYOUTS
        if layout != "pitched" or usual == "pitched"
    }


def _default_layout(table: FeatureTable) -> Layout:
    if table.is_sparse:
        return "shifted"
    rows = table.rows
    stride = rows.stride(0) * rows.element_size() if len(table) > 1 else table.row_bytes
    return choose_layout(stride, rows.data_ptr())


def _left(choice: Setting, usual: float, wild: float) -> Setting:
    """What is usual, as rounds tell nothing."""
    why = f"rounds of one setting differ by {wild:.0%}: something else runs; tune again without it"
    return replace(choice, value=usual, why=why, basis="default")


def _thread_counts() -> list[int]:
    cores = os.cpu_count() or 1
    return [count for count in THREADS if count <= cores]


def _cost(loading: LoaderSettings) -> tuple[int, float]:
    return loading.threads, loading.copied_share


def _missing(device: torch.device) -> str:
    if device.type != "cuda":
        return "no GPU"
    return "this GPU does not read the host's memory"


def _warps(way: KernelConfig) -> int:
    return (way.programs or 0) * (way.warps or 0)


def _lead(taken_s: Mapping[S, Sequence[float]], chosen: S) -> str:
    """How far a setting is from the fastest."""
    middle = medians(taken_s)
    behind = middle[chosen] / min(middle.values()) - 1
    return "the fastest" if behind == 0 else f"{behind:.1%} from the fastest"


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def _named(taken_s: Mapping[Any, Sequence[float]]) -> dict[str, float]:
    return {str(name): seconds for name, seconds in medians(taken_s).items()}
