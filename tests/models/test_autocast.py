"""Models under `torch.autocast`: rows in half precision, parameters and gradients in float32."""

import pytest
import torch
from by_hand import KINDS, MODELS, made, random_graph
from torch.nn import functional

from gcnzc.models import gnn
from gcnzc.models.layers import Layer
from gcnzc.models.link import HadamardMLP, LinkModel
from gcnzc.sampling.full import build_full_blocks, find_layer_nodes
from gcnzc.sampling.neighbor import Sampler

HALF = [torch.bfloat16, torch.float16]
# differences to float32, relative to the norm
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.004}
DEEP = {"residual": True, "norm": "layer", "input_linear": True, "output_linear": True}
OPTIONS = {
    "plain": {},
    "deep": DEEP | {"jumping": "cat"},
    "pre-norm": {"pre_norm": True, "norm": "batch"},
    "pre-activation": DEEP | {"pre_activation": True},
}


def gradients(model, blocks, x, y, dtype=None):
    """The logits, the gradients, and the dtypes of the layers' outputs."""
    dtypes = set()
    hooks = [
        module.register_forward_hook(lambda layer, given, out: dtypes.add(out.dtype))
        for module in model.modules()
        if isinstance(module, Layer)
    ]
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(blocks, x)
    functional.cross_entropy(logits.float(), y).backward()
    for hook in hooks:
        hook.remove()
    return logits.detach(), [p.grad.clone() for p in model.parameters()], dtypes


def distance(one, other):
    return float((one.float() - other).norm() / other.norm().clamp(min=1e-3))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_in_half_precision_and_gradients_close_to_float32(name, options, dtype):
    torch.manual_seed(1)
    graph = random_graph()
    # with ReLU, rounding would switch elements between 0 and a value
    model = KINDS[name](12, 16, 4, dropout=0.0, activation="elu", **OPTIONS[options])
    x, y = torch.randn(60, 12), torch.arange(60) % 4
    seeds = torch.arange(60)
    whole = build_full_blocks(graph, find_layer_nodes(graph, seeds, 3))
    for blocks in (Sampler(graph, [4, 4, 4]).sample(seeds, epoch=0).blocks, whole):
        # all nodes are seeds, so that these are the nodes of all blocks, in order
        expected, exact, _ = gradients(model, blocks, x, y)
        logits, found, dtypes = gradients(model, blocks, x, y, dtype)
        assert logits.dtype == dtype
        assert dtypes == {dtype}
        assert all(gradient.dtype == torch.float32 for gradient in found)
        assert distance(logits, expected) < TOLERANCE[dtype]
        whole_gradient, exact_gradient = (
            torch.cat([gradient.flatten() for gradient in each]) for each in (found, exact)
        )
        # the MLP of a GIN layer has a ReLU
        bound = (6 if name == "gin" else 3) * TOLERANCE[dtype]
        assert distance(whole_gradient, exact_gradient) < bound


@pytest.mark.parametrize("name", MODELS)
def test_features_are_converted_once_and_float64_is_not_changed(name):
    model = made(name, 5, 4, 3).eval()
    batch = Sampler(random_graph(), [3, 3, 3]).sample(torch.arange(5), epoch=0)
    x = torch.randn(len(batch.nodes), 5).bfloat16()
    with torch.no_grad():
        expected = model(batch.blocks, x.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(batch.blocks, x.double()), expected)
            model.float()
            assert torch.equal(model(batch.blocks, x), model(batch.blocks, x.float()))


def test_link_models_score_pairs():
    torch.manual_seed(1)
    graph = random_graph()
    model = LinkModel(gnn.SAGE(5, 8, 8, dropout=0.0), HadamardMLP(8))
    batch = Sampler(graph, [3, 3, 3]).sample(torch.arange(10), epoch=0)
    x, pairs = torch.randn(len(batch.nodes), 5), torch.randint(10, (2, 30))
    expected = model(batch.blocks, x, pairs)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch.blocks, x, pairs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.01)
