"""Detection of races: accesses of one byte by different owners that nothing orders."""

import enum

import numpy as np

from gcnzc.testing.number_types import Array


class Access(enum.Enum):
    """How an instruction accesses memory."""

    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic access"


_CONFLICTS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: (Access.READ, Access.WRITE, Access.ATOMIC),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}


class AccessHistory:
    """The owners of the latest read, write and atomic access of each byte.

    An owner, such as a warp, is a positive integer, and larger after each synchronization. So an
    access conflicts with those of other owners from `first_owner` on, which nothing orders with it.
    Later owners are compared with the latest owner only, which may be `several_owners`.
    """

    def __init__(self, num_bytes: int, dtype: type = np.int64) -> None:
        """Create a history.

        Args:
            num_bytes: of the memory, a multiple of 16.
            dtype: of the owners.
        """
        self.num_bytes, self.dtype = num_bytes, dtype
        self.latest: dict[Access, Array] = {}

    def record(
        self,
        access: Access,
        index: Array,
        size: int,
        owner: Array,
        first_owner: Array,
        several_owners: Array,
    ) -> tuple[int, str] | None:
        """Record the accesses of one instruction.

        Args:
            access: how memory is accessed.
            index: (k,) of words of `size` bytes, for each lane.
            size: bytes of a word: 1, 2, 4, 8 or 16.
            owner: (k,) of each lane.
            first_owner: (k,) the first owner since the latest synchronization.
            several_owners: (k,) an owner that stands for several since this synchronization.

        Returns:
            A lane with a race, and the access that it conflicts with; None without a race.
        """
        owners, first = owner[:, None], first_owner[:, None]
        for other in _CONFLICTS[access]:
            if other in self.latest:
                found = self._words(other, size)[index]
                conflicts = ((found >= first) & (found != owners)).any(1)
                if conflicts.any():
                    return int(conflicts.argmax()), f"{other.value} before"
        if access not in self.latest:
            # pages of zeros take no memory before they are written
            self.latest[access] = np.zeros(self.num_bytes, self.dtype)
        words = self._words(access, size)
        before = words[index]
        words[index] = owners
        after = words[index]
        if access is Access.WRITE:
            conflicts = (after != owners).any(1)
            return (
                (int(conflicts.argmax()), "write of this instruction") if conflicts.any() else None
            )
        is_shared = ((before >= first) & (before != owners)) | (after != owners)
        if is_shared.any():
            places = index[:, None] * size + np.arange(size)
            several = np.broadcast_to(several_owners[:, None], is_shared.shape)
            self.latest[access][places[is_shared]] = several[is_shared]
        return None

    def _words(self, access: Access, size: int) -> Array:
        return self.latest[access].reshape(-1, size)
