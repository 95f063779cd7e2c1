"""Exclude edges from the columns of heterogeneous graphs.

The excluded edges of an edge type are an ascending vector of their positions in `indices`. The
remaining edges of a column are counted from its first position on, so that sampling chooses among
them as if the others did not exist.

Notation: K excluded edges.
"""

from numba import int64, njit


@njit(cache=True, nogil=True)
def num_before(excluded, position):
    """Return the number of excluded edges before a position."""
    low, high = int64(0), int64(len(excluded))
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def num_remaining(excluded, begin, end):
    """Return the number of edges from `begin` to `end` that are not excluded."""
    if len(excluded) == 0:
        return end - begin
    return end - begin - (num_before(excluded, end) - num_before(excluded, begin))


@njit(cache=True, nogil=True)
def remaining_position(excluded, first, begin, index):
    """Return the position of a remaining edge of a column.

    Args:
        excluded: (K,) int64 positions, ascending and different.
        first: number of excluded edges before `begin`.
        begin: first position of the column.
        index: number of remaining edges of the column before this edge.
    """
    low, high = first, int64(len(excluded))
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] - begin - (middle - first) <= index:
            low = middle + 1
        else:
            high = middle
    return begin + index + low - first


@njit(cache=True, nogil=True)
def copy_remaining(values, excluded, first, begin, size, out):
    """Copy the values of the first `size` remaining edges of a column to `out`."""
    place, position = first, begin
    for i in range(size):
        while place < len(excluded) and excluded[place] == position:
            place += 1
            position += 1
        out[i] = values[position]
        position += 1
