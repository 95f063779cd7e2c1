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


def relations(num_edges=20):
    """Relations in CSC format; some destinations are omitted."""
    sizes = {"A": (0, 0, 5, 4), "B": (5, 10, 6, 3)}
    layout = [("A", "B", 2, 0, 2, 0), ("B", "B", 1, 0, 2, 1), ("A", "A", 2, 1, 1, 0)]
    found = []
    for source, destination, num_out, out_number, num_in, in_number in layout:
        first_row, first_pair, num_src, _ = sizes[source]
        col = torch.randint(0, 7, (num_edges,))
        found.append(
            RelationEdges(
                indptr=torch.searchsorted(col.sort().values, torch.arange(8)),
                indices=torch.randint(0, num_src, (num_edges,), dtype=torch.int32),
                num_src=num_src,
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


@pytest.mark.parametrize("num_edges", [0, 20])
def test_equals_the_reference(num_edges):
    for seed in range(5):
        torch.manual_seed(seed)
        given = relations(num_edges)
        merged = merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
        expected = merge_relations_reference(given, NUM_COLUMNS)
        found = merged.indptr, merged.indices, merged.pairs
        assert all(torch.equal(a.long(), b) for a, b in zip(found, expected, strict=True))
        assert merged.indices.dtype == merged.pairs.dtype == torch.int32


def test_many_rows_have_64_bit_indices():
    given = [replace(relations()[0], first_row=2**31)]
    merged = merge_relations(given, NUM_COLUMNS, 2**31 + 5, NUM_PAIRS)
    assert merged.indices.dtype == torch.int64
    assert torch.equal(merged.indices, merge_relations_reference(given, NUM_COLUMNS)[1])


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("indices", slice(None), 6), ("indices", 3, -1), ("indptr", 1, -1), ("indptr", 1, 10**9)],
)
def test_positions_and_offsets_out_of_range_are_errors(name, place, value):
    given = relations()
    getattr(given[1], name)[place] = value
    with pytest.raises(InvalidEdge) as error:
        merge_relations(given, NUM_COLUMNS, NUM_ROWS, NUM_PAIRS)
    assert error.value.relation == 1
