"""A full-batch step equals a minibatch step with all neighbours, and the models of PyG."""

import pytest
import torch
from by_hand import KINDS, MODELS, dense, dense_forward, made, random_graph
from torch import nn
from torch.nn.functional import cross_entropy, relu

from gcnzc import FeatureTable, FullBatchLoader, Loader
from gcnzc.models import gnn

SEEDS = torch.tensor([3, 0, 59, 17, 55, 21, 8])
LABELS = torch.arange(60) % 3


def step(model, batch):
    """The loss of a step, and all gradients."""
    model.zero_grad()
    loss = cross_entropy(model(batch.blocks, batch.x), batch.y)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("seeds", [SEEDS, None])
# layers that aggregate the features, or project them first
@pytest.mark.parametrize("columns", [4, 40])
@pytest.mark.parametrize("name", [*MODELS, "gin"])
def test_a_step_equals_a_minibatch_step_with_all_neighbours(name, columns, seeds, monkeypatch):
    graph = random_graph()
    monkeypatch.setitem(MODELS, "gin", gnn.GIN)
    model = made(name, columns, 5, 3, dropout=0.0)
    table = FeatureTable(torch.randn(60, columns).double())
    all_seeds = torch.arange(60) if seeds is None else seeds
    (batch,) = FullBatchLoader(graph, table, seeds, 3, LABELS)
    loader = Loader(graph, table, all_seeds, [-1] * 3, 100, LABELS, shuffle=False)
    (minibatch,) = loader
    for found, expected in zip(step(model, batch), step(model, minibatch), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_in_float32_are_near_the_formula_in_float64(name):
    graph = random_graph()
    model = made(name, 6, 5, 3).eval()
    x = torch.randn(60, 6).double()
    norm = "batch" if name == "sage" else "none"
    expected = dense_forward(model, dense(graph), x, norm=norm)[SEEDS]
    (batch,) = FullBatchLoader(graph, FeatureTable(x), SEEDS, 3, dtype=torch.float32)
    found = model.float()(batch.blocks, batch.x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def pyg_model(kind, model):
    """PyG's convolutions with the weights of our layers."""
    pyg = pytest.importorskip("torch_geometric.nn")
    convolutions = []
    for layer in model.layers:
        sizes = (layer.in_features, layer.out_features)
        if kind == "sage":
            conv = pyg.SAGEConv(*sizes)
            theirs = conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight
            ours = layer.neighbours.weight, layer.neighbours.bias, layer.own.weight
        elif kind == "gcn":
            conv = pyg.GCNConv(*sizes)
            theirs, ours = (conv.lin.weight, conv.bias), (layer.weight, layer.bias)
        elif kind == "gatv2":
            conv = pyg.GATv2Conv(*sizes, layer.heads, concat=layer.concatenate)
            theirs = conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight, conv.lin_r.bias
            theirs += conv.att, conv.bias
            ours = layer.source.weight, layer.source.bias, layer.target.weight, layer.target.bias
            ours += layer.attention, layer.bias
        else:
            conv = pyg.GATConv(*sizes, layer.heads, concat=layer.concatenate)
            theirs = conv.lin.weight, conv.att_src, conv.att_dst, conv.bias
            ours = layer.weight, layer.source_attention, layer.target_attention, layer.bias
        pairs = list(zip(theirs, ours, strict=True))
        for parameter, own in pairs:
            parameter.data = own.detach().view(parameter.shape).clone()
        convolutions.append((conv, pairs))
    return convolutions


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gatv2"])
def test_outputs_and_gradients_equal_those_of_pyg_on_the_whole_graph(kind):
    graph = random_graph()
    options = {"heads": 2, "skip": False, "activation": "relu"} if "gat" in kind else {}
    model = KINDS[kind](6, 5, 3, 2, dropout=0.0, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    convolutions = pyg_model(kind, model)
    x, edges = torch.randn(60, 6).double(), torch.stack(graph.coo()).long()
    h = x
    for index, (conv, _) in enumerate(convolutions):
        h = conv(h, edges)
        h = relu(h) if index == 0 else h
    cross_entropy(h[SEEDS], LABELS[SEEDS]).backward()
    # the training nodes only, and all nodes with a mask, as in PyG's examples
    for seeds, rows in ((SEEDS, slice(None)), (None, SEEDS)):
        (batch,) = FullBatchLoader(graph, FeatureTable(x), seeds, 2, LABELS)
        model.zero_grad()
        logits = model(batch.blocks, batch.x)
        torch.testing.assert_close(logits[rows], h[SEEDS])
        cross_entropy(logits[rows], batch.y[rows]).backward()
        for _, pairs in convolutions:
            for theirs, ours in pairs:
                torch.testing.assert_close(ours.grad, theirs.grad.view_as(ours))
