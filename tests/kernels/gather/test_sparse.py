"""`gather_sparse` equals its reference, and rejects indices out of range."""

import warnings

import pytest
import torch

from gcnzc.kernels.gather import sparse as module
from gcnzc.kernels.gather.sparse import gather_sparse, gather_sparse_reference


@pytest.fixture(autouse=True)
def no_talk():
    # torch says once a process that CSR is in beta state, and that its indices are not checked
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        yield


def bag(num_rows=40, num_columns=333, share=0.05):
    dense = torch.randn(num_rows, num_columns)
    dense[torch.rand(num_rows, num_columns) > share] = 0
    return dense.to_sparse_csr()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_equals_reference(threads, id_dtype, monkeypatch):
    monkeypatch.setattr(module, "GRAIN_BYTES", 1)
    table = bag()
    ids = torch.randint(40, (57,), dtype=id_dtype)
    assert torch.equal(gather_sparse(table, ids, threads=threads), table.to_dense()[ids])
    assert torch.equal(gather_sparse_reference(table, ids), table.to_dense()[ids])
    assert gather_sparse(table, ids[:0]).shape == (0, 333)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_empty_rows_are_supported(index_dtype):
    table = torch.sparse_csr_tensor(
        torch.tensor([0, 0, 2, 2], dtype=index_dtype),
        torch.tensor([1, 4], dtype=index_dtype),
        torch.tensor([float("nan"), -0.0]),
        size=(3, 5),
    )
    out = torch.full((4, 5), 9.0)
    assert gather_sparse(table, torch.tensor([2, 1, 0, 1]), out) is out
    assert out[[0, 2]].eq(0).all()
    assert out[1].isnan().tolist() == [False, True, False, False, False]
    assert torch.signbit(out[1, 4])


def test_elements_with_the_same_column_are_added():
    table = torch.sparse_csr_tensor(
        torch.tensor([0, 4, 5]),
        torch.tensor([3, 1, 3, 1, 0]),
        torch.tensor([1.0, 2.0, 4.0, -8.0, 16.0]),
        (2, 5),
    )
    expected = torch.tensor([[16.0, 0, 0, 0, 0], [0, -6.0, 0, 5.0, 0]])
    assert torch.equal(gather_sparse(table, torch.tensor([1, 0])), expected)
    assert torch.equal(gather_sparse_reference(table, torch.tensor([1, 0])), expected)


def test_an_out_that_overlaps_the_values_is_rejected():
    table = torch.ones(4, 5).to_sparse_csr()
    with pytest.raises(ValueError, match=r"shares memory with the table(?s:.*)hint: "):
        gather_sparse(table, torch.tensor([3, 0]), table.values()[:10].view(2, 5))


def test_ids_and_indices_out_of_range_are_rejected():
    table = bag()
    for outside in (-1, 40):
        with pytest.raises(IndexError, match=f"id {outside} is not in a table of 40 rows"):
            gather_sparse(table, torch.tensor([0, outside]))
    with torch.sparse.check_sparse_tensor_invariants(False):
        wrong = torch.sparse_csr_tensor([0, 1], [7], [1.0], size=(1, 5))
    with pytest.raises(ValueError, match="column id 7, which is not in"):
        gather_sparse(wrong, torch.tensor([0]))
