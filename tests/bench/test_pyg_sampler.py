"""The comparison with PyG's sampler detects differences, and accepts equal distributions."""

import importlib.util

import pytest

if importlib.util.find_spec("torch_geometric") is None:
    pytest.skip("PyG is not installed", allow_module_level=True)

# without the warnings of PyG's import
from gcnzc.interop import pyg

from bench.interop import pyg_sampler  # isort: skip
from bench.rivals import minibatches  # isort: skip

SAMPLED = pyg_sampler.sampled_cases()


def load(case, seed):
    collect = minibatches.first_hop if case["sampled"] else list
    arguments = case["arguments"] | {"seed": seed}
    return minibatches.load(case | {"arguments": arguments}, pyg, collect)


def test_a_different_field_is_reported():
    case = pyg_sampler.exact_cases()["nodes, HeteroData, time of nodes"]
    mine, theirs = load(case, 0), load(case, 1)
    assert pyg_sampler.compare_exactly(mine, theirs, set()) == {
        "minibatches": 5,
        "different": [],
    }
    theirs[0][3]["user"].x[0, 0] += 1
    theirs[0][4]["user"].born = theirs[0][4]["user"].born.int()
    del theirs[0][1]["item"].n_id
    found = pyg_sampler.compare_exactly(mine, theirs, set())
    assert set(found["different"]) == {"user.x", "user.born", "item.n_id"}
    assert pyg_sampler.compare_exactly(mine, theirs, {"x", "born", "n_id"})["different"] == []


def test_an_unsupported_case_has_the_message():
    case = SAMPLED["Data, uniform"]
    wrong = case | {"arguments": case["arguments"] | {"time_attr": "day"}}
    assert load(wrong, 0).startswith("time_attr is 'day'")


def test_a_library_that_is_missing_is_reported(monkeypatch):
    monkeypatch.setattr(minibatches.torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(ImportError, match="torch-sparse is not installed"):
        minibatches.select("torch-sparse")
