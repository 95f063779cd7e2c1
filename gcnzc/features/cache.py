"""The feature cache: rows that are read often, copied to GPU memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from gcnzc.features import peer_memory
from gcnzc.features.access_counts import Presample, rank_by_score
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather.cached import (
    SLOT_BYTES,
    count_in_bitmap,
    gather_cached,
    make_bitmap,
    padded_row_bytes,
)
from gcnzc.kernels.gather.cached_rows import CachedRows, make_cached_rows
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.arguments import check_device, check_integer, check_kind, describe


@dataclass(frozen=True)
class CacheCounters:
    """Numbers of gathered rows and of cache hits."""

    rows: int  # gathered rows
    hits: int  # gathered rows that were cached, on the same or, in a sharded cache, on another GPU
    row_bytes: int  # bytes of one row as it is stored, and as it is read over the bus
    peer_hits: int = 0  # hits on another GPU of a sharded cache

    @property
    def hit_rate(self) -> float:
        """Hits divided by gathered rows; 0 if no row was gathered."""
        return self.hits / self.rows if self.rows else 0.0

    @property
    def own_hit_rate(self) -> float:
        """Hits on the same GPU divided by gathered rows; 0 if no row was gathered."""
        return (self.hits - self.peer_hits) / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """Bytes that were not read from the host, because of hits."""
        return self.hits * self.row_bytes


class Tally:
    """Running sums of rows and hits; any thread may add to them, on any stream."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._rows = self._hits = 0
        # one sum for each stream on a GPU, since additions on different streams may overlap
        self._on_gpu: dict[tuple[torch.device, int], Tensor] = {}

    def add(self, rows: int, hits: int | Tensor) -> None:
        """Count rows read, and how many of them were in the cache (a number, or a GPU scalar)."""
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
        """Return the numbers of rows and of hits, after synchronizing with the GPUs."""
        with self._lock:
            # the sums may belong to other streams than the current one
            for device in {total.device for total in self._on_gpu.values() if total.is_cuda}:
                torch.cuda.synchronize(device)
            return self._rows, self._hits + sum(int(total) for total in self._on_gpu.values())

    def reset(self) -> None:
        """Start counting from zero."""
        with self._lock:
            self._rows = self._hits = 0
            self._on_gpu.clear()


