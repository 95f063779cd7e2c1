import pytest
import torch
from blocks import random_block

from gcnzc.kernels.structure.transpose import transpose, transpose_reference

CASES = [(70, 50, 9), (3, 500, 40), (1, 1, 0), (2000, 1, 5), (5, 0, 0)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(case, pointers, ids):
    num_sources = case[0]
    indptr, indices = random_block(*case, pointers=pointers, ids=ids)
    made = transpose(indptr, indices, num_sources)
    expected = transpose_reference(indptr, indices, num_sources)
    for name in ("indptr", "targets", "edges"):
        torch.testing.assert_close(getattr(made, name), getattr(expected, name), rtol=0, atol=0)


def test_is_computed_once_for_a_block_that_is_not_written_to():
    indptr, indices = random_block(20, 100, 6)
    first = transpose(indptr, indices, 20)
    assert transpose(indptr, indices, 20) is first
    indices.zero_()
    assert transpose(indptr, indices, 20).indptr[1] == len(indices)


def test_is_not_cached_longer_than_the_block():
    from gcnzc.kernels.structure.transpose import _transposed_blocks

    indptr, indices = random_block(20, 100, 6)
    before = len(_transposed_blocks)
    transpose(indptr, indices, 20)
    assert len(_transposed_blocks) == before + 1
    del indices
    assert len(_transposed_blocks) == before
