"""Check the kinds of what algorithms yield, start and wait for."""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

from gcnzc.exchange.collectives.subgroup import Subgroup
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import (
    Algorithm,
    BaseRequest,
    Collective,
    Compute,
    Message,
    Scratch,
    Start,
    Wait,
)
from gcnzc.system.arguments import check_integer

T = TypeVar("T")


def describe_value(value: object) -> str:
    """Describe a value that has the wrong type, for error messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, BaseRequest):
        return f"a {type(value).__name__}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def check_algorithm(algorithm: object) -> None:
    """Check that `run` or `lockstep` executes an algorithm.

    Raises:
        ValueError: it is not a generator.
    """
    if not isinstance(algorithm, Generator):
        raise ValueError(
            f"the algorithm is {describe_value(algorithm)}\n\nhint: call a function that yields "
            "requests, and give the generator that it returns"
        )


def check_exchange(request: object) -> None:
    """Check that a request, which is of no other kind, is a collective.

    Raises:
        ValueError: it is not, or a `Subgroup` has no sequence of ranks or no collective.
    """
    if isinstance(request, Subgroup):
        if not isinstance(request.ranks, Sequence):
            raise ValueError(
                f"Subgroup of the ranks {request.ranks!r}\n\nhint: give a list, such as [0, 1]"
            )
        if not isinstance(request.request, Collective):
            raise ValueError(
                f"Subgroup of {request.request!r}\n\nhint: give a collective, such as Sum(values)"
            )
        return
    if not isinstance(request, Collective):
        raise ValueError(
            f"an algorithm yields {describe_value(request)}, which is not a request\n\n"
            "hint: yield an instance of a request of gcnzc.exchange, such as Sum(values)"
        )


def check_start(request: Start) -> None:
    """Check the kind of what a `Start` starts.

    Raises:
        ValueError: it is not a collective, a message or an algorithm.
    """
    started = request.request
    if isinstance(started, Subgroup):
        check_exchange(started)
    elif not isinstance(started, Collective | Message | Generator):
        raise ValueError(
            f"the start of {describe_value(started)}\n\n"
            "hint: start a collective, a message, or an algorithm; yield other requests directly"
        )


def check_in_background(request: object) -> None:
    """Check a request of a started algorithm that is not a `Scratch` or a `Compute`.

    Raises:
        ValueError: it is not a collective.
    """
    if isinstance(request, BaseRequest) and not isinstance(request, Collective | Subgroup):
        raise ValueError(
            f"a started algorithm yields {describe_value(request)}\n\nhint: it can yield "
            "collectives, Scratch and Compute; yield others in the algorithm that starts it"
        )
    check_exchange(request)


def only_in_background(algorithm: Algorithm[T]) -> Algorithm[T]:
    """Check each request of a started algorithm of a simulation, and return its result."""
    answer, lost = None, None
    while True:
        try:
            request = algorithm.send(answer) if lost is None else algorithm.throw(lost)
        except StopIteration as stop:
            return stop.value
        if not isinstance(request, Scratch | Compute):
            check_in_background(request)
        try:
            answer, lost = (yield request), None
        except WorkerLost as error:
            lost = error


def check_wait(request: Wait, is_handle: Callable[[Any], bool]) -> None:
    """Check that a `Wait` names a started request.

    Raises:
        ValueError: it does not.
    """
    if not is_handle(request.pending):
        raise ValueError(
            f"a Wait for {describe_value(request.pending)}\n\n"
            "hint: give the answer of Start, as in `pending = yield Start(...)`"
        )


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
