"""Trainable embeddings: gathers with gradients, files, and bad input."""

import numpy as np
import pytest
import torch

import gcnzc
from gcnzc.features import EmbeddingTable
from gcnzc.system import row_memory


def table(num_rows=20, num_columns=3, dtype=torch.float64, **options):
    return EmbeddingTable(num_rows, num_columns, dtype=dtype, **options)


def test_initial_rows_depend_on_the_seed_and_not_on_threads():
    first = table(30_000, 8, seed=1, threads=1)
    assert torch.equal(first.rows, table(30_000, 8, seed=1, threads=2).rows)
    assert not torch.equal(first.rows, table(30_000, 8, seed=2).rows)
    assert abs(float(first.rows.std()) - 1) < 0.01
    assert abs(float(table(30_000, 8, scale=0.1).rows.std()) - 0.1) < 0.001
    assert float(table(30_000, 8, init="uniform", scale=0.1).rows.abs().max()) <= 0.1
    assert not table(init="zeros").rows.any()
    assert table().dtype == torch.float64
    assert (len(first), first.num_columns, first.nbytes) == (30_000, 8, 30_000 * 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_gradients_equal_those_of_a_dense_embedding(dtype, id_dtype):
    torch.manual_seed(0)
    own, weights = table(dtype=dtype), torch.randn(3, dtype=dtype)
    rows = own.rows.clone().requires_grad_()
    ids = torch.randint(20, (50,), dtype=id_dtype)
    loss = (own.gather(ids) @ weights).tanh().square().sum()
    expected = (rows[ids] @ weights).tanh().square().sum()
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    taken, gradients = own.take_gradients()
    assert torch.equal(taken, ids.long().unique())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(gradients, rows.grad[taken], rtol=10 * tolerance, atol=tolerance)
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[taken] = False
    assert not rows.grad[untouched].any()
    assert len(own.take_gradients()[0]) == 0


def test_gradients_of_several_gathers_and_backward_passes_are_added_once():
    own = table()
    first, second = own.gather([4, 5]), own.gather([5, 6])
    (first.sum() + 2 * second.sum()).backward(retain_graph=True)
    assert torch.equal(first.grad, torch.ones(2, 3, dtype=torch.float64))
    (10 * first.sum()).backward()
    ids, gradients = own.take_gradients()
    assert ids.tolist() == [4, 5, 6]
    assert gradients[:, 0].tolist() == [11, 13, 2]
    assert first.grad is None
    # a later pass through the same rows begins at zero
    (3 * first.sum()).backward()
    assert own.take_gradients()[1][:, 0].tolist() == [3, 3]


def test_the_order_of_backward_passes_does_not_change_the_sum():
    values = [1e16, 1.0, -1e16]

    def total(order):
        own = table()
        rows = [own.gather([2]) for _ in values]
        for index in order:
            (values[index] * rows[index].sum()).backward()
        return float(own.take_gradients()[1][0, 0])

    assert total([0, 1, 2]) == total([2, 1, 0]) == total([1, 0, 2]) == (1e16 + 1.0) - 1e16


def test_empty_ids_and_empty_tables():
    own = table()
    rows = own.gather([])
    assert rows.shape == (0, 3)
    rows.sum().backward()
    assert own.take_gradients()[1].shape == (0, 3)
    assert table(num_rows=0).gather([]).shape == (0, 3)


@pytest.mark.gpu
def test_a_gpu_gathers_the_same_rows_with_and_without_page_locking():
    own = table(1000, 16, torch.float32)
    ids = torch.randint(1000, (300,))
    expected = own.rows[ids]
    for where in (ids, ids.cuda()):
        copied = own.gather(where, "cuda")
        assert copied.is_cuda
        assert torch.equal(copied.cpu(), expected)
        with gcnzc.pinned(own.rows):
            read = own.gather(where, "cuda")
            assert torch.equal(read.cpu(), expected)
            read.square().sum().backward()
            taken, gradients = own.take_gradients()
    assert gradients.device.type == "cpu"
    counts = torch.bincount(ids)[taken, None]
    torch.testing.assert_close(gradients, 2 * counts * own.rows[taken])


def test_mapped_files_keep_updates(tmp_path):
    path = tmp_path / "paper.npy"
    own = table(seed=4, path=path)
    assert torch.equal(own.rows, table(seed=4).rows)
    own.rows[3] = 5
    del own
    again = EmbeddingTable.open(path)
    assert again.rows[3].tolist() == [5, 5, 5]
    assert np.load(path)[3].tolist() == [5, 5, 5]
    read_only = EmbeddingTable.open(path, read_only=True)
    assert not read_only.is_trainable
    assert not read_only.gather([3]).requires_grad
    # a change stays in this process
    read_only.rows[3] = 6
    assert np.load(path)[3].tolist() == [5, 5, 5]
    with pytest.raises(FileExistsError, match=r"paper\.npy exists"):
        table(path=path)


def test_an_error_leaves_no_mapped_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_memory.os, "posix_fallocate", fail)
    with pytest.raises(OSError, match=r"no space left on .*paper\.npy\n\nhint: free"):
        table(path=tmp_path / "paper.npy")
    assert not list(tmp_path.iterdir())


