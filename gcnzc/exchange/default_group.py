"""The group of torch.distributed's default process group."""

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from gcnzc.exchange.group import Group


class DefaultGroup:
    """Creates and caches the group of torch.distributed's default process group.

    Args:
        create: creates a group; its argument is the number of the group in this process, from 1.
    """

    def __init__(self, create: Callable[[int], "Group"]) -> None:
        self.create = create
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
                self.num_created += 1
                self.group = self.create(self.num_created)
                self.process_group = weakref.ref(process_group)
                # otherwise its threads would write to a store that may have been destroyed
                weakref.finalize(process_group, self.group.close).atexit = False
            return self.group
