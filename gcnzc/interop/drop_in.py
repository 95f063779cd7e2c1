"""The base class of the drop-in loaders, with prefetched minibatches.

Items are the nodes or edges that a loader iterates over, as indices into the given list. The
loaders are `torch.utils.data.DataLoader`s: a sampler orders the items, a batch sampler groups them,
and tools such as Lightning and Accelerate may replace both samplers. `gcnzc.Loader` runs the
threads; the subclasses for each library make the minibatches.

Every iteration over a loader is an epoch of its own, also while others are in progress. The
samplers are subclasses of torch's `RandomSampler` and `SequentialSampler`, so that Lightning and
Accelerate recognize them and replace them by their own samplers.
"""

import operator
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import Self

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.interop.column import Column
from gcnzc.interop.options import Options, generator, seed_of
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.loader.checks import check_loader_device, default_threads
from gcnzc.loader.loader import Batches, Loader, stop_iteration_error
from gcnzc.loader.seeds import Shares, epoch_order
from gcnzc.loader.state import PARTITION, check_position, check_state
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling.batch import Batch, CopyTensors
from gcnzc.system.arguments import check_epoch, check_kind, check_seed, describe

has_warned_about_ranks = False


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size of torch's default process group.

    Raises:
        RuntimeError, ValueError: there is none.
    """
    # only gcnzc.exchange.group communicates through torch.distributed
    group: DistributedSampler[Any] = DistributedSampler(cast(Any, range(1)))
    return group.rank, group.num_replicas


def shares_of(options: Options, num_items: int) -> Shares:
    """Return the fraction of the items that a rank takes."""
    rank, world_size = options.rank, options.world_size
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank {rank} and world_size {world_size}: pass both, or neither")
    if options.has_user_sampler:
        if (world_size or 1) > 1 and not _is_distributed(options.dataloader_options):
            raise ValueError(
                f"rank {rank} and world_size {world_size} share the items among the ranks, but "
                "a sampler was given as well\n\n"
                "hint: pass a torch.utils.data.DistributedSampler, or no sampler"
            )
        rank = world_size = None
    rank, world_size = rank or 0, 1 if world_size is None else world_size
    return Shares(
        num_items,
        options.batch_size,
        rank,
        world_size,
        options.drop_last,
        may_be_empty=True,
    )


def _is_distributed(dataloader_options: Mapping[str, Any]) -> bool:
    """Whether the sampler shares the items among ranks itself."""
    sampler = dataloader_options.get("sampler") or dataloader_options["batch_sampler"]
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return isinstance(sampler, DistributedSampler)


def as_items(given: Any, num_items: int, where: str) -> Tensor:
    """Return the items of a minibatch as an int64 tensor (S,) on the host.

    They are any iterable of integers, as for torch's `DataLoader`: Python's, NumPy's, or integer
    tensors of one element. Truth values are rejected, and negative integers, which torch counts
    from the end.

    Args:
        given: indices of nodes or edges of the loader, in [0, num_items).
        num_items: the number of items of the loader.
        where: what has the items, for error messages.

    Raises:
        TypeError: `given` is not an iterable of integers; the message has the value and its
            position.
        IndexError: an index is out of range; the message has the value and its position.
    """
    try:
        values = given.tolist() if getattr(given, "ndim", 0) == 1 else list(given)
    except TypeError:
        raise TypeError(f"{where} is {describe(given)}, not a list of integers") from None
    for place, value in enumerate(values):
        if type(value) is not int:
            values[place] = value = _as_integer(value, place, where)
        if not 0 <= value < num_items:
            raise IndexError(
                f"{where} has {describe(value)} at position {place}, but the loader has "
                f"{num_items} items"
            )
    return torch.tensor(values, dtype=torch.int64)


def _as_integer(value: Any, place: int, where: str) -> int:
    # also a tensor or a NumPy number
    is_flag = str(getattr(value, "dtype", type(value).__name__)).endswith("bool")
    try:
        if not is_flag:
            return operator.index(value)
    except (TypeError, RuntimeError):
        pass
    if isinstance(value, Tensor | np.generic) and value.ndim == 0:
        value = value.item()
    raise TypeError(f"{where} has {describe(value)} at position {place}, not an integer")


T = TypeVar("T")

# `Loader` requires a graph, and uses it only for minibatches of its own samplers
NO_GRAPH = Graph.from_edges(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 1)

# by node type the name and the column of the features that `InnerLoader` gathers for a GPU
Prefetched: TypeAlias = Mapping[str, tuple[str, Column]]


@dataclass
class LibraryBatch(Batch):
    """A minibatch of `InnerLoader`, before it becomes a minibatch of the library.

    Attributes:
        by_type: node ids by node type, on the device of the minibatch.
        values: by type and name; those that are plain tensors on the host are copied to the device.
        prefetched: the features that the loader adds to `values`.
        parts: other parts, which are not copied.
    """

    by_type: Mapping[str, Tensor] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    prefetched: Prefetched = field(default_factory=dict)
    parts: Any = None

    @classmethod
    def of(
        cls, by_type: Mapping[str, Tensor], values: Any, prefetched: Prefetched, parts: Any
    ) -> Self:
        """Return a minibatch without blocks."""
        nodes = next(iter(by_type.values()), torch.empty(0, dtype=torch.int64))
        return cls(
            *(nodes, nodes[:0], ()),
            by_type=by_type,
            values=values,
            prefetched=prefetched,
            parts=parts,
        )

    @property
    def device(self) -> torch.device:
        """Device of the minibatch."""
        return self.nodes.device

    def node_ids(self) -> dict[str, Tensor]:
        """Return the ids of all nodes by node type."""
        return dict(self.by_type)

    def copy_tensors(self, nodes: Mapping[str, Tensor], copy: CopyTensors) -> Self:
        """Return a minibatch with copies of the values on the host that are plain tensors.

        Args:
            nodes: copies of `node_ids`.
            copy: returns copies of tensors of one dtype.
        """
        copies = {id(ids): nodes[kind] for kind, ids in self.by_type.items()}
        by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
        for value in self.values.values():
            is_plain = type(value) is Tensor and value.layout == torch.strided
            if is_plain and value.device.type == "cpu" and id(value) not in copies:
                by_dtype.setdefault(value.dtype, {})[id(value)] = value
        for sources in by_dtype.values():
            copies |= zip(sources, copy([*sources.values()]), strict=True)
        values = {key: copies.get(id(value), value) for key, value in self.values.items()}
        return replace(self, nodes=next(iter(nodes.values())), by_type=nodes, values=values)

    def set_features(self, x: Mapping[str, Tensor]) -> None:
        """Add the features that the loader has gathered, by node type."""
        for kind, rows in x.items():
            name, column = self.prefetched[kind]
            self.values[kind, name] = rows.view(len(rows), *column.shape)


class InnerLoader(Loader):
    """A `Loader` that gathers the features of several node types for a GPU.

    Args:
        tables: features by the node types of the minibatches.
        args, kwargs: the arguments of `Loader` after the table.
    """

    def __init__(self, tables: Mapping[str, FeatureTable], *args: Any, **kwargs: Any) -> None:
        self.tables = tables
        super().__init__(NO_GRAPH, None, *args, **kwargs)

    def with_sampler(self, sampler: Any) -> Self:
        """Return a loader with another sampler, and the same streams and memory."""
        other = share_attributes(self)
        other.sampler = sampler
        return other

    def _open_transfer(self, tables: Mapping[str, FeatureTable]) -> Transfer:
        return super()._open_transfer(self.tables)


def share_attributes(loader: T) -> T:
    """Return a loader with the same attributes; `copy.copy` would construct another."""
    other = object.__new__(type(loader))
    vars(other).update(vars(loader))
    return other


@dataclass(eq=False)
class EpochProgress:
    """The progress of one iteration over a loader."""

    epoch: int
    position: int = 0  # minibatches that were yielded, or skipped on resuming
    done: int = 0  # items of the epoch used before with another batch or world size
    num_steps: int | None = None  # minibatches of the epoch; None if its sampler has no length
    is_exhausted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether every minibatch was yielded."""
        return self.is_exhausted or self.position == self.num_steps


