"""Files are written atomically, and locked between processes."""

import errno
import os
import pickle

import pytest

from gcnzc._files import lock, locked_file, replacing, write_text


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.json", []
    path.write_text("old")
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        calls.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_replace(source, target):
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with replacing(path) as partial:
        partial.write_text("new")
        assert partial.suffix == ".json"
        assert path.read_text() == "old"
    assert calls == [str(partial), "replace", str(tmp_path)]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_helps(number, tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")

    def fail():
        with replacing(path) as partial:
            partial.write_text("ne")
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=f"no space left on {path}\n\nhint: free space") as error:
        fail()
    assert (error.value.errno, error.value.filename) == (number, str(path))
    assert error.value.strerror == os.strerror(number)
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_until_the_file_is_closed(tmp_path):
    path = tmp_path / "lock"
    with locked_file(path), path.open() as other:
        assert not lock(other.fileno())
    with path.open() as first, path.open() as second:
        assert lock(first.fileno())
        assert not lock(second.fileno())
        first.close()
        assert lock(second.fileno())


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with (tmp_path / "file").open("w") as file:
        assert lock(file.fileno())
        assert lock(file.fileno(), wait=True)
