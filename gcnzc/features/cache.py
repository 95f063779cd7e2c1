"""The feature cache: rows that are read often, copied to GPU memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from gcnzc.features import peer_memory
from gcnzc.features.access_counts import Presample, rank_by_score
from gcnzc.features.cache_counters import CacheCounters, Tally
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather.cached import SLOT_BYTES, count_marked, gather_cached, mark, room_bytes
from gcnzc.kernels.gather.cached_rows import CachedRows, make_cached_rows
from gcnzc.system.arguments import check_device, check_integer, check_kind, describe


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedTable(FeatureTable):
    """A table of features whose hot rows also lie on a GPU, or would; made by `cached`.

    It serves wherever a `FeatureTable` does, and gathers the same rows bit for bit.
    """

    hot: Tensor  # (H,) int64 ids of the hot rows, ascending, on the host
    bits: Tensor  # (N // 64 + 1,) int64, on the host: one bit a row
    copies: CachedRows | None  # on the GPU; None if a CPU gathers and the hits are only counted
    predicted_hit_rate: float | None  # by the minibatches that ranked the rows, if such did
    predicted_own_hit_rate: float | None = None  # the part of it that the GPU itself has
    others: tuple[CachedRows, ...] = ()  # the same split set, for other GPUs of this process
    gpus: int = 1  # G
    own_bits: Tensor | None = None  # as `bits`, of the GPU's own rows; None unless the set is split
    _tally: Tally = field(default_factory=Tally, repr=False)
    _peer_tally: Tally = field(default_factory=Tally, repr=False)

    def __repr__(self) -> str:
        where = "counted" if self.copies is None else f"copied to {self.copies.memory.device}"
        if self.gpus > 1:
            where = f"split over {self.gpus} GPUs, {where}"
        return f"CachedTable({super().__repr__()}, {self.num_cached} hot rows {where})"

    @property
    def num_cached(self) -> int:
        """H."""
        return len(self.hot)

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the hot rows take on a GPU, or would, with the slots that lead to them.

        Of a split set those on this GPU.
        """
        if self.copies is not None:
            return self.copies.nbytes
        return cache_bytes(self, self.num_cached, self.gpus)

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
            rows = gather_cached(
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

    def counters(self) -> CacheCounters:
        """What was gathered since the last reset; waits for gathers on a GPU."""
        rows, hits = self._tally.read()
        return CacheCounters(rows, hits, self.row_bytes, self._peer_tally.read()[1])

    def reset_counters(self) -> None:
        """Count from 0 again."""
        self._tally.reset()
        self._peer_tally.reset()

    def _copies_on(self, device: torch.device) -> CachedRows | None:
        copies = (self.copies, *self.others)
        return next((c for c in copies if c is not None and c.memory.device == device), None)


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
    _check_apart(places, device, devices)
    for place in places:
        _check_host(table, place)
    chosen = _plan_cache(table, size, ranking, len(places))
    if places[0].type != "cuda":
        return _with_copies(table, chosen, [], 0)
    if len(places) == 1:
        copies = [make_cached_rows(table.rows, chosen.hot.sort().values, places[0])]
    else:
        copies = peer_memory.split(table.rows, chosen.hot, places)
    return _with_copies(table, chosen, copies)


@dataclass(frozen=True, eq=False)
class CachedShare:
    """What one process has of a hot set that several split; made by `cached_share`."""

    handle: peer_memory.Handle  # for the other processes; plain values, which pickle takes
    _table: FeatureTable = field(repr=False)
    _hot_set: "_CachePlan" = field(repr=False)
    _copied: peer_memory.Share | None = field(repr=False)  # None where a CPU gathers

    def joined(self, handles: Sequence[peer_memory.Handle]) -> CachedTable:
        """The table that gathers hot rows from all shares.

        Every process must keep its share, or this table, until the last has gathered.

        Args:
            handles: of all processes' shares, this one's among them, in any order.

        Raises:
            ValueError: one is missing or is there twice, or is of another set or table.
            RuntimeError: one is of another machine, or this GPU cannot read the memory of another.
        """
        found, number = peer_memory.sorted_handles(self.handle, handles), self.handle.number
        copies = [] if self._copied is None else [peer_memory.join(self._copied, found)]
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
    _check_host(table, place)
    chosen = _plan_cache(table, size, ranking, of)
    handle = peer_memory.handle_of(chosen.hot, table.num_rows, table.row_bytes, number, of)
    if place.type != "cuda":
        return CachedShare(handle, table, chosen, None)
    copied = peer_memory.share(table.rows, chosen.hot, place, handle)
    return CachedShare(copied.handle, table, chosen, copied)


@dataclass(frozen=True, eq=False)
class _CachePlan:
    """A hot set."""

    hot: Tensor  # (H,) ids, the hottest first
    gpus: int  # that split it
    hit_rate: float | None  # predicted
    own_hit_rates: list[float] | None  # of each GPU


def _plan_cache(
    table: FeatureTable, size: float, ranking: Tensor | Presample, gpus: int
) -> _CachePlan:
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
    num_cached = num_rows_to_cache(table, size, gpus)
    hot = rank_by_score(scores)[:num_cached]
    if not isinstance(ranking, Presample):
        return _CachePlan(hot, gpus, None, None)
    (rates,) = ranking.own_hit_rates([num_cached], gpus)
    return _CachePlan(hot, gpus, sum(rates), rates)


def _with_copies(
    table: FeatureTable, chosen: _CachePlan, copies: Sequence[CachedRows], number: int | None = None
) -> CachedTable:
    """The table with a hot set, for the GPU of share `number`, or for all of them."""
    hot, own, rates = chosen.hot.sort().values, None, chosen.own_hit_rates
    if chosen.gpus > 1:
        own = mark(peer_memory.parts_of(chosen.hot, chosen.gpus)[number or 0], table.num_rows)
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


def num_rows_to_cache(table: FeatureTable, size: float, gpus: int = 1) -> int:
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
    least = cache_bytes(table, min(1, table.num_rows))
    if size < least:
        raise ValueError(
            f"size: {size} bytes hold no hot row: the first takes {least} bytes, {SLOT_BYTES} for "
            f"each of {table.num_rows} rows among them\n\n"
            "hint: a larger size; or a share of the rows, such as 0.2"
        )
    each = cache_bytes(table, 1) - cache_bytes(table, 0)
    return min(table.num_rows, gpus * ((size - cache_bytes(table, 0)) // each))


def cache_bytes(table: FeatureTable, num_cached: int, gpus: int = 1) -> int:
    """Return the most bytes of GPU memory for `num_cached` rows, sharded over `gpus`."""
    each = table.row_bytes if table.is_sparse else room_bytes(table.rows)
    return SLOT_BYTES * table.num_rows + -(-num_cached // gpus) * each


def _place(device: torch.device | str | None, name: str = "device") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = check_device(name, device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_apart(
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


def _check_host(table: FeatureTable, device: torch.device) -> None:
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


DEFAULT_CACHED_SHARE = 0.2  # of the rows; docs/concepts/feature_cache.md has what other sizes bring
