"""Tables of addresses for heterogeneous sampling, and the table from nodes to local ids.

Edge types have arrays of different lengths and dtypes, and graphs have any number of edge types.
The kernels therefore take the addresses of the arrays in tables of integers, with one row for each
edge type or node type, so that one compiled kernel serves all graphs.
`gcnzc.kernels.sample.hetero` fills the tables and keeps the arrays alive.

The nodes of all types are numbered consecutively. The key of a node is its number; in disjoint
subgraphs, plus the number of all nodes times the number of the subgraph.
"""

import numpy as np
from numba import carray, int64, njit, uint64  # type: ignore[attr-defined]

from gcnzc.kernels.memory import pointer

# columns of the table of edge types: addresses (0 for an array that is absent), sizes and types;
# EXCLUDED has the positions of excluded edges, see `gcnzc.kernels.sample.hetero_columns`
(
    INDPTR,
    INDICES,
    HAS_WIDE_INDICES,
    NUM_EDGES,
    DST,
    SRC,
    NUM_DST,
    NUM_SRC,
    EDGE_TIME,
    NODE_TIME,
    WEIGHT,
    EDGE_IDS,
    KEY_0,
    KEY_1,
    EXCLUDED,
    NUM_EXCLUDED,
    NUM_COLUMNS,
) = range(17)


# columns of the table of node types: addresses of the sampled nodes and of their subgraphs, the
# number of nodes so far, the first and last + 1 destination of the hop, and the first key
NODES, SUBGRAPHS, COUNT, BEGIN, END, FIRST_KEY, NUM_TYPE_COLUMNS = range(7)


# columns of the table of outputs: addresses, and the number of edges so far
ROW, COL, EDGE, NUM_SAMPLED, NUM_OUT_COLUMNS = range(5)


# columns of the options
REPLACE, LAST, IS_TEMPORAL, IS_DISJOINT, HOP, EPOCH, NUM_OPTIONS = range(7)


ALWAYS = -(2**63)  # the time of edges and nodes without a time, which are always eligible


SLOTS_PER_NODE = 2  # the hash table is at most half full


@njit(cache=True, nogil=True)
def int64s(address, size):
    """Return a view of `size` elements at an address; an empty one for address 0."""
    return carray(pointer(address), (size if address else 0,), np.int64)


@njit(cache=True, nogil=True)
def int32s(address, size):
    """Return a view as `int64s` does."""
    return carray(pointer(address), (size if address else 0,), np.int32)


@njit(cache=True, nogil=True)
def float32s(address, size):
    """Return a view as `int64s` does."""
    return carray(pointer(address), (size if address else 0,), np.float32)


@njit(cache=True, nogil=True)
def indices_of(relation):
    """Return the sources of a relation as two views, of which one is empty."""
    address, size, is_wide = relation[INDICES], relation[NUM_EDGES], relation[HAS_WIDE_INDICES]
    return int32s(0 if is_wide else address, size), int64s(address if is_wide else 0, size)


@njit(cache=True, nogil=True)
def source_at(narrow, wide, position):
    """Return the source of an edge from the views of `indices_of`."""
    if len(wide):
        return wide[position]
    return int64(narrow[position])


@njit(cache=True, nogil=True)
def slot_of(key, num_slots):
    """Return the first slot to probe for a key."""
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    product = uint64(key) * uint64(0x9E3779B97F4A7C15)
    return int64(((product >> uint64(32)) * uint64(num_slots)) >> uint64(32))


@njit(cache=True, nogil=True)
def find_local(key, base, direct_table, hash_table):
    """Return the local id of a key or -1, and its slot in the hash table."""
    if len(direct_table):
        return max(int64(direct_table[key]) - base, int64(-1)), key
    slot = slot_of(key, len(hash_table))
    while hash_table[slot, 1] >= base and hash_table[slot, 0] != key:
        slot = (slot + 1) & (len(hash_table) - 1)
    return max(hash_table[slot, 1] - base, int64(-1)), slot


@njit(cache=True, nogil=True)
def insert_key(key, slot, stamp, direct_table, hash_table):
    """Write the stamp of a key that `find_local` did not find."""
    if len(direct_table):
        direct_table[key] = stamp
    else:
        hash_table[slot, 0], hash_table[slot, 1] = key, stamp


@njit(cache=True, nogil=True)
def insert_nodes(types, options, num_keys, base, direct_table, hash_table):
    """Insert the nodes that are sampled so far; duplicates get the first position."""
    for t in range(len(types)):
        own = types[t]
        nodes = int64s(own[NODES], own[COUNT])
        subgraphs = int64s(own[SUBGRAPHS], own[COUNT])
        for i in range(own[COUNT]):
            key = own[FIRST_KEY] + nodes[i]
            if options[IS_DISJOINT]:
                key += subgraphs[i] * num_keys
            local, slot = find_local(key, base, direct_table, hash_table)
            if local < 0:
                insert_key(key, slot, base + i, direct_table, hash_table)
