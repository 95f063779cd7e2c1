"""Merged relations equal the reference."""

from dataclasses import replace

import pytest
import torch

from gcnzc.kernels.structure.relation_columns import (
    InvalidEdge,
    RelationEdges,
    merge_relations,
    merge_relations_reference,
)

# two node types: A has 5 sources and 4 destinations, B has 6 and 3; relations A->B, B->B, A->A
NUM_COLUMNS, NUM_ROWS, NUM_PAIRS = 4 + 2 * 3, 11, 2 * 5 + 6


def relations(as_csc, num_edges=20):
    """Relations whose edges are in any order, or in CSC format; some destinations are omitted."""
    first = {"A": (0, 0), "B": (5, 10)}
    layout = [("A", "B", 2, 0, 2, 0), ("B", "B", 1, 0, 2, 1), ("A", "A", 2, 1, 1, 0)]
    found = []
    for source, destination, num_out, out_number, num_in, in_number in layout:
        num_src, num_dst = {"A": 5, "B": 6}[source], {"A": 4, "B": 3}[destination]
        col = torch.randint(0, 7, (num_edges,))
        indptr = None
        if as_csc:
            counts = torch.bincount(col, minlength=7)
            indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        found.append(
            RelationEdges(
                row=torch.randint(0, num_src, (num_edges,), dtype=torch.int32),
                col=None if as_csc else col,
                indptr=indptr,
                num_src=num_src,
                num_known=7,
                num_dst=num_dst,
                first_row=first[source][0],
                first_pair=first[source][1],
                num_out=num_out,
                out_number=out_number,
                first_column=0 if destination == "A" else 4,
                num_in=num_in,
                in_number=in_number,
            )
        )
    return found


@pytest.mark.parametrize("as_csc", [False, True])
@pytest.mark.parametrize("num_edges", [0, 20])
def test_equals_the_reference(as_csc, num_edges):
    for seed in range(5):
        torch.manual_seed(seed)
        given = relations(as_csc, num_edges)
        merged = merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
        expected = merge_relations_reference(given, NUM_COLUMNS)
        for found, right in zip(
            (merged.indptr, merged.indices, merged.pairs), expected, strict=True
        ):
            assert torch.equal(found.long(), right)
        assert merged.indices.dtype == merged.pairs.dtype == torch.int32


def test_many_rows_have_64_bit_indices():
    given = [replace(relations(False)[0], first_row=2**31)]
    merged = merge_relations(given, NUM_COLUMNS, 2**31 + 5, NUM_PAIRS)
    assert merged.indices.dtype == torch.int64
    assert torch.equal(merged.indices, merge_relations_reference(given, NUM_COLUMNS)[1])


@pytest.mark.parametrize("as_csc", [False, True])
def test_positions_out_of_range_are_errors(as_csc):
    given = relations(as_csc)
    given[1].row[:] = 6
    with pytest.raises(InvalidEdge) as error:
        merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
    assert error.value.relation == 1


@pytest.mark.parametrize("offset", [-1, 10**9])
def test_offsets_out_of_range_are_errors(offset):
    given = relations(True)
    given[2].indptr[1] = offset
    with pytest.raises(InvalidEdge) as error:
        merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
    assert error.value.relation == 2
