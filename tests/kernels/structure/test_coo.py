"""CSC is converted to lists of edges."""

import pytest
import torch
from blocks import random_block

from gcnzc.kernels.structure.csc import csc_to_coo, csc_to_coo_reference


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("first", [0, 3, 20])
@pytest.mark.parametrize("most", [0, 4])
def test_equals_the_reference(ids, first, most):
    indptr, indices = random_block(30, 20, most, pointers=torch.int64, ids=ids)
    expected = csc_to_coo_reference(indptr, indices, first)
    # a part of a larger list, whose other entries stay
    whole = torch.full((2, expected.shape[1] + 5), -1)
    out = whole[:, 2 : 2 + expected.shape[1]]
    assert csc_to_coo(indptr, indices, out, first) is out
    assert torch.equal(out, expected)
    assert int((whole == -1).sum()) == 10
