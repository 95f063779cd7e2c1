"""Compute structural embeddings of nodes from the edges alone, as features.

Nodes that random walks visit together get similar rows. Skip-gram embeddings such as DeepWalk's
factorise the logarithm of how much more often two nodes meet on walks than by chance (NetMF: Qiu et
al., WSDM 2018, https://arxiv.org/abs/1710.02971); estimated from sampled walks that matrix is
sparse (NetSMF: Qiu et al., WWW 2019, https://arxiv.org/abs/1906.11156). Its leading vectors come
from subspace iteration on random ones (Halko, Martinsson and Tropp, SIAM Review 2011,
https://arxiv.org/abs/0909.4061). Last, rows are mixed with those of their surroundings, which ProNE
(Zhang et al., IJCAI 2019) does to any embedding by a spectral filter; here the filter is
personalised PageRank (Klicpera et al., ICLR 2019, https://arxiv.org/abs/1810.05997).

Letters: N nodes, D dimensions, K columns of the iterated subspace, I and J columns in general.
"""

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from gcnzc.datasets.generated import map_in_order, random_stream
from gcnzc.datasets.rows import Array, Progress, no_progress

# with these, a network on the rows of ogbn-arxiv's graph and their means over one and two hops has
# 69.1 % test accuracy: 10 walks give 68.5, 40 walks of 10 steps 69.0 in four times the seconds
WALKS = 20  # from each node
STEPS = 5  # of a walk, and how far apart two nodes may meet
PRODUCTS = 3  # with the matrix
EXTRA_COLUMNS = 16  # of the subspace, so that those kept have come closer to the leading ones
SMOOTHING_STEPS = 5  # without them the network on the rows alone loses 3.5 points
OWN_SHARE = 0.2  # of a row that stays when it is mixed

CHUNK_ROWS = 1 << 14
# what a random stream is for; `generated` counts from 0
WALKING, SUBSPACE = 100, 101