def test_saved_tables_are_loaded_bit_for_bit(tmp_path):
    own = table(seed=9)
    own.save(tmp_path / "paper.npz")
    assert torch.equal(EmbeddingTable.load(tmp_path / "paper.npz").rows, own.rows)
    assert np.array_equal(np.load(tmp_path / "paper.npz")["rows"], own.rows.numpy())
    other = table(seed=10)
    other.load_state_dict(own.state_dict())
    assert torch.equal(other.rows, own.rows)
    assert other.rows is not own.rows
    with pytest.raises(ValueError, match="no table 'paper/rows', but rows"):
        EmbeddingTable.load(tmp_path / "paper.npz", "paper/rows")
    with pytest.raises(ValueError, match=r"float32 and shape \(20, 3\) as the rows"):
        own.load_state_dict({"rows": torch.zeros(20, 3)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_columns": 0}, "num_columns is 0"),
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16"),
        ({"scale": 1e38, "dtype": torch.float32}, r"scale is 1e\+38"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    """`test_arguments.py` has values of wrong types, and those that no argument takes."""
    with pytest.raises(ValueError, match=message):
        table(**options)


def test_wrong_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError):
        EmbeddingTable.open(tmp_path / "none.npy")
    for name, array in {
        "integers": np.zeros((5, 2), np.int64),
        "vector": np.zeros(5, np.float32),
        "columns": np.zeros((5, 2), np.float32, order="F"),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ValueError, match=rf"{name}\.npy has an? (array|tensor)"):
            EmbeddingTable.open(tmp_path / f"{name}.npy")


def test_damaged_headers_of_mapped_files_are_named(tmp_path):
    path = tmp_path / "rows.npy"
    table(5, 2, path=path)
    data = path.read_bytes()
    damaged = [data[:length] for length in range(len(data))]
    for index in range(128):
        for flip in (1, 4, 64, 255):
            damaged.append(data[:index] + bytes([data[index] ^ flip]) + data[index + 1 :])
    messages = []
    for each in damaged:
        path.write_bytes(each)
        for read_only in (False, True):
            try:
                EmbeddingTable.open(path, read_only=read_only)
            except ValueError as error:
                messages.append(str(error))
        # opening does not change the file
        assert path.read_bytes() == each
    assert all("rows.npy" in each and "\n\nhint: " in each for each in messages)
    assert len(messages) > len(damaged)


def test_too_little_memory_is_an_error_with_the_bytes(monkeypatch):
    monkeypatch.setattr(row_memory, "available_bytes", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs 1,024 bytes of memory, but 1,000 are available"):
        table(16, 8)
    table(15, 8)
    with pytest.raises(RuntimeError, match=r"needs 80,000,000,000,000,000 bytes"):
        table(10**15, 10)
