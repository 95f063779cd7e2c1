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
    sizes = {"A": (0, 0, 5, 4), "B": (5, 10, 6, 3)}
    layout = [("A", "B", 2, 0, 2, 0), ("B", "B", 1, 0, 2, 1), ("A", "A", 2, 1, 1, 0)]
    found = []
    for source, destination, num_out, out_number, num_in, in_number in layout:
        first_row, first_pair, num_src, _ = sizes[source]
        col, indptr = torch.randint(0, 7, (num_edges,)), None
        if as_csc:
            indptr = torch.searchsorted(col.sort().values, torch.arange(8))
        found.append(
            RelationEdges(
                row=torch.randint(0, num_src, (num_edges,), dtype=torch.int32),
                col=None if as_csc else col,
                indptr=indptr,
                num_src=num_src,
                num_known=7,
                num_dst=sizes[destination][3],
                first_row=first_row,
                first_pair=first_pair,
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
        found = merged.indptr, merged.indices, merged.pairs
        assert all(torch.equal(a.long(), b) for a, b in zip(found, expected, strict=True))
        assert merged.indices.dtype == merged.pairs.dtype == torch.int32


def test_many_rows_have_64_bit_indices():
    given = [replace(relations(False)[0], first_row=2**31)]
    merged = merge_relations(given, NUM_COLUMNS, 2**31 + 5, NUM_PAIRS)
    assert merged.indices.dtype == torch.int64
    assert torch.equal(merged.indices, merge_relations_reference(given, NUM_COLUMNS)[1])


@pytest.mark.parametrize(
    ("as_csc", "name", "place", "value"),
    [(False, "row", slice(None), 6), (True, "row", slice(None), 6)]
    + [(True, "indptr", 1, offset) for offset in (-1, 10**9)],
)
def test_positions_and_offsets_out_of_range_are_errors(as_csc, name, place, value):
    given = relations(as_csc)
    getattr(given[1], name)[place] = value
    with pytest.raises(InvalidEdge) as error:
        merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
    assert error.value.relation == 1
