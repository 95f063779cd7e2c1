"""Measure which settings move a table's rows to the model fastest, and make a plan of them.

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

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gcnzc import link, plan
from gcnzc.data import Dataset
from gcnzc.graph import Graph
from gcnzc.hot import SHARES, Presample, hot_bytes, hot_rows_of, presample
from gcnzc.kernels.gather_gpu import (
    DEFAULT_PROGRAMS,
    VECTORS,
    WARPS,
    Way,
    gather_rows,
)
from gcnzc.kernels.lanes import LAYOUTS, Layout
from gcnzc.loader import Loader, order, usual_threads
from gcnzc.plan import Choice, Plan
from gcnzc.sampler import Sampler
from gcnzc.stages import USUAL_HOT
from gcnzc.table import FeatureTable, can_read_host, pinned
from gcnzc.wire import choose_layout, table_traffic

S = TypeVar("S", bound=Hashable)
# told (what is measured, how many of how many times)
Progress: TypeAlias = Callable[[str, int, int], object]

WITHIN = 0.03  # of the fastest, which is no difference
NOISY = 0.2  # of the median, between the quarters of the rounds
MOSTLY = 0.6  # of the rounds in which a setting is behind by more, or it is as good
ROUNDS = (3, 9)  # that are counted, after one that compiles and touches fresh pages
STAGE_S = 8.0  # that the rounds of one kind of setting should take at most
# of the GPU's gather: how many programs, and warps with vectors in flight
PROGRAMS = (4, 8, 16, 32, 64, 132, 264)
SHAPES = ((4, 4), (8, 2), (8, 4), (8, 8), (16, 4))
THREADS = (1, 2, 3, 4, 6, 8)
BATCHES = 12  # of the loader that are timed at a time; all of `THREADS` but 8 divide it
LEAST_S, MOST_EPOCHS = 0.3, 50  # that the loader is timed for, as many times over as that takes
KERNEL_BATCHES = 4  # whose rows a GPU gathers at a time
IDEAL_STEP = 0.2  # of the share by the engines alone, from one that is tried to the next
IDEAL_PARTS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
HOT_SIZES = 200  # that are looked at, if the model's own time is known
CHECKED_IDS = 1000

USUAL_DEGREE, USUAL_BYTES, USUAL_MOST_ROWS = 10, 1 << 27, 1 << 19


@dataclass(frozen=True)
class Case:
    """What a run would do."""

    name: str
    graph: Graph
    table: FeatureTable  # on the host
    seeds: Tensor  # (S,) ids of training nodes
    labels: Tensor | None
    fanouts: tuple[int, ...]
    batch_size: int
    seed: int = 0
    is_real: bool = True  # or a graph at random, of which no hot set can be predicted


@dataclass(frozen=True)
class Loading:
    """Settings of a `Loader` and of the GPU's gather in it."""

    threads: int
    ahead: int
    copied_share: float = 0.0
    way: Way | None = None


class Bench(Protocol):
    """What is timed. All times are seconds, for one minibatch on average."""

    has_gpu: bool  # that reads the host's memory

    def gather_s(self, way: Way) -> float:
        """The GPU's own gather of the rows."""

    def copy_s(self) -> float:
        """The copy engine's copy of as many bytes."""

    def host_s(self, threads: int) -> float:
        """The CPU's gather of the rows into memory that the copy engine reads."""

    def batch_s(self, loading: Loading) -> float:
        """The whole loader, from one minibatch handed out to the next, without a model."""


@dataclass(frozen=True)
class Room:
    """What bounds a hot set."""

    memory_bytes: int | None  # of the GPU that hot rows may take; None if nobody knows
    told: str  # where that comes from
    compute_s: float | None = None  # of the model for a minibatch, if it is known


def tune(
    case: Case, *, room: str | int | float = 0.5, compute_s: float | None, progress: Progress
) -> Plan:
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
        where = link.gpu() if can_read_host(device) else None
        bench = Machine(case, device, where)
        return plan_for(bench, case, device, _room(room, device, compute_s), progress)


