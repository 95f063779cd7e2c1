"""Properties of single layers."""

import pytest
import torch
from by_hand import made, random_graph

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import inference


def test_gcn_scales_sampled_sums_to_all_neighbours():
    """Of equal neighbours any sample gives what all give."""
    graph = Graph.from_edges(torch.arange(1, 21), torch.zeros(20, dtype=torch.int64), 21)
    model = made("gcn", 5, 8, 3, num_layers=1)
    x = torch.randn(1, 5).double().expand(21, 5).contiguous()
    x[0] = 7
    whole = inference(model, graph, FeatureTable(x), nodes=torch.tensor([0]))
    batch = Sampler(graph, [4]).sample(torch.tensor([0]), epoch=0)
    assert batch.blocks[0].num_edges == 4
    torch.testing.assert_close(model(batch.blocks, x[batch.nodes]), whole)


def test_self_loops_of_sage_are_those_of_the_graph():
    """The layer includes each node in the mean, as PyG's does on a graph with self loops."""
    plain = random_graph()
    looped = Graph.from_edges(*plain.coo(), plain.num_nodes, self_loops="add")
    model = made("sage", 6, 4, 3, self_loops=True)
    other = made("sage", 6, 4, 3)
    other.load_state_dict(model.state_dict())
    x = torch.randn(plain.num_nodes, 6).double()
    expected = inference(other, looped, FeatureTable(x))
    torch.testing.assert_close(inference(model, plain, FeatureTable(x)), expected)
    batch = Sampler(plain, [-1] * len(model.layers)).sample(torch.arange(20), epoch=0)
    rows = x[batch.nodes].requires_grad_()
    out = model.eval()(batch.blocks, rows)
    torch.testing.assert_close(out, expected[:20])
    out.square().sum().backward()
    assert rows.grad.isfinite().all()
    with pytest.raises(TypeError, match="self_loops"):
        made("gcn", 6, 4, 3, self_loops=True)
