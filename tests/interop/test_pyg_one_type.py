"""Times, weights, replacement, disjoint and undirected subgraphs in PyG's loaders of `Data`."""

import pyg_or_skip  # noqa: F401
import pytest
import torch
from pyg_recorded import Recorded, assert_equal
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import node_loader
from torch_geometric.sampler.base import SubgraphType

from gcnzc.interop.pyg import NeighborLoader

NODES, EDGES, LATEST = 60, 500, 20
# random numbers depend on the names of the types
TYPE = ("node", "to", "node")


def make_data():
    numbers = torch.Generator().manual_seed(7)
    data = Data(name="graph")
    data.x = torch.randn(NODES, 4, generator=numbers)
    data.edge_index = torch.randint(NODES, (2, EDGES), generator=numbers)
    data.edge_attr = torch.arange(EDGES)
    data.born = torch.randint(LATEST, (NODES,), generator=numbers)
    data.at = torch.randint(LATEST, (EDGES,), generator=numbers)
    data.weight = torch.rand(EDGES, generator=numbers) * (torch.arange(EDGES) % 3 > 0)
    return data


@pytest.fixture
def data():
    return make_data()


def typed(data):
    """The same graph as a `HeteroData` with one type."""
    found = HeteroData()
    for name in ("x", "born"):
        found["node"][name] = data[name]
    for name in ("edge_index", "edge_attr", "at", "weight"):
        found[TYPE][name] = data[name]
    return found


SAMPLINGS = [
    {"replace": True},
    {"disjoint": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True, "disjoint": True},
    {"time_attr": "born"},
    {"time_attr": "born", "temporal_strategy": "last"},
    {"time_attr": "at", "input_time": torch.arange(NODES) % LATEST},
    {"subgraph_type": "induced"},
    {"directed": False, "disjoint": True},
    {"subgraph_type": SubgraphType.induced, "time_attr": "born"},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_minibatches_equal_those_of_a_heterogeneous_graph_with_one_type(data, sampling):
    options = {"batch_size": 9, "seed": 3, "shuffle": True, **sampling}
    mine = NeighborLoader(data, [4, 3], **options)
    theirs = NeighborLoader(typed(data), [4, 3], "node", **options)
    for batch, other in zip(mine, theirs, strict=True):
        assert isinstance(batch, Data)
        assert batch.name == "graph"
        found, expected = batch.to_dict(), other["node"].to_dict() | other[TYPE].to_dict()
        del found["name"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, {"subgraph_type": "bidirectional"}])
def test_fields_equal_those_of_pyg_for_the_same_nodes(data, sampling):
    nodes = torch.arange(5, 40)
    sampling = dict(sampling)
    if "input_time" in sampling:
        sampling["input_time"] = sampling["input_time"][nodes].int()
    mine = next(iter(NeighborLoader(data, [3, 2], nodes, batch_size=8, **sampling)))
    options = {"input_time": sampling.get("input_time"), "batch_size": 8}
    theirs = node_loader.NodeLoader(data, Recorded(mine), nodes, **options)
    assert_equal(mine, next(iter(theirs)))


def test_the_default_arguments_are_sampled_without_types(data):
    plain = {"replace": False, "subgraph_type": "directional", "directed": True}
    plain |= {"temporal_strategy": "last", "disjoint": 0}
    options = {"batch_size": 9, "seed": 1}
    given = (NeighborLoader(data, [3, 2], **options, **more) for more in (plain, {}))
    assert all(torch.equal(mine.e_id, other.e_id) for mine, other in zip(*given, strict=True))
