"""DGL's layers and message functions on blocks of the DGL loader, and on DGL's own blocks.

DGL's blocks are made of the edges of the loader's, in the same order. Results and gradients are
equal to the bit, since DGL adds up the edges of a node in this order.
"""

import inspect
import re

import pytest
import torch
from dgl_or_skip import dgl
from torch.nn import Linear

from gcnzc.interop.dgl import DataLoader

nn, fn, loading = dgl.nn.pytorch, dgl.function, dgl.dataloading
NODES = {"user": 40, "item": 50, "shop": 5}
BUYS, BOUGHT = ("user", "buys", "item"), ("item", "bought", "user")
LIKES, SELLS = ("user", "likes", "user"), ("shop", "sells", "item")
WIDTH = 4


def nodes(layer, block, x, edges):
    return layer(block, x)


def alone(layer, block, x, edges):
    return layer(block, x)


def ends(layer, block, x, edges):
    return layer(block, (x, x[: block.num_dst_nodes()]))


def edges(layer, block, x, edges):
    return layer(block, x, edges)


def weights(layer, block, x, edges):
    return layer(block, x, edge_weight=edges[:, 0])


def types(block, count):
    return torch.arange(count, dtype=torch.int64) % 3


def edge_types(layer, block, x, edges):
    return layer(block, x, types(block, block.num_edges()))


def all_types(layer, block, x, edges):
    kinds = types(block, block.num_src_nodes()), types(block, block.num_edges())
    return layer(block, x, *kinds)


def ends_and_edges(layer, block, x, edges):
    return layer(block, (x, x[: block.num_dst_nodes()]), edges)


def only_weights(layer, block, x, edges):
    return layer(block, edges[:, 0].sigmoid())


ANY = {"allow_zero_in_degree": True}
# how to create a layer, and how to call it
LAYERS = [
    (lambda: nn.AGNNConv(**ANY), nodes),
    (lambda: nn.CFConv(WIDTH, WIDTH, 5, 2), edges),
    (lambda: nn.DotGatConv(WIDTH, 2, 2, **ANY), alone),
    (lambda: nn.DotGatConv((WIDTH, WIDTH), 2, 2, **ANY), ends),
    (lambda: nn.EGATConv(WIDTH, WIDTH, 3, 2, 2), ends_and_edges),
    (lambda: nn.EdgeConv(WIDTH, 3, **ANY), nodes),
    (lambda: nn.EdgeGATConv(WIDTH, WIDTH, 3, 2, **ANY), edges),
    (lambda: nn.EdgeWeightNorm("both"), only_weights),
    (lambda: nn.EdgeWeightNorm("right"), only_weights),
    (lambda: nn.GATConv(WIDTH, 3, 1, **ANY), nodes),
    (lambda: nn.GATConv(WIDTH, 3, 2, residual=True, **ANY), nodes),
    (lambda: nn.GATConv(WIDTH, 3, 2, **ANY), weights),
    (lambda: nn.GATv2Conv(WIDTH, 3, 2, **ANY), nodes),
    (lambda: nn.GINConv(Linear(WIDTH, 3), "sum"), nodes),
    (lambda: nn.GINConv(Linear(WIDTH, 3), "mean"), weights),
    (lambda: nn.GINConv(Linear(WIDTH, 3), "max", learn_eps=True), nodes),
    (lambda: nn.GINEConv(Linear(WIDTH, 3)), edges),
    (lambda: nn.GMMConv(WIDTH, 3, WIDTH, 2, "mean", **ANY), edges),
    (lambda: nn.GraphConv(WIDTH, 3, "both", **ANY), nodes),
    (lambda: nn.GraphConv(WIDTH, 3, "left", **ANY), nodes),
    (lambda: nn.GraphConv(WIDTH, 3, "none", **ANY), weights),
    (lambda: nn.HGTConv(WIDTH, 2, 2, 3, 3), all_types),
    (lambda: nn.NNConv(WIDTH, 3, Linear(WIDTH, 3 * WIDTH), "max"), edges),
    (lambda: nn.RelGraphConv(WIDTH, 3, 3), edge_types),
    (lambda: nn.RelGraphConv(WIDTH, 3, 3, "basis", 2), edge_types),
    (lambda: nn.RelGraphConv(WIDTH, WIDTH, 3, "bdd", 2), edge_types),
    (lambda: nn.SAGEConv(WIDTH, 3, "mean"), nodes),
    (lambda: nn.SAGEConv(WIDTH, 3, "gcn"), nodes),
    (lambda: nn.SAGEConv(WIDTH, 3, "pool"), nodes),
    (lambda: nn.SAGEConv(WIDTH, 3, "lstm"), nodes),
    (lambda: nn.SAGEConv(WIDTH, 3, "mean"), weights),
    (lambda: nn.Sequential(nn.GraphConv(WIDTH, 3, **ANY)), nodes),
]


