"""Heterogeneous layers equal those of PyG."""

import pytest
import torch
from torch.nn import functional
from typed_dense import COLUMNS, PAPER, SIZES, academic, edge_index, features, randomize

from gcnzc.models.hetero import HGT, RGAT, RGCN, HeteroSAGE
from gcnzc.sampling import build_full_hetero_blocks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def make(kind, graph, **options):
    options = {"dropout": 0.0, "num_layers": 2} | options
    return randomize(kind(graph.metadata(), COLUMNS, 8, 4, PAPER, **options))


def project(model, graph, x):
    names = [graph.node_types[t] for t in model.in_types]
    return {name: linear(x[name]) for name, linear in zip(names, model.input_linears, strict=True)}


def leaves(x):
    return {name: rows.clone().requires_grad_() for name, rows in x.items()}


def compare(model, graph, x, expected, theirs):
    """Compare the outputs, and the gradients of the features of all types that the model reads."""
    mine = leaves(x)
    out = model(build_full_hetero_blocks(graph, 2), mine)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    out.sin().sum().backward()
    expected.sin().sum().backward()
    for t in model.in_types:
        name = graph.node_types[t]
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"root_weight": False}], ids=str)
def test_rgcn_equals_pyg(options):
    conv = pytest.importorskip("torch_geometric.nn").RGCNConv
    graph, x = academic(), features()
    model = make(RGCN, graph, **options)
    starts = dict(zip(SIZES, torch.tensor([0, *SIZES.values()]).cumsum(0).tolist(), strict=False))
    ends, types = [], []
    for r, (each, own) in enumerate(edge_index(graph).items()):
        ends.append(own + torch.tensor([[starts[each[0]]], [starts[each[2]]]]))
        types += [r] * own.shape[1]
    theirs = leaves(x)
    rows = torch.cat([project(model, graph, theirs)[each] for each in SIZES])
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
    compare(model, graph, x, expected, theirs)
    for layer, own in zip(model.layers, convs, strict=True):
        order = torch.tensor(layer.edge_types)
        wanted = own.weight.grad if own.comp is not None else own.weight.grad[order]
        torch.testing.assert_close(layer.weight.grad, wanted, **TOLERANCE)
        if layer.own is not None:
            torch.testing.assert_close(layer.own.grad.sum(0), own.root.grad, **TOLERANCE)


def sage_conv(pyg, layer, k):
    conv = pyg.SAGEConv((8, 8), layer.out_features)
    pairs = (conv.lin_l.weight, layer.neighbours[k].t()), (conv.lin_l.bias, layer.bias[k])
    return conv, (*pairs, (conv.lin_r.weight, layer.own[k].t()))


def gat_conv(pyg, layer, k):
    columns = layer.weight.shape[3]
    conv = pyg.GATConv(8, columns, 2, concat=layer.concatenate, add_self_loops=False)
    own = layer.weight[k].transpose(1, 2).flatten(0, 1), layer.source_attention[k][None]
    own += layer.target_attention[k][None], layer.bias[k]
    return conv, zip((conv.lin.weight, conv.att_src, conv.att_dst, conv.bias), own, strict=True)


@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options", "conv_of", "activation"),
    [
        (HeteroSAGE, {}, sage_conv, functional.relu),
        (RGAT, {"residual": False, "heads": 2}, gat_conv, functional.elu),
    ],
)
def test_layers_equal_hetero_conv_of_pyg(kind, options, conv_of, activation):
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, x = academic(), features()
    model = make(kind, graph, **options)
    theirs = leaves(x)
    rows = project(model, graph, theirs)
    for index, layer in enumerate(model.layers):
        convs = {}
        for k, r in enumerate(layer.edge_types):
            conv, pairs = conv_of(pyg, layer, k)
            for parameter, own in pairs:
                parameter.data = own.detach().clone()
            convs[graph.edge_types[r]] = conv
        edges = {each: own for each, own in edge_index(graph).items() if each in convs}
        rows = pyg.HeteroConv(convs, aggr="sum")(rows, edges)
        rows = {name: activation(out) if index == 0 else out for name, out in rows.items()}
    compare(model, graph, x, rows[PAPER], theirs)


def test_hgt_equals_pyg():
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, x = academic(), features()
    model = make(HGT, graph, heads=2)
    theirs = leaves(x)
    rows, num_types = project(model, graph, theirs), len(graph.edge_types)
    for layer in model.layers:
        conv = pyg.HGTConv(8, 8, graph.metadata(), heads=2).double()
        queries = dict(zip(layer.out_types, layer.queries, strict=True))
        pairs = dict(zip(layer.source_types, layer.keys_values, strict=True))
        with torch.no_grad():
            for t, linear in pairs.items():
                own = conv.kqv_lin.lins[graph.node_types[t]]
                own.weight[:8], own.weight[16:] = linear.weight.split(8)
                own.bias[:8], own.bias[16:] = linear.bias.split(8)
            for t, linear in queries.items():
                own = conv.kqv_lin.lins[graph.node_types[t]]
                own.weight[8:16], own.bias[8:16] = linear.weight, linear.bias
            for j, t in enumerate(layer.out_types):
                name = graph.node_types[t]
                conv.out_lin.lins[name].load_state_dict(layer.outputs[j].state_dict())
                conv.skip[name].copy_(layer.skip[j : j + 1])
            for k, r in enumerate(layer.edge_types):
                for h in range(2):
                    conv.k_rel.weight[h * num_types + r] = layer.key_matrix[k, h]
                    conv.v_rel.weight[h * num_types + r] = layer.value_matrix[k, h]
                conv.p_rel["__".join(graph.edge_types[r])].copy_(layer.prior[k][None])
        rows = conv(rows, edge_index(graph))
    expected = model.output_linears[0](rows[PAPER])
    compare(model, graph, x, expected, theirs)


def test_attention_dropout_keeps_the_mean():
    graph, x = academic(), features()
    model = make(RGAT, graph, heads=2, attention_dropout=0.5, num_layers=1)
    blocks = build_full_hetero_blocks(graph, 1)
    exact = model.eval()(blocks, x)
    torch.manual_seed(0)
    model.train()
    outs = torch.stack([model(blocks, x) for _ in range(500)])
    error = (outs.mean(0) - exact).abs() / (outs.std(0) / 500**0.5 + 1e-9)
    assert error.max() < 6