DEFAULT_CACHED_FRACTION = 0.2  # of the rows; docs/concepts/feature_cache.md compares sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedTable(FeatureTable):
    """A table of features with a cache of its most accessed rows on a GPU, made by `cached`.

    It can be used wherever a `FeatureTable` can, and gathers the same rows bit for bit. On a CPU
    nothing is copied, and the hits that a GPU would have are counted.
    """

    cached_ids: Tensor  # (H,) int64 ids of the cached rows, ascending, on the host
    cached_bits: Tensor  # (N // 64 + 1,) int64 on the host: one bit for each row, 1 if cached
    copies: CachedRows | None  # on the GPU; None if a CPU gathers
    predicted_hit_rate: float | None  # None if the rows were not ranked by a `Presample`
    predicted_own_hit_rate: float | None = None  # of a GPU's own memory; mean of `devices`
    other_copies: tuple[CachedRows, ...] = ()  # the sharded cache, for other GPUs of this process
    gpus: int = 1  # G, the number of GPUs over which the cache is sharded
    own_bits: Tensor | None = None  # like `cached_bits`, of the GPU's own rows; None if not sharded
    _tally: Tally = field(default_factory=Tally, repr=False)
    _peer_tally: Tally = field(default_factory=Tally, repr=False)

    def __repr__(self) -> str:
        where = "not copied" if self.copies is None else f"copied to {self.copies.memory.device}"
        if self.gpus > 1:
            where = f"sharded over {self.gpus} GPUs, {where}"
        return f"CachedTable({super().__repr__()}, {self.num_cached} cached rows, {where})"

    @property
    def num_cached(self) -> int:
        """Number of cached rows, H."""
        return len(self.cached_ids)

    @property
    def cache_nbytes(self) -> int:
        """Bytes of GPU memory for the cached rows and the slots that locate them.

        For a sharded cache, the bytes on one GPU. Without a GPU, an upper bound of these bytes.
        """
        if self.copies is not None:
            return self.copies.nbytes
        return cache_bytes(self, self.num_cached, self.gpus)

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Gather rows `ids` like `FeatureTable.gather`, and count them for `counters`.

        Args:
            ids: see `FeatureTable.gather`. On a GPU with the cache, cached rows are read from it.
            out: see `FeatureTable.gather`.
            threads: see `FeatureTable.gather`.

        Raises:
            ValueError, IndexError: see `FeatureTable.gather`.
        """
        copies = self._copies_on(ids.device)
        if self.copies is None:
            # Count before the gather, which evicts the ids from the CPU's caches. The gather raises
            # for ids out of range, so the -1 that `hits` returns for them is never added.
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
                config=self.kernel_config,
            )
            hits, peer_hits = self.hits(ids), self.peer_hits(ids)
        else:
            # the device of the ids has no copies: it is the host, or a GPU without the cache
            hits, peer_hits, rows = 0, 0, super().gather(ids, out, threads=threads)
        self._tally.add(len(ids), hits)
        if self.gpus > 1:
            self._peer_tally.add(len(ids), peer_hits)
        return rows

    def gather_stored(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Gather rows `ids` as they are stored, from the table itself; they count as misses.

        Args:
            ids, out, threads: see `FeatureTable.gather_stored`.

        Raises:
            ValueError, IndexError: see `FeatureTable.gather`.
        """
        rows = super().gather_stored(ids, out, threads=threads)
        self._tally.add(len(ids), 0)
        return rows

    def hits(self, ids: Tensor) -> int | Tensor:
        """Return how many of `ids` are cached.

        Args:
            ids: (B,) int32 or int64 in [0, N); the range is not checked on a GPU.

        Returns:
            For ids on a GPU that has the cache, a () int64 tensor there, computed on the current
            stream. Otherwise an integer, which is -1 if an id is out of range; ids on another GPU
            are copied to the host.
        """
        copies = self._copies_on(ids.device)
        if copies is None or ids.device.type == "cpu":
            return count_in_bitmap(self.cached_bits, self.num_rows, ids.cpu())
        return (copies.slots[ids.long()] >= 0).sum()

    def peer_hits(self, ids: Tensor) -> int | Tensor:
        """Return how many of `ids` are cached on another GPU of a sharded cache.

        Ids on the host are counted as for this process's GPU; with `devices` of `cached`, as for
        the first of them.

        Args:
            ids: see `hits`.

        Returns:
            The integer 0 if the cache is not sharded. Otherwise see `hits`, but 0 in place of -1.
        """
        if self.own_bits is None:
            return 0
        copies = self._copies_on(ids.device)
        if copies is None or copies.peers is None:
            ids = ids.cpu()
            own_hits = count_in_bitmap(self.own_bits, self.num_rows, ids)
            return count_in_bitmap(self.cached_bits, self.num_rows, ids) - own_hits
        slots = copies.slots[ids.long()]
        return ((slots >= 0) & (slots % self.gpus != copies.peers.own)).sum()

    def counters(self) -> CacheCounters:
        """Return the counters since the last reset, after synchronizing with the GPUs."""
        rows, hits = self._tally.read()
        return CacheCounters(rows, hits, self.row_bytes, self._peer_tally.read()[1])

    def reset_counters(self) -> None:
        """Set the counters to zero."""
        self._tally.reset()
        self._peer_tally.reset()

    def _copies_on(self, device: torch.device) -> CachedRows | None:
        copies = (self.copies, *self.other_copies)
        return next((c for c in copies if c is not None and c.memory.device == device), None)


def cached(
    table: FeatureTable,
    size: float,
    ranking: Tensor | Presample,
    *,
    device: torch.device | str | None = None,
    devices: Sequence[torch.device | str] | None = None,
) -> CachedTable:
    """Copy the highest-ranked rows of a table to a GPU, and return a table that reads them there.

    On a CPU nothing is copied: rows are gathered from the table, and the hits that a GPU would have
    are counted. With one process for each GPU, each process has a cache of its own, and those of
    one machine cache the same rows; `cached_share` shards one cache over these processes.

    With `devices`, the cache is sharded over several GPUs of this process. Rows are assigned to
    GPUs round-robin by rank, so that all GPUs serve about the same number of reads. A GPU reads
    rows that another GPU has from that GPU's memory.

    Args:
        table: for a GPU, dense and inside `gcnzc.pinned`; for a CPU, any table on the host.
        size: a float is a fraction of the rows, above 0 and up to 1; at least one row is cached. An
            integer is bytes of GPU memory, which include 4 bytes for each row of the table to
            locate the cached rows; more bytes than the table needs cache all rows. If the cache is
            sharded, a fraction counts the rows of all GPUs, and bytes are of each GPU.
        ranking: returned by `presample`; or (N,) scores, one for each row, such as
            `graph.in_degrees()`. The rows with the highest scores are cached, of equal scores those
            with the lowest ids.
        device: the device that gathers. Default: the current CUDA device, or the CPU without one.
        devices: instead of `device`, the GPUs over which the cache is sharded. The returned table
            can be used on all of them, and its counters are of all. Repeating "cpu" counts the hits
            that the first of that many GPUs would have.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a fraction is not in (0, 1], or bytes are too few for one row; the ranking has
            another number of rows or NaN; the table cannot be read by the device or is already on a
            GPU; or `devices` is empty, has duplicates or different types, or is given together with
            `device`.
        RuntimeError: a GPU has too little memory, or cannot read the memory of another.
    """
    if devices is not None:
        check_kind("devices", devices, (list, tuple), "a list of devices, or None")
        if not devices:
            raise ValueError("devices is []\n\nhint: a list of devices, or None")
    chosen = (
        [_get_device(device)]
        if devices is None
        else [_get_device(each, "devices") for each in devices]
    )
    _check_devices(chosen, device, devices)
    for each in chosen:
        _check_host(table, each)
    choice = _choose_rows(table, size, ranking, len(chosen))
    if chosen[0].type != "cuda":
        return _make_table(table, choice, [], 0)
    if len(chosen) == 1:
        copies = [make_cached_rows(table.rows, choice.ids.sort().values, chosen[0])]
    else:
        copies = peer_memory.make_sharded_rows(table.rows, choice.ids, chosen)
    return _make_table(table, choice, copies)


