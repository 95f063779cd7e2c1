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
        indptr: (D_all + 1,) int64 offsets of the in-edges of each destination.
        indices: (E_r,) int32 or int64 positions of the sources.
        num_src: S, a bound of `indices`.
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

    indptr: Tensor
    indices: Tensor
    num_src: int
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
        col = torch.arange(each.num_dst).repeat_interleave(each.indptr[: each.num_dst + 1].diff())
        row = each.indices[: len(col)].long()
        columns.append(each.first_column + col * each.num_in + each.in_number)
        rows.append(each.first_row + row)
        pairs.append(each.first_pair + row * each.num_out + each.out_number)
    order = torch.sort(torch.cat(columns), stable=True)
    indptr = torch.searchsorted(order.values, torch.arange(num_columns + 1))
    return indptr, torch.cat(rows)[order.indices], torch.cat(pairs)[order.indices]


@njit(nogil=True, cache=True)
def _count(indptr, indices, num_src, num_dst, first, step, out):
    """Count the edges of each column, in `out[column + 1]`; return the first invalid edge or -1."""
    for d in range(num_dst):
        begin, end = indptr[d], indptr[d + 1]
        if begin < 0 or end < begin or end > len(indices):
            return max(min(begin, len(indices) - 1), 0)
        for e in range(begin, end):
            if indices[e] < 0 or indices[e] >= num_src:
                return e
        out[first + d * step + 1] += end - begin
    return -1


@njit(nogil=True, cache=True)
def _accumulate(out):
    for c in range(1, len(out)):
        out[c] += out[c - 1]


@njit(nogil=True, cache=True)
def _place(
    indptr, indices, num_dst, first, step, first_row, first_pair, pair_step, offsets, out, pairs
):  # fmt: skip
    """Write the edges to the columns that begin at `offsets`."""
    for d in range(num_dst):
        position = offsets[first + d * step]
        for e in range(indptr[d], indptr[d + 1]):
            out[position] = first_row + indices[e]
            pairs[position] = first_pair + indices[e] * pair_step
            position += 1


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
    offsets = empty(num_columns + 1, torch.int64).zero_()
    arrays = [(each.indptr.numpy(), each.indices.numpy()) for each in relations]
    for number, (own, each) in enumerate(zip(arrays, relations, strict=True)):
        column = each.first_column + each.in_number
        bounds = (each.num_src, each.num_dst)
        wrong = _count(*own, *bounds, column, each.num_in, offsets.numpy())
        if wrong >= 0:
            raise InvalidEdge(number, wrong)
    _accumulate(offsets.numpy())
    num_edges = int(offsets[-1])
    indices = empty(num_edges, index_dtype(num_rows))
    pairs = empty(num_edges, index_dtype(num_pairs))
    for own, each in zip(arrays, relations, strict=True):
        _place(
            *own,
            each.num_dst,
            each.first_column + each.in_number,
            each.num_in,
            each.first_row,
            each.first_pair + each.out_number,
            each.num_out,
            offsets.numpy(),
            indices.numpy(),
            pairs.numpy(),
        )
    return MergedEdges(offsets, indices, pairs)


def index_dtype(count: int) -> torch.dtype:
    """Return the dtype in which numbers below `count` are stored: int32 if they fit, else int64."""
    return torch.int32 if count < 2**31 else torch.int64