TAKES_NO_BLOCK = (
    # they read data of the nodes of a graph with one node type
    "APPNPConv AtomicConv ChebConv DGNConv EGNNConv GCN2Conv GatedGCNConv GatedGraphConv "
    "GroupRevRes LabelPropagation PNAConv SGConv TAGConv TWIRLSConv TWIRLSUnfoldingAndAttention "
    # they read out whole graphs
    "AvgPooling GlobalAttentionPooling MaxPooling Set2Set SetTransformerDecoder "
    "SetTransformerEncoder SortPooling SumPooling WeightAndSum "
    # they need the package pylibcugraphops
    "CuGraphGATConv CuGraphRelGraphConv CuGraphSAGEConv "
    # they train or explain a model of a whole graph
    "DeepWalk GNNExplainer HeteroGNNExplainer HeteroPGExplainer HeteroSubgraphX MetaPath2Vec "
    "PGExplainer SubgraphX "
    # their arguments are tensors
    "BiasedMHA DegreeEncoder DenseChebConv DenseGraphConv DenseSAGEConv EGTLayer EdgePredictor "
    "GraphormerLayer HeteroEmbedding HeteroLinear JumpingKnowledge KNNGraph LapPosEncoder "
    "PathEncoder RadiusGraph SegmentedKNNGraph SpatialEncoder SpatialEncoder3d TransE TransR "
    "TypedLinear WeightBasis"
)
TYPED = {"HeteroGraphConv"}


def permuted(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def pairs(src, dst, count):
    """Random edges to each node, and `count` others; not in the order of their destinations."""
    random = torch.Generator().manual_seed(count)
    targets = torch.cat([torch.arange(NODES[dst]), torch.arange(count) % NODES[dst]])
    sources = torch.randint(NODES[src], (len(targets),), generator=random)
    return sources, targets[permuted(len(targets))]


def sampled(graph, seeds, fanouts, idtype):
    """The blocks of a minibatch of gcnzc's loader."""
    sampler = loading.NeighborSampler(fanouts)
    loader = DataLoader(graph.astype(idtype), seeds, sampler, batch_size=10, seed=0, threads=1)
    assert loader.sampler_library == "gcnzc"
    return next(iter(loader))[-1]


# other tests of the loaders have ids of 32 bits, too
SLOW_INT32 = pytest.param(torch.int32, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[torch.int64, SLOW_INT32], ids=str)
def blocks(request):
    graph = dgl.graph(pairs("item", "item", 200))
    return sampled(graph, permuted(NODES["item"]), [4, 3], request.param)


@pytest.fixture(scope="module")
def pair_graphs(blocks):
    graph = dgl.graph(pairs("item", "item", 200)).astype(blocks[0].idtype)
    sampler = loading.as_edge_prediction_sampler(
        loading.NeighborSampler([2]), negative_sampler=loading.negative_sampler.Uniform(2)
    )
    loader = DataLoader(graph, permuted(graph.num_edges()), sampler, batch_size=20, threads=1)
    _, positive, negative, _ = next(iter(loader))
    return positive, negative


@pytest.fixture(scope="module", params=[torch.int64, SLOW_INT32], ids=str)
def typed_blocks(request):
    counts = {BUYS: 200, BOUGHT: 150, LIKES: 100, SELLS: 50}
    edges = {each: pairs(each[0], each[2], count) for each, count in counts.items()}
    graph = dgl.heterograph(edges, NODES)
    # seeds of a minibatch are users and items; no shop is sampled for those items
    seeds = {"user": permuted(NODES["user"])[:6], "item": permuted(NODES["item"])[:4]}
    fanouts = [4, {each: 3 * (each != SELLS) for each in counts}]
    found = sampled(graph, seeds, fanouts, request.param)
    assert [all(own.num_edges(each) for each in counts) for own in found] == [True, False]
    return found


def as_dgl(block):
    """DGL's own block, or graph, of the edges of one of gcnzc's loader."""
    if not block.is_block:
        return dgl.graph(block.edges(order="eid"), num_nodes=block.num_nodes(), idtype=block.idtype)
    return dgl.create_block(
        {each: block.edges(etype=each, order="eid") for each in block.canonical_etypes},
        {kind: block.num_src_nodes(kind) for kind in block.srctypes},
        {kind: block.num_dst_nodes(kind) for kind in block.dsttypes},
        idtype=block.idtype,
    )


def numbers(*shape):
    random = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=random).requires_grad_()


