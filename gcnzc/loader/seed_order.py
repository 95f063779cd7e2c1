"""Orders of an epoch's seeds, which decide the rank that trains on each seed.

An epoch is one pass over all seeds by all ranks together. `Shares` cuts the order of an epoch into
steps, and each step into slots, one per rank. An order therefore decides which seeds are in the
same slot:

- shuffled: random seeds, drawn anew each epoch.
- rotating: a permutation that all ranks share is cut into W chunks. Rank r takes the chunks r,
  r + 1, ... cyclically, one each epoch. In W epochs it takes every seed once, and no two ranks take
  the same chunk at the same time. Then a new permutation is drawn. This is SelDP of SelSync (Tyagi
  and Swany, 2023, https://arxiv.org/abs/2307.07950), except that the seeds of a chunk are shuffled
  each epoch.
- local: the seeds of one part of the graph, shuffled each epoch.

Notation: S seeds, W ranks.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.loader.seeds import Shares, epoch_order, permutation
from gcnzc.system.arguments import IdsLike, as_ids, check_choice, check_integer

SeedOrder: TypeAlias = Literal["shuffled", "rotating", "local"]

SEED_ORDERS: tuple[SeedOrder, ...] = get_args(SeedOrder)

# streams of the random generator; stream 0 shuffles the seeds of an epoch
CHUNKS, SURPLUS = 1, 2

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Division:
    """What the order of an epoch's seeds depends on, besides the random seed and the epoch.

    An epoch that is resumed with another number of ranks or another batch size keeps the division
    with which it began.
    """

    batch_size: int
    world_size: int
    parts: Tensor | None = None  # (S,) int64 in [0, W): the part of each seed; only if local

    def settings(self) -> dict[str, int]:
        """Return the division as plain values of a loader's state."""
        found = {"order_batch_size": self.batch_size, "order_world_size": self.world_size}
        if self.parts is not None:
            found["parts_crc32"] = zlib.crc32(self.parts.numpy().data)
        return found


