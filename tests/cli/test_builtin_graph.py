"""The built-in graph is generated once and completely, and reports the best possible accuracy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcnzc.cli import builtin_graph
from gcnzc.graph import load
from gcnzc.train.progress import NullReporter


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("GCNZC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def found(cache: Path) -> set[str]:
    return {path.name for path in (cache / "gcnzc").iterdir() if path.suffix != ".lock"}


def test_the_builtin_graph_is_generated_once_and_then_opened(cache):
    place = builtin_graph.prepared(NullReporter())
    assert place == cache / "gcnzc" / builtin_graph.NAME
    made = (place / "meta.json").stat().st_mtime_ns
    assert builtin_graph.prepared(NullReporter()) == place
    assert (place / "meta.json").stat().st_mtime_ns == made
    assert found(cache) == {builtin_graph.NAME}
    graph = load.load(place)
    assert graph.name == builtin_graph.NAME
    # ogbn-arxiv's numbers
    assert (graph.graph.num_nodes, graph.num_classes) == (169_343, 40)
    assert graph.graph.num_edges == 2 * 1_166_243
    assert graph.features is not None
    assert graph.features.shape == (169_343, 128)
    assert graph.best_accuracy is not None
    assert 0.8 < graph.best_accuracy < 0.95


def test_the_cache_folder_can_be_set(cache, monkeypatch):
    monkeypatch.setenv("GCNZC_CACHE", str(cache / "mine"))
    assert builtin_graph.folder() == cache / "mine" / builtin_graph.NAME


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_can_generate_it_at_once(cache):
    program = (
        "from gcnzc.cli.builtin_graph import prepared\n"
        "from gcnzc.train.progress import NullReporter\n"
        "print(prepared(NullReporter()))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", program], **options) for _ in range(2)]
    places = [process.communicate()[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert places == [str(builtin_graph.folder())] * 2
    load.verify(builtin_graph.folder())
    assert found(cache) == {builtin_graph.NAME}