@dataclass(frozen=True, eq=False)
class CachedShare:
    """One process's share of a sharded cache, made by `cached_share`.

    Send `handle` to the other processes of the machine, then call `join` with all handles.
    """

    handle: peer_memory.Handle  # for the other processes; it can be pickled
    _table: FeatureTable = field(repr=False)
    _choice: "_CacheChoice" = field(repr=False)
    _share: peer_memory.Share | None = field(repr=False)  # None if a CPU gathers

    def join(self, handles: Sequence[peer_memory.Handle]) -> CachedTable:
        """Return the table that reads cached rows from the shares of all processes.

        Each process must keep its share, or the returned table, until all processes have finished
        gathering.

        Args:
            handles: the handles of all processes including this one, in any order.

        Raises:
            ValueError: a handle is missing, duplicate, or of another cache or table.
            RuntimeError: a process runs on another machine, or this GPU cannot read another GPU's
                memory.
        """
        found, rank = peer_memory.check_handles(self.handle, handles), self.handle.rank
        copies = [] if self._share is None else [peer_memory.open_shares(self._share, found)]
        return _make_table(self._table, self._choice, copies, rank)


def cached_share(
    table: FeatureTable,
    size: float,
    ranking: Tensor | Presample,
    *,
    rank: int,
    world_size: int,
    device: torch.device | str | None = None,
) -> CachedShare:
    """Copy this process's share of a sharded cache to its GPU, which other processes can read.

    Each process of a machine has one GPU. All of them must call this with the same table, size and
    ranking, such as a `presample` with the same seed. `cached` describes which rows each GPU has.

        share = gcnzc.cached_share(table, 0.5, counted, rank=rank, world_size=world_size)
        handles = [None] * world_size
        torch.distributed.all_gather_object(handles, share.handle)
        cached = share.join(handles)

    Args:
        table: see `cached`; from the same file in all processes.
        size: see `cached`, of a sharded cache.
        ranking: see `cached`.
        rank: of this process among those of the machine, from 0.
        world_size: number of processes on the machine.
        device: of this process. Default: the current CUDA device, or the CPU without one.

    Raises:
        TypeError: see `cached`.
        ValueError: see `cached`; or `rank` is not in [0, world_size).
        RuntimeError: the GPU has too little memory, or its driver cannot share memory between
            processes.
    """
    rank = check_integer("rank", rank, 0)
    world_size = check_integer("world_size", world_size, 1)
    chosen = _get_device(device)
    _check_host(table, chosen)
    choice = _choose_rows(table, size, ranking, world_size)
    handle = peer_memory.make_handle(choice.ids, table.num_rows, table.row_bytes, rank, world_size)
    if chosen.type != "cuda":
        return CachedShare(handle, table, choice, None)
    share = peer_memory.export_share(table.rows, choice.ids, chosen, handle)
    return CachedShare(share.handle, table, choice, share)


@dataclass(frozen=True, eq=False)
class _CacheChoice:
    """The rows to cache, and the predicted hit rates."""

    ids: Tensor  # (H,) ids of the rows to cache, by descending score
    gpus: int  # number of GPUs over which they are sharded
    hit_rate: float | None  # predicted
    own_hit_rates: list[float] | None  # predicted for each GPU's own memory


