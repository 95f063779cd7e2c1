"""A table knows its sizes, gathers where it lies, and gives back what it locked."""

import contextlib

import pytest
import torch

from gcnzc.table import FeatureTable, pinned


class Cudart:
    """Stands for CUDA's runtime: notes what is locked, and refuses when told to."""

    def __init__(self, lock_error=0, unlock_error=0):
        self.lock_error, self.unlock_error = lock_error, unlock_error
        self.calls = []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.calls.append(("lock", address, num_bytes))
        return self.lock_error

    def cudaHostUnregister(self, address):
        self.calls.append(("unlock", address))
        return self.unlock_error


@pytest.fixture
def cuda(monkeypatch):
    """A machine that has CUDA, for as much of it as `pinned` asks about."""

    def has(cudart):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: cudart.calls.append(("wait",)))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
        return cudart

    return has


def sparse(rows):
    return rows.to_sparse_csr()


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


def test_sizes():
    table = FeatureTable(torch.zeros(7, 5, dtype=torch.float16)[:, :3])
    assert len(table) == table.num_rows == 7
    assert table.num_columns == 3
    assert table.row_bytes == 6
    assert table.nbytes == 42
    assert table.dtype == torch.float16
    assert table.device == torch.device("cpu")
    assert not table.is_sparse
    assert "7 x 3 torch.float16 on cpu" in repr(table)


def test_sizes_of_a_sparse_table():
    table = FeatureTable(sparse(torch.eye(4)[:, :3].contiguous()))
    assert table.is_sparse
    assert table.row_bytes == 12
    assert table.nbytes == 5 * 8 + 3 * 8 + 3 * 4
    assert "sparse" in repr(table)


@pytest.mark.parametrize("make", [lambda rows: rows, sparse])
def test_gather(make):
    rows = torch.randn(50, 9)
    table = FeatureTable(make(rows))
    ids = torch.tensor([3, 3, 49, 0])
    out = torch.empty(4, 9)
    assert torch.equal(table.gather(ids), rows[ids])
    assert table.gather(ids, out, threads=1) is out
    assert torch.equal(out, rows[ids])
    with pytest.raises(IndexError, match="id 50 is not in a table of 50 rows"):
        table.gather(torch.tensor([50]))


def test_rows_are_not_copied():
    rows = torch.zeros(5, 3)
    table = FeatureTable(rows)
    rows[4] = 7
    assert table.gather(torch.tensor([4])).tolist() == [[7, 7, 7]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(5), r"two dimensions, not \(5,\)"),
        (torch.zeros(5, 2).numpy(), "not ndarray"),
        (torch.zeros(5, 2, requires_grad=True), "wants a gradient"),
        (torch.zeros(5, 4).t(), "contiguous rows"),
        (torch.zeros(5, 4).to_sparse(), "dense with contiguous rows, or CSR"),
    ],
)
def test_no_table(rows, words):
    with pytest.raises(ValueError, match=rf"(?s){words}.*\n\nhint: "):
        FeatureTable(rows)


def test_no_sparse_table_of_doubles():
    with pytest.raises(ValueError, match=r"(?s)float32 on the host, not torch.float64.*hint: "):
        FeatureTable(sparse(torch.eye(3, dtype=torch.float64)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("make", [lambda rows: rows, sparse])
def test_pinned_without_cuda(make):
    rows = make(torch.eye(3))
    with pinned(rows) as table:
        assert table.rows is rows


def test_pinned_locks_and_unlocks(cuda):
    cudart = cuda(Cudart())
    rows = torch.zeros(10, 8)
    with pinned(rows) as table:
        assert table.rows is rows
        assert cudart.calls == [("lock", rows.data_ptr(), 320)]
    assert cudart.calls[1:] == [("wait",), ("unlock", rows.data_ptr())]


def test_pinned_locks_a_view_from_its_first_to_its_last_byte(cuda):
    cudart = cuda(Cudart())
    rows = torch.zeros(10, 8)[2:6, 1:4]
    with pinned(rows):
        assert cudart.calls == [("lock", rows.data_ptr(), (3 * 8 + 3) * 4)]


def test_pinned_unlocks_after_an_error(cuda):
    cudart = cuda(Cudart())
    with pytest.raises(KeyError), pinned(torch.zeros(3, 2)):
        raise KeyError
    assert [call[0] for call in cudart.calls] == ["lock", "wait", "unlock"]


def test_pinned_is_refused(cuda):
    cudart = cuda(Cudart(lock_error=2))
    with (
        pytest.raises(RuntimeError, match=r"(?s)would not lock 24 bytes.*error 2.*hint: .*ulimit"),
        pinned(torch.zeros(3, 2)),
    ):
        pytest.fail("nothing is locked here")
    assert [call[0] for call in cudart.calls] == ["lock"]


def test_unlocking_is_refused(cuda):
    cuda(Cudart(unlock_error=4))
    with pytest.raises(RuntimeError, match="would not unlock 24 bytes"), pinned(torch.zeros(3, 2)):
        pass


def test_pinned_leaves_alone_what_is_locked_or_empty(cuda, monkeypatch):
    cudart = cuda(Cudart())
    for empty in (torch.zeros(0, 4), torch.zeros(4, 0)):
        with pinned(empty) as table:
            assert table.rows is empty
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    with pinned(torch.zeros(3, 2)):
        pass
    assert cudart.calls == []


def test_pinned_refuses_a_sparse_table_on_a_gpu(cuda):
    cuda(Cudart())
    with pytest.raises(ValueError, match=r"(?s)sparse table of 3 rows.*hint: "):
        pinned(sparse(torch.eye(3))).__enter__()


@pytest.mark.gpu
def test_pinned_again_and_again(device):
    rows = torch.randn(100_000, 101)
    ids = torch.randint(100_000, (5000,), device=device)
    for _ in range(3):
        with pinned(rows) as table, pinned(rows):
            assert rows.is_pinned()
            assert torch.equal(table.gather(ids).cpu(), rows[ids.cpu()])
        assert not rows.is_pinned()
        with contextlib.suppress(KeyError), pinned(rows):
            raise KeyError
        assert not rows.is_pinned()


@pytest.mark.gpu
def test_pinned_rows_on_a_gpu(device):
    rows = torch.randn(5, 3, device=device)
    with pinned(rows) as table:
        assert table.gather(torch.tensor([4], device=device)).tolist() == rows[4:].tolist()
