import zipfile
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
    sources, destinations = archive.member("edge_index").edges(200, allocate_in_memory, no_progress)
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
        found.edges(200, allocate_in_memory, no_progress)


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


def with_header(path: Path, header: bytes, data: bytes = b"", **info: Any) -> Path:
    """An archive of one array with this header."""
    with zipfile.ZipFile(path, "w", **info) as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + length + header + data)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (40, 1099511627776)}", "take 175,921"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "take"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -1)}", "take"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}", "shape \\(5,\\)"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (", "not a complete .npz archive"),
        (b"(" * 500, "not a complete .npz archive"),
        (b"{'descr': 'nonsense', 'fortran_order': 7, 'shape': 3}", "not a complete .npz archive"),
        (b"\xff\xfe", "not a complete .npz archive"),
    ],
)
def test_a_header_that_does_not_match_its_bytes_is_rejected(
    tmp_path: Path, compression: int, header: bytes, words: str
) -> None:
    path = with_header(tmp_path / "a.npz", header, bytes(16), compression=compression)
    with pytest.raises(ValueError, match=words + r"(.|\n)*\n\nhint: "):
        Archive(path).member("a")


def test_an_implausible_compression_ratio_is_rejected(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,)}"
    path = with_header(tmp_path / "a.npz", header, bytes(16), compression=zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    size = (10 + len(header) + 16).to_bytes(4, "little")
    wanted = 10 + len(header) + 2**40
    # both headers of the member with a size of 64 bits, in an extra field
    end = data.index(b"PK\x01\x02")
    entry = bytearray(data[end : data.index(b"PK\x05\x06")])
    assert entry[24:28] == size
    entry[24:28] = b"\xff" * 4
    entry[30:32] = (12).to_bytes(2, "little")
    entry += (1).to_bytes(2, "little") + (8).to_bytes(2, "little") + wanted.to_bytes(8, "little")
    tail = bytearray(data[data.index(b"PK\x05\x06") :])
    tail[12:16] = len(entry).to_bytes(4, "little")
    path.write_bytes(data[:end] + entry + tail)
    with pytest.raises(ValueError, match=r"cannot have 1,099,511,627,\d+ bytes(.|\n)*hint: "):
        Archive(path).member("a")
