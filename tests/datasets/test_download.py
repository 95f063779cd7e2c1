import errno
import http.server
import io
import threading
import zipfile
from dataclasses import dataclass, field

import pytest
from tiny_graph import tiny

from gcnzc.datasets import download
from gcnzc.datasets.download import Remote, fetch, lookup, table


@dataclass
class Site:
    """A server of one file that can be told to fail."""

    url: str = ""
    data: bytes = b""
    ranges: bool = True
    stamp: str | None = '"one"'
    length: bool = True
    status: int = 200
    # bytes after which each answer breaks off; what is left of the list breaks no more
    breaks: list[int] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)

    @property
    def remote(self):
        return Remote("ogbn-tiny", self.url + "/tiny.zip", "1")


def answer(site):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            begin = 0
            asked = self.headers["Range"]
            site.asked.append(asked)
            if site.status != 200:
                self.send_error(site.status)
                return
            if site.ranges and asked and self.headers["If-Range"] == site.stamp:
                begin = int(asked.removeprefix("bytes=").removesuffix("-"))
                if begin >= len(site.data):
                    self.send_error(416)
                    return
                self.send_response(206)
            else:
                self.send_response(200)
            if site.length:
                self.send_header("Content-Length", str(len(site.data) - begin))
            if site.stamp:
                self.send_header("ETag", site.stamp)
            self.end_headers()
            end = begin + site.breaks.pop(0) if site.breaks else len(site.data)
            self.wfile.write(site.data[begin:end])

        def log_message(self, *_):
            pass

    return Handler


@pytest.fixture
def site(monkeypatch, tmp_path):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # so that a break falls between two reads
    monkeypatch.setattr(download, "_BLOCK_BYTES", 100)
    site = Site(data=zipped(tiny().write(tmp_path / "source")))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield site
        server.shutdown()
        thread.join()


@pytest.fixture
def here(tmp_path):
    """The folder of downloads."""
    return tmp_path / "downloads"