def _choose_rows(
    table: FeatureTable, size: float, ranking: Tensor | Presample, gpus: int
) -> _CacheChoice:
    hint = "the result of gcnzc.presample, or one score for each row, such as graph.in_degrees()"
    check_kind("ranking", ranking, (Presample, Tensor), hint)
    scores = ranking.scores if isinstance(ranking, Presample) else ranking
    if scores.isnan().any():
        raise ValueError(f"ranking is {describe(ranking)} with NaN\n\nhint: {hint}")
    if scores.shape != (table.num_rows,):
        raise ValueError(
            f"ranking: a ranking of shape {tuple(scores.shape)} for a table of {table.num_rows} "
            "rows\n\nhint: one score for each row is needed; is the ranking of another graph?"
        )
    num_cached = num_rows_to_cache(table, size, gpus)
    ids = rank_by_score(scores)[:num_cached]
    if not isinstance(ranking, Presample):
        return _CacheChoice(ids, gpus, None, None)
    (rates,) = ranking.own_hit_rates([num_cached], gpus)
    return _CacheChoice(ids, gpus, sum(rates), rates)


def _make_table(
    table: FeatureTable, choice: _CacheChoice, copies: Sequence[CachedRows], rank: int | None = None
) -> CachedTable:
    """Return the cached table of the GPU of one rank, or of all GPUs if `rank` is None."""
    ids, own_bits, rates = choice.ids.sort().values, None, choice.own_hit_rates
    if choice.gpus > 1:
        ids_by_gpu = peer_memory.split_round_robin(choice.ids, choice.gpus)
        own_bits = make_bitmap(ids_by_gpu[rank or 0], table.num_rows)
    if rates is not None and rank is not None:
        rates = [rates[rank]]
    return CachedTable(
        **{part.name: getattr(table, part.name) for part in fields(FeatureTable)},
        cached_ids=ids,
        cached_bits=make_bitmap(ids, table.num_rows),
        copies=copies[0] if copies else None,
        predicted_hit_rate=choice.hit_rate,
        predicted_own_hit_rate=None if rates is None else sum(rates) / len(rates),
        other_copies=tuple(copies[1:]),
        gpus=choice.gpus,
        own_bits=own_bits,
    )


def num_rows_to_cache(table: FeatureTable, size: float, gpus: int = 1) -> int:
    """Return the number of rows in a cache of `size`, sharded over `gpus` GPUs.

    Args:
        table: the table to cache.
        size: a fraction of the rows as a float, or bytes of each GPU as an integer; see `cached`.
        gpus: number of GPUs.

    Raises:
        TypeError: the size is not a number.
        ValueError: a fraction is not in (0, 1], or bytes are too few for one row.
    """
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(
                f"size is a fraction {size} of the rows: it must be above 0, and 1 at most"
            )
        return min(table.num_rows, max(1, round(size * table.num_rows)))
    size = check_integer("size", size, hint="bytes as an int, or a fraction as a float")
    min_bytes = cache_bytes(table, min(1, table.num_rows))
    if size < min_bytes:
        raise ValueError(
            f"size: {size} bytes are too few for one cached row: it takes {min_bytes} bytes, which "
            f"include {SLOT_BYTES} for each of the table's {table.num_rows} rows\n\n"
            "hint: a larger size; or a fraction of the rows, such as 0.2"
        )
    slot_bytes = cache_bytes(table, 0)
    row_bytes = cache_bytes(table, 1) - slot_bytes
    return min(table.num_rows, gpus * ((size - slot_bytes) // row_bytes))


def cache_bytes(table: FeatureTable, num_cached: int, gpus: int = 1) -> int:
    """Return an upper bound of the bytes on each GPU, for `num_cached` rows on `gpus` GPUs."""
    row_bytes = table.row_bytes if table.is_sparse else padded_row_bytes(table.rows)
    return SLOT_BYTES * table.num_rows + -(-num_cached // gpus) * row_bytes


def _get_device(device: torch.device | str | None, name: str = "device") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = check_device(name, device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_devices(
    chosen: Sequence[torch.device],
    device: torch.device | str | None,
    devices: Sequence[torch.device | str] | None,
) -> None:
    have_one_type = len({each.type for each in chosen}) == 1
    gpus = [each for each in chosen if each.type == "cuda"]
    have_duplicates = len(set(gpus)) < len(gpus)
    if not have_one_type or have_duplicates or None not in (device, devices):
        raise ValueError(
            f"a cache cannot be sharded over {list(map(str, chosen))}, with device {device}"
        )


def _check_host(table: FeatureTable, device: torch.device) -> None:
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    if table.device.type != "cpu":
        raise ValueError(f"all rows of this table are on {table.device} already")
    if device.type != "cuda":
        return
    if table.is_sparse:
        raise ValueError(
            f"a cache on {device} needs dense rows, and this table is sparse\n\n"
            "hint: `with gcnzc.pinned(rows.to_dense()) as table:`, or gather on the host"
        )
    if not (table.rows.is_pinned() or table.rows.numel() == 0):
        raise ValueError(
            f"{device} cannot read the rows that are not cached, because their memory is not "
            "page-locked\n\nhint: `with gcnzc.pinned(rows) as table:`"
        )