def order_seeds(
    kind: SeedOrder,
    seeds: Tensor,
    seed: int,
    epoch: int,
    division: Division,
    *,
    drop_last: bool = False,
) -> Tensor:
    """Return the order of an epoch's seeds, the same on every rank.

    Args:
        kind: see the module's description.
        seeds: (S,) on the host.
        seed: random seed of the run; any integer, of which the low 64 bits are used.
        epoch: counted from 0.
        division: that of the beginning of the epoch.
        drop_last: see `Shares`.

    Returns:
        (S,) `seeds` in another order. With one rank, all orders are the same.
    """
    if kind == "shuffled":
        return epoch_order(seeds, seed, epoch)
    shuffled = permutation(len(seeds), seed, epoch)
    slots = _slots_of_positions(len(seeds), division, drop_last)
    if kind == "rotating":
        slot_of_seed = np.empty_like(slots)
        slot_of_seed[permutation(len(seeds), seed, epoch // division.world_size, CHUNKS)] = slots
    else:
        assert division.parts is not None, "`check_parts` has checked"
        slot_of_seed = balance_parts(
            division.parts.numpy(), np.bincount(slots, minlength=division.world_size), seed
        )
    order = np.empty(len(seeds), np.int64)
    # the positions of a slot, in the order of the steps, receive its seeds in shuffled order
    order[np.argsort(slots, kind="stable")] = shuffled[
        np.argsort(slot_of_seed[shuffled], kind="stable")
    ]
    # not torch's indexing, see `epoch_order`
    return torch.from_numpy(seeds.numpy()[order])


def balance_parts(parts: Array, sizes: Array, seed: int) -> Array:
    """Return parts of given sizes that differ from `parts` for as few seeds as possible.

    Random seeds of the parts that are too large fill the parts that are too small. They depend on
    `seed`, but not on the epoch.

    Args:
        parts: (S,) integers in [0, W).
        sizes: (W,) numbers of seeds, whose sum is S.
        seed: random seed of the run.
    """
    shuffled = permutation(len(parts), seed, 0, SURPLUS)
    by_part = shuffled[np.argsort(parts[shuffled], kind="stable")]
    counts = np.bincount(parts, minlength=len(sizes))
    number_in_part = np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_surplus = number_in_part >= np.repeat(sizes, counts)
    balanced = parts.copy()
    missing = sizes - np.minimum(counts, sizes)
    balanced[by_part[is_surplus]] = np.repeat(np.arange(len(sizes)), missing)
    return balanced


def _slots_of_positions(num_seeds: int, division: Division, drop_last: bool) -> Array:
    """Return the slot of each position in the order of an epoch, (S,) int64."""
    world_size = division.world_size
    shares = Shares(num_seeds, division.batch_size, 0, world_size, drop_last, may_be_empty=True)
    starts = [shares.step_start(step) for step in range(len(shares) + 1)]
    # the seeds that `drop_last` drops are divided like a step, so that each slot drops some
    sizes = np.diff(np.array([*starts, num_seeds]))
    bounds = sizes[:, None] * np.arange(world_size + 1) // world_size
    return np.repeat(np.tile(np.arange(world_size), len(sizes)), np.diff(bounds, axis=1).ravel())


def chunk_offset(kind: SeedOrder, epoch: int, world_size: int) -> int:
    """Return the number that a rank adds to its own, modulo W, to find its slot in an epoch."""
    return epoch % world_size if kind == "rotating" else 0


def check_order(kind: object, shuffle: bool, parts: IdsLike | None) -> SeedOrder:
    """Check the order of a loader's seeds, and that it fits the other arguments.

    Raises:
        ValueError: the order is unknown, needs `shuffle`, or does not fit `parts`.
    """
    check_choice("seed_order", kind, SEED_ORDERS)
    order: SeedOrder = next(each for each in SEED_ORDERS if each == kind)
    if order != "shuffled" and not shuffle:
        raise ValueError(
            f"seed_order {order!r} with shuffle=False: its seeds are shuffled in each epoch"
        )
    if order == "local" and parts is None:
        raise ValueError(
            "seed_order 'local' needs the part of each node, and parts is None\n\n"
            "hint: parts=gcnzc.graph.partition_graph(graph, world_size, seeds)"
        )
    if order != "local" and parts is not None:
        raise ValueError(f"parts has no effect with seed_order {order!r}")
    return order


def check_parts(parts: IdsLike, num_items: int, world_size: int) -> Tensor:
    """Check the parts of all nodes, or of all items of a sampler; return (num_items,) int64.

    Raises:
        ValueError: they are not a vector of integers, their number is not `num_items`, or one is
            not in [0, world_size).
    """
    hint = "parts has the part of each node, from 0 to world_size - 1"
    found = as_ids("parts", parts, hint).cpu().long().contiguous()
    if len(found) != num_items:
        raise ValueError(
            f"parts has {len(found)} elements for {num_items} nodes or items\n\nhint: {hint}; if "
            "the sampler has num_items, it has the part of each item"
        )
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < world_size:
        raise ValueError(
            f"parts has values from {int(found.min())} to {int(found.max())} with a world_size of "
            f"{world_size}\n\nhint: {hint}; gcnzc.graph.merge_communities merges more communities"
        )
    return found


def resumed_division(state: Mapping[str, Any], own: Division, others: list[Division]) -> Division:
    """Return the division with which the epoch of a loader's state began.

    Args:
        state: of a loader with the same order of seeds.
        own: the division of the loader that resumes it.
        others: divisions with other parts, one of which may be that of the state.

    Raises:
        TypeError: a number of the state is not an integer.
        ValueError: a number is missing or out of range, or the state has other parts.
    """
    hint = "load what state_dict() of a loader gave"
    if missing := own.settings().keys() - state.keys():
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}\n\nhint: {hint}")
    batch_size, world_size = (
        check_integer(f"state['{name}']", state[name], 1, hint=hint)
        for name in ("order_batch_size", "order_world_size")
    )
    if own.parts is None:
        return Division(batch_size, world_size)
    for other in (own, *others):
        found = Division(batch_size, world_size, other.parts)
        if other.world_size == world_size and found.settings() == own.settings() | {
            name: state[name] for name in own.settings()
        }:
            return found
    if own.world_size == world_size:
        raise ValueError("the state is of a loader with other parts")
    raise ValueError(
        f"the state is from the middle of an epoch that began with the parts of {world_size} "
        f"ranks, and this loader has {own.world_size}\n\n"
        f"hint: load_state_dict(state, parts) with the parts of {world_size} ranks; or resume "
        "with as many ranks as before"
    )
