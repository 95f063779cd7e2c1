"""Layers are initialized with the distributions of the layers of PyG and DGL."""

import math

import pytest
import torch
from libraries import needs_dgl

from gcnzc.interop.dgl import import_dgl
from gcnzc.models import gnn

IN, OUT, HEADS = 300, 40, 5


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


# by library and kind: the library's names of our parameters
NAMES = {
    ("pyg", "SAGE"): {"neighbours.weight": "lin_l.weight", "neighbours.bias": "lin_l.bias"}
    | {"own.weight": "lin_r.weight"},
    ("pyg", "GCN"): {"weight": "lin.weight", "bias": "bias"},
    ("pyg", "GAT"): {"weight": "lin.weight", "source_attention": "att_src"}
    | {"target_attention": "att_dst", "bias": "bias"},
    ("pyg", "GATv2"): {"source.weight": "lin_l.weight", "source.bias": "lin_l.bias"}
    | {"target.weight": "lin_r.weight", "attention": "att", "bias": "bias"},
    ("dgl", "SAGE"): {"neighbours.weight": "fc_neigh.weight", "own.weight": "fc_self.weight"}
    | {"neighbours.bias": "fc_self.bias"},
    ("dgl", "GCN"): {"weight": "weight", "bias": "bias"},
    ("dgl", "GAT"): {"weight": "fc.weight", "source_attention": "attn_l"}
    | {"target_attention": "attn_r", "skip.weight": "res_fc.weight"},
    ("dgl", "GATv2"): {"source.weight": "fc_src.weight", "source.bias": "fc_src.bias"}
    | {"target.weight": "fc_dst.weight", "attention": "attn", "skip.weight": "res_fc.weight"},
}


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GAT", "GATv2"])
@pytest.mark.parametrize("library", ["pyg", pytest.param("dgl", marks=needs_dgl)])
def test_as_in_the_library(library, kind):
    options = {"heads": HEADS} if "GAT" in kind else {}
    layer = gnn.__dict__[kind](IN, OUT, 3, num_layers=2, init=library, **options).layers[0]
    if library == "pyg":
        nn = pytest.importorskip("torch_geometric.nn")
        other = getattr(nn, f"{kind}Conv")(IN, OUT, **options)
    elif kind in ("SAGE", "GCN"):
        nn = import_dgl().nn.pytorch
        other = nn.SAGEConv(IN, OUT, "mean") if kind == "SAGE" else nn.GraphConv(IN, OUT)
    else:
        other = getattr(import_dgl().nn.pytorch, f"{kind}Conv")(IN, OUT, HEADS, residual=True)
        assert not layer.bias.any()
        assert not layer.skip.bias.any()
    theirs = dict(other.named_parameters())
    for mine, name in NAMES[library, kind].items():
        assert_same_distribution(layer.get_parameter(mine), theirs[name])


def test_a_reset_keeps_the_initialization_and_the_default_draws_the_same_numbers():
    torch.manual_seed(0)
    model = gnn.SAGE(IN, OUT, 3, init="dgl")
    before = model.layers[0].own.weight.std().item()
    model.reset_parameters()
    assert model.layers[0].own.weight.std().item() == pytest.approx(before, rel=0.05)
    assert before > 1.5 * gnn.SAGE(IN, OUT, 3).layers[0].own.weight.std()
    with pytest.raises(ValueError, match="init"):
        gnn.GCN(IN, OUT, 3, init="kaiming")
