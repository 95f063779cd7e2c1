"""Which rows are needed most, how often they will be, and tables that keep copies of them on a GPU.

Minibatches need few rows often and most rows seldom. `presample` draws some minibatches as a run
would and counts in how many of them each node is; `cached` copies the rows that rank highest to the
GPU. A hit is a row of a minibatch that need not cross the bus, and the hit rate the share of such
rows. Counting before training is GNNLab's idea (Yang et al., EuroSys 2022,
https://doi.org/10.1145/3492321.3519557), ranking by degree PaGraph's (Lin et al., SoCC 2020,
https://doi.org/10.1145/3419111.3421281).

Few minibatches leave most nodes with a count of 0 or 1, which says little. So a node's chance is
estimated as the mean of a beta distribution after its count was seen: before, it is that of all
nodes of about its degree, seeds apart. With few minibatches this ranks by degree, with many by
count.

Several GPUs of a machine have copies of the same rows each, or split a hot set that is as many
times larger: see `gcnzc.peers`.

Letters: N nodes, M minibatches of one half, G GPUs that split a hot set.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc import peers
from gcnzc.arguments import (
    THREADS_LIMIT,
    IdsLike,
    check_callable,
    check_device,
    check_integer,
    check_kind,
    check_seed,
    describe,
)
from gcnzc.graph import Graph
from gcnzc.kernels.gather_gpu import HotRows, hot_rows
from gcnzc.kernels.gather_hot import (
    SLOT_BYTES,
    count_into,
    count_marked,
    gather_hot,
    mark,
    room_bytes,
)
from gcnzc.loader import Loader, order, usual_threads
from gcnzc.sampler import Sampler, check_graph, check_seeds
from gcnzc.table import FeatureTable

BATCHES = 100  # that are counted before training; bench/hot.py says what more would bring
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of a table's rows, that a plan is made for
RANKINGS = ("in-degree", "presampled")
# mixed into a run's seed, so that no minibatch counted here is one of the run
OTHER = 0x5DEECE66D1B54A33
# degrees below this have a class of their own; above, eight classes for each doubling
OWN_CLASS, CLASSES_PER_DOUBLING = 64, 8

# of each ranking, sizes and hit rates
Points: TypeAlias = dict[str, list[tuple[float, float]]]
Progress: TypeAlias = Callable[[int, int], object]  # called with (done, total)


@dataclass(frozen=True)
class Counters:
    """What a cached table was asked for."""

    rows: int
    hits: int  # of them, which the GPU has, or another that splits the set with it
    row_bytes: int  # of one row as it is stored, hence as it crosses the bus
    peer_hits: int = 0  # of the hits, those that another has

    @property
    def hit_rate(self) -> float:
        """Hits for each row; 0 if none was asked for."""
        return self.hits / self.rows if self.rows else 0.0

    @property
    def own_hit_rate(self) -> float:
        """Hits that the GPU itself has, for each row; 0 if none was asked for."""
        return (self.hits - self.peer_hits) / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """That did not cross the bus from the host, or would not have."""
        return self.hits * self.row_bytes


class _Tally:
    """Rows and hits so far; any thread adds to them, on any stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._hits = 0
        # on a GPU, so that nobody waits: one sum a stream, as streams do not add in turns
        self._on_gpu: dict[tuple[torch.device, int], Tensor] = {}

    def add(self, rows: int, hits: int | Tensor) -> None:
        with self._lock:
            self._rows += rows
            if isinstance(hits, int):
                self._hits += hits
                return
            stream = torch.cuda.current_stream(hits.device).cuda_stream if hits.is_cuda else 0
            total = self._on_gpu.get((hits.device, stream))
            if total is None:
                self._on_gpu[hits.device, stream] = hits
            else:
                total += hits

    def read(self) -> tuple[int, int]:
        with self._lock:
            # sums are of streams that need not be the present one
            for device in {total.device for total in self._on_gpu.values() if total.is_cuda}:
                torch.cuda.synchronize(device)
            return self._rows, self._hits + sum(int(total) for total in self._on_gpu.values())

    def reset(self) -> None:
        with self._lock:
            self._rows = self._hits = 0
            self._on_gpu.clear()


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedTable(FeatureTable):
    """A table of features whose hot rows also lie on a GPU, or would; made by `cached`.

    It serves wherever a `FeatureTable` does, and gathers the same rows bit for bit.
    """

    hot: Tensor  # (H,) int64 ids of the hot rows, ascending, on the host
    bits: Tensor  # (N // 64 + 1,) int64, on the host: one bit a row
    copies: HotRows | None  # on the GPU; None if a CPU gathers and the hits are only counted
    predicted_hit_rate: float | None  # by the minibatches that ranked the rows, if such did
    predicted_own_hit_rate: float | None = None  # the part of it that the GPU itself has
    others: tuple[HotRows, ...] = ()  # the same split set, for other GPUs of this process
    gpus: int = 1  # G
    own_bits: Tensor | None = None  # as `bits`, of the GPU's own rows; None unless the set is split
    _tally: _Tally = field(default_factory=_Tally, repr=False)
    _peer_tally: _Tally = field(default_factory=_Tally, repr=False)

    def __repr__(self) -> str:
        where = "counted" if self.copies is None else f"copied to {self.copies.memory.device}"
        if self.gpus > 1:
            where = f"split over {self.gpus} GPUs, {where}"
        return f"CachedTable({super().__repr__()}, {self.num_hot} hot rows {where})"

    @property
    def num_hot(self) -> int:
        """H."""
        return len(self.hot)

    @property
    def hot_nbytes(self) -> int:
        """Bytes that the hot rows take on a GPU, or would, with the slots that lead to them.

        Of a split set those on this GPU.
        """
        if self.copies is not None:
            return self.copies.nbytes
        return hot_bytes(self, self.num_hot, self.gpus)

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids`, as `FeatureTable.gather` gives them; counted for `counters`.

        Args:
            ids: as there. On a GPU of the hot rows these are read from their copies.
            out: as there.
            threads: as there.

        Raises:
            ValueError, IndexError: as `FeatureTable.gather` does.
        """
        copies = self._copies_on(ids.device)
        if self.copies is None:
            # before the gather, which drives the ids out of the cache; it refuses those outside
            hits, peer_hits = self.hits(ids), self.peer_hits(ids)
            rows = super().gather(ids, out, threads=threads)
        elif copies is not None:
            scales = self.scales_on(ids.device)
            rows = gather_hot(
                self.rows,
                ids,
                copies,
                out,
                scales=scales,
                scale_columns=self.scale_columns,
                way=self.way,
            )
            hits, peer_hits = self.hits(ids), self.peer_hits(ids)
        else:
            # on the host, from where no copy is of use
            hits, peer_hits, rows = 0, 0, super().gather(ids, out, threads=threads)
        self._tally.add(len(ids), hits)
        if self.gpus > 1:
            self._peer_tally.add(len(ids), peer_hits)
        return rows

    def gather_stored(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as they are stored; those gathered on the host count as no hits.

        Args:
            ids, out, threads: as for `FeatureTable.gather_stored`.

        Raises:
            ValueError, IndexError: as `FeatureTable.gather` does.
        """
        rows = super().gather_stored(ids, out, threads=threads)
        self._tally.add(len(ids), 0)
        return rows

    def hits(self, ids: Tensor) -> int | Tensor:
        """How many of `ids` are hot.

        Args:
            ids: (B,) int32 or int64 in [0, N); on a GPU not checked.

        Returns:
            A number for ids on the host, -1 if one of them is outside. For those on the GPU
            () int64 there, ready for work queued later on the current stream.
        """
        copies = self._copies_on(ids.device)
        if copies is None or ids.device.type == "cpu":
            return count_marked(self.bits, self.num_rows, ids.cpu())
        return (copies.slots[ids.long()] >= 0).sum()

    def peer_hits(self, ids: Tensor) -> int | Tensor:
        """How many of `ids` are hot, and on another GPU than that of `ids`.

        On the host: than the GPU whose gathers are counted.

        Args:
            ids: as for `hits`.

        Returns:
            A number for ids on the host, 0 if one of them is outside, or if the set is not split.
            For those on the GPU as `hits`.
        """
        if self.own_bits is None:
            return 0
        copies = self._copies_on(ids.device)
        if copies is None or copies.peers is None:
            ids = ids.cpu()
            own = count_marked(self.own_bits, self.num_rows, ids)
            return count_marked(self.bits, self.num_rows, ids) - own
        slots = copies.slots[ids.long()]
        return ((slots >= 0) & (slots % self.gpus != copies.peers.own)).sum()

    def counters(self) -> Counters:
        """What was gathered since the last reset; waits for gathers on a GPU."""
        rows, hits = self._tally.read()
        return Counters(rows, hits, self.row_bytes, self._peer_tally.read()[1])

    def reset_counters(self) -> None:
        """Count from 0 again."""
        self._tally.reset()
        self._peer_tally.reset()

    def _copies_on(self, device: torch.device) -> HotRows | None:
        copies = (self.copies, *self.others)
        return next((c for c in copies if c is not None and c.memory.device == device), None)


@dataclass(frozen=True, eq=False)
class Presample:
    """In how many minibatches each node was, and what follows for minibatches to come.

    The minibatches are two halves that share no choice, so that one can tell how well a hot set
    does that the other has chosen.
    """

    halves: tuple[Tensor, Tensor]  # (N,) int32 counts of each half, on the host
    batches: int  # M, in each half
    kinds: Tensor  # (N,) int16: class of degree, seeds apart

    @property
    def nodes_per_batch(self) -> float:
        """Mean of the rows that a minibatch needs."""
        return sum(int(half.sum()) for half in self.halves) / (2 * self.batches)

    @cached_property
    def scores(self) -> Tensor:
        """(N,) float32, on the host: the estimated chance of each node to be in a minibatch."""
        first, second = self.halves
        return _chances(first + second, 2 * self.batches, self.kinds)

    def hit_rates(self, sizes: Sequence[int]) -> list[float]:
        """The predicted hit rate of the hot sets of these many rows that `scores` rank highest.

        Each half chooses a set, and the other says how often it would have been hit; the mean of
        both is a little too low for a set that both choose together.
        """
        return self._by_halves(lambda ranking, tell: hit_rates_of(ranking, tell, sizes))

    def own_hit_rates(self, sizes: Sequence[int], gpus: int) -> list[list[float]]:
        """The parts of `hit_rates(sizes)` that each of `gpus` has which split the sets."""
        return self._by_halves(lambda ranking, tell: own_hit_rates_of(ranking, tell, sizes, gpus))

    def hit_rates_by(self, scores: Tensor, sizes: Sequence[int]) -> list[float]:
        """The predicted hit rate of hot sets by scores that these minibatches had no part in.

        Args:
            scores: (N,), such as `graph.in_degrees()`.
            sizes: of the hot sets, in rows.
        """
        return hit_rates_of(ranked(scores), self.halves[0] + self.halves[1], sizes)

    def own_hit_rates_by(
        self, scores: Tensor, sizes: Sequence[int], gpus: int
    ) -> list[list[float]]:
        """The parts of `hit_rates_by(scores, sizes)` that each of `gpus` has."""
        return own_hit_rates_of(ranked(scores), self.halves[0] + self.halves[1], sizes, gpus)

    def _by_halves(self, rates: Callable[[Tensor, Tensor], list[Any]]) -> list[Any]:
        """The mean of `rates` of each half's ranking, as told by the other half's counts."""
        first, second = self.halves
        both = [
            np.array(rates(ranked(_chances(choose, self.batches, self.kinds)), tell))
            for choose, tell in ((first, second), (second, first))
        ]
        mean: list[Any] = ((both[0] + both[1]) / 2).tolist()
        return mean


def presample(
    graph: Graph,
    seeds: IdsLike,
    fanouts: Sequence[int],
    batch_size: int = 1024,
    *,
    seed: int = 0,
    batches: int = BATCHES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Presample:
    """Draw minibatches as a run would, and count in how many of them each node is.

    The result depends on `seed` alone, and not on the threads. No minibatch is one of the run's,
    and each draws its neighbours anew, while those of one epoch of a run share what is drawn for a
    node.

    Args:
        graph: on the host.
        seeds: (S,) ids of the run's training nodes: a tensor, an array or a list.
        fanouts: of the run, as `gcnzc.Sampler` takes them.
        batch_size: seeds of a minibatch.
        seed: of the run.
        batches: how many are drawn, in two halves; at least 4.
        threads: that sample; one per core, but four at most, if None.
        progress: called with (done, total), in minibatches.

    Raises:
        TypeError: an argument of another type.
        ValueError: too few batches, no seeds, or what `gcnzc.Sampler` refuses.
    """
    check_graph(graph)
    batches = check_integer("batches", batches, 4, hint="4 at least; the default is 100")
    batch_size = check_integer("batch_size", batch_size, 1)
    if threads is not None:
        threads = check_integer("threads", threads, 1, THREADS_LIMIT, "None takes the default")
    check_callable("progress", progress)
    seeds = check_seeds("seeds", seeds, graph.num_nodes)
    if len(seeds) == 0:
        raise ValueError("seeds is empty: nothing to draw\n\nhint: is the training split empty?")
    key = (check_seed("seed", seed) ^ OTHER) % 2**64
    sampler, each = Sampler(graph, fanouts, key), batches // 2
    halves = tuple(torch.zeros(graph.num_nodes, dtype=torch.int32) for _ in range(2))
    # orders of the seeds that the halves do not share: a seed is used once in each
    picked = [
        islice(_batches_of(seeds, batch_size, key, first_order), each) for first_order in (0, 2**31)
    ]
    for number, nodes in enumerate(_drawn(sampler, chain(*picked), threads)):
        count_into(halves[number // each], nodes)
        if progress is not None:
            progress(number + 1, 2 * each)
    kinds = _kinds(graph, seeds)
    return Presample((halves[0], halves[1]), each, kinds)


def cached(
    table: FeatureTable,
    size: float,
    ranking: Tensor | Presample,
    *,
    device: torch.device | str | None = None,
    devices: Sequence[torch.device | str] | None = None,
) -> CachedTable:
    """The same table with copies of its hot rows on a GPU, or split over several of this process.

    Where a CPU gathers there is nothing to copy: then the hits that a GPU would have are counted,
    and the rows come from the table. With several GPUs, one a process, each process makes its own,
    and all of one machine have the same hot set; or they split one, see `cached_share`.

    Of a split set the rows go round by rank, so that each GPU has as much of what is hot as any
    other, and all links carry alike. A GPU reads what the others have from their memory.

    Args:
        table: dense and inside `gcnzc.pinned` for a GPU; for a CPU any on the host.
        size: a share of the rows, above 0 and up to 1, if it is a float; if it is an integer, bytes
            of the GPU's memory, of which 4 for each row of the table go to finding the copies. Of a
            split set the share is of all of it, and the bytes are of each GPU.
        ranking: what `presample` gave; or (N,) scores, the hotter the higher, such as
            `graph.in_degrees()`. Of equal ones the lower id goes first.
        device: that gathers; the current CUDA device, where there is one, if None.
        devices: instead of `device`, the GPUs over which the set is split; the table then serves
            all of them, and its counters are of all. "cpu" several times counts the hits that the
            first of so many GPUs would have.

    Raises:
        ValueError: the size holds no row or is more than all of them, the ranking is of another
            table, the table lies where the copies are of no use, or devices are there twice, of
            two types or beside `device`.
        RuntimeError: a GPU has too little memory, or cannot read the memory of another.
    """
    if devices is not None:
        check_kind("devices", devices, (list, tuple), "a list of devices, or None")
        if not devices:
            raise ValueError("devices is []\n\nhint: a list of devices, or None")
    places = [_place(device)] if devices is None else [_place(each, "devices") for each in devices]
    _demand_apart(places, device, devices)
    for place in places:
        _demand_host(table, place)
    chosen = _hot_set(table, size, ranking, len(places))
    if places[0].type != "cuda":
        return _with_copies(table, chosen, [], 0)
    if len(places) == 1:
        copies = [hot_rows(table.rows, chosen.hot.sort().values, places[0])]
    else:
        copies = peers.split(table.rows, chosen.hot, places)
    return _with_copies(table, chosen, copies)


@dataclass(frozen=True, eq=False)
class CachedShare:
    """What one process has of a hot set that several split; made by `cached_share`."""

    handle: peers.Handle  # for the other processes; plain values, which pickle takes
    _table: FeatureTable = field(repr=False)
    _hot_set: "_HotSet" = field(repr=False)
    _copied: peers.Share | None = field(repr=False)  # None where a CPU gathers

    def joined(self, handles: Sequence[peers.Handle]) -> CachedTable:
        """The table that gathers hot rows from all shares.

        Every process must keep its share, or this table, until the last has gathered.

        Args:
            handles: of all processes' shares, this one's among them, in any order.

        Raises:
            ValueError: one is missing or is there twice, or is of another set or table.
            RuntimeError: one is of another machine, or this GPU cannot read the memory of another.
        """
        found, number = peers.sorted_handles(self.handle, handles), self.handle.number
        copies = [] if self._copied is None else [peers.join(self._copied, found)]
        return _with_copies(self._table, self._hot_set, copies, number)


def cached_share(
    table: FeatureTable,
    size: float,
    ranking: Tensor | Presample,
    *,
    number: int,
    of: int,
    device: torch.device | str | None = None,
) -> CachedShare:
    """Copy this process's share of the hot rows to its GPU, for the other processes to read.

    The processes of one machine have a GPU each. They need the same table, size and ranking: a
    `presample` of the same seed. `cached` says which rows go where.

        share = gcnzc.cached_share(table, 0.5, counted, number=rank, of=world_size)
        handles = [None] * world_size
        torch.distributed.all_gather_object(handles, share.handle)  # or any other way
        cached = share.joined(handles)

    Args:
        table: as for `cached`; from the same file in all processes.
        size: as for `cached`, of a split set.
        ranking: as for `cached`.
        number: of this process among those of the machine, from 0.
        of: how many they are.
        device: of this process, that gathers; the current CUDA device, where there is one, if None.

    Raises:
        ValueError: as `cached`, or there is no such number.
        RuntimeError: the GPU has too little memory, or the driver shares none.
    """
    number = check_integer("number", number, 0, hint="shares are numbered from 0")
    of = check_integer("of", of, 1, hint="the number of processes on this machine")
    place = _place(device)
    _demand_host(table, place)
    chosen = _hot_set(table, size, ranking, of)
    handle = peers.handle_of(chosen.hot, table.num_rows, table.row_bytes, number, of)
    if place.type != "cuda":
        return CachedShare(handle, table, chosen, None)
    copied = peers.share(table.rows, chosen.hot, place, handle)
    return CachedShare(copied.handle, table, chosen, copied)


@dataclass(frozen=True, eq=False)
class _HotSet:
    """A hot set."""

    hot: Tensor  # (H,) ids, the hottest first
    gpus: int  # that split it
    hit_rate: float | None  # predicted
    own_hit_rates: list[float] | None  # of each GPU


def _hot_set(table: FeatureTable, size: float, ranking: Tensor | Presample, gpus: int) -> _HotSet:
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    hint = "what gcnzc.presample gave, or one score a row, such as graph.in_degrees()"
    check_kind("ranking", ranking, (Presample, Tensor), hint)
    scores = ranking.scores if isinstance(ranking, Presample) else ranking
    if scores.isnan().any():
        raise ValueError(f"ranking is {describe(ranking)} with NaN\n\nhint: {hint}")
    if scores.shape != (table.num_rows,):
        raise ValueError(
            f"ranking: a ranking of shape {tuple(scores.shape)} for a table of {table.num_rows} "
            "rows\n\nhint: one score a row is needed; is the ranking that of another graph?"
        )
    num_hot = hot_rows_of(table, size, gpus)
    hot = ranked(scores)[:num_hot]
    if not isinstance(ranking, Presample):
        return _HotSet(hot, gpus, None, None)
    (rates,) = ranking.own_hit_rates([num_hot], gpus)
    return _HotSet(hot, gpus, sum(rates), rates)


def _with_copies(
    table: FeatureTable, chosen: _HotSet, copies: Sequence[HotRows], number: int | None = None
) -> CachedTable:
    """The table with a hot set, for the GPU of share `number`, or for all of them."""
    hot, own, rates = chosen.hot.sort().values, None, chosen.own_hit_rates
    if chosen.gpus > 1:
        own = mark(peers.parts_of(chosen.hot, chosen.gpus)[number or 0], table.num_rows)
    if rates is not None and number is not None:
        rates = [rates[number]]
    return CachedTable(
        **{part.name: getattr(table, part.name) for part in fields(FeatureTable)},
        hot=hot,
        bits=mark(hot, table.num_rows),
        copies=copies[0] if copies else None,
        predicted_hit_rate=chosen.hit_rate,
        predicted_own_hit_rate=None if rates is None else sum(rates) / len(rates),
        others=tuple(copies[1:]),
        gpus=chosen.gpus,
        own_bits=own,
    )


def hot_rows_of(table: FeatureTable, size: float, gpus: int = 1) -> int:
    """How many rows a hot set of `size` has, that `gpus` split; see `cached`.

    Raises:
        ValueError: it holds no row, or is more than all of them.
    """
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(
                f"size is a share {size} of the rows: it must be above 0, and 1 at most\n\n"
                "hint: 0.2 is a fifth of the rows; bytes are an integer"
            )
        return min(table.num_rows, max(1, round(size * table.num_rows)))
    size = check_integer(
        "size", size, hint="bytes as an integer, or a share of the rows as a float"
    )
    least = hot_bytes(table, min(1, table.num_rows))
    if size < least:
        raise ValueError(
            f"size: {size} bytes hold no hot row: the first takes {least} bytes, {SLOT_BYTES} for "
            f"each of {table.num_rows} rows among them\n\n"
            "hint: a larger size; or a share of the rows, such as 0.2"
        )
    each = hot_bytes(table, 1) - hot_bytes(table, 0)
    return min(table.num_rows, gpus * ((size - hot_bytes(table, 0)) // each))


def hot_bytes(table: FeatureTable, num_hot: int, gpus: int = 1) -> int:
    """Bytes of a GPU's memory that a hot set of `num_hot` rows takes at most, split over `gpus`."""
    each = table.row_bytes if table.is_sparse else room_bytes(table.rows)
    return SLOT_BYTES * table.num_rows + -(-num_hot // gpus) * each


def ranked(scores: Tensor) -> Tensor:
    """(N,) int64: the highest score first, and of equal ones the lower id."""
    return scores.sort(descending=True, stable=True).indices


def hit_rates_of(ranking: Tensor, counts: Tensor, sizes: Sequence[int]) -> list[float]:
    """The shares of `counts` that the first `sizes` of `ranking` have.

    Args:
        ranking: (N,) ids, the hottest first.
        counts: (N,) how often each row is needed.
        sizes: of the hot sets, in rows.
    """
    sums = torch.cat([torch.zeros(1), counts[ranking].cumsum(0, dtype=torch.float64)])
    return (sums[list(sizes)] / sums[-1].clamp(min=1)).tolist()


def own_hit_rates_of(
    ranking: Tensor, counts: Tensor, sizes: Sequence[int], gpus: int
) -> list[list[float]]:
    """For each size, the shares of `counts` that each GPU has of the first of `ranking`.

    Args:
        ranking: (N,) ids, the hottest first.
        counts: (N,) how often each row is needed.
        sizes: of the hot sets, in rows.
        gpus: how many split each of them.
    """
    by_rank = counts[ranking]
    total = max(1, int(by_rank.sum(dtype=torch.int64)))
    return [
        [int(part.sum(dtype=torch.int64)) / total for part in peers.parts_of(by_rank[:size], gpus)]
        for size in sizes
    ]


def needed(loader: Loader, batches: int, progress: Progress | None = None) -> Tensor:
    """In how many of the next minibatches of a loader each node is.

    Args:
        loader: begins with its present epoch.
        batches: how many to look at, over as many epochs as they take.
        progress: called with (done, total), in minibatches.

    Returns:
        (N,) int32 on the host.
    """
    counts = torch.zeros(loader.graph.num_nodes, dtype=torch.int32)
    made = chain.from_iterable(iter(loader) for _ in count())
    for number, batch in enumerate(islice(made, batches)):
        count_into(counts, batch.nodes)
        if progress is not None:
            progress(number + 1, batches)
    return counts


def plan(
    counted: Presample,
    table: FeatureTable,
    degrees: Tensor,
    fresh: Tensor | None = None,
    shares: Sequence[float] = SHARES,
    gpus: int = 1,
) -> dict[str, Any]:
    """What hot sets of several sizes would bring, by both rankings.

    Args:
        counted: minibatches as the run will have them.
        table: that the run gathers from.
        degrees: (N,) in-degrees.
        fresh: (N,) counts of minibatches that had no part in `counted`, such as `needed` gives; to
            measure what is predicted.
        shares: of the rows, the sizes to plan for.
        gpus: that split the hot set.

    Returns:
        What JSON can hold: `gpus`, `nodes_per_batch`, `bytes_per_batch` without a hot set, and
        `sizes`, each with its `share`, `rows`, `memory_bytes` on a GPU, and of each of `RANKINGS`
        `predicted_hit_rate` and the `bytes_per_batch` that are left to the host, and
        `measured_hit_rate` if there is `fresh`. Of a split set also `predicted_own_hit_rates` by
        the rows that each GPU has, and `predicted_peer_hit_rate` by those that the others have,
        the mean of all GPUs; and the same measured.
    """
    sizes = [hot_rows_of(table, float(share)) for share in shares]
    predicted = {
        "in-degree": counted.hit_rates_by(degrees, sizes),
        "presampled": counted.hit_rates(sizes),
    }
    measured, measured_own = {}, {}
    if fresh is not None:
        scores = {"in-degree": degrees, "presampled": counted.scores}
        for name in RANKINGS:
            ranking = ranked(scores[name])
            measured[name] = hit_rates_of(ranking, fresh, sizes)
            measured_own[name] = own_hit_rates_of(ranking, fresh, sizes, gpus)
    all_bytes = counted.nodes_per_batch * table.row_bytes
    lines = []
    for place, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        line: dict[str, Any] = {
            "share": share,
            "rows": size,
            "memory_bytes": hot_bytes(table, size, gpus),
        }
        for name in RANKINGS:
            rate = predicted[name][place]
            line[name] = {
                "predicted_hit_rate": rate,
                "bytes_per_batch": round(all_bytes * (1 - rate)),
            }
            if measured:
                line[name]["measured_hit_rate"] = measured[name][place]
        lines.append(line)
    if gpus > 1:
        predicted_own = {
            "in-degree": counted.own_hit_rates_by(degrees, sizes, gpus),
            "presampled": counted.own_hit_rates(sizes, gpus),
        }
        _tell_apart(lines, "predicted", predicted_own)
        _tell_apart(lines, "measured", measured_own)
    return {
        "gpus": gpus,
        "row_bytes": table.row_bytes,
        "batches": 2 * counted.batches,
        "nodes_per_batch": counted.nodes_per_batch,
        "bytes_per_batch": round(all_bytes),
        "sizes": lines,
    }


def _tell_apart(
    lines: Sequence[dict[str, Any]], how: str, own: Mapping[str, list[list[float]]]
) -> None:
    """Add which of the hits each GPU has itself, and which on the mean the others have."""
    for name, of_sizes in own.items():
        for line, rates in zip(lines, of_sizes, strict=True):
            figures = line[name]
            figures[f"{how}_own_hit_rates"] = rates
            figures[f"{how}_peer_hit_rate"] = figures[f"{how}_hit_rate"] - sum(rates) / len(rates)


def drawn(found: Mapping[str, Any]) -> tuple[Points, Points]:
    """What there is to draw of a `plan`: shares and hit rates, predicted and measured."""
    points: list[Points] = []
    for key in ("predicted_hit_rate", "measured_hit_rate"):
        points.append(
            {
                name: [(line["share"], line[name][key]) for line in found["sizes"]]
                for name in RANKINGS
                if key in found["sizes"][0][name]
            }
        )
    return points[0], points[1]


def lines(found: Mapping[str, Any]) -> list[str]:
    """What `plan` found, as lines for a person."""
    has_measured = "measured_hit_rate" in found["sizes"][0][RANKINGS[0]]
    is_split = found["gpus"] > 1
    heads = ["hot rows", "memory a GPU" if is_split else "GPU memory"]
    for name in RANKINGS:
        heads += [name, *["measured"] * has_measured, *["of it by peers"] * is_split, "MB a batch"]
    rows = [heads]
    for line in found["sizes"]:
        cells = [f"{line['share']:.1%}", f"{line['memory_bytes'] / 1e6:.1f} MB"]
        for name in RANKINGS:
            figures = line[name]
            cells.append(f"{figures['predicted_hit_rate']:.1%}")
            if has_measured:
                cells.append(f"{figures['measured_hit_rate']:.1%}")
            if is_split:
                cells.append(f"{figures['predicted_peer_hit_rate']:.1%}")
            cells.append(f"{figures['bytes_per_batch'] / 1e6:.2f}")
        rows.append(cells)
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    split = f"that {found['gpus']} GPUs split " if is_split else ""
    told = [
        f"a minibatch needs {found['nodes_per_batch']:,.0f} rows of {found['row_bytes']} B, "
        f"{found['bytes_per_batch'] / 1e6:.2f} MB, of which a hot set {split}keeps off the bus the "
        f"share predicted from {found['batches']} minibatches:"
    ]
    for row in rows:
        told.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return told


def _place(device: torch.device | str | None, name: str = "device") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = check_device(name, device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _demand_apart(
    places: Sequence[torch.device],
    device: torch.device | str | None,
    devices: Sequence[torch.device | str] | None,
) -> None:
    one_type = len({place.type for place in places}) == 1
    on_gpus = [place for place in places if place.type == "cuda"]
    twice = len(set(on_gpus)) < len(on_gpus)
    if not one_type or twice or None not in (device, devices):
        raise ValueError(
            f"a hot set cannot be split over {list(map(str, places))}, with device {device}\n\n"
            "hint: GPUs that are all different, in `devices` alone"
        )


def _demand_host(table: FeatureTable, device: torch.device) -> None:
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    if table.device.type != "cpu":
        raise ValueError(
            f"all rows of this table lie on {table.device}, so none needs a copy there\n\n"
            "hint: leave the hot set away, or keep the rows on the host"
        )
    if device.type == "cuda" and (
        table.is_sparse or not (table.rows.is_pinned() or table.rows.numel() == 0)
    ):
        raise ValueError(
            f"{device} cannot read the rows that are not hot, because their memory is not "
            "page-locked\n\nhint: `with gcnzc.pinned(rows) as table:`, for dense rows"
        )


def _batches_of(seeds: Tensor, batch_size: int, key: int, first_order: int) -> Iterator[Tensor]:
    """The seeds of minibatches without end: all of them in one order, then in another."""
    for number in count(first_order):
        yield from order(seeds, key, number).split(batch_size)


def _drawn(sampler: Sampler, picked: Iterator[Tensor], threads: int | None) -> Iterator[Tensor]:
    """The nodes of the minibatches of these seeds, in turn, drawn by threads that work ahead."""
    if threads is None:
        threads = usual_threads()
    coming: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads, "gcnzc-presample") as executor:
        for number, seeds in enumerate(picked):
            # an epoch of its own for each: within one, a node's neighbours are drawn once
            coming.append(executor.submit(lambda *what: sampler.sample(*what).nodes, seeds, number))
            if len(coming) > threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _kinds(graph: Graph, seeds: Tensor) -> Tensor:
    """(N,) int16: nodes of about the same degree, seeds apart from others."""
    degrees = graph.in_degrees().numpy()
    kinds = degrees.clip(max=OWN_CLASS).astype(np.int16)
    wide = degrees > OWN_CLASS
    doublings = np.log2(degrees[wide] / OWN_CLASS)
    kinds[wide] = OWN_CLASS + (CLASSES_PER_DOUBLING * doublings).astype(np.int16)
    kinds *= 2
    kinds[seeds.numpy()] += 1
    return torch.from_numpy(kinds)


def _chances(counts: Tensor, batches: int, kinds: Tensor) -> Tensor:
    """(N,) float32: the mean of each node's chance to be in a minibatch, its count being known.

    Counts are binomial, and the chances of the nodes of a kind have a beta distribution, whose mean
    and spread are those that give the counts' mean and variance.
    """
    seen, kind = counts.numpy(), kinds.numpy()
    size = np.maximum(np.bincount(kind), 1)
    mean = np.bincount(kind, seen) / size
    variance = np.bincount(kind, np.square(seen, dtype=np.float64)) / size - mean**2
    share = mean / batches
    alone = batches * share * (1 - share)  # the variance, if all nodes of the kind had one chance
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = (variance / alone - 1) / (batches - 1)
    # of few nodes, or of those in every minibatch, nothing is known but the mean
    alike = np.clip(np.nan_to_num(alike, nan=0.0), 1e-6, 1.0)
    weight = 1 / alike - 1  # minibatches that the kind's mean counts for
    chance = (seen + (weight * share)[kind]) / (batches + weight[kind])
    return torch.from_numpy(chance.astype(np.float32))
