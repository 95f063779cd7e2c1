"""Compute structural embeddings of nodes from the edges alone, as features.

Nodes that often co-occur on random walks get similar rows. Skip-gram embeddings such as DeepWalk
factorise a matrix of the logarithm of the ratio of each pair's co-occurrences to those expected by
chance (NetMF: Qiu et al., WSDM 2018, https://arxiv.org/abs/1710.02971). If it is estimated from
sampled walks, this matrix is sparse (NetSMF: Qiu et al., WWW 2019,
https://arxiv.org/abs/1906.11156). Its leading singular vectors are computed by randomized subspace
iteration (Halko, Martinsson and Tropp, SIAM Review 2011, https://arxiv.org/abs/0909.4061). Finally
the rows are smoothed over the graph, as ProNE (Zhang et al., IJCAI 2019) does with a spectral
filter; here the filter is personalised PageRank (Klicpera et al., ICLR 2019,
https://arxiv.org/abs/1810.05997).

Notation: N nodes, D dimensions, K columns of the iterated subspace, I and J columns in general.
"""

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from gcnzc.datasets.generated import map_in_order, random_stream
from gcnzc.datasets.rows import Array, Progress, no_progress

# With these values, a network whose inputs are the rows of ogbn-arxiv's graph and their means over
# one and two hops has 69.1 % test accuracy; 10 walks give 68.5 %, and 40 walks of 10 steps 69.0 %
# in four times the time.
WALKS = 20  # walks from each node
STEPS = 5  # steps of a walk, the largest distance of two co-occurring nodes
PRODUCTS = 3  # products with the matrix
EXTRA_COLUMNS = 16  # columns beyond D of the iterated subspace, which improve the first D
SMOOTHING_STEPS = 5  # without them, a network on the rows alone loses 3.5 points
OWN_SHARE = 0.2  # weight of a node's own row in the smoothing

CHUNK_ROWS = 1 << 14
# purposes of random streams, other than those in `generated`
WALKING, SUBSPACE = 100, 101


