"""Check the kinds of what algorithms yield, start and wait for."""

import os
import threading
from collections.abc import Generator, Sequence
from types import UnionType
from typing import NoReturn

from gcnzc.exchange.collectives.subgroup import Subgroup
from gcnzc.exchange.requests import Collective, Message
from gcnzc.system.arguments import check_integer

EXCHANGE = Collective | Subgroup
"""requests of all ranks, or of some"""
STARTED = EXCHANGE | Message | Generator
"""what a `Start` starts"""


def check_kind(value: object, kinds: type | UnionType, what: str) -> None:
    """Check the type of a request, or of what a `Start` starts.

    Raises:
        TypeError: it is of another type; `what` says where it was found.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{what} {value!r:.100}")


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank of a `Group` and its number of ranks.

    Raises:
        TypeError: one of them is not an integer.
        ValueError: there is no such rank.
    """
    world_size = check_integer("world_size", world_size, 1)
    hint = f"the ranks of a group are 0 to world_size - 1, here {world_size - 1}"
    return check_integer("rank", rank, 0, world_size - 1, hint), world_size


def check_members(members: Sequence[int], rank: int, world_size: int) -> None:
    """Check the ranks of `Group.subgroup`, ascending.

    Raises:
        ValueError: this rank is not one of them, or one is not in the group.
    """
    if rank not in members or not 0 <= members[0] <= members[-1] < world_size:
        raise ValueError(
            f"rank {rank} of {world_size} cannot be in a subgroup of ranks {members}\n\n"
            "hint: call subgroup() only on its members, with the same list; valid ranks are 0 to "
            f"{world_size - 1}"
        )


def reject_thread(rank: int) -> NoReturn:
    """Raise the error of a thread that uses a group while another thread does."""
    raise RuntimeError(
        f"thread {threading.current_thread().name} of rank {rank} started an algorithm on a "
        "group while another thread runs one\n\nhint: use a group in one thread at a time, and "
        "overlap requests with Start"
    )


def reject_fork(rank: int, connected: int) -> NoReturn:
    """Raise the error of a forked process that uses the group of the process `connected`."""
    raise RuntimeError(
        f"process {os.getpid()} uses the group of rank {rank}, which process {connected} has "
        "connected\n\nhint: communicate in the process that called "
        "init_group(); a process that it forks has no connections"
    )