def plan_for(
    bench: Bench, case: Case, device: torch.device, room: Room, progress: Progress
) -> Plan:
    """The plan for `case` by what `bench` says; see the module."""
    choices = choose_way(bench, case.table, device, progress)
    way = None
    if bench.has_gpu:
        way = Way(**{name: choice.value for name, choice in choices.items()})  # type: ignore[arg-type]
    choices |= choose_loading(bench, way, progress)
    threads, ahead = int(choices["threads"].value), int(choices["ahead"].value)
    loading = Loading(threads, ahead, 0.0, way)
    both, choices["copied_share"], transfer_s = choose_copied_share(
        bench, loading, device, progress
    )
    if both.threads != threads:
        more = f"some gather what is copied; {threads} would do without that"
        choices["threads"] = replace(choices["threads"], value=both.threads, why=more)
        choices["ahead"] = replace(choices["ahead"], value=both.ahead, why="goes with the threads")
    choices["hot"] = choose_hot(case, room, transfer_s, progress)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    key = plan.key_of(device, case.table)
    return Plan(key, case.name, case.table.num_rows, made, choices)


def choose_way(
    bench: Bench, table: FeatureTable, device: torch.device, progress: Progress
) -> dict[str, Choice]:
    """Layout, programs, warps and vectors of the GPU's gather."""
    requests = _requests(table)
    usual = _usual_layout(table)
    figures: dict[str, Any] = {"requests_per_row": requests}
    if not bench.has_gpu:
        why = "fewest requests where the rows lie, by the model of the bus; only a GPU uses it"
        if not requests:
            why = "no GPU, and rows that none reads"
        choices = {"layout": Choice(usual, why, "modelled" if requests else "default", figures)}
        missing = f"not measured: {_missing(device)}"
        for name, value, more in (
            ("programs", DEFAULT_PROGRAMS, "at most two a multiprocessor"),
            ("warps", WARPS, "of each program"),
            ("vectors", VECTORS, "of 16 B that each lane has in flight"),
        ):
            choices[name] = Choice(value, f"{missing}; {more}", "default", {})
        return choices
    layouts = in_rounds(
        [layout for layout in LAYOUTS if layout in requests],
        lambda layout: bench.gather_s(Way(layout=layout)),
        "layout",
        progress,
    )
    layout: Layout = cheapest(layouts, lambda name: (requests[name], name != usual))
    figures["gather_s"] = medians(layouts)
    choices = {
        "layout": Choice(
            layout,
            f"{_lead(layouts, layout)}, and fewest requests a row of those",
            "measured",
            figures,
        )
    }
    ways = [Way(layout, programs, *shape) for shape, programs in product(SHAPES, PROGRAMS)]
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
        "programs": Choice(way.programs, why, "measured", {"gather_s": same}),
        "warps": Choice(way.warps, "goes with the programs", "measured", of_both),
        "vectors": Choice(way.vectors, "goes with the programs", "measured", of_both),
    }


