"""Detection of races: accesses of one byte by different owners that no barrier orders."""

import enum
from dataclasses import dataclass

import numpy as np

from gcnzc.testing.number_types import Array

PAGE_BYTES = 1024


class Access(enum.Enum):
    """How an instruction accesses memory."""

    READ = "read"
    WRITE = "write"
    ATOMIC_READ = "atomic read"
    ATOMIC = "atomic access"  # a store, or an operation that reads and writes


_CONFLICTS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: tuple(Access),
    Access.ATOMIC_READ: (Access.WRITE,),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}


@dataclass
class Written:
    """What an instruction writes, for each lane and byte."""

    is_unchanged: Array  # (k, size) bool: the byte had this value before
    is_kept: Array  # (k, size) bool: no other lane has replaced the value


class _PagedOwners:
    """An owner for each byte of memory, 0 where none is recorded.

    Pages of memory without a record take no space.
    """

    def __init__(self, num_bytes: int, dtype: type) -> None:
        """Create a record.

        Args:
            num_bytes: of the memory.
            dtype: of the owners.
        """
        # position of each page in `owners`, where the first page is of those without a record
        self.page_at = np.zeros(-(-num_bytes // PAGE_BYTES), np.int32)
        self.owners: Array = np.zeros((1, PAGE_BYTES), dtype)
        self.num_pages = 1

    def allocate(self, index: Array, size: int) -> None:
        """Allocate the pages of words of `size` bytes."""
        pages = index * size // PAGE_BYTES
        new = np.unique(pages[self.page_at[pages] == 0])
        if not len(new):
            return
        end = self.num_pages + len(new)
        if end > len(self.owners):
            owners = np.zeros((max(end, 2 * len(self.owners)), PAGE_BYTES), self.owners.dtype)
            owners[: self.num_pages] = self.owners[: self.num_pages]
            self.owners = owners
        self.page_at[new] = np.arange(self.num_pages, end)
        self.num_pages = end

    def words(self, index: Array, size: int) -> tuple[Array, Array]:
        """Return the owners of all bytes as words of `size` bytes, and the positions in them."""
        page, offset = np.divmod(index, PAGE_BYTES // size)
        return self.owners.reshape(-1, size), self.page_at[page] * (PAGE_BYTES // size) + offset


class AccessHistory:
    """The owners of the latest access of each kind to each byte.

    An owner is an integer above 0 that stands for one warp, or block, between two
    synchronizations. After each one, all owners get new, larger integers. Only the latest owner of
    each kind of access is kept for a byte. `several_owners` replaces it if more than one owner has
    accessed the byte since the last synchronization. An access conflicts with a kept owner that is
    at least `first_owner`, so that no synchronization is in between, and is not its own.
    """

    def __init__(self, num_bytes: int, dtype: type = np.int64) -> None:
        """Create a history.

        Args:
            num_bytes: of the memory.
            dtype: of the owners.
        """
        self.num_bytes, self.dtype = num_bytes, dtype
        self.latest: dict[Access, _PagedOwners] = {}

    def record(
        self,
        access: Access,
        index: Array,
        size: int,
        owner: Array,
        first_owner: Array,
        several_owners: Array,
        written: Written | None = None,
    ) -> tuple[int, str] | None:
        """Record the accesses of one instruction.

        Args:
            access: how memory is accessed.
            index: (k,) of words of `size` bytes, for each lane.
            size: bytes of a word: 1, 2, 4, 8, 16 or 32.
            owner: (k,) of each lane.
            first_owner: (k,) the smallest owner since the latest synchronization.
            several_owners: (k,) an owner that stands for several since this synchronization.
            written: what a write does to the bytes; then several owners may write equal values.

        Returns:
            A lane with a race, and the access that it conflicts with; None without a race.
        """
        owners, first = owner[:, None], first_owner[:, None]
        for other in _CONFLICTS[access]:
            if other in self.latest:
                words, at = self.latest[other].words(index, size)
                found = words[at]
                conflicts = (found >= first) & (found != owners)
                if other is access and written is not None:
                    conflicts &= ~written.is_unchanged
                if conflicts.any():
                    return int(conflicts.any(1).argmax()), f"{other.value} before this instruction"
        latest = self.latest.setdefault(access, _PagedOwners(self.num_bytes, self.dtype))
        latest.allocate(index, size)
        words, at = latest.words(index, size)
        before = words[at]
        words[at] = owners
        after = words[at]
        is_shared = ((before >= first) & (before != owners)) | (after != owners)
        if is_shared.any():
            several = np.broadcast_to(several_owners[:, None], is_shared.shape)
            places = at[:, None] * size + np.arange(size)
            latest.owners.reshape(-1)[places[is_shared]] = several[is_shared]
        if access is Access.WRITE:
            conflicts = words[at] == several_owners[:, None]
            if written is not None:
                conflicts &= ~written.is_kept
            if conflicts.any():
                return int(conflicts.any(1).argmax()), "write of this instruction"
        return None
