"""Files that are written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

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
