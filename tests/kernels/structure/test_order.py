"""The order of an edge list's edges in the CSC."""

import pytest
import torch

from gcnzc.graph.graph import Graph
from gcnzc.kernels.structure.csc import csc_order, csc_order_reference


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 5), (7, 40), (300, 2000)])
def test_equals_the_reference_and_fits_the_graph(num_nodes, num_edges, dtype):
    src, dst = torch.randint(num_nodes, (2, num_edges), dtype=dtype)
    graph = Graph.from_edges(src, dst, num_nodes)
    found = csc_order(graph.indptr, dst)
    assert found.dtype == torch.int64
    assert torch.equal(found, csc_order_reference(dst))
    assert torch.equal(src[found].long(), graph.indices.long())


def test_destinations_may_be_strided():
    src, dst = torch.randint(9, (50, 2)).T
    found = csc_order(Graph.from_edges(src, dst, 9).indptr, dst)
    assert torch.equal(found, csc_order_reference(dst.clone()))