def zipped(folder, top="tiny/"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            name = f"{top}{path.relative_to(folder)}"
            archive.writestr(name + "/" if path.is_dir() else name, read(path))
    return file.getvalue()


def read(path):
    return path.read_bytes() if path.is_file() else b""


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_dataset_is_downloaded_once(site, here, tmp_path):
    seen = []
    path = fetch(site.remote, here, lambda *now: seen.append(now))
    assert path == here / "ogbn_tiny_v1"
    assert contents(path) == contents(tmp_path / "source")
    assert names(here) == ["ogbn_tiny_v1"]
    size = len(site.data)
    assert ("download", size, size) in seen
    assert seen[-1][0] == "unpack"
    assert seen[-1][1] == seen[-1][2]
    assert fetch(site.remote, here) == path
    assert len(site.asked) == 1


def test_an_interrupted_download_is_resumed(site, here, tmp_path):
    site.breaks = [1000, 700]
    path = fetch(site.remote, here)
    assert contents(path) == contents(tmp_path / "source")
    assert site.asked == [None, "bytes=1000-", "bytes=1700-"]


def test_a_changed_file_restarts_the_download(site, here, tmp_path):
    site.breaks = [500, 0, 0]
    with pytest.raises(RuntimeError, match="failed after"):
        fetch(site.remote, here)
    tiny(seed=1).write(tmp_path / "newer")
    site.data, site.stamp = zipped(tmp_path / "newer"), '"two"'
    assert contents(fetch(site.remote, here)) == contents(tmp_path / "newer")


def test_a_file_that_became_shorter_restarts_the_download(site, here, tmp_path):
    short = site.data
    site.data, site.breaks = 2 * short, [len(short), 0, 0]
    with pytest.raises(RuntimeError, match="failed after"):
        fetch(site.remote, here)
    site.data = short
    assert contents(fetch(site.remote, here)) == contents(tmp_path / "source")
    assert site.asked[-2:] == [f"bytes={len(short)}-", None]


def test_without_a_network_the_error_describes_the_manual_download(here):
    # a port that nobody listens on
    remote = Remote("ogbn-tiny", "http://127.0.0.1:9/tiny.zip", "1")
    with pytest.raises(RuntimeError, match=r"failed after 0 bytes.*\n\nhint: is there a network"):
        fetch(remote, here)


def test_a_file_that_the_server_does_not_have_is_reported(site, here):
    site.status = 404
    with pytest.raises(RuntimeError, match=r"cannot download .*: 404 Not Found\n\nhint: "):
        fetch(site.remote, here)
    assert len(site.asked) == 1


def test_a_file_that_is_not_a_zip_is_removed(site, here, tmp_path):
    good = site.data
    half = good[: len(good) // 2]
    flipped = good.replace(b"Release note", b"release note")
    for bad in (b"<html>moved</html>", half, flipped):
        site.data = bad
        with pytest.raises(RuntimeError, match=r"tiny.zip is not a complete.*\n\nhint: it has"):
            fetch(site.remote, here)
        assert names(here) == []
    site.data = good
    assert contents(fetch(site.remote, here)) == contents(tmp_path / "source")


def test_an_archive_of_another_dataset_is_rejected(site, here, tmp_path):
    (tmp_path / "other" / "raw").mkdir(parents=True)
    (tmp_path / "other" / "raw" / "edge.csv.gz").write_bytes(b"")
    good, site.data = site.data, zipped(tmp_path / "other")
    with pytest.raises(RuntimeError, match=r"it has no folder split\n\nhint: it has been removed"):
        fetch(site.remote, here)
    assert names(here) == []
    site.data = good
    assert contents(fetch(site.remote, here)) == contents(tmp_path / "source")


def test_files_of_the_user_are_used_and_never_removed(site, here, tmp_path):
    here.mkdir()
    archive = here / "tiny.zip"
    archive.write_bytes(site.data[:100])
    with pytest.raises(RuntimeError, match=r"not a complete archive.*\n\nhint: remove it"):
        fetch(site.remote, here)
    assert archive.read_bytes() == site.data[:100]
    archive.write_bytes(site.data)
    assert contents(fetch(site.remote, here)) == contents(tmp_path / "source")
    assert archive.read_bytes() == site.data
    assert site.asked == []


@pytest.mark.parametrize("top", ["/", "tiny/../../", ""])
def test_a_zip_cannot_write_outside_of_its_folder(site, here, tmp_path, top):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("")
    site.data = zipped(tmp_path / "one", top)
    with pytest.raises(RuntimeError, match="it has a file"):
        fetch(site.remote, here)
    assert names(here) == []
    assert names(tmp_path) == ["downloads", "one", "source"]


def test_two_processes_do_not_download_one_file(site, tmp_path):
    with (
        download._locked(tmp_path / "tiny.zip.partial"),
        pytest.raises(RuntimeError, match=r"another process .*is downloading.*\n\nhint: "),
    ):
        fetch(site.remote, tmp_path)
    assert site.asked == []


def test_too_little_disk_space_is_reported_before_the_download(site, here, tmp_path, monkeypatch):
    usage = download.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"bytes are missing, 10 are free\n\nhint: "):
        fetch(site.remote, here)


def test_a_disk_that_fills_during_the_download_is_reported(site, here, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(download, "_resume", full)
    with pytest.raises(RuntimeError, match=r"no space for .*partial(.|\n)*the download resumes"):
        fetch(site.remote, here)


def test_urls_agree_with_the_ogb_package():
    sets = table()
    assert list(sets) == [
        *("ogbn-proteins", "ogbn-products", "ogbn-arxiv", "ogbn-mag", "ogbn-papers100M"),
        *("ogbl-ppa", "ogbl-collab", "ogbl-citation2", "ogbl-ddi", "ogbl-vessel"),
    ]
    assert sets["ogbn-arxiv"].url.endswith("/nodeproppred/arxiv.zip")
    assert lookup("ogbn_ARXIV").folder_name == "ogbn_arxiv_v1"
    assert lookup("ogbl_collab").url.endswith("/linkproppred/collab.zip")
