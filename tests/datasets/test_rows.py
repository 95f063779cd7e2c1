from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gcnzc.datasets import rows
from gcnzc.datasets.rows import (
    Csr,
    Rows,
    allocate_in_memory,
    convert_chunks,
    no_progress,
    normalize_rows,
    rows_from_array,
    rows_from_csr,
    stored_dtype,
)

TABLE = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)


def all_of(table: Rows, dtype: Any = np.float32, allow_nan: bool = False) -> NDArray[Any]:
    parts = convert_chunks(table, np.dtype(dtype), allow_nan, allocate_in_memory, no_progress)
    return np.concatenate([part.copy() for part in parts])


def test_half_precision_is_kept_and_other_dtypes_become_float32() -> None:
    for kind, expected in (("float16", "float16"), ("float64", "float32"), ("int8", "float32")):
        table = rows_from_array(TABLE.astype(kind), "here")
        assert stored_dtype(table, None) == expected
        assert stored_dtype(table, "float16") == "float16"


@pytest.mark.parametrize(("bad", "words"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_numbers_that_are_not_finite_are_rejected(bad: float, words: str) -> None:
    table = TABLE.copy()
    table[30, 4] = bad
    with pytest.raises(ValueError, match=rf"here: {words} in row 30, column 4\n\nhint: "):
        all_of(rows_from_array(table, "here"))
    assert np.array_equal(all_of(rows_from_array(table, "here"), allow_nan=True), table, True)


@pytest.mark.parametrize(("large", "dtype"), [(1e5, "float16"), (1e300, "float32")])
def test_numbers_that_overflow_the_dtype_are_rejected(large: float, dtype: str) -> None:
    table = TABLE.astype(np.float64)
    table[30, 4] = large
    with pytest.raises(ValueError, match=rf"in row 30 is too large for {dtype}\n\nhint: "):
        all_of(rows_from_array(table, "here"), dtype, allow_nan=True)


def csr_of(dense: NDArray[Any]) -> Csr:
    lines, columns = np.nonzero(dense)
    starts = np.searchsorted(lines, np.arange(len(dense) + 1))
    return Csr(starts, columns.astype(np.int32), dense[lines, columns])


def test_values_at_equal_positions_are_added() -> None:
    csr = Csr(np.array([0, 3, 3]), np.array([1, 1, 0]), np.array([2.0, 3.0, 4.0]))
    assert all_of(rows_from_csr(csr, 3, "here")).tolist() == [[4, 5, 0], [0, 0, 0]]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("chunk_bytes", [50, 1 << 24])
def test_rows_are_normalized_to_the_sum_1(
    monkeypatch: pytest.MonkeyPatch, dense: bool, chunk_bytes: int
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    table = np.where(TABLE > 0.5, TABLE, 0)
    table[3] = 0
    table[4, :2] = -1, 2
    given = rows_from_array(table, "here") if dense else rows_from_csr(csr_of(table), 7, "here")
    sums = np.abs(table.astype(np.float64)).sum(1, keepdims=True)
    expected = table / np.where(sums == 0, 1, sums)
    np.testing.assert_allclose(all_of(normalize_rows(given)), expected, rtol=1e-6)
