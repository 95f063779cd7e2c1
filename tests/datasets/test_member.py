from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gcnzc.datasets import member, rows
from gcnzc.datasets.member import Archive
from gcnzc.datasets.rows import allocate_in_memory, no_progress


@pytest.fixture(params=[64, 1 << 24], ids=["small chunks", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(rows, "CHUNK_BYTES", request.param)


def save(path: Path, deflated: bool, **arrays: NDArray[Any]) -> Archive:
    (np.savez_compressed if deflated else np.savez)(path, **arrays)
    return Archive(path)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("deflated", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "int8", "int64"])
def test_rows_and_arrays_equal_those_of_numpy(
    tmp_path: Path, deflated: bool, order: Any, dtype: str
) -> None:
    table = np.arange(37 * 7).reshape(37, 7).astype(dtype, order=order)
    found = save(tmp_path / "a.npz", deflated, table=table).member("table")
    assert (found.array(allocate_in_memory) == table).all()
    parts = [part.copy() for part in found.rows().chunks(allocate_in_memory)]
    assert (np.concatenate(parts) == table).all()
    assert parts[0].dtype == dtype


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("num_edges", [0, 1, 4, 101])
def test_edges_are_read_and_checked(tmp_path: Path, order: Any, dtype: Any, num_edges: int) -> None:
    edges = np.random.default_rng(0).integers(200, size=(2, num_edges)).astype(dtype, order=order)
    archive = save(tmp_path / "a.npz", True, edge_index=edges)
    sources, destinations = archive.member("edge_index").edges(
        (200, 200), allocate_in_memory, no_progress
    )
    assert sources.dtype == np.int32
    assert (sources == edges[0]).all()
    assert (destinations == edges[1]).all()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("row", "node"), [(0, -1), (1, 200)])
def test_an_edge_to_an_unknown_node_is_reported(
    tmp_path: Path, order: Any, row: int, node: int
) -> None:
    edges = np.ones((2, 50), np.int64, order=order)
    edges[row, 31] = node
    found = save(tmp_path / "a.npz", False, edge_index=edges).member("edge_index")
    with pytest.raises(ValueError, match=rf"edge 31 has the node {node}, but nodes are 0 to 199"):
        found.edges((200, 200), allocate_in_memory, no_progress)


def test_a_damaged_archive_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, False, table=np.arange(1000))
    whole = path.read_bytes()
    for broken in (whole[:4000], b"words", b""):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"not a complete .npz archive.*\n\nhint: "):
            Archive(path)
    # one bit of the data: found when the last byte has been read
    path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    with pytest.raises(ValueError, match=r"not a complete .npz archive.*CRC"):
        Archive(path).array("table")


def test_python_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{}, 1], dtype=object))
    with pytest.raises(ValueError, match="would need pickle"):
        Archive(tmp_path / "a.npz").member("a")


def test_a_missing_file_or_array_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*a.npz\n\nhint: "):
        Archive(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="no array b\n\nhint: it has a"):
        save(tmp_path / "a.npz", False, a=np.arange(2)).member("b")
