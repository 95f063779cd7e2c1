"""R-MAT graphs: edges with skewed degrees, by recursion into quadrants.

Source: Chakrabarti, Zhan, Faloutsos, SDM 2004, with the parameters of Graph500
(https://graph500.org/?page_id=12). Degrees are skewed and hubs know hubs, at any size and speed;
there are no communities. Features and labels are random and say nothing of one another.

Letters: N nodes, 2**B the power of two from N on, E edges, D features, K classes.
"""

from collections.abc import Mapping

import numpy as np

from gcnzc.datasets.alias import Alias
from gcnzc.datasets.generated import (
    CHUNK_EDGES,
    EDGES,
    FEATURES,
    LABELS,
    NAMES,
    SHARES,
    Chunks,
    Generated,
    computed_rows,
    random_parts,
    stream,
)
from gcnzc.datasets.rows import Array

QUADRANTS = (0.57, 0.19, 0.19, 0.05)  # (0, 0), (0, 1), (1, 0), (1, 1): Graph500's
# bits of both ends that one draw decides: tables of 4**6 values still lie in the cache next to the
# core, and halve the time of 4**3
GROUP_BITS = 6


def rmat(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int = 0,
    quadrants: tuple[float, float, float, float] = QUADRANTS,
    shares: Mapping[str, float] = SHARES,
    name: str = "rmat",
    threads: int | None = None,
) -> Generated:
    """A graph with hubs, for measuring at scale.

    Args:
        num_nodes: N. If it is no power of two, 2**B - N nodes take the edges of two.
        num_edges: E, each to be used in both directions; some are equal, some are self loops.
        num_features: D, uniform in [-1, 1).
        num_classes: K; labels are uniform, so that the best possible accuracy is 1 / K.
        seed: of every random choice; the number of threads has no part in the result.
        quadrants: the probabilities of (0, 0), (0, 1), (1, 0), (1, 1) for each bit of both ends.
        shares: of the nodes in train, valid and test.
        name: of the graph.
        threads: all cores if None.

    Raises:
        ValueError: a number is outside its range.
    """
    if num_classes < 1:
        raise ValueError(f"{num_classes} classes\n\nhint: 1 or more")
    if min(quadrants) < 0 or abs(sum(quadrants) - 1) > 1e-9:
        raise ValueError(f"quadrants are {quadrants}\n\nhint: four probabilities that add up to 1")
    parts = random_parts(seed, num_nodes, shares)
    labels = stream(seed, LABELS).integers(
        num_classes, size=num_nodes, dtype=np.min_scalar_type(num_classes - 1)
    )

    def features(chunk: int, begin: int, end: int) -> Array:
        rows = stream(seed, FEATURES, chunk).random((end - begin, num_features), np.float32)
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
        computed_rows(features, num_nodes, num_features, f"{name}'s features", threads),
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
    factors = (stream(seed, NAMES).integers(1 << num_bits, size=2) | 1).tolist()

    def chunk_of(chunk: int, begin: int, end: int) -> Array:
        random = stream(seed, EDGES, chunk)
        ends = np.zeros((2, end - begin), np.int64)
        for bits in groups:
            both = tables[bits].draw(random, end - begin)
            ends <<= bits
            ends[0] |= both >> bits
            ends[1] |= both & ((1 << bits) - 1)
        rename(ends, num_bits, factors)
        return np.subtract(ends, num_nodes, out=ends, where=ends >= num_nodes)

    return Chunks(chunk_of, num_edges, CHUNK_EDGES, threads)


def rename(ids: Array, num_bits: int, factors: list[int]) -> None:
    """Permute [0, 2**num_bits), so that hubs have ids all over it; in place. Factors are odd."""
    for factor in factors:
        ids *= factor
        ids &= (1 << num_bits) - 1
        ids ^= ids >> (num_bits + 1) // 2


def _table(quadrants: tuple[float, float, float, float], bits: int) -> Alias:
    """Draws `source * 2**bits + destination` for that many bits of both."""
    one = np.array(quadrants).reshape(2, 2)
    matrix = np.ones((1, 1))
    for _ in range(bits):
        matrix = np.kron(matrix, one)
    return Alias.of([matrix.reshape(-1)])