class EpochCounter:
    """Assigns epochs to the iterations over a loader, and tracks those in progress.

    An iteration gets its epoch when its first minibatch is requested, so an unused iterator does
    not advance the epoch.
    """

    def __init__(self) -> None:
        # the epoch of the next iteration, unless that resumes an earlier one
        self.next = 0
        # the epoch of the last direct iteration over a sampler, as another loader does
        self.of_sampler = 0
        self._resumed: deque[EpochProgress] = deque()
        self._begun: list[tuple[weakref.ref[object], EpochProgress]] = []

    @property
    def present(self) -> int:
        """The epoch of the iteration in progress that began last, or of the next one."""
        return self.unfinished()[-1].epoch

    def begin(self, iterator: object) -> EpochProgress:
        """Begin the next iteration, or resume the first remaining one of a loaded state.

        Args:
            iterator: the iterator; while it exists, the loader's state includes the iteration.
        """
        iteration = self._resumed.popleft() if self._resumed else EpochProgress(self.advance())
        living = [(ref, other) for ref, other in self._begun if ref() is not None]
        self._begun = [(ref, other) for ref, other in living if not other.is_over]
        self._begun.append((weakref.ref(iterator), iteration))
        return iteration

    def advance(self) -> int:
        """Return the next epoch, and advance.

        Raises:
            ValueError: the epoch would be 2**32 or above.
        """
        check_epoch("epoch", self.next)
        self.next += 1
        return self.next - 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; if a loaded state is in that epoch, resume it.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        check_epoch("epoch", epoch)
        if self._resumed and self._resumed[0].epoch == epoch:
            return
        self._resumed.clear()
        self._begun.clear()
        self.next = epoch

    def unfinished(self) -> list[EpochProgress]:
        """Return the iterations of a state, at least one, in the order in which they began.

        These are the iterations in progress and those that are still to be resumed, or else the
        next one. An iteration whose iterator was deleted is in progress until another begins.
        """
        begun = [iteration for _, iteration in self._begun if not iteration.is_over]
        return [*begun, *self._resumed] or [EpochProgress(self.next)]

    def resume(self, iterations: list[EpochProgress]) -> None:
        """Let the next iterations resume these."""
        self._begun.clear()
        self._resumed = deque(iterations)
        self.next = iterations[-1].epoch + 1


