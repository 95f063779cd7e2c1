"""Scales from degrees."""

import pytest
import torch

from gcnzc.kernels.aggregate.degree_scales import gcn_scales, gcn_scales_reference


@pytest.mark.parametrize("rows", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_targets", [0, 1, 50_000])
@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
def test_scales_of_gcn_equal_the_reference(rows, num_targets, pointers):
    degrees = torch.randint(0, 1 << 26, (num_targets,)) >> torch.randint(0, 27, (num_targets,))
    num_sampled = degrees.clamp(max=15)
    indptr = torch.nn.functional.pad(num_sampled.cumsum(0), (1, 0)).to(pointers)
    expected = gcn_scales_reference(indptr, degrees, rows)
    found = gcn_scales(indptr, degrees, rows)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("count", [2, 4])
def test_each_target_has_a_degree(count):
    with pytest.raises(ValueError, match=f"{count} degrees for 3 targets"):
        gcn_scales(torch.tensor([0, 1, 2, 3]), torch.ones(count, dtype=torch.int64), torch.float32)
