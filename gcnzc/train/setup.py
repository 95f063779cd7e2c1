"""Build the parts of a run from its options: device, feature table, cache and loader."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gcnzc.datasets.source import describe_gap, describe_missing
from gcnzc.exchange import Algorithm, Group
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather_scalar, all_gather_text
from gcnzc.features.access_counts import Presample
from gcnzc.features.cache import (
    DEFAULT_CACHED_FRACTION,
    CachedShare,
    CachedTable,
    cached,
    cached_share,
)
from gcnzc.features.peer_memory import Handle
from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.loader.loader import Loader
from gcnzc.loader.presampling import Progress, presample
from gcnzc.train.config import LoadingOptions, TrainConfig
from gcnzc.train.errors import Interrupted
from gcnzc.train.hetero.data import HeteroDataset, TypedTables, open_tables
from gcnzc.train.precision import AUTOCAST_DTYPES
from gcnzc.train.shared_data import share_copy
from gcnzc.train.state import Run
from gcnzc.train.tasks.base import Task
from gcnzc.train.values import parse_share
from gcnzc.tune import profiles

CachePolicy: TypeAlias = Literal["presampled", "in-degree"]


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of this worker; a GPU also becomes the current CUDA device.

    Args:
        name: `auto`, `cpu` or `cuda`; auto is CUDA if there is a GPU.
        local_rank: of this worker on its machine, whose workers use its GPUs in turn.

    Raises:
        ValueError: `name` is cuda, and there is no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA device\n\n"
            "hint: `gcnzc check` shows what is missing; --device cpu trains on the CPU"
        )
    if name == "cuda":
        # the first worker uses the current device, which the caller may have set
        count, current = torch.cuda.device_count(), torch.cuda.current_device()
        index = local_rank % count if local_rank else current
        torch.cuda.set_device(index)
        return torch.device(name, index)
    return torch.device(name)


@contextmanager
def feature_table(
    data: Dataset, where: str, device: torch.device, group: Group
) -> Iterator[FeatureTable]:
    """Provide the feature table of a run, in the memory that --features chooses.

    Args:
        data: the graph, the same on all workers.
        where: `device` for a copy in device memory; otherwise host memory, page-locked for CUDA.
        device: the device that gathers rows.
        group: all workers; those of a machine share one copy if the driver needs a copy.

    Raises:
        ValueError: the graph has no features, or features with 0 columns.
        RuntimeError, WorkerLost: as `gcnzc.pinned` and `gcnzc.train.shared_data.share_copy` do.
    """
    if data.table is None or data.table.num_columns == 0:
        found = "no features" if data.table is None else "features of 0 columns, nothing"
        raise ValueError(
            f"{data.name} has {found} to train on\n\n"
            f"hint: `gcnzc prepare {data.folder} DEST --embed 64` computes features from the edges"
        )
    if where == "device" or data.table.is_sparse:
        yield data.table.to(device)
    else:
        with pinned(share_copy(data.table, group)) as table:
            yield table


def cached_table(
    loading: LoadingOptions,
    data: Dataset,
    table: FeatureTable,
    device: torch.device,
    group: Group,
    progress: Progress | None,
    share: float | None,
    *,
    size: str = "auto",
    policy: CachePolicy = "presampled",
    sharded: bool = False,
) -> CachedTable:
    """Put the feature cache of a run in front of its feature table.

    Args:
        loading: options of the run.
        data: the graph.
        table: features of the graph; within `gcnzc.pinned` for a GPU.
        device: the device that gathers rows, and has the cache.
        group: all workers.
        progress: called with (done, total) while accesses are counted.
        share: fraction of the rows to cache if `size` is auto; None for the default.
        size: a fraction of the rows, or bytes such as 2GB; auto: that of the tuning profile, or
            0.2.
        policy: rows in the cache: those that presampled minibatches read most often, or those of
            the highest in-degree.
        sharded: shard one cache over the GPUs of a machine, which read each other's rows; without
            it, each GPU has a copy of all cached rows. A fraction in `size` refers to all GPUs
            together; bytes are per GPU.

    Raises:
        ValueError: the cache would have no row, or the device cannot read rows on the host.
        RuntimeError: the GPUs of a sharded cache cannot read each other's memory.
    """
    graph = data.graph
    ranking: Tensor | Presample = graph.in_degrees()
    if policy == "presampled":
        assert isinstance(loading.batch_size, int), "TrainConfig has checked"
        ranking = presample(
            graph,
            data.split["train"],
            loading.fanouts,
            loading.batch_size,
            seed=loading.seed,
            threads=loading.threads or None,
            progress=progress,
        )
    amount = share or DEFAULT_CACHED_FRACTION
    if size != "auto":
        amount = parse_share(size, "size of --features cached", "of the rows")
    if not sharded or group.local_world_size == 1:
        return cached(table, amount, ranking, device=device)
    rank, world_size = group.local_rank, group.local_world_size
    own = cached_share(table, amount, ranking, rank=rank, world_size=world_size, device=device)
    return run_algorithm(_join(own, group.rank - rank), group)


def _join(own: CachedShare, first: int) -> Algorithm[CachedTable]:
    """Exchange the handles of a sharded cache; `first` is the first rank of this machine."""
    texts = yield from all_gather_text(own.handle.to_text())
    return own.join(
        [Handle.from_text(text) for text in texts[first : first + own.handle.world_size]]
    )


def apply_profile(
    config: TrainConfig, table: FeatureTable, device: torch.device, say: Callable[[str], object]
) -> tuple[FeatureTable, dict[str, Any], float | None]:
    """Read the tuning profile of this machine and table, for the options that `config` leaves open.

    It affects the speed of a run, but not its results.

    Args:
        config: options of the run.
        table: feature table of the run.
        device: the device of the minibatches.
        say: called with a message if there is a profile.

    Returns:
        The table with its kernel configuration, arguments of the loader, and the fraction of the
        rows to cache; None if there is no profile.
    """
    loading: dict[str, Any] = {}
    is_tuned = config.loading.tuning_profile and not config.is_full_batch
    found = profiles.find(device, table, say) if is_tuned else None
    if found is None:
        return table, loading, None
    # the best look-ahead depends on the number of threads, and both depend on the sampler
    if not config.loading.threads and config.loading.sampler == "gcnzc":
        loading = {"threads": found.value("threads"), "ahead": found.value("ahead")}
    share = found.value("copied_share")
    # it was measured without a feature cache
    if share and config.loading.features.name != "cached":
        loading["copied_share"] = share
    say(f"tuning profile of {found.made[:10]}: {found.summary()}; --no-tuning-profile ignores it")
    table = replace(table, kernel_config=found.kernel_config)
    return table, loading, found.cache_share(table.num_rows)


def open_features(run: Run, stack: ExitStack) -> tuple[FeatureTable | TypedTables, dict[str, Any]]:
    """Provide the features of a run, and arguments of its loader, until `stack` is closed.

    Raises:
        ValueError, RuntimeError, WorkerLost: as `feature_table`, `cached_table` and `open_tables`
            do.
    """
    config, data, device, group = run.config, run.data, run.device, run.group
    if isinstance(data, HeteroDataset):
        return stack.enter_context(open_tables(data.table, device, group)), {}
    features = config.loading.features
    table = stack.enter_context(feature_table(data, features.name, device, group))
    table, loading, share = apply_profile(config, table, device, run.reporter.say)
    if features.name != "cached":
        return table, loading
    with run.reporter.task("count feature accesses") as advance:
        cache: CachedTable = features.load()(
            config.loading, data, table, device, group, advance, share, **features.given
        )
    if cache.gpus > 1:
        stack.push(_make_barrier(group, device))
    return cache, loading


def _make_barrier(group: Group, device: torch.device) -> Callable[..., None]:
    """Return an exit callback that waits until no worker reads the sharded cache any more.

    Each worker frees its share of the cache afterwards. After an error the callback does not wait;
    the other workers then fail as well.
    """

    def wait_for_all(kind: type[BaseException] | None, *details: object) -> None:
        if kind is None or issubclass(kind, Interrupted):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            run_algorithm(all_gather_scalar(0), group)

    return wait_for_all


def build_loader(
    config: TrainConfig,
    data: Dataset | HeteroDataset,
    task: Task,
    table: FeatureTable | TypedTables,
    device: torch.device,
    group: Group,
    loading: Mapping[str, Any],
    parts: Tensor | None,
) -> Loader | FullBatchLoader:
    """Build the loader of the training minibatches, or of the whole graph.

    Args:
        config: options of the run.
        data: the graph.
        task: training task, which has the seeds, their labels and the sampler.
        table: feature table of the run.
        device: the device of the minibatches.
        group: all workers, each of which loads its part of every minibatch.
        loading: arguments of the loader that affect its speed, see `apply_profile`.
        parts: with --seed-order local, those of `gcnzc.train.seed_parts.find_parts`.
    """
    shared: dict[str, Any] = {
        "device": device,
        "seed": config.loading.seed,
        "rank": group.rank,
        "world_size": group.world_size,
        "seed_order": config.loading.seed_order,
        "threads": config.loading.threads or None,
        **loading,
    }
    size, seeds, labels = config.loading.batch_size, task.seeds, task.labels
    if isinstance(data, HeteroDataset):
        assert isinstance(table, TypedTables), "both are of a heterogeneous graph"
        assert isinstance(size, int), "TrainConfig has checked"
        shared["sampler"] = task.sampler
        if labels is None:
            # of edges, which the sampler has; before the run has a folder
            task.sampler.check_negatives()
            return Loader(task.sampler.graph, table.tables, seeds, (), size, **shared)
        own, typed = labels[seeds], (data.target, seeds)
        return Loader(data.graph, table.tables, typed, (), size, labels=own, **shared)
    assert isinstance(table, FeatureTable), "both are of a graph of one type"
    if not isinstance(size, int):
        # the features of each step are then converted once
        dtype = AUTOCAST_DTYPES.get(config.training.precision, torch.float32)
        return FullBatchLoader(
            data.graph, table, seeds, config.layers, labels=labels, device=device, dtype=dtype
        )
    return Loader(
        data.graph,
        table,
        seeds,
        list(config.loading.fanouts),
        size,
        labels=labels,
        sampler=task.sampler,
        in_degrees=config.model.model.name in ("gcn", "gin"),
        parts=parts,
        **shared,
    )


def describe_labels(data: Dataset | HeteroDataset, is_stored: bool) -> list[str]:
    """Return what the user may not expect of the labels of a run.

    Args:
        data: the graph.
        is_stored: it is a prepared folder; loading other graphs reports classes that are far apart.
    """
    if isinstance(data, HeteroDataset) and not data.target:
        return []
    found, labels = [describe_missing(data.labels.numpy())], data.labels
    if is_stored and labels.ndim == 1 and data.names.classes is None:
        # a stored number of classes may be that of the source
        known = labels[torch.cat(list(data.split.values()))]
        if len(known) and data.num_classes == int(known.max()) + 1:
            found += [f"warning: {gap}" for gap in [describe_gap(known.numpy())] if gap]
    return [message for message in found if message]
