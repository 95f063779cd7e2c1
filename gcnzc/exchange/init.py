"""Initialize torch.distributed in a launcher's workers, and yield the group of all ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from gcnzc.exchange.choices import Choices
from gcnzc.exchange.errors import LEFT, REMEDY, describe_end
from gcnzc.exchange.group import TIMEOUT_S, Group
from gcnzc.exchange.heartbeat import STORE_S
from gcnzc.exchange.launch import is_worker, read_local_world_size, read_ranks
from gcnzc.exchange.limits import check_time_limit
from gcnzc.exchange.start import destroy, hosts_store, initialize
from gcnzc.system.arguments import check_choice

BACKENDS = ("gloo", "nccl", "auto")


@contextmanager
def init_group(
    backend: str = "gloo",
    choices: Choices | None = None,
    timeout_s: float = TIMEOUT_S,
    remedy: str = REMEDY,
) -> Iterator[Group]:
    """Initialize torch.distributed in a launcher's workers, and yield the group of all ranks.

    Without a launcher such as torchrun, it yields a group of one rank.

    Args:
        backend: "gloo"; "nccl", which needs one GPU per rank; "auto" selects "nccl" if there is one
            GPU per rank, and "gloo" otherwise.
        choices: the algorithm, such as a ring, of each kind of collective.
        timeout_s: time limit of each wait for a message, in seconds, from 0.001 to 1e9; see
            `Group`.
        remedy: see `Group`.

    Yields:
        The group; it is closed at the end of the `with`.

    Raises:
        RuntimeError: with several ranks, torch.distributed is initialized already, for example in a
            nested call.
        ValueError: `backend`, `timeout_s` or the launcher's environment variables are invalid.
        WorkerLost: a rank did not connect within 180 s, or is suspended (SIGSTOP).
    """
    check_choice("backend", backend, BACKENDS)
    timeout_s = check_time_limit(timeout_s)
    if not is_worker() or read_ranks()[1] == 1:
        group = Group(choices=choices, timeout_s=timeout_s, remedy=remedy)
        try:
            yield group
        finally:
            group.close()
        return
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= read_local_world_size() else "gloo"
    store, monitor = initialize(backend, timeout_s)
    store.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))
    rank, world_size, process = monitor.rank, monitor.world_size, os.getpid()
    has_failed = True
    try:
        group = Group(
            *(rank, world_size, backend, monitor.store, choices, timeout_s),
            monitor=monitor,
            remedy=remedy,
        )
        try:
            yield group
        except BaseException as error:
            group.close(describe_end(error))
            raise
        group.close(LEFT)
        has_failed = False
    finally:
        # a forked process would end the heartbeats and connections of this one
        if os.getpid() == process:
            monitor.stop()
            destroy()
            if has_failed and hosts_store(rank):
                # the store ends with this rank
                monitor.wait_for_ends()
