"""Files are written whole or not at all, and locked between processes."""

import errno
import os
import pickle
import stat
from pathlib import Path

import pytest

from gcnzc._files import lock, locked_file, replacing, write_text
from gcnzc.system import files


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(ValueError, match=rf"(?s){path} is not a regular file.*\n\nhint: "):
            files.write_text(path, "new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [link, pipe]


@pytest.mark.parametrize("exists", [True, False])
def test_the_file_of_a_symbolic_link_is_replaced_and_not_the_link(tmp_path, exists):
    link, target = tmp_path / "link.txt", tmp_path / "other" / "target.txt"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_the_process_that_has_locked_a_folder_is_named_if_it_is_known(tmp_path, monkeypatch):
    with files.locked_folder(tmp_path):
        with pytest.raises(
            ValueError, match=rf"^another process \(pid {os.getpid()}\) is training"
        ):
            files.locked_folder(tmp_path).__enter__()
        # such as a process outside this container, and a kernel that lists no locks
        other = "1: FLOCK  ADVISORY  WRITE {} {:02x}:{:02x}:{} 0 EOF\n"
        found = tmp_path.stat()
        device = os.major(found.st_dev), os.minor(found.st_dev)
        for text in (other.format(0, *device, found.st_ino), other.format(7, 0, 0, 0), ""):
            monkeypatch.setattr(Path, "read_text", lambda _, text=text: text)
            with pytest.raises(ValueError, match=r"^another process is training"):
                files.locked_folder(tmp_path).__enter__()
    with files.locked_folder(tmp_path):
        pass


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


def test_a_file_that_cannot_be_written_is_named_without_its_temporary_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "none" / "a", "new")
    assert error.value.filename == str(tmp_path / "none" / "a")


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
