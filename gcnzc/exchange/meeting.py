"""How workers that were started again meet on a store that remembers those before them.

torch's elastic agents keep one store for all attempts, with the addresses of workers that are gone
still in it, and agents on several machines do not count attempts alike. So worker 0 draws a name
for the round, and the others take it when worker 0 has seen them under it.
"""

import json
import time
import uuid
from typing import Protocol

POLL_S = 0.05


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> object:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits until the key is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""


def met(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A name for this round that all its workers know, and that no round had before.

    Args:
        store: that all workers reach.
        rank: of this worker.
        world_size: how many come.
        timeout_s: what all wait for at most.

    Raises:
        TimeoutError: not all came; on worker 0 the message says who.
    """
    end = time.monotonic() + timeout_s
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("gcnzc/round", own)
        seen: dict[int, str] = {}
        while len(seen) < world_size - 1:
            for other in range(1, world_size):
                key = f"{own}/came/{other}"
                if other not in seen and store.check([key]):
                    seen[other] = store.get(key).decode()
            _wait(end, [other for other in range(1, world_size) if other not in seen])
        store.set(f"{own}/all", json.dumps(list(seen.values())))
        return own
    told = ""
    while True:
        # an earlier round's name may stand there still; nobody answers under it
        name = store.get("gcnzc/round").decode() if store.check(["gcnzc/round"]) else ""
        if name and name != told:
            store.set(f"{name}/came/{rank}", own)
            told = name
        key = f"{name}/all"
        if name and store.check([key]) and own in json.loads(store.get(key)):
            return name
        _wait(end, [0])


def _wait(end: float, missing: list[int]) -> None:
    if missing and time.monotonic() > end:
        raise TimeoutError(f"no sign of worker {', '.join(map(str, missing))}")
    if missing:
        time.sleep(POLL_S)
