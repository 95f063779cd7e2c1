"""The group of torch.distributed's default process group."""

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.errors import ConnectionBroken, WorkerLost

if TYPE_CHECKING:
    from gcnzc.exchange.group import Group


class DefaultGroup:
    """Creates and caches the group of torch.distributed's default process group.

    Args:
        group_type: the class `Group`.
    """

    def __init__(self, group_type: "type[Group]") -> None:
        self.group_type = group_type
        self.lock = threading.Lock()
        self.group: Group | None = None
        self.process_group: weakref.ref[Any] | None = None
        self.num_created = 0

    def find(self) -> "Group":
        """Return the group of the current default process group."""
        process_group = dist.group.WORLD
        with self.lock:
            before = self.process_group() if self.process_group is not None else None
            if self.group is None or self.group.is_closed or before is not process_group:
                if self.group is not None:
                    self.group.close()
                self.group, self.process_group = self._create(), weakref.ref(process_group)
                # otherwise its threads would write to a store that may have been destroyed
                weakref.finalize(process_group, self.group.close).atexit = False
            return self.group

    def _create(self) -> "Group":
        self.num_created += 1
        # a prefix separates the keys from those of an earlier group in the same store
        store = PrefixStore(f"gcnzc {self.num_created}", dist.distributed_c10d._get_default_store())
        backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
        try:
            return self.group_type(dist.get_rank(), dist.get_world_size(), backend, store)
        except ConnectionBroken as error:
            raise WorkerLost(
                f"rank {dist.get_rank()} could not add gloo, for tensors on the host, to the "
                f"process group of {dist.get_backend_config()}: {error.__cause__}\n\nhint: all "
                "ranks must construct their first optimizer at the same time; "
                'init_process_group("cpu:gloo,cuda:nccl") has gloo from the start'
            ) from error.__cause__


def count_shared_ranks(group: "Group", process_group: Any) -> int:
    """Return the number of ranks of a group that a process group of torch.distributed has too."""
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError):
        # it is destroyed
        return 0
    return len(set(ranks).intersection(group.ranks))
