"""Scores of pairs are computed from the outputs of both ends, in chunks of any size."""

import pytest
import torch

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.gnn import SAGE
from gcnzc.models.link import Dot, HadamardMLP, LinkModel
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import inference


@pytest.fixture(params=["dot", "mlp"])
def model(request):
    encoder = SAGE(5, 8, 8, num_layers=2, dropout=0.3)
    return LinkModel(encoder, Dot() if request.param == "dot" else HadamardMLP(8, 2, 0.5))


def test_dot_and_mlp_by_hand():
    source, target = torch.randn(2, 7, 4)
    torch.testing.assert_close(Dot()(source, target), torch.einsum("pd,pd->p", source, target))
    mlp = HadamardMLP(4, 2)
    first, second = mlp.layers
    expected = second((first(source * target)).clamp(min=0))[:, 0]
    torch.testing.assert_close(mlp(source, target), expected)
    assert HadamardMLP(4, 1)(source, target).shape == (7,)
    with pytest.raises(ValueError, match="num_layers is 0, but must be at least 1"):
        HadamardMLP(4, 0)
    with pytest.raises(ValueError, match="dropout"):
        HadamardMLP(4, 2, dropout=2.0)


def test_a_batch_gets_logits_for_its_seeds(model):
    src, dst = torch.randint(0, 30, (2, 100))
    graph = Graph.from_edges(src, dst, 30)
    features = torch.randn(30, 5)
    sampler = LinkSampler(Sampler(graph, [-1, -1]), torch.stack([src, dst]), exclude="none")
    batch = sampler.sample(torch.arange(20), 0)
    model.eval()
    logits = model(batch.blocks, features[batch.nodes], batch.pairs)
    rows = inference(model.encoder, graph, FeatureTable(features))
    ids = batch.seeds[batch.pairs]
    torch.testing.assert_close(logits, model.decoder(rows[ids[0]], rows[ids[1]]))
    torch.testing.assert_close(logits.detach(), model.scores(rows, *ids))
    logits.sum().backward()
    assert all(part.grad is not None for part in model.parameters())


def test_weights_are_reset(model):
    before = [part.clone() for part in model.parameters()]
    model.reset_parameters()
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
