import numpy as np
import pytest
from tiny_graph import rows_of

from gcnzc.datasets.rows import Csr, allocate_in_memory, rows_from_csr


def test_values_at_equal_positions_are_added():
    csr = Csr(np.array([0, 3, 3]), np.array([1, 1, 0]), np.array([2.0, 3.0, 4.0]))
    assert rows_of(rows_from_csr(csr, 3, "here")).tolist() == [[4, 5, 0], [0, 0, 0]]


def test_too_little_memory_is_reported():
    with pytest.raises(RuntimeError, match=r"memory for sources: 9,007,199,254,740,992 bytes\n"):
        allocate_in_memory("sources", 2**50, np.float64)
