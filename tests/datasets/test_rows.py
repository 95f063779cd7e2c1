from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gcnzc.datasets import rows
from gcnzc.datasets.rows import (
    Csr,
    Rows,
    allocate_in_memory,
    as_bytes,
    chunk_rows,
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


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 24])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "bool"])
def test_rows_of_an_array(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, dtype: str) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    table = TABLE.astype(dtype)
    assert (all_of(rows_from_array(table, "here")) == table.astype(np.float32)).all()
    assert (all_of(rows_from_array(table[::2, 1:4], "here")) == table[::2, 1:4]).all()


def test_a_chunk_has_at_least_one_row() -> None:
    assert chunk_rows(1, 1) == rows.CHUNK_BYTES
    assert chunk_rows(rows.CHUNK_BYTES, 4) == 1
    assert chunk_rows(0, 4) > 0


@pytest.mark.parametrize("table", [np.zeros(3), np.zeros((3, 2), "U1"), np.zeros((3, 2), complex)])
def test_arrays_that_are_no_table_are_rejected(table: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"here has shape .* not a table of numbers\n\nhint: "):
        rows_from_array(table, "here")


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


@pytest.mark.parametrize("found", [49, 51])
def test_the_number_of_rows_is_checked(found: int) -> None:
    def chunks(allocate: object) -> Iterator[NDArray[Any]]:
        yield TABLE[:40]
        yield np.zeros((found - 40, 7), np.float32)

    table = Rows(50, 7, TABLE.dtype, chunks, "here")
    with pytest.raises(ValueError, match=r"here has .* rows of features for 50 nodes\n\nhint: "):
        all_of(table)


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


def test_bytes_are_in_the_order_of_the_elements() -> None:
    for array in (TABLE, TABLE.T, TABLE[::2, ::3], TABLE[:0], np.float32(3)[None]):
        assert bytes(as_bytes(array)) == array.tobytes()


def test_too_little_memory_is_reported() -> None:
    with pytest.raises(
        RuntimeError, match=r"not enough memory for x: .* bytes\n\nhint: `gcnzc prepare`"
    ):
        allocate_in_memory("x", 1 << 60, np.int8)
