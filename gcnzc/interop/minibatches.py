"""What the drop-in loaders share: items become minibatches ahead of the model, epoch by epoch.

Items are what a loader iterates over, nodes or edges, by their places in the list that was given.
`gcnzc.Loader` puts them in order, shares them out to workers, counts epochs and runs the threads;
what a minibatch is made of is said by the loaders of each library.
"""

import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph import Graph
from gcnzc.interop.columns import Column
from gcnzc.interop.turns import Turns
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.loader import Batches, Loader
from gcnzc.sampler import Batch
from gcnzc.table import FeatureTable

# Arguments of torch.utils.data.DataLoader for the processes that it starts and for the memory they
# hand over. Here threads make minibatches where they are used, so these have nothing to act upon.
WITHOUT_EFFECT = (
    "in_order",
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
# and those that would change what is made, with what to do instead
REFUSED = {
    "batch_sampler": "batch_size, shuffle and drop_last; or indices in the order that is wanted",
    "collate_fn": "change each minibatch in the loop",
    "generator": "seed=..., which orders the items and draws the neighbours",
    "sampler": "shuffle; or indices in the order that is wanted, with shuffle=False",
}


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """How items become minibatches; `gcnzc.Loader` says more."""

    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    threads: int | None = None
    ahead: int | None = None
    device: torch.device = CPU


def torch_options(kwargs: dict[str, Any], who: str) -> tuple[int, dict[str, Any]]:
    """Split off what torch's DataLoader takes and a drop-in loader cannot, or need not, follow.

    Args:
        kwargs: as given to a drop-in loader.
        who: its name, for errors.

    Returns:
        `num_workers`, and what is left.

    Raises:
        ValueError: an argument of torch's that would change the minibatches, or a number of workers
            below 0.
    """
    left = {name: value for name, value in kwargs.items() if name not in WITHOUT_EFFECT}
    for name, instead in REFUSED.items():
        if left.pop(name, None) is not None:
            raise ValueError(f"{who} does not support {name}\n\nhint: {instead}")
    num_workers = left.pop("num_workers", 0)
    if num_workers < 0:
        raise ValueError(f"{num_workers} workers\n\nhint: num_workers=0 starts a thread per core")
    return num_workers, left


def generator(seed: int, epoch: int, items: Tensor) -> torch.Generator:
    """Random numbers for a minibatch: the same for the same seed, epoch and items.

    Args:
        seed: the key of every choice, an integer of 64 bits.
        epoch: in [0, 2**32).
        items: (S,) on the host.
    """
    counter = (zlib.crc32(items.contiguous().numpy().data), len(items), 0, epoch)
    words = [int(word) for word in philox4x32_reference(*counter, *split_key(seed))]
    return torch.Generator().manual_seed(words[0] << 31 | words[1] >> 1)


def sorted_places(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that occur, ascending, and the place of each of `ids` among them: `Tensor.unique`.

    By NumPy, whose sort is several times as quick in one thread.

    Args:
        ids: (S,) int64 on the host.

    Returns:
        (U,) int64 and (S,) int64.
    """
    found, places = np.unique(ids.numpy(), return_inverse=True)
    return torch.from_numpy(found), torch.from_numpy(places)


@dataclass
class Carrier(Batch):
    """A batch of `gcnzc.Loader`, with what else a minibatch of another library is made of."""

    made: Any = None


class Minibatches(ABC):
    """Minibatches of items, in the form of another library.

    Iterating gives those of one epoch, and the next iteration those of the next, also if the first
    was left early. The loader holds page-locked memory, if minibatches go to a GPU, until `close`,
    the end of a `with`, or until nobody refers to it any more.

    Args:
        graph: that neighbours are drawn from.
        items: what is iterated over, nodes or edges.
        num_items: how many there are.
        options: how they become minibatches.

    Raises:
        ValueError: as `gcnzc.Loader` does.
    """

    # threads may make several minibatches at once
    thread_safe = True

    def __init__(self, graph: Graph, items: Tensor, num_items: int, options: Options) -> None:
        self.options = options
        self.batch_size = options.batch_size
        self.drop_last = options.drop_last
        self.device = options.device
        self.dataset = range(num_items)
        # for `gcnzc.Loader`, which may put memory there that copies to a GPU are fast from
        self.num_items = num_items
        self.pool = Pool()
        self._graph = graph
        self._crc32 = zlib.crc32(items.cpu().contiguous().numpy().data)
        self._locks = ExitStack()
        self._unlock = weakref.finalize(self, self._locks.close)
        self._running: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._turns = Turns(self._opened(None))

    @property
    def threads(self) -> int:
        """Worker threads, each of which makes whole minibatches."""
        return self._turns.loader.threads

    @property
    def epoch(self) -> int:
        """Counted from 0: the one in progress, or the next."""
        return self._turns.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch at the next iteration: another order, other neighbours.

        The present one, if a state was just loaded, goes on where that state says.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        self._turns.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, as plain integers; see `gcnzc.Loader.state_dict`."""
        return self._turns.loader.state_dict() | {"items_crc32": self._crc32}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration where `state` was taken, with the same minibatches.

        Raises:
            ValueError: `state` is of a loader of other items or with other options, or of none.
        """
        if state.get("items_crc32") != self._crc32:
            raise ValueError(
                "the state is of a loader of other nodes or edges, or of none\n\n"
                "hint: resume with the items of the run that was saved"
            )
        self._turns.load_state_dict(dict(state))

    def close(self) -> None:
        """End all iterations, and let go of page-locked memory. The loader gives no more after."""
        for epoch in list(self._running):
            epoch.close()
        self._unlock()

    @contextmanager
    def enable_cpu_affinity(
        self, loader_cores: Any = None, compute_cores: Any = None, verbose: bool = True
    ) -> Iterator[None]:
        """Nothing: there are no worker processes, and threads run where the system puts them."""
        yield

    def __len__(self) -> int:
        """Minibatches of an epoch, the same for every worker."""
        return len(self._turns.loader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "Epoch":
        self._demand_open()
        self._begin()
        epoch = Epoch(self, self._turns.begin())
        self._running.add(epoch)
        return epoch

    @abstractmethod
    def sample(self, seeds: Tensor, epoch: int) -> Carrier:
        """For `gcnzc.Loader`: a minibatch of some items, on the host; many threads ask at once.

        Args:
            seeds: (S,) int64 places of the items, in [0, num_items).
            epoch: in [0, 2**32).
        """

    @abstractmethod
    def _begin(self) -> None:
        """Before an epoch: look at what may have changed."""

    @abstractmethod
    def _handed_over(self, batch: Carrier) -> Any:
        """The minibatch as the library has it, made in the caller's thread and on its stream."""

    def _read_first(self, column: Column | None) -> None:
        """Let `gcnzc.Loader` gather this column, as `batch.x`, from the next epoch on."""
        table = None if column is None else column.locked()
        loader = self._turns.loader
        if table is not loader.table:
            self._turns.loader = self._opened(table)
            self._turns.loader.load_state_dict(loader.state_dict())

    def _opened(self, table: FeatureTable | None) -> Loader:
        options = self.options
        return Loader(
            self._graph,
            table,
            torch.arange(self.num_items),
            (),
            options.batch_size,
            device=options.device,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            seed=options.seed,
            rank=options.rank,
            world_size=options.world_size,
            threads=options.threads,
            ahead=options.ahead,
            sampler=self,
            may_be_empty=True,
        )

    def _demand_open(self) -> None:
        if not self._unlock.alive:
            raise RuntimeError(
                "this loader is closed\n\nhint: make another, or iterate inside its `with`"
            )


class Epoch(Iterator[Any]):
    """The minibatches of one epoch, in order."""

    def __init__(self, owner: Minibatches, batches: Batches) -> None:
        self._owner, self._batches = owner, batches

    def __next__(self) -> Any:
        self._owner._demand_open()
        return self._owner._handed_over(cast(Carrier, next(self._batches)))

    def close(self) -> None:
        """End the threads. No more minibatches come after this."""
        self._batches.close()
