"""Tables of addresses that the sampling kernels take, and fields of their options and progress.

Edge types have arrays of different lengths and dtypes, and graphs have any number of edge types.
The kernels therefore take the addresses of the arrays in tables of integers, with one row for each
edge type or node type, so that one compiled kernel serves all graphs. `gcnzc.kernels.sample` fills
the tables and keeps the arrays alive.

The nodes of all types are numbered consecutively. The key of a node is its number; in disjoint
subgraphs, plus the number of all nodes times the number of the subgraph.
"""

import numpy as np
from numba import carray, int64, njit  # type: ignore[attr-defined]

from gcnzc.kernels.memory import pointer, prefetch

# columns of the table of edge types: addresses (0 for an array that is absent), sizes, types, and
# the Philox key; EXCLUDED has the positions of excluded edges, see `gcnzc.kernels.sample.columns`;
# the first elements and capacities of the regions of offsets and of edges in a batch
(
    INDPTR,
    INDICES,
    IS_WIDE,
    NUM_EDGES,
    EDGE_IDS,
    SRC,
    DST,
    KEY_0,
    KEY_1,
    EDGE_TIME,
    NODE_TIME,
    WEIGHT,
    EXCLUDED,
    NUM_EXCLUDED,
    INDPTR_FIRST,
    INDPTR_CAPACITY,
    EDGE_FIRST,
    EDGE_CAPACITY,
    NUM_RELATION_COLUMNS,
) = range(19)

# columns of the table of node types: the key of the first node, the number of nodes, and the first
# element and the capacity of the region of nodes in a batch
FIRST_KEY, NUM_NODES, NODE_FIRST, NODE_CAPACITY, NUM_TYPE_COLUMNS = range(5)

# fields of the options; INSERT: the table does not have the known nodes yet; BASE: see `Workspace`
(
    ONCE,
    REPLACE,
    OWN_LOOPS,
    INDUCED,
    DISJOINT,
    TEMPORAL,
    NUM_KEYS,
    INSERT,
    BASE,
    EPOCH,
    NUM_OPTIONS,
) = range(11)
UNIFORM, LAST = 1, 2  # values of TEMPORAL

# fields of the progress; RELATION and DESTINATION are where to resume, or the chunk that is
# invalid; WHERE is the type whose region is too small, and NEEDED the size that it needs
STATUS, WHERE, NEEDED, HOP, RELATION, DESTINATION, NUM_PROGRESS = range(7)
DONE, NEED_NODES, NEED_INDPTR, NEED_EDGES, NEED_SLOTS, INVALID_COLUMN = range(6)  # values of STATUS

ALWAYS = -(2**63)  # the time of edges and nodes without a time, which are always eligible

# destinations, and approximate number of edges, that are processed at once, so that their data stay
# in the processor's caches
CHUNK_DESTINATIONS = 256
CHUNK_EDGES = 4096

LINE_IDS = 8  # 8 B ids in a cache line


@njit(inline="always")
def int64s(address, size):
    """Return a view of `size` elements at an address; an empty one for address 0."""
    return carray(pointer(address), (size if address else 0,), np.int64)


@njit(inline="always")
def int32s(address, size):
    """Return a view as `int64s` does."""
    return carray(pointer(address), (size if address else 0,), np.int32)


@njit(inline="always")
def float32s(address, size):
    """Return a view as `int64s` does."""
    return carray(pointer(address), (size if address else 0,), np.float32)


@njit(inline="always")
def indices_of(relation):
    """Return the sources of an edge type as int32 and int64 views, of which one is empty."""
    address, size, is_wide = relation[INDICES], relation[NUM_EDGES], relation[IS_WIDE]
    return int32s(0 if is_wide else address, size), int64s(address if is_wide else 0, size)


@njit(inline="always")
def prefetch_element(array, position):
    """Prefetch the cache line of an element; it need not exist."""
    prefetch(int64(array.ctypes.data) + position * array.itemsize)
