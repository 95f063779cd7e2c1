"""The parts of a run, built from its options: table, model, optimizer, sampler, device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Group, run
from gcnzc.exchange.sync import all_gather_text
from gcnzc.features.access_counts import Presample
from gcnzc.features.cache import (
    DEFAULT_CACHED_SHARE,
    CachedShare,
    CachedTable,
    cached,
    cached_share,
)
from gcnzc.features.peer_memory import Handle
from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.presampling import Progress, presample
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import parse_cache_size
from gcnzc.train.shared_data import share_copy
from gcnzc.tune import profiles


def choose_device(asked: str, place: int = 0) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine; a GPU with its index.

    Args:
        asked: one of these.
        place: of this worker among those of its machine, who share its GPUs.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA device here\n\n"
            "hint: `gcnzc check` says what is missing; --device cpu trains without one"
        )
    if asked == "cuda":
        # the caller's own device unless other workers of this machine take others
        number = place % torch.cuda.device_count() if place else torch.cuda.current_device()
        torch.cuda.set_device(number)
        return torch.device(asked, number)
    return torch.device(asked)


@contextmanager
def feature_table(
    data: Dataset, where: str, device: torch.device, group: Group
) -> Iterator[FeatureTable]:
    """The features of `data` on the host, page-locked where there is CUDA, or on the device.

    Args:
        data: the same on all workers.
        where: `device`, or anything else for the host.
        device: that reads them.
        group: of all workers, those of a machine share a copy where the driver demands one.

    Raises:
        ValueError: the graph has no features, or features of no columns.
        RuntimeError, WorkerLost: as `gcnzc.pinned` and `gcnzc.train.shared_data.share_copy` do.
    """
    if data.table is None or data.table.num_columns == 0:
        found = "no features" if data.table is None else "features of 0 columns, nothing"
        raise ValueError(
            f"{data.name} has {found} to train on\n\n"
            f"hint: `gcnzc embed {data.folder} DEST` makes some from its edges"
        )
    if where == "device" or data.table.is_sparse:
        yield data.table.to(device)
    else:
        with pinned(share_copy(data.table, group)) as table:
            yield table


def cached_table(
    config: TrainConfig,
    data: Dataset,
    table: FeatureTable,
    device: torch.device,
    group: Group,
    progress: Progress | None = None,
    share: float | None = None,
) -> CachedTable:
    """`table` with the hot rows that `config` asks for, which the workers of a machine may split.

    Args:
        config: the run's.
        data: its graph.
        table: its features, inside `gcnzc.pinned` for a GPU.
        device: that gathers.
        group: of all workers.
        progress: of the counting, called with (done, total).
        share: of the rows to keep there, if `config` leaves it open.

    Raises:
        ValueError: the hot set holds no row, or the device cannot read the others on the host.
        RuntimeError: GPUs that are to split the set cannot read each other's memory.
    """
    graph = data.graph
    ranking: Tensor | Presample = graph.in_degrees()
    if config.cache_policy == "presampled":
        ranking = presample(
            graph,
            data.split["train"],
            config.fanouts,
            config.batch_size,
            seed=config.seed,
            threads=config.threads or None,
            progress=progress,
        )
    size = (
        (share or DEFAULT_CACHED_SHARE)
        if config.cache_size == "auto"
        else parse_cache_size(config.cache_size)
    )
    if not config.cache_sharded or group.local_world_size == 1:
        return cached(table, size, ranking, device=device)
    rank, world_size = group.local_rank, group.local_world_size
    own = cached_share(table, size, ranking, rank=rank, world_size=world_size, device=device)
    return run(_join(own, group.rank - rank), group)


def _join(own: CachedShare, first: int) -> Algorithm[CachedTable]:
    """The table that reads what all workers of this machine have, of whom `first` is the first."""
    texts = yield from all_gather_text(own.handle.to_text())
    return own.join(
        [Handle.from_text(text) for text in texts[first : first + own.handle.world_size]]
    )


@dataclass(frozen=True)
class Planned:
    """What a run takes from the plan of its machine and table."""

    table: FeatureTable  # read as the plan says
    loading: dict[str, Any]  # arguments of `Loader`, those of the command line among them
    hot: float | None  # the share of the rows to keep on the GPU


def planned(
    config: TrainConfig, table: FeatureTable, device: torch.device, say: Callable[[str], object]
) -> Planned:
    """What the plan that was kept for this machine and table says, where `config` leaves it open.

    No bit of a minibatch depends on it.

    Args:
        config: the run's.
        table: the run's, as it lies.
        device: that gets the minibatches.
        say: told which plan is used, if one is.
    """
    loading: dict[str, Any] = {"threads": config.threads or None}
    found = profiles.find(device, table, say) if config.tuning_profile else None
    if found is None:
        return Planned(table, loading, None)
    # how far ahead pays goes with the threads, and both with the engine that draws
    if not config.threads and config.sampler == "gcnzc":
        loading |= {"threads": found.value("threads"), "ahead": found.value("ahead")}
    share = found.value("copied_share")
    # measured of all rows, of which hot ones leave others
    if share and config.features != "cached":
        loading["copied_share"] = share
    say(f"plan of {found.made[:10]}: {found.told()}; --no-tuning-profile leaves it aside")
    return Planned(replace(table, way=found.way), loading, found.hot(table.num_rows))
