"""Options of the models, compared with dense matrix products, in `forward` and in `inference`.

The recipes are those of Luo et al., "Classic GNNs are Strong Baselines", 2024.
"""

import itertools

import pytest
import torch
from by_hand import KINDS, dense, dense_forward, random_graph, randomized
from slow_cases import seeds
from torch import nn
from torch.nn import functional

from gcnzc.features.table import FeatureTable
from gcnzc.models import gnn
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import inference

LAYERS = 3
COMBINATIONS = [
    {"norm": norm, order: True, "residual": residual}
    | {"input_linear": input_linear, "output_linear": output_linear, "jumping": jumping}
    for norm, order, residual, input_linear, (output_linear, jumping) in itertools.product(
        ("none", "batch", "layer"),
        ("post_norm", "pre_norm", "pre_activation"),
        (False, True),
        (False, True),
        ((False, "none"), (True, "none"), (True, "sum"), (True, "cat")),
    )
    if order != "pre_norm" or norm != "none"
    if order != "pre_activation" or (input_linear and output_linear)
]
for combination in COMBINATIONS:
    # the default order
    combination.pop("post_norm", None)
# a third of them has each value of each option
EACH_PART = pytest.mark.parametrize("part", seeds(3, 1))


@EACH_PART
@pytest.mark.parametrize("name", KINDS)
def test_all_combinations_of_options_equal_their_formulas(name, part):
    graph = random_graph()
    x, seeds = torch.randn(graph.num_nodes, 7).double(), torch.tensor([3, 0, 59, 17, 55])
    batch = Sampler(graph, [-1] * LAYERS).sample(seeds, epoch=0)
    for options in COMBINATIONS[part::3]:
        model = randomized(KINDS[name](7, 5, 3, LAYERS, **options)).eval()
        with torch.no_grad():
            expected = dense_forward(model, dense(graph), x, **options)
            of_batch = model(batch.blocks, x[batch.nodes])
        # layer-wise inference, for all nodes and for some
        whole = inference(model, graph, FeatureTable(x), batch_nodes=16)
        part = inference(model, graph, FeatureTable(x), nodes=seeds)
        for found, right in ((of_batch, expected[seeds]), (whole, expected), (part, whole[seeds])):
            torch.testing.assert_close(found, right, msg=lambda text, o=options: f"{o} {text}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "group"}, "norm is 'group'\n\nhint: one of none, batch, layer"),
        ({"pre_norm": True}, "pre_norm has no effect with norm none\n\nhint:"),
        ({"jumping": "sum"}, "jumping sum needs output_linear"),
        ({"pre_activation": True}, "pre_activation needs input_linear and output_linear"),
        ({"pre_activation": True, "pre_norm": True, "norm": "batch"}, "includes pre_norm"),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_contradictions_are_rejected(name, options, message):
    with pytest.raises(ValueError, match=message):
        KINDS[name](5, 4, 3, **options)
    if "GAT" in KINDS[name].__name__:
        with pytest.raises(ValueError, match="output_heads has no effect with output_linear"):
            KINDS[name](5, 4, 3, output_heads=1, output_linear=True)


def test_gin_equals_pygs_convolution_and_scales_sums_of_samples():
    conv = pytest.importorskip("torch_geometric.nn").GINConv
    graph = random_graph()
    layer = gnn.GINLayer(7, 5).double()
    pyg_layer = conv(nn.Sequential(layer.first, nn.ReLU(), layer.second))
    x, seeds = torch.randn(60, 7).double(), torch.arange(60)
    with torch.no_grad():
        expected = pyg_layer(x, torch.stack(graph.coo()).long())
        block = Sampler(graph, [-1]).sample(seeds, epoch=0).blocks[0]
        torch.testing.assert_close(layer(block, x, x), expected)
        # with equal rows, the estimate from sampled in-neighbours is exact
        x = torch.ones(60, 7).double()
        expected = pyg_layer(x, torch.stack(graph.coo()).long())
        batch = Sampler(graph, [2]).sample(seeds, epoch=0)
        found = layer(batch.blocks[0], x[batch.nodes], x)
        torch.testing.assert_close(found, expected)


def test_batch_normalization_of_one_row_uses_the_running_statistics():
    graph = random_graph(300, 1500)
    model = gnn.SAGE(7, 4, 3, num_layers=2, norm="batch", output_linear=True, dropout=0.0)
    x, sampler = torch.randn(300, 7), Sampler(graph, [5, 5])
    for step in range(3):
        batch = sampler.sample(torch.arange(100) + 100 * step, epoch=0)
        model(batch.blocks, x[batch.nodes])
    # the last minibatch of an epoch may have one seed
    batch = sampler.sample(torch.tensor([5]), epoch=0)
    before = {name: value.clone() for name, value in model.norms[-1].named_buffers()}
    out = model(batch.blocks, x[batch.nodes])
    functional.cross_entropy(out, torch.tensor([1])).backward()
    assert model.norms[-1].weight.grad.isfinite().all()
    for name, value in model.norms[-1].named_buffers():
        assert torch.equal(value, before[name]), name
