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

Letters: N nodes, M minibatches of one half.
"""

import os
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
from gcnzc.loader import MOST_THREADS, Loader, order
from gcnzc.sampler import Sampler
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
    hits: int  # of them, which the GPU has
    row_bytes: int  # of one row as it is stored, hence as it crosses the bus

    @property
    def hit_rate(self) -> float:
        """Hits for each row; 0 if none was asked for."""
        return self.hits / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """That did not cross the bus, or would not have."""
        return self.hits * self.row_bytes


class _Tally:
    """Rows and hits so far; any thread adds to them, on any stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._hits = 0
        # on a GPU, so that nobody waits: one sum a stream, as streams do not add in turns
        self._on_gpu: dict[int, Tensor] = {}

    def add(self, rows: int, hits: int | Tensor) -> None:
        with self._lock:
            self._rows += rows
            if isinstance(hits, int):
                self._hits += hits
                return
            stream = torch.cuda.current_stream(hits.device).cuda_stream if hits.is_cuda else 0
            total = self._on_gpu.get(stream)
            if total is None:
                self._on_gpu[stream] = hits
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
    _tally: _Tally = field(default_factory=_Tally, repr=False)

    def __repr__(self) -> str:
        where = "counted" if self.copies is None else f"copied to {self.copies.memory.device}"
        return f"CachedTable({super().__repr__()}, {self.num_hot} hot rows {where})"

    @property
    def num_hot(self) -> int:
        """H."""
        return len(self.hot)

    @property
    def hot_nbytes(self) -> int:
        """Bytes that the hot rows take on a GPU, or would, with the slots that lead to them."""
        if self.copies is not None:
            return self.copies.nbytes
        return hot_bytes(self, self.num_hot)

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids`, as `FeatureTable.gather` gives them; counted for `counters`.

        Args:
            ids: as there. On the GPU of the hot rows these are read from their copies.
            out: as there.
            threads: as there.

        Raises:
            ValueError, IndexError: as `FeatureTable.gather` does.
        """
        copies = self.copies
        if copies is None:
            # before the gather, which drives the ids out of the cache; it refuses those outside
            hits = self.hits(ids)
            rows = super().gather(ids, out, threads=threads)
        elif ids.device == copies.memory.device:
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
            hits = self.hits(ids)
        else:
            # on the host, from where no copy is of use
            hits, rows = 0, super().gather(ids, out, threads=threads)
        self._tally.add(len(ids), hits)
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
        if self.copies is None or ids.device.type == "cpu":
            return count_marked(self.bits, self.num_rows, ids.cpu())
        return (self.copies.slots[ids.long()] >= 0).sum()

    def counters(self) -> Counters:
        """What was gathered since the last reset; waits for gathers on a GPU."""
        rows, hits = self._tally.read()
        return Counters(rows, hits, self.row_bytes)

    def reset_counters(self) -> None:
        """Count from 0 again."""
        self._tally.reset()


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
        first, second = self.halves
        both = [
            hit_rates_of(ranked(_chances(choose, self.batches, self.kinds)), tell, sizes)
            for choose, tell in ((first, second), (second, first))
        ]
        return [(one + other) / 2 for one, other in zip(*both, strict=True)]

    def hit_rates_by(self, scores: Tensor, sizes: Sequence[int]) -> list[float]:
        """The predicted hit rate of hot sets by scores that these minibatches had no part in.

        Args:
            scores: (N,), such as `graph.in_degrees()`.
            sizes: of the hot sets, in rows.
        """
        return hit_rates_of(ranked(scores), self.halves[0] + self.halves[1], sizes)


def presample(
    graph: Graph,
    seeds: Tensor,
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
        seeds: (S,) ids of the run's training nodes.
        fanouts: of the run, as `gcnzc.Sampler` takes them.
        batch_size: seeds of a minibatch.
        seed: of the run.
        batches: how many are drawn, in two halves; at least 4.
        threads: that sample; one per core, but four at most, if None.
        progress: called with (done, total), in minibatches.

    Raises:
        ValueError: too few batches, no seeds, or what `gcnzc.Sampler` refuses.
    """
    if batches < 4:
        raise ValueError(
            f"{batches} minibatches are too few to count in\n\nhint: 4 at least, 100 is usual"
        )
    if len(seeds) == 0 or batch_size < 1:
        raise ValueError(
            f"{len(seeds)} seeds in batches of {batch_size}: there is nothing to draw\n\n"
            "hint: is the training split empty?"
        )
    key = (seed ^ OTHER) % 2**64
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
) -> CachedTable:
    """The same table with copies of its hot rows on a GPU.

    Where a CPU gathers there is nothing to copy: then the hits that a GPU would have are counted,
    and the rows come from the table. With several GPUs each worker makes its own, and all of one
    machine have the same hot set.

    Args:
        table: dense and inside `gcnzc.pinned` for a GPU; for a CPU any on the host.
        size: a share of the rows, above 0 and up to 1, if it is a float; if it is an integer, bytes
            of the GPU's memory, of which 4 for each row of the table go to finding the copies.
        ranking: what `presample` gave; or (N,) scores, the hotter the higher, such as
            `graph.in_degrees()`. Of equal ones the lower id goes first.
        device: that gathers; the current CUDA device, where there is one, if None.

    Raises:
        ValueError: the size holds no row or is more than all of them, the ranking is of another
            table, or the table lies where the copies are of no use.
        RuntimeError: the GPU has too little memory.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    scores = ranking.scores if isinstance(ranking, Presample) else ranking
    _demand_host(table, device)
    if scores.shape != (table.num_rows,):
        raise ValueError(
            f"a ranking of shape {tuple(scores.shape)} for a table of {table.num_rows} rows\n\n"
            "hint: one score a row is needed; is the ranking that of another graph?"
        )
    num_hot = hot_rows_of(table, size)
    hot = ranked(scores)[:num_hot].sort().values
    predicted = ranking.hit_rates([num_hot])[0] if isinstance(ranking, Presample) else None
    return CachedTable(
        **{part.name: getattr(table, part.name) for part in fields(FeatureTable)},
        hot=hot,
        bits=mark(hot, table.num_rows),
        copies=hot_rows(table.rows, hot, device) if device.type == "cuda" else None,
        predicted_hit_rate=predicted,
    )


def hot_rows_of(table: FeatureTable, size: float) -> int:
    """How many rows a hot set of `size` has; see `cached`.

    Raises:
        ValueError: it holds no row, or is more than all of them.
    """
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(
                f"a hot set of a share {size} of the rows: it must be above 0, and 1 at most\n\n"
                "hint: 0.2 is a fifth of the rows; bytes are an integer"
            )
        return min(table.num_rows, max(1, round(size * table.num_rows)))
    least = hot_bytes(table, min(1, table.num_rows))
    if size < least:
        raise ValueError(
            f"{size} bytes hold no hot row: the first takes {least} bytes, {SLOT_BYTES} for each "
            f"of {table.num_rows} rows among them\n\n"
            "hint: a larger size; or a share of the rows, such as 0.2"
        )
    each = hot_bytes(table, 1) - hot_bytes(table, 0)
    return min(table.num_rows, (size - hot_bytes(table, 0)) // each)


def hot_bytes(table: FeatureTable, num_hot: int) -> int:
    """Bytes of a GPU's memory that a hot set of `num_hot` rows takes, at most."""
    each = table.row_bytes if table.is_sparse else room_bytes(table.rows)
    return SLOT_BYTES * table.num_rows + num_hot * each


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
) -> dict[str, Any]:
    """What hot sets of several sizes would bring, by both rankings.

    Args:
        counted: minibatches as the run will have them.
        table: that the run gathers from.
        degrees: (N,) in-degrees.
        fresh: (N,) counts of minibatches that had no part in `counted`, such as `needed` gives; to
            measure what is predicted.
        shares: of the rows, the sizes to plan for.

    Returns:
        What JSON can hold: `nodes_per_batch`, `bytes_per_batch` without a hot set, and `sizes`,
        each with its `share`, `rows`, `memory_bytes` on the GPU, and of each of `RANKINGS`
        `predicted_hit_rate` and the `bytes_per_batch` that are left, and `measured_hit_rate` if
        there is `fresh`.
    """
    sizes = [hot_rows_of(table, float(share)) for share in shares]
    predicted = {
        "in-degree": counted.hit_rates_by(degrees, sizes),
        "presampled": counted.hit_rates(sizes),
    }
    measured = {}
    if fresh is not None:
        scores = {"in-degree": degrees, "presampled": counted.scores}
        measured = {name: hit_rates_of(ranked(scores[name]), fresh, sizes) for name in RANKINGS}
    all_bytes = counted.nodes_per_batch * table.row_bytes
    lines = []
    for place, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        line: dict[str, Any] = {
            "share": share,
            "rows": size,
            "memory_bytes": hot_bytes(table, size),
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
    return {
        "row_bytes": table.row_bytes,
        "batches": 2 * counted.batches,
        "nodes_per_batch": counted.nodes_per_batch,
        "bytes_per_batch": round(all_bytes),
        "sizes": lines,
    }


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
    heads = ["hot rows", "GPU memory"]
    for name in RANKINGS:
        heads += [name, "MB a batch"]
        if has_measured:
            heads.insert(-1, "measured")
    rows = [heads]
    for line in found["sizes"]:
        cells = [f"{line['share']:.1%}", f"{line['memory_bytes'] / 1e6:.1f} MB"]
        for name in RANKINGS:
            figures = line[name]
            cells.append(f"{figures['predicted_hit_rate']:.1%}")
            if has_measured:
                cells.append(f"{figures['measured_hit_rate']:.1%}")
            cells.append(f"{figures['bytes_per_batch'] / 1e6:.2f}")
        rows.append(cells)
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    told = [
        f"a minibatch needs {found['nodes_per_batch']:,.0f} rows of {found['row_bytes']} B, "
        f"{found['bytes_per_batch'] / 1e6:.2f} MB, of which a hot set keeps off the bus the share "
        f"predicted from {found['batches']} minibatches:"
    ]
    for row in rows:
        told.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return told


def _demand_host(table: FeatureTable, device: torch.device) -> None:
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
        threads = min(os.cpu_count() or 1, MOST_THREADS)
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
