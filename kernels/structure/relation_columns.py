"""Merge the edges of several relations into one CSC structure with a column for each relation.

The columns of a destination are adjacent: relation k of the R relations into a node type has column
`first + d * R + k` for destination d. The sums over all columns of the type, (N, R, F), are then a
matrix of N rows, which one matrix product transforms.

Notation: C columns, E edges; S sources and D destinations of one relation, with E_r edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.buffers import Allocate, Pool

# page faults of newly allocated memory would take longer than the merge
_empty = Pool().empty


@dataclass(frozen=True)
class RelationEdges:
    """The edges of one relation, and where they are in the merged structure.

    Attributes:
        row: (E_r,) int32 or int64 positions of the sources.
        col: (E_r,) int64 positions of the destinations; None if `indptr` is given.
        indptr: (D_all + 1,) int64 offsets in `row`, the edges by destination; None with `col`.
        num_src: S, a bound of `row`.
        num_known: a bound of `col`.
        num_dst: D; edges to later destinations are omitted.
        first_row: row of source 0 in the merged structure.
        first_pair: pair of source 0.
        num_out: relations out of the type of the sources: source s has the pairs
            `first_pair + s * num_out + k`.
        out_number: k.
        first_column: column of destination 0 and relation 0.
        num_in: R, relations into the type of the destinations.
        in_number: number of this relation among them.
    """

    row: Tensor
    col: Tensor | None
    indptr: Tensor | None
    num_src: int
    num_known: int
    num_dst: int
    first_row: int
    first_pair: int
    num_out: int
    out_number: int
    first_column: int
    num_in: int
    in_number: int


@dataclass(frozen=True)
class MergedEdges:
    """The edges of all relations in CSC format."""

    indptr: Tensor  # (C + 1,) int64
    indices: Tensor  # (E,) rows of the sources
    pairs: Tensor  # (E,) pairs of a source and a relation out of its type


class InvalidEdge(ValueError):
    """An edge has a position out of range.

    Attributes:
        relation: number of the relation.
        edge: position of the edge in the relation.
    """

    def __init__(self, relation: int, edge: int) -> None:
        super().__init__(f"edge {edge} of relation {relation} is out of range")
        self.relation, self.edge = relation, edge


def merge_relations_reference(
    relations: Sequence[RelationEdges], num_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference for `merge_relations`, without checks; int64."""
    none = torch.empty(0, dtype=torch.int64)
    columns, rows, pairs = [none], [none], [none]
    for each in relations:
        col = each.col
        if col is None:
            assert each.indptr is not None
            col = torch.arange(len(each.indptr) - 1).repeat_interleave(each.indptr.diff())
        is_kept = col < each.num_dst
        row, col = each.row.long()[is_kept], col[is_kept]
        columns.append(each.first_column + col * each.num_in + each.in_number)
        rows.append(each.first_row + row)
        pairs.append(each.first_pair + row * each.num_out + each.out_number)
    order = torch.sort(torch.cat(columns), stable=True)
    indptr = torch.searchsorted(order.values, torch.arange(num_columns + 1))
    return indptr, torch.cat(rows)[order.indices], torch.cat(pairs)[order.indices]


@njit(nogil=True, cache=True)
def _count(row, col, num_src, num_known, num_dst, first, step, out):
    """Count the edges of each column, in `out[column + 2]`; return the first invalid edge or -1."""
    for e in range(len(col)):
        d = col[e]
        if d < 0 or d >= num_known or row[e] < 0 or row[e] >= num_src:
            return e
        if d < num_dst:
            out[first + d * step + 2] += 1
    return -1


@njit(nogil=True, cache=True)
def _count_csc(row, indptr, num_src, num_dst, first, step, out):
    """`_count` for edges in CSC format."""
    for d in range(num_dst):
        begin, end = indptr[d], indptr[d + 1]
        if begin < 0 or end < begin or end > len(row):
            return max(min(begin, len(row) - 1), 0)
        for e in range(begin, end):
            if row[e] < 0 or row[e] >= num_src:
                return e
        out[first + d * step + 2] += end - begin
    return -1


