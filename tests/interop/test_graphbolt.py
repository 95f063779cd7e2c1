"""Tables as GraphBolt features, where GraphBolt works, and elsewhere with a stand-in."""

from types import SimpleNamespace

import pytest
import torch
from libraries import needs_dgl

from gcnzc import FeatureTable
from gcnzc.interop import graphbolt
from gcnzc.interop.dgl import graphbolt_works, import_dgl


class Feature:
    """As `dgl.graphbolt.Feature` declares itself."""

    def __init__(self):
        self.is_made = True


@pytest.fixture
def there(monkeypatch):
    """GraphBolt, or what stands for it."""
    graphbolt._feature_class.cache_clear()
    if not graphbolt_works():
        stand_in = SimpleNamespace(graphbolt=SimpleNamespace(Feature=Feature), __version__="2.1.0")
        monkeypatch.setattr(graphbolt, "graphbolt_works", lambda: True)
        monkeypatch.setattr(graphbolt, "import_dgl", lambda: stand_in)
    yield graphbolt.import_dgl().graphbolt
    graphbolt._feature_class.cache_clear()


def test_a_feature_reads_rows(there):
    rows = torch.randn(9, 4)
    feature = graphbolt.feature(FeatureTable(rows))
    assert isinstance(feature, there.Feature)
    assert type(feature) is type(graphbolt.feature(FeatureTable(rows)))
    ids = torch.tensor([3, 3, 0])
    assert torch.equal(feature.read(ids), rows[ids])
    assert torch.equal(feature.read(), rows)
    assert feature.size() == torch.Size([4])
    with pytest.raises(RuntimeError, match="is read-only"):
        feature.update(rows)


def test_quantized_rows_are_dequantized(there):
    table = FeatureTable.quantized(torch.randn(9, 4))
    ids = torch.tensor([8, 1])
    assert torch.equal(graphbolt.feature(table).read(ids), table.gather(ids))


@needs_dgl
def test_a_graphbolt_that_does_not_work_is_reported():
    if graphbolt_works():
        pytest.skip("GraphBolt works beside this torch")
    import_dgl()
    with pytest.raises(RuntimeError, match=r"GraphBolt of DGL .* is not compiled for torch"):
        graphbolt.feature(FeatureTable(torch.ones(2, 2)))


@needs_dgl
def test_graphbolt_fetches_from_the_feature():
    if not graphbolt_works():
        pytest.skip("GraphBolt does not work beside this torch")
    gb = import_dgl().graphbolt
    rows = torch.randn(9, 4)
    store = gb.BasicFeatureStore({("node", None, "x"): graphbolt.feature(FeatureTable(rows))})
    ids = torch.tensor([5, 2])
    assert torch.equal(store.read("node", None, "x", ids), rows[ids])
