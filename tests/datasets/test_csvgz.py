import gzip

import numpy as np
import pytest

from gcnzc.datasets import csvgz, rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.csv.gz"


@pytest.mark.parametrize("chunk_bytes", [1, 300, 1 << 24])
def test_float32_is_read_back_bit_for_bit(path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    bits = np.random.default_rng(0).integers(2**32, size=(300, 5), dtype=np.uint32)
    table = bits.view(np.float32)
    table[~np.isfinite(table)] = 0
    table[0] = 0, 1e-45, np.finfo(np.float32).max, np.finfo(np.float32).tiny, -0.0
    csvgz.write(path, [table[:7], table[7:]])
    found = np.concatenate(list(csvgz.read(path, np.float64, 5))).astype(np.float32)
    # -0.0 too
    assert (found.view(np.uint32) == table.view(np.uint32)).all()


def test_a_file_of_several_gzip_members_is_read(path):
    path.write_bytes(gzip.compress(b"1,2\n3,4\n") * 3)
    assert csvgz.read_table(path).tolist() == [[1, 2], [3, 4]] * 3


def test_integers_of_savetxt_are_integers(path):
    np.savetxt(path, [[1, 2], [3, 4]], delimiter=",")
    assert np.concatenate([*csvgz.read_integers(path, 2)]).tolist() == [[1, 2], [3, 4]]


def test_integers_may_be_written_as_numbers_with_a_point_in_any_line(path, monkeypatch):
    monkeypatch.setattr(csvgz, "CHUNK_BYTES", 4 * 80)
    lines = [f"{i},{i + 1}" for i in range(40)]
    path.write_bytes(gzip.compress("\n".join([*lines, "7.0,8e0\n"]).encode()))
    found = np.concatenate([*csvgz.read_integers(path, 2)])
    assert found.tolist() == [*([i, i + 1] for i in range(40)), [7, 8]]
    path.write_bytes(gzip.compress("\n".join([*lines, "7.5,8\n"]).encode()))
    with pytest.raises(ValueError, match=r"has 7.5 in line 41, which is not an integer\n\nhint: "):
        list(csvgz.read_integers(path, 2))


def test_equal_numbers_give_equal_files(path, tmp_path):
    csvgz.write(path, [np.arange(9).reshape(3, 3)])
    csvgz.write(tmp_path / "table.csv.gz.again", [np.arange(9).reshape(3, 3)])
    first, second = path.read_bytes(), (tmp_path / "table.csv.gz.again").read_bytes()
    # but for its name, no time is in it
    assert first.replace(b"table.csv\0", b"") == second.replace(b"table.csv.gz.again\0", b"")