def choose_loading(bench: Bench, way: Way | None, progress: Progress) -> dict[str, Choice]:
    """The loader's threads, then how many batches it is ahead."""
    counts = _thread_counts()
    by_threads = in_rounds(
        counts,
        lambda count: bench.batch_s(Loading(count, count + 1, 0.0, way)),
        "threads",
        progress,
    )
    threads, wild = cheapest(by_threads, int), spread(by_threads)
    usual = usual_threads()
    choices = {
        "threads": Choice(
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
        lambda ahead: bench.batch_s(Loading(threads, ahead, 0.0, way)),
        "ahead",
        progress,
    )
    ahead, wild = cheapest(by_ahead, int), spread(by_ahead)
    choices["ahead"] = Choice(
        ahead,
        f"{_lead(by_ahead, ahead)}; no fewer than one more than threads, so that one is ready",
        "measured",
        {"batch_s": _named(by_ahead)},
    )
    if wild > NOISY:
        choices["ahead"] = _left(choices["ahead"], threads + 1, wild)
    return choices


def choose_copied_share(
    bench: Bench, loading: Loading, device: torch.device, progress: Progress
) -> tuple[Loading, Choice, float | None]:
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
        return loading, Choice(0.0, why, "default", {}), None
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

    def tried(count: int, share: float) -> Loading:
        ahead = count + loading.ahead - loading.threads
        return Loading(count, ahead, round(min(share, 0.95), 3), way)

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
    share = Choice(chosen.copied_share, why, "measured", figures)
    if (wild := spread(taken)) > NOISY:
        return loading, _left(share, 0.0, wild), alone["read"]
    return chosen, share, alone["read"] * (1 - chosen.copied_share)


def choose_hot(case: Case, room: Room, transfer_s: float | None, progress: Progress) -> Choice:
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
        return Choice(USUAL_HOT, why, "default", {})
    counted = presample(
        case.graph,
        case.seeds,
        case.fanouts,
        case.batch_size,
        seed=case.seed,
        progress=lambda done, total: progress("hot set", done, total),
    )
    sizes = {str(share): hot_rows_of(table, float(share)) for share in SHARES}
    figures: dict[str, Any] = {
        "hit_rate": dict(zip(sizes, counted.hit_rates(list(sizes.values())), strict=True)),
        "memory_bytes": {name: hot_bytes(table, size) for name, size in sizes.items()},
    }
    if room.memory_bytes is None:
        return Choice(USUAL_HOT, f"not measured: {room.told}", "default", figures)
    fitting = _fitting(table, room.memory_bytes)
    if fitting == 0:
        why = f"no row fits in {room.memory_bytes / 1e9:.3g} GB ({room.told}); leave the set away"
        return Choice(USUAL_HOT, why, "default", figures)
    size, why = fitting, f"the most that fit in {room.memory_bytes / 1e9:.3g} GB ({room.told})"
    if fitting == table.num_rows:
        why = f"all rows fit in {room.memory_bytes / 1e9:.3g} GB ({room.told})"
    if room.compute_s is not None and transfer_s is not None:
        size, more = _least_hot(counted, fitting, transfer_s, room.compute_s)
        why = more or why
    elif room.compute_s is not None:
        why += "; the model's time is left aside, as no transfer was measured"
    (rate,) = counted.hit_rates([size])
    figures |= {"chosen_hit_rate": rate, "chosen_memory_bytes": hot_bytes(table, size)}
    # so that as many rows follow from it again
    return Choice(size / table.num_rows, f"{why}; hits {rate:.1%}", "predicted", figures)


def cheapest(taken_s: Mapping[S, Sequence[float]], cost: Callable[[S], Any]) -> S:
    """Of the settings that are as good as the fastest, the one of least cost.

    Args:
        taken_s: the seconds of each in rounds that all had part in.
        cost: of a setting; what `min` can order.
    """
    middle = medians(taken_s)
    best = min(middle, key=lambda setting: middle[setting])

    def is_as_good(setting: S) -> bool:
        if middle[setting] <= middle[best] * (1 + WITHIN):
            return True
        pairs = zip(taken_s[setting], taken_s[best], strict=True)
        slower = [mine > its * (1 + WITHIN) for mine, its in pairs]
        return sum(slower) < MOSTLY * len(slower)

    return min(filter(is_as_good, taken_s), key=cost)


def medians(taken_s: Mapping[S, Sequence[float]]) -> dict[S, float]:
    """Of the rounds of each setting."""
    return {setting: statistics.median(values) for setting, values in taken_s.items()}


def spread(taken_s: Mapping[Any, Sequence[float]]) -> float:
    """How far rounds differ: the range of their middle half by their median, in the middle."""
    ranges = []
    for values in taken_s.values():
        low, middle, high = statistics.quantiles(values, method="inclusive")
        ranges.append((high - low) / middle)
    return statistics.median(ranges)


def in_rounds(
    settings: Sequence[S], seconds: Callable[[S], float], what: str, progress: Progress
) -> dict[S, list[float]]:
    """The seconds of each setting in rounds in which every one has its turn.

    The first round is not counted, and says how many of `ROUNDS` there is time for.
    """
    least, most = ROUNDS
    taken: dict[S, list[float]] = {setting: [] for setting in settings}
    rounds, began_s, done = most, time.perf_counter(), 0
    turn = 0
    while turn <= rounds:
        for setting in settings:
            value = seconds(setting)
            if turn:
                taken[setting].append(value)
            done += 1
            progress(what, done, len(settings) * (rounds + 1))
        if turn == 0:
            a_round_s = max(time.perf_counter() - began_s, 1e-9)
            rounds = max(least, min(most, int(STAGE_S / a_round_s)))
        turn += 1
    return taken


class Machine:
    """The `Bench` that this machine is.

    Args:
        case: what is done; for a GPU with its table inside `gcnzc.pinned`.
        device: that gets the minibatches.
        where: the GPU, if it reads the table by itself.
    """

    def __init__(self, case: Case, device: torch.device, where: link.Gpu | None) -> None:
        self.case, self.device, self.where = case, device, where
        self.has_gpu = where is not None
        seeds = order(case.seeds, case.seed, 0)
        self.seeds = seeds[: BATCHES * case.batch_size]
        self._checked: set[Way] = set()
        self._epochs: int | None = None  # that make a time long enough to count
        if where is not None:
            self._prepare(seeds, where)

    def _prepare(self, seeds: Tensor, where: link.Gpu) -> None:
        case = self.case
        sampler = Sampler(case.graph, case.fanouts, case.seed)
        parts = seeds.split(case.batch_size)[:KERNEL_BATCHES]
        self.host_ids = [sampler.sample(part, 0).nodes for part in parts]
        self.ids = [nodes.to(where.device) for nodes in self.host_ids]
        longest, columns = max(map(len, self.ids)), case.table.num_columns
        self.out = torch.empty(longest, columns, dtype=case.table.dtype, device=where.device)
        rows = case.table.rows
        pin = where.device.type == "cuda"
        self.staging = torch.empty(longest, columns, dtype=rows.dtype, pin_memory=pin)
        self.copied = torch.empty_like(self.staging, device=where.device)

    def gather_s(self, way: Way) -> float:
        """See `Bench`."""
        assert self.where is not None, "there is a GPU"
        if way not in self._checked:
            self._demand_rows(way)
        taken_s = self.where.seconds(lambda: [self._gather(ids, way) for ids in self.ids])
        return taken_s / len(self.ids)

    def copy_s(self) -> float:
        """See `Bench`."""
        assert self.where is not None, "there is a GPU"

        def copy() -> None:
            for ids in self.ids:
                self.copied[: len(ids)].copy_(self.staging[: len(ids)], non_blocking=True)

        return self.where.seconds(copy) / len(self.ids)

    def host_s(self, threads: int) -> float:
        """See `Bench`."""
        plain = FeatureTable(self.case.table.rows)
        begin_s = time.perf_counter()
        for ids in self.host_ids:
            plain.gather(ids, self.staging[: len(ids)], threads=threads)
        return (time.perf_counter() - begin_s) / len(self.host_ids)

    def batch_s(self, loading: Loading) -> float:
        """See `Bench`."""
        case = self.case
        loader = Loader(
            case.graph,
            replace(case.table, way=loading.way),
            self.seeds,
            case.fanouts,
            case.batch_size,
            labels=case.labels,
            device=self.device,
            shuffle=False,
            seed=case.seed,
            threads=loading.threads,
            ahead=loading.ahead,
            copied_share=loading.copied_share,
        )
        # once for the memory that the loader then uses again
        self._epoch_s(loader)
        if self._epochs is None:
            self._epochs = min(MOST_EPOCHS, math.ceil(LEAST_S / self._epoch_s(loader)))
        taken_s = sum(self._epoch_s(loader) for _ in range(self._epochs))
        return taken_s / (self._epochs * len(loader))

    def _epoch_s(self, loader: Loader) -> float:
        # the same minibatches each time
        loader.set_epoch(0)
        begin_s = time.perf_counter()
        for batch in loader:
            del batch
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin_s

    def _gather(self, ids: Tensor, way: Way | None) -> Tensor:
        table = self.case.table
        return gather_rows(
            table.rows,
            ids,
            self.out[: len(ids)],
            scales=table.scales_on(ids.device),
            scale_columns=table.scale_columns,
            way=way,
        )

    def _demand_rows(self, way: Way) -> None:
        some = self.host_ids[0][:CHECKED_IDS]
        expected = self.case.table.gather(some)
        found = self._gather(some.to(self.out.device), way).cpu()
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(
                f"a gather as {way} brought wrong rows on {self.device}\n\n"
                "hint: `pytest -m gpu` finds the kernel that fails"
            )
        self._checked.add(way)


def case_of(data: Dataset, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """The case of training on `data`.

    Raises:
        ValueError: it has no features.
    """
    if data.table is None or data.table.num_columns == 0:
        raise ValueError(
            f"{data.name} has no features to gather\n\n"
            f"hint: `gcnzc embed {data.folder} DEST` makes some from its edges"
        )
    seeds = data.split.get("train", torch.empty(0))
    if len(seeds) == 0:
        # of a graph whose edges are what is learned
        seeds = torch.arange(data.graph.num_nodes)
    return Case(data.name, data.graph, data.table, seeds, data.labels, fanouts, batch_size)


def usual_case(row_bytes: int, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """A table of float32 rows that begin on lines, and a graph at random.

    Args:
        row_bytes: of a row, a multiple of 4.
        fanouts: see `gcnzc.Sampler`.
        batch_size: seeds of a minibatch.

    Raises:
        ValueError: `row_bytes` are not whole elements.
    """
    if row_bytes < 4 or row_bytes % 4:
        raise ValueError(
            f"rows of {row_bytes} bytes are not whole elements of float32\n\n"
            "hint: 512 are ogbn-papers100M's rows, 400 ogbn-products'"
        )
    num_rows = max(1024, min(USUAL_MOST_ROWS, USUAL_BYTES // row_bytes))
    chooser = torch.Generator().manual_seed(0)
    edges = torch.randint(num_rows, (2, USUAL_DEGREE * num_rows), generator=chooser)
    graph = Graph.from_edges(edges[0], edges[1], num_rows)
    # written, so that every page is there
    table = FeatureTable(torch.ones(num_rows, row_bytes // 4))
    name = f"{num_rows:,} rows of {row_bytes} B at random"
    nodes = torch.randperm(num_rows, generator=chooser)
    return Case(name, graph, table, nodes, None, fanouts, batch_size, is_real=False)


def lines(found: Plan) -> list[str]:
    """A plan, as lines for a person: each setting, its reason, and the figures behind it."""
    device = found.key["device"]
    about = found.key["table"]
    told = [
        f"plan for {device['name']} and rows of {about['row_bytes']} B {about['dtype']}, "
        f"{about['pitch_bytes']} B apart; made with {found.data}, {found.made}"
    ]
    shown = {name: _shown(name, choice.value) for name, choice in found.choices.items()}
    wide, wider = (max(map(len, words)) for words in (shown, shown.values()))
    for name, choice in found.choices.items():
        basis = "as usual" if choice.basis == "default" else choice.basis
        value = shown[name]
        told.append(f"{name.ljust(wide)}  {value.rjust(wider)}  {basis}: {choice.why}")
        if name == "vectors":
            # those of warps
            continue
        for kind, values in choice.figures.items():
            if isinstance(values, dict) and values:
                cells = [
                    f"{_shown(name, float(at)) if name == 'hot' else at}: {_figure(kind, figure)}"
                    for at, figure in values.items()
                ]
                what = re.sub("_(s|bytes)$", "", kind).replace("_", " ")
                told.append(f"{' ' * (wide + wider + 4)}{what}: {', '.join(cells)}")
    return told


def _figure(kind: str, value: float) -> str:
    if kind.endswith("_s"):
        return f"{value * 1e3:.3g} ms"
    if kind.endswith("rate"):
        return f"{value:.1%}"
    return f"{value / 1e6:.1f} MB" if kind.endswith("bytes") else f"{value:.4g}"


def _shown(name: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name == "hot" else f"{value:.2f}"
    return str(value)


def _room(room: str | float, device: torch.device, compute_s: float | None) -> Room:
    if isinstance(room, int):
        return Room(room, "as --hot-memory says", compute_s)
    if device.type != "cuda":
        told = "no GPU, so no free memory to fill; --hot-memory says how much to plan for"
        return Room(None, told, compute_s)
    free, _ = torch.cuda.mem_get_info(device)
    return Room(int(free * float(room)), f"{float(room):.0%} of the GPU's free memory", compute_s)


def _fitting(table: FeatureTable, memory_bytes: int) -> int:
    try:
        return hot_rows_of(table, memory_bytes)
    except ValueError:
        return 0


def _least_hot(
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
    usual = _usual_layout(table)
    return {
        layout: float(table_traffic(table, layout=layout).requests_per_row)
        for layout in LAYOUTS
        if layout != "pitched" or usual == "pitched"
    }


def _usual_layout(table: FeatureTable) -> Layout:
    if table.is_sparse:
        return "shifted"
    rows = table.rows
    stride = rows.stride(0) * rows.element_size() if len(table) > 1 else table.row_bytes
    return choose_layout(stride, rows.data_ptr())


def _left(choice: Choice, usual: float, wild: float) -> Choice:
    """What is usual, as rounds tell nothing."""
    why = f"rounds of one setting differ by {wild:.0%}: something else runs; tune again without it"
    return replace(choice, value=usual, why=why, basis="default")


def _thread_counts() -> list[int]:
    cores = os.cpu_count() or 1
    return [count for count in THREADS if count <= cores]


def _cost(loading: Loading) -> tuple[int, float]:
    return loading.threads, loading.copied_share


def _missing(device: torch.device) -> str:
    if device.type != "cuda":
        return "no GPU"
    return "this GPU does not read the host's memory"


def _warps(way: Way) -> int:
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
