"""Graphs with types and graphs without: what is kept, and what functions for one type refuse."""

import numpy as np
import pytest
import torch

import gcnzc
from gcnzc.features.table import FeatureTable
from gcnzc.graph import Graph, partition_graph, split_edges
from gcnzc.graph.edge_split import EdgeShares

EDGE = ("node", "to", "node")


@pytest.fixture
def bipartite() -> Graph:
    edges = torch.stack([torch.arange(190, 200), torch.arange(10) % 3])
    return Graph.from_arrays({"user": 3, "item": 200}, {("item", "in", "user"): edges})


@pytest.mark.parametrize(
    "call",
    [
        lambda graph: gcnzc.FullBatchLoader(graph, None, None, 1),
        lambda graph: gcnzc.inference(gcnzc.models.SAGE(3, 4, 2, 1), graph, _rows(203)),
        lambda graph: partition_graph(graph, 2),
        lambda graph: split_edges(graph, EdgeShares()),
        lambda graph: graph.rebuild(bidirected=True),
        lambda graph: gcnzc.prepare("never", edges=graph),
    ],
    ids=["full batch", "inference", "partition", "split", "rebuild", "edges"],
)
def test_functions_for_graphs_without_types_refuse_others(bipartite, call):
    with pytest.raises(ValueError, match="has types of nodes and edges\n\nhint: "):
        call(bipartite)


def _rows(count: int) -> FeatureTable:
    return FeatureTable(torch.ones(count, 3))


def test_a_graph_with_types_named_as_those_of_others_keeps_what_it_has(tmp_path):
    pairs = torch.tensor([[0, 1, 2], [1, 2, 0]])
    node = {"labels": [0, 2, 1], "keys": ["a", "b", "c"], "classes": ["x", "y", "z", "w"]}
    edge = {"edge_index": pairs, "weight": [1.0, 2.0, 3.0], "features": torch.ones(3, 2)}
    graph = Graph.from_arrays({"node": node}, {EDGE: edge})
    assert graph.has_types
    gcnzc.prepare(graph, tmp_path / "a", name="three")
    data = gcnzc.load(tmp_path / "a")
    assert (data.name, data.num_classes, data.metric) == ("three", 4, "accuracy")
    assert data.graph.has_types
    assert data.graph.nodes().keys.tolist() == ["a", "b", "c"]
    assert torch.equal(data.graph.edges().weight, graph.edges().weight)
    assert data.graph.edges().features.shape == (3, 2)
    sampler = gcnzc.Sampler(data.graph, [2], edge_ids=True, once=True)
    assert sorted(sampler.sample(("node", [0, 1]), 0).edge_ids[EDGE].tolist()) == [0, 2]
    with pytest.raises(ValueError, match="the nodes are"):
        graph.with_nodes({})


def test_a_graph_without_types_keeps_quantized_features_and_names(tmp_path):
    given = {"edges": (np.array([0, 1]), np.array([1, 0])), "features": torch.ones(2, 4)}
    gcnzc.prepare(tmp_path / "a", **given, feature_dtype="int8")
    data = gcnzc.load(tmp_path / "a")
    gcnzc.prepare(data.graph, tmp_path / "b")
    again = gcnzc.load(tmp_path / "b")
    assert again.quantized.rows.dtype == torch.int8
    assert not again.graph.has_types
