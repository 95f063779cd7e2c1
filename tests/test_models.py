"""Models against dense computations of their formulas, and layer by layer against blocks."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gcnzc import models
from gcnzc.graph import Graph
from gcnzc.sampler import Sampler
from gcnzc.table import FeatureTable

MODELS = {
    "sage": lambda *sizes, **options: models.SAGE(*sizes, batch_norm=True, **options),
    "gcn": models.GCN,
    "gat": lambda *sizes, **options: models.GAT(*sizes, heads=3, **options),
}


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def random_graph(num_nodes: int = 60, num_edges: int = 300) -> Graph:
    """A graph with hubs, with some nodes that have no in-edges and one that has no edges at all."""
    src = torch.randint(num_nodes - 1, (num_edges,))
    dst = (torch.rand(num_edges) ** 3 * (num_nodes - 6)).long()
    apart = src != dst
    return Graph.from_edges(src[apart], dst[apart], num_nodes)


def dense(graph: Graph) -> Tensor:
    """A[t, s]: how many edges s -> t."""
    src, dst = graph.edges()
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put((dst.long(), src.long()), torch.ones(()).double(), accumulate=True)


def made(name: str, *sizes: int, **options) -> models.Model:
    """A model in float64 whose parameters, biases and running statistics too, are all at random."""
    model = MODELS[name](*sizes, **options).double()
    with torch.no_grad():
        for part in (*model.parameters(), *model.buffers()):
            if part.is_floating_point():
                part.copy_(torch.rand_like(part) - 0.3 if part.dim() > 1 else torch.rand_like(part))
    return model


def sage_by_hand(model: models.SAGE, adjacency: Tensor, x: Tensor) -> Tensor:
    mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    for index, layer in enumerate(model.layers):
        x = mean @ x @ layer.neighbours.weight.T + layer.neighbours.bias + x @ layer.own.weight.T
        if index < len(model.layers) - 1:
            norm = model.norms[index]
            x = (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
            x = (x * norm.weight + norm.bias).clamp(min=0)
    return x


def gcn_by_hand(model: models.GCN, adjacency: Tensor, x: Tensor) -> Tensor:
    looped = adjacency + torch.eye(len(x)).double()
    root = looped.sum(1).pow(-0.5)
    propagate = root[:, None] * looped * root[None, :]
    for index, layer in enumerate(model.layers):
        x = propagate @ x @ layer.weight.T + layer.bias
        x = x if index == len(model.layers) - 1 else x.clamp(min=0)
    return x


def gat_by_hand(model: models.GAT, adjacency: Tensor, x: Tensor) -> Tensor:
    looped = adjacency + torch.eye(len(x)).double()
    for index, layer in enumerate(model.layers):
        outs = []
        for h in range(layer.heads):
            z = x @ layer.weight[h].T
            score = z @ layer.source_attention[h] + (z @ layer.target_attention[h])[:, None]
            # an edge that is there twice counts twice
            weight = looped * functional.leaky_relu(score, 0.2).exp()
            outs.append(weight / weight.sum(1, keepdim=True) @ z)
        out = torch.cat(outs, 1) if layer.concatenate else torch.stack(outs).mean(0)
        out = out + layer.bias + x @ layer.skip.weight.T + layer.skip.bias
        x = out if index == len(model.layers) - 1 else functional.elu(out)
    return x


BY_HAND = {"sage": sage_by_hand, "gcn": gcn_by_hand, "gat": gat_by_hand}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # OGB's table: ogbn-products with SAGE, GCN, GAT; ogbn-arxiv with SAGE
        (lambda: models.SAGE(100, 256, 47), 206_895),
        (lambda: models.GCN(100, 256, 47), 103_727),
        (lambda: models.GAT(100, 128, 47), 751_574),
        (lambda: models.SAGE(128, 256, 40, batch_norm=True), 218_664),
    ],
)
def test_has_as_many_parameters_as_ogb_says(model, count):
    assert parameters(model()) == count


def test_cora_recipe_of_gat_has_the_parameters_of_the_paper():
    model = models.GAT(1433, 8, 7, 2, heads=8, output_heads=1, skip=False)
    assert parameters(model) == 1433 * 64 + 3 * 64 + 64 * 7 + 3 * 7


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(7, 5, 3), (3, 8, 4)])
def test_full_neighbourhoods_equal_the_formula(name, sizes):
    graph = random_graph()
    model = made(name, *sizes).eval()
    x = torch.randn(graph.num_nodes, sizes[0]).double()
    expected = BY_HAND[name](model, dense(graph), x)
    seeds = torch.tensor([3, 0, 59, 17, 55])
    batch = Sampler(graph, [-1, -1, -1]).sample(seeds, epoch=0)
    torch.testing.assert_close(model(batch.blocks, x[batch.nodes]), expected[seeds])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(7, 5, 3), (3, 8, 4)])
def test_inference_equals_the_formula(name, sizes):
    graph = random_graph()
    model = made(name, *sizes).eval()
    x = torch.randn(graph.num_nodes, sizes[0]).double()
    expected = BY_HAND[name](model, dense(graph), x)
    found = models.inference(model, graph, FeatureTable(x), batch_nodes=16)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_blocks_with_all_neighbours(name):
    graph = random_graph(400, 3000)
    model = made(name, 20, 16, 5).float().eval()
    x = torch.randn(400, 20)
    batch = Sampler(graph, [-1, -1, -1]).sample(torch.arange(400), epoch=0)
    expected = model(batch.blocks, x[batch.nodes])
    found = models.inference(model, graph, FeatureTable(x), batch_nodes=64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_features", [3, 30])
def test_inference_for_some_nodes(name, in_features):
    """Nodes in any order, twice too; and hidden rows only of what they depend on."""
    # a chain, of which the last nodes need little
    graph = Graph.from_edges(torch.arange(99), torch.arange(1, 100), 100)
    model = made(name, in_features, 8, 4)
    x = torch.randn(100, in_features).double()
    nodes = torch.tensor([40, 7, 40, 99, 0], dtype=torch.int32)
    whole = models.inference(model, graph, FeatureTable(x))
    seen = []
    found = models.inference(
        model, graph, FeatureTable(x), nodes=nodes, progress=lambda *step: seen.append(step)
    )
    torch.testing.assert_close(found, whole[nodes.long()])
    hidden = [{40, 7, 99, 0, 39, 6, 98}, {40, 7, 99, 0, 39, 6, 98, 38, 5, 97}]
    assert seen[-1] == (5 + len(hidden[0]) + len(hidden[1]),) * 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["half", "sparse", "rows apart"])
@pytest.mark.parametrize("in_features", [3, 30])
@pytest.mark.parametrize("some", [False, True])
def test_inference_reads_any_table(name, kind, in_features, some):
    graph = random_graph()
    model = made(name, in_features, 8, 4).float()
    x = torch.randint(-2, 3, (60, in_features)).float()
    rows = {
        "half": x.half(),
        "rows apart": torch.cat([x, torch.full((60, 3), torch.nan)], 1)[:, :in_features],
    }.get(kind)
    if kind == "sparse":
        at = x.nonzero(as_tuple=True)
        offsets = torch.bincount(at[0], minlength=60).cumsum(0)
        rows = torch.sparse_csr_tensor(
            functional.pad(offsets, (1, 0)), at[1], x[at], x.shape, check_invariants=True
        )
    nodes = torch.tensor([3, 50, 59]) if some else None
    expected = models.inference(model, graph, FeatureTable(x), nodes=nodes)
    found = models.inference(model, graph, FeatureTable(rows), nodes=nodes, batch_nodes=7)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_order_of_map_and_sum_does_not_matter(name, monkeypatch):
    graph = random_graph()
    model = made(name, 6, 4, 3)
    batch = Sampler(graph, [4, 3, 2]).sample(torch.tensor([3, 50, 59]), epoch=0)
    x = torch.randn(len(batch.nodes), 6).double()
    results = []
    for first in (False, True):
        monkeypatch.setattr(models.Layer, "maps_first", lambda *_, first=first: first)
        model.zero_grad()
        rows = x.clone().requires_grad_()
        out = model.eval()(batch.blocks, rows)
        out.square().sum().backward()
        results.append([out, rows.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_maps_first_where_it_narrows_rows():
    layer = models.SAGELayer(1433, 16)
    assert layer.maps_first(2708, 2708, 10556)
    assert not models.SAGELayer(100, 256).maps_first(400_000, 50_000, 700_000)
    # of a GAT, not where one row serves all heads
    gat = models.GATLayer(100, 128, 4, concatenate=True, dropout=0.0, skip=False)
    assert not gat.maps_first(400_000, 50_000, 700_000)


def test_gcn_scales_what_it_keeps_up_to_all_neighbours():
    """Of equal neighbours any sample gives what all give."""
    graph = Graph.from_edges(torch.arange(1, 21), torch.zeros(20, dtype=torch.int64), 21)
    model = made("gcn", 5, 8, 3, num_layers=1)
    x = torch.randn(1, 5).double().expand(21, 5).contiguous()
    x[0] = 7
    whole = models.inference(model, graph, FeatureTable(x), nodes=torch.tensor([0]))
    batch = Sampler(graph, [4]).sample(torch.tensor([0]), epoch=0)
    assert batch.blocks[0].num_edges == 4
    torch.testing.assert_close(model(batch.blocks, x[batch.nodes]), whole)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_features", [3, 30])
@pytest.mark.parametrize("some", [False, True])
def test_inference_gathers_for_a_device_as_it_reads_in_place(name, in_features, some, monkeypatch):
    """What runs for a GPU, on the CPU."""
    graph = random_graph()
    model = made(name, in_features, 8, 4)
    table = FeatureTable(torch.randn(60, in_features).double())
    nodes = torch.tensor([3, 50, 59]) if some else None
    expected = models.inference(model, graph, table, nodes=nodes)
    set_up = models._LayerOfAll.__init__

    def never_direct(self, *arguments):
        set_up(self, *arguments)
        self.is_direct = False

    monkeypatch.setattr(models._LayerOfAll, "__init__", never_direct)
    found = models.inference(model, graph, table, nodes=nodes, batch_nodes=7)
    torch.testing.assert_close(found, expected)


def test_inference_cuts_ranges_by_edges_too(monkeypatch):
    graph = random_graph()
    model = made("gat", 5, 4, 3)
    table = FeatureTable(torch.randn(60, 5).double())
    expected = models.inference(model, graph, table)
    monkeypatch.setattr(models, "BATCH_EDGES", 20)
    steps = []
    found = models.inference(model, graph, table, progress=lambda *step: steps.append(step))
    torch.testing.assert_close(found, expected)
    assert len(steps) >= 3 * graph.num_edges / (20 + int(graph.in_degrees().max()))
    assert steps[-1] == (180, 180)


def test_inference_leaves_the_mode_as_it_was():
    graph, model = random_graph(), made("sage", 5, 4, 3, dropout=0.9)
    table = FeatureTable(torch.randn(60, 5).double())
    model.train()
    first = models.inference(model, graph, table)
    assert model.training
    assert torch.equal(models.inference(model.eval(), graph, table), first)
    assert not model.training


def test_dropout_is_for_training_only():
    graph = random_graph()
    options = {"dropout": 0.5, "input_dropout": 0.5, "attention_dropout": 0.5}
    model = made("gat", 8, 8, 3, **options)
    batch = Sampler(graph, [-1] * 3).sample(torch.arange(60), epoch=0)
    x = torch.randn(60, 8).double()[batch.nodes]
    model.eval()
    assert torch.equal(model(batch.blocks, x), model(batch.blocks, x))
    for name in options:
        other = made("gat", 8, 8, 3, **{key: 0.5 * (key == name) for key in options})
        assert not torch.equal(other(batch.blocks, x), other(batch.blocks, x)), name


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_features_are_widened(name):
    graph = random_graph()
    model = made(name, 5, 4, 3).float().eval()
    batch = Sampler(graph, [3, 3, 3]).sample(torch.arange(5), epoch=0)
    x = torch.randn(len(batch.nodes), 5).half()
    assert torch.equal(model(batch.blocks, x), model(batch.blocks, x.float()))


@pytest.mark.parametrize("name", MODELS)
def test_reset_draws_all_parameters_anew(name):
    model = made(name, 5, 4, 3)
    torch.manual_seed(1)
    model.reset_parameters()
    first = [p.clone() for p in model.parameters()]
    assert all(p.isfinite().all() for p in first)
    # weights lie within Glorot and Bengio's bounds, or those of torch's linear map
    assert all(p.abs().max() <= 6**0.5 for p in first)
    torch.manual_seed(2)
    model.reset_parameters()
    weights = [(p, q) for p, q in zip(model.parameters(), first, strict=True) if p.dim() > 1]
    assert not any(torch.equal(p, q) for p, q in weights)


def test_says_what_does_not_fit():
    graph, model = random_graph(), models.SAGE(5, 4, 3, 2)
    table = FeatureTable(torch.randn(60, 5))
    batch = Sampler(graph, [3, 3, 3]).sample(torch.arange(5), epoch=0)
    x = table.gather(batch.nodes)
    with pytest.raises(ValueError, match="3 blocks for a model of 2 layers\n\nhint: give as many"):
        model(batch.blocks, x)
    with pytest.raises(ValueError, match="features of 6 columns for a model of 5\n\nhint:"):
        model(batch.blocks[:2], torch.randn(len(x), 6))
    with pytest.raises(ValueError, match=r"4 rows of features for a first block of \d+ sources"):
        model(batch.blocks[:2], x[:4])
    with pytest.raises(ValueError, match="features of 6 columns for a model of 5\n\nhint:"):
        models.inference(model, graph, FeatureTable(torch.randn(60, 6)))
    with pytest.raises(ValueError, match="59 rows of features for a graph of 60 nodes\n\nhint:"):
        models.inference(model, graph, FeatureTable(torch.randn(59, 5)))
    with pytest.raises(ValueError, match="60, but the graph has 60 nodes"):
        models.inference(model, graph, table, nodes=torch.tensor([60]))
    with pytest.raises(ValueError, match="a model of 0 layers\n\nhint:"):
        models.GCN(5, 4, 3, 0)
    with pytest.raises(ValueError, match=r"input_dropout is 1.0\n\nhint:"):
        models.GCN(5, 4, 3, input_dropout=1.0)
    with pytest.raises(ValueError, match=r"attention_dropout is -0.1\n\nhint:"):
        models.GAT(5, 4, 3, attention_dropout=-0.1)
    with pytest.raises(ValueError, match="0 heads and 0 output heads"):
        models.GAT(5, 4, 3, heads=0)
