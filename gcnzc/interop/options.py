"""Arguments that drop-in loaders share with torch's DataLoader."""

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gcnzc.features.table import FeatureTable
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.system.arguments import (
    THREADS_LIMIT,
    check_device,
    check_flag,
    check_integer,
    check_kind,
    check_seed,
)

# Arguments of torch.utils.data.DataLoader about its worker processes and the memory of their
# results. They have no effect here, since threads make the minibatches in the training process.
# Accelerate's loaders, which replace these loaders, use them.
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


# arguments that decide which items a minibatch has
ORDERING = ("sampler", "batch_sampler", "generator")


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """The options of a drop-in loader; see `gcnzc.Loader`."""

    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    # None: drawn from torch's random generator, or 0 with several ranks, which need the same order
    seed: int | None = None
    rank: int | None = None
    world_size: int | None = None
    num_workers: int = 0
    threads: int | None = None
    ahead: int | None = None
    device: torch.device = CPU
    # other arguments of torch's DataLoader
    dataloader_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the types and ranges that do not depend on the items.

        Raises:
            TypeError, ValueError: the message names the argument.
        """
        for name, check in (
            ("shuffle", check_flag),
            ("drop_last", check_flag),
            ("seed", check_seed),
            ("rank", partial(check_integer, least=0)),
            ("world_size", partial(check_integer, least=1)),
            ("threads", partial(check_integer, least=1, most=THREADS_LIMIT)),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
        if self.dataloader_options.get("generator") is not None:
            check_kind("generator", self.dataloader_options["generator"], torch.Generator)

    @property
    def has_user_sampler(self) -> bool:
        """Whether `sampler` or `batch_sampler` was given, which then orders the items."""
        return any(
            self.dataloader_options.get(name) is not None for name in ("sampler", "batch_sampler")
        )


def make_options(loader_name: str, kwargs: Mapping[str, Any], **own: Any) -> Options:
    """Return the options of a loader.

    Args:
        loader_name: for error messages.
        kwargs: arguments of torch's `DataLoader`.
        own: other fields of `Options`.

    Raises:
        TypeError: an argument is unknown or has a wrong type.
        ValueError: an argument is out of range or not supported.
    """
    rest = {"num_workers": 0, "batch_size": 1, "shuffle": False, "drop_last": False, **kwargs}
    # set by Lightning when it reconstructs a loader; PyG's loaders ignore `collate_fn` too
    rest.pop("dataset", None)
    rest.pop("collate_fn", None)
    given = {name: rest.pop(name) for name in (*WITHOUT_EFFECT, *ORDERING) if name in rest}
    # older versions of torch lack some
    known = inspect.signature(DataLoader.__init__).parameters
    sizes = {name: rest.pop(name) for name in ("batch_size", "shuffle", "drop_last")}
    num_workers = check_integer("num_workers", rest.pop("num_workers"), 0, THREADS_LIMIT)
    if rest:
        raise TypeError(f"{loader_name} has no argument {', '.join(sorted(rest))}")
    if sizes["batch_size"] is None:
        raise ValueError(f"{loader_name} does not support batch_size=None\n\nhint: batch_size=1")
    return Options(
        **sizes | {"shuffle": False if sizes["shuffle"] is None else sizes["shuffle"]},
        **own | {"device": check_device("device", own["device"])},
        num_workers=num_workers,
        dataloader_options={name: given[name] for name in given if name in known},
    )


def check_tables(tables: Any) -> None:
    """Check that `tables` is None or a mapping from names to `FeatureTable`s.

    Raises:
        TypeError: it is not.
    """
    if tables is None:
        return
    check_kind("tables", tables, Mapping)
    for name, table in tables.items():
        check_kind(f"tables[{name!r}]", table, FeatureTable)


def generator(seed: int, epoch: int, items: Tensor) -> torch.Generator:
    """Return a random generator for a minibatch, which depends on seed, epoch and items only.

    Args:
        seed: an integer of 64 bits.
        epoch: in [0, 2**32).
        items: (S,) on the host.
    """
    counter = (zlib.crc32(items.contiguous().numpy().data), len(items), 0, epoch)
    words = [int(word) for word in philox4x32_reference(*counter, *split_key(seed))]
    return torch.Generator().manual_seed(words[0] << 31 | words[1] >> 1)


def unique_with_inverse(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted unique ids and the inverse indices, as `Tensor.unique` does.

    NumPy's sort is several times as fast as torch's in one thread.

    Args:
        ids: (S,) int64 on the host.

    Returns:
        The unique ids (U,) and the inverse indices (S,), both int64 on the host.
    """
    found, inverse = np.unique(ids.numpy(), return_inverse=True)
    return torch.from_numpy(found), torch.from_numpy(inverse)


def seed_of(options: Options) -> int:
    """Return the seed: given, 0 with several ranks, or drawn from torch's generator."""
    if options.seed is not None:
        return options.seed
    if (options.world_size or 1) > 1:
        return 0
    number = torch.empty((), dtype=torch.int64)
    return int(number.random_(generator=options.dataloader_options.get("generator")))
