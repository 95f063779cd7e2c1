"""Files of large arrays: their content, their checksums, and the memory that they need."""

import tracemalloc

import numpy as np
import pytest

from gcnzc.system import array_file
from gcnzc.system.array_file import read_arrays, read_meta, read_shapes, write_arrays

ARRAYS = {
    "a/rows": np.arange(12.0, dtype=np.float32).reshape(4, 3),
    "a/sum": np.arange(5.0),
    "empty": np.empty((0, 3), np.float32),
}


def read(path, arrays=ARRAYS):
    found = {name: np.full_like(array, -1) for name, array in arrays.items()}
    read_arrays(path, found)
    return found


def test_arrays_and_metadata_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "PIECE_BYTES", 7)
    path = tmp_path / "state.npz"
    write_arrays(path, ARRAYS, {"step": 3, "lr": 0.1})
    found = read(path)
    assert all(np.array_equal(found[name], ARRAYS[name]) for name in ARRAYS)
    assert read_meta(path) == {"step": 3, "lr": 0.1}
    assert read_shapes(path) == {name: (each.shape, each.dtype) for name, each in ARRAYS.items()}
    assert [each.name for each in tmp_path.iterdir()] == ["state.npz"]


def test_pieces_and_not_arrays_are_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "PIECE_BYTES", 1 << 16)
    rows = np.random.default_rng(0).random((1 << 15, 64))
    loaded = np.zeros_like(rows)
    tracemalloc.start()
    write_arrays(tmp_path / "state.npz", {"rows": rows}, {})
    read_arrays(tmp_path / "state.npz", {"rows": loaded})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(loaded, rows)
    assert peak < rows.nbytes / 16


def test_every_flipped_bit_of_the_arrays_is_found(tmp_path):
    path = tmp_path / "state.npz"
    write_arrays(path, ARRAYS, {})
    data = path.read_bytes()
    begin = data.index(ARRAYS["a/rows"].tobytes())
    for index in range(begin, begin + ARRAYS["a/rows"].nbytes):
        changed = bytearray(data)
        changed[index] ^= 16
        path.write_bytes(changed)
        found = {"a/rows": np.full((4, 3), -1, np.float32)}
        with pytest.raises(ValueError, match=r"state\.npz is damaged"):
            read_arrays(path, found)
        assert (found["a/rows"] == -1).all()


def test_other_files_are_rejected(tmp_path):
    path = tmp_path / "state.npz"
    with pytest.raises(FileNotFoundError, match=r"no file .*state\.npz"):
        read_meta(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match=r"state\.npz is damaged, or not a file"):
        read_meta(path)
    np.savez(path, rows=np.zeros(3))
    with pytest.raises(ValueError, match=r"state\.npz is damaged, or not a file"):
        read_arrays(path, {"rows": np.zeros(3)})
    write_arrays(path, ARRAYS, {})
    with pytest.raises(ValueError, match="no array 'b', but a/rows, a/sum, empty"):
        read(path, {"b": np.zeros(3)})
    with pytest.raises(ValueError, match=r"'a/sum' is float64 of shape \(5,\) there"):
        read(path, {"a/sum": np.zeros(5, np.float32)})


def test_damaged_headers_and_truncated_files_are_named(tmp_path):
    path = tmp_path / "state.npz"
    write_arrays(path, {"rows": np.zeros((4, 3), np.float32)}, {"step": 1})
    data = path.read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 3)]
    for index in range(len(data)):
        for flip in (1, 64, 255):
            damaged.append(data[:index] + bytes([data[index] ^ flip]) + data[index + 1 :])
    messages = []
    for each in damaged:
        path.write_bytes(each)
        try:
            shapes = read_shapes(path)
            read_arrays(path, {name: np.zeros(*shapes[name]) for name in shapes})
        except ValueError as error:
            messages.append(str(error))
    assert all("state.npz" in each and "\n\nhint: " in each for each in messages)
    # the others are in fields of the archive that are not used
    assert len(messages) > len(damaged) / 2
