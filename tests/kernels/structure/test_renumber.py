import pytest
import torch
from blocks import random_block

from gcnzc.kernels.structure.csc import (
    mark_sources,
    mark_sources_reference,
    select_columns,
    select_columns_reference,
)

# nodes of the graph, the most in-edges of a node, selected nodes; the last has several threads
CASES = [(70, 9, 20), (5, 0, 3), (40, 6, 0), (20_000, 4, 12_000)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(case, ids):
    num_nodes, most, num_selected = case
    indptr, indices = random_block(num_nodes, num_nodes, most, pointers=torch.int64, ids=ids)
    nodes = torch.randperm(num_nodes)[:num_selected]
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mark_sources(indptr, indices, nodes, mask)
    assert torch.equal(mask, mark_sources_reference(indptr, indices, nodes))
    number_of = torch.randperm(num_nodes).to(ids)
    found = select_columns(indptr, indices, nodes, number_of)
    expected = select_columns_reference(indptr, indices, nodes, number_of)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_marks_are_added():
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    mask = torch.tensor([True, False])
    mark_sources(indptr, indices, torch.tensor([0]), mask)
    assert mask.tolist() == [True, True]
