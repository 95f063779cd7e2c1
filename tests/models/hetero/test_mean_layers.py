"""R-GCN and heterogeneous GraphSAGE equal dense formulas and PyG's layers."""

import pytest
import torch
from typed_dense import COLUMNS, PAPER, SIZES, academic, edge_index, features, randomize

from gcnzc.models.hetero import RGCN, HeteroSAGE
from gcnzc.sampling import build_full_hetero_blocks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
MODELS = {
    "rgcn": RGCN,
    "bases": lambda *sizes, **options: RGCN(*sizes, num_bases=2, **options),
    "no root": lambda *sizes, **options: RGCN(*sizes, root_weight=False, **options),
    "sage": HeteroSAGE,
}


def make(name, graph, **options):
    options = {"dropout": 0.0, "num_layers": 2} | options
    return randomize(MODELS[name](graph.metadata(), COLUMNS, 8, 3, PAPER, **options))


def project(model, graph, x):
    names = [graph.node_types[t] for t in model.in_types]
    return {name: linear(x[name]) for name, linear in zip(names, model.input_linears, strict=True)}


@pytest.mark.parametrize("name", ["rgcn", "bases", "no root"])
def test_rgcn_equals_pyg(name):
    conv = pytest.importorskip("torch_geometric.nn").RGCNConv
    graph, x = academic(), features()
    model = make(name, graph)
    starts = dict(zip(SIZES, torch.tensor([0, *SIZES.values()]).cumsum(0).tolist(), strict=False))
    ends, types = [], []
    for r, (each, own) in enumerate(edge_index(graph).items()):
        ends.append(own + torch.tensor([[starts[each[0]]], [starts[each[2]]]]))
        types += [r] * own.shape[1]
    names = [graph.node_types[t] for t in model.in_types]
    inputs = {each: x[each].clone().requires_grad_() for each in names}
    rows = torch.cat([project(model, graph, inputs)[each] for each in SIZES])
    convs = []
    for layer in model.layers:
        # one matrix of its own rows for all node types, as PyG has it
        for part in (layer.own, layer.bias):
            if part is not None:
                part.data[:] = part.data[0].clone()
        num_bases = None if layer.coefficients is None else 2
        sizes = (8, layer.out_features, len(graph.edge_types))
        own = conv(*sizes, num_bases=num_bases, root_weight=layer.own is not None).double()
        order = torch.tensor(layer.edge_types)
        with torch.no_grad():
            if layer.own is not None:
                own.root.copy_(layer.own[0])
            own.bias.copy_(layer.bias[0])
            if own.comp is None:
                own.weight.zero_()[order] = layer.weight
            else:
                own.comp.zero_()[order] = layer.coefficients
                own.weight.copy_(layer.weight)
        convs.append(own)
    hidden = convs[0](rows, torch.cat(ends, 1), torch.tensor(types)).relu()
    expected = convs[1](hidden, torch.cat(ends, 1), torch.tensor(types))[: SIZES[PAPER]]
    mine = {each: x[each].clone().requires_grad_() for each in names}
    out = model(build_full_hetero_blocks(graph, 2), mine)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    (out.sin().sum()).backward()
    expected.sin().sum().backward()
    for each in names:
        torch.testing.assert_close(mine[each].grad, inputs[each].grad, **TOLERANCE)
    for layer, own in zip(model.layers, convs, strict=True):
        order = torch.tensor(layer.edge_types)
        theirs = own.weight.grad if own.comp is not None else own.weight.grad[order]
        torch.testing.assert_close(layer.weight.grad, theirs, **TOLERANCE)
        if layer.own is not None:
            torch.testing.assert_close(layer.own.grad.sum(0), own.root.grad, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
def test_sage_equals_hetero_conv_of_pyg():
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, x = academic(), features()
    model = make("sage", graph)
    mine = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    theirs = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    rows = project(model, graph, theirs)
    for index, layer in enumerate(model.layers):
        convs = {}
        for k, r in enumerate(layer.edge_types):
            own = pyg.SAGEConv((8, 8), layer.out_features).double()
            with torch.no_grad():
                own.lin_l.weight.copy_(layer.neighbours[k].t())
                own.lin_l.bias.copy_(layer.bias[k])
                own.lin_r.weight.copy_(layer.own[k].t())
            convs[graph.edge_types[r]] = own
        edges = {each: own for each, own in edge_index(graph).items() if each in convs}
        rows = pyg.HeteroConv(convs, aggr="sum")(rows, edges)
        rows = {name: out.relu() if index == 0 else out for name, out in rows.items()}
    out = model(build_full_hetero_blocks(graph, 2), mine)
    torch.testing.assert_close(out, rows[PAPER], **TOLERANCE)
    out.sin().sum().backward()
    rows[PAPER].sin().sum().backward()
    for name in x:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, **TOLERANCE)
