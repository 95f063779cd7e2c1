"""R-MAT graphs: power-law degrees by recursive choice of quadrants of the adjacency matrix.

Source: Chakrabarti, Zhan, Faloutsos, SDM 2004, with the parameters of Graph500
(https://graph500.org/?page_id=12). Degrees are skewed and hubs are connected with hubs, at any
size; there are no communities. Features and labels are random and independent.

Notation: N nodes, 2**B the next power of two, E edges, D features, K classes.
"""

from collections.abc import Mapping

import numpy as np

from gcnzc.datasets.alias import AliasTable
from gcnzc.datasets.generated import (
    CHUNK_EDGES,
    EDGES,
    FEATURES,
    LABELS,
    NAMES,
    SPLIT_SHARES,
    Chunks,
    Generated,
    generate_rows,
    random_split,
    random_stream,
)
from gcnzc.datasets.rows import Array

QUADRANTS = (0.57, 0.19, 0.19, 0.05)  # (0, 0), (0, 1), (1, 0), (1, 1): Graph500's
# bits of both end nodes that one sample determines: tables of 4**6 values fit into the L1 cache and
# take half the time of 4**3
GROUP_BITS = 6


def rmat(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int = 0,
    quadrants: tuple[float, float, float, float] = QUADRANTS,
    shares: Mapping[str, float] = SPLIT_SHARES,
    name: str = "rmat",
    threads: int | None = None,
) -> Generated:
    """Generate an R-MAT graph, for benchmarks at scale.

    Args:
        num_nodes: N. If it is not a power of two, 2**B - N nodes get the edges of two ids.
        num_edges: E undirected edges, each stored once, with some duplicates and self loops.
        num_features: D, uniform in [-1, 1).
        num_classes: K; labels are uniform, so that the best possible accuracy is 1 / K.
        seed: of all random choices; the result does not depend on the number of threads.
        quadrants: probabilities of (0, 0), (0, 1), (1, 0), (1, 1) for each bit of both end nodes.
        shares: fractions of the nodes in train, valid and test.
        name: of the dataset.
        threads: number of threads; None uses all cores.

    Raises:
        ValueError: an argument is out of range.
    """
    if num_classes < 1:
        raise ValueError(f"{num_classes} classes\n\nhint: at least 1 class is required")
    if min(quadrants) < 0 or abs(sum(quadrants) - 1) > 1e-9:
        raise ValueError(f"quadrants are {quadrants}\n\nhint: four probabilities that add up to 1")
    parts = random_split(seed, num_nodes, shares)
    labels = random_stream(seed, LABELS).integers(
        num_classes, size=num_nodes, dtype=np.min_scalar_type(num_classes - 1)
    )

    def features(chunk: int, begin: int, end: int) -> Array:
        rows = random_stream(seed, FEATURES, chunk).random((end - begin, num_features), np.float32)
        rows *= 2
        rows -= 1
        return rows

    return Generated(
        name,
        num_nodes,
        num_edges,
        num_classes,
        labels,
        parts,
        _edges(num_nodes, num_edges, seed, quadrants, threads),
        generate_rows(features, num_nodes, num_features, f"{name}'s features", threads),
        1 / num_classes,
        {"generator": "rmat", "seed": seed, "quadrants": list(quadrants)},
    )


def _edges(
    num_nodes: int,
    num_edges: int,
    seed: int,
    quadrants: tuple[float, float, float, float],
    threads: int | None,
) -> Chunks[Array]:
    num_bits = (num_nodes - 1).bit_length()
    groups = [GROUP_BITS] * (num_bits // GROUP_BITS)
    if num_bits % GROUP_BITS:
        groups.append(num_bits % GROUP_BITS)
    tables = {bits: _table(quadrants, bits) for bits in set(groups)}
    factors = (random_stream(seed, NAMES).integers(1 << num_bits, size=2) | 1).tolist()

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random = random_stream(seed, EDGES, chunk)
        ends = np.zeros((2, end - begin), np.int64)
        for bits in groups:
            pair = tables[bits].draw(random, end - begin)
            ends <<= bits
            ends[0] |= pair >> bits
            ends[1] |= pair & ((1 << bits) - 1)
        permute_ids(ends, num_bits, factors)
        return np.subtract(ends, num_nodes, out=ends, where=ends >= num_nodes)

    return Chunks(make_chunk, num_edges, CHUNK_EDGES, threads)


def permute_ids(ids: Array, num_bits: int, factors: list[int]) -> None:
    """Apply a permutation of [0, 2**num_bits) to ids in place, so that hubs get scattered ids.

    `factors` must be odd.
    """
    for factor in factors:
        ids *= factor
        ids &= (1 << num_bits) - 1
        ids ^= ids >> (num_bits + 1) // 2


def _table(quadrants: tuple[float, float, float, float], bits: int) -> AliasTable:
    """Build the table to sample `source * 2**bits + destination`."""
    one = np.array(quadrants).reshape(2, 2)
    matrix = np.ones((1, 1))
    for _ in range(bits):
        matrix = np.kron(matrix, one)
    return AliasTable.from_weights([matrix.reshape(-1)])