def embed(
    indptr: Array,
    indices: Array,
    num_dims: int = 128,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Array:
    """Return a row for every node, made from the edges and from nothing else.

    Directions of edges, repeated edges and self loops have no part in it. ogbn-arxiv's graph takes
    10 s on two cores. Memory at the peak is about 4.2 KB a node with 128 dimensions, and 26 bytes
    an edge.

    Args:
        indptr: (N + 1,) integers, the columns of the graph as CSC.
        indices: (E,) integers in [0, N). Not checked.
        num_dims: D, at least 1. Columns past what the graph can tell apart are zero.
        seed: of every random choice; the number of threads has no part in the result.
        progress: told of nodes walked from, products and mixings done.

    Returns:
        (N, D) float32. Rows have the length sqrt(D), so that entries are about 1; those of nodes
        without a neighbour are zero.

    Raises:
        ValueError: fewer than one dimension.
    """
    if num_dims < 1:
        raise ValueError(f"an embedding of {num_dims} dimensions\n\nhint: 128 is usual")
    links = _to_undirected(np.asarray(indptr), np.asarray(indices))
    # sums of a threaded BLAS depend on its number of threads; chunks of rows do not
    with threadpool_limits(1, "blas"):
        found_ND = _leading_vectors(
            _log_ratios(_count_cooccurrences(links, seed, progress)), num_dims, seed, progress
        )
        mixed_ND = _normalize_rows(_smooth_rows(links, _normalize_rows(found_ND), progress))
    rows_ND = np.zeros((len(indptr) - 1, num_dims), np.float32)
    rows_ND[:, : mixed_ND.shape[1]] = mixed_ND
    rows_ND *= np.sqrt(np.float32(num_dims))
    return rows_ND


def _to_undirected(indptr: Array, indices: Array) -> sparse.csr_matrix:
    """(N, N) ones where two different nodes are joined, in either direction."""
    num_nodes = len(indptr) - 1
    ones = np.ones(len(indices), np.float32)
    links = sparse.csr_matrix((ones, indices, indptr), shape=(num_nodes, num_nodes))
    links = _remove_diagonal(links + links.T)
    links.data.fill(1)
    return links


def _remove_diagonal(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """The matrix with its diagonal left out, columns ascending in each row."""
    matrix = matrix.tocsr()
    matrix.sum_duplicates()
    rows = np.repeat(np.arange(matrix.shape[0], dtype=matrix.indices.dtype), np.diff(matrix.indptr))
    matrix.data[matrix.indices == rows] = 0
    matrix.eliminate_zeros()
    return matrix


def _count_cooccurrences(
    links: sparse.csr_matrix, seed: int, progress: Progress
) -> sparse.csr_matrix:
    """(N, N) symmetric: how often one of two nodes was met on a walk from the other."""
    num_nodes = links.shape[0]
    degrees = np.diff(links.indptr)

    def met(chunk: int) -> sparse.csr_matrix:
        starts = np.arange(num_nodes)[_rows(chunk)]
        at = np.repeat(starts[degrees[starts] > 0], WALKS)
        base = (at - chunk * CHUNK_ROWS) * num_nodes
        random = random_stream(seed, WALKING, chunk)
        pairs = np.empty((STEPS, len(at)), np.int64)
        for step in range(STEPS):
            edge = (random.random(len(at)) * degrees[at]).astype(np.int64)
            at = links.indices[links.indptr[at] + edge]
            pairs[step] = base + at
        pairs, counts = np.unique(pairs, return_counts=True)
        rows, columns = np.divmod(pairs, num_nodes)
        ends = np.searchsorted(rows, np.arange(len(starts) + 1))
        shape = (len(starts), num_nodes)
        return sparse.csr_matrix((counts.astype(np.float32), columns, ends), shape=shape)

    parts = []
    for part in map_in_order(met, _num_chunks(num_nodes)):
        parts.append(part)
        progress("nodes walked from", min(len(parts) * CHUNK_ROWS, num_nodes), num_nodes)
    counts = sparse.vstack(parts, format="csr")
    del parts
    return _remove_diagonal(counts + counts.T)


def _log_ratios(meetings: sparse.csr_matrix) -> sparse.csr_matrix:
    """Overwrite counts by log(how much more often than by chance), where that is above 0."""
    of_node = np.asarray(meetings.sum(axis=1, dtype=np.float64)).reshape(-1)
    total = of_node.sum()

    def overwrite(chunk: int) -> None:
        ends = meetings.indptr[chunk * CHUNK_ROWS :][: CHUNK_ROWS + 1]
        values = meetings.data[ends[0] : ends[-1]]
        by_chance = np.repeat(of_node[_rows(chunk)], np.diff(ends))
        by_chance *= of_node[meetings.indices[ends[0] : ends[-1]]]
        values[:] = np.log(np.maximum(values * total / by_chance, 1))

    for _ in map_in_order(overwrite, _num_chunks(meetings.shape[0])):
        pass
    meetings.eliminate_zeros()
    return meetings


def _leading_vectors(
    matrix: sparse.csr_matrix, num_dims: int, seed: int, progress: Progress
) -> Array:
    """(N, at most D): leading singular vectors, each times the root of its singular value."""
    num_nodes = matrix.shape[0]
    columns = min(num_nodes, num_dims + EXTRA_COLUMNS)
    # the matrix is symmetric, so it serves as its own transpose
    y_NK = random_stream(seed, SUBSPACE).standard_normal((num_nodes, columns), dtype=np.float32)
    for product in range(PRODUCTS):
        y_NK = _product(matrix, _orthonormal(y_NK) if product else y_NK)
        progress("products", product + 1, PRODUCTS)
    squares_K, vectors_KK = _singular_directions(y_NK)
    return _product(y_NK, vectors_KK[:, :num_dims] * squares_K[:num_dims] ** -0.25)


def _orthonormal(x_NI: Array) -> Array:
    """(N, J <= I) orthonormal columns that span those of `x_NI`."""
    # the second round mends what rounding left of the first
    for _ in range(2):
        squares_J, vectors_IJ = _singular_directions(x_NI)
        x_NI = _product(x_NI, vectors_IJ / np.sqrt(squares_J))
    return x_NI


def _singular_directions(x_NI: Array) -> tuple[Array, Array]:
    """Squared singular values (J,), largest first, and right singular vectors (I, J).

    Left out are those that are 0 within the precision of float32.
    """

    def square(chunk: int) -> Array:
        part = x_NI[_rows(chunk)].astype(np.float64)
        return part.T @ part

    total_II = np.zeros((x_NI.shape[1],) * 2)
    for part_II in map_in_order(square, _num_chunks(len(x_NI))):
        total_II += part_II
    squares_I, vectors_II = np.linalg.eigh(total_II)
    kept = np.flatnonzero(squares_I > squares_I.max(initial=0) * 1e-10)[::-1]
    return squares_I[kept], vectors_II[:, kept]


def _smooth_rows(links: sparse.csr_matrix, rows_ND: Array, progress: Progress) -> Array:
    """Replace each row by the mean of those that walks of random length from it end at."""
    inverse_N = np.float32(1 - OWN_SHARE) / np.maximum(np.diff(links.indptr), 1).astype(np.float32)
    mixed_ND = rows_ND
    for mixing in range(SMOOTHING_STEPS):
        mixed_ND = _product(links, mixed_ND)
        mixed_ND *= inverse_N[:, None]
        mixed_ND += np.float32(OWN_SHARE) * rows_ND
        progress("mixings", mixing + 1, SMOOTHING_STEPS)
    return mixed_ND


def _normalize_rows(x_NI: Array) -> Array:
    """`x_NI` with each row divided by its length, but for rows of zeros; in place."""
    lengths_N = np.sqrt(np.einsum("ni,ni->n", x_NI, x_NI))
    x_NI /= np.where(lengths_N > 0, lengths_N, 1)[:, None]
    return x_NI


def _product(left: sparse.csr_matrix | Array, right_IJ: Array) -> Array:
    """(N, J) float32 `left @ right_IJ`, chunks of rows at a time on every core."""
    right_IJ = np.ascontiguousarray(right_IJ, np.float32)
    out_NJ = np.empty((left.shape[0], right_IJ.shape[1]), np.float32)

    def fill(chunk: int) -> None:
        out_NJ[_rows(chunk)] = left[_rows(chunk)] @ right_IJ

    for _ in map_in_order(fill, _num_chunks(len(out_NJ))):
        pass
    return out_NJ


def _num_chunks(num_rows: int) -> int:
    return max(1, -(-num_rows // CHUNK_ROWS))


def _rows(chunk: int) -> slice:
    return slice(chunk * CHUNK_ROWS, (chunk + 1) * CHUNK_ROWS)