def embed(
    indptr: Array,
    indices: Array,
    num_dims: int = 128,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Array:
    """Compute an embedding of every node from the edges.

    Directions of edges, repeated edges and self loops are ignored. ogbn-arxiv's graph takes 10 s on
    two cores. Peak memory is about 4.2 KB per node with 128 dimensions, and 26 bytes per edge.

    Args:
        indptr: (N + 1,) integers, the columns of the graph as CSC.
        indices: (E,) integers in [0, N). Not checked.
        num_dims: D, at least 1. Columns beyond the rank of the matrix are zero.
        seed: of all random choices; the result does not depend on the number of threads.
        progress: called with counts of start nodes, products and smoothing steps.

    Returns:
        (N, D) float32. Rows have the length sqrt(D), so that elements are of magnitude 1; rows of
        nodes without a neighbour are zero.

    Raises:
        ValueError: `num_dims` is below 1.
    """
    if num_dims < 1:
        raise ValueError(
            f"an embedding of {num_dims} dimensions\n\nhint: use at least 1; the default is 128"
        )
    adjacency = _to_undirected(np.asarray(indptr), np.asarray(indices))
    # the sums of a threaded BLAS depend on its number of threads; sums over chunks of rows do not
    with threadpool_limits(1, "blas"):
        found_ND = _leading_vectors(
            _log_ratios(_count_cooccurrences(adjacency, seed, progress)), num_dims, seed, progress
        )
        smooth_ND = _normalize_rows(_smooth_rows(adjacency, _normalize_rows(found_ND), progress))
    rows_ND = np.zeros((len(indptr) - 1, num_dims), np.float32)
    rows_ND[:, : smooth_ND.shape[1]] = smooth_ND
    rows_ND *= np.sqrt(np.float32(num_dims))
    return rows_ND


def _to_undirected(indptr: Array, indices: Array) -> sparse.csr_matrix:
    """Return the (N, N) adjacency matrix without directions, repeated edges and self loops."""
    num_nodes = len(indptr) - 1
    ones = np.ones(len(indices), np.float32)
    adjacency = sparse.csr_matrix((ones, indices, indptr), shape=(num_nodes, num_nodes))
    adjacency = _remove_diagonal(adjacency + adjacency.T)
    adjacency.data.fill(1)
    return adjacency


def _remove_diagonal(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the matrix without its diagonal; columns are ascending in each row."""
    matrix = matrix.tocsr()
    matrix.sum_duplicates()
    rows = np.repeat(np.arange(matrix.shape[0], dtype=matrix.indices.dtype), np.diff(matrix.indptr))
    matrix.data[matrix.indices == rows] = 0
    matrix.eliminate_zeros()
    return matrix


def _count_cooccurrences(
    adjacency: sparse.csr_matrix, seed: int, progress: Progress
) -> sparse.csr_matrix:
    """Count how often one of two nodes is visited on a walk from the other: (N, N), symmetric."""
    num_nodes = adjacency.shape[0]
    degrees = np.diff(adjacency.indptr)

    def walk_from(chunk: int) -> sparse.csr_matrix:
        starts = np.arange(num_nodes)[_rows(chunk)]
        node = np.repeat(starts[degrees[starts] > 0], WALKS)
        base = (node - chunk * CHUNK_ROWS) * num_nodes
        random = random_stream(seed, WALKING, chunk)
        pairs = np.empty((STEPS, len(node)), np.int64)
        for step in range(STEPS):
            edge = (random.random(len(node)) * degrees[node]).astype(np.int64)
            node = adjacency.indices[adjacency.indptr[node] + edge]
            pairs[step] = base + node
        pairs, counts = np.unique(pairs, return_counts=True)
        rows, columns = np.divmod(pairs, num_nodes)
        ends = np.searchsorted(rows, np.arange(len(starts) + 1))
        shape = (len(starts), num_nodes)
        return sparse.csr_matrix((counts.astype(np.float32), columns, ends), shape=shape)

    parts = []
    for part in map_in_order(walk_from, _num_chunks(num_nodes)):
        parts.append(part)
        progress("start nodes of walks", min(len(parts) * CHUNK_ROWS, num_nodes), num_nodes)
    counts = sparse.vstack(parts, format="csr")
    del parts
    return _remove_diagonal(counts + counts.T)


def _log_ratios(counts: sparse.csr_matrix) -> sparse.csr_matrix:
    """Replace counts by log(count / count expected by chance), or by 0 if that is negative."""
    node_counts = np.asarray(counts.sum(axis=1, dtype=np.float64)).reshape(-1)
    total = node_counts.sum()

    def overwrite(chunk: int) -> None:
        ends = counts.indptr[chunk * CHUNK_ROWS :][: CHUNK_ROWS + 1]
        values = counts.data[ends[0] : ends[-1]]
        expected = np.repeat(node_counts[_rows(chunk)], np.diff(ends))
        expected *= node_counts[counts.indices[ends[0] : ends[-1]]]
        values[:] = np.log(np.maximum(values * total / expected, 1))

    for _ in map_in_order(overwrite, _num_chunks(counts.shape[0])):
        pass
    counts.eliminate_zeros()
    return counts


def _leading_vectors(
    matrix: sparse.csr_matrix, num_dims: int, seed: int, progress: Progress
) -> Array:
    """Return the leading singular vectors, (N, at most D), times the roots of singular values."""
    num_nodes = matrix.shape[0]
    columns = min(num_nodes, num_dims + EXTRA_COLUMNS)
    # the matrix is symmetric, so no products with its transpose are needed
    y_NK = random_stream(seed, SUBSPACE).standard_normal((num_nodes, columns), dtype=np.float32)
    for product in range(PRODUCTS):
        y_NK = _product(matrix, _orthonormal(y_NK) if product else y_NK)
        progress("products", product + 1, PRODUCTS)
    squares_K, vectors_KK = _singular_directions(y_NK)
    return _product(y_NK, vectors_KK[:, :num_dims] * squares_K[:num_dims] ** -0.25)


def _orthonormal(x_NI: Array) -> Array:
    """Return (N, J <= I) orthonormal columns with the same span as those of `x_NI`."""
    # the second round corrects the rounding errors of the first
    for _ in range(2):
        squares_J, vectors_IJ = _singular_directions(x_NI)
        x_NI = _product(x_NI, vectors_IJ / np.sqrt(squares_J))
    return x_NI


def _singular_directions(x_NI: Array) -> tuple[Array, Array]:
    """Return squared singular values (J,), largest first, and right singular vectors (I, J).

    Singular values that are 0 within the precision of float32 are omitted.
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


def _smooth_rows(adjacency: sparse.csr_matrix, rows_ND: Array, progress: Progress) -> Array:
    """Smooth the rows by personalised PageRank with the restart probability `OWN_SHARE`."""
    degrees_N = np.maximum(np.diff(adjacency.indptr), 1).astype(np.float32)
    inverse_N = np.float32(1 - OWN_SHARE) / degrees_N
    smooth_ND = rows_ND
    for step in range(SMOOTHING_STEPS):
        smooth_ND = _product(adjacency, smooth_ND)
        smooth_ND *= inverse_N[:, None]
        smooth_ND += np.float32(OWN_SHARE) * rows_ND
        progress("smoothing steps", step + 1, SMOOTHING_STEPS)
    return smooth_ND


def _normalize_rows(x_NI: Array) -> Array:
    """Divide each row by its length, in place; rows of zeros stay zero."""
    lengths_N = np.sqrt(np.einsum("ni,ni->n", x_NI, x_NI))
    x_NI /= np.where(lengths_N > 0, lengths_N, 1)[:, None]
    return x_NI


def _product(left: sparse.csr_matrix | Array, right_IJ: Array) -> Array:
    """Return `left @ right_IJ`, (N, J) float32, computed in chunks of rows by all cores."""
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
