"""Layers are initialized with the distributions of the layers of PyG and DGL."""

import math

import pytest
import torch
from libraries import needs_dgl

from gcnzc.interop.dgl import import_dgl
from gcnzc.models import gnn

IN, OUT, HEADS = 300, 40, 5


def layer_of(kind, init, **options):
    """A hidden layer of a model, with IN input columns and OUT output columns (per head)."""
    model = gnn.__dict__[kind](IN, OUT, 3, num_layers=2, init=init, **options)
    return model.layers[0]


def assert_same_distribution(mine, other):
    """Compare constants, the standard deviation, and the tail of two samples."""
    mine, other = mine.detach().flatten(), other.detach().flatten()
    assert mine.shape == other.shape
    if other.std() == 0:
        assert torch.equal(mine, other)
        return
    # the standard error of a deviation is below 1 / sqrt(2 n)
    bound = 6 / math.sqrt(len(other))
    assert mine.std().item() == pytest.approx(other.std().item(), rel=bound)
    # the largest of many uniform values is near their limit; that of normal ones is not
    if len(other) > 1000:
        tails = [(each.abs().max() / each.std()).item() for each in (mine, other)]
        assert tails[0] == pytest.approx(tails[1], rel=0.25)


def weights_of(name, layer, library):
    """Pairs of our parameter and the library's, by meaning."""
    theirs = dict(library.named_parameters())
    names = {
        ("SAGE", "pyg"): {"neighbours.weight": "lin_l.weight", "neighbours.bias": "lin_l.bias"}
        | {"own.weight": "lin_r.weight"},
        ("GCN", "pyg"): {"weight": "lin.weight", "bias": "bias"},
        ("GAT", "pyg"): {"weight": "lin.weight", "source_attention": "att_src"}
        | {"target_attention": "att_dst", "bias": "bias"},
        ("GATv2", "pyg"): {"source.weight": "lin_l.weight", "source.bias": "lin_l.bias"}
        | {"target.weight": "lin_r.weight", "attention": "att", "bias": "bias"},
        ("SAGE", "dgl"): {"neighbours.weight": "fc_neigh.weight", "own.weight": "fc_self.weight"}
        | {"neighbours.bias": "fc_self.bias"},
        ("GCN", "dgl"): {"weight": "weight", "bias": "bias"},
        ("GAT", "dgl"): {"weight": "fc.weight", "source_attention": "attn_l"}
        | {"target_attention": "attn_r", "skip.weight": "res_fc.weight"},
        ("GATv2", "dgl"): {"source.weight": "fc_src.weight", "source.bias": "fc_src.bias"}
        | {"target.weight": "fc_dst.weight", "attention": "attn", "skip.weight": "res_fc.weight"},
    }[name, "dgl" if "dgl" in type(library).__module__ else "pyg"]
    return [(layer.get_parameter(mine), theirs[other]) for mine, other in names.items()]


each_kind = pytest.mark.parametrize("kind", ["SAGE", "GCN", "GAT", "GATv2"])


@each_kind
def test_as_in_pyg(kind):
    nn = pytest.importorskip("torch_geometric.nn")
    options = {"heads": HEADS} if "GAT" in kind else {}
    other = getattr(nn, f"{kind}Conv")(IN, OUT, **options)
    for pair in weights_of(kind, layer_of(kind, "pyg", **options), other):
        assert_same_distribution(*pair)


@needs_dgl
@each_kind
def test_as_in_dgl(kind):
    nn = import_dgl().nn.pytorch
    if kind in ("SAGE", "GCN"):
        other = nn.SAGEConv(IN, OUT, "mean") if kind == "SAGE" else nn.GraphConv(IN, OUT)
    else:
        other = getattr(nn, f"{kind}Conv")(IN, OUT, HEADS, residual=True)
    options = {"heads": HEADS} if "GAT" in kind else {}
    layer = layer_of(kind, "dgl", **options)
    for pair in weights_of(kind, layer, other):
        assert_same_distribution(*pair)
    if "GAT" in kind:
        assert not layer.bias.any()
        assert not layer.skip.bias.any()


def test_a_reset_keeps_the_initialization_and_the_default_draws_the_same_numbers():
    torch.manual_seed(0)
    model = gnn.SAGE(IN, OUT, 3, init="dgl")
    before = model.layers[0].own.weight.std().item()
    model.reset_parameters()
    assert model.layers[0].own.weight.std().item() == pytest.approx(before, rel=0.05)
    assert before > 1.5 * gnn.SAGE(IN, OUT, 3).layers[0].own.weight.std()
    with pytest.raises(ValueError, match="init"):
        gnn.GCN(IN, OUT, 3, init="kaiming")