def check_equal(compute, block, *shapes):
    """Compare what `compute` returns for a block, and all gradients, with those for DGL's block.

    Args:
        compute: is given a block and inputs, and returns outputs and parameters.
        block: of gcnzc's loader.
        shapes: of the inputs.
    """
    results = []
    for own in (block, as_dgl(block)):
        torch.manual_seed(1)
        inputs = [numbers(*shape) for shape in shapes]
        try:
            outputs, parameters = compute(own, *inputs)
            sum((output * output).sum() for output in outputs if output.requires_grad).backward()
        # some layers of DGL reject edge types without edges
        except (RuntimeError, dgl.DGLError, dgl.base.DGLWarning) as error:
            assert not all(block.num_edges(each) for each in block.canonical_etypes)
            results.append([type(error), str(error)])
        else:
            results.append([*outputs, *(given.grad for given in (*inputs, *parameters))])
    for ours, theirs in zip(*results, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        else:
            assert ours == theirs


def label(value):
    """A test's name: that of the layer."""
    return type(value()).__name__ if value.__name__ == "<lambda>" else value.__name__


def test_each_layer_is_tested_or_takes_no_block():
    classes = {name: each for name, each in vars(nn).items() if inspect.isclass(each)}
    modules = {name for name, each in classes.items() if issubclass(each, torch.nn.Module)}
    tested, others = {label(create) for create, _ in LAYERS} | TYPED, {*TAKES_NO_BLOCK.split()}
    assert not tested & others
    assert tested | others == modules


def list_outputs(outputs, kind=None):
    """Outputs of layers; some also return features of edges, or attention."""
    return [part for own in outputs for part in (own if isinstance(own, tuple) else (own,))]


@pytest.mark.parametrize(("create", "call"), LAYERS, ids=label)
def test_layers_equal_those_on_dgls_blocks(blocks, create, call):
    def compute(block, x, edges):
        layer = create()
        return list_outputs([call(layer, block, x, edges)]), layer.parameters()

    for block in blocks:
        inputs = (block.num_src_nodes(), WIDTH), (block.num_edges(), WIDTH)
        check_equal(compute, block, *inputs)


# the arguments after the nodes' features of a layer of one edge type
ARGUMENTS = {
    nodes: lambda edges: ((), {}),
    ends: lambda edges: ((), {}),
    edges: lambda edges: ((edges,), {}),
    ends_and_edges: lambda edges: ((edges,), {}),
    weights: lambda edges: ((), {"edge_weight": edges[:, 0]}),
}


@pytest.mark.parametrize(
    ("create", "call"), [own for own in LAYERS if own[1] in ARGUMENTS], ids=label
)
def test_layers_of_each_edge_type_equal_those_on_dgls_blocks(typed_blocks, create, call):
    def compute(block, *inputs):
        x = dict(zip(block.srctypes, inputs, strict=False))
        edges = dict(zip(block.etypes, inputs[len(x) :], strict=True))
        arguments = {each: ARGUMENTS[call](own) for each, own in edges.items()}
        layer = nn.HeteroGraphConv({each: create() for each in block.etypes}, list_outputs)
        args, kwargs = ({each: own[n] for each, own in arguments.items()} for n in (0, 1))
        found = layer(block, x, mod_args=args, mod_kwargs=kwargs)
        return [part for own in found.values() for part in own], layer.parameters()

    for block in typed_blocks:
        inputs = [(block.num_src_nodes(kind), WIDTH) for kind in block.srctypes]
        inputs += [(block.num_edges(each), WIDTH) for each in block.canonical_etypes]
        check_equal(compute, block, *inputs)


BINARY = sorted(name for name in vars(fn) if re.fullmatch("[uve]_[a-z]+_[uve]", name))
MESSAGES = ["copy_u", "copy_e", *BINARY]
REDUCERS = ["sum", "mean", "max", "min"]


def message(name):
    return getattr(fn, name)(*(["h", "h"] if name in BINARY else ["h"]), "m")


def frames_of(graph):
    """Data of the nodes and of the edges; of a block, of the sources, destinations and edges."""
    return [*graph._node_frames, *graph._edge_frames]


def set_features(graph, inputs):
    for frame, rows in zip(frames_of(graph), inputs, strict=True):
        frame["h"] = rows


def shapes_of(graph):
    return [(frame.num_rows, WIDTH) for frame in frames_of(graph)]


def test_all_message_functions_and_reducers_are_tested():
    assert len(BINARY) == 6 * len(["add", "sub", "mul", "div", "dot"])
    builtin = {*MESSAGES, *REDUCERS}
    assert builtin == {name for name, each in vars(fn).items() if inspect.isfunction(each)}


@pytest.mark.parametrize("name", MESSAGES)
def test_message_functions_equal_those_on_dgls_blocks(blocks, pair_graphs, name):
    def compute(block, *inputs):
        set_features(block, inputs)
        outputs = []
        for reducer in REDUCERS:
            block.update_all(message(name), getattr(fn, reducer)("m", "out"))
            outputs.append(block.dstdata["out"])
        block.apply_edges(message(name))
        return [*outputs, block.edata["m"]], []

    for block in (*blocks, *pair_graphs):
        check_equal(compute, block, *shapes_of(block))


@pytest.mark.parametrize("name", MESSAGES)
def test_typed_message_functions_equal_those_on_dgls_blocks(typed_blocks, name):
    def compute(block, *inputs):
        set_features(block, inputs)
        outputs = []
        for reducer in REDUCERS:
            step = message(name), getattr(fn, reducer)("m", "out")
            block.multi_update_all(dict.fromkeys(block.canonical_etypes, step), reducer)
            outputs += block.dstdata["out"].values()
        for each in block.canonical_etypes:
            block.apply_edges(message(name), etype=each)
            outputs.append(block.edges[each].data["m"])
        return outputs, []

    for block in typed_blocks:
        check_equal(compute, block, *shapes_of(block))


def test_functions_of_users_equal_those_on_dgls_blocks(blocks):
    def compute(block, *inputs):
        set_features(block, inputs)
        block.update_all(
            lambda edges: {"m": edges.src["h"] * edges.data["h"] - edges.dst["h"]},
            lambda nodes: {"out": nodes.mailbox["m"].cumsum(1)[:, -1]},
        )
        return [block.dstdata["out"], dgl.nn.functional.edge_softmax(block, inputs[-1])], []

    for block in blocks:
        check_equal(compute, block, *shapes_of(block))