@njit(nogil=True, cache=True)
def _accumulate(out, num_columns):
    # `out[c + 1]` becomes the first edge of column c
    for c in range(2, num_columns + 1):
        out[c] += out[c - 1]


@njit(nogil=True, cache=True)
def _place(
    row, col, num_dst, first, step, first_row, first_pair, pair_step, out, indices, pairs
):  # fmt: skip
    """Write the edges; `out[c + 1]` becomes the end of column c."""
    for e in range(len(col)):
        if col[e] < num_dst:
            c = first + col[e] * step + 1
            position = out[c]
            out[c] = position + 1
            indices[position] = first_row + row[e]
            pairs[position] = first_pair + row[e] * pair_step


@njit(nogil=True, cache=True)
def _place_csc(
    row, indptr, num_dst, first, step, first_row, first_pair, pair_step, out, indices, pairs
):  # fmt: skip
    """`_place` for edges in CSC format."""
    for d in range(num_dst):
        c = first + d * step + 1
        position = out[c]
        for e in range(indptr[d], indptr[d + 1]):
            indices[position] = first_row + row[e]
            pairs[position] = first_pair + row[e] * pair_step
            position += 1
        out[c] = position


def merge_relations(
    relations: Sequence[RelationEdges],
    num_columns: int,
    num_rows: int,
    num_pairs: int,
    *,
    empty: Allocate | None = None,
) -> MergedEdges:
    """Merge the edges of several relations; those of a column keep their order.

    The work is done without the GIL, in time proportional to edges and columns.

    Args:
        relations: disjoint columns of the merged structure.
        num_columns: C.
        num_rows: of the sources of all relations; fewer than 2**31 give int32 indices.
        num_pairs: of sources and relations; fewer than 2**31 give int32 pairs.
        empty: allocates the tensors of the result, on the host. Default: a pool of this module.

    Raises:
        InvalidEdge: an edge has a position out of range.
    """
    empty = empty or _empty
    # one more element, so that counting can shift by two
    shifted = empty(num_columns + 2, torch.int64)
    counts = shifted.numpy()
    counts[:] = 0
    arrays = []
    for number, each in enumerate(relations):
        row, is_csc = each.row.numpy(), each.col is None
        second = each.indptr if each.col is None else each.col
        assert second is not None, "a relation has columns or offsets"
        arrays.append((row, second.numpy()))
        column = each.first_column + each.in_number
        if is_csc:
            ends = (each.num_src, each.num_dst)
            wrong = _count_csc(*arrays[-1], *ends, column, each.num_in, counts)
        else:
            bounds = (each.num_src, each.num_known, each.num_dst)
            wrong = _count(*arrays[-1], *bounds, column, each.num_in, counts)
        if wrong >= 0:
            raise InvalidEdge(number, wrong)
    _accumulate(counts, num_columns + 1)
    num_edges = int(counts[num_columns + 1])
    indices = empty(num_edges, index_dtype(num_rows))
    pairs = empty(num_edges, index_dtype(num_pairs))
    for (row, second_array), each in zip(arrays, relations, strict=True):
        place = _place_csc if each.col is None else _place
        place(
            row,
            second_array,
            each.num_dst,
            each.first_column + each.in_number,
            each.num_in,
            each.first_row,
            each.first_pair + each.out_number,
            each.num_out,
            counts,
            indices.numpy(),
            pairs.numpy(),
        )
    return MergedEdges(shifted[: num_columns + 1], indices, pairs)


def index_dtype(count: int) -> torch.dtype:
    """Return the dtype in which numbers below `count` are stored: int32 if they fit, else int64."""
    return torch.int32 if count < 2**31 else torch.int64
