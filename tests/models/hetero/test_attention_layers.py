"""R-GAT and HGT equal dense formulas and PyG's layers."""

import pytest
import torch
from torch.nn import functional
from typed_dense import COLUMNS, PAPER, academic, edge_index, features, randomize

from gcnzc.models.hetero import HGT, RGAT
from gcnzc.sampling import build_full_hetero_blocks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def make(kind, graph, **options):
    options = {"dropout": 0.0, "heads": 2} | options
    return randomize(kind(graph.metadata(), COLUMNS, 8, 4, PAPER, **options))


def project(model, graph, x):
    names = [graph.node_types[t] for t in model.in_types]
    return {name: linear(x[name]) for name, linear in zip(names, model.input_linears, strict=True)}


def compare_gradients(out, mine, expected, theirs):
    torch.testing.assert_close(out, expected, **TOLERANCE)
    out.sin().sum().backward()
    expected.sin().sum().backward()
    for name in mine:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
def test_rgat_equals_hetero_conv_of_pyg():
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, x = academic(), features()
    model = make(RGAT, graph, residual=False)
    mine = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    theirs = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    rows = project(model, graph, theirs)
    for index, layer in enumerate(model.layers):
        convs = {}
        for k, r in enumerate(layer.edge_types):
            columns = layer.weight.shape[3]
            own = pyg.GATConv(8, columns, 2, concat=layer.concatenate, add_self_loops=False)
            own = own.double()
            with torch.no_grad():
                own.lin.weight.copy_(layer.weight[k].transpose(1, 2).flatten(0, 1))
                own.att_src.copy_(layer.source_attention[k][None])
                own.att_dst.copy_(layer.target_attention[k][None])
                own.bias.copy_(layer.bias[k])
            convs[graph.edge_types[r]] = own
        edges = {each: own for each, own in edge_index(graph).items() if each in convs}
        rows = pyg.HeteroConv(convs, aggr="sum")(rows, edges)
        rows = {name: functional.elu(out) if index == 0 else out for name, out in rows.items()}
    out = model(build_full_hetero_blocks(graph, 2), mine)
    compare_gradients(out, mine, rows[PAPER], theirs)


def test_hgt_equals_pyg():
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, x = academic(), features()
    model = make(HGT, graph)
    mine = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    theirs = {name: rows.clone().requires_grad_() for name, rows in x.items()}
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
    compare_gradients(model(build_full_hetero_blocks(graph, 2), mine), mine, expected, theirs)


def test_attention_dropout_keeps_the_mean():
    graph, x = academic(), features()
    model = make(RGAT, graph, attention_dropout=0.5, num_layers=1)
    blocks = build_full_hetero_blocks(graph, 1)
    exact = model.eval()(blocks, x)
    torch.manual_seed(0)
    model.train()
    outs = torch.stack([model(blocks, x) for _ in range(500)])
    error = (outs.mean(0) - exact).abs() / (outs.std(0) / 500**0.5 + 1e-9)
    assert error.max() < 6
