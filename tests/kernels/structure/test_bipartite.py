"""Offsets of edges that are in the order of their columns."""

import numpy as np
import pytest

from gcnzc.kernels.structure.bipartite import column_offsets, column_offsets_reference


@pytest.mark.parametrize("num_columns", [0, 1, 5, 200])
@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_offsets_equal_the_reference(num_columns, num_edges):
    random = np.random.default_rng(num_columns)
    columns = np.sort(random.integers(0, max(num_columns, 1), num_edges if num_columns else 0))
    expected = column_offsets_reference(columns, num_columns)
    found = column_offsets(columns, num_columns)
    assert found.dtype == np.int64
    assert np.array_equal(found, expected)
