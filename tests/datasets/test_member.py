import numpy as np
import pytest
from tiny_graph import rows_of

from gcnzc.datasets import member, rows
from gcnzc.datasets.member import Archive
from gcnzc.datasets.rows import allocate_in_memory


@pytest.fixture(params=[64, 1 << 24], ids=["small chunks", "one chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(member, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(rows, "CHUNK_BYTES", request.param)


def save(path, deflated, **arrays):
    (np.savez_compressed if deflated else np.savez)(path, **arrays)
    return Archive(path)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("deflated", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "int8", "int64"])
def test_rows_and_arrays_equal_those_of_numpy(tmp_path, deflated, order, dtype):
    table = np.arange(37 * 7).reshape(37, 7).astype(dtype, order=order)
    found = save(tmp_path / "a.npz", deflated, table=table).member("table")
    assert (found.array(allocate_in_memory) == table).all()
    assert (rows_of(found.rows()) == table).all()
    assert next(iter(found.rows().chunks(allocate_in_memory))).dtype == dtype


def test_python_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.array([{}, 1], dtype=object))
    with pytest.raises(ValueError, match="would need pickle"):
        Archive(tmp_path / "a.npz").member("a")


def test_a_damaged_archive_is_reported_by_name(tmp_path):
    path = save(tmp_path / "a.npz", False, a=np.arange(100)).path
    whole = path.read_bytes()
    changed = whole[:400] + b"\xff" + whole[401:]
    for broken in (whole[:400], b"words", changed):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"a.npz is not a complete .npz archive: .*\n\nhint: "):
            Archive(path).member("a").in_memory()


def test_a_missing_file_or_array_is_reported_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*a.npz\n\nhint: "):
        Archive(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="no array b\n\nhint: it has a"):
        save(tmp_path / "a.npz", False, a=np.arange(2)).member("b")