class ShuffledItems(RandomSampler):
    """Samples all items of a loader, in another order each epoch.

    Direct iteration over the sampler, as by Accelerate's loaders, advances the epoch. If
    `generator` is set, as Accelerate does to have the same order on all ranks, it decides the
    order.

    Args:
        num_items: the number of items, at least 1.
        seed: the random seed of the order.
        epochs: the epochs of the loader.
    """

    def __init__(self, num_items: int, seed: int, epochs: EpochCounter) -> None:
        super().__init__(range(num_items))
        self.seed = seed
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """Return the indices of the items in the order of an epoch, (N,) int64 on the host."""
        return epoch_order(torch.arange(len(self)), self.seed, epoch)

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = epoch = self._epochs.advance()
        if self.generator is not None:
            return super().__iter__()
        return iter(self.items(epoch).tolist())


class OrderedItems(SequentialSampler):
    """Samples all items of a loader in the order in which they were given.

    Args:
        num_items: the number of items.
        epochs: the epochs of the loader.
    """

    def __init__(self, num_items: int, epochs: EpochCounter) -> None:
        super().__init__(range(num_items))
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of the loader."""
        self._epochs.set_epoch(epoch)

    def items(self, epoch: int) -> Tensor:
        """Return the indices of the items, (N,) int64 on the host."""
        return torch.arange(len(self))

    def __iter__(self) -> Iterator[int]:
        self._epochs.of_sampler = self._epochs.advance()
        return super().__iter__()


class DropInLoader(DataLoader[Any], ABC):
    """The base class of drop-in loaders, which yield minibatches of another library.

    Each iteration yields the minibatches of another epoch, also if the previous one was stopped
    early or is still in progress; `gcnzc.Loader` instead starts a stopped epoch again. If
    minibatches go to a GPU, the loader holds page-locked memory until `close`, the end of a `with`,
    or the end of its last reference.

    Args:
        items: the nodes or edges to iterate over.
        num_items: the number of items.
        options: see `Options`.

    Raises:
        ValueError: see `gcnzc.Loader` and torch's `DataLoader`.
    """

    # several threads may call `sample` at the same time
    thread_safe = True
    # attributes that are copied with the loader, since they may be replaced between epochs
    _replaceable: tuple[str, ...] = ()
    # precedes the arguments in a pickle, so that the library is imported before they are unpickled
    _library: Any = None
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the arguments, with which copies are constructed."""
        loader = super().__new__(cls)
        loader._arguments = args, kwargs
        return loader

    def __init__(self, items: Tensor, num_items: int, options: Options) -> None:
        self.options = options
        # the arguments as given: Lightning reads these attributes to reconstruct the loader
        self.seed, self.rank, self.world_size = options.seed, options.rank, options.world_size
        self._shares = shares_of(options, num_items)
        self._seed = seed_of(options)
        self._epochs = EpochCounter()
        self._init_torch_loader(num_items)
        self.device = check_loader_device(options.device, {}, 0.0)
        # read by `gcnzc.Loader`, which may add page-locked memory to the pool for copies to a GPU
        self.num_items = num_items
        self.pool = Pool()
        self._crc32 = zlib.crc32(items.cpu().contiguous().numpy().data)
        self._locks = ExitStack()
        self._unlock = weakref.finalize(self, self._locks.close)
        self._running: weakref.WeakSet[MinibatchIterator] = weakref.WeakSet()
        # held while attributes are read
        self._refreshing = ForkSafeLock()
        self.threads = options.threads
        if options.threads is None:
            self.threads = options.num_workers or default_threads(self._shares.world_size)
        self.ahead = options.ahead
        self._loader = self._open_loader({})

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one; counted from 0."""
        return self._epochs.present

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which decides its order and its neighbours.

        If a state of this epoch was just loaded, the next iteration resumes at its position.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values, for a loader with the same arguments.

        The minibatch that was yielded last counts as used. If several iterations are in progress,
        "interleaved" lists the epoch, position and number of items used before, of all but the
        first.
        """
        first, *others = self._epochs.unfinished()
        state: dict[str, Any] = {"epoch": first.epoch, "position": first.position}
        state |= {"done": first.done, "seed": self._seed, "items_crc32": self._crc32}
        state |= self._checked_settings() | self._share_state()
        if others:
            state["interleaved"] = [[each.epoch, each.position, each.done] for each in others]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the iterations of `state`, with the same minibatches.

        A loader that was given no seed uses that of the state. With another number of ranks or
        batch size, the unused items of the epoch are shared anew.

        Raises:
            TypeError: `state` is not a mapping, or one of its values has another type.
            ValueError: `state` is of a loader with other items or options, or not of a loader.
        """
        check_kind("state", state, Mapping, "pass the result of a loader's state_dict()")
        if state.get("items_crc32") != self._crc32:
            raise ValueError("the state is of a loader of other nodes or edges, or of none")
        own = self._checked_settings()
        if self.options.seed is not None:
            own["seed"] = self.options.seed
        interleaved = [
            dict(zip(("epoch", "position", "done"), numbers, strict=True))
            for numbers in _interleaved(state)
        ]
        checked = [
            check_state({**state, **numbers}, own, self.num_items) for numbers in ({}, *interleaved)
        ]
        seed = check_seed("state['seed']", state.get("seed"))
        iterations = [self._convert_iteration(numbers) for numbers in checked]
        unfinished = [iteration for iteration in iterations if not iteration.is_over]
        self._epochs.resume(unfinished or [EpochProgress(iterations[-1].epoch + 1)])
        self._set_seed(seed)

    def close(self) -> None:
        """End all iterations, and free page-locked memory; the loader cannot be used afterwards."""
        for epoch in list(self._running):
            epoch.close()
        self._unlock()

    @contextmanager
    def enable_cpu_affinity(
        self, loader_cores: Any = None, compute_cores: Any = None, verbose: bool = True
    ) -> Iterator[None]:
        """Do nothing: there are no worker processes, and threads have no CPU affinity."""
        yield

    def check_worker_number_rationality(self) -> None:
        """Do nothing: threads load the minibatches, and any number of them is valid."""

    def collate_fn(self, index: Tensor | Sequence[int]) -> Any:
        """Return the minibatch of some items, on the host.

        For loaders that use this loader's dataset or samplers, such as Accelerate's and PyG's
        `ZipLoader`. Without `seed`, neighbours depend on torch's random numbers, as in PyG, so that
        they differ between epochs even if the other loader does not set the epoch. With `seed`,
        they depend on the seed, the epoch of the sampler and the items.

        Args:
            index: (S,) indices of the items, in [0, len(self.dataset)).

        Raises:
            TypeError: an index is not an integer.
            IndexError: an index is out of range.
        """
        items = as_items(index, self.num_items, "index")
        numbers = None
        if self.options.seed is not None:
            # a worker process has a copy of this loader from before the sampler's epoch began
            is_copy = get_worker_info() is not None
            epoch = self._epochs.present if is_copy else self._epochs.of_sampler
            numbers = generator(self._seed, epoch, items)
        return self._sample_on_host(items, int(torch.randint(2**32, (), generator=numbers)))

    def __len__(self) -> int:
        """Return the number of minibatches of an epoch, the same on every rank."""
        if self.options.has_user_sampler or self._shares.world_size == 1:
            return super().__len__()
        return len(self._shares)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support pickle and deepcopy: the copy has the same arguments and the same position.

        Threads, page-locked memory and iterators are not copied.
        """
        replaced = {name: getattr(self, name) for name in self._replaceable}
        return _construct, (
            self._library,
            type(self),
            *self._arguments,
            replaced,
            self.state_dict(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "MinibatchIterator":  # type: ignore[override]
        self._check_open()
        with self._refreshing:
            self._refresh_attributes()
        epoch = MinibatchIterator(self)
        self._running.add(epoch)
        return epoch

    def _get_iterator(self) -> Any:
        # torch's would start worker processes
        return iter(self)

    @abstractmethod
    def sample(self, seeds: Tensor, epoch: int) -> LibraryBatch:
        """Sample a minibatch of some items on the host, for `gcnzc.Loader`; called by many threads.

        Args:
            seeds: (S,) int64 indices of the items, in [0, num_items).
            epoch: in [0, 2**32).
        """

    @abstractmethod
    def _refresh_attributes(self) -> None:
        """Read the attributes, and what else may have changed, for the next epoch.

        One thread at a time calls it, also if iterators are used in several threads.
        """

    @abstractmethod
    def _finish_minibatch(self, batch: LibraryBatch) -> Any:
        """Return the library's minibatch, built in the caller's thread and on its stream."""

    def _sample_on_host(self, items: Tensor, epoch: int) -> Any:
        """Return the library's minibatch of some items on the host, sampled synchronously."""
        self._check_open()
        batch = self.sample(items, epoch)
        for kind, (name, column) in batch.prefetched.items():
            batch.values[kind, name] = column.gather_on_device(batch.by_type[kind])
        return self._finish_minibatch(batch)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed
        if isinstance(self.sampler, ShuffledItems):
            self.sampler.seed = seed

    def _start(self, iterator: "MinibatchIterator") -> tuple[EpochProgress, Batches, Self]:
        """Begin an epoch; return its progress, its batches, and what makes minibatches of them."""
        with self._refreshing:
            # `__iter__` does this too, to raise errors early; the data may have changed since
            self._refresh_attributes()
            # the loader as it is now: later epochs may have other attributes of the data
            maker = share_attributes(self)
        iteration = self._epochs.begin(iterator)
        self._warn_of_repeated_items()
        steps = self._steps(iteration)
        batches = maker._loader.with_sampler(maker).batches_of(steps, iteration.epoch)
        return iteration, batches, maker

    def _steps(self, iteration: EpochProgress) -> Iterator[Tensor]:
        begin = iteration.position
        sampler = self.sampler
        if self.options.has_user_sampler:
            iteration.num_steps = _length_of(self._index_sampler)
            groups = islice(enumerate(self._index_sampler), begin, None)
            has_groups = self.options.dataloader_options.get("batch_sampler") is not None
            orderer = "batch_sampler" if has_groups else "sampler"
            return (
                as_items(group, self.num_items, f"minibatch {number} of {orderer}")
                for number, group in groups
            )
        assert isinstance(sampler, ShuffledItems | OrderedItems), "no sampler was given"
        shares = replace(self._shares, seeds_done=iteration.done)
        iteration.num_steps = len(shares)
        items = sampler.items(iteration.epoch)
        return (items[shares.seed_range(step)] for step in range(begin, len(shares)))

    def _set_prefetched(self, prefetched: Prefetched) -> None:
        """Set the features that the loader gathers for a GPU from the next epoch on."""
        tables = {kind: column.table for kind, (_, column) in prefetched.items() if column.table}
        last = self._loader.tables
        if tables.keys() != last.keys() or any(tables[name] is not last[name] for name in tables):
            self._loader = self._open_loader(tables)

    def _open_loader(self, tables: Mapping[str, FeatureTable]) -> InnerLoader:
        # `_steps` determines the items of each batch; the seeds given to `Loader` are not used
        return InnerLoader(
            tables,
            torch.arange(self.num_items),
            (),
            1,
            device=self.device,
            threads=self.threads,
            ahead=self.ahead,
            sampler=self,
            may_be_empty=True,
        )

    def _init_torch_loader(self, num_items: int) -> None:
        options = self.options
        given = dict(options.dataloader_options)
        if not options.has_user_sampler:
            is_shuffled = options.shuffle and num_items > 0
            given["sampler"] = (
                ShuffledItems(num_items, self._seed, self._epochs)
                if is_shuffled
                else OrderedItems(num_items, self._epochs)
            )
        DataLoader.__init__(
            self,
            cast(Dataset[Any], range(num_items)),
            batch_size=self._shares.batch_size,
            # torch rejects shuffle=True with a user's sampler
            shuffle=options.shuffle and options.has_user_sampler,
            drop_last=options.drop_last,
            num_workers=options.num_workers,
            collate_fn=self.collate_fn,
            **given,
        )
        # the method suffices, and Lightning would pass the attribute to the loader that it rebuilds
        del self.__dict__["collate_fn"]

    def _checked_settings(self) -> dict[str, Any]:
        """Return the settings that must be equal in a state, besides the seed."""
        options = self.options
        return {
            "num_items": self.num_items,
            "shuffle": int(options.shuffle),
            "drop_last": int(options.drop_last),
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that determine the sampled neighbours, by name, as plain values."""
        return {}

    def _share_state(self) -> dict[str, int]:
        return {name: getattr(self._shares, name) for name in PARTITION}

    def _convert_iteration(self, numbers: Mapping[str, int]) -> EpochProgress:
        """Return an iteration of a state, converted to this loader's batch size and world size."""
        iteration = EpochProgress(numbers["epoch"], numbers["position"], numbers["done"])
        own = self._share_state()
        saved = {name: numbers[name] for name in PARTITION}
        if self.options.has_user_sampler:
            if saved != own:
                raise ValueError(
                    f"the state is of a loader with batch size {saved['batch_size']} and "
                    f"{saved['world_size']} ranks, not {own['batch_size']} and "
                    f"{own['world_size']}, and a sampler orders the items\n\n"
                    "hint: resume with the options of the run that was saved"
                )
            iteration.num_steps = num_steps = _length_of(self._index_sampler)
        else:
            before = self._shares.resumed(iteration.done, **saved)
            num_steps = len(before)
        check_position(iteration.position, num_steps)
        if self.options.has_user_sampler:
            return iteration
        if saved != own:
            iteration = EpochProgress(iteration.epoch, 0, before.step_start(iteration.position))
        iteration.num_steps = len(replace(self._shares, seeds_done=iteration.done))
        return iteration

    def _warn_of_repeated_items(self) -> None:
        global has_warned_about_ranks
        options = self.options
        if has_warned_about_ranks or options.has_user_sampler or options.world_size is not None:
            return
        try:
            _, world_size = rank_and_world_size()
        except (RuntimeError, ValueError):
            return
        if world_size > 1:
            has_warned_about_ranks = True
            warnings.warn(
                f"torch.distributed has {world_size} ranks, but this loader yields all "
                f"{self.num_items} items on each of them, since neither rank nor world_size was "
                "given\n\n"
                "hint: rank=dist.get_rank(), world_size=dist.get_world_size() share the items "
                "among the ranks; rank=0, world_size=1, if these are this rank's share already",
                stacklevel=4,
            )

    def _check_open(self) -> None:
        if not self._unlock.alive:
            raise RuntimeError("this loader is closed")


class MinibatchIterator(Iterator[Any]):
    """Iterator over the minibatches of one epoch, in order.

    The request for the first minibatch determines the epoch.
    """

    def __init__(self, owner: DropInLoader) -> None:
        self._owner = owner
        self._started: tuple[EpochProgress, Batches, DropInLoader] | None = None
        self._is_closed = False
        # held by the thread that waits for the next minibatch
        self._turn = ForkSafeLock()

    def __next__(self) -> Any:
        self._owner._check_open()
        with self._turn:
            batch, maker = self._next_batch()
        try:
            return maker._finish_minibatch(batch)
        except StopIteration as error:
            raise stop_iteration_error("transform") from error

    def _next_batch(self) -> tuple[LibraryBatch, DropInLoader]:
        if self._is_closed:
            raise StopIteration
        if self._started is None:
            self._started = self._owner._start(self)
        iteration, batches, maker = self._started
        try:
            batch = next(batches)
        except StopIteration:
            iteration.is_exhausted = True
            # frees the data of this epoch
            self._is_closed, self._started = True, None
            raise
        iteration.position += 1
        return cast(LibraryBatch, batch), maker

    def close(self) -> None:
        """End the threads; the iterator yields no more minibatches."""
        self._is_closed = True
        started, self._started = self._started, None
        if started is not None:
            started[1].close()


def _construct(
    _library: Any,
    cls: type[DropInLoader],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replaced: dict[str, Any],
    state: dict[str, Any],
) -> DropInLoader:
    loader = cls(*args, **kwargs)
    for name, value in replaced.items():
        setattr(loader, name, value)
    loader.load_state_dict(state)
    return loader


def _interleaved(state: Mapping[str, Any]) -> list[Any]:
    """Return epoch, position and number of used items of a state's other iterations."""
    found = state.get("interleaved", ())
    lists = isinstance(found, list | tuple) and all(
        isinstance(each, list | tuple) for each in found
    )
    if not lists or any(len(each) != 3 for each in found):
        raise ValueError("state['interleaved'] is not a list of lists of three integers")
    return list(found)


def _length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None
