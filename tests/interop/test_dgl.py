"""DGL is imported with any version of torch, and its sampler works as a sampler of `Loader`."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from libraries import needs_dgl

import gcnzc.interop.dgl as interop_dgl
from gcnzc.graph.graph import Graph
from gcnzc.interop.dgl import DglSampler, import_dgl
from gcnzc.interop.dgl import importing as door
from gcnzc.sampling.neighbor import Sampler


@pytest.fixture(scope="module")
def cora(shared_data):
    with np.load(shared_data / "cora" / "cora.npz") as archive:
        src, dst = torch.from_numpy(archive["edge_index"].astype(np.int64))
        num_nodes = len(archive["node_label"])
    return Graph.from_edges(src, dst, num_nodes, bidirected=True)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A package `dgl` of the source given, in the place of the real one, until the test ends."""

    def make(source, *files):
        for name in [name for name in sys.modules if name == "dgl" or name.startswith("dgl.")]:
            monkeypatch.delitem(sys.modules, name)
        for file in ("dgl/__init__.py", *files):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(source if file == "dgl/__init__.py" else "")
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for name in [name for name in sys.modules if name == "dgl" or name.startswith("dgl.")]:
        # `monkeypatch` restores the real one, if it was imported
        del sys.modules[name]


PROGRAM = """
import os, warnings, torch
from gcnzc.graph import Graph
from gcnzc.interop.dgl import DglSampler, import_dgl

warnings.simplefilter("error")
dgl = import_dgl()
assert import_dgl() is dgl
assert "DGLBACKEND" not in os.environ
edges = torch.randint(0, 300, (2, 9000), generator=torch.Generator().manual_seed(0))
sampler = DglSampler(Graph.from_edges(*edges, 300), [4, 4], seed=7)
print(sampler.sample(torch.arange(40), 5).nodes.tolist())
"""


@pytest.mark.processes
@needs_dgl
def test_new_processes_import_dgl_quietly_and_sample_the_same(tmp_path):
    # warnings are errors but inside the import, and an empty home has no settings of DGL
    env = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    runs = [subprocess.Popen([sys.executable, "-c", PROGRAM], **options) for _ in range(2)]
    (first, noise), (second, _) = (run.communicate() for run in runs)
    assert noise == ""
    assert first.startswith("[0, 1, 2, 3")
    assert second == first
    assert not list(tmp_path.iterdir())


def test_a_missing_dgl_is_reported(fake, monkeypatch):
    fake("")
    monkeypatch.setattr(door.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^DGL is not installed\n\nhint: "):
        import_dgl()
    with pytest.raises(ImportError, match="not installed"):
        DglSampler(Graph(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int32)), [2])
    with pytest.raises(ImportError, match=r"^DGL is not installed\n\nhint: "):
        from gcnzc.interop.dgl import NeighborSampler  # noqa: F401
    assert not hasattr(interop_dgl, "NeighborSampler")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__version__ = '0.1.3'", r"^DGL 0\.1\.3 is too old\n\nhint: "),
        ("import nothing_of_that_name", r"^the import of DGL failed: No module .*\n\nhint: "),
        ("raise OSError('libdgl.so: not found')", "^the import of DGL failed: libdgl"),
    ],
)
def test_a_dgl_that_is_too_old_is_reported(fake, source, message):
    fake(source)
    with pytest.raises(ImportError, match=message):
        import_dgl()
    if "0.1.3" not in source:
        assert "dgl.graphbolt" not in sys.modules


def test_a_file_of_the_user_that_hides_dgl_is_named(tmp_path, monkeypatch):
    (tmp_path / "dgl.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "dgl", raising=False)
    with pytest.raises(ImportError, match=r"dgl\.py, which is not DGL\n\nhint: rename that file$"):
        import_dgl()


@needs_dgl
def test_full_neighbourhoods_equal_those_of_gcnzcs_sampler(cora):
    seeds = torch.arange(0, 2000, 7)
    sampler = DglSampler(cora, [-1, -1])
    theirs = sampler.sample(seeds, 0)
    ours = Sampler(cora, [-1, -1]).sample(seeds, 0)
    assert set(theirs.nodes.tolist()) == set(ours.nodes.tolist())
    for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
        assert (mine.num_dst, mine.num_edges) == (other.num_dst, other.num_edges)
    with pytest.raises(ValueError, match=r"occurs twice in a batch\n\nhint: seeds\.unique\(\)"):
        sampler.sample(seeds.repeat(2), 0)
